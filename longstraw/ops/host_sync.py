"""Where a tensor's value is read: how many tokens go where, and the few numbers that a step tells of itself.

Tensors without values (a simulation's), or with meaningless ones, have their counts stated; numbers are stated then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def _measured(places: Tensor, number: int) -> list[int]:
    return torch.bincount(places.flatten(), minlength=number).tolist()


_count: Callable[[Tensor, int], list[int]] = _measured


def counts(places: Tensor, number: int) -> list[int]:
    """Return how many entries of ``places``, integers below ``number``, name each of the ``number`` places."""
    return _count(places, number)


def told(values: Tensor, expected: list[int]) -> list[int]:
    """Return counts that other ranks told, ``values``; ``expected`` where counts are stated and not read."""
    return values.tolist() if _count is _measured else expected


def number(value: Tensor, stated: float) -> float:
    """Return the number that ``value`` holds; ``stated`` where counts are stated and not read."""
    return float(value) if _count is _measured else stated


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are alike, bit for bit; they count as that where counts are stated and not read."""
    return _count is not _measured or torch.equal(a, b)


@contextmanager
def counts_stated(count: Callable[[Tensor, int], list[int]]) -> Iterator[None]:
    """Let ``count`` state the counts instead of reading them, where tensors have no values.

    It gets the arguments of ``counts`` and must return ``number`` counts whose sum is the number of entries. Holds for
    all threads: a backward on a GPU runs in its own.
    """
    global _count
    before, _count = _count, count
    try:
        yield
    finally:
        _count = before
