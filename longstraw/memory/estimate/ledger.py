"""Bytes that are alive while a pass is followed tensor by tensor, by kind, and the most that there were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longstraw.memory.estimate.sizes import rounded
from longstraw.memory.kinds import KINDS


@dataclass(frozen=True, eq=False)
class Held:
    """One tensor, or several alike, until they are dropped."""

    name: str
    size: int
    kind: str


class Ledger:
    """What a rank holds; ``base`` is there from the beginning."""

    def __init__(self, base: Mapping[str, int]) -> None:
        self.now = dict.fromkeys(KINDS, 0) | dict(base)
        self.total = self.peak = sum(self.now.values())
        self._at_peak = dict(self.now)
        self._rising = True

    @property
    def at_peak(self) -> dict[str, int]:
        """What was held at the peak, by kind."""
        return dict(self.now if self._rising else self._at_peak)

    def take(self, name: str, size: int, kind: str = "activations") -> Held:
        """Hold ``size`` bytes more."""
        held = Held(name, rounded(size), kind)
        self.now[kind] += held.size
        self.total += held.size
        if self.total > self.peak:
            self.peak, self._rising = self.total, True
        return held

    def drop(self, *held: Held) -> None:
        """Let go of what was taken."""
        if self._rising:
            self._at_peak, self._rising = dict(self.now), False
        for one in held:
            self.now[one.kind] -= one.size
            self.total -= one.size

    def spike(self, name: str, size: int, kind: str = "activations") -> None:
        """Hold ``size`` bytes for a moment."""
        self.drop(self.take(name, size, kind))
