"""What both architectures count with: bytes of a number, rounding, and the lengths of one run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

BLOCK = 512  # what an allocation is rounded up to, as in ``memory``
ITEM = {"float64": 8, "float32": 4, "bfloat16": 2}
TOKEN = 8  # int64

Shape = tuple[int, ...]


def rounded(size: int) -> int:
    """Return ``size`` bytes rounded up as an allocation is."""
    return -(-size // BLOCK) * BLOCK


def tensors(shapes: Iterable[Shape], item: int) -> int:
    """Return the bytes of one tensor of each shape."""
    return sum(rounded(prod(shape) * item) for shape in shapes)


@dataclass(frozen=True)
class Lengths:
    """The positions of one run, the bytes of its dtypes, and where its gradient reaches."""

    retained: int  # prompt positions whose state is kept
    response: int
    group: int
    chunk: int
    grad_from: int | None  # the first retained position with a gradient; None: none has one
    item: int  # bytes of a number in the model's dtype
    inner: int  # in the inner dtype, at least float32
    row_item: int  # of retained rows
    row_gradient_item: int  # of the gradient they are owed
    on_host: bool  # whether both lie in host memory
    head_trained: bool = True  # whether the head's weight gets a gradient
    ranks: int = 1  # that share a chunk's positions

    def own(self, end: int) -> int:
        """Return how many of the positions before ``end``, a border of chunks or the last, lie on the first rank."""
        whole, rest = divmod(end, self.chunk)
        return whole * (self.chunk // self.ranks) + rest // self.ranks

    @property
    def graded(self) -> int:
        """Prompt positions that the prompt backward evaluates again."""
        return self.graded_before(self.retained)

    def graded_before(self, end: int) -> int:
        """Return those of them before position ``end``."""
        return 0 if self.grad_from is None else max(end - self.grad_from, 0)

    def owed(self, values: int) -> int:
        """Bytes of ``values`` of a chunk's row gradients as its backward begins: brought from host memory, and widened.

        In the model's dtype all of them are made at once where they are kept in a narrower one.
        """
        brought = self.row_gradient_item if self.on_host else 0
        return values * (brought + (self.item if self.row_gradient_item < self.item else 0))

    @property
    def added_item(self) -> int:
        """Bytes of a number that a row's gradient is added into on the device; 0 where that is the buffer itself."""
        narrow = self.row_gradient_item < ITEM["float32"]
        return max(self.row_gradient_item, ITEM["float32"]) if self.on_host or narrow else 0

    def chunks(self, first: int) -> list[tuple[int, int]]:
        """Return the chunks from position ``first`` on that may hold the most: the last whole one, and a shorter rest.

        Each as its start and length.
        """
        whole, rest = divmod(self.retained - first, self.chunk)
        counts = [(whole - 1, self.chunk)] * (whole > 0) + [(whole, rest)] * (rest > 0)
        return [(first + number * self.chunk, count) for number, count in counts]

    def snapshots_before(self, start: int) -> int:
        """Return how many snapshots stand before position ``start``."""
        return 0 if self.grad_from is None else max(start - self.grad_from, 0) // self.chunk

    @property
    def snapshots(self) -> int:
        """States at chunk borders from which a chunk is evaluated again."""
        return -(-self.graded // self.chunk)


@dataclass(frozen=True)
class StateShapes:
    """What the layers retain: rows a position, with and without gradient, and summaries of fixed size."""

    learnt_rows: tuple[Shape, ...] = ()
    frozen_rows: tuple[Shape, ...] = ()
    summaries: tuple[Shape, ...] = ()  # in the inner dtype
    tails: tuple[Shape, ...] = ()  # in the model's

    def rows(self, lengths: Lengths) -> int:
        """Return the bytes of all rows."""
        every = self.learnt_rows + self.frozen_rows
        return tensors([(lengths.own(lengths.retained), *row) for row in every], lengths.row_item)

    def carried(self, lengths: Lengths) -> int:
        """Return the bytes of the summaries of one chunk border."""
        return tensors(self._summaries(lengths), lengths.inner) + tensors(self._tails(lengths), lengths.item)

    def row_gradients(self, lengths: Lengths) -> int:
        """Return the bytes of the rows' gradient buffers."""
        if not lengths.graded:
            return 0
        graded = lengths.own(lengths.retained) - lengths.own(lengths.grad_from or 0)
        return tensors([(graded, *row) for row in self.learnt_rows], lengths.row_gradient_item)

    def carried_gradients(self, lengths: Lengths) -> int:
        """Return the bytes of the gradient of the summaries of one border."""
        both = [*self._summaries(lengths), *self._tails(lengths)]
        return tensors(both, lengths.inner) if lengths.graded else 0

    def _summaries(self, lengths: Lengths) -> list[Shape]:
        """Of own heads."""
        return [(heads // lengths.ranks, *widths) for heads, *widths in self.summaries]

    def _tails(self, lengths: Lengths) -> list[Shape]:
        """Of own channels."""
        return [(taps, channels // lengths.ranks) for taps, channels in self.tails]
