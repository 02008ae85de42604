"""The configuration of a job as typed objects, made from YAML files and the command line."""

from longstraw.config.algorithm import ALGORITHM_CHOICES, AlgorithmConfig, check_step_groups
from longstraw.config.architectures import ARCHITECTURES
from longstraw.config.architectures.base import DTYPES, ModelConfig, native_length_warning
from longstraw.config.checks import ConfigError, at_least, choose
from longstraw.config.data import (
    DATA,
    ROLLOUT_FORMATS,
    DataConfig,
    JsonlConfig,
    MadeConfig,
    NeedleConfig,
    RolloutsConfig,
)
from longstraw.config.evaluation import EvaluateConfig
from longstraw.config.hardware import HardwareConfig, LaunchConfig, RatesConfig, SimulationConfig
from longstraw.config.model import (
    INNER_CHUNK,
    available,
    conf_dir,
    inner_chunk,
    load_model_config,
    option,
    read_model_config,
    use_conf_dirs,
)
from longstraw.config.parts import AdapterConfig, CheckpointConfig, OptimizerConfig, StateConfig, TrackingConfig
from longstraw.config.run import (
    COUNTS,
    GROUPS,
    MODES,
    PROMPT_GRADS,
    RunConfig,
    from_composed,
    from_dict,
    gradient_start,
    schema_of,
    to_dict,
    with_checkpoint_sizes,
)
from longstraw.config.server import ServerConfig

__all__ = [
    "ALGORITHM_CHOICES",
    "ARCHITECTURES",
    "COUNTS",
    "DATA",
    "DTYPES",
    "GROUPS",
    "INNER_CHUNK",
    "MODES",
    "PROMPT_GRADS",
    "ROLLOUT_FORMATS",
    "AdapterConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvaluateConfig",
    "HardwareConfig",
    "JsonlConfig",
    "LaunchConfig",
    "MadeConfig",
    "ModelConfig",
    "NeedleConfig",
    "OptimizerConfig",
    "RatesConfig",
    "RolloutsConfig",
    "RunConfig",
    "ServerConfig",
    "SimulationConfig",
    "StateConfig",
    "TrackingConfig",
    "at_least",
    "available",
    "check_step_groups",
    "choose",
    "conf_dir",
    "from_composed",
    "from_dict",
    "gradient_start",
    "inner_chunk",
    "load_model_config",
    "native_length_warning",
    "option",
    "read_model_config",
    "schema_of",
    "to_dict",
    "use_conf_dirs",
    "with_checkpoint_sizes",
]
