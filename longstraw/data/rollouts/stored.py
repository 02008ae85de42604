"""One response as another trainer's file has it, before it is tokenised and put into its group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longstraw.data.jsonl_schema import kind_of
from longstraw.data.task import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """Hold one response: its ``tokens``, or its ``text``, or the ``messages`` of its whole conversation.

    Responses of one file belong together where both their group and their prompt are equal.
    """

    reward: Any
    group: str | None = None  # its id in the file; None: there is none
    row_is_group: bool = False  # no response of another row belongs to the group
    prompt: Any = None  # token ids or text; None: with messages, theirs; else that of the group's response before
    tokens: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)  # the messages that the policy wrote
    tools: list[Any] | None = None
    logprobs: list[Any] | None = None  # one a token
    loss_mask: list[Any] | None = None
    temperature: float | None = None  # at which it was drawn; None: the file does not say
    where: str = "response"  # what messages call it, beside file and line

    def prompt_key(self) -> bytes | None:
        """Return a digest that equal prompts share; None where the prompt is that of the response before."""
        prompt = self.prompt
        if self.messages:
            prompt = [self.messages[: self.written.index(True)], self.tools]
        if prompt is None:
            return None
        return hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Format:
    """How one trainer stores rollouts: which rows are its own, and which responses a row holds."""

    columns: str  # those it is known by, as messages list them
    matches: Callable[[Row], bool]
    read: Callable[[Row, Sequence[str]], Iterable[Stored]]  # of a row and ``data.reward_columns``


def column(row: Row, key: str, kind: type | tuple[type, ...], where: str = "") -> Any:
    """Return the value of a column; raise ``DataError`` where it is not there or no ``kind``."""
    value = row.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "a list", dict: "an object", str: "text"}
        kinds: tuple[Any, ...] = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(dict.fromkeys(names.get(each, "a number") for each in kinds))
        raise DataError(f"{where}{key} is {kind_of(value) if key in row else 'not there'}, must be {wanted}")
    return value


def same_length(row: Row, keys: Sequence[str], length: int, where: str = "") -> None:
    """Raise ``DataError`` for the first list of ``keys`` that has not ``length`` values."""
    for key in keys:
        if len(column(row, key, list, where)) != length:
            raise DataError(f"{where}{key} has {len(row[key])} values for {length} tokens")
