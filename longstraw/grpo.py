"""Group-relative policy optimisation as plain functions on tensors: advantages and the loss of one branch.

    A_i  = (r_i - b_i) / (std r + 1e-6)        std unbiased, of the group or the step; scale_rewards=none: no division
    b_i  = mean r                              baseline=mean; others (RLOO, arXiv 2402.14740): mean of r_j, j not i
    w_t  = exp(lp_t - old_t)                   importance=token
    w    = exp(mean_t(lp_t - old_t))           importance=sequence (GSPO), one ratio for all its tokens
    w    = exp(sum_t(lp_t - old_t))            importance=product (RLOO), the ratio of the sequences' probabilities
    p_t  = -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)     loss=clip; clip_dual: min(w, clip_dual) for w
    p_t  = -stop(clip(w, 1 - clip_low, 1 + clip_high)) A lp_t    loss=cispo (arXiv 2506.13585)
    l_t  = c_t p_t + kl_coef (exp(ref_t - lp_t) - (ref_t - lp_t) - 1)
    loss = sum over responses and kept tokens of l_t / D_i

    normalize   D_i, with n_i the kept tokens of response i, G the group's size, N the step's groups
    response    N G n_i              (GRPO: a mean over the response, then over the group)
    group       N (n_1 + .. + n_G)   (a mean over each group's tokens)
    step        n_1 + .. over all groups of the step (DAPO)
    constant    N G response_length  (Dr. GRPO: long answers weigh no less a token than short ones)

    correction, with q_t = exp(old_t - sampler_t), detached        c_t                          bounds unless given
    token_tis       truncated importance sampling                  clip(q_t, low, high)         none, 2.0
    icepop          (arXiv 2510.18855)                             q_t within, else 0           0.5, 5.0
    sequence_mask   q = exp(sum_t log q_t)                         q within, else 0             none, 3.0
    geometric_mask  q = exp(mean_t log q_t)                        1 within, else 0             0.99, 1.01

The loss of a group is the plain sum of its branches' losses: each branch can be differentiated and dropped on its own.

TRL's loss is the same but for three choices: it adds 1e-4 to the standard deviation, it does not limit the ratio to
exp(20), and its clip fraction counts a clipped sequence once where this one counts the sequence's tokens. Its ``dapo``
and ``bnpo`` are ``normalize=step``. Its ``epsilon_high`` of CISPO is 1 + ``clip_high``.

Shapes: P prompt positions, R response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from longstraw.config import ALGORITHM_CHOICES, AlgorithmConfig, choose
from longstraw.group import Group, StepTotals, kept_tokens, same_count
from longstraw.ops.host_sync import read_scalar

ADVANTAGE_EPS = 1e-6
CORRECTIONS = {  # bounds of the ratio between trainer and sampler
    "token_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.0, 3.0),
    "geometric_mask": (0.99, 1.01),
}
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8; beyond it a ratio counts as that and passes no gradient, or inf * 0 = NaN


def advantages(
    rewards: Sequence[float],
    scale: bool | str = "group",
    *,
    baseline: str = "mean",
    batch: Sequence[float] | None = None,
) -> list[float]:
    """Return each reward's distance from its baseline, over an unbiased standard deviation + 1e-6.

    ``scale``: group or True, that of ``rewards``; batch, that of ``batch`` (the step's rewards; None: the group's);
    none or False, no division. ``baseline``: the group's mean, or the mean of the others. Float64. Equal rewards
    give exact zeros. Raises ``ValueError`` for fewer than two rewards, and for such that have no finite variance.
    """
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    choose("scale_rewards", scale, ALGORITHM_CHOICES["scale_rewards"])
    choose("baseline", baseline, ALGORITHM_CHOICES["baseline"])
    if len(rewards) < 2:
        raise ValueError(f"advantages of {len(rewards)} reward: a group has two or more")
    measured = batch if scale == "batch" and batch is not None else rewards
    if not all(abs(reward) < 1e150 for reward in (*rewards, *measured)):  # false for NaN too
        raise ValueError(f"rewards {list(rewards)} must be finite, and below 1e150 for their squares to be")
    if min(rewards) == max(rewards):  # the rounded mean of 0.1, 0.1, 0.1 is not 0.1
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    factor = len(rewards) / (len(rewards) - 1) if baseline == "others" else 1.0
    distances = [(reward - mean) * factor for reward in rewards]
    return distances if scale == "none" else [d / (_std(measured) + ADVANTAGE_EPS) for d in distances]


def _std(rewards: Sequence[float]) -> float:
    center = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - center) ** 2 for reward in rewards) / (len(rewards) - 1))


def accumulated(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return how a step's groups are differentiated one after the other, before totals over all of them are known.

    The mean of their losses, times ``step_factor``, is the step's loss: what depends on the totals is one factor of it.
    Not so for ``scale_rewards=batch`` with a KL term, which the standard deviation does not divide.
    """
    return replace(
        algorithm,
        normalize="constant" if algorithm.normalize == "step" else algorithm.normalize,
        scale_rewards="none" if algorithm.scale_rewards == "batch" else algorithm.scale_rewards,
    )


def step_factor(algorithm: AlgorithmConfig, totals: StepTotals, response_length: int) -> float:
    """Return the factor of ``accumulated``; the losses of the groups were taken with the same ``response_length``."""
    factor = 1.0
    if algorithm.normalize == "step":
        factor *= len(totals.rewards) * response_length / max(totals.tokens, 1)
    if algorithm.scale_rewards == "batch":
        factor /= _std(totals.rewards) + ADVANTAGE_EPS
    return factor


