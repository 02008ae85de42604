"""What an evaluation is configured by: how often, on how many held-out prompts of which lengths, and how it samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from longstraw.config.checks import POSITIONS, ConfigError, check_ranges, number
from longstraw.units import parse_count


@dataclass
class EvaluateConfig:
    """Evaluations on held-out prompts, before the first step, every so many steps and after the last."""

    every: int | None = number(None, 1, 10**9)  # optimizer steps between two, a multiple of refresh_every; None: off
    examples: int = number(64, 1, 10**6)  # held-out prompts at each length, one response each
    contexts: list[str] = field(default_factory=list)  # prompt + response, such as 4Ki; empty: the run's context
    temperature: float = number(0.0, 0, 100)  # 0: the likeliest token
    path: str | None = None  # data=jsonl: the file of held-out prompts, lines as in data.path

    def __post_init__(self) -> None:
        check_ranges(self, "evaluate")
        self.positions()

    def positions(self) -> list[int]:
        """Return ``contexts`` as numbers; raise ``ConfigError`` for one that is no count."""
        try:
            return [parse_count(context, least=2, most=POSITIONS) for context in self.contexts]
        except ValueError as error:
            raise ConfigError(f"evaluate.contexts: {error}") from None
