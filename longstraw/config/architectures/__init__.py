"""Model families by name, and the classes that hold their sizes; one file a family. No torch.

``longstraw.models`` builds each from the module of the same name there.
"""

from longstraw.config.architectures.base import ModelConfig
from longstraw.config.architectures.glm_5_2 import Glm52Config
from longstraw.config.architectures.llama import LlamaConfig
from longstraw.config.architectures.qwen3_6 import Qwen36Config

ARCHITECTURES: dict[str, type[ModelConfig]] = {"qwen3_6": Qwen36Config, "glm_5_2": Glm52Config, "llama": LlamaConfig}
