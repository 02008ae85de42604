"""The only places where the host reads a tensor's value: how many tokens go where, and a few numbers for the record.

Each read waits for the device. A simulation's tensors have no values, so it supplies the counts and numbers instead.
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


def read_counts(values: Tensor, expected: list[int]) -> list[int]:
    """Return the counts in ``values``, received from other ranks; ``expected`` in a simulation."""
    return values.tolist() if _count is _measured else expected


def read_scalar(value: Tensor, stated: float) -> float:
    """Return the number in ``value``; ``stated`` in a simulation."""
    return float(value) if _count is _measured else stated


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; True in a simulation."""
    return _count is not _measured or torch.equal(a, b)


@contextmanager
def use_stated_counts(count: Callable[[Tensor, int], list[int]]) -> Iterator[None]:
    """Use the counts that ``count`` returns instead of reading tensors, for a simulation.

    It gets the arguments of ``counts`` and must return ``number`` counts whose sum is the number of entries. Holds for
    all threads: a backward on a GPU runs in its own.
    """
    global _count
    before, _count = _count, count
    try:
        yield
    finally:
        _count = before
