"""What every task offers to the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from longstraw.grpo import Group


class DataError(ValueError):
    """Data that cannot be used as they are; the message says which, why, and what would do."""


class Task(Protocol):
    """Groups by step, in any order: the same step gives the same group, so a resumed run sees what it would have seen.

    The steps that share a retained prompt (``refresh_every``) get the same group.
    """

    description: dict[str, Any]  # small and fit for JSON: where the data come from, what was left out

    def group(self, step: int) -> Group: ...
