"""Arithmetic of a step: what the model says of its passes, times how often the step makes each."""

from __future__ import annotations

from collections.abc import Sequence

from longstraw.config import RunConfig, gradient_start
from longstraw.models.decoder import Decoder

# A backward takes twice its forward; with every block, and every tile of logits, evaluated again it makes four in all.
WITH_BACKWARD = 4


def step_flops(
    model: Decoder,
    config: RunConfig,
    *,
    prompt_positions: int,
    responses: Sequence[int],
    prefilled: bool,
    scored: int,
) -> float:
    """Return the arithmetic of one step that trains every parameter, over all ranks; two operations a multiply-add.

    ``responses`` are the lengths of all responses; ``prefilled`` whether the prompt was evaluated in this step, and by
    the reference too where there is a KL term; ``scored`` how often all responses were evaluated without a graph.
    Beneath an adapter a third of the backward's products with weights is not made: that is not counted here.
    """
    retained = prompt_positions - 1
    total = 0
    if prefilled:
        total += (1 + bool(config.algorithm.kl_coef)) * model.flops(0, retained, state_only=True)
    for response in responses:
        branch = model.flops(retained, retained + response) + model.head_flops(response)
        total += (scored + WITH_BACKWARD) * branch
    start = gradient_start(retained, config.chunk, config.prompt_grad, config.prompt_grad_window)
    if start is not None:
        total += WITH_BACKWARD * model.flops(start, retained, state_only=True)
    return float(total)
