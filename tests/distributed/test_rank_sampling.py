"""Responses drawn on two and four ranks: the tokens of one process, with the log-probabilities that replay gives."""

import functools

import pytest
import torch
from cases import Case, build, difference, groups, request

from longstraw.rollout.sampling import Sampling, draw
from longstraw.step import prefill

BAR, SEEN = 1e-12, 1e-6
STOPPED = Sampling(12, temperature=0.9, stop=tuple(range(24)))  # of a vocabulary of 96: lengths are ragged
FILTERED = Sampling(6, top_k=40, top_p=0.9, min_p=0.02, batch=3)

GLM = Case("glm", groups=((130, (1, 1)),))
CASES = {
    "qwen": (2, Case(groups=((130, (1, 1)),)), STOPPED),
    "qwen, one token of prompt": (4, Case(groups=((1, (1, 1)),)), STOPPED),
    "qwen, kept tokens only": (4, Case(groups=((67, (1, 1)),)), FILTERED),
    "qwen, adapters": (2, Case(groups=((67, (1, 1)),), adapter=("q_proj", "in_proj_qkv", "out_proj")), FILTERED),
    "qwen moe": (2, Case("qwen moe", groups=((130, (1, 1)),)), STOPPED),
    "qwen moe, prompts side by side": (
        4,
        Case("qwen moe", groups=((130, (1, 1)), (67, (1, 1))), dp=2, ep=4),
        STOPPED,
    ),
    "llama": (4, Case("llama", groups=((130, (1, 1)),), options=(("num_key_value_heads", 1),)), STOPPED),
    "llama, prompts side by side": (2, Case("llama", groups=((65, (1, 1)), (2, (1, 1))), dp=2), STOPPED),
    "glm": (4, GLM, STOPPED),
    "glm, fewer rows than are chosen": (2, Case("glm", groups=((5, (1, 1)),), ep=1), STOPPED),
    "glm, prompts side by side": (4, Case("glm", groups=((67, (1, 1)), (2, (1, 1))), dp=2, ep=2), STOPPED),
}


def seeds_of(case, n):
    return [range(100 * i, 100 * i + n) for i in range(len(case.groups))]


def ask(ranks, world, case, options, n=8, dropped=None):
    return ranks(world).run(request(case, "sampling", seeds=seeds_of(case, n), options=options, dropped=dropped))


@functools.cache
def alone(case, options, n):
    model = build(case)
    retained = [prefill(model, group.prompt, chunk=case.chunk) for group in groups(case)]
    return [draw(model, prompt, own, options) for prompt, own in zip(retained, seeds_of(case, n), strict=True)]


def furthest(logprobs, targets):
    return max(difference(a, b) for a, b in zip(logprobs, targets, strict=True))


FEW = ("llama", "glm, prompts side by side")  # fewer branches than ranks


@pytest.mark.parametrize(("name", "n"), [*((name, 7) for name in CASES), *((name, 1) for name in FEW)])
def test_ranks_draw_what_one_process_draws(ranks, name, n):
    world, case, options = CASES[name]
    for answer in ask(ranks, world, case, options, n):
        samples, wanted = answer["samples"], alone(case, options, n)[answer["prompt"]]
        assert samples.ended == wanted.ended
        assert all(map(torch.equal, samples.responses, wanted.responses))
        assert furthest(samples.logprobs, wanted.logprobs) < BAR
        assert furthest(samples.logprobs, answer["again"]) < BAR
    if n > 1 and options.stop:
        assert len({len(response) for response in wanted.responses}) > 2


def test_prompts_side_by_side_end_at_different_times():
    """Prompts that wait for each other are met above: their longest responses differ."""
    case = CASES["glm, prompts side by side"][1]
    assert len({max(map(len, samples.responses)) for samples in alone(case, STOPPED, 1)}) == 2


BOTH = [
    "_Embedding.forward reduce_scatter 1",
    "vocabulary_logits all_gather 1",
    "vocabulary_logits gather_positions 1",
    "ContextParallel.gather all_gather 1",
    "_merged stack 1",
    "_merged reduce_scatter 1",
]
CONTROLS = {
    "qwen": [
        *BOTH,
        "attend all_gather 1",
        "GatherHeads.forward gather_heads 1",
        "GatherPositions.forward gather_positions 1",
    ],
    "glm": [
        *(f"select_rows all_gather {i}" for i in (1, 2, 3)),
        *(f"last_chosen {name} {i}" for name in ("gather_positions", "all_gather") for i in (1, 2)),
        *(f"attend_rows all_gather {i}" for i in (1, 2)),
    ],
}
UNSTOPPED = Sampling(12)  # ranks that know different tokens must not end at different times


@pytest.mark.parametrize(("name", "dropped"), [(name, one) for name in CONTROLS for one in CONTROLS[name]])
def test_a_collective_left_out(ranks, name, dropped):
    case = CASES[name][1]
    answers = ask(ranks, 2, case, UNSTOPPED, 4, dropped)
    assert all(dropped in answer["called"] for answer in answers)
    assert max(furthest(answer["samples"].logprobs, answer["again"]) for answer in answers) > SEEN
