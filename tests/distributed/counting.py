"""What ranks are asked to count: the peaks of a job's first step."""

from dataclasses import dataclass

from longstraw.config import RunConfig
from longstraw.memory.meter import MemoryMeter
from longstraw.ops.host_sync import use_stated_counts
from longstraw.simulation.single_rank import expert_token_counts
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer


def count(config):
    """Return the most bytes of each verb, and at the peak of each kind; experts get as many tokens as is stated."""
    with MemoryMeter() as meter, use_stated_counts(expert_token_counts(config)):
        watch = Monitor(meter, Progress(None))
        build_trainer(config, watch).step(0)
        return watch.peaks.by_verb, watch.peaks.by_kind


@dataclass
class Counting:
    config: RunConfig

    def run(self, world):
        return count(self.config)
