"""``Kept``: results of a layer's evaluation that its recomputation in a backward takes instead of making them again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Kept:
    """What one layer's attention made of one chunk or graph of responses, by name.

    A checkpointed block is evaluated twice: with the chunk, and again in its backward. The first time ``once`` makes a
    result and keeps it; the second time it hands it over and keeps it no longer.
    """

    __slots__ = ("_results",)

    def __init__(self) -> None:
        self._results: dict[str, tuple[Tensor, ...]] = {}

    def once(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return what ``make`` gives, or gave when the layer was evaluated first."""
        if name in self._results:
            return self._results.pop(name)
        made = make()
        self.keep(name, made)
        return made

    def keep(self, name: str, results: tuple[Tensor, ...]) -> None:
        """Keep ``results`` without their graph."""
        self._results[name] = tuple(x.detach() for x in results)

    def held(self) -> dict[str, tuple[Tensor, ...]]:
        """Return what is kept and has not been handed over."""
        return dict(self._results)

    def clear(self) -> None:
        """Drop what is kept."""
        self._results.clear()


def once(kept: Kept | None, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what ``make`` gives; where results are ``kept``, as ``Kept.once`` does."""
    return make() if kept is None else kept.once(name, make)
