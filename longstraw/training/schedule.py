"""Which prompts a step takes, and what it shares with the step before: responses, and the retained prompt.

A step is one optimizer update. Step by step, with ``updates_per_rollout=4`` and ``refresh_every=2``:

    step                     0  1  2  3 | 4  5  6  7
    responses are made       x          | x
    prompt is evaluated      x     x    | x     x

so ``refresh_every`` divides ``updates_per_rollout``, and a checkpoint, which holds neither responses nor retained
prompts, is written only where responses are made. Warm-up steps come first and share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from longstraw.config import RunConfig


@dataclass(frozen=True)
class Schedule:
    """The run's prompts by step; see the module."""

    groups: int = 1  # prompts a step of each data-parallel rank
    warmup: int = 0  # steps
    updates: int = 1  # steps on the same responses
    refresh: int = 1  # steps on the same retained prompt

    @classmethod
    def of(cls, config: RunConfig) -> Schedule:
        return cls(config.groups_per_step, config.warmup_steps, config.updates, config.refresh_every)

    def warms_up(self, step: int) -> bool:
        """Return whether ``step`` is a supervised one on golden answers."""
        return step < self.warmup

    def makes_responses(self, step: int) -> bool:
        """Return whether ``step`` is the first on its responses."""
        return self.warms_up(step) or (step - self.warmup) % self.updates == 0

    def evaluates_prompt(self, step: int) -> bool:
        """Return whether ``step`` is the first on its retained prompt."""
        return self.warms_up(step) or (step - self.warmup) % self.refresh == 0

    def prompts(self, step: int, dp: int = 1, dp_rank: int = 0) -> list[int]:
        """Return which of the run's prompts, counted from 0, a data-parallel rank takes; each is taken by one."""
        rollout = step if self.warms_up(step) else self.warmup + (step - self.warmup) // self.updates
        return [(rollout * self.groups + i) * dp + dp_rank for i in range(self.groups)]
