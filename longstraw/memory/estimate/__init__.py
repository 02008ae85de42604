"""Bytes of a step, from its configuration alone; no tensor is made and no model built.

``predict`` answers what ``memory.MemoryMeter`` counts. Parameters, gradients, optimizer, state, its gradient and the
snapshots are exact. Activations of one process on a CPU are the largest of the moments that each architecture's module
names (``qwen3_6``, ``glm_5_2``), those of low-rank adapters left out; on the CUDA path each verb is followed tensor by
tensor (``spread``), on one rank of any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longstraw.config import RunConfig
from longstraw.config.architectures import Glm52Config, Qwen36Config
from longstraw.memory.estimate import glm_5_2, qwen3_6
from longstraw.memory.estimate.parameters import FROZEN, adapted, gradient_item, parameter_shapes
from longstraw.memory.estimate.ranks import Layout
from longstraw.memory.estimate.sizes import Lengths
from longstraw.memory.estimate.spread import Spread
from longstraw.memory.estimate.standing import PersistentBytes, clipping_bytes, lengths_of, standing_of
from longstraw.memory.kinds import KINDS
from longstraw.parallel.parallel_dims import resolve_dims

__all__ = [
    "FROZEN",
    "KINDS",
    "Prediction",
    "adapted",
    "gradient_item",
    "is_predicted",
    "layout_of",
    "parameter_shapes",
    "predict",
]

Kinds = dict[str, int]


@dataclass(frozen=True)
class Prediction:
    """The most bytes a step holds on one rank, at which verb and of what, and the most of each verb."""

    peak: int
    verb: str
    by_kind: Kinds  # at the peak; the kinds of ``memory.KINDS``
    by_verb: Kinds
    host: int = 0  # the most bytes in host memory beside the device's


def is_predicted(config: RunConfig) -> bool:
    """Return whether there are formulas for what a run allocates: not for several ranks on CPUs, nor for wide CUDA.

    Of the families, only these two have formulas.
    """
    if not isinstance(config.model, Glm52Config | Qwen36Config):
        return False
    if config.hardware.backend == "cpu":
        return config.hardware.world_size == 1
    return config.model.dtype == "bfloat16"


def predict(
    config: RunConfig,
    *,
    prompt_positions: int,
    response_positions: int,
    group_size: int | None = None,
    optimizer_held: bool | None = None,
    prefilled: bool = True,
    layout: Layout | None = None,
) -> Prediction:
    """Return the bytes that one step of ``config`` holds on rank 0; see ``is_predicted``.

    ``prompt_positions`` include the last prompt token, which is replayed; ``response_positions`` are those of the
    longest response. AdamW makes its state in the first step's update: ``optimizer_held`` False is that step, None the
    largest step of the job. A step on a prompt that an earlier one evaluated is not ``prefilled``. Of a rank's experts
    an even share of tokens is counted, times ``config.simulation.imbalance``. ``layout`` is what ``layout_of`` said of
    ``config`` before, whatever its lengths.
    """
    sizes = resolve_dims(config.model, config.hardware)
    lengths = lengths_of(config, prompt_positions, response_positions, group_size or config.group_size, sizes.cp)
    layout = layout_of(config) if layout is None else layout
    stands = standing_of(config, lengths, layout)
    verbs = Single(config, lengths) if layout is None else Spread(layout, lengths)
    held = config.steps > 1 if optimizer_held is None else optimizer_held
    moments = _moments(config, lengths, stands, verbs, held, prefilled)
    highest = {verb: max(kinds, key=total) for verb, kinds in moments.items() if kinds}
    verb = max(highest, key=lambda name: total(highest[name]))
    by_verb = {name: total(kinds) for name, kinds in highest.items()}
    return Prediction(total(highest[verb]), verb, highest[verb], by_verb, stands.host)


def layout_of(config: RunConfig) -> Layout | None:
    """Return what one rank holds of the parameters; None for one process on a CPU, which has them all."""
    if config.hardware.backend == "cpu" and config.hardware.world_size == 1:
        return None
    return Layout(config, resolve_dims(config.model, config.hardware))


class Single:
    """The verbs of one process on a CPU, from the moments of its architecture."""

    def __init__(self, config: RunConfig, lengths: Lengths):
        self._activations: glm_5_2.Activations | qwen3_6.Activations
        if isinstance(config.model, Glm52Config):
            self._activations = glm_5_2.Activations(config.model, lengths)
        else:
            assert isinstance(config.model, Qwen36Config)
            self._activations = qwen3_6.Activations(config.model, lengths)

    def prefill(self, base: Mapping[str, int], start: int, count: int) -> Kinds:
        return self._with(base, self._activations.prefill(start, count))

    def score(self, base: Mapping[str, int]) -> Kinds:
        return self._with(base, self._activations.score())

    def replay(self, base: Mapping[str, int]) -> Kinds:
        return self._with(base, self._activations.replay())

    def prompt_backward(self, base: Mapping[str, int], start: int, count: int) -> Kinds:
        return self._with(base, self._activations.prompt_backward(start, count))

    def _with(self, base: Mapping[str, int], activations: int) -> Kinds:
        return {**base, "activations": base["activations"] + activations}


def _moments(
    config: RunConfig, lengths: Lengths, stands: PersistentBytes, verbs: Single | Spread, held: bool, prefilled: bool
) -> dict[str, list[Kinds]]:
    """Return what is held at the moments that may be a verb's largest."""
    exact = lengths.grad_from is not None
    learning = {"gradients": stands.gradients, "activations": stands.results}
    learning |= {"state_gradient": stands.row_gradients + stands.carried_gradients}
    moments: dict[str, list[Kinds]] = {"prefill": [], "score": [], "replay": [], "prompt_backward": []}
    for start, count in lengths.chunks(0) if prefilled else ():
        before = stands.with_more({}, held=held, snapshots=lengths.snapshots_before(start))
        moments["prefill"].append(verbs.prefill(before, start, count))
    if prefilled and (config.algorithm.old_logprobs == "score" or config.algorithm.kl_coef):
        own = config.algorithm.old_logprobs == "score"  # a reference's state has no snapshots
        before = stands.with_more({"activations": stands.results}, held=held, snapshots=lengths.snapshots if own else 0)
        moments["score"] = [verbs.score(before)]
    moments["replay"] = [verbs.replay(stands.with_more(learning, held=held, snapshots=lengths.snapshots))]
    spent = {**learning, "retained": stands.rows}  # the final summaries are not needed any more
    for start, count in lengths.chunks(lengths.grad_from) if lengths.grad_from is not None else ():
        before = stands.with_more(spent, held=held, snapshots=lengths.snapshots_before(start) + 1)
        moments["prompt_backward"].append(verbs.prompt_backward(before, start, count))
    # the update meets the state as the verbs before left it; a prompt backward has spent all but the first border
    after = {**learning, "state_gradient": stands.row_gradients}
    after["activations"] += clipping_bytes(stands.tensors)
    after |= {"retained": stands.rows, "snapshots": stands.carried} if exact else {}
    narrow = {**after, "gradients": stands.narrow_gradients}
    moments["optimizer"] = [stands.with_more(after, held=held), stands.with_more(narrow, held=True)]
    return moments


def total(kinds: Mapping[str, int]) -> int:
    """Return the bytes of all kinds."""
    return sum(kinds.values())
