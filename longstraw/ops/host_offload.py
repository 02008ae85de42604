"""Read retained rows, and accumulate their gradients, whether they are kept on the device or in host memory.

Rows in host memory are copied to the device a tile or a layer at a time. Gradients are accumulated on the device, in at
least float32, and copied back. On CUDA the copies run on their own stream: the next tile or layer is copied while the
current one is used. On a processor they are made too, so that counted memory is what a GPU would hold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstraw.ops.kept import Kept


@torch.library.custom_op("longstraw::host_empty", mutates_args=(), device_types=None)
def host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uninitialised host memory, page-locked where there is a GPU to copy to.

    A custom operator, so that a count of device memory on a processor can leave these tensors out. PyTorch rounds
    page-locked memory up to a power of two.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())


@host_empty.register_fake
def _(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


HOST_EMPTY = torch.ops.longstraw.host_empty.default  # as a dispatch mode sees it


def to_host(x: Tensor) -> Tensor:
    """Return a copy of ``x`` in host memory."""
    return host_empty(x.shape, x.dtype).copy_(x)


class HostRows:
    """Rows [S, ...] in host memory: ``name`` of a layer's state. Sliced like a tensor."""

    __slots__ = ("home", "layer", "name", "staging")

    def __init__(self, home: Tensor, staging: Staging, layer: int, name: str):
        self.home, self.staging, self.layer, self.name = home, staging, layer, name

    def __len__(self) -> int:
        return len(self.home)

    def __getitem__(self, rows: slice) -> HostRows:
        return HostRows(self.home[rows], self.staging, self.layer, self.name)


Rows = Tensor | HostRows


class RetainedRows(NamedTuple):
    """The two kinds of rows [P, ...] that a layer reads, and buffers for the gradient of the last of them.

    A backward adds into the buffers, in at least float32. If a buffer is None, its rows get no gradient. ``kept`` is
    where the result of attending to them stays until the backward.
    """

    rows: tuple[Rows, Rows]
    grads: tuple[Rows | None, Rows | None] = (None, None)
    kept: Kept | None = None


class QueryGradients(NamedTuple):
    """The queries' side of the backward of one part of an attention.

    Gradient of the output, queries, and output and log-sum-exp of the whole attention over all parts: with these the
    parts' gradients add up to the whole one.
    """

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


@dataclass
class PendingCopy:
    """Copies to the device that may not have finished."""

    tensors: list[Tensor]
    event: Any = None  # on CUDA; None: the copies are finished

    def arrived(self) -> list[Tensor]:
        """Return the copies; later work on the current stream waits for them."""
        if self.event is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.event)
        return self.tensors


@dataclass
class Staging:
    """The rows of one prompt's layers in host memory, and which of them are on ``device`` as whole layers.

    Layers are read in order, and in a backward from last to first; the next layer's rows are copied while this one's
    are used, so rows of at most two layers are on the device. Copies are a cache, kept until others replace them.
    """

    device: torch.device
    homes: list[dict[str, Tensor]] = field(default_factory=list)  # a layer's rows by name, at full length
    _here: dict[int, tuple[int, PendingCopy]] = field(default_factory=dict)  # by layer: rows copied, and the copies
    _last: int = -1
    _step: int = 1

    def add(self, homes: dict[str, Tensor]) -> int:
        """Add the next layer's rows and return its number."""
        self.homes.append(homes)
        return len(self.homes) - 1

    def restart(self) -> None:
        """Drop all copies before another pass from the first layer on."""
        self._here.clear()
        self._last, self._step = -1, 1

    def layer(self, number: int, size: int, backward: bool) -> dict[str, Tensor]:
        """Return the first ``size`` rows of a layer by name; a ``backward`` reads them last in its pass."""
        if backward or number < self._last:
            self._step = -1
        elif number > self._last:
            self._step = 1
        self._last = number
        wanted = [i for i in (number, number + self._step) if 0 <= i < len(self.homes)]
        self._here = {i: self._here[i] for i in wanted if i in self._here and self._here[i][0] == size}
        for i in wanted:
            if i not in self._here:
                self._here[i] = size, _copies([home[:size] for home in self.homes[i].values()], self.device)
        coming = self._here.pop(number)[1] if backward else self._here[number][1]
        return dict(zip(self.homes[number], coming.arrived(), strict=True))


