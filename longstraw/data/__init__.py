"""Tasks: prompts, responses and rewards of a run. Data are checked without importing torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from longstraw.config import DATA, JsonlConfig, MadeConfig, NeedleConfig, RolloutsConfig, RunConfig
from longstraw.config.data import MADE
from longstraw.data.haystack import check_haystack
from longstraw.data.jsonl import JsonlTask, check_jsonl
from longstraw.data.made import MadeTask
from longstraw.data.needle import NeedleTask, check_room
from longstraw.data.rollouts import RolloutsTask, check_rollouts
from longstraw.data.task import DataError, Task
from longstraw.data.tokenizer import ByteTokenizer, Tokenizer, find_tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "Task",
    "build_task",
    "check_data",
    "check_responses",
    "held_out_configs",
    "run_tokenizer",
    "tokenizer_folder",
]


def tokenizer_folder(config: RunConfig) -> Path | None:
    """Return the folder of the tokenizer that a run loads, or None where bytes are its tokens."""
    given = config.data.tokenizer if isinstance(config.data, JsonlConfig | RolloutsConfig) else None
    return find_tokenizer(given, checkpoint=config.model.checkpoint, vocab_size=config.model.vocab_size)


def check_data(config: RunConfig) -> None:
    """Check quickly that the data in ``config.data`` exist, that files begin as they should and that lengths fit.

    No checkpoint's tokenizer is loaded, which takes seconds, and only the beginning of a file is read; ``build_task``
    checks the rest. Raises ``DataError`` or ``OSError``.
    """
    data, folder = config.data, tokenizer_folder(config)
    tokenizer = ByteTokenizer() if folder is None else None
    if isinstance(data, JsonlConfig):
        check_jsonl(config, data, tokenizer)
    elif isinstance(data, RolloutsConfig):
        check_rollouts(data)
    elif isinstance(data, NeedleConfig | MadeConfig):
        check_haystack(data.haystack)
        if isinstance(data, NeedleConfig) and tokenizer is not None:
            check_room(config, tokenizer)
        if isinstance(data, MadeConfig) and tokenizer is not None:
            MadeTask(config, data, tokenizer)  # its prompts have room


def check_responses(config: RunConfig) -> None:
    """Raise ``DataError`` where a run's responses are to come from data without any, or are drawn and not rewarded."""
    name, prompts = config.data.name, isinstance(config.data, MadeConfig)
    if config.rollout == "given" and prompts:
        raise DataError(f"data={name} has prompts and no responses: add rollout=sample")
    if config.rollout != "given" and isinstance(config.data, NeedleConfig | RolloutsConfig):
        others = f"{', '.join(MADE)}, or jsonl with reward=package.module:function"
        raise DataError(f"data={name} has its own responses and rewards no others: rollout=given, or data={others}")


def held_out_configs(config: RunConfig) -> list[RunConfig]:
    """Return what ``build_task`` makes the held-out prompts of a run from, for each of its lengths; check them quickly.

    Raises ``DataError`` for data without held-out prompts, or without a reward for any response to them.
    """
    data, evaluate = config.data, config.evaluate
    if isinstance(data, JsonlConfig):
        if evaluate.path is None or config.reward is None or evaluate.contexts:
            raise DataError(
                "data=jsonl is evaluated on the prompts of evaluate.path=FILE, at their own lengths (without "
                "evaluate.contexts), by reward=package.module:function"
            )
        found = [replace(config, data=replace(data, path=evaluate.path))]
    elif isinstance(data, MadeConfig) and evaluate.path is None:
        found = [replace(config, context=context) for context in evaluate.positions() or [config.context]]
    else:
        has = "its own held-out prompts, so without evaluate.path" if evaluate.path else "no held-out prompts"
        raise DataError(
            f"data={data.name} has {has}; data=jsonl takes evaluate.path, and {', '.join(MADE)} make theirs"
        )
    for one in found:
        check_data(one)
    return found


def run_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a run's data."""
    folder = config.data.tokenizer if isinstance(config.data, JsonlConfig | RolloutsConfig) else None
    return load_tokenizer(folder, checkpoint=config.model.checkpoint, vocab_size=config.model.vocab_size)


def build_task(config: RunConfig) -> Task:
    """Return the task that ``config.data`` names, its data read and checked.

    Raises ``DataError`` for data that cannot be used, ``FileNotFoundError`` for missing files.
    """
    data, tokenizer = config.data, run_tokenizer(config)
    if isinstance(data, JsonlConfig):
        return JsonlTask(config, data, tokenizer)
    if isinstance(data, RolloutsConfig):
        return RolloutsTask(config, data, tokenizer)
    if isinstance(data, NeedleConfig):
        return NeedleTask(config, data, tokenizer)
    if isinstance(data, MadeConfig):
        return MadeTask(config, data, tokenizer)
    raise DataError(f"data={data.name!r} is none of {', '.join(DATA)}")
