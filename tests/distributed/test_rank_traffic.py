"""Bytes sent: what is counted in a step of two and four ranks is what the formula says, to the byte."""

from dataclasses import replace

import pytest
from cases import Case, build, hardware, request, state
from traffic_formula import bytes_sent

from longstraw.config import AdapterConfig, AlgorithmConfig, DataConfig, RunConfig
from longstraw.config.architectures import Glm52Config, Qwen36Config
from longstraw.parallel.parallel_dims import resolve_dims

EVEN = ((129, (16, 32)),)  # every rank has as many tokens for every expert
CASES = {
    "qwen": (2, Case(groups=((132, (7, 1)),))),
    "qwen, detached, scored": (2, Case(prompt_grad="detached", algorithm=(("old_logprobs", "score"),))),
    "qwen, window": (4, Case(groups=((259, (7, 16)),), window=100)),
    "qwen, adapters": (4, Case(groups=((132, (7, 1)),), adapter=Qwen36Config.adapter_targets)),
    "qwen, side by side": (4, Case(groups=EVEN * 2, dp=2)),
    "qwen, attention kept": (2, Case(groups=((132, (7, 1)),), keep_attention=True)),
    "glm": (2, Case("glm", groups=EVEN)),
    "glm, attention kept": (2, Case("glm", groups=EVEN, keep_attention=True)),
    "glm, adapters": (2, Case("glm", groups=EVEN, adapter=Glm52Config.adapter_targets)),
    "glm, experts on two": (4, Case("glm", groups=EVEN, ep=2)),
}


def config(case):
    adapter = AdapterConfig(name="lora", rank=4, alpha=8, targets=list(case.adapter)) if case.adapter else None
    return RunConfig(
        model=replace(build(case).config, dtype=case.dtype),
        hardware=hardware(case, case.dp),
        adapter=adapter or AdapterConfig(name="none"),
        data=DataConfig(name="jsonl"),
        algorithm=AlgorithmConfig(**dict(case.algorithm)),
        context=512,
        response_length=64,
        chunk=case.chunk,
        prompt_grad=case.prompt_grad,
        prompt_grad_window=case.window,
        state=state(case),
    )


@pytest.mark.parametrize("name", CASES)
def test_counted_bytes_are_the_predicted_ones(ranks, name):
    world, case = CASES[name]
    prompt, responses = case.groups[0]
    run = config(case)
    sizes = resolve_dims(run.model, hardware(case, world))
    predicted = bytes_sent(run, sizes, prompt_positions=prompt, response_positions=responses)
    for counted in ranks(world).run(request(case, "traffic")):
        assert counted == predicted


def test_every_kind_of_traffic_is_met():
    """What the cases above compare has all collectives for all purposes in it."""
    met = set()
    for world, case in CASES.values():
        prompt, responses = case.groups[0]
        sizes = resolve_dims(config(case).model, hardware(case, world))
        sent = bytes_sent(config(case), sizes, prompt_positions=prompt, response_positions=responses)
        met |= {(verb, label) for verb, _, label in sent}
    assert {label for _, label in met} == {
        *("attention", "heads", "selection", "experts", "vocabulary", "parameters", "gradients", "norm", "rounds"),
    }
    assert {verb for verb, _ in met} == {"prefill", "score", "replay", "prompt_backward", "optimizer", "other"}
