"""The interface of what observes a step: called with each verb, its positions and what is held, as it happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class Holder(Protocol):
    """What holds tensors: a retained state, or what branches add to it."""

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor held with its kind of memory."""


class Observer:
    """Called with what the step does, as it does it; the base class ignores it. A step may be stopped between calls."""

    def verb(self, name: str, positions: int) -> AbstractContextManager[None]:
        """Enter a verb that will evaluate ``positions``."""
        return nullcontext()

    def advance(self, positions: int) -> None:
        """Note that a chunk or a branch of ``positions`` is done."""

    def holds(self, states: Sequence[Holder]) -> None:
        """Note that what ``states`` hold has changed."""


UNOBSERVED = Observer()
