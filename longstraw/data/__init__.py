"""Tasks: where the groups of a run come from."""

from __future__ import annotations

from longstraw.config import JsonlConfig, NeedleConfig, RunConfig
from longstraw.data.jsonl import JsonlTask
from longstraw.data.needle import NeedleTask
from longstraw.data.task import DataError, Task
from longstraw.data.tokenizer import load_tokenizer

__all__ = ["DataError", "Task", "build_task"]


def build_task(config: RunConfig) -> Task:
    """Return the task that ``config.data`` names, its data read and checked.

    Raises ``DataError`` for data that cannot be used, ``FileNotFoundError`` for such that are not there.
    """
    data = config.data
    folder = data.tokenizer if isinstance(data, JsonlConfig) else None
    tokenizer = load_tokenizer(folder, checkpoint=config.model.checkpoint, vocab_size=config.model.vocab_size)
    if isinstance(data, JsonlConfig):
        return JsonlTask(config, data, tokenizer)
    if isinstance(data, NeedleConfig):
        return NeedleTask(config, data, tokenizer)
    raise DataError(f"data={data.name!r} is none of needle, jsonl")
