"""What a run holds from one verb to the next on one rank: parameters, gradients, optimizer, state and results."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from longstraw.config import RunConfig, gradient_start
from longstraw.config.architectures import Glm52Config, Qwen36Config
from longstraw.config.architectures.base import ModelConfig
from longstraw.memory.estimate import glm_5_2, qwen3_6
from longstraw.memory.estimate.parameters import adapted, gradient_item, trained_shapes
from longstraw.memory.estimate.ranks import Layout
from longstraw.memory.estimate.sizes import BLOCK, ITEM, TOKEN, Lengths, StateShapes, rounded
from longstraw.memory.kinds import KINDS

SCALAR = BLOCK  # a tensor of one number takes a whole block
RESULTS = 8  # loss, entropy and two counts: of the branches so far and of this one


@dataclass(frozen=True)
class PersistentBytes:
    """Bytes on the device, those of ``host`` apart."""

    parameters: int
    gradients: int  # as they add up
    narrow_gradients: int  # in the parameters' dtype, while these are updated
    optimizer: int
    tensors: int  # that are trained
    inputs: int
    rows: int
    row_gradients: int
    carried: int  # the summaries of one border
    carried_gradients: int
    results: int  # of a step, and the ids of the branch whose turn it is
    host: int

    def with_more(self, more: dict[str, int], *, held: bool, snapshots: int = 0) -> dict[str, int]:
        """Return the bytes by kind; ``held``: whether the optimizer's state is there."""
        kinds = dict.fromkeys(KINDS, 0) | {"parameters": self.parameters, "inputs": self.inputs}
        kinds |= {"optimizer": self.optimizer if held else 0, "retained": self.rows + self.carried}
        return kinds | {"snapshots": snapshots * self.carried} | more


def standing_of(config: RunConfig, lengths: Lengths, layout: Layout | None) -> PersistentBytes:
    """Return what one rank holds; ``layout`` is that of a model spread over ranks, None: one process has it all."""
    if layout is None:
        trained, frozen = trained_shapes(config)
        sizes = [rounded(prod(shape) * item) for shape, item in trained]
        gradients = sum(rounded(prod(shape) * gradient_item(config, item)) for shape, item in trained)
        parameters = frozen + sum(sizes)
    else:
        sizes = [rounded(p.values * p.item) for p in layout.trained]
        item = max((p.item for p in layout.trained), default=0)
        gradients, parameters = layout.gradient_bytes(gradient_item(config, item)), layout.parameter_bytes
    state, optimizer = state_shapes(config.model), optimizer_bytes(config, sizes)
    rows, row_gradients = state.rows(lengths), state.row_gradients(lengths)
    host = waiting_bytes(config, lengths) + (rows + row_gradients if lengths.on_host else 0)
    if lengths.on_host:
        rows = row_gradients = 0
    if config.optimizer.device == "cpu":
        host += 2 * sum(sizes) + optimizer  # copies of the parameters, and of their gradients while they are updated
        optimizer = 0
    models = 2 if config.algorithm.kl_coef and config.adapter.name == "none" else 1  # the reference is another model
    return PersistentBytes(
        parameters=models * parameters,
        gradients=gradients,
        narrow_gradients=sum(sizes),
        optimizer=optimizer,
        tensors=len(sizes),
        inputs=rounded((lengths.retained + 1) * TOKEN),
        rows=rows,
        row_gradients=row_gradients,
        carried=state.carried(lengths),
        carried_gradients=state.carried_gradients(lengths),
        results=RESULTS * SCALAR + rounded(lengths.response * TOKEN),
        host=host,
    )


def state_shapes(model: ModelConfig) -> StateShapes:
    """Return what the layers of ``model`` retain."""
    if isinstance(model, Glm52Config):
        return glm_5_2.state_shapes(model)
    assert isinstance(model, Qwen36Config)
    return qwen3_6.state_shapes(model)


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


def lengths_of(config: RunConfig, prompt: int, response: int, group: int, ranks: int) -> Lengths:
    """Return the positions of a step whose prompts are shared by ``ranks``."""
    retained, window, item = prompt - 1, config.prompt_grad_window, ITEM[config.model.dtype]
    inner, kept = max(item, ITEM["float32"]), config.state
    return Lengths(
        retained,
        response,
        group,
        config.chunk,
        gradient_start(retained, config.chunk, config.prompt_grad, window),
        item,
        inner,
        row_item=item if kept.dtype is None else ITEM[kept.dtype],
        row_gradient_item=inner if kept.gradient_dtype is None else ITEM[kept.gradient_dtype],
        on_host=kept.device == "cpu",
        head_trained=config.adapter.name == "none" or bool(adapted(config, ["lm_head.weight"])),
        ranks=ranks,
    )
