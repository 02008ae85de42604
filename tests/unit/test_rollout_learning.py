"""A tiny hybrid learns to recall a token of its prompt, first from right answers, then from rewards of what it draws.

Reward, and the gradient that teaches, reach the token only through the retained prompt.
"""

import statistics

import numpy as np
import pytest
from jobs import cpu_job

from longstraw.data import DataError
from longstraw.data.task import Example
from longstraw.memory.meter import MemoryMeter
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

HYBRID = {"num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32, "intermediate_size": 48}
WARMUP, STEPS = 24, 54


class Recall:
    """Ask for the last but one token of a prompt of two symbols; with ``chance`` for one that is not in the prompt."""

    description: dict = {}  # noqa: RUF012

    def __init__(self, chance=False):
        self._chance = chance

    def example(self, number, split="train"):
        *prompt, other = np.random.default_rng([number, split == "train"]).integers(2, size=9)
        answer = other if self._chance else prompt[-2]
        return Example(np.array(prompt), f"{split}-{number}", {"answer": int(answer)})

    def reward(self, example, responses):
        return [float(response[0] == example.columns["answer"]) for response in responses]

    def golden(self, example):
        return np.array([example.columns["answer"]])

    def group(self, step):
        raise DataError("no responses")


@pytest.mark.parametrize("chance", [False, True])
def test_a_tiny_hybrid_learns_from_a_warm_start_unless_there_is_nothing_to_learn(chance):
    config = cpu_job(
        HYBRID,
        rollout="sample",
        context=9,
        response_length=1,
        chunk=64,
        prompt_grad="exact",
        group_size=4,
        replay_tokens=4,
        groups_per_step=4,
        warmup_steps=WARMUP,
        steps=STEPS,
        optimizer={"lr": 5e-3, "betas": [0.9, 0.98]},
    )
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None)), task=Recall(chance))
        rows = [trainer.step(step) for step in range(STEPS)]
    rewards = [row["reward_mean"] for row in rows[WARMUP:]]
    first, last = statistics.fmean(rewards[:5]), statistics.fmean(rewards[-15:])
    assert 0.3 < first < 0.75
    assert last < 0.75 if chance else last > 0.85
