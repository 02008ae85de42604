"""The needle task: exact lengths, depths, rewards, hay of every kind, the same group for the same step."""

import json
import re

import numpy as np
import pytest
import torch

from longstraw.config import HardwareConfig, NeedleConfig, RunConfig, load_model_config
from longstraw.data import DataError, build_task
from longstraw.data.needle import WORDS

LEAST = 74  # bytes of needle and question


def make_config(context=1000, response_length=100, group_size=4, *, model=None, data=None, **changes):
    return RunConfig(
        model=load_model_config("qwen3_6_tiny", **(model or {})),
        hardware=HardwareConfig(name="cpu", backend="cpu"),
        data=NeedleConfig(**(data or {})),
        context=context,
        response_length=response_length,
        chunk=64,
        group_size=group_size,
        **changes,
    )


def make_task(*args, **kwargs):
    return build_task(make_config(*args, **kwargs))


def text(ids):
    return bytes(ids.tolist()).decode(errors="replace")


def needles(prompt):
    return re.findall(r"\nThe magic number of ([a-z]{5}) is (\d{6})\.\n", text(prompt))


@pytest.mark.parametrize("prompt_positions", [LEAST, LEAST + 1, 100, 1000, 2**16, 2**18 + 5])
def test_prompt_has_the_exact_length_and_one_whole_needle(prompt_positions):
    group = make_task(prompt_positions + 40, 40).group(0)
    assert group.prompt_positions == prompt_positions
    ((word, _),) = needles(group.prompt)
    assert text(group.prompt).endswith(f"\nWhat is the magic number of {word}?\n")
    assert text(group.prompt).count("magic number of") == 2


@pytest.mark.parametrize("prompt_positions", [1, LEAST - 1])
def test_a_prompt_too_short_for_the_needle_is_refused_with_the_least_context(prompt_positions):
    with pytest.raises(DataError, match=f"take {LEAST} tokens.* use context={LEAST + 40} or more"):
        make_task(prompt_positions + 40, 40)


def test_a_response_too_short_for_the_number_is_refused():
    assert max(make_task(response_length=6).group(0).response_positions) == 6
    with pytest.raises(DataError, match="response_length=5: the needle's number takes 6 tokens"):
        make_task(response_length=5)


@pytest.mark.parametrize("response_length", [6, 7, 34, 35, 36, 37, 300])
@pytest.mark.parametrize("ragged", [True, False])
def test_responses_have_lengths_as_asked_and_rewards_as_their_text_says(response_length, ragged):
    task = make_task(2000, response_length, 5, data={"ragged": ragged})
    lengths = set()
    for step in range(5):
        group = task.group(step)
        ((_, value),) = needles(group.prompt)
        assert max(group.response_positions) == response_length
        assert min(group.response_positions) >= 6
        lengths |= set(group.response_positions)
        for response, reward in zip(group.responses, group.rewards, strict=True):
            numbers = re.findall(r"\d+", text(response))
            assert reward == (1.0 if value in numbers else 0.0) == task.score(step, response.numpy())
            if not reward:  # a near miss: one digit off
                assert sum(a != b for a, b in zip(numbers[0], value, strict=True)) == 1
    assert (len(lengths) > 1) == (ragged and response_length > 6)


def test_score_takes_the_number_only_as_a_number_of_its_own():
    task = make_task()
    ((_, value),) = needles(task.group(0).prompt)

    def score(answer):
        return task.score(0, np.frombuffer(answer.encode(), dtype=np.uint8).astype(np.int64))

    assert score(value) == score(f"it is {value}, surely") == 1.0
    assert score(value[:-1]) == score(f"1{value}") == score(f"{value}0") == score("") == 0.0
    assert task.score(0, np.array([300, 400])) == 0.0  # ids that are no bytes are no answer


@pytest.mark.parametrize(
    ("fraction", "size", "right"), [(0.0, 4, 0), (1.0, 4, 4), (0.5, 4, 2), (0.5, 3, 2), (0.01, 2, 1), (0.99, 8, 7)]
)
def test_the_fraction_of_right_answers(fraction, size, right):
    task = make_task(group_size=size, data={"correct_fraction": fraction})
    places = set()
    for step in range(6):
        rewards = task.group(step).rewards
        assert sum(rewards) == right
        places.add(tuple(rewards))
    assert len(places) > 1 or right in (0, size)  # right answers do not always stand first


def assert_same(one, other):
    assert torch.equal(one.prompt, other.prompt)
    assert all(torch.equal(a, b) for a, b in zip(one.responses, other.responses, strict=True))
    assert (one.rewards, one.id) == (other.rewards, other.id)


