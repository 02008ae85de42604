"""``RunConfig``, the configuration of one job: all keys with their defaults, their ranges and what must fit together.

Hydra composes the YAML files into these classes; the code after ``longstraw.run`` uses only the objects. The model's
part is in ``architectures/``, others in files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from longstraw.config.algorithm import AlgorithmConfig, check_step_groups
from longstraw.config.architectures import ARCHITECTURES
from longstraw.config.architectures.base import ModelConfig
from longstraw.config.checks import POSITIONS, ConfigError, check_ranges, choose, number
from longstraw.config.converted import checkpoint_folder, is_unfetched
from longstraw.config.data import DATA, DataConfig, JsonlConfig
from longstraw.config.evaluation import EvaluateConfig
from longstraw.config.hardware import HardwareConfig, LaunchConfig, SimulationConfig
from longstraw.config.hf_files import end_tokens
from longstraw.config.model import INNER_CHUNK, option, read_model_config, typed
from longstraw.config.parts import (
    STEPS,
    AdapterConfig,
    CheckpointConfig,
    OptimizerConfig,
    StateConfig,
    TrackingConfig,
)
from longstraw.config.server import ServerConfig, check_server
from longstraw.units import parse_count

PROMPT_GRADS = ("detached", "exact")
MODES = ("auto", "run", "simulate", "emulate")
GROUP_HINT = "; advantages compare the responses of a group, so a group has two or more"


@dataclass
class RunConfig:
    """One job. Counts of positions may be given as text, such as 2Ki, and become ints."""

    model: ModelConfig = MISSING
    hardware: HardwareConfig = MISSING
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = MISSING
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    state: StateConfig = field(default_factory=StateConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    group_size: int = number(2, 2, 2**16, hint=GROUP_HINT)
    context: Any = number("2.1M", 2, POSITIONS)  # positions of one branch: prompt + response
    response_length: Any = number("${model.response_length}", 1, POSITIONS)
    chunk: Any = number(
        "${model.chunk}", INNER_CHUNK, POSITIONS
    )  # prompt positions evaluated at a time, over all ranks
    replay_tokens: Any = number(None, 1, POSITIONS)  # response positions in one graph; None: response_length
    prompt_grad: str = "detached"
    prompt_grad_window: Any = number(None, 0, POSITIONS)  # prompt positions the gradient goes back through; None: all
    groups_per_step: int = number(1, 1, 2**20)  # prompts of one optimizer step, each with its group
    refresh_every: int = number(1, 1, STEPS)  # optimizer steps that share one retained prompt
    refresh_above: float | None = number(
        None, 0, 1e6
    )  # and fewer, once log-probabilities are so far from the sampler's
    updates_per_rollout: int | None = number(None, 1, STEPS)  # optimizer steps on one group; null: refresh_every
    warmup_steps: int = number(0, 0, STEPS)  # of all steps, the first, which are supervised ones on golden answers
    rollout: str = "given"  # given: responses are the data's | sample: drawn from the retained prompt | server
    temperature: float = number(1.0, 0, 100, above=True)  # at which they are drawn, and log-probabilities taken
    top_p: float = number(1.0, 0, 1, above=True)  # drawn from the most likely tokens that together reach this
    top_k: int | None = number(None, 1, 2**24)  # and from so many of them; None: all
    min_p: float = number(0.0, 0, 1)  # and from those at least so likely, relative to the likeliest
    stop: list[int] | None = number(None, 0, 2**31 - 1)  # token ids that end a response; null: the checkpoint's own
    sample_batch: int | None = number(None, 1, 2**16)  # responses of a group drawn together; null: all
    resample: int = number(0, 0, 1000)  # draws again, at most, of a group whose rewards are equal
    overlong_buffer: int | None = number(
        None, 1, POSITIONS
    )  # last tokens in which a reward falls by up to 1; null: none
    mask_truncated: bool = False  # leave responses that no stop token ended out of the loss
    reward: str | None = None  # data=jsonl: package.module:function that rewards drawn responses, as in TRL or verl
    reward_timeout: float | None = number(600.0, 0, 2**24, above=True)  # seconds one call of it may take; null: any
    measure_drift: bool = True  # where refresh_every > 1: compare with a freshly evaluated prompt
    steps: int = number(1, 1, STEPS)
    seed: int = number(0, 0, 2**63 - 1)
    selfcheck: str = "auto"  # auto: a CUDA job first compares its kernels with their references | off
    save: bool = False  # at the end, the trained model or adapter in the run's folder
    claim: str | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        for key, valid in COUNTS.items():
            if getattr(self, key) is None and key not in ("replay_tokens", "prompt_grad_window"):
                raise ConfigError(f"{key} has no value; give {key}=...")
            if getattr(self, key) is not None:
                try:
                    setattr(self, key, parse_count(getattr(self, key), least=valid.least, most=valid.most))
                except ValueError as error:
                    raise ConfigError(f"{key}: {error}") from None
        check_ranges(self, "")
        if self.stop is None:
            self.stop = [] if self.rollout == "given" else self._end_tokens()
        if self.adapter.name == "auto":
            self.adapter = replace(self.adapter, name=self.model.default_adapter)
        if self.rollout == "server":
            self.algorithm = self.server.corrected(self.algorithm)
        self._check()

    def _check(self) -> None:
        choose("mode", self.mode, MODES)
        choose("prompt_grad", self.prompt_grad, PROMPT_GRADS)
        choose("selfcheck", self.selfcheck, ("auto", "off"))
        if self.simulation.rank >= self.hardware.world_size:
            last = self.hardware.world_size - 1
            raise ConfigError(f"simulation.rank={self.simulation.rank}: the ranks of this hardware are 0 to {last}")
        if self.adapter.name == "none" and (self.adapter.checkpoint is not None or self.adapter.targets):
            key = "checkpoint" if self.adapter.checkpoint is not None else "targets"
            raise ConfigError(f"adapter.{key} with adapter=none would not be used; write adapter=lora, or leave it out")
        if self.adapter.checkpoint is not None and self.adapter.targets:
            raise ConfigError("adapter.targets with adapter.checkpoint: the checkpoint's own targets hold")
        if self.chunk % INNER_CHUNK:
            raise ConfigError(f"chunk={self.chunk} is no multiple of {INNER_CHUNK}")
        if self.response_length >= self.context:
            raise ConfigError(
                f"response_length={self.response_length} leaves no prompt in context={self.context}; context counts "
                "the prompt and one response"
            )
        self._check_rollout()
        self._check_schedule()
        self._check_evaluation()
        if self.prompt_grad == "exact" and self.refresh_every > 1:
            raise ConfigError(
                f"prompt_grad=exact with refresh_every={self.refresh_every}: the retained prompt is stale after the "
                "first optimizer step, so it has no exact gradient; use refresh_every=1 or prompt_grad=detached"
            )

    def _check_rollout(self) -> None:
        choose("rollout", self.rollout, ("given", "sample", "server"))
        drawn_from_some = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        if self.rollout == "given":
            keys = ("top_k", "stop", "sample_batch", "resample", "mask_truncated", "overlong_buffer", "warmup_steps")
            more = ("refresh_above", "reward")
            if unused := [key for key in keys + more if getattr(self, key) not in (None, [], 0, False)]:
                raise ConfigError(f"{', '.join(unused)} would not be used with rollout=given; use rollout=sample")
            if drawn_from_some:
                raise ConfigError("top_p and min_p would not be used with rollout=given; use rollout=sample")
            return
        if (self.data.name == "jsonl") != (self.reward is not None):
            raise ConfigError(
                f"reward={self.reward} with data={self.data.name}: data=jsonl needs reward=package.module:function for "
                "drawn responses, and other tasks have their own"
            )
        if self.rollout == "server":
            if self.mode in ("simulate", "emulate"):
                raise ConfigError(f"mode={self.mode} asks no server: use rollout=given or sample, or mode=run")
            check_server(self.server, self.adapter.name, self.algorithm, from_some=drawn_from_some)
            if self.hardware.dp > 1:
                raise ConfigError("rollout=server hands its adapters over for one prompt at a time: use hardware.dp=1")
        if drawn_from_some and self.algorithm.old_logprobs != "none":
            raise ConfigError(
                "top_p, top_k and min_p draw from a part of the distribution, so ratios to its log-probabilities are "
                "wrong; use algorithm.old_logprobs=none, or leave them out"
            )
        if self.algorithm.old_logprobs == "none" and self.updates > 1:
            raise ConfigError(
                f"algorithm.old_logprobs=none with {self.updates} updates on the same responses: all but the first "
                "need ratios; use old_logprobs=data or score, or updates_per_rollout=1 and refresh_every=1"
            )
        if not self.stop and (self.mask_truncated or self.overlong_buffer is not None):
            key = "mask_truncated" if self.mask_truncated else "overlong_buffer"
            raise ConfigError(f"{key} needs stop=[...]: without a stop token every response is truncated")
        if self.overlong_buffer is not None and self.overlong_buffer > self.response_length:
            raise ConfigError(
                f"overlong_buffer={self.overlong_buffer} must be at most response_length={self.response_length}"
            )
        if self.stop and max(self.stop) >= self.model.vocab_size:
            raise ConfigError(f"stop={self.stop}: token ids are below the vocabulary size {self.model.vocab_size}")

    def _check_schedule(self) -> None:
        every, updates = self.refresh_every, self.updates
        if updates % every:
            raise ConfigError(
                f"updates_per_rollout={updates} is no multiple of refresh_every={every}: responses are made on a "
                "prompt that was just evaluated"
            )
        if self.groups_per_step > 1 and every > 1:
            raise ConfigError(
                f"groups_per_step={self.groups_per_step} with refresh_every={every} would retain all their prompts at "
                "once; use refresh_every=1 (updates_per_rollout=N takes N steps on the same responses)"
            )
        if self.refresh_above is not None and every == 1:
            raise ConfigError(
                "refresh_above with refresh_every=1 would not be used: the prompt is always evaluated anew"
            )
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} of steps={self.steps}: they are the first of all steps"
            )
        if self.groups_per_step > 1:
            check_step_groups(self.algorithm)

    @property
    def drawn_together(self) -> int:
        """Responses that are drawn together, if a group has so many."""
        return self.sample_batch or self.group_size

    @property
    def updates(self) -> int:
        """Optimizer steps on the same responses."""
        return self.refresh_every if self.updates_per_rollout is None else self.updates_per_rollout

    def _end_tokens(self) -> list[int]:
        """Return the end tokens of the checkpoint, or of the tokenizer that is given for random weights."""
        checkpoint = self.model.checkpoint
        if checkpoint is not None:
            return [] if is_unfetched(checkpoint) else end_tokens(checkpoint_folder(checkpoint))
        return end_tokens(self.data.tokenizer) if isinstance(self.data, JsonlConfig) else []

    def _check_evaluation(self) -> None:
        shortest = min(self.evaluate.positions(), default=self.context)
        if self.response_length >= shortest:
            raise ConfigError(
                f"evaluate.contexts: response_length={self.response_length} leaves no prompt in {shortest}"
            )
        every = self.evaluate.every
        if every is None:
            return
        if self.rollout == "given":
            raise ConfigError(
                f"evaluate.every={every} needs rollout=sample: other responses than those given need a reward"
            )
        if every % self.refresh_every or self.warmup_steps % self.refresh_every:
            raise ConfigError(
                f"evaluate.every={every} and warmup_steps={self.warmup_steps} must be multiples of refresh_every="
                f"{self.refresh_every}: between two refreshes an evaluation would hold a second prompt's state"
            )

    @property
    def processes(self) -> HardwareConfig:
        """What the job's processes ask for: ``simulate`` and ``emulate`` are one process, whatever the hardware."""
        if self.mode in ("simulate", "emulate"):
            return self.hardware.for_one_rank(device=self.mode == "emulate")
        return self.hardware

    @property
    def branches_together(self) -> int:
        """How many of a group's longest responses are evaluated in one graph."""
        fit = (self.replay_tokens or self.response_length) // self.response_length
        return min(max(fit, 1), self.group_size)

    @property
    def prompt_positions(self) -> int:
        return self.context - self.response_length


