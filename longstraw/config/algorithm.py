"""What the policy loss is configured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longstraw.config.checks import ConfigError, check_ranges, choose, number

ALGORITHM_CHOICES = {
    "scale_rewards": ("group", "batch", "none"),
    "baseline": ("mean", "others"),
    "loss": ("clip", "cispo"),
    "importance": ("token", "sequence", "product"),
    "normalize": ("response", "group", "step", "constant"),
    "correction": ("none", "token_tis", "icepop", "sequence_mask", "geometric_mask"),
    "old_logprobs": ("data", "score", "none"),
}


@dataclass
class AlgorithmConfig:
    """The policy loss; see ``longstraw.grpo`` for the formulas."""

    name: str = "grpo"
    scale_rewards: Any = "group"  # group | batch | none: whose standard deviation divides the advantage; true: group
    baseline: str = "mean"  # mean | others: of the group's rewards, or of those of the group's other responses
    loss: str = "clip"  # clip | cispo
    importance: str = "token"  # token | sequence (geometric mean) | product: what the clipped ratio is of
    normalize: str = "response"  # response | group | step | constant: what a token's loss is divided by
    clip_low: float = number(0.2, 0, 1)  # 1: no lower bound of the ratio
    clip_high: float = number(0.2, 0, 1e6)
    clip_dual: float | None = number(None, 1, 1e6, above=True, hint="; null: off")  # limit where the advantage is < 0
    correction: str = "none"  # none | token_tis | icepop | sequence_mask | geometric_mask: for another engine's samples
    correction_low: float | None = number(None, 0, 1)  # None: the correction's own bounds, in longstraw.grpo
    correction_high: float | None = number(None, 1, 1e6)
    kl_coef: float = number(0.0, 0, 1e6)
    old_logprobs: str = "data"  # data: as given, on policy where absent; score: on the retained state; none: on policy

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        for key, choices in ALGORITHM_CHOICES.items():
            choose(f"algorithm.{key}", getattr(self, key), choices)
        check_ranges(self, "algorithm")
        if self.clip_dual is not None and self.clip_dual <= 1 + self.clip_high:
            raise ConfigError(f"algorithm.clip_dual={self.clip_dual} must be above 1 + clip_high={1 + self.clip_high}")
        if self.loss == "cispo" and self.clip_dual is not None:
            raise ConfigError("algorithm.clip_dual with algorithm.loss=cispo would not be used; leave it out")
        if self.correction == "none" and (self.correction_low is not None or self.correction_high is not None):
            raise ConfigError("algorithm.correction_low and correction_high need a correction; leave them out")
        if self.correction != "none" and self.old_logprobs == "data":
            raise ConfigError(
                f"algorithm.correction={self.correction} compares the log-probabilities of the data with the policy's "
                "own; use algorithm.old_logprobs=score, or none"
            )


def check_step_groups(algorithm: AlgorithmConfig) -> None:
    """Raise ``ConfigError`` for an algorithm that steps of several groups cannot have."""
    if algorithm.scale_rewards == "batch" and algorithm.kl_coef:
        raise ConfigError(
            "algorithm.scale_rewards=batch with kl_coef: the gradients of a step's groups are added up before the "
            "standard deviation of all its rewards is known, which would divide the KL term too; use "
            "scale_rewards=group or kl_coef=0"
        )
