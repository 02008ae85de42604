"""What a source of responses gets and returns, and a group of drawn responses, rewarded by the task.

Groups are made after the prefill. A source is a function from a ``Policy`` and a ``Request`` to a ``Rollout``;
``sources`` lists them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from longstraw.config import RunConfig
from longstraw.data.task import Example, PromptTask, Task
from longstraw.group import Group
from longstraw.grpo import mask_truncated, overlong_penalty
from longstraw.models.decoder import Decoder
from longstraw.observer import Observer
from longstraw.rollout.sampling import Samples, Sampling
from longstraw.step import Retained

Decide = Callable[[Callable[[], Any]], Any]


class DriftError(ValueError):
    """A server whose log-probabilities are not those of the policy that it should answer with."""


def check_drift(found: float, most: float) -> None:
    """Raise ``DriftError`` where log-probabilities came ``found`` from ours on average, and ``most`` are allowed."""
    if not found <= most:
        raise DriftError(
            f"the server's log-probabilities are {found:.3f} from ours on average, and server.max_drift={most}: it has "
            "other weights, another temperature, or caches of an earlier adapter"
        )


def decide_here(find: Callable[[], Any]) -> Any:
    """Decide where there is one rank."""
    return find()


@dataclass(frozen=True)
class Policy:
    """The model and the prompt it has evaluated."""

    model: Decoder
    retained: Retained
    decide: Decide = decide_here  # one rank of the prompt finds it out, all get the result


@dataclass(frozen=True)
class Request:
    """A group that a step needs: its prompt, and what its responses are made and rewarded with."""

    prompt: Tensor  # [P], on the model's device
    task: Task
    config: RunConfig
    step: int
    number: int  # of the prompt within the run; each is drawn from once, so seeds follow from it
    example: Example | None = None  # of a task that rewards any response
    group: Group | None = None  # with the responses that the data hold


@dataclass(frozen=True)
class Rollout:
    """A group and how it came about."""

    group: Group  # its prompt on the model's device, the rest on the host
    sampled: tuple[int, ...] = ()  # the lengths of all responses drawn, those of equal rewards included
    resampled: int = 0  # draws before this one, whose rewards were equal
    truncated_fraction: float | None = None  # responses that no stop token ended; None: there is no stop token
    probe_drift: float | None = None  # mean distance of the server's log-probabilities from ours; None: not probed
    sampler_age: int | None = None  # optimizer steps since the server got its weights; None: it never did
    retokenized: bool = False  # whether responses came as text, so that their tokens may not be those drawn

    @property
    def sampled_positions(self) -> int:
        return sum(self.sampled)


class Source(Protocol):
    """Where the responses of a group come from. Every rank of the prompt calls it, and gets the same group."""

    def __call__(self, policy: Policy, request: Request, observer: Observer) -> Rollout: ...


def sampling_of(config: RunConfig) -> Sampling:
    """Return how a run draws its responses."""
    return Sampling(
        config.response_length,
        config.temperature,
        config.top_p,
        config.top_k,
        config.min_p,
        tuple(config.stop or ()),
        config.drawn_together,
    )


def response_seeds(seed: int, number: int, attempt: int, count: int) -> list[int]:
    """Return one seed of 63 bits a response, by the run's ``seed``, the prompt and how often it was drawn before."""
    return [random.Random(f"sample {seed} {number} {attempt} {i}").getrandbits(63) for i in range(count)]


def draw_group(policy: Policy, request: Request, draw: Callable[[list[int]], Samples]) -> Rollout:
    """Return a group that ``draw`` draws, a response for each seed it gets, and the task rewards.

    It is drawn again while its rewards are equal, ``config.resample`` times at most; what a reward loses for its
    response's length counts. Ranks of prompts side by side draw together, so where only a prompt beside this one is
    drawn again, ``draw`` gets no seed. ``old_logprobs`` are those at which the tokens were drawn.
    """
    config, resampled, equal = request.config, 0, True
    lengths: list[int] = []
    for attempt in range(config.resample + 1):
        drawn = draw(response_seeds(config.seed, request.number, attempt, config.group_size) if equal else [])
        if equal:
            samples, resampled = drawn, attempt
            lengths += map(len, samples.responses)
            rewards = _with_penalty(policy.decide(partial(rewards_of, request, samples)), samples, config)
            equal = min(rewards) == max(rewards)
        if not policy.model.agree(int(equal)):
            break
    assert request.example is not None
    group = Group(
        request.prompt, samples.responses, rewards, old_logprobs=samples.logprobs or None, id=request.example.id
    )
    truncated = [not ended for ended in samples.ended]
    if config.mask_truncated:
        masks = [torch.ones_like(response, dtype=torch.bool) for response in samples.responses]
        group = replace(group, loss_masks=mask_truncated(masks, truncated))
    fraction = sum(truncated) / len(truncated) if config.stop else None
    return Rollout(group.to(policy.retained.prompt.device), tuple(lengths), resampled, fraction)


def _with_penalty(rewards: list[float], samples: Samples, config: RunConfig) -> list[float]:
    """Return the rewards with what is taken off for responses that come close to the longest allowed."""
    if config.overlong_buffer is None:
        return rewards
    longest, buffer = config.response_length, config.overlong_buffer
    lengths = map(len, samples.responses)
    return [reward + overlong_penalty(n, longest, buffer) for reward, n in zip(rewards, lengths, strict=True)]


def rewards_of(request: Request, samples: Samples) -> list[float]:
    """Return the rewards of drawn responses; raise ``ValueError`` where none applies to one of them."""
    task, example = request.task, request.example
    assert isinstance(task, PromptTask)
    assert example is not None
    rewards: Sequence[float | None] = task.reward(example, [response.numpy() for response in samples.responses])
    known = [reward for reward in rewards if reward is not None]
    if len(known) < len(rewards):
        i = rewards.index(None)
        raise ValueError(f"{example.id}: no reward applies to response {i}; a group's responses are all compared")
    return known