def gradient_start(positions: int, chunk: int, prompt_grad: str, window: int | None) -> int | None:
    """Return the first of ``positions`` retained ones whose state gets a gradient, or None if none does.

    A window is counted back from the last retained position and rounded up to a chunk border.
    """
    choose("prompt_grad", prompt_grad, PROMPT_GRADS)
    if window is not None and window < 0:
        raise ValueError(f"prompt_grad_window={window} must be 0 or more, or None for the whole prompt")
    if prompt_grad == "detached" or window == 0 or positions == 0:
        return None
    return 0 if window is None else max(positions - window, 0) // chunk * chunk


GROUPS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "hardware": HardwareConfig,
    "adapter": AdapterConfig,
    "data": DataConfig,
    "algorithm": AlgorithmConfig,
    "optimizer": OptimizerConfig,
    "state": StateConfig,
    "server": ServerConfig,
    "launch": LaunchConfig,
    "simulation": SimulationConfig,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
    "evaluate": EvaluateConfig,
}
COUNTS = {f.name: f.metadata["range"] for f in fields(RunConfig) if "range" in f.metadata and f.type == "Any"}


def schema_of(group: str, values: Mapping[str, Any]) -> type[Any]:
    """Return the class of one part of a run: the model's by ``architecture``, the data's by ``name``."""
    if group == "model":
        choose("model.architecture", values.get("architecture"), tuple(ARCHITECTURES))
        return ARCHITECTURES[values["architecture"]]
    if group == "data":
        choose("data", values.get("name"), tuple(DATA))
        return DATA[values["name"]]
    return GROUPS[group]


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Return the run that nested plain dicts describe; the inverse of ``to_dict``. Checks everything again."""
    known = {f.name for f in fields(RunConfig)}
    for key in values:
        choose("key", key, tuple(sorted(known)))
    absent = sorted({"model", "hardware", "data"} - set(values))
    if absent:
        raise ConfigError(f"a run without {', '.join(absent)}")
    parts = {key: typed(schema_of(key, values[key]), values[key], key) for key in GROUPS if key in values}
    plain = {key: value for key, value in values.items() if key not in GROUPS}
    model = parts["model"]
    for key in ("response_length", "chunk"):
        if key not in plain:
            plain[key] = getattr(model, key)
    return RunConfig(**parts, **plain)


def from_composed(composed: Any) -> RunConfig:
    """Return the run that Hydra composed, with interpolations resolved and a checkpoint's own sizes."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value; give {error.full_key}=...") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(values, dict)
    return with_checkpoint_sizes({str(key): value for key, value in values.items()})


