"""``trl``: the files ``completions_*.parquet`` that TRL's trainers write with ``log_completions``.

    step, prompt, completion, one column a reward function, advantage

Prompt and completion are text, or chat messages in which the policy wrote what the assistant says. Both are tokenised
again; completions of equal prompts are a group. ``data.reward_columns`` says which columns are added up where there are
several; a reward that does not apply is empty and left out of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from longstraw.data.rollouts.stored import Format, Row, Stored, column
from longstraw.data.task import DataError

OTHERS = ("step", "prompt", "completion", "advantage")


def _matches(row: Row) -> bool:
    return {"prompt", "completion", "advantage"} <= set(row)


def _read(row: Row, reward_columns: Sequence[str]) -> Iterator[Stored]:
    reward = _reward(row, reward_columns)
    prompt, completion = column(row, "prompt", (str, list)), column(row, "completion", (str, list))
    if isinstance(prompt, str) != isinstance(completion, str):
        raise DataError("one of prompt and completion is text and the other chat messages")
    if isinstance(prompt, str):
        yield Stored(reward=reward, prompt=prompt, text=completion)
        return
    messages = [without_nulls(message) for message in [*prompt, *completion]]
    said = [message["role"] == "assistant" for message in messages[len(prompt) :]]
    if not any(said):
        raise DataError("no message of the completion is the assistant's")
    yield Stored(reward=reward, messages=messages, written=[False] * len(prompt) + said)


def without_nulls(message: Any) -> dict[str, Any]:
    """Return a chat message without the keys that a table's other messages have and this one has not."""
    if not isinstance(message, dict) or not (isinstance(message.get("role"), str) or "finish_reason" in message):
        raise DataError("a message is no object with role and content")
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _reward(row: Row, reward_columns: Sequence[str]) -> float:
    numbers = [k for k, v in row.items() if k not in OTHERS and (v is None or isinstance(v, int | float))]
    if not reward_columns and len(numbers) != 1:
        there = (
            f"{', '.join(numbers)} may all be rewards; say which" if numbers else "no column holds a reward; name it"
        )
        raise DataError(f"{there} with data.reward_columns=[NAME]")
    for name in reward_columns:
        if name not in row:
            raise DataError(f"data.reward_columns: {name!r} is no column; there are {', '.join(row)}")
    applying = [row[name] for name in reward_columns or numbers]
    applying = [value for value in applying if value is not None and not math.isnan(value)]
    if not applying:
        raise DataError("no reward applies")
    return math.fsum(applying)


FORMAT = Format("prompt, completion, advantage", _matches, _read)
