"""Arithmetic of a step by formula: two operations a multiply-add, matrix products and what is of their order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from longstraw.config import RunConfig, gradient_start, inner_chunk
from longstraw.config.architectures import Glm52Config, Qwen36Config
from longstraw.config.architectures.base import ModelConfig
from longstraw.memory.estimate import glm_5_2, qwen3_6
from longstraw.memory.estimate.sizes import Shape

# A backward takes twice its forward; with every block, and every tile of logits, evaluated again it makes four in all.
WITH_BACKWARD = 4


def step_flops(
    config: RunConfig, *, prompt_positions: int, responses: Sequence[int], prefilled: bool, scored: int
) -> float:
    """Return the arithmetic of one step that trains every parameter, over all ranks.

    ``responses`` are the lengths of all responses; ``prefilled`` whether the prompt was evaluated in this step, and by
    the reference too where there is a KL term; ``scored`` how often all responses were evaluated without a graph.
    Beneath an adapter a third of the backward's products with weights is not made: that is not counted here.
    """
    model, retained = config.model, prompt_positions - 1
    prompts = (1 + bool(config.algorithm.kl_coef)) * prefilled
    total = prompts * prompt_flops(model, 0, retained)
    for response in responses:
        branch = branch_flops(model, retained, response)
        head = head_flops(model, response)
        total += (scored + WITH_BACKWARD) * (branch + head)
    start = gradient_start(retained, config.chunk, config.prompt_grad, config.prompt_grad_window)
    if start is not None:
        total += WITH_BACKWARD * prompt_flops(model, start, retained)
    return float(total)


def prompt_flops(model: ModelConfig, start: int, end: int) -> float:
    """Return one pass over prompt positions [start, end): the last block stops at what its state asks for."""
    return pass_flops(model, start, end) - last_block_saving(model, start, end)


def branch_flops(model: ModelConfig, retained: int, response: int) -> float:
    """Return one pass over a branch, without the head."""
    return pass_flops(model, retained, retained + response)


def head_flops(model: ModelConfig, positions: int) -> float:
    """Return the logits of ``positions``."""
    return 2.0 * positions * model.hidden_size * model.vocab_size


def pass_flops(model: ModelConfig, start: int, end: int) -> float:
    """Return one forward pass of all blocks over positions [start, end)."""
    per_position = linear_flops(model)
    if isinstance(model, Glm52Config):
        indexers = (model.indexer_types or []).count("full")
        attention = model.num_hidden_layers * chosen_flops(model, start, end)
        return (end - start) * per_position + attention + indexers * index_flops(model, start, end)
    assert isinstance(model, Qwen36Config)
    full = model.layer_types.count("full_attention")
    linear = model.num_hidden_layers - full
    per_position += linear * (delta_flops(model) + convolution_flops(model))
    return (end - start) * per_position + full * attention_flops(model, start, end)


def linear_flops(model: ModelConfig) -> float:
    """Return the matrix products with weights, a position: embedding and head are no part of it.

    Of the experts as many as a token goes to. Absorbed into queries and outputs, ``kv_b_proj`` costs what it would.
    """
    total = 0.0
    for name, shape in _block_shapes(model):
        if len(shape) == 2:
            total += 2.0 * prod(shape)
        elif isinstance(model, Glm52Config) and ".experts." in name:
            total += 2.0 * model.num_experts_per_tok * prod(shape[1:])
    return total


def _block_shapes(model: ModelConfig, layer: int | None = None) -> list[tuple[str, Shape]]:
    shapes = glm_5_2.parameter_shapes(model) if isinstance(model, Glm52Config) else None
    if shapes is None:
        assert isinstance(model, Qwen36Config)
        shapes = qwen3_6.parameter_shapes(model)
    prefix = "model.layers." if layer is None else f"model.layers.{layer}."
    return [(name.removeprefix(prefix), shape) for name, shape in shapes if name.startswith(prefix)]


def chosen_flops(model: Glm52Config, start: int, end: int) -> float:
    """Return absorbed latent attention of positions [start, end) to their chosen rows, a layer."""
    rows = _pairs(start, end) - _pairs(max(start, model.index_topk), max(end, model.index_topk))
    rows += model.index_topk * (max(end, model.index_topk) - max(start, model.index_topk))
    return 2.0 * model.num_attention_heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim) * rows


def index_flops(model: Glm52Config, start: int, end: int) -> float:
    """Return the index scores of positions [start, end) over all before them and themselves, an indexer."""
    return 2.0 * model.index_n_heads * (model.index_head_dim + 1) * _pairs(start, end)


def _pairs(start: int, end: int) -> float:
    """Return how often positions [start, end) see a position, their own included."""
    return (end * (end + 1) - start * (start + 1)) / 2


def delta_flops(model: Qwen36Config) -> float:
    """Return the gated delta rule in chunked form, a position and layer, C positions an inner chunk.

    By key heads k k^T and q k^T; by value heads the triangular solve of K + V columns (half of the square), states
    read by keys and by queries, what a chunk adds of its own values, and the state's update.
    """
    keys, values = model.linear_key_head_dim, model.linear_value_head_dim
    chunk = inner_chunk(keys)
    by_key_head = 2 * 2 * chunk * keys
    by_value_head = chunk * (keys + values) + 2 * 2 * keys * values + 2 * chunk * values + 2 * keys * values
    return float(model.linear_num_key_heads * by_key_head + model.linear_num_value_heads * by_value_head)


def convolution_flops(model: Qwen36Config) -> float:
    """Return the causal convolution, a position and layer."""
    channels = 2 * model.linear_num_key_heads * model.linear_key_head_dim
    channels += model.linear_num_value_heads * model.linear_value_head_dim
    return 2.0 * channels * model.linear_conv_kernel_dim


def attention_flops(model: Qwen36Config, start: int, end: int) -> float:
    """Return causal attention of positions [start, end) over all before them and themselves, a layer."""
    return 4.0 * model.num_attention_heads * model.head_dim * _pairs(start, end)


def last_block_saving(model: ModelConfig, start: int, end: int) -> float:
    """Return what the last block leaves out where only its state is wanted."""
    needed: tuple[str, ...]
    if isinstance(model, Glm52Config):
        saved = chosen_flops(model, start, end)
        if model.indexer_types and model.indexer_types[-1] == "full":
            saved += index_flops(model, start, end)
        needed = ("self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk")
    else:
        assert isinstance(model, Qwen36Config)
        full = model.layer_types[-1] == "full_attention"
        saved = attention_flops(model, start, end) if full else 0.0
        # a delta layer's state needs all of its mixer
        needed = ("self_attn.k_proj", "self_attn.v_proj") if full else ("linear_attn",)
    for name, shape in _block_shapes(model, model.num_hidden_layers - 1):
        if name.startswith(needed):
            continue
        if len(shape) == 2:
            saved += 2.0 * (end - start) * prod(shape)
        elif isinstance(model, Glm52Config) and ".experts." in name:
            saved += 2.0 * (end - start) * model.num_experts_per_tok * prod(shape[1:])
    return saved
