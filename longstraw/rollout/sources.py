"""The sources of responses by the name that ``rollout`` has for them, and what a step asks them for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from longstraw.config import RunConfig
from longstraw.data.task import DataError, PromptTask, Task
from longstraw.group import Group
from longstraw.observer import Observer
from longstraw.rollout.group import Policy, Request, Rollout, Source, draw_group, sampling_of
from longstraw.rollout.sampling import draw


def request_group(task: Task, config: RunConfig, step: int, number: int, device: torch.device) -> Request:
    """Return what ``step`` asks a source for: prompt ``number`` of the run, on ``device``, the same at every call.

    Raises ``DataError`` for a task that does not have what ``config.rollout`` needs.
    """
    if config.rollout == "given":
        group = task.group(number * config.refresh_every).to(device)  # tasks count steps
        return Request(group.prompt, task, config, step, number, group=group)
    if not isinstance(task, PromptTask):
        raise DataError(f"data={config.data.name} gives no reward for drawn responses; use rollout=given")
    example = task.example(number)
    return Request(torch.as_tensor(example.prompt, device=device), task, config, step, number, example=example)


def give(policy: Policy, request: Request, observer: Observer) -> Rollout:
    """Return the group that the data hold."""
    assert request.group is not None
    return Rollout(request.group, retokenized=getattr(request.task, "tokenised", 0) > 0)


def sample(policy: Policy, request: Request, observer: Observer) -> Rollout:
    """Return a group drawn from the retained prompt by the model that is trained."""
    sampling = sampling_of(request.config)
    return draw_group(
        policy, request, lambda seeds: draw(policy.model, policy.retained, seeds, sampling, observer=observer)
    )


def golden(policy: Policy, request: Request, observer: Observer) -> Rollout:
    """Return the task's right answer, for a supervised step: a group of one, whose advantage is 1.

    Where there is a stop token the answer ends with it, if there is room.
    """
    assert isinstance(request.task, PromptTask)
    assert request.example is not None
    answer = torch.from_numpy(request.task.golden(request.example))
    if request.config.stop and len(answer) < request.config.response_length:
        answer = torch.cat([answer, answer.new_tensor(request.config.stop[:1])])
    group = Group(request.prompt, [answer], [1.0], id=request.example.id, advantages=[1.0])
    return Rollout(group.to(policy.retained.prompt.device))


def source_of(config: RunConfig, publish: Callable[[Path], None], folder: Path) -> Source:
    """Return where the responses of a run come from.

    ``publish`` saves the policy's adapter to a new folder, every rank taking part; ``folder`` is where such folders go.
    """
    if config.rollout == "server":
        from longstraw.rollout.served import ServedSource  # and httpx with it, which no other source needs

        return ServedSource(config, publish, folder)
    return {"given": give, "sample": sample}[config.rollout]
