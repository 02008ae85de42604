"""Group-relative policy optimisation as plain functions on tensors: a group, its advantages, the loss of one branch.

    A_i  = (r_i - mean r) / (std r + 1e-6)     std unbiased, over the group; without scale_rewards r_i - mean r
    w_t  = exp(lp_t - old_t)                   importance=token
    w    = exp(mean_t(lp_t - old_t))           importance=sequence (GSPO), one ratio for all its tokens
    l_t  = -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) + kl_coef (exp(ref_t - lp_t) - (ref_t - lp_t) - 1)
    loss = sum over responses and kept tokens of l_t / D_i

    normalize   D_i, with n_i the kept tokens of response i and G the group's size
    response    G n_i              (GRPO: a mean over the response, then over the group)
    group       n_1 + .. + n_G     (DAPO: a mean over the group's tokens)
    constant    G response_length  (Dr. GRPO: long answers weigh no less a token than short ones)

The loss of a group is the plain sum of its branches' losses: each branch can be differentiated and dropped on its own.

TRL's loss is the same but for three choices: it adds 1e-4 to the standard deviation, it does not limit the ratio to
exp(20), and its clip fraction counts a clipped sequence once where this one counts the sequence's tokens. Its ``dapo``
divides by the tokens of all groups of the batch, which for one group is ``normalize=group`` (its ``bnpo``).

Shapes: P prompt positions, R response positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longstraw.config import AlgorithmConfig
from longstraw.ops.host_sync import read_scalar

ADVANTAGE_EPS = 1e-6
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8; beyond it a ratio counts as that and passes no gradient, or inf * 0 = NaN


@dataclass
class Group:
    """Hold one prompt, the responses drawn for it and their rewards.

    Lists, tuples and arrays become int64 tensors. ``old_logprobs`` are those of the policy that wrote the responses;
    ``loss_masks`` are True for tokens the policy wrote, False for others such as a tool's output. A response whose mask
    keeps no token adds nothing to the loss, and its reward still counts in the advantages of the others.
    Raises ``ValueError`` that names the response and the reason.
    """

    prompt: Tensor  # [P]
    responses: list[Tensor]  # [R_i] each
    rewards: list[float]
    old_logprobs: list[Tensor] | None = None  # [R_i] each
    loss_masks: list[Tensor] | None = None  # [R_i] each
    id: str = ""

    def __post_init__(self) -> None:
        self.prompt = _token_ids(self.prompt, "prompt")
        self.responses = [_token_ids(ids, f"response {i}") for i, ids in enumerate(self.responses)]
        if len(self.responses) < 2:
            raise ValueError(
                f"a group of {len(self.responses)}: advantages compare the responses to one prompt, so a group has two "
                "or more; draw more responses to this prompt"
            )
        self.rewards = [_reward(reward, i) for i, reward in enumerate(self.rewards)]
        _same_count("rewards", self.rewards, self.responses)
        if self.old_logprobs is not None:
            _same_count("old_logprobs", self.old_logprobs, self.responses)
            self.old_logprobs = [_tensor(x, f"old_logprobs of response {i}") for i, x in enumerate(self.old_logprobs)]
        if self.loss_masks is not None:
            _same_count("loss_masks", self.loss_masks, self.responses)
            self.loss_masks = [_mask(values, i) for i, values in enumerate(self.loss_masks)]
        for i, response in enumerate(self.responses):
            self._check_lengths(i, response)

    def _check_lengths(self, i: int, response: Tensor) -> None:
        for name, values in (("old_logprobs", self.old_logprobs), ("loss_masks", self.loss_masks)):
            if values is not None and values[i].shape != response.shape:
                raise ValueError(f"{name} of response {i}: shape {list(values[i].shape)} for {len(response)} tokens")
        if self.old_logprobs is None:
            return
        old = self.old_logprobs[i]
        if not old.is_floating_point():
            raise ValueError(f"old_logprobs of response {i}: {old.dtype}, expected floating point")
        read = torch.ones_like(response, dtype=torch.bool) if self.loss_masks is None else self.loss_masks[i]
        bad = (read & ~old.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            raise ValueError(f"old_logprobs of response {i}: {float(old[at])} at token {at}, must be finite")

    @property
    def prompt_positions(self) -> int:
        return len(self.prompt)

    @property
    def response_positions(self) -> list[int]:
        return [len(response) for response in self.responses]

    def to(self, device: torch.device | str) -> Group:
        """Return the same group with its prompt on ``device`` and the rest, which waits for its turn, on the host.

        What a rollout under ``torch.inference_mode`` made is copied: autograd cannot keep it.
        """

        def taken(values: Tensor, place: torch.device | str = "cpu") -> Tensor:
            values = values.to(place)
            return values.clone() if values.is_inference() else values

        moved = copy.copy(self)  # no second validation: it would read values back from the device
        moved.prompt = taken(self.prompt, device)
        moved.responses = [taken(response) for response in self.responses]
        for name in ("old_logprobs", "loss_masks"):
            values = getattr(self, name)
            setattr(moved, name, None if values is None else [taken(value) for value in values])
        return moved


def _tensor(values: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{what}: cannot become a tensor: {error}") from None


def _token_ids(values: Any, what: str) -> Tensor:
    ids = _tensor(values, what)
    if ids.dim() != 1:
        raise ValueError(f"{what}: token ids of shape {list(ids.shape)}, expected one dimension")
    if ids.numel() == 0:
        raise ValueError(f"{what}: no tokens")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{what}: token ids are {ids.dtype}, expected integers")
    ids = ids.long()  # first: of unsigned 16-bit ids, as files of tokens have them, torch knows no minimum
    if int(ids.min()) < 0:
        raise ValueError(f"{what}: negative token id {int(ids.min())}")
    return ids


def _reward(value: Any, i: int) -> float:
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"reward of response {i}: {value!r} is no number") from None
    if not math.isfinite(reward):
        raise ValueError(f"reward of response {i}: {reward}, must be finite")
    return reward


def _mask(values: Any, i: int) -> Tensor:
    mask = _tensor(values, f"loss_masks of response {i}")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"loss_masks of response {i}: values other than 0 and 1")
    return mask.bool()


def _same_count(name: str, values: Sequence[Any], responses: Sequence[Any]) -> None:
    if len(values) != len(responses):
        raise ValueError(f"{len(values)} {name} for {len(responses)} responses")


def advantages(rewards: Sequence[float], scale: bool = True) -> list[float]:
    """Return each reward's distance from the group's mean, over the unbiased standard deviation + 1e-6 if ``scale``.

    Float64. Equal rewards give exact zeros. Raises ``ValueError`` for fewer than two rewards, and for such that have no
    finite variance.
    """
    if len(rewards) < 2:
        raise ValueError(f"advantages of {len(rewards)} reward: a group has two or more")
    if not all(abs(reward) < 1e150 for reward in rewards):  # false for NaN too
        raise ValueError(f"rewards {list(rewards)} must be finite, and below 1e150 for their squares to be")
    if min(rewards) == max(rewards):  # the rounded mean of 0.1, 0.1, 0.1 is not 0.1
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    distances = [reward - mean for reward in rewards]
    if not scale:
        return distances
    std = math.sqrt(math.fsum(d * d for d in distances) / (len(rewards) - 1))
    return [d / (std + ADVANTAGE_EPS) for d in distances]


def denominators(group: Group, algorithm: AlgorithmConfig, response_length: int) -> list[float]:
    """Return what the loss of each kept token is divided by, one number a response.

    ``response_length`` is the configured one, read by ``normalize=constant`` only. A response without kept tokens has
    nothing to divide: it divides an empty sum and is 1 or more.
    """
    size = len(group.responses)
    masks = group.loss_masks
    kept = group.response_positions if masks is None else [int(mask.sum()) for mask in masks]
    if algorithm.normalize == "response":
        return [float(size * max(count, 1)) for count in kept]
    if algorithm.normalize == "group":
        return [float(max(sum(kept), 1))] * size
    return [float(size * response_length)] * size


@dataclass(frozen=True)
class Statistics:
    """Count what happened to the kept tokens; sums, so that those of branches can be added. 0-d tensors, no graph."""

    tokens: Tensor  # kept by the mask
    clipped: Tensor  # of these, with the clipped side in the loss, where it passes no gradient to the policy
    kl: Tensor | None  # sum of the k3 estimates; None without a reference

    def __add__(self, other: Statistics) -> Statistics:
        kl = None if self.kl is None or other.kl is None else self.kl + other.kl
        return Statistics(self.tokens + other.tokens, self.clipped + other.clipped, kl)

    def means(self) -> dict[str, float | None]:
        """Return ``clip_fraction`` and ``kl`` per kept token; reads the tensors' values. No tokens: zeros."""
        tokens = max(read_scalar(self.tokens, math.nan), 1.0)
        kl = None if self.kl is None else read_scalar(self.kl, math.nan) / tokens
        return {"clip_fraction": read_scalar(self.clipped, math.nan) / tokens, "kl": kl}


