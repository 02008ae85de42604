"""Configuration classes of the model families, by name; one file a family. No torch.

The module of the same name in ``longstraw.models`` builds the model.
"""

from longstraw.config.architectures.base import ModelConfig
from longstraw.config.architectures.glm_5_2 import Glm52Config
from longstraw.config.architectures.llama import LlamaConfig
from longstraw.config.architectures.qwen3_6 import Qwen36Config
from longstraw.config.architectures.qwen3_6_moe import Qwen36MoeConfig

ARCHITECTURES: dict[str, type[ModelConfig]] = {
    "qwen3_6": Qwen36Config,
    "qwen3_6_moe": Qwen36MoeConfig,
    "glm_5_2": Glm52Config,
    "llama": LlamaConfig,
}
