"""The number of ranks changes no loss, no log-probability, no norm and no gradient, whatever does not divide by it."""

from functools import partial

import pytest
from cases import Case, alone, distances, request

BAR = 1e-12
glm = partial(Case, "glm", options=(("num_hidden_layers", 5),))  # of seven; the last two share rows

TWO = {
    "exact": Case(),
    "detached": Case(prompt_grad="detached"),
    "window": Case(groups=((257, (1, 3, 63)),), window=100),
    "branches together": Case(groups=((130, (5, 1, 33, 8)),), replay_tokens=64),
    "llama, branches together": Case("llama", groups=((130, (5, 1, 33, 8)),), replay_tokens=64),
    "glm, branches together": glm(groups=((257, (9, 3, 1, 20)),), window=100, replay_tokens=64),
    "branches together, prompts side by side": Case(groups=((66, (4,) * 5), (130, (9, 3))), dp=2, replay_tokens=9),
    "attention kept": Case(groups=((257, (1, 3, 63)),), window=100, keep_attention=True),
    "glm, attention kept": glm(groups=((257, (9, 3, 1, 20)),), replay_tokens=64, keep_attention=True),
    "two prompt tokens": Case(groups=((2, (1, 3)),), chunk=128),
    "one prompt token": Case(groups=((1, (3, 5)),)),
    "equal rewards": Case(groups=((130, (3, 5)),), equal_rewards=True),
    "a chunk longer than the prompt": Case(groups=((257, (3, 63)),), chunk=320),
    "thousands": Case(groups=((4097, (63, 3)),), chunk=320, window=1000),
    "adapters": Case(adapter=("q_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj", "down_proj")),
    "adapters above frozen layers": Case(adapter=("layers.3.self_attn.q_proj", "layers.2.mlp.up_proj")),
    "glm exact": Case("glm"),
    "glm detached": glm(prompt_grad="detached", groups=((257, (63, 1)),), chunk=128),
    "glm window": glm(groups=((257, (1, 3, 63)),), window=100),
    "glm two prompt tokens": glm(groups=((2, (1, 3)),)),
    "glm one prompt token": glm(groups=((1, (3, 40)),)),
    "glm experts on every rank": glm(groups=((130, (3, 5)),), ep=1),
    "glm a rank without tokens for its experts": glm(groups=((130, (3, 5)),), favoured=2),
    "glm adapters": glm(groups=((130, (3, 40)),), adapter=("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")),
    "qwen moe exact": Case("qwen moe", groups=((130, (33, 5)),)),
    "qwen moe window, experts on every rank": Case("qwen moe", groups=((130, (3, 5)),), window=64, ep=1),
    "qwen moe adapters": Case("qwen moe", groups=((67, (3, 5)),), adapter=("q_proj", "in_proj_qkv", "out_proj")),
    "llama exact": Case("llama", groups=((257, (63, 1)),)),
    "llama window, untied": Case(
        "llama", groups=((257, (1, 3)),), window=100, options=(("tie_word_embeddings", False),)
    ),
    "llama detached, biases": Case("llama", prompt_grad="detached", options=(("qkv_bias", True),)),
    "llama adapters": Case("llama", groups=((130, (3, 5)),), adapter=("q_proj", "o_proj", "down_proj")),
    "llama prompts side by side, tied": Case("llama", groups=((65, (3, 1)), (130, (5, 3))), dp=2),
    "prompts side by side": Case(groups=((257, (63, 5)), (130, (3, 1))), dp=2),
    "glm prompts side by side": glm(groups=((65, (3, 1)), (257, (63, 5))), dp=2, ep=2),
}
FOUR = {
    "llama exact": Case("llama", groups=((257, (63, 1)),), options=(("qk_norm", True), ("num_key_value_heads", 1))),
    "exact": Case(groups=((257, (63, 1, 3)),)),
    "detached": Case(groups=((257, (63, 1)),), prompt_grad="detached", chunk=128),
    "window": Case(groups=((258, (3, 63)),), window=64),
    "branches together": Case(groups=((130, (5, 1, 3, 8, 2)),), replay_tokens=64),
    "glm, branches together": Case("glm", groups=((66, (9, 1, 1, 4)), (67, (2,) * 9)), dp=2, ep=2, replay_tokens=8),
    "attention kept, prompts side by side": Case(
        "llama", groups=((257, (63, 5)), (2, (1, 7))), dp=2, keep_attention=True
    ),
    "glm, attention kept": Case("glm", groups=((257, (63, 1)),), ep=2, keep_attention=True),
    "two prompt tokens": Case(groups=((2, (3, 1)),)),
    "qwen moe prompts side by side": Case("qwen moe", groups=((130, (5, 3)), (67, (3, 1))), dp=2, ep=4),
    "glm exact": Case("glm", groups=((257, (63, 1)),)),
    "glm window, experts on two": glm(groups=((258, (3, 63)),), window=64, ep=2),
    "glm a rank without tokens for its experts": glm(groups=((67, (3, 1)),), favoured=2),
    "prompts side by side": Case(groups=((257, (63, 5)), (131, (1, 7))), dp=2),
    "glm prompts side by side": glm(groups=((130, (5, 3)), (257, (63, 1))), dp=2, ep=4),
    "glm prompts side by side, experts on two": glm(groups=((67, (3, 1, 2)), (2, (1, 3, 5))), dp=2, ep=2),
    "adapters, prompts side by side": Case(groups=((130, (5, 3)), (66, (1, 2))), dp=2, adapter=("q_proj", "out_proj")),
}


LONG = {  # what others here hold too, on the other number of ranks or in another mix
    "two": ("window", "a chunk longer than the prompt", "equal rewards", "glm window", "glm detached"),
    "four": ("detached", "window", "glm prompts side by side"),
}


def named(cases, long):
    """Return the names of cases, those in ``long`` marked as such."""
    return [pytest.param(name, marks=[pytest.mark.long] if name in long else []) for name in cases]


def furthest(ranks, world, case):
    """Return the largest distance of any rank's answer from that of one process, and what it is of."""
    answers = ranks(world).run(request(case))
    return max((d, name) for answer in answers for name, d in distances(answer, alone(case)).items())


@pytest.mark.parametrize("name", named(TWO, LONG["two"]))
def test_two_ranks(ranks, name):
    distance, what = furthest(ranks, 2, TWO[name])
    assert distance < BAR, what


@pytest.mark.parametrize("name", named(FOUR, LONG["four"]))
def test_four_ranks(ranks, name):
    distance, what = furthest(ranks, 4, FOUR[name])
    assert distance < BAR, what


@pytest.mark.parametrize("model", ["qwen", "qwen moe", "glm", "llama"])
def test_float32(ranks, model):
    """Gloo multiplies no float32 sum by a factor: FSDP must be told to sum."""
    distance, what = furthest(ranks, 2, Case(model, groups=((130, (3, 5)),), dtype="float32"))
    assert distance < 1e-4, what
