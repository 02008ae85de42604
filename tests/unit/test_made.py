"""Made tasks: exact lengths, answers that the prompt gives, rewards, and held-out prompts apart."""

import re

import numpy as np
import pytest

from longstraw.config import ConfigError, HardwareConfig, MadeConfig, RunConfig, load_model_config
from longstraw.data import DataError, build_task
from longstraw.data.made import grade

NAMES = ("lookup", "chain", "count", "multi")


def make_task(name, prompt=900, *, seed=0, **data):
    return build_task(
        RunConfig(
            model=load_model_config("qwen3_6_tiny"),
            hardware=HardwareConfig(name="cpu", backend="cpu"),
            data=MadeConfig(name=name, **data),
            context=prompt + 20,
            response_length=20,
            chunk=64,
            seed=seed,
        )
    )


@pytest.fixture(scope="module")
def tasks():
    return {name: make_task(name) for name in NAMES}


def text(ids):
    return bytes(ids.tolist()).decode(errors="replace")


def solve(prompt):
    """Answer from the prompt alone, as a reader would."""
    if "bell ring?" in prompt:
        return str(prompt.count("The bell rang once more."))
    codes = dict(re.findall(r"The code of (\w+) is (?:that of )?(\w+)\.", prompt))
    answers = []
    for name in re.search(r"What is the code of ([\w, ]+)\?", prompt)[1].split(", "):
        while len(name := codes[name]) > 1:
            pass
        answers.append(name)
    return " ".join(answers)


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reader_of_the_prompt_earns_the_full_reward(tasks, name, split):
    for number in range(5):
        example = tasks[name].example(number, split)
        assert len(example.prompt) == example.meta["length"] == 900
        answer = solve(text(example.prompt))
        assert answer == example.columns["answer"]
        wrong = "9999" if name == "count" else "Z " * 3
        replies = [np.frombuffer(reply.encode(), np.uint8) for reply in (answer, wrong, "")]
        right, worse, empty = tasks[name].reward(example, replies)
        assert right == 1.0 > 1e-9 > worse
        assert empty == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_evidence_is_where_it_is_said_to_be_and_the_answer_needs_it(tasks, name):
    example = tasks[name].example(3)
    pieces = [text(example.prompt[start:end]) for start, end in example.meta["evidence"]]
    question = text(example.prompt)[-80:]
    assert all(piece.startswith("\nThe ") and piece.endswith(".\n") for piece in pieces)
    assert solve("".join(pieces) + question) == example.columns["answer"]
    assert example.meta["depth"] == example.meta["evidence"][0][0] / 900


@pytest.mark.parametrize("length", [300, 301, 4096, 2**16 + 1])
def test_any_exact_length(length):
    assert len(make_task("lookup", length).example(0).prompt) == length


def test_a_prompt_too_short_is_refused_with_a_context_that_does():
    with pytest.raises(DataError, match=r"tokens short of data=lookup; use (\d+)") as refused:
        make_task("lookup", 60)
    least = int(str(refused.value).rpartition(" ")[2])
    response = int(str(refused.value).split("context=")[1].split(":")[0]) - 60
    for number in range(32):
        assert len(make_task("lookup", least - response).example(number).prompt) == least - response
    with pytest.raises(DataError, match=f"1 tokens short of data=lookup; use {least}"):
        make_task("lookup", least - response - 1)


def test_draws_are_the_same_in_any_process_and_differ_by_number_split_and_seed(tasks):
    again, other = make_task("multi"), make_task("multi", seed=1)
    first = tasks["multi"].example(2)
    assert np.array_equal(first.prompt, again.example(2).prompt)
    for different in (again.example(3), again.example(2, "heldout"), other.example(2)):
        assert not np.array_equal(first.prompt, different.prompt)


def test_held_out_prompts_have_hay_of_their_own(tmp_path):
    (tmp_path / "hay.txt").write_text("a" * 8000 + "b" * 2000)
    task = make_task("count", haystack=[str(tmp_path / "hay.txt")])
    train, heldout = (text(task.example(0, split).prompt) for split in ("train", "heldout"))
    assert ("aaaa" in train, "bbbb" in train) == (True, False)
    assert ("aaaa" in heldout, "bbbb" in heldout) == (False, True)
    with pytest.raises(ConfigError, match="split='test' is not one of train, heldout"):
        task.example(0, "test")


def test_guessing_earns_the_chance_of_the_description():
    task = make_task("lookup", symbols=2)
    hits = sum(task.reward(task.example(n), [np.array([ord("A")])])[0] for n in range(400))
    assert task.description["chance"] == 0.5
    assert abs(hits / 400 - 0.5) < 0.1


@pytest.mark.parametrize(
    ("name", "reply", "answer", "reward"),
    [
        ("lookup", "The code is B.", "B", 1.0),
        ("lookup", "A B C D", "B", 0.0),
        ("lookup", "ABBA", "B", 0.0),
        ("multi", "A, C", "A B", 0.5),
        ("multi", "B A", "A B", 0.0),
        ("count", "3 times", "3", 1.0),
        ("count", "5", "3", 0.75**2),
        ("count", "1" * 5000, "3", 0.0),
    ],
)
def test_grades(name, reply, answer, reward):
    assert grade(name, reply, answer) == reward


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "lookup", "keys": 0}, "data.keys=0 must be at least 1"),
        ({"name": "lookup", "symbols": 27}, "at most 26"),
        ({"name": "multi", "needles": 5}, "at most all keys"),
        ({"name": "chain", "hops": 15, "chains": 3}, "more than 32 names"),
        ({"name": "lookup", "depth": [0.9, 0.1]}, "two rising fractions"),
    ],
)
def test_configurations_of_no_sense_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        MadeConfig(**data)


def test_a_group_is_refused(tasks):
    with pytest.raises(DataError, match="rollout=sample"):
        tasks["lookup"].group(0)
