"""The retained state of a prompt, one object a layer: later tokens read it in place of the prompt.

Two classes cover every layer kind: ``Appended`` keeps a row a position, ``Carried`` a state of fixed size that every
chunk rewrites. A layer names its tensors; the class decides how they are stored, at which positions they can be read,
and where their gradient is accumulated. The state is immutable while branches run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from longstraw.ops.chunk import Chunk
from longstraw.ops.host_offload import HostRows, Rows, Staging, host_empty
from longstraw.ops.kept import Kept
from longstraw.ops.past import BranchPast, Past

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RowStorage:
    """How appended rows are stored: their dtype, their gradient's, and the ``Staging`` if in host memory.

    None: rows in the model's dtype, their gradient in at least float32, both on the model's device.
    """

    dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    staging: Staging | None = None  # of all layers of one prompt
    keep_attention: bool = False  # attention's results stay until the backward of what was evaluated


DEFAULT_STORAGE = RowStorage()


class RetainedState(Protocol):
    """The interface of a layer's state."""

    positions: int  # how many the state covers

    def absorb(self, update: Tensors, count: int, first: int = 0) -> None:
        """Add the update of ``count`` new positions; its rows are those of position ``first`` of them and following."""

    def leaves(self, end: int, grad: bool) -> Past:
        """Return the state after positions [0, end); with ``grad``, gradients of its uses are accumulated."""

    def branch(self, count: int, room: Chunk) -> BranchPast:
        """Return the past of ``count`` branches of up to ``room.count`` positions, which do not write to the state.

        The rows of positions ``room.own`` are kept here.
        """

    def cotangent(self, start: int, end: int) -> Tensors:
        """Return and drop the gradient accumulated for the update of positions [start, end)."""

    def freeze(self) -> None:
        """Keep no gradient: no trained parameter reaches this state."""

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes by tensor name, without gradients and snapshots."""

    def difference(self, update: Tensors, start: int, end: int) -> Tensor:
        """Return the largest absolute difference of ``update`` from the stored one of positions [start, end).

        0-d, on the device of ``update``: the host need not wait for it. NaN counts as infinite.
        """

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor held with its kind: ``retained``, ``state_gradient`` or ``snapshots``."""


class Appended:
    """One row a position, in buffers allocated once at full length: keys and values, latents, index keys.

    A rank may hold the rows of only some positions, a contiguous part of each chunk. Arguments that are positions must
    be borders of chunks.
    """

    def __init__(
        self,
        capacity: int,
        rows: dict[str, tuple[int, ...]],
        *,
        grad_from: int | None,
        like: Tensor,
        frozen: tuple[str, ...] = (),
        storage: RowStorage = DEFAULT_STORAGE,
    ):
        """Allocate ``capacity`` rows of each named shape; rows from ``grad_from`` on get a gradient (None: none).

        Rows have the dtype and device of ``like`` unless ``storage`` says otherwise.
        """
        self.positions = 0
        self._spans: list[tuple[int, int]] = []  # the positions whose rows are here, rising
        self._device, self._staging, self._dtype = like.device, storage.staging, like.dtype
        self._keeps_attention = storage.keep_attention
        stored = storage.dtype or like.dtype
        self._gradient_dtype = storage.gradient_dtype or torch.promote_types(
            torch.promote_types(like.dtype, stored), torch.float32
        )
        self._rows = {name: self._empty((capacity, *shape), stored) for name, shape in rows.items()}
        self._layer = -1 if self._staging is None else self._staging.add(self._rows)
        self._grad_from = grad_from
        self._trained = [name for name in rows if name not in frozen]
        self._grads: Tensors = {}

    def absorb(self, update: Tensors, count: int, first: int = 0) -> None:
        held, start = self._held(self.positions), self.positions + first
        size = 0
        for name, rows in update.items():
            size = len(rows)
            target = self._rows[name][held : held + size]
            target.copy_(rows.detach().to(target.dtype), non_blocking=True)
        if self._spans and self._spans[-1][1] == start:
            start = self._spans.pop()[0]
        self._spans.append((start, self.positions + first + size))
        self.positions += count

    def leaves(self, end: int, grad: bool) -> Past:
        held = self._held(end)
        spans = tuple((start, min(stop, end)) for start, stop in self._spans if start < end)
        if self._staging is not None:
            self._staging.restart()
        rows = {name: self._read(name, rows[:held]) for name, rows in self._rows.items()}
        grads = {}
        if grad and self._grad_from is not None and end > self._grad_from:
            size = held - self._held(self._grad_from)
            grads = {name: self._read(name, buffer[:size]) for name, buffer in self._buffers().items()}
        past = Past(end, rows, grads, spans)
        past.kept = Kept() if self._keeps_attention else None
        return past

    def branch(self, count: int, room: Chunk) -> BranchPast:
        shared, size = self.leaves(self.positions, grad=False), room.stop - room.start
        shapes = {name: (count, *rows.shape[1:-1], size, rows.shape[-1]) for name, rows in self._rows.items()}
        own = {name: torch.empty(shape, dtype=self._dtype, device=self._device) for name, shape in shapes.items()}
        return BranchPast(shared, {name: shared.rows(name) for name in self._rows}, own, count, room)

    def cotangent(self, start: int, end: int) -> Tensors:
        if self._grad_from is None or start < self._grad_from:
            raise IndexError(f"no gradient is kept for position {start}, only from {self._grad_from}")
        before = self._held(self._grad_from)
        piece = slice(self._held(start) - before, self._held(end) - before)
        accumulated = {name: buffer[piece] for name, buffer in self._grads.items()}
        if self._staging is None:
            return accumulated
        return {name: rows.to(self._device, non_blocking=True, copy=True) for name, rows in accumulated.items()}

    def freeze(self) -> None:
        self._trained = []

    def num_bytes(self) -> dict[str, int]:
        return {name: rows.nbytes for name, rows in self._rows.items()}

    def difference(self, update: Tensors, start: int, end: int) -> Tensor:
        piece = slice(self._held(start), self._held(end))
        return _largest(_difference(self._rows[name][piece], rows) for name, rows in update.items())

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("retained", rows) for rows in self._rows.values())
        yield from (("state_gradient", buffer) for buffer in self._grads.values())

    def _buffers(self) -> Tensors:
        """The gradient buffers, allocated when the first branch needs them and not during prefill."""
        if not self._grads:
            for name in self._trained:
                rows = self._rows[name]
                shape = (len(rows) - self._held(self._grad_from or 0), *rows.shape[1:])
                self._grads[name] = self._empty(shape, self._gradient_dtype).zero_()
        return self._grads

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._staging is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return host_empty(shape, dtype)

    def _read(self, name: str, rows: Tensor) -> Rows:
        return rows if self._staging is None else HostRows(rows, self._staging, self._layer, name)

    def _held(self, end: int) -> int:
        """Return how many of the positions before ``end`` have their rows here."""
        return sum(min(stop, end) - start for start, stop in self._spans if start < end)


