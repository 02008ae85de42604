"""The budget of the published model: sizes and arithmetic that were worked out elsewhere."""

from dataclasses import replace
from math import prod

import pytest

from longstraw.config import from_dict, load_model_config, option
from longstraw.memory.estimate import flops, parameter_shapes, predict, step_flops

BIG = load_model_config("qwen3_6_27b")
PROMPT = 2**20


def configured(name="qwen3_6_27b", adapter="none", **keys):
    groups = {"model": option("model", name), "hardware": option("hardware", "cpu"), "adapter": {"name": adapter}}
    return from_dict(groups | {"data": {"name": "needle"}, "context": PROMPT + 8192, "response_length": 8192} | keys)


def predicted(**keys):
    return predict(configured(**keys), prompt_positions=PROMPT + 1, response_positions=8192)


def flops_of(**keys):
    return step_flops(configured(**keys), prompt_positions=PROMPT + 1, responses=[8192] * 8, prefilled=True, scored=0)


def test_parameters_of_the_published_model():
    assert sum(prod(shape) for _, shape in parameter_shapes(BIG)) == 26_895_998_464


def test_the_other_published_model():
    glm = load_model_config("glm_5_2")
    assert sum(prod(shape) for _, shape in parameter_shapes(glm)) == 743_377_000_704
    kinds = predicted(name="glm_5_2", adapter="lora").by_kind
    assert kinds["retained"] == 95_232 * PROMPT
    assert flops.linear_flops(glm) == pytest.approx(78.69e9, rel=1e-3)
    assert 78 * flops.chosen_flops(glm, 999, 1000) == 10_862_592 * 1000
    assert 78 * flops.chosen_flops(glm, 9999, 10000) == 10_862_592 * 2048
    assert 78 * flops.chosen_flops(glm, 2000, 2100) == 10_862_592 * (sum(range(2001, 2049)) + 52 * 2048)
    assert 21 * flops.index_flops(glm, 999, 1000) == pytest.approx(174_048 * 1000, rel=5e-3)
    assert flops.pass_flops(glm, 0, 2**21) == pytest.approx(5.94e17, rel=5e-3)


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


def test_flops_of_a_token():
    assert flops.linear_flops(BIG) == pytest.approx(48.70e9, rel=1e-3)
    assert 48 * flops.convolution_flops(BIG) == pytest.approx(0.004e9, rel=2e-2)
    assert flops.head_flops(BIG, 1) == pytest.approx(2.54e9, rel=2e-3)
    assert 16 * flops.attention_flops(BIG, 999, 1000) == 393_216 * 1000
    # the published number counts products of keys for every value head, ours for every key head
    spread = replace(BIG, linear_num_key_heads=48)
    assert 48 * flops.delta_flops(spread) == pytest.approx(0.377e9, rel=2e-3)
    assert flops.delta_flops(BIG) < flops.delta_flops(spread)


def test_flops_of_a_step():
    passes = flops.branch_flops(BIG, PROMPT, 8192)
    assert passes == pytest.approx(8192 * (49.03e9 + 393_216 * (PROMPT + 4096.5)), rel=1e-3)
    detached, exact = flops_of(), flops_of(prompt_grad="exact")
    prompt = flops.prompt_flops(BIG, 0, PROMPT)
    assert detached == pytest.approx(prompt + 8 * 4 * (passes + flops.head_flops(BIG, 8192)), rel=1e-9)
    assert exact == pytest.approx(detached + 4 * prompt, rel=1e-9)
    assert flops_of(prompt_grad="exact", prompt_grad_window=0) == detached
    window = flops_of(prompt_grad="exact", prompt_grad_window=100_000)
    start = (PROMPT - 100_000) // 16384 * 16384
    assert window == pytest.approx(detached + 4 * flops.prompt_flops(BIG, start, PROMPT), rel=1e-9)


def test_scoring_and_a_retained_prompt():
    config = configured()
    once = {"prompt_positions": 1001, "responses": [10, 20]}
    base = step_flops(config, **once, prefilled=False, scored=0)
    prompt = step_flops(config, **once, prefilled=True, scored=0) - base
    scored = step_flops(config, **once, prefilled=False, scored=2) - base
    assert prompt == pytest.approx(flops.prompt_flops(BIG, 0, 1000), rel=1e-9)
    forward = sum(flops.branch_flops(BIG, 1000, n) + flops.head_flops(BIG, n) for n in (10, 20))
    assert scored == pytest.approx(2 * forward, rel=1e-9)
    reference = step_flops(configured(algorithm={"kl_coef": 0.1}), **once, prefilled=True, scored=0) - base
    assert reference == pytest.approx(2 * prompt, rel=1e-9)
