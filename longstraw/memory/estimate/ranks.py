"""What one rank holds of a model that is spread over ranks, and what it gathers, in bytes from the configuration alone.

Blocks are cut by rows over all ranks, padded to the longest piece, and gathered one at a time; of the vocabulary and
the experts a rank has rows of its own. Rank 0 is described: its pieces of
parameters are the longest; of positions that do not divide by the ranks others have one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from longstraw.config import RunConfig
from longstraw.memory.estimate.parameters import FROZEN, adapted, buffer_bytes, parameter_shapes
from longstraw.memory.estimate.sizes import ITEM, Shape, rounded
from longstraw.parallel.parallel_dims import ParallelDims

VOCABULARY, EXPERTS = ("model.embed_tokens.", "lm_head."), ".experts."  # stay where they are


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model: its part here, ``padded`` as it is sent, and in how many pieces it is cut."""

    name: str
    rows: int  # here
    padded: int
    width: int  # values a row
    item: int  # bytes a value
    pieces: int
    trained: bool

    @property
    def size(self) -> int:
        """Bytes held."""
        return rounded(self.padded * self.width * self.item)

    @property
    def whole(self) -> int:
        """Bytes of all pieces together."""
        return self.pieces * self.padded * self.width * self.item

    @property
    def values(self) -> int:
        """Values of the part here."""
        return self.rows * self.width


@dataclass
class Block:
    """The parameters of a block that are gathered for it."""

    parameters: list[Parameter] = field(default_factory=list)
    kind: int = 0  # blocks alike have the same

    @property
    def description(self) -> object:
        """What tells blocks from each other."""
        return tuple((p.name.split(".", 3)[-1], p.padded, p.width, p.item, p.trained) for p in self.parameters)

    @cached_property
    def buffer(self) -> int:
        """Bytes of what is gathered into."""
        return sum(p.whole for p in self.parameters)

    @cached_property
    def outputs(self) -> int:
        """Bytes of the parameters copied out of it, each a tensor of its own."""
        return sum(rounded(p.whole) for p in self.parameters)

    @cached_property
    def learnt(self) -> list[Parameter]:
        """Those with a gradient."""
        return [p for p in self.parameters if p.trained]

    def reduced(self, item: int) -> int:
        """Bytes of the trained parameters' gradients here, in one tensor, ``item`` a value."""
        return sum(p.padded * p.width for p in self.learnt) * item


class Layout:
    """All parameters of a run on rank 0 of ``sizes``."""

    def __init__(self, config: RunConfig, sizes: ParallelDims):
        self.config, self.sizes = config, sizes
        self.blocks = [Block() for _ in range(config.model.num_hidden_layers)]
        self.root = Block()  # the final norm
        self.stay: dict[str, Parameter] = {}
        self._adapted: set[str] = set()
        for parameter in self._parameters():
            parts = parameter.name.split(".")
            if parts[-1] == "lora_A":
                self._adapted.add(parameter.name.removesuffix(".lora_A"))
            if EXPERTS in parameter.name or parameter.name.startswith(VOCABULARY):
                self.stay[parameter.name] = parameter
            else:
                block = self.blocks[int(parts[2])] if parts[1] == "layers" else self.root
                block.parameters.append(parameter)
        kinds: dict[object, int] = {}
        for block in self.blocks:
            block.kind = kinds.setdefault(block.description, len(kinds))

    def _parameters(self) -> Iterator[Parameter]:
        config, item = self.config, ITEM[self.config.model.dtype]
        shapes = list(parameter_shapes(config.model))
        every = config.adapter.name == "none"
        names = set() if every else set(adapted(config, [name for name, shape in shapes if len(shape) == 2]))
        for name, shape in shapes:
            yield self._cut(name, shape, item, trained=every and FROZEN not in name)
            if name in names:
                rank = config.adapter.rank
                for side, pair in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
                    yield self._cut(f"{name}.{side}", pair, max(item, ITEM["float32"]), trained=True)

    def _cut(self, name: str, shape: Shape, item: int, trained: bool) -> Parameter:
        pieces = self.sizes.world
        if EXPERTS in name:
            pieces = self.sizes.ep
        elif name.startswith(VOCABULARY):
            pieces = self.sizes.cp
        padded = -(-shape[0] // pieces)
        return Parameter(name, padded, padded, prod(shape[1:]), item, pieces, trained)

    @cached_property
    def every(self) -> list[Parameter]:
        """All of them."""
        return [p for block in [*self.blocks, self.root] for p in block.parameters] + [*self.stay.values()]

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all of them, and of the buffers."""
        return sum(p.size for p in self.every) + buffer_bytes(self.config.model)

    @cached_property
    def trained(self) -> list[Parameter]:
        """Those with a gradient."""
        return [p for p in self.every if p.trained]

    def gradient_bytes(self, item: int) -> int:
        """Bytes of all gradients between branches: float32 sums of narrow parameters, or what blocks were reduced to.

        ``item``: bytes of a number they add up in.
        """
        if all(p.item == item for p in self.trained):
            own = [p for p in self.stay.values() if p.trained]
            reduced = [block.reduced(item) for block in [*self.blocks, self.root]]
            return sum(map(rounded, reduced)) + sum(rounded(p.values * item) for p in own)
        return sum(rounded(p.values * item) for p in self.trained)

    def has(self, name: str) -> bool:
        """Return whether an adapter stands beside weight ``name``."""
        return name in self._adapted
