"""The seconds of a step before it is simulated, from the same counts of cut models as its memory; no torch.

Two steps are counted, with their last chunk and their last responses evaluated. The work of a chunk, and of a response,
lies block by block on the straight line through both, over the positions before it.
"""

from __future__ import annotations

from longstraw.config import RunConfig
from longstraw.memory.estimate import Lengths, steps_to_count
from longstraw.memory.estimate.counts import lookup
from longstraw.timing.work import Parts, Work, between, seconds

BY_CHUNK = ("prefill", "prompt_backward")


def predicted_seconds(config: RunConfig) -> dict[str, float] | None:
    """Return the seconds of each verb of a step on a fresh prompt, all but the optimizer's.

    None where the rates of the hardware are not known, or where the steps have not been counted: see ``memory.fit``.
    """
    steps = steps_to_count(config, line=True)[:2]
    counts = [count for step in steps if (count := lookup(step)) is not None]
    if len(counts) < 2 or not counts[0].last:
        return None
    before = [Lengths.of(step).retained for step in steps]
    lengths, step = Lengths.of(config), steps[0]
    ends = range(lengths.retained, 0, -config.chunk)
    graded = range(lengths.retained, lengths.retained - lengths.graded, -config.chunk)
    responses = step.group_size - step.branches_together * ((step.group_size - 1) // step.branches_together)
    found = {}
    for verb in counts[0].last:
        low, high = ([Work(*part) for part in count.last[verb]] for count in counts)
        if verb in BY_CHUNK:
            pieces = [(end, 1.0) for end in (ends if verb == "prefill" else graded)]
        else:
            pieces = [(lengths.retained, config.group_size / responses)]
        if verb != "optimizer":
            found[verb] = sum(
                times * _seconds(low, high, (end - before[0]) / (before[1] - before[0]), config)
                for end, times in pieces
            )
    return found


def _seconds(low: Parts, high: Parts, share: float, config: RunConfig) -> float:
    return sum(seconds(between(low, high, share), overlap=config.hardware.backend == "cuda").values())
