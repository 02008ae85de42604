"""``Chunk``: positions that are evaluated together, and which of them this rank evaluates."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

AT_ONCE = 16  # segments evaluated side by side at most: each may need a state of its own
TILE = 256  # positions evaluated side by side at most, padding included


@dataclass(frozen=True)
class Chunk:
    """``count`` positions evaluated together, of which [start, stop) are this process's own part.

    They continue the past one after the other. With ``segments``, the lengths of several that add up to ``count``, each
    segment continues the past by itself: its positions follow the past's last one, and it sees no other segment.
    """

    count: int
    start: int
    stop: int
    segments: tuple[int, ...] = ()

    @property
    def own(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def is_packed(self) -> bool:
        return len(self.segments) > 1

    @property
    def is_whole(self) -> bool:
        """Whether this process evaluates all positions, one or more, and they are of one segment."""
        return not self.is_packed and (self.start, self.stop) == (0, self.count) and self.count > 0

    def own_offsets(self, device: torch.device) -> Tensor:
        """Return the place of each own position [t] within its segment."""
        if not self.is_packed:
            return torch.arange(self.start, self.stop, device=device)
        return torch.cat([torch.arange(length, device=device) for length in self.segments])[self.own]

    @cached_property
    def pieces(self) -> list[tuple[slice, slice]]:
        """The parts of segments that are here, as places among own positions, and each segment's later positions.

        The later ones are places in the chunk; there are none where the segment's end is here.
        """
        lengths = self.segments if self.is_packed else (self.count,)
        found = []
        for length, end in zip(lengths, itertools.accumulate(lengths), strict=True):
            first, last = max(end - length, self.start), min(end, self.stop)
            if first < last:
                found.append((slice(first - self.start, last - self.start), slice(last, end)))
        return found

    @property
    def later(self) -> list[tuple[slice, slice]]:
        """Those of ``pieces`` whose segments have later positions: at most one."""
        return [(rows, later) for rows, later in self.pieces if later.start < later.stop]

    @property
    def _at_once(self) -> int:
        """The positions of a batch: half of them at most, so that its copies take less than one long segment does."""
        return min(self.count // 2, TILE)

    @cached_property
    def own_batches(self) -> list[SideBySide]:
        """The parts of segments that are here, in batches."""
        return side_by_side([piece for piece, _ in self.pieces], self._at_once)

    @cached_property
    def batches(self) -> list[SideBySide]:
        """All segments, in batches."""
        ends = itertools.accumulate(self.segments)
        pieces = [slice(end - length, end) for length, end in zip(self.segments, ends, strict=True)]
        return side_by_side(pieces, self._at_once)


def whole(count: int) -> Chunk:
    """Return the chunk of a process that evaluates all of it."""
    return Chunk(count, 0, count)


class SideBySide:
    """n segments that an operation evaluates at once, as if each were further heads of one sequence of L positions.

    Shorter segments are filled up with zeros. These come after all positions, so nothing that is causal reads them.
    """

    def __init__(self, pieces: list[slice]):
        self.number, self.length = len(pieces), max(piece.stop - piece.start for piece in pieces)
        self._pieces = pieces
        self._run = _run(pieces)
        self._indices: tuple[Tensor, ...] = ()

    def fold(self, x: Tensor) -> Tensor:
        """Return [L, n H, ...] of ``x`` [T, H, ...]."""
        if self._run is not None:
            folded = x[self._run].unflatten(0, (self.number, self.length))
            return folded.transpose(0, 1).flatten(1, 2)
        read, _, _, padding = self._on(x.device)
        folded = x[read].index_fill_(0, padding, 0) if len(padding) else x[read]
        return folded.unflatten(0, (self.number, self.length)).transpose(0, 1).flatten(1, 2)

    def unfold(self, folded: Tensor, out: Tensor) -> None:
        """Write ``folded`` [L, n H, ...] to the segments' places in ``out`` [T, H, ...]."""
        if self._run is not None:
            unfolded = folded.unflatten(1, (self.number, -1)).transpose(0, 1)
            out[self._run].unflatten(0, (self.number, self.length)).copy_(unfolded)
            return
        _, real, places, _ = self._on(out.device)
        out[places] = folded.unflatten(1, (self.number, -1)).transpose(0, 1).flatten(0, 1)[real].to(out.dtype)

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the place read for each of n L positions, those that are no padding, their places, and the padding."""
        if not self._indices:
            slots = [
                (piece.start + j, j < piece.stop - piece.start) for piece in self._pieces for j in range(self.length)
            ]
            real = [slot for slot, (_, is_real) in enumerate(slots) if is_real]
            padding = [slot for slot, (_, is_real) in enumerate(slots) if not is_real]
            read = [place if is_real else 0 for place, is_real in slots]
            lists = read, real, [slots[slot][0] for slot in real], padding
            self._indices = tuple(torch.tensor(x, dtype=torch.long, device=device) for x in lists)
        return self._indices


def _run(pieces: list[slice]) -> slice | None:
    """Return the places of pieces of one length that follow one another; None if these do not."""
    alike = len({piece.stop - piece.start for piece in pieces}) == 1
    follow = all(one.stop == other.start for one, other in itertools.pairwise(pieces))
    return slice(pieces[0].start, pieces[-1].stop) if alike and follow else None


def side_by_side(pieces: list[slice], most: int) -> list[SideBySide]:
    """Return ``pieces`` in batches of up to ``most`` positions, padding included, alike in length."""
    batches: list[list[slice]] = []
    for piece in sorted((piece for piece in pieces if piece.start < piece.stop), key=lambda x: x.start - x.stop):
        longest = batches[-1][0].stop - batches[-1][0].start if batches else 0
        if batches and len(batches[-1]) < AT_ONCE and (len(batches[-1]) + 1) * longest <= most:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return [SideBySide(batch) for batch in batches]