def test_a_step_gives_the_same_group_in_any_order_and_any_process():
    task = make_task(steps=10)
    forwards = [task.group(step) for step in range(4)]
    for step in (3, 1, 2, 0):
        assert_same(make_task(steps=10).group(step), forwards[step])
    assert len({tuple(group.prompt.tolist()) for group in forwards}) == 4


def test_the_seed_changes_the_prompt():
    assert not torch.equal(make_task(seed=0).group(0).prompt, make_task(seed=1).group(0).prompt)


def test_steps_that_share_a_retained_prompt_get_one_group():
    task = make_task(refresh_every=2, steps=4)
    groups = [task.group(step) for step in range(4)]
    assert_same(groups[0], groups[1])
    assert_same(groups[2], groups[3])
    assert not torch.equal(groups[1].prompt, groups[2].prompt)
    assert task.score(1, groups[0].responses[0].numpy()) == groups[0].rewards[0]


@pytest.mark.parametrize(("depth", "low", "high"), [([0, 0], 0, 0), ([1, 1], 1, 1), ([0.4, 0.5], 0.4, 0.5)])
def test_depth(depth, low, high):
    task = make_task(10_000, 100, data={"depth": depth})
    hay = 9_900 - LEAST
    found = [bytes(task.group(step).prompt.tolist()).index(b"\nThe magic number") for step in range(8)]
    assert all(round(low * hay) <= place <= round(high * hay) for place in found)
    assert len(set(found)) > 1 or low == high


def test_named_files_and_folders_are_the_hay(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("abc ")
    (tmp_path / "a.txt").write_text("straw ")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "picture.bin").write_bytes(b"\x89\xff\x00")
    task = make_task(data={"haystack": [str(tmp_path)]})
    assert task.description["haystack_tokens"] == len("straw abc ")
    prompt = text(task.group(0).prompt)
    assert "straw abc straw abc straw abc" in prompt  # shorter than the prompt: repeated
    assert "secret" not in prompt
    one = make_task(data={"haystack": [str(tmp_path / "b" / "x.txt")]})
    assert "abc abc abc" in text(one.group(0).prompt)


def test_hay_of_one_byte_and_of_other_scripts(tmp_path):
    (tmp_path / "one").write_text("x")
    assert len(needles(make_task(data={"haystack": [str(tmp_path / "one")]}).group(0).prompt)) == 1
    (tmp_path / "two").write_text("干し草の山 🌾\r\n" * 50, encoding="utf-8")
    group = make_task(data={"haystack": [str(tmp_path / "two")]}).group(0)
    assert len(needles(group.prompt)) == 1
    assert group.prompt_positions == 900


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "is not there"),
        (b"", DataError, "no text in"),
        (b"ok \xff\xfe", DataError, "hay.txt is no UTF-8 text"),
    ],
)
def test_hay_that_cannot_be_used(tmp_path, content, error, message):
    path = tmp_path / "hay.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        make_task(data={"haystack": [str(path)]})


def test_hay_that_names_a_word_leaves_that_word_out(tmp_path):
    (tmp_path / "hay.txt").write_text("The magic number of amber is 111111. ")
    task = make_task(data={"haystack": [str(tmp_path / "hay.txt")]}, steps=100)
    words = {found[0][0] for found in (needles(task.group(step).prompt) for step in range(100))}
    assert len(words) > 20
    assert "amber" not in words


def test_hay_that_names_every_word_is_refused(tmp_path):
    (tmp_path / "hay.txt").write_text("".join(f"magic number of {word}\n" for word in WORDS))
    with pytest.raises(DataError, match="already contains a magic number for every word"):
        make_task(data={"haystack": [str(tmp_path / "hay.txt")]})


def test_hay_full_of_the_number_leaves_no_wrong_answer_and_says_so(tmp_path):
    ((_, value),) = needles(make_task().group(0).prompt)
    (tmp_path / "hay.txt").write_text(f"{value} " * 9)
    with pytest.raises(DataError, match=f"no stretch of it without the number {value}"):
        make_task(data={"haystack": [str(tmp_path / "hay.txt")], "ragged": False}).group(0)


def test_description_is_small_and_json():
    description = make_task(2**16).description
    assert description["name"] == "needle"
    assert description["tokenizer"] == "bytes"
    assert len(json.dumps(description)) < 500


def test_bytes_serve_random_weights_of_a_larger_vocabulary_and_no_smaller_one():
    assert int(make_task(model={"vocab_size": 1000}).group(0).prompt.max()) < 256
    with pytest.raises(DataError, match="vocab_size=100: bytes as tokens need 256"):
        make_task(model={"vocab_size": 100})
