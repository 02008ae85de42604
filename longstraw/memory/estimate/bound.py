"""Bytes that a step stays below, and bytes that it exceeds, from shapes alone: whether a count is worth its seconds."""

from __future__ import annotations

from longstraw.config import RunConfig
from longstraw.models import build_model
from longstraw.models.lora import add_adapter

NUMBER = 8  # bytes, of float64
COPIES = 8  # of parameters and rows: themselves, gradients, moments, a reference, temporaries
TENSORS = 64  # of a layer's width that a position leaves in it until its backward
ROW_TILE = 16384  # rows that a query is compared with at once, as in ``ops.attention``


def upper_bound(config: RunConfig) -> int:
    """Return bytes that one rank's step stays below on a processor, however the model is spread.

    Every number is taken for a float64 and each block for as wide as the widest parameter.
    """
    model = add_adapter(build_model(config.model, device="meta", backend="cpu"), config.adapter)
    parameters = list(model.parameters())
    width = max(max(parameter.shape) for parameter in parameters)  # the vocabulary's size among them
    retained = config.prompt_positions - 1
    states = model.new_states(retained, None, config.chunk, None)
    rows = sum(sum(state.num_bytes().values()) for state in states) * NUMBER // model.lm_head.weight.itemsize
    summaries = sum(
        tensor.numel() * NUMBER for state in model.new_states(0, 0, config.chunk, None) for _, tensor in state.held()
    )
    at_once = max(config.chunk, config.branches_together * config.response_length + 1)
    drawn = config.drawn_together * config.response_length if config.rollout == "sample" else 0
    a_position = len(states) * width * TENSORS + width * min(ROW_TILE, retained + at_once)
    return (
        COPIES * (NUMBER * sum(parameter.numel() for parameter in parameters) + rows)
        + summaries * (retained // config.chunk + COPIES)
        + NUMBER * at_once * a_position
        + NUMBER * COPIES * drawn * len(states) * width
        + NUMBER * COPIES * config.group_size * (config.prompt_positions + config.response_length)
    )


def lower_bound(config: RunConfig) -> int:
    """Return bytes that one rank's step exceeds: its share of parameters, retained rows and the rows' gradient."""
    model = add_adapter(build_model(config.model, device="meta", backend="cpu"), config.adapter)
    parameters = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    states = model.new_states(config.prompt_positions - 1, None, config.chunk, config.state)
    rows = sum(sum(state.num_bytes().values()) for state in states)
    gradient = rows if config.prompt_grad == "exact" and config.prompt_grad_window is None else 0
    return (parameters + rows + gradient) // config.hardware.world_size
