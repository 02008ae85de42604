"""``experiments/detaching_tiny``: its batched gradient is ``grpo_step``'s; exact learns what detached does not."""

import copy
from contextlib import nullcontext

import pytest
import torch
from batched import CLOSE, build, distance_from_product, grpo_loss, logits
from learning_tasks import TASKS, VOCABULARY, draw
from probe import PromptAdapters, probe, probed_logits
from torch import nn
from train import ARMS, Run, learn, started

from longstraw.group import Group
from longstraw.observer import Observer
from longstraw.step import grpo_step

TRIVIAL = 5 / 12  # of duplicate: the last value


@pytest.mark.parametrize("mode", ARMS)
@pytest.mark.parametrize("task", TASKS)
def test_the_gradient_is_the_products(task, mode):
    model = build(1, VOCABULARY)
    prompts, answers = draw(task, 0, 0, 2)
    assert distance_from_product(model, prompts, answers, mode, 0) < CLOSE


def test_the_other_mode_is_another_gradient():
    model, gradients = build(1, VOCABULARY), []
    prompts, answers = draw("duplicate", 0, 0, 2)
    drawn = torch.stack([answers, answers + 1], 1)
    for border in (0, prompts.shape[1] - 1):
        model.zero_grad()
        grpo_loss(logits(model, prompts, border).log_softmax(-1), drawn, torch.tensor([[1.0, 0.0]] * 2)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[0].norm()


def test_tasks_are_what_they_say():
    for task in TASKS:
        prompts, answers = draw(task, 3, 0, 200)
        again, _ = draw(task, 3, 0, 200)
        assert torch.equal(prompts, again)
        assert (answers >= 20).all()
        assert (answers < 28).all()
    prompts, answers = draw("duplicate", 3, 0, 200)
    for line, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        keys, values = line[:-2:2], line[1:-2:2]
        twice = next(key for key in keys if keys.count(key) == 2)
        assert [value for key, value in zip(keys, values, strict=True) if key == twice][-1] == answer


def test_a_chain_has_two_hops():
    prompts, answers = draw("chain", 3, 0, 50)
    for line, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        given = dict(zip(line[:8:2], line[1:8:2], strict=True))
        passed = dict(zip(line[8:16:2], line[9:16:2], strict=True))
        assert given[passed[line[-1]]] == answer


@pytest.mark.long
def test_exact_learns_what_detached_does_not():
    """Golden answers on duplicate, two starts: exact passes the trivial level, detached does not."""
    for seed in (1, 2):
        model = started(seed, ["duplicate"])
        last = {}
        for arm in ARMS:
            *_, row = learn(Run("duplicate", arm, "golden", seed, steps=400), copy.deepcopy(model))
            last[arm] = row["success"]
        assert last["detached"] < TRIVIAL + 0.1
        assert last["exact"] > last["detached"] + 0.1


class Prefix(Observer):
    """Lets adapters act in the named verbs of a step alone."""

    def __init__(self, adapters, verbs):
        self.adapters, self.verbs = adapters, verbs

    def verb(self, name, positions):
        return self.adapters.active() if name in self.verbs else nullcontext()


def probed(mode, verbs=("prefill", "prompt_backward")):
    """Return the gradients that ``grpo_step`` leaves in adapters, and those of the probe's graph, for one prompt."""
    model = build(1, VOCABULARY)
    adapters = PromptAdapters(model, 4, 1)
    for up in adapters.up:  # at zero the gradient of ``down`` is zero in every mode
        nn.init.normal_(up, std=0.1, generator=torch.Generator().manual_seed(2))
    prompts, answers = draw("gap", 0, 0, 1)
    drawn, rewards = torch.stack([answers, answers + 1], 1), torch.tensor([[1.0, 0.0]])
    group = Group(prompts[0], list(drawn[0][:, None]), rewards[0].tolist())
    grpo_step(model, group, chunk=64, prompt_grad=mode, observer=Prefix(adapters, verbs))
    product = [p.grad for p in adapters.parameters()]
    adapters.zero_grad(set_to_none=True)
    grpo_loss(probed_logits(model, adapters, prompts, mode).log_softmax(-1), drawn, rewards).backward()
    return product, [p.grad for p in adapters.parameters()]


def test_the_exact_gradient_reaches_adapters_of_prompt_positions():
    product, batched = probed("exact")
    for ours, theirs in zip(batched, product, strict=True):
        assert theirs.norm() > 0
        assert (ours - theirs).norm() < CLOSE * theirs.norm()


def test_the_detached_gradient_does_not():
    product, batched = probed("detached")
    assert product == batched == [None] * len(product)
    everywhere, _ = probed("detached", verbs=("prefill", "replay"))
    assert all(x.norm() > 0 for x in everywhere)


def test_the_probe_stays_flat_to_the_digit_when_detached():
    """Three updates: what the probe measures is the same number detached, and another one exact."""
    losses = {}
    for arm in ("exact", "detached"):
        run = Run("gap", arm, "golden", 1, lr=3e-3, steps=3, batch=8, every=3)
        losses[arm] = [row["loss"] for row in probe(run, build(1, VOCABULARY), rank=4)]
    assert losses["detached"][0] == losses["detached"][1] == losses["exact"][0]
    assert losses["exact"][1] != losses["exact"][0]
