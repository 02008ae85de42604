"""Responses drawn from a retained prompt, against replay on the same state, against transformers, and by count."""

import copy
import math

import pytest
import torch
from glm_helpers import glm_model
from helpers import F64, furthest, moe_model, tiny_model
from llama_helpers import both, llama_model
from test_transformers import hf_model
from torch.utils.flop_counter import FlopCounterMode

import longstraw
from longstraw.config import AdapterConfig, StateConfig
from longstraw.models import load_model
from longstraw.models.lora import add_adapter
from longstraw.observer import Observer
from longstraw.ops.conv.reference import causal_conv
from longstraw.ops.conv.step import causal_conv_step
from longstraw.ops.delta.reference import recurrent
from longstraw.ops.delta.step import gated_delta_step
from longstraw.ops.past import BranchPast
from longstraw.rollout.sampling import Drawing, Sampling, draw, draw_tokens
from longstraw.step import prefill, score

FAMILIES = {"qwen3_6": tiny_model, "qwen3_6_moe": moe_model, "glm_5_2": glm_model, "llama": llama_model}
CHI_SQUARE = 103.4  # what 63 degrees of freedom exceed with probability 0.001


def prompt_of(model, positions, seed=0):
    return torch.randint(model.config.vocab_size, (positions,), generator=torch.Generator().manual_seed(seed))


def drawn(model, positions, n, dtype=F64, **options):
    """Return the retained prompt and what is drawn on it; a few stop tokens make lengths ragged."""
    retained = prefill(model, prompt_of(model, positions), chunk=64, state=options.pop("state", None))
    options = {"max_new_tokens": 20, "stop": range(12)} | options
    return retained, longstraw.sample(model, retained, n, **options)


@pytest.mark.parametrize("positions", [1, 2, 80])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_replay(family, positions):
    model = FAMILIES[family]()
    for n in (1, 2, 8):
        retained, samples = drawn(model, positions, n, temperature=0.9)
        lengths = [len(response) for response in samples.responses]
        assert n < 8 or len(set(lengths)) > 1  # ragged
        assert furthest(samples.logprobs, score(model, retained, samples.responses, temperature=0.9)) < 1e-12
        # at another temperature they are others
        assert furthest(samples.logprobs, score(model, retained, samples.responses)) > 1e-2


