"""``nemo_rl``: the files ``train_data_step{N}.jsonl`` that NeMo-RL writes by default, one sample a line.

    content, rewards, input_lengths, token_ids, token_loss_mask, sample_loss_mask, advantages, generation_logprobs, ..

Each value is the only item of a list, as a batch of one has it; ids are padded behind ``input_lengths``. The response
begins at the first token in the loss; samples whose ids before it are equal are a group. Where groups were filtered,
``filtered_rewards`` are those of the samples that were kept. A sample left out of the loss keeps its reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longstraw.data.rollouts.stored import Format, Row, Stored, column, same_length
from longstraw.data.task import DataError

PER_TOKEN = ("token_loss_mask", "generation_logprobs")


def _matches(row: Row) -> bool:
    return {"token_ids", "token_loss_mask", "input_lengths"} <= set(row)


def _read(row: Row, reward_columns: Sequence[str]) -> Iterator[Stored]:
    sample = {key: _only(value) for key, value in row.items()}
    ids = column(sample, "token_ids", list)
    same_length(sample, PER_TOKEN, len(ids))
    length = column(sample, "input_lengths", int)
    if not 0 < length <= len(ids):
        raise DataError(f"input_lengths is {length} for {len(ids)} token ids")
    mask = [int(value == 1) for value in sample["token_loss_mask"][:length]]
    if 1 not in mask:
        raise DataError("no token is in the loss, so nothing says where the response begins")
    start = mask.index(1)
    left_out = sample.get("sample_loss_mask", 1) == 0
    yield Stored(
        reward=sample.get("filtered_rewards", sample.get("rewards")),
        prompt=ids[:start],
        tokens=ids[start:length],
        logprobs=sample["generation_logprobs"][start:length],
        loss_mask=[0] * (length - start) if left_out else mask[start:],
    )


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


FORMAT = Format("token_ids, token_loss_mask, input_lengths", _matches, _read)
