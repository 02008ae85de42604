"""Steps on responses drawn from the retained prompt: what is recorded, drawn again and skipped."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_loop import job, rows

from longstraw.config import ConfigError, load_model_config, to_dict
from longstraw.data import DataError
from longstraw.data.task import Example
from longstraw.memory.meter import MemoryMeter
from longstraw.rollout.group import Request, decide_here, draw_group, response_seeds
from longstraw.rollout.sampling import Samples
from longstraw.step import score
from longstraw.tracking.recorder import RunIdentity
from longstraw.training.loop import run_job
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

STOP = 3
LLAMA = to_dict(load_model_config("llama_tiny", num_hidden_layers=2))


def sampled_job(**changes):
    return job(**{"rollout": "sample", "group_size": 8, "prompt_grad": "exact", "stop": [STOP]} | changes)


class LowTokens:
    """Reward the share of a response's tokens below 64, a quarter of the vocabulary."""

    description: dict = {}  # noqa: RUF012

    def __init__(self, reward=lambda ids: float((ids < 64).mean())):
        self._reward = reward

    def example(self, number, split="train"):
        prompt = np.random.default_rng([number, split == "train"]).integers(256, size=40)
        return Example(prompt, f"low-{split}-{number}")

    def reward(self, example, responses):
        return [self._reward(ids) for ids in responses]

    def golden(self, example):
        return np.zeros(1, dtype=np.int64)

    def group(self, step):
        raise DataError("no responses")


def trained(task, **changes):
    """Return the trainer and the rows of its steps."""
    config = sampled_job(**{"context": 46, "response_length": 6, "chunk": 64} | changes)
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None)), task=task)
        return trainer, [trainer.step(step) for step in range(config.steps)]


def test_the_old_log_probabilities_are_those_drawn_and_replay_has_the_temperature():
    config = {"temperature": 0.7, "steps": 1, "refresh_every": 2, "prompt_grad": "detached", "measure_drift": False}
    trainer, (row,) = trained(LowTokens(), optimizer={"name": "none"}, **config)
    prepared = trainer.shared.prepared
    for temperature, same in ((0.7, True), (1.0, False)):
        again = score(trainer.model, prepared.retained, prepared.group.responses, temperature=temperature)
        difference = max(float((a - b).abs().max()) for a, b in zip(again, prepared.old_logprobs, strict=True))
        assert (difference < 1e-5) is same
    assert row["clip_fraction"] == 0


def test_equal_rewards_are_drawn_again_and_cost_no_backward():
    trainer, (row,) = trained(LowTokens(lambda ids: 1.0), steps=1, resample=2)
    assert row["resampled"] == 2
    assert row["sampled_positions"] > 2 * 8
    assert row["replayed_positions"] == row["recomputed_positions"] == 0
    assert not {"replay", "prompt_backward", "optimizer"} & set(row["seconds_by_verb"])
    assert row["grad_norm"] == row["loss"] == 0
    assert row["status"] == "ok"
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    _, (row,) = trained(LowTokens(), steps=1, resample=2)
    assert row["resampled"] == 0
    assert row["replayed_positions"] == row["sampled_positions"] > 0


def test_a_good_group_is_kept_while_a_prompt_beside_it_draws_again():
    config, asked = sampled_job(resample=3, group_size=2), iter([1, 1, 0])

    def draw(seeds):
        responses = [torch.tensor([seed % 100, 5]) for seed in seeds]
        return Samples(responses, [torch.zeros(2)] * 2, [False] * 2)

    rewards = iter([1.0, 1.0, 0.0, 1.0])  # equal, then not; asked for no more
    task = LowTokens(lambda ids: next(rewards))
    request = Request(torch.tensor([1]), task, config, 0, 7, task.example(7))
    policy = SimpleNamespace(model=SimpleNamespace(agree=lambda _: next(asked)), retained=request, decide=decide_here)
    rollout = draw_group(policy, request, draw)
    assert (rollout.resampled, rollout.sampled_positions) == (1, 2 * 2 * 2)  # the third call draws nothing here
    assert [int(ids[0]) for ids in rollout.group.responses] == [seed % 100 for seed in response_seeds(0, 7, 1, 2)]
    assert rollout.group.rewards == [0.0, 1.0]


def test_drawn_tokens_count_as_one_evaluation_each():
    """Groups of equal rewards are drawn three times and not trained on; no stop token, so lengths are known."""
    trainer, (row,) = trained(LowTokens(lambda ids: 1.0), steps=1, resample=2, stop=[], sample_batch=3)
    model = trainer.model
    response = model.flops(39, 45) + model.head_flops(6)
    assert row["sampled_positions"] == 3 * 8 * 6
    assert row["flops"] == model.flops(0, 39, state_only=True) + 3 * 8 * response


def test_truncated_responses_can_be_left_out_of_the_loss():
    _, (row,) = trained(LowTokens(), steps=1)
    assert 0 < row["truncated_fraction"] <= 1
    assert row["response_length_mean"] == row["replayed_positions"] / 8
    trainer, _ = trained(LowTokens(), steps=1, mask_truncated=True, refresh_every=2, prompt_grad="detached")
    group = trainer.shared.group
    for response, mask in zip(group.responses, group.loss_masks, strict=True):
        assert bool(mask.all()) == bool(mask.any()) == (int(response[-1]) == STOP)


def test_a_job_records_what_was_drawn_and_repeats_it(tmp_path):
    config = sampled_job(data={"name": "lookup"}, steps=2, resample=1, context=420)
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run_job(config, tmp_path / name, RunIdentity(name))
        written.append(rows(tmp_path / name))
    first, again = written
    assert [row["rollout"] for row in first] == ["sample", "sample"]
    assert "sample" in first[0]["seconds_by_verb"]
    assert first[0]["tokens_per_second"] > 0
    keys = ("reward_mean", "loss", "grad_norm", "sampled_positions", "response_length_mean", "resampled")
    assert [[row[key] for key in keys] for row in first] == [[row[key] for key in keys] for row in again]
    assert first[0]["sampled_positions"] != first[1]["sampled_positions"]


def test_seeds_differ_by_run_step_attempt_and_response():
    seeds = [seed for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)) for seed in response_seeds(*where, 8)]
    assert len(set(seeds)) == 32
    assert seeds[:8] == response_seeds(0, 0, 0, 8)
    assert torch.Generator().manual_seed(max(seeds))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout": "engine"}, "rollout='engine' is not one of given, sample"),
        ({"rollout": "given"}, "stop would not be used with rollout=given"),
        ({"rollout": "given", "stop": [], "sample_batch": 2}, "sample_batch would not be used with rollout=given"),
        ({"top_p": 0.9}, "old_logprobs=none"),
        ({"top_k": 5}, "old_logprobs=none"),
        ({"min_p": 0.1}, "old_logprobs=none"),
        ({"top_p": 0.9, "algorithm": {"old_logprobs": "none"}, "updates_per_rollout": 2}, "need ratios"),
        ({"mask_truncated": True, "stop": []}, "needs stop"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        sampled_job(**changes)


def test_a_task_without_rewards_is_refused(tmp_path):
    with pytest.raises(DataError, match="rollout=given"):
        run_job(sampled_job(steps=1), tmp_path, RunIdentity("x"))
