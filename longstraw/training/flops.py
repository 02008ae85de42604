"""Count the FLOPs of a step: those of each pass, as the model gives them, times the number of such passes."""

from __future__ import annotations

from collections.abc import Sequence

from longstraw.config import RunConfig, gradient_start
from longstraw.models.decoder import Decoder

# Forward 1, backward 2, and 1 because checkpointed blocks and tiles of logits are evaluated again in the backward.
WITH_BACKWARD = 4


def step_flops(
    model: Decoder,
    config: RunConfig,
    *,
    prompt_positions: int,
    responses: Sequence[int],
    prefilled: bool,
    scored: int,
    sampled: Sequence[int] = (),
    trained: bool = True,
) -> float:
    """Return the FLOPs of one step that trains every parameter, over all ranks; a multiply-add counts as two.

    ``responses`` are the lengths of all responses; ``prefilled`` whether the prompt was evaluated in this step, and by
    the reference too where there is a KL term; ``scored`` how often all responses were evaluated without a graph;
    ``sampled`` the lengths of all that were drawn on the retained prompt; ``trained`` whether there was a backward.
    With an adapter a third of the backward's products with weights is not computed; the count includes it all the same.
    """
    retained = prompt_positions - 1
    total = 0
    if prefilled:
        total += (1 + bool(config.algorithm.kl_coef)) * model.flops(0, retained, state_only=True)
    passes = scored + WITH_BACKWARD * trained
    total += passes * sum(_branch(model, retained, response) for response in responses)
    total += sum(_branch(model, retained, response) for response in sampled)
    start = gradient_start(retained, config.chunk, config.prompt_grad, config.prompt_grad_window)
    if start is not None and trained:
        total += WITH_BACKWARD * model.flops(start, retained, state_only=True)
    return float(total)


def _branch(model: Decoder, retained: int, response: int) -> int:
    """Return the FLOPs of one evaluation of a response on a retained prompt, logits included."""
    return model.flops(retained, retained + response) + model.head_flops(response)
