"""``experiments/detaching_tiny``: its batched gradient is ``grpo_step``'s; exact learns what detached does not."""

import copy

import pytest
import torch
from batched import CLOSE, build, distance_from_product, grpo_loss, logits
from learning_tasks import TASKS, VOCABULARY, draw
from train import ARMS, Run, learn, started

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