@pytest.mark.parametrize("positions", [1, 80])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_in_float32(family, positions):
    """Sampler and replay round differently: each is within the bar of the same weights in float64."""
    model = FAMILIES[family](dtype=torch.float32)
    retained, samples = drawn(model, positions, 8, temperature=0.9)
    replayed = score(model, retained, samples.responses, temperature=0.9)
    wide = copy.deepcopy(model).double()
    target = score(wide, prefill(wide, retained.prompt, chunk=64), samples.responses, temperature=0.9)
    assert 0 < furthest(samples.logprobs, target) < 1e-5
    assert furthest(replayed, target) < 1e-5
    assert furthest(samples.logprobs, replayed) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_host_memory_and_adapters(family):
    model = add_adapter(FAMILIES[family](), AdapterConfig(name="lora", rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    retained, samples = drawn(model, 80, 3, state=StateConfig(device="cpu"))
    assert furthest(samples.logprobs, score(model, retained, samples.responses)) < 1e-12


@pytest.mark.parametrize("broken", ["new_positions", "append"])
def test_a_wrong_past_is_found(broken, monkeypatch):
    """Negative controls: positions that stay behind by one, and branches that read each other's rows."""
    right = getattr(BranchPast, broken)
    wrong = {
        "new_positions": lambda self, *args: right(self, *args) - 1,
        "append": lambda self, name, rows: right(self, name, rows).roll(1, 0),
    }
    monkeypatch.setattr(BranchPast, broken, wrong[broken])
    model = llama_model()
    retained, samples = drawn(model, 80, 4)
    assert furthest(samples.logprobs, score(model, retained, samples.responses)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_draws_the_same_in_a_batch_or_alone(family):
    model = FAMILIES[family]()
    seeds = [5, 6, 7, 8]
    retained, together = drawn(model, 80, 4, seeds=seeds)
    for options in ({"batch": 1}, {"batch": 3}):
        again = longstraw.sample(model, retained, 4, max_new_tokens=20, stop=range(12), seeds=seeds, **options)
        assert all(map(torch.equal, again.responses, together.responses))
        assert again.ended == together.ended
    assert len({tuple(response.tolist()) for response in together.responses}) == 4
    for response, ended in zip(together.responses, together.ended, strict=True):
        assert ended == (int(response[-1]) < 12)
        assert (response[:-1] >= 12).all()


class Counting(Observer):
    """Counts the positions that the model evaluates, and what the sampler reports."""

    def __init__(self, model):
        self.evaluated, self.reported = 0, 0
        model.register_forward_pre_hook(self._count)

    def _count(self, module, arguments):
        self.evaluated += len(arguments[0])

    def advance(self, positions):
        self.reported += positions


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_drawn_tokens_are_evaluated_and_the_prompt_is_not_written(family):
    model = FAMILIES[family]()
    retained = prefill(model, prompt_of(model, 80), chunk=64, grad_from=0)
    before = [tensor.clone() for state in retained.states for _, tensor in state.held()]
    counting = Counting(model)
    samples = draw(model, retained, range(8), Sampling(20, stop=tuple(range(12))), observer=counting)
    total = sum(len(response) for response in samples.responses)
    assert total < 160  # some ended early
    assert counting.evaluated == counting.reported == total
    after = [tensor for state in retained.states for _, tensor in state.held()]
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_costs_the_same_at_any_position_of_a_response(family):
    """But for attention to the response's own rows; evaluating the response again would cost many times as much."""
    model = FAMILIES[family]()
    drawing = Drawing(model, prefill(model, prompt_of(model, 80), chunk=64), range(4), Sampling(24))
    costs = []
    for at in range(24):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            drawing.step(at)
        costs.append(counter.get_total_flops())
    assert 0 < costs[1] <= costs[-1] < 1.2 * costs[1]


def test_greedy_is_what_transformers_generates(tmp_path):
    theirs, ours = both("qwen3", tmp_path)
    assert_greedy_equal(theirs, ours)


def test_greedy_is_what_transformers_generates_of_the_hybrid(tmp_path):
    theirs = hf_model()
    theirs.save_pretrained(tmp_path)
    assert_greedy_equal(theirs, load_model(tmp_path, dtype="float32"))


def assert_greedy_equal(theirs, ours):
    prompt = prompt_of(ours, 70)
    retained = prefill(ours, prompt, chunk=64)
    samples = longstraw.sample(ours, retained, 1, max_new_tokens=24, temperature=0)
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    expected = theirs.eval().generate(prompt[None], max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert samples.responses[0].tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 5


def chi_square(counts, probabilities, total):
    expected = probabilities * total
    return float(((counts - expected).square() / expected).sum())


def test_draws_follow_the_distribution_and_another_temperature_does_not():
    model = llama_model(vocab_size=64)
    retained = prefill(model, prompt_of(model, 20), chunk=64)
    every = [torch.tensor([token]) for token in range(64)]
    probabilities = torch.cat(score(model, retained, every)).exp()
    found = {}
    for temperature in (1.0, 1.1):
        samples = longstraw.sample(model, retained, 20_000, max_new_tokens=1, temperature=temperature)
        counts = torch.cat(samples.responses).bincount(minlength=64)
        found[temperature] = chi_square(counts, probabilities, 20_000)
    assert found[1.0] < CHI_SQUARE < found[1.1]


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.1}]
)
def test_kept_tokens_are_those_of_transformers(options):
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as theirs

    warpers = {
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
    }
    logits = 3 * torch.randn(1, 30, dtype=F64, generator=torch.Generator().manual_seed(2))
    process = LogitsProcessorList([warpers[name](value) for name, value in options.items()])
    kept = process(None, logits.clone()).softmax(-1)[0]
    uniforms = (torch.arange(5000, dtype=F64) + 0.5) / 5000
    tokens, logprobs = draw_tokens(logits.expand(5000, -1), uniforms, Sampling(1, **options))
    assert (tokens.bincount(minlength=30) / 5000 - kept).abs().max() < 3e-4
    assert torch.equal(logprobs, logits.log_softmax(-1)[0][tokens])


def test_one_step_of_convolution_and_delta_rule_is_that_of_their_twins():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=F64)

    n, inputs = 3, (normal(3, 2, 8), normal(3, 2, 8), normal(3, 4, 6), -normal(3, 4).abs(), normal(3, 4).sigmoid())
    state = normal(n, 4, 8, 6)
    before = state.clone()
    out, new = gated_delta_step(*inputs, state)
    x, weight, tail = normal(n, 10), normal(10, 4), normal(n, 3, 10)
    mixed, new_tail = causal_conv_step(x, weight, tail)
    assert torch.equal(state, before)
    for i in range(n):
        expected = recurrent(*(part[i : i + 1] for part in inputs), state[i])
        assert torch.allclose(out[i : i + 1], expected[0], rtol=0, atol=1e-13)
        assert torch.allclose(new[i], expected[1], rtol=0, atol=1e-13)
        expected = causal_conv(x[i : i + 1], weight, tail[i])
        assert torch.allclose(mixed[i : i + 1], expected[0], rtol=0, atol=1e-13)
        assert torch.equal(new_tail[i], expected[1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"seeds": [1]}, "1 seeds for n=2"),
    ],
)
def test_wrong_options_are_refused(options, reason):
    model = llama_model()
    with pytest.raises(ValueError, match=reason):
        drawn(model, 2, 2, **options)
