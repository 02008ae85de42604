"""Attention whose results stay until the backward: the same bits, fewer evaluations, and the bytes that it says."""

from collections import Counter

import pytest
import torch
from glm_helpers import glm_model
from helpers import make_group, moe_model, tiny_model
from llama_helpers import llama_model

from longstraw.config import StateConfig
from longstraw.memory.meter import MemoryMeter
from longstraw.ops import attention
from longstraw.ops.kept import Kept
from longstraw.ops.latent import LatentOps
from longstraw.step import PreparedGroup as Prepared
from longstraw.step import StepOptions, grpo_step, prefill, prompt_backward, replay

MODELS = {"qwen": tiny_model, "qwen moe": moe_model, "glm": glm_model, "llama": llama_model}
MODES = {
    "exact": {},
    "detached": {"prompt_grad": "detached"},
    "window": {"prompt_grad_window": 70},
    "side by side": {"replay_tokens": 10**6},
}
LENGTHS = (9, 1, 33, 20)


def gradients(model):
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def step(model, group, keep, device=None, **options):
    state = StateConfig(device=device, keep_attention=keep)
    return grpo_step(model, group, chunk=64, state=state, **options), gradients(model)


def same(name, device=None, **options):
    """Return whether log-probabilities and every gradient have the same bits with and without."""
    model = MODELS[name](dtype=torch.float32)
    group = make_group(model, 130, LENGTHS)
    one, target = step(model, group, False, device, **options)
    other, found = step(model, group, True, device, **options)
    assert target.keys() == found.keys()
    pairs = [*zip(one.logprobs, other.logprobs, strict=True), *((target[key], found[key]) for key in target)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_differs(name, mode):
    assert same(name, **MODES[mode])


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_nor_where_rows_lie_in_host_memory(name):
    assert same(name, device="cpu")


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_another_result_is_seen(name, monkeypatch):
    """What is kept is what the backward uses."""
    once = Kept.once

    def halved(self, key, make):
        again = key in self._results
        results = once(self, key, make)
        return tuple(x / 2 if again and x.is_floating_point() else x for x in results)

    monkeypatch.setattr(Kept, "once", halved)
    assert not same(name)


def evaluations(name, keep, monkeypatch):
    """Return how often attention, and the choice of rows, was evaluated in each part of a step."""
    calls = Counter()

    def counted(owner, function, kind):
        original = getattr(owner, function)

        def call(*args, **kwargs):
            calls[kind] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, function, call)

    model = MODELS[name](dtype=torch.float32)
    group = make_group(model, 130, (20, 20))
    counted(attention, "new_forward", "attention")
    counted(LatentOps, "attend_forward", "attention")
    counted(LatentOps, "select_rows", "choice")
    counts = {}
    retained = prefill(model, group.prompt, chunk=64, grad_from=0, state=StateConfig(keep_attention=keep))
    counts["prefill"] = dict(calls)
    calls.clear()
    replay(model, Prepared(group, retained), StepOptions(64))
    counts["replay"] = dict(calls)
    calls.clear()
    prompt_backward(model, retained)
    counts["prompt_backward"] = dict(calls)
    monkeypatch.undo()
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_each_is_evaluated_once(name, monkeypatch):
    made_again, kept = (evaluations(name, keep, monkeypatch) for keep in (False, True))
    assert kept["prefill"] == made_again["prefill"]
    for verb in ("replay", "prompt_backward"):
        assert kept[verb]
        assert made_again[verb] == {kind: 2 * number for kind, number in kept[verb].items()}


@pytest.mark.parametrize("name", ["llama", "glm"])
def test_where_only_the_feedforward_is_trained_it_is_evaluated_once_too(name, monkeypatch):
    """Queries and rows of the first block need no gradient there, and the block is evaluated again all the same."""

    def frozen(make):
        def made(**options):
            model = make(**options)
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(".mlp." in key and "indexer" not in key)
            return model

        return made

    monkeypatch.setitem(MODELS, name, frozen(MODELS[name]))
    counts = []
    for keep in (False, True):
        with monkeypatch.context() as patch:
            counts.append(evaluations(name, keep, patch)["replay"])
    assert counts[0] == {kind: 2 * number for kind, number in counts[1].items()}
    assert same(name)


def test_what_is_kept_is_one_chunks_and_gone_after_its_backward():
    """Output and log-sum-exp of each attention layer of the chunk, and no more; nothing after the step."""

    def peak(keep, chunk):
        with MemoryMeter(rounding=1) as meter:
            model = llama_model(dtype=torch.float32)
            group = make_group(model, 257, (8, 8))
            retained = prefill(model, group.prompt, chunk=chunk, grad_from=0, state=StateConfig(keep_attention=keep))
            replay(model, Prepared(group, retained), StepOptions(chunk))
            meter.reset_peak()
            before = meter.current
            prompt_backward(model, retained)
            assert meter.current <= before
            return meter.peak, model.config

    for chunk in (64, 128):
        (without, config), (kept, _) = peak(False, chunk), peak(True, chunk)
        layer = chunk * config.num_attention_heads * (config.head_dim + 1) * 4
        most = (config.num_hidden_layers - 1) * layer  # the last layer's is not evaluated
        assert 0 < kept - without <= most
