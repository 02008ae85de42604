"""``Chunk``: positions that are evaluated together, and which of them this rank evaluates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """``count`` positions evaluated together, of which [start, stop) are this process's own part."""

    count: int
    start: int
    stop: int

    @property
    def own(self) -> slice:
        return slice(self.start, self.stop)


def whole(count: int) -> Chunk:
    """Return the chunk of a process that evaluates all of it."""
    return Chunk(count, 0, count)
