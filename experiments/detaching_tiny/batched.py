"""Many short prompts in one graph, with the product's weights and operations: its gradient is ``grpo_step``'s.

A prompt of a dozen tokens costs ``grpo_step`` as much as one of thousands, and a run here has 32,000 of them. Positions
before ``border`` are evaluated without a graph and are constants: border 0 is prompt_grad=exact, P - 1 is detached.

T positions, B prompts, P positions of a prompt, d model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longstraw.config.architectures import Qwen36Config
from longstraw.group import Group
from longstraw.layers.attention import GatedAttention
from longstraw.layers.delta import GatedDeltaNet
from longstraw.layers.rotary import rotary_angles, rotate
from longstraw.models import build_model
from longstraw.models.decoder import Decoder
from longstraw.ops.conv.reference import causal_conv
from longstraw.ops.delta.reference import gated_delta_rule
from longstraw.step import grpo_step

CLOSE = 1e-4  # relative distance of a parameter's gradient from the product's, in float32


def build(seed: int, vocabulary: int) -> Decoder:
    """Return the tiny hybrid of this experiment: delta and full attention in turn, four layers, 170,000 parameters."""
    config = Qwen36Config(
        name="detaching_tiny", dtype="float32", vocab_size=vocabulary, hidden_size=64, intermediate_size=128,
        num_hidden_layers=4, full_attention_interval=2, max_position_embeddings=2**20, rope_theta=1e4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, chunk=64, response_length=1, initializer_range=0.08,
    )  # fmt: skip
    return build_model(config, seed=seed)


def hidden(model: Decoder, prompts: Tensor, border: int) -> Tensor:
    """Return the hidden states [P - border, B, d] of ``prompts`` [B, P]; positions before ``border`` are constants."""
    tokens, past = prompts.T.contiguous(), None
    if border:
        with torch.no_grad():
            past = evaluate(model, tokens[:border], past, 0)[1]
    return evaluate(model, tokens[border:], past, border)[0]


def logits(model: Decoder, prompts: Tensor, border: int) -> Tensor:
    """Return the logits [B, V] after ``prompts`` [B, P]."""
    return model.lm_head(hidden(model, prompts, border)[-1])


def grpo_loss(logprobs: Tensor, drawn: Tensor, rewards: Tensor) -> Tensor:
    """Return the loss of one-token responses on policy: ``drawn``, ``rewards`` [B, G], ``logprobs`` [B, V]."""
    distances = rewards - rewards.mean(1, keepdim=True)
    advantages = distances / (rewards.std(1, keepdim=True) + 1e-6)
    return -(advantages * logprobs.gather(-1, drawn)).mean()


def distance_from_product(model: Decoder, prompts: Tensor, answers: Tensor, mode: str, seed: int) -> float:
    """Return the largest relative distance of a parameter's gradient from the one that ``grpo_step`` leaves.

    Groups of four random tokens a prompt, one of them right. The model's gradients are cleared.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(model.config.vocab_size, (len(prompts), 4), generator=generator)
    drawn[:, 0] = answers
    rewards = (drawn == answers[:, None]).float()
    model.zero_grad(set_to_none=True)
    for prompt, tokens, reward in zip(prompts, drawn, rewards, strict=True):
        grpo_step(model, Group(prompt, list(tokens[:, None]), reward.tolist()), chunk=64, prompt_grad=mode)
    product = {name: p.grad / len(prompts) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    border = 0 if mode == "exact" else prompts.shape[1] - 1
    grpo_loss(logits(model, prompts, border).log_softmax(-1), drawn, rewards).backward()
    batched = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    assert batched.keys() == product.keys()
    return max(float((batched[name] - x).norm() / x.norm().clamp(min=1e-12)) for name, x in product.items())


def evaluate(model: Decoder, tokens: Tensor, past: list[Any] | None, start: int) -> tuple[Tensor, list[Any]]:
    """Return the hidden states [T, B, d] of ``tokens`` [T, B] from position ``start``, and what is retained then.

    ``past`` is what was retained before ``start``, None at the first position.
    """
    x, kept = F.embedding(tokens, model.model.embed_tokens.weight), []
    for block, before in zip(model.model.layers, past or [None] * len(model.model.layers), strict=True):
        normed = block.input_layernorm(x)
        if isinstance(block.mixer, GatedAttention):
            mixed, after = _attention(block.mixer, normed, before, start)
        else:
            mixed, after = _delta(block.mixer, normed, before)
        kept.append(after)
        x = x + mixed
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.model.norm(x), kept


def _attention(layer: GatedAttention, x: Tensor, past: Any, start: int) -> tuple[Tensor, Any]:
    config, (count, prompts, _) = layer.config, x.shape
    positions = torch.arange(start, start + count)
    angles = rotary_angles(positions, config.rotary_dim, config.rope_theta, dtype=torch.float32)

    def turned(heads: Tensor) -> Tensor:
        return rotate(heads.flatten(1, 2), angles).unflatten(1, (prompts, -1))

    query, gate = layer._query(x)
    query = turned(layer.q_norm(query))
    key = turned(layer.k_norm(layer.k_proj(x).unflatten(-1, (layer.kv_heads, -1))))
    value = layer.v_proj(x).unflatten(-1, (layer.kv_heads, -1))
    if past is not None:
        key, value = torch.cat([past[0], key]), torch.cat([past[1], value])
    seen = torch.ones(count, len(key), dtype=torch.bool).tril(len(key) - count)
    q, k, v = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=layer.head_dim**-0.5, enable_gqa=True)
    assert gate is not None
    return layer.o_proj((out.permute(2, 0, 1, 3) * gate.sigmoid()).flatten(2)), (key, value)


def _delta(layer: GatedDeltaNet, x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Evaluate the prompts as further heads of one sequence."""
    prompts = x.shape[1]
    sizes = [heads * width for heads, width in layer.channels]
    mixed = torch.cat([part.flatten(1) for part in layer.in_proj_qkv(x).split(sizes, -1)], -1)
    weight = torch.cat([part.repeat(prompts, 1) for part in layer.conv1d.weight.squeeze(1).split(sizes)])
    if past is None:
        state = x.new_zeros(prompts * layer.value_heads, layer.key_dim, layer.value_dim)
        past = state, x.new_zeros(layer.taps - 1, mixed.shape[1])
    mixed, tail = causal_conv(mixed, weight, past[1])
    parts = mixed.split([prompts * size for size in sizes], -1)
    q, k, v = (part.unflatten(-1, (-1, width)) for part, (_, width) in zip(parts, layer.channels, strict=True))
    step, beta = layer.in_proj_a(x).flatten(1), layer.in_proj_b(x).flatten(1).sigmoid()
    decay = -layer.A_log.repeat(prompts).exp() * F.softplus(step + layer.dt_bias.repeat(prompts))
    out, state = gated_delta_rule(q, k, v, decay, beta, past[0])
    out = layer.norm(out.unflatten(1, (prompts, -1)), layer.in_proj_z(x).unflatten(-1, (layer.value_heads, -1)))
    return layer.out_proj(out.flatten(2)), (state, tail)
