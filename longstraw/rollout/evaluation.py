"""Responses to held-out prompts and their rewards: each prompt is evaluated once, and one response is drawn on it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from longstraw.config import RunConfig
from longstraw.data import DataError, Task, build_task, run_tokenizer
from longstraw.data.task import Example, PromptTask
from longstraw.data.tokenizer import Tokenizer
from longstraw.models.decoder import Decoder
from longstraw.observer import UNOBSERVED, Observer
from longstraw.rollout.sampling import Sampling, draw
from longstraw.step import prefill
from longstraw.tracking.evaluations import Answer

PROMPT_END = 64  # tokens of a prompt that are decoded to be shown


@dataclass(frozen=True)
class HeldOut:
    """The held-out prompts of a run, at each of its lengths."""

    config: RunConfig
    tasks: Sequence[PromptTask]
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.tasks) * self.config.evaluate.examples

    def __iter__(self) -> Iterator[tuple[PromptTask, Example]]:
        """Yield each prompt with its task; a prompt is made when it is asked for."""
        for task in self.tasks:
            for number in range(self.config.evaluate.examples):
                yield task, task.example(number, "heldout")


def held_out(config: RunConfig, task: Task | None = None) -> HeldOut:
    """Return the held-out prompts of a run; ``task`` is the run's own, where it is there already.

    Raises ``DataError`` for data without rewards for drawn responses, or a length that the task does not fit into.
    """
    contexts = config.evaluate.positions()
    own = [task or build_task(config)] if not contexts else []
    tasks = own + [build_task(replace(config, context=context)) for context in contexts]
    found = [task for task in tasks if isinstance(task, PromptTask)]
    if len(found) < len(tasks):
        raise DataError(f"data={config.data.name} gives no reward for drawn responses, so nothing is evaluated with it")
    return HeldOut(config, found, run_tokenizer(config))


def answers(model: Decoder, prompts: HeldOut, observer: Observer = UNOBSERVED) -> Iterator[Answer]:
    """Yield the answer of ``model`` to each of ``prompts``; the same prompts and seeds whenever this is called."""
    for task, example in prompts:
        yield _answer(model, prompts, task, example, observer)


def _answer(model: Decoder, prompts: HeldOut, task: PromptTask, example: Example, observer: Observer) -> Answer:
    """Evaluate one prompt and draw a response; the prompt's state ends with this call."""
    config, device = prompts.config, model.lm_head.weight.device
    sampling = Sampling(
        config.response_length,
        config.evaluate.temperature,
        config.top_p,
        config.top_k,
        config.min_p,
        tuple(config.stop or ()),
    )
    prompt = torch.from_numpy(example.prompt).to(device)
    retained = prefill(model, prompt, chunk=config.chunk, state=config.state, observer=observer)
    seed = random.Random(f"evaluate {config.seed} {example.id}").getrandbits(63)
    samples = draw(model, retained, [seed], sampling, observer=observer)
    response = samples.responses[0].numpy()
    (reward,) = task.reward(example, [response])
    return Answer(
        example.id,
        length=len(example.prompt),
        reward=reward,
        tokens=len(response),
        ended=samples.ended[0],
        depth=example.meta.get("depth"),
        difficulty=example.meta.get("difficulty"),
        prompt_end=prompts.tokenizer.decode(example.prompt[-PROMPT_END:]),
        response=prompts.tokenizer.decode(response),
    )
