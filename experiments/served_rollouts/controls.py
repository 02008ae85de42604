"""Hand a real server other weights than the policy's, and see whether the run notices: controls.py URL."""

import sys
import tempfile
from pathlib import Path

import torch

from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.data import build_task
from longstraw.memory.meter import MemoryMeter
from longstraw.models import load_model
from longstraw.models.lora import add_adapter, save_adapter
from longstraw.rollout.group import DriftError
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer


def other_weights(config, size):
    """Return a function that publishes an adapter whose B, which begins at zero, is drawn with deviation ``size``."""
    model = add_adapter(load_model(config.model.checkpoint, config=config.model), config.adapter, seed=config.seed)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=draw))
    return lambda folder: save_adapter(model, folder)


def main(url, checkpoint):
    """Print for each size of the difference whether the first group was refused."""
    config = from_dict(
        {
            "model": to_dict(load_model_config("smollm2_135m", checkpoint=checkpoint, dtype="bfloat16")),
            "hardware": {"name": "cpu", "backend": "cpu"},
            "data": {"name": "lookup"},
            "adapter": {"name": "lora"},
            "rollout": "server",
            "server": {"url": url, "seeds": False},
            "context": 256,
            "response_length": 8,
            "group_size": 2,
            "chunk": 128,
            "temperature": 0.8,
        }
    )
    task = build_task(config)
    for size in (0.0, 1e-3, 1e-2, 3e-2, 1e-1):
        with MemoryMeter() as meter, tempfile.TemporaryDirectory() as folder:
            trainer = build_trainer(config, Monitor(meter, Progress(None)), task=task, run_dir=Path(folder))
            trainer.source._publish = other_weights(config, size)
            try:
                row = trainer.step(0)
                print(f"{size:g}: not noticed, probe_drift={row['probe_drift']:.3f}")
            except DriftError as error:
                print(f"{size:g}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
