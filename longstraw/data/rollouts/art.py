"""``art``: what ART stores of its trajectories, as JSON lines (a group a line) or Parquet (a trajectory a row).

    {"trajectories": [{"messages_and_choices": [..], "reward": 1.0, "tools": .., "additional_histories": [..]}, ..]}
    group_index, reward, tools, messages[{role, content, tool_calls, tool_call_id, trainable}], ..

Choices, which are the messages with a ``finish_reason``, are what the policy wrote. Neither ids nor log-probabilities
are stored, so the conversation is rendered by the chat template and tokenised. A further history of a trajectory is a
response of its own, beside those of the same group whose prompt is equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from longstraw.data.rollouts.stored import Format, Row, Stored, column
from longstraw.data.rollouts.trl import without_nulls
from longstraw.data.task import DataError


def _matches(row: Row) -> bool:
    return isinstance(row.get("trajectories"), list) or {"group_index", "messages", "reward"} <= set(row)


def _read(row: Row, reward_columns: Sequence[str]) -> Iterator[Stored]:
    if "trajectories" not in row:
        own = {"messages": column(row, "messages", list), "tools": _parsed(row.get("tools"))}
        yield from _histories(own, row, str(row.get("group_index")), "response")
        return
    for i, trajectory in enumerate(column(row, "trajectories", list)):
        if not isinstance(trajectory, dict):
            raise DataError(f"trajectories[{i}] is no object")
        own = {"messages": trajectory.get("messages_and_choices"), "tools": trajectory.get("tools")}
        yield from _histories(own, trajectory, None, f"trajectories[{i}]")


def _histories(own: Row, trajectory: Row, group: str | None, where: str) -> Iterator[Stored]:
    """Yield a trajectory and its further histories."""
    more = _parsed(trajectory.get("additional_histories")) or []
    if not isinstance(more, list) or not all(isinstance(history, dict) for history in more):
        raise DataError(f"{where}.additional_histories must be a list of objects")
    histories = [own] + [{"messages": h.get("messages_and_choices"), "tools": h.get("tools")} for h in more]
    for i, history in enumerate(histories):
        name = where if i == 0 else f"{where}.additional_histories[{i - 1}]"
        messages: list[dict[str, Any]] = []
        written: list[bool] = []
        for message in column(history, "messages", list, f"{name}."):
            message, wrote = _message(message)
            messages.append(message)
            written.append(wrote)
        if not any(written):
            raise DataError(f"{name}: the policy wrote none of its messages")
        if "reward" not in trajectory:
            raise DataError(f"{name} has no reward")
        reward, alone = trajectory["reward"], group is None
        yield Stored(reward, group, alone, messages=messages, written=written, tools=history["tools"], where=name)


def _message(stored: Any) -> tuple[dict[str, Any], bool]:
    """Return a message as a chat template takes it, and whether the policy wrote it."""
    message = without_nulls(stored)
    written = bool(message.pop("trainable", False))
    if "finish_reason" in message:
        message, written = without_nulls(message.get("message")), True
    if "tool_calls" in message:
        message["tool_calls"] = _parsed(message["tool_calls"])
    return message, written


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"a column that holds JSON cannot be read: {error}") from None


FORMAT = Format("trajectories, or group_index, messages, reward", _matches, _read)
