"""Bytes and arithmetic of a step, in closed form from its configuration; no tensor is made and no model built.

``predict`` answers what ``memory.MemoryMeter`` counts. Parameters, gradients, optimizer, state, its gradient and the
snapshots are exact. Activations are the largest of the moments that each architecture's module names: inside the delta
rule's backward, in the feed-forward's, in the head's. Those of low-rank adapters are left out of the activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from longstraw.budget import glm_5_2, qwen3_6
from longstraw.budget.flops import step_flops
from longstraw.budget.sizes import BLOCK, ITEM, TOKEN, Lengths, Shape, StateShapes, rounded, tensors
from longstraw.config import RunConfig, gradient_start
from longstraw.model_config import DEFAULT_TARGETS, Glm52Config, ModelConfig, Qwen36Config

__all__ = ["Prediction", "parameter_shapes", "predict", "step_flops"]

# as ``memory.KINDS``, which needs torch
KINDS = (
    "parameters",
    "gathered",
    "gradients",
    "optimizer",
    "retained",
    "state_gradient",
    "snapshots",
    "activations",
    "workspace",
    "communication",
    "inputs",
)
SCALAR = BLOCK  # a tensor of one number takes a whole block
RESULTS = 8  # loss, entropy and two counts: of the branches so far and of this one


@dataclass(frozen=True)
class Prediction:
    """The most bytes a step holds, at which verb and of what, and the most of each verb."""

    peak: int
    verb: str
    by_kind: dict[str, int]  # at the peak; the kinds of ``memory.KINDS``
    by_verb: dict[str, int]
    host: int = 0  # the most bytes in host memory beside the device's


def predict(
    config: RunConfig,
    *,
    prompt_positions: int,
    response_positions: int,
    group_size: int | None = None,
    optimizer_held: bool | None = None,
    prefilled: bool = True,
) -> Prediction:
    """Return the bytes that one step of ``config`` holds on one rank at most.

    ``prompt_positions`` include the last prompt token, which is replayed; ``response_positions`` are those of the
    longest response. AdamW makes its state in the first step's update: ``optimizer_held`` False is that step, None the
    largest step of the job. A step on a prompt that an earlier one evaluated is not ``prefilled``.
    """
    lengths = _lengths(config, prompt_positions, response_positions, group_size or config.group_size)
    held = config.steps > 1 if optimizer_held is None else optimizer_held
    state, activations = _model_terms(config.model, lengths)
    trained, frozen = trained_shapes(config)
    sizes = [rounded(prod(shape) * item) for shape, item in trained]
    wide = [rounded(prod(shape) * gradient_item(config, item)) for shape, item in trained]
    optimizer = optimizer_bytes(config, sizes)
    inputs = rounded(prompt_positions * TOKEN)
    carried, rows, row_gradients = state.carried(lengths), state.rows(lengths), state.row_gradients(lengths)
    host = waiting_bytes(config, lengths) + (rows + row_gradients if lengths.on_host else 0)
    if lengths.on_host:
        rows = row_gradients = 0
    if config.optimizer.device == "cpu":
        host += 2 * sum(sizes) + optimizer  # copies of the parameters, and of their gradients while they are updated
        optimizer = 0
    models = 2 if config.algorithm.kl_coef and config.adapter.name == "none" else 1  # the reference is another model

    def held_with(verb_activations: int, snapshots: int = 0, more: dict[str, int] | None = None) -> dict[str, int]:
        kinds = dict.fromkeys(KINDS, 0) | {"parameters": models * (frozen + sum(sizes)), "inputs": inputs}
        kinds |= {"optimizer": optimizer if held else 0, "retained": rows + carried}
        kinds |= {"activations": verb_activations, "snapshots": snapshots * carried}
        return kinds | (more or {})

    left = RESULTS * SCALAR + rounded(response_positions * TOKEN)  # and the ids of the branch whose turn it is
    owed = row_gradients + state.carried_gradients(lengths)
    learning = {"gradients": sum(wide), "state_gradient": owed}
    # the update meets the state as the verbs before left it; a prompt backward has spent all but the first border
    after = {"optimizer": optimizer, "state_gradient": row_gradients}
    if lengths.grad_from is not None:
        after |= {"retained": rows, "snapshots": carried}
    moments = {
        "prefill": [
            held_with(activations.prefill(start, count), lengths.snapshots_before(start))
            for start, count in (lengths.chunks(0) if prefilled else ())
        ],
        "replay": [held_with(activations.replay() + left, lengths.snapshots, learning)],
        "optimizer": [
            held_with(clipping_bytes(len(sizes)) + left, 0, learning | after | {"optimizer": optimizer if held else 0}),
            held_with(clipping_bytes(len(sizes)) + left, 0, learning | after | {"gradients": sum(sizes)}),
        ],
    }
    if prefilled and (config.algorithm.old_logprobs == "score" or config.algorithm.kl_coef):
        own = config.algorithm.old_logprobs == "score"  # a reference's state has no snapshots
        moments["score"] = [held_with(activations.score() + left, lengths.snapshots if own else 0)]
    if lengths.grad_from is not None:
        spent = learning | {"retained": rows}  # the final summaries are not needed any more
        moments["prompt_backward"] = [
            held_with(activations.prompt_backward(start, count) + left, lengths.snapshots_before(start) + 1, spent)
            for start, count in lengths.chunks(lengths.grad_from)
        ]
    highest = {verb: max(kinds, key=total) for verb, kinds in moments.items() if kinds}
    verb = max(highest, key=lambda name: total(highest[name]))
    by_verb = {name: total(kinds) for name, kinds in highest.items()}
    return Prediction(total(highest[verb]), verb, highest[verb], by_verb, host)


def total(kinds: dict[str, int]) -> int:
    """Return the bytes of all kinds."""
    return sum(kinds.values())


def _lengths(config: RunConfig, prompt: int, response: int, group: int) -> Lengths:
    retained, window, item = prompt - 1, config.prompt_grad_window, ITEM[config.model.dtype]
    grad_from = gradient_start(retained, config.chunk, config.prompt_grad, window)
    inner, kept = max(item, ITEM["float32"]), config.state
    return Lengths(
        retained,
        response,
        group,
        config.chunk,
        grad_from,
        item,
        inner,
        row_item=item if kept.dtype is None else ITEM[kept.dtype],
        row_gradient_item=inner if kept.gradient_dtype is None else ITEM[kept.gradient_dtype],
        on_host=kept.device == "cpu",
        head_trained=config.adapter.name == "none" or bool(adapted(config, ["lm_head.weight"])),
    )


def _model_terms(model: ModelConfig, lengths: Lengths) -> tuple[StateShapes, qwen3_6.Activations | glm_5_2.Activations]:
    if isinstance(model, Glm52Config):
        return glm_5_2.state_shapes(model), glm_5_2.Activations(model, lengths)
    assert isinstance(model, Qwen36Config)
    return qwen3_6.state_shapes(model), qwen3_6.Activations(model, lengths)


def buffer_bytes(model: ModelConfig) -> int:
    """Return the bytes of what a model holds beside parameters; buffers have at least float32."""
    shapes = glm_5_2.buffer_shapes(model) if isinstance(model, Glm52Config) else ()
    return tensors(shapes, max(ITEM[model.dtype], ITEM["float32"]))


def parameter_shapes(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every parameter of ``model`` without adapters."""
    if isinstance(model, Glm52Config):
        yield from glm_5_2.parameter_shapes(model)
    else:
        assert isinstance(model, Qwen36Config)
        yield from qwen3_6.parameter_shapes(model)


