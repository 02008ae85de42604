"""A group made on its retained prompt: responses drawn from it and rewarded by the task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longstraw.config import RunConfig
from longstraw.data.task import Example, PromptTask
from longstraw.group import Group
from longstraw.grpo import mask_truncated
from longstraw.models.decoder import Decoder
from longstraw.observer import Observer
from longstraw.rollout.sampling import Samples, Sampling, draw
from longstraw.step import Retained


@dataclass(frozen=True)
class Rollout:
    """A group and how it was drawn."""

    group: Group
    sampled_positions: int  # of all draws, those with equal rewards included
    resampled: int  # draws before this one, whose rewards were equal
    truncated_fraction: float | None  # responses that no stop token ended; None: there is no stop token


def sampling_of(config: RunConfig) -> Sampling:
    """Return how a run draws its responses."""
    return Sampling(
        config.response_length, config.temperature, config.top_p, config.top_k, config.min_p, tuple(config.stop)
    )


def response_seeds(seed: int, step: int, attempt: int, count: int) -> list[int]:
    """Return one seed of 63 bits a response, by the run's ``seed``, the ``step`` and how often it was drawn before."""
    return [random.Random(f"sample {seed} {step} {attempt} {i}").getrandbits(63) for i in range(count)]


def draw_group(
    policy: tuple[Decoder, Retained],
    task: PromptTask,
    example: Example,
    step: int,
    config: RunConfig,
    *,
    observer: Observer,
) -> Rollout:
    """Draw a group on the retained prompt of ``example`` and reward it; again while its rewards are equal.

    It is drawn again ``config.resample`` times at most. Log-probabilities are those at which tokens were drawn.
    """
    (model, retained), sampling, positions = policy, sampling_of(config), 0
    for attempt in range(config.resample + 1):
        seeds = response_seeds(config.seed, step, attempt, config.group_size)
        samples = draw(model, retained, seeds, sampling, observer=observer)
        positions += sum(map(len, samples.responses))
        rewards = rewards_of(task, example, samples)
        if min(rewards) != max(rewards):
            break
    group = Group(retained.prompt, samples.responses, rewards, old_logprobs=samples.logprobs, id=example.id)
    truncated = [not ended for ended in samples.ended]
    if config.mask_truncated:
        masks = [torch.ones_like(response, dtype=torch.bool) for response in samples.responses]
        group = replace(group, loss_masks=mask_truncated(masks, truncated))
    fraction = sum(truncated) / len(truncated) if sampling.stop else None
    return Rollout(group.to(retained.prompt.device), positions, attempt, fraction)


def rewards_of(task: PromptTask, example: Example, samples: Samples) -> list[float]:
    """Return the rewards of drawn responses; raise ``ValueError`` where none applies to one of them."""
    rewards: Sequence[float | None] = task.reward(example, [response.numpy() for response in samples.responses])
    known = [reward for reward in rewards if reward is not None]
    if len(known) < len(rewards):
        i = rewards.index(None)
        raise ValueError(f"{example.id}: no reward applies to response {i}; a group's responses are all compared")
    return known
