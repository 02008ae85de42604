"""What a step holds on one rank before it runs, from counts of cut models; no torch.

A step whose prompt has few chunks is counted as it is. Of a longer one, two with fewer chunks are, and what its verbs
hold lies on the straight line through both: rows, their gradients and snapshots grow with the prompt, and beyond
``ROW_TILE`` rows a rank the temporaries do not. ``cut.predict`` counts what is missing; here counts are looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from longstraw.config import RunConfig, gradient_start
from longstraw.memory.estimate.counts import Counts, Kinds, lookup
from longstraw.memory.kinds import KINDS
from longstraw.parallel.parallel_dims import resolve_dims

__all__ = ["KINDS", "Prediction", "known", "steps_to_count"]

BLOCK = 512  # bytes that an allocation is rounded up to, as in ``memory.meter``
ROW_TILE = 16384  # as in ``ops.attention``: fewer rows than that are read at once
MOST_CHUNKS = 40  # of a prompt that is counted
TOKEN, LOGPROB = 8, 4  # bytes
SHORTEST_GROUP = 2  # of which steps are counted


@dataclass(frozen=True)
class Prediction:
    """The most bytes a step holds on one rank, at which verb and of what, and the most of each verb."""

    peak: int
    verb: str
    by_kind: Kinds  # at the peak; the kinds of ``KINDS``
    by_verb: Kinds
    host: int = 0  # the most bytes in host memory beside the device's


@dataclass(frozen=True)
class Lengths:
    """The prompt positions that a step retains, and how many of them have a gradient."""

    retained: int
    graded: int

    @classmethod
    def of(cls, config: RunConfig) -> Lengths:
        retained = config.prompt_positions - 1
        first = gradient_start(retained, config.chunk, config.prompt_grad, config.prompt_grad_window)
        return cls(retained, 0 if first is None else retained - first)

    @property
    def windowed(self) -> bool:
        return 0 < self.graded < self.retained


def known(
    config: RunConfig,
    *,
    prompt_positions: int | None = None,
    response_positions: int | None = None,
    optimizer_held: bool | None = None,
    prefilled: bool = True,
    line: bool = False,
) -> Prediction | None:
    """Return what the largest step of ``config`` holds on a rank, or None where that has not been counted.

    ``prompt_positions`` include the last prompt token; of other lengths than the job's largest a step is known if it
    lies on a line. AdamW makes its state in the first step's update: ``optimizer_held`` False is that step, None the
    largest step of the job. A step on a prompt that an earlier one evaluated is not ``prefilled``. Of a rank's experts
    an even share of tokens is counted, times ``config.simulation.imbalance``. ``line`` as in ``steps_to_count``.
    """
    if response_positions not in (None, config.response_length):
        return None
    steps = steps_to_count(config, line=line)
    counts = [lookup(step) for step in steps]
    if prompt_positions not in (None, config.prompt_positions):
        if len(steps) == 1:
            return None
        config = replace(config, context=prompt_positions + config.response_length)
    if any(count is None for count in counts):
        return None
    held = config.steps > 1 if optimizer_held is None else optimizer_held
    return _prediction(config, steps, [count for count in counts if count is not None], held, prefilled)


def steps_to_count(config: RunConfig, *, line: bool = False) -> list[RunConfig]:
    """Return the runs whose steps must have been counted for a prediction of ``config``.

    One is ``config`` itself, as far as it matters. Several are those through which the line is drawn; ``line`` asks for
    a line that serves prompts of any length, whose last chunk lacks one position.
    """
    together = config.branches_together
    config = replace(
        config,
        group_size=counted_group(config),
        replay_tokens=together * config.response_length if together > 1 else None,
        groups_per_step=1,
        steps=1,
        refresh_every=1,
        updates_per_rollout=None,
        refresh_above=None,
        warmup_steps=0,
        sample_batch=min(config.drawn_together, config.group_size) if config.rollout == "sample" else None,
        measure_drift=False,
        mode="simulate",
        claim=None,
    )
    if config.optimizer.device is None:  # AdamW's state is the same all step long, so it can be left out afterwards
        config = replace(config, optimizer=replace(config.optimizer, name="adamw"))
    lengths, chunk = Lengths.of(config), config.chunk
    few = -(-ROW_TILE * resolve_dims(config.model, config.hardware).cp // chunk) + 2
    few = min(few, MOST_CHUNKS - 2)
    if not lengths.graded:
        config = replace(config, prompt_grad="detached", prompt_grad_window=None)
    if lengths.retained <= (few + 2) * chunk and not line:
        return [config]
    rest = chunk - 1 if line else lengths.retained % chunk  # ranks fill up what they do not divide, so it counts
    if not lengths.windowed:
        return [_with_chunks(config, number, rest, None) for number in (few, few + 2)]
    graded = lengths.graded // chunk
    steps = [_with_chunks(config, number, rest, min(graded, 2)) for number in (few, few + 2)]
    return steps if graded <= 2 else [*steps, _with_chunks(config, few + 2, rest, 3)]


def counted_group(config: RunConfig) -> int:
    """Return the branches of the group that is counted: two graphs full, for the second finds the first's gradients."""
    return max(min(2 * config.branches_together, config.group_size), SHORTEST_GROUP)


