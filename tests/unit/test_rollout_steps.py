"""Steps that share responses or a retained prompt, warm-up on golden answers, and rewards that fall with length."""

import copy

import numpy as np
import pytest
import torch
from test_rollout import LLAMA, LowTokens, sampled_job

from longstraw.config import ConfigError
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.step import grpo_step, prefill
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

SIZES = {"context": 46, "response_length": 6, "chunk": 64, "model": LLAMA, "stop": []}


def start(task=None, **changes):
    config = sampled_job(**{**SIZES, "optimizer": {"lr": 1e-2}, **changes})
    with MemoryMeter() as meter:
        return build_trainer(config, Monitor(meter, Progress(None)), task=task or LowTokens())


def take(trainer, count):
    return [trainer.step(step) for step in range(count)]


def column(rows, key):
    return [row[key] for row in rows]


def test_updates_on_the_same_responses_evaluate_the_prompt_anew_and_have_ratios():
    trainer = start(updates_per_rollout=3, steps=6, groups_per_step=2)
    assert trainer.config.refresh_every == 1
    rows = [trainer.step(0)]
    drawn = [one.rollout.group for one in trainer.drawn.values()]
    oracle = copy.deepcopy(trainer.model)
    rows += [trainer.step(1)]
    found = sum(grpo_step(oracle, group, chunk=64).loss for group in drawn) / 2
    assert rows[1]["loss"] == pytest.approx(float(found), rel=1e-4)
    assert abs(rows[1]["loss"]) > 1e-3  # on policy it would be 0
    rows += [trainer.step(step) for step in range(2, 6)]
    assert column(rows, "rollout_age") == [0, 1, 2, 0, 1, 2]
    assert column(rows, "state_age") == [0] * 6
    assert column(rows, "prefilled_positions") == [2 * 39] * 6
    assert [row["sampled_positions"] > 0 for row in rows] == [True, False, False] * 2
    drift = column(rows, "sampler_drift")
    assert max(drift[0], drift[3]) < 1e-5 < 1e-3 < min(drift[1], drift[4]) < min(drift[2], drift[5])


def test_a_prompt_is_evaluated_anew_once_the_policy_is_too_far_from_the_sampler():
    ages = {}
    for above in (None, 1e-4, 0.0, 100.0):
        rows = take(start(refresh_every=4, refresh_above=above, prompt_grad="detached", measure_drift=False), 5)
        ages[above] = column(rows, "state_age")
        assert column(rows, "rollout_age") == [0, 1, 2, 3, 0]
        assert all((row["prefilled_positions"] > 0) == (row["state_age"] == 0) for row in rows)
    assert ages[None] == ages[100.0] == [0, 1, 2, 3, 0]
    assert ages[1e-4] == [0, 1, 0, 0, 0]  # rounding alone is below it, one update is above it
    assert ages[0.0][2:] == [0, 0, 0]


def test_warm_up_steps_have_the_gradient_of_the_golden_answers_likelihood():
    class Golden(LowTokens):
        def golden(self, example):
            return np.array([7, 9, 11])

    trainer = start(Golden(), warmup_steps=2, steps=3, groups_per_step=2, stop=[3], prompt_grad="exact")
    model = build_model(trainer.config.model, seed=0)
    answer, loss = torch.tensor([7, 9, 11, 3]), 0.0
    for number in range(2):
        prompt = torch.from_numpy(Golden().example(number).prompt)
        states = prefill(model, prompt[:1], chunk=64).states  # nothing retained: the whole sequence has a graph
        tokens = torch.cat([prompt, answer[:-1]])
        hidden, _ = model(tokens, [state.leaves(0, grad=False) for state in states])
        logits = model.logits(hidden[-4:], 4)
        loss = loss - logits.log_softmax(-1).gather(-1, answer.unsqueeze(-1)).mean() / 2
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    rows = take(trainer, 3)
    assert column(rows[:2], "rollout") == ["golden", "golden"]
    assert "rollout" not in rows[2]  # the run's own
    assert rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert column(rows[:2], "replayed_positions") == [8, 8]
    assert column(rows[:2], "sampled_positions") == [0, 0]
    assert "reward_mean" not in rows[0]
    assert rows[2]["reward_mean"] > 0
    assert rows[2]["sampled_positions"] > 0


def test_rewards_fall_over_the_last_tokens_that_a_response_may_have():
    trainer = start(
        LowTokens(lambda ids: 0.0),
        overlong_buffer=4,
        stop=list(range(64)),
        refresh_every=2,
        prompt_grad="detached",
        measure_drift=False,
    )
    trainer.step(0)
    group = trainer.shared.group
    lengths = [len(response) for response in group.responses]
    assert len(set(lengths)) > 2
    assert group.rewards == [-max(0, n - 2) / 4 for n in lengths]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"updates_per_rollout": 3, "refresh_every": 2}, "no multiple of refresh_every=2"),
        ({"refresh_above": 0.1}, "refresh_every=1 would not be used"),
        ({"warmup_steps": 3, "steps": 2}, "of steps=2"),
        ({"overlong_buffer": 2}, "needs stop"),
        ({"overlong_buffer": 7, "stop": [3]}, "at most response_length=6"),
        ({"updates_per_rollout": 2, "algorithm": {"old_logprobs": "none"}}, "need ratios"),
        ({"rollout": "given", "warmup_steps": 1}, "warmup_steps would not be used with rollout=given"),
        ({"rollout": "given", "refresh_above": 0.5, "refresh_every": 2}, "refresh_above would not be used"),
        ({"rollout": "given", "overlong_buffer": 1}, "overlong_buffer would not be used"),
        ({"rollout": "given", "top_p": 0.5}, "would not be used"),
    ],
)
def test_keys_without_an_effect_or_against_each_other_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        sampled_job(**{**SIZES, "prompt_grad": "detached", **changes})
