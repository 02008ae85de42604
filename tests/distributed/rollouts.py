"""What ranks are asked to train: steps on responses that they draw and reward."""

from dataclasses import dataclass

import numpy as np

from longstraw.config import RunConfig
from longstraw.data.task import DataError, Example
from longstraw.memory.meter import MemoryMeter
from longstraw.rollout.evaluation import answers, held_out
from longstraw.rollout.group import decide_here
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer


class FirstToken:
    """Reward responses that begin with one of the first tokens: seldom, so most groups are drawn again."""

    description: dict = {}  # noqa: RUF012

    def __init__(self, vocabulary):
        self._vocabulary, self.asked = vocabulary, 0

    def example(self, number, split="train"):
        return Example(np.random.default_rng(number).integers(self._vocabulary, size=71), f"first-{number}")

    def reward(self, example, responses):
        self.asked += 1
        return [float(ids[0] < self._vocabulary // 16) for ids in responses]

    def golden(self, example):
        return np.zeros(1, dtype=np.int64)

    def group(self, step):
        raise DataError("no responses")


def train(config, steps=1):
    """Return the records of ``steps``, how often a reward was asked for, and the last group with how it was drawn."""
    task = FirstToken(config.model.vocab_size)
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None)), task=task)
        rows = [trainer.step(step) for step in range(steps)]
    return {"rows": rows, "asked": task.asked, "rollout": trainer.shared and trainer.shared.rollout}


@dataclass
class Training:
    config: RunConfig
    steps: int = 1

    def run(self, world):
        return train(self.config, self.steps)


def evaluate(config):
    """Return the answers to held-out prompts, and how often a reward was asked for."""
    task = FirstToken(config.model.vocab_size)
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None)), task=task)
        decide = decide_here if trainer.parallel is None else trainer.parallel.mesh.decide
        return list(answers(trainer.model, held_out(config, task), decide=decide)), task.asked


@dataclass
class Evaluating:
    config: RunConfig

    def run(self, world):
        return evaluate(self.config)
