"""Arithmetic of a step by formula: two operations a multiply-add, matrix products and what is of their order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from longstraw.budget import qwen3_6
from longstraw.config import RunConfig, inner_chunk
from longstraw.model_config import ModelConfig, Qwen36Config

# A backward takes twice its forward; with every block evaluated again that makes four passes in all.
FORWARD, WITH_BACKWARD = 1, 4


def step_flops(
    config: RunConfig, *, prompt_positions: int, responses: Sequence[int], prefilled: bool, scored: int
) -> float:
    """Return the arithmetic of one step over all ranks.

    ``responses`` are the lengths of all responses; ``prefilled`` whether the prompt was evaluated in this step;
    ``scored`` how often all responses were evaluated without a graph.
    """
    model, retained = config.model, prompt_positions - 1
    total = prompt_flops(model, 0, retained) if prefilled else 0.0
    for response in responses:
        branch = branch_flops(model, retained, response)
        head = head_flops(model, response)
        total += scored * (branch + head) + WITH_BACKWARD * branch + (WITH_BACKWARD - 1) * head + head
    window = config.prompt_grad_window
    if config.prompt_grad == "exact" and window != 0 and retained:
        start = 0 if window is None else max(retained - window, 0) // config.chunk * config.chunk
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
    assert isinstance(model, Qwen36Config)
    full = model.layer_types.count("full_attention")
    linear = model.num_hidden_layers - full
    per_position = linear_flops(model) + linear * (delta_flops(model) + convolution_flops(model))
    return (end - start) * per_position + full * attention_flops(model, start, end)


def linear_flops(model: Qwen36Config) -> float:
    """Return the matrix products with weights, a position: embedding and head are no part of it."""
    shapes = [
        shape for name, shape in qwen3_6.parameter_shapes(model) if name.startswith("model.layers.") and len(shape) == 2
    ]
    return 2.0 * sum(map(prod, shapes))


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
    pairs = (end * (end + 1) - start * (start + 1)) / 2
    return 4.0 * model.num_attention_heads * model.head_dim * pairs


def last_block_saving(model: ModelConfig, start: int, end: int) -> float:
    """Return what the last block leaves out where only its state is wanted."""
    assert isinstance(model, Qwen36Config)
    names: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    saved = 0.0
    if model.layer_types[-1] == "full_attention":  # a delta layer's state needs all of its mixer
        names += ("self_attn.q_proj", "self_attn.o_proj")
        saved = attention_flops(model, start, end)
    last = f"model.layers.{model.num_hidden_layers - 1}."
    shapes = dict(qwen3_6.parameter_shapes(model))
    return saved + (end - start) * sum(2.0 * prod(shapes[f"{last}{name}.weight"]) for name in names)
