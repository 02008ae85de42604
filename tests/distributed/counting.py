"""What ranks are asked to count: the peaks of a job's first step."""

import gc
import time
from dataclasses import dataclass

from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.config import RunConfig
from longstraw.memory.meter import MemoryMeter
from longstraw.ops.host_sync import use_stated_counts
from longstraw.simulation.single_rank import RandomTask, expert_token_counts
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

PAUSE = 0.002  # seconds


class PauseAfterCollectives(TorchDispatchMode):
    """Let gloo's thread free what a collective used before more is allocated.

    It does so after ``wait`` has returned, once it gets the interpreter's lock. By itself that may be an operation
    late, and then a peak holds buffers of the collective before. On a GPU nothing is held so.
    """

    def __init__(self):
        super().__init__()
        self._after_one = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):  # a wrapper (DTensor): its parts come here
            return NotImplemented
        if self._after_one:
            time.sleep(PAUSE)
        self._after_one = func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def count(config):
    """Return the most bytes of each verb, and at the peak of each kind; experts get as many tokens as is stated."""
    with MemoryMeter() as meter, use_stated_counts(expert_token_counts(config)), PauseAfterCollectives():
        watch = Monitor(meter, Progress(None))
        trainer = build_trainer(config, watch, task=RandomTask(config) if config.rollout == "sample" else None)
        gc.collect()  # what building left is no part of a step
        trainer.step(0)
        return watch.peaks.by_verb, watch.peaks.by_kind


@dataclass
class Counting:
    config: RunConfig

    def run(self, world):
        return count(self.config)
