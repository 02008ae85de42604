"""What every task offers to the loop: prompts and rewards for responses, or whole groups where data hold responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from longstraw.group import Group

SPLITS = ("train", "heldout")


class DataError(ValueError):
    """Data that cannot be used as they are; the message says which, why, and what would do."""


@dataclass(frozen=True)
class Example:
    """Hold one prompt and what its rewards need.

    ``meta`` is fit for JSON. Made tasks write: ``length`` (tokens), ``depth`` (where the evidence begins, as a fraction
    of the prompt), ``difficulty`` (a whole number), ``evidence`` ([start, end) token ranges), ``split``.
    """

    prompt: NDArray[np.int64]  # [P] token ids
    id: str
    columns: dict[str, Any] = field(default_factory=dict)  # passed to a user's reward; ``answer`` where one is known
    meta: dict[str, Any] = field(default_factory=dict)
    source: Any = None  # the prompt as rewards get it: text, chat messages, or None: the decoded token ids


class Task(Protocol):
    """Groups by step, in any order: the same step gives the same group, so a resumed run sees what it would have seen.

    The steps that share a retained prompt (``refresh_every``) get the same group.
    """

    description: dict[str, Any]  # small and fit for JSON: where the data come from, what was left out

    def group(self, step: int) -> Group: ...


@runtime_checkable
class PromptTask(Task, Protocol):
    """Prompts by number and rewards for responses that somebody else samples.

    ``group`` of a task without responses raises ``DataError``.
    """

    def example(self, number: int, split: str = "train") -> Example:
        """Return prompt ``number`` of a split; the same number gives the same example, in any order and process."""
        ...

    def reward(self, example: Example, responses: Sequence[NDArray[np.int64]]) -> list[float | None]:
        """Return a finite reward for each response, given as its token ids; None where no reward applies."""
        ...

    def golden(self, example: Example) -> NDArray[np.int64]:
        """Return the token ids of a right answer; raise ``DataError`` where none is known."""
        ...
