"""Evaluations: intervals, what a row says, that they change nothing, and that none is run twice after a resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_loop import rows
from test_rollout import LLAMA, LowTokens, sampled_job

from longstraw.config import ConfigError
from longstraw.data import DataError, held_out_configs
from longstraw.data.made import MadeTask
from longstraw.launch.inputs import check_inputs
from longstraw.models import build_model
from longstraw.models.decoder import Decoder
from longstraw.rollout.evaluation import HeldOut, answers, held_out
from longstraw.tracking.evaluations import KEYS, Answer, depth_label, mean_interval, summary
from longstraw.tracking.job_table import table
from longstraw.tracking.recorder import RunIdentity
from longstraw.tracking.run_folder import read_evaluations
from longstraw.training.loop import run_job

ROOT = Path(__file__).resolve().parents[2]
STEPS = {"steps": 3, "checkpoint": {"every": 1}, "evaluate": {"every": 2, "examples": 3}}
LOOKUP = {
    "model": LLAMA,
    "data": {"name": "lookup"},
    "context": 420,
    "group_size": 2,
    "optimizer": {"lr": 1e-2},
    **STEPS,
}
VARYING = ("seconds", "attempt", "run_id", "command", "started_at", "peak_allocated_bytes")


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_that_of_newcombe_1998(right, n, low, high):
    mean, *ends = mean_interval([1.0] * right + [0.0] * (n - right), "wilson")
    assert mean == right / n
    assert ends == pytest.approx([low, high], abs=5e-5)


def test_the_normal_interval_has_two_ends_of_196_standard_errors():
    assert mean_interval([0.0, 0.5, 1.0, 0.5], "normal") == pytest.approx((0.5, 0.1, 0.9), abs=1e-4)
    assert mean_interval([0.5], "normal") == mean_interval([0.5, 0.5], "normal") == (0.5, None, None)
    assert mean_interval([], "wilson") == (None, None, None)


def made(*rewards, **meta):
    keys = {"length": 100, "tokens": 2, "ended": True, **meta}
    return [Answer(str(i), reward=reward, **keys) for i, reward in enumerate(rewards)]


def test_a_row_says_success_by_length_depth_and_difficulty():
    given = made(1.0, 0.0, length=2000, depth=0.19, difficulty=8) + made(1.0, depth=0.2, difficulty=10)
    row = summary([*given, *made(1.0, None, depth=1.0, ended=False)])
    assert (row["interval"], row["success"], row["examples"], row["without_reward"]) == ("wilson", 0.75, 4, 1)
    assert list(row["by_length"]) == ["100", "2000"]
    assert {key: (cell["success"], cell["examples"]) for key, cell in row["by_length"].items()} == {
        "100": (1.0, 2),
        "2000": (0.5, 2),
    }
    assert [*row["by_depth"]] == ["0-0.2", "0.2-0.4", "0.8-1"]
    assert [*row["by_difficulty"]] == ["8", "10"]
    cell = row["by_depth"]["0-0.2"]
    assert (cell["success"], cell["low"], cell["high"]) == mean_interval([1.0, 0.0], "wilson")
    assert row["truncated_fraction"] == 0.4
    assert row["prefilled_positions"] == 2 * 1999 + 3 * 99
    assert summary(made(1.0, 0.5))["interval"] == "normal"
    assert summary(made(1.0))["by_depth"] is None


def test_depths_at_a_border_belong_to_the_part_that_begins_there():
    assert [depth_label(depth) for depth in (0.0, 0.2, 0.999, 1.0)] == ["0-0.2", "0.2-0.4", "0.8-1", "0.8-1"]


def test_many_lengths_are_told_apart_by_powers_of_two():
    row = summary([answer for length in range(64, 96) for answer in made(1.0, length=length)] + made(0.0, length=129))
    assert [*row["by_length"]] == ["64-127", "128-255"]


def test_each_prompt_is_evaluated_once_and_each_token_too(monkeypatch):
    counted, real = [], Decoder.forward

    def forward(self, tokens, *arguments, **keywords):
        counted.append(len(tokens))
        return real(self, tokens, *arguments, **keywords)

    monkeypatch.setattr(Decoder, "forward", forward)
    config = sampled_job(context=46, response_length=6, chunk=64, model=LLAMA, evaluate={"examples": 4})

    class Bytes:
        def decode(self, ids):
            return " ".join(map(str, ids))

    found = list(answers(build_model(config.model), HeldOut(config, [LowTokens()], Bytes())))
    row = summary(found)
    assert sum(counted) == row["prefilled_positions"] + row["sampled_positions"]
    assert row["prefilled_positions"] == 4 * 39
    rewards = [float(sum(int(token) < 64 for token in a.response.split()) / a.tokens) for a in found]
    assert [answer.reward for answer in found] == pytest.approx(rewards)
    assert len({answer.response for answer in found}) > 1


def low_bytes(self, example, responses):
    """Reward the share of bytes below 64: a model without training gets some of it, so that its steps change it."""
    return [float((ids < 64).mean()) for ids in responses]


@pytest.fixture(scope="module", autouse=True)
def rewarded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MadeTask, "reward", low_bytes)
        yield


@pytest.fixture(scope="module")
def whole(rewarded, tmp_path_factory):
    """Run a job that is never interrupted; return its folder."""
    folder = tmp_path_factory.mktemp("whole")
    run_job(sampled_job(**LOOKUP), folder, RunIdentity("x"))
    return folder


def evaluated(folder):
    return [{key: value for key, value in row.items() if key not in VARYING} for row in read_evaluations(folder)]


def trained(folder):
    keys = ("step", "loss", "grad_norm", "reward_mean", "sampled_positions", "peak_allocated_bytes")
    return [[row[key] for key in keys] for row in rows(folder)]


def test_a_job_evaluates_before_the_first_step_in_between_and_after_the_last(whole, tmp_path):
    first, _, last = read_evaluations(whole)
    assert [row["step"] for row in read_evaluations(whole)] == [0, 2, 3]
    assert list(first) == list(KEYS)
    assert first["success"] == pytest.approx(sum(answer["reward"] for answer in first["answers"]) / 3)
    assert first["samples"] != last["samples"]  # the steps changed the model
    assert all(answer["id"].startswith("lookup-0-heldout-") for answer in first["answers"])
    assert [answer["id"] for answer in first["answers"]] == [answer["id"] for answer in last["answers"]]
    assert first["samples"][0]["prompt_end"].endswith("\nAnswer: ")
    assert [row["step"] for row in rows(whole)] == [0, 1, 2]
    run_job(sampled_job(**LOOKUP | {"evaluate": {"every": None}}), tmp_path, RunIdentity("x"))
    assert trained(whole) == trained(tmp_path)  # evaluations change no step
    assert not list(tmp_path.glob("evaluations*"))


def test_the_temperature_of_evaluations_is_their_own(whole, tmp_path):
    hot = {"every": 3, "examples": 3, "temperature": 5.0}
    run_job(sampled_job(**LOOKUP | {"evaluate": hot}), tmp_path, RunIdentity("x"))
    greedy, drawn = read_evaluations(whole)[0], read_evaluations(tmp_path)[0]
    assert (greedy["temperature"], drawn["temperature"]) == (0.0, 5.0)
    assert [row["response"] for row in greedy["samples"]] != [row["response"] for row in drawn["samples"]]


def interrupt(monkeypatch, call):
    """Send SIGTERM to this process while evaluation number ``call`` rewards its second response."""
    calls = []

    def reward(self, example, responses):
        calls.extend([1] * ("heldout" in example.id))
        if len(calls) == call and "heldout" in example.id:
            os.kill(os.getpid(), signal.SIGTERM)
        return low_bytes(self, example, responses)

    monkeypatch.setattr(MadeTask, "reward", reward)


@pytest.mark.parametrize(("call", "before", "step"), [(2, [], 0), (5, [0], 2), (8, [0, 2], 3)])
def test_a_job_asked_to_end_in_an_evaluation_resumes_with_the_same_rows(
    whole, tmp_path, monkeypatch, call, before, step
):
    with monkeypatch.context() as patch:
        interrupt(patch, call)
        asked = run_job(sampled_job(**LOOKUP), tmp_path, RunIdentity("x"))
    assert asked is not None
    assert [row["step"] for row in read_evaluations(tmp_path)] == before
    assert (rows(tmp_path)[-1]["status"], rows(tmp_path)[-1]["step"]) == ("preempted", step)
    assert run_job(sampled_job(**LOOKUP), tmp_path, RunIdentity("x", attempt=1)) is None
    assert evaluated(tmp_path) == evaluated(whole)
    written = [json.loads(line)["step"] for path in tmp_path.glob("evaluations*") for line in path.open()]
    assert sorted(written) == [0, 2, 3]  # none twice
    line = table([tmp_path])
    assert "preempted" not in line
    first, last = (read_evaluations(whole)[at]["success"] for at in (0, -1))
    assert f"success {last:.3f} on 3 held-out prompts after 3 steps, {first:.3f} after 0" in line


KILLED = """
import os, sys
sys.path[:0] = {paths!r}
from test_evaluation import LOOKUP, MadeTask, RunIdentity, low_bytes, run_job, sampled_job
calls = []
def reward(self, example, responses):
    calls.extend([1] * ("heldout" in example.id))
    if len(calls) == 5:
        os.kill(os.getpid(), 9)
    return low_bytes(self, example, responses)
