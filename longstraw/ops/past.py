"""``Past``: the retained state of one layer, as its operations read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from longstraw.ops.chunk import Chunk
from longstraw.ops.host_offload import HostRows, RetainedRows, Rows
from longstraw.ops.kept import Kept


class Past:
    """The retained state of one layer by tensor name, and which positions this rank holds.

    No container that PyTorch's pytrees know, because module hooks must neither cast these tensors nor hold them.
    ``rows(name)`` are retained rows on the device or in host memory, for operations that copy them; ``grad(name)`` is
    the buffer for the gradient of the last of them, None if they get none.
    ``positions`` is the number of earlier positions, ``spans`` those whose rows this rank holds. ``chunk`` is set by
    the model that evaluates new positions; None: this rank evaluates all of them. ``kept`` is where attention's results
    stay from the new positions' evaluation to their recomputation; None: they are made again.
    """

    __slots__ = ("_grads", "_tensors", "chunk", "kept", "positions", "spans")

    def __init__(
        self,
        positions: int,
        tensors: Mapping[str, Rows],
        grads: Mapping[str, Rows] | None = None,
        spans: tuple[tuple[int, int], ...] | None = None,
    ):
        self.positions = positions
        self.spans = ((0, positions),) if spans is None else spans
        self.chunk: Chunk | None = None
        self.kept: Kept | None = None
        self._tensors, self._grads = tensors, grads or {}

    def new_positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions [count] of the new tokens that are evaluated here."""
        if self.chunk is None:
            return torch.arange(self.positions, self.positions + count, device=device)
        return self.positions + self.chunk.own_offsets(device)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if isinstance(tensor, HostRows):
            raise TypeError(f"{name} is in host memory: use rows({name!r}), which operations copy to the device")
        return tensor

    def rows(self, name: str) -> Rows:
        return self._tensors[name]

    def pair(self, first: str, second: str) -> RetainedRows:
        """Return two kinds of rows and the buffers for their gradients."""
        grads = (self._grads.get(first), self._grads.get(second))
        return RetainedRows((self._tensors[first], self._tensors[second]), grads, self.kept)

    def grad(self, name: str) -> Rows | None:
        return self._grads.get(name)


class BranchPast(Past):
    """The past of n branches of one prompt, each of which evaluates one position: all of them the same one.

    Retained rows are the prompt's: shared by all branches, never written. A branch's own rows are in buffers
    [n, ..., F, D] allocated once, for the F response positions ``room``: where ranks share a prompt, each holds the
    rows of a part of them, for all branches. A layer without rows keeps a summary [n, ...], a branch's own from the
    start. ``positions`` are the retained ones, ``added`` those that every branch has evaluated since.
    """

    __slots__ = ("_count", "_own", "added", "room")

    def __init__(self, shared: Past, tensors: Mapping[str, Rows], own: Mapping[str, Tensor], count: int, room: Chunk):
        super().__init__(shared.positions, tensors, spans=shared.spans)
        self.added, self.room, self._count, self._own = 0, room, count, own

    def new_positions(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), self.positions + self.added, device=device)

    def append(self, name: str, rows: Tensor) -> Tensor:
        """Write ``rows`` [n, ..., D] of the position under evaluation; return the own rows [n, ..., f, D] so far.

        Both only of positions whose rows are kept here.
        """
        own, filled = self.buffer(name), self._filled(self.added + 1)
        if filled > self._filled(self.added):
            own[..., filled - 1, :] = rows
        return own[..., :filled, :]

    def buffer(self, name: str) -> Tensor:
        """Return the buffer [n, ..., F, D] of the branches' own rows, of which ``append`` has filled the first."""
        return self._own[name][: self._count]

    def advance(self, update: Mapping[str, Tensor]) -> None:
        """Go on to the next position; ``update`` is what the layer returned for this one. Own rows are written."""
        self.added += 1
        if not self._own:
            self._tensors = update

    def keep(self, branches: list[int]) -> None:
        """Drop all branches but these, given in rising order; what is kept moves up within its buffers."""
        filled = self._filled(self.added)
        for own in self._own.values():
            for to, branch in enumerate(branches):
                if to != branch:
                    own[to, ..., :filled, :] = own[branch, ..., :filled, :]
        if not self._own:
            self._tensors = {name: self[name][branches] for name in self._tensors}
        self._count = len(branches)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of own rows, or the branches' summaries, with their kind of memory."""
        own = self._own or {name: self[name] for name in self._tensors}
        yield from (("retained", tensor) for tensor in own.values())

    def held_positions(self, device: torch.device) -> Tensor:
        """Return the positions, int32 rising, of the retained rows that are here."""
        pieces = [torch.arange(*span, dtype=torch.int32, device=device) for span in self.spans]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32, device=device)

    def _filled(self, added: int) -> int:
        """Return how many of the first ``added`` response positions have their rows here."""
        return max(min(added, self.room.stop) - self.room.start, 0)