def whole(rows: Sequence[Rows], dtype: torch.dtype, backward: bool = False) -> list[Tensor]:
    """Return ``rows`` of one layer in ``dtype`` on the device."""
    staged = [x for x in rows if isinstance(x, HostRows)]
    here = staged[0].staging.layer(staged[0].layer, len(staged[0]), backward) if staged else {}
    return [(here[x.name] if isinstance(x, HostRows) else x).to(dtype) for x in rows]


@contextmanager
def device_grad_buffers(buffers: Sequence[Rows | None]) -> Iterator[list[Tensor | None]]:
    """Enter with copies of ``buffers`` on the device, at least float32; what was added is written back."""
    kept = [x for x in buffers if x is not None]
    added = [_wide(x) for x in _begin(kept).arrived()]
    yield _in_place(added, buffers)
    _keep(kept, added)
    _settle(kept)


def tiles(
    past: Sequence[Rows], buffers: Sequence[Rows | None], dtype: torch.dtype, size: int
) -> Iterator[tuple[list[Tensor], list[Tensor | None]]]:
    """Yield retained rows, ``size`` at a time, in ``dtype`` on the device, with what to add their gradients into.

    A buffer covers the last rows of the past, as many as it has; a tile's may be empty. The caller drops a tile
    before it takes the next.
    """
    count = len(past[0])
    pieces = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    kept = [[_covered(x, piece, count) for x in buffers if x is not None] for piece in pieces]
    following = None
    for i, piece in enumerate(pieces):
        here = following or _begin([*(x[piece] for x in past), *kept[i]])
        following = None
        if i + 1 < len(pieces):
            following = _begin([*(x[pieces[i + 1]] for x in past), *kept[i + 1]])
        arrived = here.arrived()
        rows, added = [x.to(dtype) for x in arrived[: len(past)]], [_wide(x) for x in arrived[len(past) :]]
        del here, arrived
        yield rows, _in_place(added, buffers)
        del rows
        _keep(kept[i], added)
        del added
    _settle([x for x in buffers if x is not None])


def _covered(buffer: Rows, rows: slice, count: int) -> Rows:
    """Return what ``buffer``, which covers the last of ``count`` rows, has for ``rows``: the last of them."""
    missing = count - len(buffer)
    return buffer[max(rows.start - missing, 0) : max(rows.stop - missing, 0)]


def _in_place(added: Sequence[Tensor], buffers: Sequence[Rows | None]) -> list[Tensor | None]:
    """Return ``added`` at the places of the buffers that exist, None at the others."""
    them = iter(added)
    return [None if x is None else next(them) for x in buffers]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _begin(rows: Sequence[Rows]) -> PendingCopy:
    """Begin to copy those of ``rows`` that are in host memory; the others need no copy."""
    staged = [x for x in rows if isinstance(x, HostRows)]
    if not staged:
        return PendingCopy([x for x in rows if isinstance(x, Tensor)])
    coming = _copies([x.home for x in staged], staged[0].staging.device)
    copies = iter(coming.tensors)
    return PendingCopy([next(copies) if isinstance(x, HostRows) else x for x in rows], coming.event)


def _copies(homes: Sequence[Tensor], device: torch.device) -> PendingCopy:
    here = [torch.empty(home.shape, dtype=home.dtype, device=device) for home in homes]
    with _beside(device) as stream:
        for x, home in zip(here, homes, strict=True):
            x.copy_(home, non_blocking=True)
    if stream is None:
        return PendingCopy(here)
    for x in here:  # the caller may never wait for them: their memory must not be reused before the copy is done
        x.record_stream(stream)
    return PendingCopy(here, stream.record_event())


def _keep(kept: Sequence[Rows], added: Sequence[Tensor]) -> None:
    """Copy the accumulated buffers ``added`` back to ``kept``, rounded once if that dtype is narrower."""
    for home, x in zip(kept, added, strict=True):
        if isinstance(home, HostRows):
            with _beside(home.staging.device) as stream:
                home.home.copy_(x.to(home.home.dtype), non_blocking=True)
            if stream is not None:
                x.record_stream(stream)
        elif home.dtype != x.dtype:
            home.copy_(x)


def _settle(kept: Sequence[Rows]) -> None:
    """Make later work on the current stream wait for all copies back to the host."""
    for home in kept:
        if isinstance(home, HostRows) and home.staging.device.type == "cuda":
            device = home.staging.device
            torch.cuda.current_stream(device).wait_stream(_stream(device))


@contextmanager
def _beside(device: torch.device) -> Iterator[Any]:
    """Enter the copy stream, after all work queued so far; without CUDA there is none."""
    if device.type != "cuda":
        yield None
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
