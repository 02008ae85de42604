"""``verl``: the files ``{step}.jsonl`` that verl writes with ``trainer.rollout_data_dir``.

    {"input": "..", "output": "..", "gts": .., "score": 1.0, "step": 3, ..}

Text only, without special tokens, so it is tokenised again; responses to equal inputs are a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longstraw.data.rollouts.stored import Format, Row, Stored, column


def _matches(row: Row) -> bool:
    return {"input", "output", "score"} <= set(row)


def _read(row: Row, reward_columns: Sequence[str]) -> Iterator[Stored]:
    yield Stored(reward=row["score"], prompt=column(row, "input", str), text=column(row, "output", str))


FORMAT = Format("input, output, score", _matches, _read)