MadeTask.reward = reward
from pathlib import Path
run_job(sampled_job(**LOOKUP), Path({folder!r}), RunIdentity("x"))
"""


def test_a_job_killed_in_an_evaluation_resumes_with_the_same_rows(whole, tmp_path):
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
    script = KILLED.format(paths=paths, folder=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [row["step"] for row in read_evaluations(tmp_path)] == [0]
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"schema": 1, "step": 2, "suc')  # a line that the kill tore
    shutil.rmtree(tmp_path / "checkpoints")  # all steps are repeated, the recorded evaluation is not
    run_job(sampled_job(**LOOKUP), tmp_path, RunIdentity("x", attempt=1))
    assert evaluated(tmp_path) == evaluated(whole)
    again = [json.loads(line)["step"] for line in (tmp_path / "evaluations.1.jsonl").open()]
    assert again == [2, 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluate": {"every": 0}}, "evaluate.every=0"),
        ({"evaluate": {"every": 1}, "rollout": "given", "stop": []}, "needs rollout=sample"),
        ({"evaluate": {"every": 1}, "refresh_every": 2, "prompt_grad": "detached"}, "multiples of refresh_every=2"),
        (
            {"evaluate": {"every": 2}, "refresh_every": 2, "prompt_grad": "detached", "warmup_steps": 1, "steps": 2},
            "warmup_steps=1 must be multiples",
        ),
        ({"evaluate": {"contexts": ["24"]}}, "leaves no prompt in 24"),
        ({"evaluate": {"contexts": ["4Kb"]}}, "evaluate.contexts: "),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        sampled_job(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"name": "needle"}}, "data=needle has no held-out prompts"),
        ({"evaluate": {"path": "a.jsonl"}}, "so without evaluate.path"),
        ({"data": {"name": "jsonl", "path": "a.jsonl"}, "reward": "math:sqrt"}, "prompts of evaluate.path=FILE"),
    ],
)
def test_data_without_held_out_prompts_are_refused(changes, reason):
    with pytest.raises(DataError, match=reason):
        held_out_configs(sampled_job(**changes))


def test_a_launch_checks_the_held_out_prompts(tmp_path):
    with pytest.raises(DataError, match="data=needle has no held-out prompts"):
        check_inputs(sampled_job(evaluate={"every": 1}, mode="run"))
    with pytest.raises(DataError, match="nothing is evaluated with it"):
        held_out(sampled_job(), object())


def short(completions, **_):
    """Reward short responses, as a user's function would."""
    return [float(len(text) < 8) for text in completions]


def test_a_users_held_out_prompts_are_rewarded_by_their_function(tmp_path):
    path = tmp_path / "heldout.jsonl"
    lines = [{"prompt": "once " * n, "depth": 0.5, "difficulty": n, "answer": "x"} for n in (3, 4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"data": {"name": "jsonl", "path": "not read"}, "reward": f"{__name__}:short", "model": LLAMA}
    prompts = held_out(sampled_job(**changes, evaluate={"path": str(path), "examples": 5}))
    row = summary(list(answers(build_model(prompts.config.model), prompts)))
    assert [answer["length"] for answer in row["answers"]] == [15, 20]  # two lines: none is asked twice
    assert [*row["by_difficulty"]] == ["3", "4"]
    assert [*row["by_depth"]] == ["0.4-0.6"]
    assert row["success"] == sum(len(sample["response"]) < 8 for sample in row["samples"]) / 2
