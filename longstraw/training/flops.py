"""Count the FLOPs of a step: those of each pass, as the model gives them, times the number of such passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longstraw.config import RunConfig, gradient_start
from longstraw.models.decoder import Decoder

# Forward 1, backward 2, and 1 because checkpointed blocks and tiles of logits are evaluated again in the backward.
WITH_BACKWARD = 4


@dataclass(frozen=True)
class Evaluated:
    """What a step evaluated of one group, in positions.

    ``responses`` are the lengths of all responses; ``prefilled`` whether the prompt was evaluated in this step, and by
    the reference too where there is a KL term; ``scored`` how often all responses were evaluated without a graph;
    ``sampled`` the lengths of all that were drawn on the retained prompt; ``trained`` whether there was a backward.
    """

    prompt_positions: int
    responses: Sequence[int]
    prefilled: bool
    scored: int = 0
    sampled: Sequence[int] = ()
    trained: bool = True


def step_flops(model: Decoder, config: RunConfig, step: Evaluated) -> float:
    """Return the FLOPs of one step that trains every parameter, over all ranks; a multiply-add counts as two.

    With an adapter a third of the backward's products with weights is not computed; the count includes it all the same.
    Where attention is kept, its forward is not evaluated again in the backward.
    """
    retained = step.prompt_positions - 1
    kept = step.trained and config.state.keep_attention
    total = 0
    if step.prefilled:
        total += (1 + bool(config.algorithm.kl_coef)) * model.flops(0, retained, state_only=True)
    passes = step.scored + WITH_BACKWARD * step.trained
    total += passes * sum(_branch(model, retained, response) for response in step.responses)
    total += sum(_branch(model, retained, response) for response in step.sampled)
    if kept:
        total -= sum(model.attention_flops(retained, retained + response) for response in step.responses)
    start = gradient_start(retained, config.chunk, config.prompt_grad, config.prompt_grad_window)
    if start is not None and step.trained:
        total += WITH_BACKWARD * model.flops(start, retained, state_only=True)
        total -= kept * model.attention_flops(start, retained, state_only=True)
    return float(total)


def _branch(model: Decoder, retained: int, response: int) -> int:
    """Return the FLOPs of one evaluation of a response on a retained prompt, logits included."""
    return model.flops(retained, retained + response) + model.head_flops(response)
