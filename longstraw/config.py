"""The configuration of one job as typed objects.

Hydra composes YAML files against these classes; past the door (``run.py``) only the objects travel. Field names of a
model are those of its published ``config.json``, so that a checkpoint's own file fills the same class.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from longstraw.units import parse_count

PROMPT_GRADS = ("detached", "exact")
MODES = ("auto", "run", "simulate", "emulate")
DTYPES = ("float64", "float32", "bfloat16")
INNER_CHUNK = 64  # positions the delta rule solves at a time; prompt chunks are cut at multiples of it


class ConfigError(ValueError):
    """A configuration that cannot be what the user meant; the message says what would be valid."""


def choose(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``, with the nearest one as a hint."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{key}={value!r} is not one of {', '.join(choices)}{hint}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise ``ConfigError`` if ``value`` is below ``least``; ``None`` passes."""
    if value is not None and value < least:
        raise ConfigError(f"{key}={value} must be at least {least}")


@dataclass
class ModelConfig:
    """What every architecture shares; sizes are those of ``config.json``."""

    name: str = MISSING
    architecture: str = MISSING
    checkpoint: str | None = None  # a folder in transformers' format; None draws random weights from the seed
    dtype: str = "bfloat16"
    vocab_size: int = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_hidden_layers: int = MISSING
    max_position_embeddings: int = MISSING  # the native length
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rope_theta: float = MISSING
    rope_angles: str = "float32"  # dtype in which position * frequency is formed: float32 as transformers, or float64
    chunk: int = 16384  # defaults of the run's keys of the same names
    response_length: int = 8192

    def __post_init__(self) -> None:
        choose("model.dtype", self.dtype, DTYPES)
        choose("model.rope_angles", self.rope_angles, ("float32", "float64"))


