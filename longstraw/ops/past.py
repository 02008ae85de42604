"""``Past``: the retained state of one layer, as its operations read it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from longstraw.ops.chunk import Chunk
from longstraw.ops.host_offload import HostRows, RetainedRows, Rows


class Past:
    """The retained state of one layer by tensor name, and which positions this rank holds.

    No container that PyTorch's pytrees know, because module hooks must neither cast these tensors nor hold them.
    ``rows(name)`` are retained rows on the device or in host memory, for operations that copy them; ``grad(name)`` is
    the buffer for the gradient of the last of them, None if they get none.
    ``positions`` is the number of earlier positions, ``spans`` those whose rows this rank holds. ``chunk`` is set by
    the model that evaluates new positions; None: this rank evaluates all of them.
    """

    __slots__ = ("_grads", "_tensors", "chunk", "positions", "spans")

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
        self._tensors, self._grads = tensors, grads or {}

    def new_positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions [count] of the new tokens that are evaluated here."""
        first = self.positions + (self.chunk.start if self.chunk is not None else 0)
        return torch.arange(first, first + count, device=device)

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
        return RetainedRows((self._tensors[first], self._tensors[second]), grads)

    def grad(self, name: str) -> Rows | None:
        return self._grads.get(name)