@dataclass(frozen=True)
class BranchLoss:
    """Hold one response's share of its group's loss, 0-d with its graph, and the counts that go with it."""

    loss: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class BranchTerms:
    """What the loss of one response is made of beside its log-probabilities; tensors are [R] and carry no graph.

    Without ``old_logprobs`` the response counts as drawn from this very policy: a ratio of 1 with the policy's
    gradient. What stands where the mask is False is never read, NaN included.
    """

    advantage: float
    denominator: float
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    mask: Tensor | None = None


def branch_loss(logprobs: Tensor, terms: BranchTerms, algorithm: AlgorithmConfig) -> BranchLoss:
    """Return one response's share of its group's loss; the shares of a group add up to the group's loss.

    ``logprobs`` [R] carry the graph. Computed in at least float32. No tensor's value is read. Raises ``ValueError`` if
    a KL is asked for without a reference.
    """
    advantage, old_logprobs, reference_logprobs = terms.advantage, terms.old_logprobs, terms.reference_logprobs
    if algorithm.kl_coef and reference_logprobs is None:
        raise ValueError(f"kl_coef={algorithm.kl_coef} needs the log-probabilities of a reference; pass them or set 0")
    lp = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    keep = torch.ones_like(lp, dtype=torch.bool) if terms.mask is None else terms.mask
    tokens = keep.sum()

    old = lp if old_logprobs is None else old_logprobs
    log_ratio = _kept(lp - old.detach().to(lp.dtype), keep)
    if algorithm.importance == "sequence":
        log_ratio = (log_ratio.sum() / tokens.clamp(min=1)).expand_as(lp)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    per_token = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ratio > high if advantage > 0 else ratio < low if advantage < 0 else torch.zeros_like(keep)

    kl = None
    if reference_logprobs is not None:
        per_token_kl = _k3(_kept(reference_logprobs.detach().to(lp.dtype) - lp, keep))
        per_token = per_token + algorithm.kl_coef * per_token_kl
        kl = per_token_kl.detach().sum()

    loss = _kept(per_token, keep).sum() / terms.denominator
    return BranchLoss(loss, Statistics(tokens, (clipped & keep).sum(), kl))


