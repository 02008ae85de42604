"""``tokens``: a line a response, for whoever writes rollouts with code of their own.

    {"group": "a", "prompt_ids": [..], "response_ids": [..], "loss_mask": [..]?, "logprobs": [..]?, "reward": 1.0,
     "temperature": 1.0?}

Only the first line of a group needs the prompt. ``prompt`` and ``response`` may hold text instead of ids; without
``group``, responses to equal prompts are a group. SkyRL's generator output, verl's agent loops and TRL's asynchronous
rows become such lines by renaming their columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longstraw.data.jsonl_schema import check_keys
from longstraw.data.rollouts.stored import Format, Row, Stored, column
from longstraw.data.task import DataError

KEYS = ("group", "prompt_ids", "response_ids", "loss_mask", "logprobs", "reward", "temperature")


def _matches(row: Row) -> bool:
    return "reward" in row and ("response_ids" in row or "response" in row)


def _read(row: Row, reward_columns: Sequence[str]) -> Iterator[Stored]:
    check_keys(dict(row), (*KEYS, "prompt", "response"), "")
    if "reward" not in row:
        raise DataError("no reward")
    group, prompt = row.get("group"), row.get("prompt_ids")
    if prompt is None and row.get("prompt") is not None:
        prompt = column(row, "prompt", str)
    if group is None and prompt is None:
        raise DataError("neither group nor prompt_ids: nothing says which prompt the response is to")
    ids = row.get("response_ids")
    yield Stored(
        reward=row["reward"],
        group=None if group is None else str(group),
        prompt=prompt,
        tokens=ids,
        text=column(row, "response", str) if ids is None else None,
        logprobs=row.get("logprobs"),
        loss_mask=row.get("loss_mask"),
        temperature=None if row.get("temperature") is None else float(column(row, "temperature", (int, float))),
    )


FORMAT = Format("response_ids (or response), reward", _matches, _read)