class Carried:
    """A state of fixed size that every chunk rewrites: recurrent matrix, convolution tail.

    With a gradient, a snapshot is kept at every chunk border from ``grad_from`` on.
    """

    def __init__(self, initial: Tensors, *, grad_from: int | None):
        """Start from ``initial``, the state before any position; keep snapshots from ``grad_from`` on (None: none)."""
        self.positions = 0
        self._grad_from = grad_from
        self._frozen = False
        self._snapshots = {0: initial}
        self._grads: Tensors = {}

    def absorb(self, update: Tensors, count: int, first: int = 0) -> None:
        if self._grad_from is None or self.positions < self._grad_from:
            del self._snapshots[self.positions]
        self.positions += count
        self._snapshots[self.positions] = {name: tensor.detach() for name, tensor in update.items()}

    def leaves(self, end: int, grad: bool) -> Past:
        if end not in self._snapshots:
            raise IndexError(f"there is no snapshot at position {end}, only at {sorted(self._snapshots)}")
        tensors = {name: tensor.detach() for name, tensor in self._snapshots[end].items()}
        for name, leaf in tensors.items() if grad and not self._frozen else ():
            leaf.requires_grad_().register_post_accumulate_grad_hook(partial(self._add, name))
        return Past(end, tensors)

    def branch(self, count: int, room: Chunk) -> BranchPast:
        shared, names = self.leaves(self.positions, grad=False), self._snapshots[self.positions]
        tensors = {name: shared[name].expand(count, *shared[name].shape) for name in names}
        return BranchPast(shared, tensors, {}, count, room)

    def cotangent(self, start: int, end: int) -> Tensors:
        self._snapshots = {at: snapshot for at, snapshot in self._snapshots.items() if at <= start}
        accumulated, self._grads = self._grads, {}  # the next border is further left and has its own sum
        return accumulated

    def freeze(self) -> None:
        self._frozen = True

    def num_bytes(self) -> dict[str, int]:
        return {name: tensor.nbytes for name, tensor in self._snapshots[max(self._snapshots)].items()}

    def difference(self, update: Tensors, start: int, end: int) -> Tensor:
        return _largest(_difference(self._snapshots[end][name], tensor) for name, tensor in update.items())

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for at, snapshot in self._snapshots.items():
            kind = "retained" if at == self.positions else "snapshots"
            yield from ((kind, tensor) for tensor in snapshot.values())
        yield from (("state_gradient", gradient) for gradient in self._grads.values())

    def _add(self, name: str, leaf: Tensor) -> None:
        """Add a leaf's gradient, as soon as it is complete, to the sum over branches in at least float32."""
        assert leaf.grad is not None
        if name in self._grads:
            self._grads[name] += leaf.grad
        else:
            self._grads[name] = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))
        leaf.grad = None


def _largest(differences: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(differences)).amax()


def _difference(kept: Tensor, again: Tensor) -> Tensor:
    again = again.detach().to(kept.dtype)
    if not again.numel():
        return torch.zeros((), dtype=torch.float64, device=again.device)
    apart = (kept.to(again.device, non_blocking=True) - again).abs_()
    return apart.amax().double().nan_to_num(nan=math.inf)