@dataclass
class Qwen36Config(ModelConfig):
    """The hybrid of Gated DeltaNet and gated full attention: every ``full_attention_interval``-th layer is full."""

    architecture: str = "qwen3_6"
    full_attention_interval: int = 4
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = MISSING
    partial_rotary_factor: float = 0.25
    linear_num_key_heads: int = MISSING
    linear_num_value_heads: int = MISSING
    linear_key_head_dim: int = MISSING
    linear_value_head_dim: int = MISSING
    linear_conv_kernel_dim: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for few, many in (
            ("num_key_value_heads", "num_attention_heads"),
            ("linear_num_key_heads", "linear_num_value_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ConfigError(f"model.{many}={getattr(self, many)} is no multiple of {few}={getattr(self, few)}")
        if self.rotary_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} x partial_rotary_factor={self.partial_rotary_factor} gives "
                f"{self.rotary_dim} rotary dimensions; they must be even"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        """One of ``linear_attention`` and ``full_attention`` per layer, in transformers' words."""
        full = self.full_attention_interval
        return ["linear_attention" if (i + 1) % full else "full_attention" for i in range(self.num_hidden_layers)]


ARCHITECTURES: dict[str, type[ModelConfig]] = {"qwen3_6": Qwen36Config}


@dataclass
class AdapterConfig:
    """What is trained: ``none`` means every parameter."""

    name: str = "none"


@dataclass
class HardwareConfig:
    """Where a job runs and what it asks of SLURM. ``ranks`` is nodes x gpus_per_node unless set (on a CPU: 1)."""

    name: str = MISSING
    backend: str = "cuda"  # cpu | cuda: which implementation of each op is taken, once, when the model is built
    nodes: int = 1
    gpus_per_node: int = 0
    ranks: int | None = None
    gpu: str | None = None  # the name in --gres=gpu:NAME:COUNT
    memory_gb: float | None = None  # of one device, 10^9 bytes; None: what the machine has
    reserve_gb: float = 0.0  # of it, kept for the CUDA context and communication buffers
    cpus_per_task: int | None = None
    host_memory_gb: float | None = None
    time_min: int = 24 * 60  # the job's limit in minutes, on SLURM and for local subprocesses alike
    timeout_s: int = 600  # after which ranks that wait for a dead one give up
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    comment: str | None = None
    setup: list[str] = field(default_factory=list)  # shell lines before the job's command
    slurm: dict[str, Any] = field(default_factory=dict)  # further submitit parameters, e.g. slurm_reservation

    def __post_init__(self) -> None:
        choose("hardware.backend", self.backend, ("cpu", "cuda"))
        for key in ("nodes", "ranks", "time_min", "timeout_s", "cpus_per_task"):
            at_least(f"hardware.{key}", getattr(self, key), 1)

    @property
    def world_size(self) -> int:
        return self.ranks if self.ranks is not None else self.nodes * max(self.gpus_per_node, 1)


@dataclass
class DataConfig:
    name: str = MISSING


@dataclass
class NeedleConfig(DataConfig):
    """A made retrieval task: a key and its value hidden at a drawn depth of real text."""

    name: str = "needle"
    haystack: list[str] = field(default_factory=list)  # text files or folders; empty: Python's own standard library
    depth: list[float] = field(default_factory=lambda: [0.0, 1.0])  # drawn between these fractions of the prompt
    correct_fraction: float = 0.5  # of the made responses that answer rightly
    ragged: bool = True  # responses of drawn lengths up to response_length; false: all of that length

    def __post_init__(self) -> None:
        if len(self.depth) != 2 or not 0 <= self.depth[0] <= self.depth[1] <= 1:
            raise ConfigError(f"data.depth={self.depth} must be two rising fractions between 0 and 1")
        if not 0 <= self.correct_fraction <= 1:
            raise ConfigError(f"data.correct_fraction={self.correct_fraction} must lie between 0 and 1")


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
class AlgorithmConfig:
    """The policy loss; see ``longstraw.grpo`` for the formulas."""

    name: str = "grpo"
    scale_rewards: bool = True  # divide the advantage by the group's standard deviation
    importance: str = "token"  # token | sequence: what the clipped ratio is of
    normalize: str = "response"  # response | group | constant: what a token's loss is divided by
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    old_logprobs: str = "data"  # data: as given, on policy where absent; score: on the retained state; none: on policy

    def __post_init__(self) -> None:
        choose("algorithm.importance", self.importance, ("token", "sequence"))
        choose("algorithm.normalize", self.normalize, ("response", "group", "constant"))
        choose("algorithm.old_logprobs", self.old_logprobs, ("data", "score", "none"))
        for key in ("clip_low", "clip_high", "kl_coef"):
            at_least(f"algorithm.{key}", getattr(self, key), 0)


@dataclass
class OptimizerConfig:
    name: str = "adamw"  # adamw | none: gradients only
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        choose("optimizer.name", self.name, ("adamw", "none"))


@dataclass
class LaunchConfig:
    max_parallel: int | None = None  # jobs of a sweep at a time; None: 1 on this machine, the site's limit on SLURM
    detach: bool = False  # submit and return at once

    def __post_init__(self) -> None:
        at_least("launch.max_parallel", self.max_parallel, 1)


@dataclass
class TrackingConfig:
    """W&B, the record's mirror. ``auto``: online where a key is configured, offline otherwise."""

    mode: str = "auto"
    project: str = "longstraw"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        choose("tracking.mode", self.mode, ("auto", "online", "offline", "disabled"))


@dataclass
class RunConfig:
    """One job. ``context``, ``response_length``, ``chunk`` and ``prompt_grad_window`` become ints in ``finalize``."""

    model: ModelConfig = MISSING
    hardware: HardwareConfig = MISSING
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = MISSING
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    group_size: int = 2
    context: Any = "2.1M"  # positions of one branch: prompt + response
    response_length: Any = "${model.response_length}"
    chunk: Any = "${model.chunk}"  # prompt positions evaluated at a time, over all ranks
    prompt_grad: str = "detached"
    prompt_grad_window: Any = None  # prompt positions the gradient walks back through; None: all
    refresh_every: int = 1  # optimizer steps that share one retained prompt
    measure_drift: bool = True  # where refresh_every > 1: compare with a freshly evaluated prompt
    steps: int = 1
    seed: int = 0
    claim: str | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        for key, least in (("context", 2), ("response_length", 1), ("chunk", INNER_CHUNK), ("prompt_grad_window", 0)):
            if getattr(self, key) is not None:
                try:
                    setattr(self, key, parse_count(getattr(self, key), least=least))
                except ValueError as error:
                    raise ConfigError(f"{key}: {error}") from None
        self._check()

    def _check(self) -> None:
        choose("mode", self.mode, MODES)
        choose("prompt_grad", self.prompt_grad, PROMPT_GRADS)
        if self.group_size < 2:
            raise ConfigError(
                f"group_size={self.group_size}: advantages compare the responses of a group, so a group has two or "
                "more; use group_size=2"
            )
        for key in ("refresh_every", "steps"):
            at_least(key, getattr(self, key), 1)
        if self.chunk % INNER_CHUNK:
            raise ConfigError(f"chunk={self.chunk} is no multiple of {INNER_CHUNK}")
        if self.response_length >= self.context:
            raise ConfigError(
                f"response_length={self.response_length} leaves no prompt in context={self.context}; context counts "
                "the prompt and one response"
            )
        if self.prompt_grad == "exact" and self.refresh_every > 1:
            raise ConfigError(
                f"prompt_grad=exact with refresh_every={self.refresh_every}: the retained prompt is stale after the "
                "first optimizer step, so it has no exact gradient; use refresh_every=1 or prompt_grad=detached"
            )

    @property
    def prompt_positions(self) -> int:
        return self.context - self.response_length


def conf_dir() -> Path:
    """Return the folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "conf", here / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/config.yaml is neither beside nor inside {here}; install longstraw again")


def available(group: str) -> tuple[str, ...]:
    """Return the names in one config group, such as ``model``."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def load_model_config(name: str, **overrides: Any) -> ModelConfig:
    """Return the configuration of a model by the name of its file in ``conf/model``, without Hydra."""
    choose("model", name, available("model"))
    raw = OmegaConf.load(conf_dir() / "model" / f"{name}.yaml")
    raw.pop("defaults", None)
    return _model_config(OmegaConf.to_container(raw), overrides)


def read_model_config(folder: str | Path, **overrides: Any) -> ModelConfig:
    """Return the configuration of a checkpoint folder, from the ``config.json`` that transformers wrote."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; a checkpoint is a folder in transformers' format")
    text = json.loads(path.read_text())
    text = text.get("text_config", text)
    architecture = {"qwen3_5_text": "qwen3_6", "qwen3_5": "qwen3_6"}.get(text.get("model_type"))
    if architecture is None:
        raise ConfigError(f"{path}: model_type {text.get('model_type')!r} is none of qwen3_5_text (Qwen3.5, Qwen3.6)")
    rope = text.get("rope_parameters") or {}
    known = {f.name for f in fields(ARCHITECTURES[architecture])}
    values = {key: value for key, value in {**rope, **text}.items() if key in known and value is not None}
    _check_supported(path, text, rope)
    values |= {"name": Path(folder).resolve().name, "architecture": architecture, "checkpoint": str(folder)}
    return _model_config(values, overrides)


def _check_supported(path: Path, text: dict[str, Any], rope: dict[str, Any]) -> None:
    """Refuse what would load without complaint and then compute something else."""
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "tie_word_embeddings": (False, None),
    }
    for key, valid in wanted.items():
        if text.get(key) not in valid:
            raise ConfigError(f"{path}: {key}={text[key]!r} is not supported, only {valid[0]!r}")
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{path}: rope_type={rope['rope_type']!r} is not supported, only 'default'")


def _model_config(values: dict[str, Any], overrides: dict[str, Any]) -> ModelConfig:
    schema = ARCHITECTURES[values["architecture"]]
    known = [f.name for f in fields(schema)]
    for key in overrides:
        choose("model field", key, tuple(known))
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values, overrides))
    assert isinstance(config, ModelConfig)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Return a typed configuration as plain nested dicts, for records and ``spec.json``."""
    assert is_dataclass(config)
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)  # type: ignore[return-value]
