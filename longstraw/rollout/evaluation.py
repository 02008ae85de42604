"""Responses to held-out prompts and their rewards: each prompt is evaluated once, and one response is drawn on it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from longstraw.config import RunConfig
from longstraw.data import DataError, Task, build_task, held_out_configs, run_tokenizer
from longstraw.data.task import Example, PromptTask
from longstraw.data.tokenizer import Tokenizer
from longstraw.models.decoder import Decoder
from longstraw.observer import UNOBSERVED, Observer
from longstraw.rollout.group import Decide, decide_here
from longstraw.rollout.sampling import draw
from longstraw.rollout.sources import sampling_of
from longstraw.step import prefill
from longstraw.tracking.evaluations import Answer

PROMPT_END = 64  # tokens of a prompt that are decoded to be shown
MANY = 10**9  # prompts: as many as are asked for


@dataclass(frozen=True)
class HeldOut:
    """The held-out prompts of a run: those of a task for each length."""

    config: RunConfig
    tasks: Sequence[PromptTask]
    tokenizer: Tokenizer

    def numbers(self) -> list[tuple[PromptTask, int]]:
        """Return each prompt's task and number; a file may have fewer prompts than are asked for."""
        asked = self.config.evaluate.examples
        return [(task, i) for task in self.tasks for i in range(min(asked, task.description.get("prompts", MANY)))]

    def example(self, task: PromptTask, number: int) -> Example:
        """Return a prompt; where held-out prompts have a file of their own, that file has no splits."""
        return task.example(number, "train" if self.config.evaluate.path is not None else "heldout")


def held_out(config: RunConfig, task: Task | None = None) -> HeldOut:
    """Return the held-out prompts of a run; ``task`` is the run's own, where it is there already.

    Raises ``DataError`` for data without rewards for drawn responses, or a length that the task does not fit into.
    """
    own = None if config.evaluate.contexts or config.evaluate.path is not None else task
    tasks = [build_task(one) for one in held_out_configs(config)] if own is None else [own]
    found = [task for task in tasks if isinstance(task, PromptTask)]
    if len(found) < len(tasks):
        raise DataError(f"data={config.data.name} gives no reward for drawn responses, so nothing is evaluated with it")
    return HeldOut(config, found, run_tokenizer(config))


def answers(
    model: Decoder, prompts: HeldOut, observer: Observer = UNOBSERVED, decide: Decide = decide_here
) -> Iterator[Answer]:
    """Yield the answer of ``model`` to each of ``prompts``; the same prompts and seeds whenever this is called.

    ``decide`` is that of a ``Policy``: of the ranks that share a prompt, one rewards its response.
    """
    for task, number in prompts.numbers():
        yield _answer(model, prompts, task, prompts.example(task, number), observer, decide)


def _answer(
    model: Decoder, prompts: HeldOut, task: PromptTask, example: Example, observer: Observer, decide: Decide
) -> Answer:
    """Evaluate a prompt, draw a response on it and reward that; the prompt's state ends with this call."""
    config, decode = prompts.config, prompts.tokenizer.decode
    prompt = torch.from_numpy(example.prompt).to(model.lm_head.weight.device)
    retained = prefill(model, prompt, chunk=config.chunk, state=config.state, observer=observer)
    sampling = replace(sampling_of(config), temperature=config.evaluate.temperature)
    seed = random.Random(f"evaluate {config.seed} {example.id}").getrandbits(63)
    samples = draw(model, retained, [seed], sampling, observer=observer)
    response = samples.responses[0].numpy()
    (reward,) = decide(lambda: task.reward(example, [response]))
    return Answer(
        example.id,
        length=len(example.prompt),
        reward=reward,
        tokens=len(response),
        ended=samples.ended[0],
        depth=_number(example, "depth"),
        difficulty=_number(example, "difficulty"),
        prompt_end=decode(example.prompt[-PROMPT_END:]),
        response=decode(response),
    )


def _number(example: Example, key: str) -> Any:
    """Return what a made task says of a prompt, or a user's line under ``key``; None where that is no number."""
    value = example.meta.get(key, example.columns.get(key))
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