def _with_chunks(config: RunConfig, number: int, rest: int, graded: int | None) -> RunConfig:
    """Return ``config`` with ``number`` whole chunks and ``rest`` positions retained, a gradient for ``graded`` chunks.

    The rest has one too. None: as far as ``config`` says.
    """
    window = None if graded is None else max(graded * config.chunk, 1)
    context = number * config.chunk + rest + 1 + config.response_length
    return replace(config, context=context, prompt_grad_window=window)


def _prediction(
    config: RunConfig, steps: Sequence[RunConfig], counts: Sequence[Counts], held: bool, prefilled: bool
) -> Prediction:
    weights = _weights(Lengths.of(config), [Lengths.of(step) for step in steps])
    first = counts[0]
    verbs: dict[str, Kinds] = {}
    for verb, kinds in first.verbs.items():
        if prefilled or verb not in ("prefill", "score", "sample"):
            verbs[verb] = {kind: _mean(weights, [count.verbs[verb][kind] for count in counts]) for kind in kinds}
    if config.refresh_every > 1 and not Lengths.of(config).graded:  # the prompt stays for the next step
        verbs["optimizer"] = {**verbs["optimizer"], "retained": verbs["replay"]["retained"]}
    state = verbs["optimizer"]["optimizer"]
    if not held or config.optimizer.name == "none":
        verbs = {verb: {**kinds, "optimizer": 0} for verb, kinds in verbs.items()}
    verbs["optimizer"] = _update(config, first, verbs["optimizer"], state)
    verb = max(verbs, key=lambda name: total(verbs[name]))
    host = _mean(weights, [count.host for count in counts]) + _waiting(config)
    return Prediction(total(verbs[verb]), verb, verbs[verb], {name: total(x) for name, x in verbs.items()}, host)


def _update(config: RunConfig, counts: Counts, before: Kinds, state: int) -> Kinds:
    """Return the most that the optimizer's update holds: ``before`` at its beginning, and it makes its ``state``."""
    own = (counts.tensors + 4) * BLOCK  # of each gradient, and of all
    norms = {**before, "activations": before["activations"] + own}
    if config.optimizer.name == "none":
        return norms
    step = {**before, "optimizer": state}
    narrowed = dict(before)
    if config.optimizer.device is None:  # gradients are brought into the parameters' dtype, one after the other
        narrowed["gradients"] += counts.first_narrowed
        step["gradients"] = min(before["gradients"], counts.narrow_gradients)
    return max(norms, narrowed, step, key=total)


def _weights(lengths: Lengths, counted: Sequence[Lengths]) -> list[float]:
    """Return what each count contributes to the line, or the plane, through all of them at ``lengths``."""
    if len(counted) == 1:
        return [1.0]
    low, high = counted[:2]
    along = (lengths.retained - low.retained) / (high.retained - low.retained)
    if len(counted) == 2:
        return [1 - along, along]
    across = (lengths.graded - high.graded) / (counted[2].graded - high.graded)
    return [1 - along, along - across, across]


def _mean(weights: Sequence[float], values: Sequence[int]) -> int:
    return max(round(sum(weight * value for weight, value in zip(weights, values, strict=True))), 0)


def _waiting(config: RunConfig) -> int:
    """Return the bytes in host memory of the responses beyond those counted: ids, and sets of log-probabilities."""
    sets = 1 + (config.rollout == "sample") + (config.algorithm.old_logprobs == "score")
    sets += bool(config.algorithm.kl_coef)
    number = LOGPROB * (2 if config.model.dtype == "float64" else 1)
    sizes = [config.response_length * TOKEN, *[config.response_length * number] * sets]
    return (config.group_size - counted_group(config)) * sum(-(-size // BLOCK) * BLOCK for size in sizes)


def total(kinds: Mapping[str, int]) -> int:
    """Return the bytes of all kinds."""
    return sum(kinds.values())
