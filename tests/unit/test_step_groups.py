"""Steps of several groups: gradients added up one group at a time are those of the loss over all of them."""

import itertools

import pytest
import torch
from test_loop import job
from test_rollout import LLAMA, LowTokens, sampled_job

from longstraw.config import AlgorithmConfig, ConfigError
from longstraw.group import Group, StepTotals
from longstraw.grpo import accumulated, branch_losses, step_factor
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.step import grpo_step
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.optimizer import Optimizer
from longstraw.training.trainer import build_trainer

LENGTHS = [(3, 7), (5, 2), (1, 9)]


def groups(step=True):
    generator = torch.Generator().manual_seed(0)
    made = []
    for lengths in LENGTHS:
        old = [-torch.rand(n, generator=generator, dtype=torch.float64) for n in lengths]
        rewards = torch.rand(2, generator=generator).tolist()
        made.append(Group(torch.tensor([1]), [torch.ones(n).long() for n in lengths], rewards, old_logprobs=old))
    if step:
        totals = StepTotals.of(made)
        for group in made:
            group.step = totals
    return made


def gradients(made, algorithm, factor):
    """Return the gradient of the groups' losses, times ``factor``, by log-probability."""
    found = []
    for group in made:
        lps = [(old - 0.3).requires_grad_() for old in group.old_logprobs]
        of_branches = branch_losses(group, algorithm, 10, group.old_logprobs, None, torch.device("cpu"))
        (sum(of(lp).loss for of, lp in zip(of_branches, lps, strict=True)) * factor).backward()
        found += [lp.grad for lp in lps]
    return torch.cat(found)


@pytest.mark.parametrize(
    ("normalize", "scale", "loss"),
    [*itertools.product(("response", "group", "step", "constant"), ("group", "batch", "none"), ("clip", "cispo"))],
)
def test_the_factor_after_the_last_group_makes_the_loss_over_all(normalize, scale, loss):
    algorithm = AlgorithmConfig(normalize=normalize, scale_rewards=scale, loss=loss, clip_high=0.4, clip_dual=None)
    target = gradients(groups(), algorithm, 1.0)
    alone, totals = groups(step=False), StepTotals.of(groups())
    factor = step_factor(algorithm, totals, 10) / len(LENGTHS)
    found = gradients(alone, accumulated(algorithm), factor)
    assert float((found - target).norm() / target.norm()) < 1e-12
    if normalize == "step" or scale == "batch":  # negative control: as if each group were the step's only one
        wrong = gradients(alone, algorithm, 1 / len(LENGTHS))
        assert float((wrong - target).norm() / target.norm()) > 1e-3


def seen_by_the_optimizer(monkeypatch):
    """Return where the gradients of each coming step are put, as they are when its parameters are updated."""
    steps, update = [], Optimizer._step

    def look(self):
        steps.append([gradient.clone() for gradient in self.gradients()])
        update(self)

    monkeypatch.setattr(Optimizer, "_step", look)
    return steps


DRAWN = {
    "stop": list(range(64)),
    "context": 46,
    "response_length": 6,
    "chunk": 64,
    "model": {**LLAMA, "dtype": "float64"},
}


@pytest.mark.parametrize(
    "algorithm", [{}, {"normalize": "step"}, {"normalize": "step", "scale_rewards": "batch", "baseline": "others"}]
)
def test_a_step_of_several_drawn_groups_has_the_gradient_of_their_loss(monkeypatch, algorithm):
    config = sampled_job(**DRAWN, algorithm=algorithm, groups_per_step=3, optimizer={"max_grad_norm": None})
    made, steps = [], seen_by_the_optimizer(monkeypatch)
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None)), task=LowTokens())
        take = trainer._make_group
        monkeypatch.setattr(trainer, "_make_group", lambda *a: made.append(take(*a)) or made[-1])
        row = trainer.step(0)
    assert len({tuple(shared.group.prompt.tolist()) for shared in made}) == row["groups"] == 3
    oracle = build_model(config.model, seed=config.seed)
    totals = StepTotals.of([shared.group for shared in made])
    assert len(set(map(len, (r for shared in made for r in shared.group.responses)))) > 2
    for shared in made:
        group = shared.group
        group.step = totals
        grpo_step(oracle, group, chunk=64, algorithm=config.algorithm, response_length=6)
    (found,), target = steps, [p.grad for p in oracle.parameters()]
    for a, b in zip(found, target, strict=True):
        assert float((a - b).norm()) <= 1e-10 * float(b.norm())


def test_groups_of_equal_rewards_are_skipped_and_counted():
    rewards = iter([1.0] * 8 + [float(i) for i in range(8)] + [1.0] * 16)
    config = sampled_job(**DRAWN, groups_per_step=2, steps=2)
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None)), task=LowTokens(lambda ids: next(rewards)))
        mixed, equal = trainer.step(0), trainer.step(1)
    assert (mixed["groups"], mixed["equal_groups"]) == (2, 1)
    assert 0 < mixed["replayed_positions"] < mixed["sampled_positions"]
    assert mixed["grad_norm"] > 0
    assert (equal["equal_groups"], equal["grad_norm"], equal["loss"], equal["entropy"]) == (2, 0, 0, None)
    assert "replay" not in equal["seconds_by_verb"]


def test_memory_does_not_grow_with_the_groups():
    peaks = []
    for number in (2, 6):
        with MemoryMeter() as meter:
            trainer = build_trainer(job(groups_per_step=number, prompt_grad="exact"), Monitor(meter, Progress(None)))
            row = trainer.step(0)
        peaks.append(row["peak_allocated_bytes"])
        assert row["prefilled_positions"] == number * (row["prompt_positions"] - 1)
    small = 4 * 2 * 2 * 24 * 8  # four more groups' log-probabilities of two responses, for the record
    assert abs(peaks[1] - peaks[0]) <= small + 0.002 * peaks[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"groups_per_step": 2, "refresh_every": 2, "prompt_grad": "detached"}, "retain all their prompts"),
        ({"groups_per_step": 2, "algorithm": {"scale_rewards": "batch", "kl_coef": 0.1}}, "divide the KL term too"),
        ({"groups_per_step": 0}, "at least 1"),
    ],
)
def test_what_steps_of_several_groups_cannot_do_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        job(**changes)