FROZEN = ".indexer."  # what chooses rows gets no gradient


def trained_shapes(config: RunConfig) -> tuple[list[tuple[Shape, int]], int]:
    """Return what is trained, each with the bytes of a number, and the bytes of what is frozen."""
    item = ITEM[config.model.dtype]
    shapes = list(parameter_shapes(config.model))
    if config.adapter.name == "none":
        still = tensors([shape for name, shape in shapes if FROZEN in name], item)
        return [(shape, item) for name, shape in shapes if FROZEN not in name], still + buffer_bytes(config.model)
    names, rank = set(adapted(config, [name for name, shape in shapes if len(shape) == 2])), config.adapter.rank
    wide = max(item, ITEM["float32"])
    pairs: list[tuple[Shape, int]] = [
        (pair, wide) for name, shape in shapes if name in names for pair in ((rank, shape[1]), (shape[0], rank))
    ]
    return pairs, tensors([shape for _, shape in shapes], item) + buffer_bytes(config.model)


def adapted(config: RunConfig, names: Sequence[str]) -> list[str]:
    """Return those weights that have a low-rank adapter."""
    targets = config.adapter.targets or DEFAULT_TARGETS[config.model.architecture]
    return [
        name
        for name in names
        if FROZEN not in name and any(f".{name.removesuffix('.weight')}".endswith(f".{target}") for target in targets)
    ]


def gradient_item(config: RunConfig, item: int) -> int:
    """Return the bytes of a number that gradients of parameters with ``item`` bytes add up in."""
    return max(item, ITEM["float32"]) if config.optimizer.gradient_dtype == "float32" else item


def optimizer_bytes(config: RunConfig, sizes: list[int]) -> int:
    """Return the bytes of AdamW's state: two moments as large as the parameter and a step count for each tensor."""
    return 0 if config.optimizer.name == "none" else sum(2 * size + SCALAR for size in sizes)


def clipping_bytes(tensors: int) -> int:
    """Return the bytes of the norms of all gradients: one number a tensor, and all of them together."""
    return tensors * SCALAR + 4 * SCALAR


def waiting_bytes(config: RunConfig, lengths: Lengths) -> int:
    """Return the bytes of a group's responses in host memory: their ids, and each set of log-probabilities."""
    sets = 1 + (config.algorithm.old_logprobs == "score") + bool(config.algorithm.kl_coef)
    return lengths.group * (rounded(lengths.response * TOKEN) + sets * rounded(lengths.response * lengths.inner))
