"""The budget of the published model: sizes and arithmetic that were worked out elsewhere."""

from math import prod

import pytest

from longstraw.config import from_dict, load_model_config, option
from longstraw.memory.estimate import parameter_shapes, predict

BIG = load_model_config("qwen3_6_27b")
PROMPT = 2**20


def configured(name="qwen3_6_27b", adapter="none", **keys):
    groups = {"model": option("model", name), "hardware": option("hardware", "cpu"), "adapter": {"name": adapter}}
    return from_dict(groups | {"data": {"name": "needle"}, "context": PROMPT + 8192, "response_length": 8192} | keys)


def predicted(**keys):
    return predict(configured(**keys), prompt_positions=PROMPT + 1, response_positions=8192)


def test_parameters_of_the_published_model():
    assert sum(prod(shape) for _, shape in parameter_shapes(BIG)) == 26_895_998_464


def test_the_other_published_model():
    glm = load_model_config("glm_5_2")
    assert sum(prod(shape) for _, shape in parameter_shapes(glm)) == 743_377_000_704
    kinds = predicted(name="glm_5_2", adapter="lora").by_kind
    assert kinds["retained"] == 95_232 * PROMPT


def test_state_of_the_published_model():
    kinds = predicted().by_kind
    assert kinds["parameters"] == pytest.approx(2 * 26_895_998_464, rel=1e-6)
    # 64 KiB a position; 48 recurrent matrices in float32 and as many tails
    assert kinds["retained"] == 65536 * PROMPT + 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)


def test_low_rank_adapters_train_little():
    shapes = [s for name, s in parameter_shapes(BIG) if "_proj" in name and "in_proj_a" not in name]
    adapted = sum(16 * sum(s) for s in shapes if s[0] != 48)
    kinds = predicted(adapter="lora", steps=2, prompt_grad="exact").by_kind
    assert kinds["gradients"] == adapted * 4
    assert kinds["optimizer"] == pytest.approx(2 * kinds["gradients"], rel=2e-2)
    assert kinds["parameters"] == pytest.approx(2 * 26_895_998_464 + adapted * 4, rel=1e-6)


def test_no_term_holds_the_group_but_its_tokens():
    small, large = predicted(group_size=2), predicted(group_size=8)
    assert large.peak == small.peak
    assert large.host - small.host == 6 * (8192 * 8 + 8192 * 4)  # ids and log-probabilities wait there


def test_exact_adds_gradients_of_the_state_and_snapshots():
    exact, detached = predicted(prompt_grad="exact"), predicted()
    assert exact.by_kind["state_gradient"] >= 2 * 65536 * PROMPT
    assert detached.by_kind["state_gradient"] == detached.by_kind["snapshots"] == 0
    window = predicted(prompt_grad="exact", prompt_grad_window=2**18)
    assert 2 * 65536 * 2**18 <= window.by_kind["state_gradient"] < exact.by_kind["state_gradient"] / 3
    assert predicted(prompt_grad="exact", prompt_grad_window=0) == detached
    assert predicted(prompt_grad="exact", prompt_grad_window=PROMPT) == exact


def test_a_prompt_of_one_token():
    said = predict(configured(prompt_grad="exact"), prompt_positions=1, response_positions=1)
    assert said.peak == max(said.by_verb.values())
    assert set(said.by_verb) == {"replay", "optimizer"}
