"""The record of a step from what its groups were and what was computed for them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from longstraw.config import AlgorithmConfig, RunConfig
from longstraw.group import Group, StepTotals, kept_tokens
from longstraw.grpo import advantages
from longstraw.memory.estimate import known
from longstraw.models.decoder import Decoder
from longstraw.ops.host_sync import read_scalar
from longstraw.rollout.group import Rollout
from longstraw.step import StepResult
from longstraw.training.flops import Evaluated, step_flops
from longstraw.training.monitor import Monitor


@dataclass(frozen=True)
class Taken:
    """A group of a step that is done with: what the record needs of it, without its prompt."""

    prompt_positions: int
    response_positions: list[int]
    tokens: int  # in the loss
    rewards: list[float]
    supervised: bool  # its rewards mean nothing
    sampled: tuple[int, ...]  # the lengths of all responses drawn for it
    resampled: int
    truncated_fraction: float | None
    result: StepResult
    trained: bool  # false where its equal rewards have no gradient
    state_age: int  # steps since its prompt was evaluated
    rollout_age: int  # steps since its responses were made
    sampler_drift: float | None  # None where the sampler's log-probabilities are not known
    sampler_drift_max: float | None
    probe_drift: float | None
    sampler_age: int | None
    retokenized: bool

    @classmethod
    def of(
        cls, rollout: Rollout, group: Group, result: StepResult, *, trained: bool, state_age: int, rollout_age: int
    ) -> Taken:
        """Return what the record needs; ``group`` is the rollout's, on the model's device."""
        tokens, drift, most = sum(kept_tokens(group)), None, None
        if trained and tokens and group.old_logprobs is not None:
            apart = differences(group, result.logprobs, group.old_logprobs)
            drift, most = read_scalar(apart.mean(), 0.0), read_scalar(apart.max(), 0.0)
        return cls(
            group.prompt_positions,
            group.response_positions,
            tokens,
            group.rewards,
            group.advantages is not None,
            rollout.sampled,
            rollout.resampled,
            rollout.truncated_fraction,
            result,
            trained,
            state_age,
            rollout_age,
            drift,
            most,
            rollout.probe_drift,
            rollout.sampler_age,
            rollout.retokenized,
        )


def differences(group: Group, logprobs: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return |difference| of two sets of log-probabilities [R] at each of a group's tokens in the loss."""
    apart = [(a - b).abs() for a, b in zip(logprobs, others, strict=True)]
    if group.loss_masks is not None:
        apart = [x[mask.cpu()] for x, mask in zip(apart, group.loss_masks, strict=True)]
    return torch.cat(apart)


def measured(taken: Sequence[Taken], watch: Monitor, model: Decoder, config: RunConfig) -> dict[str, Any]:
    """Return positions, bytes and times of a step; ``flops`` is None where there is no formula for it."""
    results = [one.result for one in taken]
    peaks, by_kind = watch.peaks, watch.meter.bytes_by_kind()
    recomputed = [result.recompute_difference for result in results if result.recompute_difference is not None]
    kept = max((result.retained_bytes for result in results), key=lambda sizes: sum(sizes.values()))
    counted = config.adapter.name == "none"
    return {
        **_positions(taken),
        "state_age": taken[0].state_age,
        "rollout_age": taken[0].rollout_age,
        "peak_allocated_bytes": peaks.peak,
        "peak_verb": peaks.verb,
        "peak_by_verb": peaks.by_verb,
        "measured_by": peaks.measured_by,
        "peak_reserved_bytes": peaks.reserved,
        "peak_bytes_by_kind": peaks.by_kind,
        "parameter_bytes": by_kind["parameters"],
        "gradient_bytes": watch.most["gradients"],
        "optimizer_bytes": by_kind["optimizer"],
        "retained_bytes": sum(kept.values()),
        "retained_bytes_by_kind": kept,
        "state_gradient_bytes": watch.most["state_gradient"],
        "snapshot_bytes": watch.most["snapshots"],
        "host_bytes": peaks.host,
        "bytes_sent_by_collective": watch.traffic and watch.traffic.by_collective(),
        "seconds_by_verb": dict(watch.seconds),
        "flops": sum(_flops(one, model, config) for one in taken) if counted else None,
        "recompute_difference": max(recomputed) if recomputed else None,
        "old_logprobs": config.algorithm.old_logprobs,
        "retokenized": any(one.retokenized for one in taken),
    }


