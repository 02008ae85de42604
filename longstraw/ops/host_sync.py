"""The only places where the host reads a tensor's value: how many tokens go where, and a few numbers for the record.

Each read waits for the device. A simulation's tensors have no values, so it supplies the counts and numbers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def _measured(places: Tensor, number: int) -> list[int]:
    places = places.flatten()
    return places.new_zeros(number).scatter_add_(0, places, torch.ones_like(places)).tolist()  # bincount would wait too


_count: Callable[[Tensor, int], list[int]] = _measured
_reads = 0


def reads() -> int:
    """Return how often this process has read a tensor's value here, those of a simulation included."""
    return _reads


def _note_read() -> None:
    global _reads
    _reads += 1


def counts(places: Tensor, number: int) -> list[int]:
    """Return how many entries of ``places``, integers below ``number``, name each of the ``number`` places."""
    _note_read()
    return _count(places, number)


def stated_counts(places: Tensor, number: int) -> list[int]:
    """Return what ``counts`` would in a simulation; outside one, where they must be read, an empty list."""
    return [] if _count is _measured else _count(places, number)


def read_counts(values: Tensor, expected: list[int]) -> list[int]:
    """Return the counts in ``values``, 1-d; ``expected`` in a simulation."""
    _note_read()
    return values.tolist() if _count is _measured else expected


def read_scalar(value: Tensor, stated: float) -> float:
    """Return the number in ``value``; ``stated`` in a simulation."""
    _note_read()
    return float(value) if _count is _measured else stated


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