def branch_losses(
    group: Group,
    algorithm: AlgorithmConfig,
    response_length: int,
    old_logprobs: list[Tensor] | None,
    reference_logprobs: list[Tensor] | None,
    device: torch.device,
) -> Iterator[Callable[[Tensor], BranchLoss]]:
    """Yield for each response what turns its log-probabilities [R] on ``device`` into its share of the loss.

    What a branch needs comes to ``device`` when its turn comes: nothing there grows with the group.
    """

    def each(values: list[Tensor] | None) -> Iterator[Tensor | None]:
        return (None if values is None else values[i].to(device) for i in range(len(group.responses)))

    parts = zip(
        advantages(group.rewards, algorithm.scale_rewards),
        denominators(group, algorithm, response_length),
        each(old_logprobs),
        each(reference_logprobs),
        each(group.loss_masks),
        strict=True,
    )
    for terms in parts:
        yield partial(branch_loss, terms=BranchTerms(*terms), algorithm=algorithm)


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    """Zero what the mask leaves out; unlike a product with the mask, also where it is NaN or infinite."""
    return torch.where(keep, values, torch.zeros_like(values))


def _k3(difference: Tensor) -> Tensor:
    """Estimate KL(policy | reference) from reference - policy [R]: never negative, unbiased, low variance.

    exp(d) - 1 - d as ``expm1`` keeps the digits near zero, where it is d^2 / 2.
    """
    difference = difference.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(difference) - difference
