"""Lines without responses: prompts whose drawn responses the user's own function rewards."""

import json
import time

import numpy as np
import pytest
from test_loop import job, rows

from longstraw.config import ConfigError
from longstraw.data import DataError, build_task, check_data
from longstraw.data.reward import RewardError
from longstraw.tracking.recorder import RunIdentity
from longstraw.training.loop import run_job

LINES = [
    {"prompt": "a", "answer": "ab", "level": 2, "responses": "not read"},
    {"prompt": [99], "answer": "cd", "id": "x"},
]


def exact(prompts, completions, answer):
    return [float(prompt + text == right) for prompt, text, right in zip(prompts, completions, answer, strict=True)]


async def by_level(completions, level, **_):
    return [float(len(text) + one) for text, one in zip(completions, level, strict=True)]


def nothing(completions, **_):
    return [None for _ in completions]


def failing(completions, **_):
    raise KeyError("judge")


def slow(completions, **_):
    time.sleep(5)


def low_bytes(completion_ids, **_):
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]


def config(tmp_path, function="exact", lines=LINES, **changes):
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"name": "jsonl", "path": str(tmp_path / "p.jsonl")}
    drawn = {"rollout": "sample", "reward": function and f"{__name__}:{function}", "data": data, "context": 100}
    return job(**drawn | changes)


def ids(text):
    return np.frombuffer(text, np.uint8).astype(np.int64)


def test_lines_are_prompts_and_their_other_keys_columns(tmp_path):
    check_data(config(tmp_path))
    task = build_task(config(tmp_path))
    for number, name in enumerate(["line-1", "x", "line-1"]):
        example = task.example(number)
        assert example.id == name
        right = example.columns["answer"][1:].encode()
        assert task.reward(example, [ids(right), ids(b"?")]) == [1.0, 0.0]
    assert task.example(0).columns == {"answer": "ab", "level": 2}
    assert bytes(task.golden(task.example(1)).tolist()) == b"cd"
    with pytest.raises(DataError, match="no responses"):
        task.group(1)


def test_the_stop_token_is_no_part_of_the_text(tmp_path):
    task = build_task(config(tmp_path, stop=[10]))
    assert task.reward(task.example(0), [ids(b"b\n"), ids(b"b"), ids(b"b \n")]) == [1.0, 1.0, 0.0]


def test_async_functions_errors_and_timeouts(tmp_path):
    replies = [ids(b"b"), ids(b"bcd")]

    def reward(function, **changes):
        task = build_task(config(tmp_path, function, **changes))
        return task.reward(task.example(0), replies)

    assert reward("by_level") == [3.0, 5.0]
    assert reward("nothing") == [None, None]
    with pytest.raises(RewardError, match=r"raised KeyError: 'judge'.*'b'"):
        reward("failing")
    with pytest.raises(RewardError, match=r"longer than 0.05 s.*'b'"):
        reward("slow", reward_timeout=0.05)


@pytest.mark.parametrize("function", ["failing", "nothing"])
def test_a_job_whose_reward_fails_says_so_in_its_record(tmp_path, function):
    with pytest.raises((RewardError, ValueError)):
        run_job(config(tmp_path, function), tmp_path / "run", RunIdentity("x"))
    (row,) = rows(tmp_path / "run")
    assert row["status"] == "error"
    assert {"failing": "raised KeyError", "nothing": "no reward applies to response 0"}[function] in row["error"]


def test_a_job_trains_on_what_the_function_rewards(tmp_path):
    run_job(config(tmp_path, "low_bytes", steps=2), tmp_path / "run", RunIdentity("x"))
    first, second = rows(tmp_path / "run")
    assert 0 < first["reward_mean"] < 1
    assert first["grad_norm"] > 0
    assert (first["prompt_positions"], second["prompt_positions"]) == (1, 1)
    assert first["sampled_positions"] == first["replayed_positions"] == 2 * 24


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": None}, "data=jsonl needs reward="),
        ({"rollout": "given"}, "reward would not be used with rollout=given"),
        ({"data": {"name": "lookup"}}, "other tasks have their own"),
    ],
)
def test_a_reward_without_a_use_and_a_use_without_a_reward_are_refused(tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        config(tmp_path, **changes)


def test_a_wrong_function_and_lines_without_an_answer_are_refused(tmp_path):
    with pytest.raises(DataError, match="reward=math:none"):
        build_task(config(tmp_path, reward="math:none"))
    task = build_task(config(tmp_path, lines=[{"prompt": "a"}, {"prompt": "b", "answer": "x" * 25}]))
    with pytest.raises(DataError, match="line-1: no text under answer"):
        task.golden(task.example(0))
    with pytest.raises(DataError, match="25 tokens, and response_length=24"):
        task.golden(task.example(1))
