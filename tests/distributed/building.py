"""What ranks are asked to build."""

from dataclasses import dataclass

import torch

from longstraw.config import AdapterConfig, HardwareConfig, ModelConfig


@dataclass
class Building:
    """A model spread over all ranks; the answer is its weights, gathered, and how many a rank holds."""

    config: ModelConfig
    adapter: AdapterConfig
    seed: int = 3

    def run(self, world):
        from longstraw.parallel.fsdp import local_tensor
        from longstraw.parallel.materialize import build_sharded
        from longstraw.parallel.mesh import build_mesh
        from longstraw.parallel.parallel_dims import resolve_dims

        hardware = HardwareConfig(name="cpu", backend="cpu", ranks=world)
        mesh = build_mesh(resolve_dims(self.config, hardware), "cpu")
        model = build_sharded(self.config, self.adapter, mesh, seed=self.seed, device=torch.device("cpu")).model
        state = model.state_dict()
        held = sum(local_tensor(tensor).numel() for tensor in state.values())
        whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
        return {"weights": whole, "held": held}