def with_checkpoint_sizes(values: Mapping[str, Any]) -> RunConfig:
    """Return the run of ``from_dict``; where ``model.checkpoint`` names a checkpoint, with the sizes of its own file.

    Fields of the model that differ from its file in ``conf/model`` were typed, and hold before the checkpoint's.
    """
    config = from_dict(values)
    if config.model.checkpoint is not None and not is_unfetched(config.model.checkpoint):
        kept = {key: getattr(config.model, key) for key in _NOT_OF_CHECKPOINT}
        config.model = read_model_config(config.model.checkpoint, **_typed_sizes(values["model"]), **kept)
    return config


_NOT_OF_CHECKPOINT = ("dtype", "rope_angles", "chunk", "response_length")


def _typed_sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a composed model that differ from its file in ``conf/model``."""
    schema = OmegaConf.structured(schema_of("model", model))
    listed: Any = OmegaConf.merge(schema, option("model", model["name"]))
    given: Any = OmegaConf.merge(schema, dict(model))
    others = ("checkpoint", *_NOT_OF_CHECKPOINT)
    return {key: value for key, value in model.items() if key not in others and given[key] != listed[key]}


def to_dict(config: Any) -> dict[str, Any]:
    """Return a typed configuration as plain nested dicts, for records and ``spec.json``."""
    assert is_dataclass(config)
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
