"""What a task is configured by: a class for each kind of ``data``."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from longstraw.config.checks import ConfigError, check_ranges, choose, number

ROLLOUT_FORMATS = ("tokens", "verl", "trl", "nemo_rl", "verifiers", "art")


@dataclass
class DataConfig:
    name: str = MISSING


@dataclass
class NeedleConfig(DataConfig):
    """The needle task: a key and its value hidden at a random depth of real text."""

    name: str = "needle"
    haystack: list[str] = field(default_factory=list)  # text files or folders; empty: Python's own standard library
    depth: list[float] = number([0.0, 1.0], 0, 1)  # drawn between these fractions of the prompt
    correct_fraction: float = number(0.5, 0, 1)  # fraction of the responses that are right
    ragged: bool = True  # responses of random lengths up to response_length; false: all of that length

    def __post_init__(self) -> None:
        check_ranges(self, "data")
        if len(self.depth) != 2 or self.depth[0] > self.depth[1]:
            raise ConfigError(f"data.depth={self.depth} must be two rising fractions between 0 and 1")


@dataclass
class JsonlConfig(DataConfig):
    """The user's own prompts, responses and rewards, one prompt a line."""

    name: str = "jsonl"
    path: str = MISSING
    on_error: str = "stop"  # stop | skip
    truncate: str | None = None  # None | left | right: what to cut from a prompt that is too long
    tokenizer: str | None = None  # a folder; None: the checkpoint's, or bytes where there is no checkpoint

    def __post_init__(self) -> None:
        choose("data.on_error", self.on_error, ("stop", "skip"))
        if self.truncate is not None:
            choose("data.truncate", self.truncate, ("left", "right"))


@dataclass
class RolloutsConfig(DataConfig):
    """Responses that another trainer stored; see ``longstraw.data.rollouts``."""

    name: str = "rollouts"
    path: str = MISSING  # a file, a folder of files, or a pattern such as run/step_*/traces.jsonl
    format: str = "auto"  # auto: by the columns of the first row
    on_error: str = "stop"  # stop | skip
    truncate: str | None = None  # None | left | right: what to cut from a prompt that is too long
    tokenizer: str | None = None  # a folder; None: the checkpoint's, or bytes where there is no checkpoint
    reward_columns: list[str] = field(default_factory=list)  # trl: columns added up; empty: the only one

    def __post_init__(self) -> None:
        choose("data.format", self.format, ("auto", *ROLLOUT_FORMATS))
        choose("data.on_error", self.on_error, ("stop", "skip"))
        if self.truncate is not None:
            choose("data.truncate", self.truncate, ("left", "right"))


@dataclass
class MadeConfig(DataConfig):
    """A made task whose responses are sampled; see ``longstraw.data.made``. A task reads its own difficulty keys."""

    haystack: list[str] = field(default_factory=list)  # text files or folders; empty: Python's own standard library
    depth: list[float] = number([0.0, 1.0], 0, 1)  # statements stand between these fractions of the hay
    symbols: int = number(4, 2, 26)  # letters an answer may be
    keys: int = number(4, 1, 32)  # lookup, multi: statements
    hops: int = number(1, 1, 15)  # chain: names the value is passed on over
    chains: int = number(2, 1, 18)
    most: int = number(4, 2, 10**4)  # count: the highest number
    needles: int = number(2, 1, 32)  # multi: statements asked for

    def __post_init__(self) -> None:
        choose("data.name", self.name, MADE)
        check_ranges(self, "data")
        if len(self.depth) != 2 or self.depth[0] > self.depth[1]:
            raise ConfigError(f"data.depth={self.depth} must be two rising fractions between 0 and 1")
        if self.name == "multi" and self.needles > self.keys:
            raise ConfigError(
                f"data.needles={self.needles} of data.keys={self.keys}: at most all keys can be asked for"
            )
        if self.name == "chain" and self.chains * (self.hops + 1) > 32:
            raise ConfigError(f"data.chains={self.chains} of data.hops={self.hops}: more than 32 names are in them")


MADE = ("lookup", "chain", "count", "multi")
DATA: dict[str, type[DataConfig]] = {"needle": NeedleConfig, "jsonl": JsonlConfig, "rollouts": RolloutsConfig}
DATA |= dict.fromkeys(MADE, MadeConfig)
