"""Steps with ``rollout=sample`` on two and four ranks: the groups, rewards and losses of one process."""

import functools
from dataclasses import replace

import pytest
import torch
from rollouts import Evaluating, Training, evaluate, train

from longstraw.config import EvaluateConfig, from_dict, load_model_config, to_dict

CUT = {
    "qwen3_6_tiny": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "glm_5_2_tiny": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "index_skip_topk_offset": 2},
}


def job(model, ranks=1, dp=1):
    return from_dict(
        {
            "model": to_dict(load_model_config(model, dtype="float64", **CUT[model])),
            "adapter": {"name": "none"},
            "hardware": {"name": "cpu", "backend": "cpu", "ranks": ranks, "dp": dp},
            "data": {"name": "needle"},
            "optimizer": {"name": "none"},
            "tracking": {"mode": "disabled"},
            "rollout": "sample",
            "context": 77,
            "response_length": 6,
            "group_size": 4,
            "stop": [3, 4, 5, 6, 7, 8, 9, 10],
            "resample": 12,
            "chunk": 64,
            "refresh_every": 2,  # the group is still there after a step
            "measure_drift": False,
            "steps": 4,
        }
    )


@functools.cache
def alone(model, prompts):
    """Return the records of one process's steps on the first ``prompts``, and their groups with how they were drawn."""
    config = replace(job(model), steps=2 * prompts)
    taken = [train(config, steps=2 * prompt + 1) for prompt in range(prompts)]
    return [(one["rows"][-1], one["rollout"]) for one in taken]


@pytest.mark.parametrize(
    ("model", "world", "dp"), [("qwen3_6_tiny", 2, 1), ("qwen3_6_tiny", 2, 2), ("glm_5_2_tiny", 4, 2)]
)
def test_ranks_train_on_the_groups_of_one_process(ranks, model, world, dp):
    answers = ranks(world).run(Training(job(model, world, dp)))
    wanted = alone(model, dp)
    assert len({rollout.resampled for _, rollout in wanted}) == dp  # prompts beside are drawn again at other times
    for rank, answer in enumerate(answers):
        (row,), rollout = answer["rows"], answer["rollout"]
        _, target = wanted[rank // (world // dp)]
        assert rollout.resampled == target.resampled
        assert rollout.group.rewards == target.group.rewards
        assert all(map(torch.equal, rollout.group.responses, target.group.responses))
        assert all(
            torch.allclose(*pair, rtol=0, atol=1e-12)
            for pair in zip(rollout.group.old_logprobs, target.group.old_logprobs, strict=True)
        )
        assert answer["asked"] == (0 if rank % (world // dp) else target.resampled + 1)
        losses = [alone_row["loss"] for alone_row, _ in wanted]
        assert row["loss"] == pytest.approx(sum(losses) / dp, abs=1e-12)
        assert row["status"] == "ok"


def several(groups, ranks=1, dp=1, **algorithm):
    """Return a job whose first step is supervised, on several groups, and whose second is on drawn ones."""
    schedule = {"groups_per_step": groups, "refresh_every": 1, "prompt_grad": "exact", "warmup_steps": 1}
    run = replace(job("qwen3_6_tiny", ranks, dp), **schedule)
    return replace(run, algorithm=replace(run.algorithm, **algorithm))


@pytest.mark.parametrize("algorithm", [{}, {"normalize": "step", "scale_rewards": "batch"}])
def test_groups_over_ranks_are_normalised_over_all_of_them(ranks, algorithm):
    wanted = train(several(4, **algorithm), steps=2)["rows"]
    for answer in ranks(4).run(Training(several(2, ranks=4, dp=2, **algorithm), steps=2)):
        for row, target in zip(answer["rows"], wanted, strict=True):
            assert (row["groups"], row["sampled_positions"]) == (4, target["sampled_positions"])
            assert row["equal_groups"] == target["equal_groups"]
            assert row["grad_norm"] == pytest.approx(target["grad_norm"], rel=1e-10)
            assert row["loss"] == pytest.approx(target["loss"], abs=1e-12)
            distance = "advantage_abs_mean"  # a supervised step has none
            assert row.get(distance, 0) == pytest.approx(target.get(distance, 0), rel=1e-12)
    assert wanted[1]["grad_norm"] > 0
    if algorithm:  # negative control: another normalisation has another gradient
        other = train(several(4), steps=2)["rows"][1]["grad_norm"]
        assert abs(wanted[1]["grad_norm"] / other - 1) > 1e-3


@pytest.mark.parametrize(("model", "world", "dp"), [("qwen3_6_tiny", 2, 1), ("glm_5_2_tiny", 4, 2)])
def test_ranks_evaluate_as_one_process_and_one_rewards(ranks, model, world, dp):
    asked = EvaluateConfig(examples=4, temperature=1.0)
    wanted, _ = evaluate(replace(job(model), evaluate=asked))
    assert len({answer.tokens for answer in wanted}) > 1  # some are ended by a stop token
    for rank, (found, rewarded) in enumerate(
        ranks(world).run(Evaluating(replace(job(model, world, dp), evaluate=asked)))
    ):
        assert found == wanted
        assert rewarded == (0 if rank % (world // dp) else 4)
