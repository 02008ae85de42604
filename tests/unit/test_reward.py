"""The user's reward function, called as TRL or verl call it, and what its mistakes look like."""

import math
import threading

import numpy as np
import pytest

from longstraw.data import DataError
from longstraw.data.reward import RewardError, call_reward, load_reward
from longstraw.data.task import Example

IDS = [np.array([1, 2]), np.array([3])]
TEXTS = ["ab", "c"]
COLUMNS = {"answer": "c", "data_source": "made", "extra_info": {"k": 1}}


def reward(function, *, source="p", columns=COLUMNS, timeout=5.0):
    return call_reward(function, Example(np.array([1]), "a", columns, {}, source), TEXTS, IDS, timeout)


def test_a_function_of_trl_gets_lists_of_everything():
    def function(prompts, completions, completion_ids, answer, **columns):
        assert (prompts, completions, completion_ids) == (["p", "p"], TEXTS, [[1, 2], [3]])
        assert columns["data_source"] == ["made", "made"]
        return [1 if text == right else None for text, right in zip(completions, answer, strict=True)]

    assert reward(function) == [None, 1.0]


def test_chat_prompts_give_chat_completions():
    messages = [{"role": "user", "content": "q"}]

    def function(prompts, completions, **_):
        assert prompts == [messages] * 2
        return [float(len(completion[0]["content"])) for completion in completions]

    assert reward(function, source=messages) == [2.0, 1.0]


def test_only_named_columns_are_passed_without_kwargs():
    assert reward(lambda completions: [float(len(text)) for text in completions]) == [2.0, 1.0]


def test_trl_ships_a_reward_that_works_unchanged():
    rewards = pytest.importorskip("trl.rewards", exc_type=ImportError)
    assert reward(rewards.think_format_reward, source=[{"role": "user", "content": "q"}]) == [0.0, 0.0]


@pytest.mark.parametrize("wrap", [float, lambda value: {"score": float(value), "acc": 0.0}])
def test_compute_score_of_verl_gets_one_response_at_a_time(wrap):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("made", {"k": 1})
        return wrap(solution_str == ground_truth)

    assert reward(compute_score) == [0.0, 1.0]
    nested = {**COLUMNS, "reward_model": {"ground_truth": "ab"}}
    assert reward(compute_score, columns=nested) == [1.0, 0.0]


def test_async_functions_are_awaited():
    async def function(completions, **_):
        return [float(len(text)) for text in completions]

    assert reward(function) == [2.0, 1.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "must be a list of 2"),
        (1.0, "must be a list of 2"),
        ("ab", "must be a list of 2"),
        ([1.0, math.nan], "nan, must be finite; response: 'c'"),
        (["1", 0], "a number or None: '1' is no number; response: 'ab'"),
    ],
)
def test_what_is_no_reward_is_an_error_with_the_response(result, message):
    with pytest.raises(RewardError, match=message):
        reward(lambda completions: result)


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(0), RecursionError()])
def test_an_exception_is_an_error_with_the_response(error):
    def function(data_source, solution_str, ground_truth):
        raise error

    with pytest.raises(RewardError, match=f"raised {type(error).__name__}.*response: 'ab'"):
        reward(function)


def test_a_timeout_is_an_error_with_the_response():
    stop = threading.Event()
    with pytest.raises(RewardError, match=r"longer than 0.05 s; .*'ab'"):
        reward(lambda completions: stop.wait(5), timeout=0.05)
    stop.set()


@pytest.mark.parametrize("name", ["math", "math:", ":f", "math:none", "no_such_module:f", "math:pi"])
def test_a_name_without_a_function_is_refused(name):
    with pytest.raises(DataError, match="reward="):
        load_reward(name)


def test_a_function_is_found_by_name():
    assert load_reward("math:sqrt") is math.sqrt