def group_advantages(group: Group, algorithm: AlgorithmConfig) -> list[float]:
    """Return the advantage of each response of a group: the given one, or by ``algorithm`` from the rewards."""
    if group.advantages is not None:
        return group.advantages
    batch = None if group.step is None else group.step.rewards
    return advantages(group.rewards, algorithm.scale_rewards, baseline=algorithm.baseline, batch=batch)


def denominators(group: Group, algorithm: AlgorithmConfig, response_length: int) -> list[float]:
    """Return what the loss of each kept token is divided by, one number a response.

    ``response_length`` is the configured one, read by ``normalize=constant`` only. A response without kept tokens has
    nothing to divide: it divides an empty sum and is 1 or more.
    """
    size, kept = len(group.responses), kept_tokens(group)
    groups, tokens = (1, sum(kept)) if group.step is None else (group.step.groups, group.step.tokens)
    if algorithm.normalize == "response":
        return [float(groups * size * max(count, 1)) for count in kept]
    if algorithm.normalize == "group":
        return [float(groups * max(sum(kept), 1))] * size
    if algorithm.normalize == "step":
        return [float(max(tokens, 1))] * size
    return [float(groups * size * response_length)] * size


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft punishment, to be added to a response's reward (arXiv 2503.14476, equation 13).

    0 up to ``longest - buffer`` tokens, then falling by 1 / ``buffer`` a token, to -1 at ``longest`` and beyond.
    """
    if not 0 < buffer <= longest or length < 0:
        raise ValueError(
            f"length={length}, longest={longest}, buffer={buffer}: need 0 < buffer <= longest, length >= 0"
        )
    return max(min((longest - buffer - length) / buffer, 0.0), -1.0)


def mask_truncated(masks: Sequence[Tensor], truncated: Sequence[bool]) -> list[Tensor]:
    """Return the loss masks with those of truncated responses all False; their rewards still count in advantages."""
    same_count("truncated flags", truncated, masks)
    return [torch.zeros_like(mask) if cut else mask for mask, cut in zip(masks, truncated, strict=True)]


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
    gradient. ``sampler_logprobs`` are of the engine that drew the response, for a correction. What stands where the
    mask is False is never read, NaN included.
    """

    advantage: float
    denominator: float
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    mask: Tensor | None = None
    sampler_logprobs: Tensor | None = None


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
    if algorithm.importance != "token":
        divisor = tokens.clamp(min=1) if algorithm.importance == "sequence" else 1
        log_ratio = (log_ratio.sum() / divisor).expand_as(lp)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.loss == "cispo":
        per_token = -ratio.clamp(low, high).detach() * advantage * lp
    else:
        held = ratio if algorithm.clip_dual is None else ratio.clamp(max=algorithm.clip_dual)
        per_token = -torch.minimum(held * advantage, ratio.clamp(low, high) * advantage)
    if algorithm.correction != "none":
        per_token = per_token * correction_weights(old, terms.sampler_logprobs, keep, algorithm)
    clipped = ratio > high if advantage > 0 else ratio < low if advantage < 0 else torch.zeros_like(keep)

    kl = None
    if reference_logprobs is not None:
        per_token_kl = _k3(_kept(reference_logprobs.detach().to(lp.dtype) - lp, keep))
        per_token = per_token + algorithm.kl_coef * per_token_kl
        kl = per_token_kl.detach().sum()

    loss = _kept(per_token, keep).sum() / terms.denominator
    return BranchLoss(loss, Statistics(tokens, (clipped & keep).sum(), kl))


def correction_weights(
    old: Tensor, sampler_logprobs: Tensor | None, keep: Tensor, algorithm: AlgorithmConfig
) -> Tensor:
    """Return the factor [R] on the loss of each token that another engine drew, without a graph.

    ``old`` [R] are the trainer's log-probabilities at the time of sampling. Raises ``ValueError`` without those of
    the sampler.
    """
    if sampler_logprobs is None:
        raise ValueError(f"correction={algorithm.correction} needs the log-probabilities of the sampler, and none came")
    dtype = torch.promote_types(old.dtype, torch.float32)
    log_ratio = _kept(old.detach().to(dtype) - sampler_logprobs.detach().to(dtype), keep)
    low, high = CORRECTIONS[algorithm.correction]
    low = low if algorithm.correction_low is None else algorithm.correction_low
    high = high if algorithm.correction_high is None else algorithm.correction_high
    if algorithm.correction in ("sequence_mask", "geometric_mask"):
        divisor = keep.sum().clamp(min=1) if algorithm.correction == "geometric_mask" else 1
        log_ratio = (log_ratio.sum() / divisor).expand_as(log_ratio)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if algorithm.correction == "token_tis":
        return ratio.clamp(low, high)
    weight = torch.ones_like(ratio) if algorithm.correction == "geometric_mask" else ratio
    return _kept(weight, (ratio >= low) & (ratio <= high))


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

    correct = algorithm.correction != "none"
    if correct and group.old_logprobs is None:
        raise ValueError(
            f"correction={algorithm.correction}: group {group.id!r} has no log-probabilities of its sampler"
        )
    parts = zip(
        group_advantages(group, algorithm),
        denominators(group, algorithm, response_length),
        each(old_logprobs),
        each(reference_logprobs),
        each(group.loss_masks),
        each(group.old_logprobs if correct else None),
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