def _positions(taken: Sequence[Taken]) -> dict[str, Any]:
    results = [one.result for one in taken]
    return {
        "prompt_positions": max(one.prompt_positions for one in taken),
        "response_positions": max(max(one.response_positions) for one in taken),
        "prefilled_positions": sum(result.prefilled_positions for result in results),
        "replayed_positions": sum(result.replayed_positions for result in results),
        "scored_positions": sum(result.scored_positions for result in results),
        "recomputed_positions": sum(result.recomputed_positions for result in results),
    }


def predicted(taken: Sequence[Taken], config: RunConfig, *, optimizer_held: bool) -> dict[str, Any]:
    """Return the peak that was predicted for the step, where its configuration was counted."""
    positions, prediction = _positions(taken), None
    if config.rollout != "server":
        prediction = known(
            config,
            prompt_positions=positions["prompt_positions"],
            response_positions=positions["response_positions"],
            optimizer_held=optimizer_held,
            prefilled=taken[0].state_age == 0,
        )
    return {
        "predicted_peak_bytes": prediction and prediction.peak,
        "predicted_bytes_by_kind": prediction and prediction.by_kind,
    }


def _flops(one: Taken, model: Decoder, config: RunConfig) -> float:
    scorings = bool(config.algorithm.kl_coef) + (config.algorithm.old_logprobs == "score")
    evaluated = Evaluated(
        prompt_positions=one.prompt_positions,
        responses=one.response_positions,
        prefilled=one.state_age == 0,
        scored=scorings if one.rollout_age == 0 else 0,
        sampled=one.sampled if one.rollout_age == 0 and config.rollout == "sample" else (),
        trained=one.trained,
    )
    return step_flops(model, config, evaluated)


def drawn(taken: Sequence[Taken], seconds: float | None) -> dict[str, Any]:
    """Return what the record says of the responses, and of drawing them, in ``seconds``, in the step that drew."""
    lengths = [length for one in taken for length in one.response_positions]
    equal = [one for one in taken if not one.supervised and min(one.rewards) == max(one.rewards)]
    row: dict[str, Any] = {
        "groups": len(taken),
        "equal_groups": len(equal),
        "response_length_mean": statistics.fmean(lengths),
        "sampled_positions": 0,
    }
    positions = sum(sum(one.sampled) for one in taken)
    if taken[0].rollout_age or not positions:
        return row
    fractions = [f for one in taken if (f := one.truncated_fraction) is not None]
    return row | {
        "sampled_positions": positions,
        "probe_drift": taken[0].probe_drift,
        "sampler_age": taken[0].sampler_age,
        "resampled": sum(one.resampled for one in taken),
        "truncated_fraction": statistics.fmean(fractions) if fractions else None,
        "tokens_per_second": positions / seconds if seconds else None,
    }


def loss_metrics(
    taken: Sequence[Taken], loss: Tensor, algorithm: AlgorithmConfig, totals: StepTotals
) -> dict[str, Any]:
    """Return loss, rewards and what the loss counted; ``totals`` are of all groups of the step, on all ranks."""
    rewards: dict[str, Any] = {}
    if not taken[0].supervised:
        scale, baseline, batch = algorithm.scale_rewards, algorithm.baseline, totals.rewards
        distances = [advantages(one.rewards, scale, baseline=baseline, batch=batch) for one in taken]
        rewards = {
            "reward_mean": statistics.fmean(reward for one in taken for reward in one.rewards),
            "reward_std": statistics.fmean(statistics.stdev(one.rewards) for one in taken),
            "advantage_abs_mean": statistics.fmean(abs(distance) for group in distances for distance in group),
        }
    trained = [one.result for one in taken if one.trained]
    counted: dict[str, Any] = {"entropy": None, "clip_fraction": 0.0, "kl": None}
    if trained:
        tokens = [max(read_scalar(result.statistics.tokens, 1.0), 1.0) for result in trained]
        entropy = sum(n * result.entropy for n, result in zip(tokens, trained, strict=True)) / sum(tokens)
        counted = {"entropy": entropy, **reduce(add, (result.statistics for result in trained)).means()}
    return {"loss": read_scalar(loss, 0.0), **rewards, **counted}
