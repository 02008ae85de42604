"""The gradient of ``exact`` against plain autograd over whole sequences, in float64, parameter by parameter."""

from collections import Counter

import pytest
import torch
from helpers import furthest, make_group, oracle, relative, take_gradients, tiny_model, whole, worst

from longstraw.config import AlgorithmConfig, gradient_start
from longstraw.layers.delta import GatedDeltaNet
from longstraw.step import grpo_step

BAR = 1e-12
LENGTHS = {2: (1, 70), 3: (5, 1, 67), 8: (1, 2, 3, 64, 5, 1, 9, 66)}
ALGORITHMS = {
    "grpo": AlgorithmConfig(),
    "dr_grpo": AlgorithmConfig(scale_rewards=False, normalize="constant"),
    "gspo": AlgorithmConfig(importance="sequence", clip_low=0.02, clip_high=0.05),
    "kl": AlgorithmConfig(kl_coef=0.1, clip_low=0.1, clip_high=0.3),
}
CASES = [  # chunk, group size, prompt positions, algorithm, masked
    (64, 2, 1, "grpo", False),
    (1024, 8, 1, "gspo", True),
    (64, 3, 2, "dr_grpo", False),
    (128, 2, 2, "kl", True),
    (192, 8, 63, "grpo", True),
    (64, 3, 63, "gspo", False),
    (128, 2, 64, "dr_grpo", True),
    (1024, 8, 64, "kl", False),
    (64, 8, 65, "kl", False),
    (192, 2, 65, "gspo", True),
    (64, 2, 257, "grpo", True),
    (128, 3, 257, "gspo", False),
    (192, 3, 257, "dr_grpo", False),
    (128, 2, 1000, "grpo", True),
    (64, 3, 1000, "kl", False),
    (192, 2, 1000, "dr_grpo", True),
    (1024, 2, 1000, "gspo", False),
]


def test_every_value_is_taken_at_least_twice():
    for column in zip(*CASES, strict=True):
        assert min(Counter(column).values()) >= 2


@pytest.mark.parametrize(("chunk", "size", "positions", "algorithm", "masked"), CASES)
def test_exact_is_plain_autograd(chunk, size, positions, algorithm, masked):
    model, algorithm = tiny_model(), ALGORITHMS[algorithm]
    reference = tiny_model(seed=1) if algorithm.kl_coef else None
    group = make_group(model, positions, LENGTHS[size], masked=masked)
    loss, logprobs = oracle(model, group, algorithm, reference=reference)
    target = take_gradients(model)
    result = grpo_step(model, group, chunk=chunk, algorithm=algorithm, reference=reference)
    distance, name = worst(take_gradients(model), target)
    assert distance < BAR, name
    assert result.loss.item() == pytest.approx(loss.item(), rel=BAR, abs=BAR)
    assert furthest(result.logprobs, logprobs) < BAR
    assert result.recompute_difference == (0.0 if positions > 1 else None)


@pytest.mark.parametrize(("chunk", "size", "positions", "algorithm", "masked"), CASES[2:14:3])
def test_detached_misses_the_prompt(chunk, size, positions, algorithm, masked):
    model, algorithm = tiny_model(), ALGORITHMS[algorithm]
    reference = tiny_model(seed=1) if algorithm.kl_coef else None
    group = make_group(model, positions, LENGTHS[size], masked=masked)
    exact = grpo_step(model, group, chunk=chunk, algorithm=algorithm, reference=reference)
    target = take_gradients(model)
    steps = {"chunk": chunk, "algorithm": algorithm, "reference": reference}
    detached = grpo_step(model, group, prompt_grad="detached", **steps)
    gradients = take_gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(exact.logprobs, detached.logprobs, strict=True))
    assert relative(whole(gradients), whole(target)) > 1e-2
    assert detached.recompute_difference is None
    assert detached.recomputed_positions == 0


def test_published_layer_order():
    """Three delta layers to one of full attention, twice, at the default widths."""
    model = tiny_model(num_hidden_layers=8, full_attention_interval=4, intermediate_size=192)
    assert model.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    group = make_group(model, 70, (20, 1, 7))
    oracle(model, group)
    target = take_gradients(model)
    grpo_step(model, group, chunk=64)
    distance, name = worst(take_gradients(model), target)
    assert distance < BAR, name


def test_reference_backend_gives_the_same():
    model, other = tiny_model(), tiny_model(backend="reference")
    group = make_group(model, 150, (9, 3))
    oracle(model, group)
    target = take_gradients(model)
    grpo_step(other, group, chunk=64)
    distance, name = worst(take_gradients(other), target)
    assert distance < BAR, name


@pytest.mark.parametrize("window", [1, 64, 65, 130])
def test_window_is_a_cut_of_the_graph(window):
    """The gradient stops where the state before the window's border is a constant."""
    model, chunk = tiny_model(), 64
    group = make_group(model, 200, (6, 2))
    border = gradient_start(199, chunk, "exact", window)
    assert border % chunk == 0
    assert 199 - border >= min(window, 199)
    assert 199 - border < window + chunk
    oracle(model, group, border=border)
    target = take_gradients(model)
    result = grpo_step(model, group, chunk=chunk, prompt_grad_window=window)
    gradients = take_gradients(model)
    distance, name = worst(gradients, target)
    assert distance < BAR, name
    assert result.recomputed_positions == 199 - border
    oracle(model, group, border=border - chunk)  # a cut one chunk away is another gradient
    assert relative(whole(gradients), whole(take_gradients(model))) > 1e-3


@pytest.mark.parametrize(("window", "mode"), [(0, "detached"), (199, "exact"), (10**9, "exact")])
def test_window_at_its_ends(window, mode):
    model = tiny_model()
    group = make_group(model, 200, (6, 2))
    grpo_step(model, group, chunk=64, prompt_grad=mode)
    target = take_gradients(model)
    grpo_step(model, group, chunk=64, prompt_grad_window=window)
    assert all(torch.equal(gradient, target[name]) for name, gradient in take_gradients(model).items())


def test_decay_of_these_models_is_slow(monkeypatch):
    """Fast decay would hide a leaking or a lost state."""
    slowest, model = [], tiny_model()
    group = make_group(model, 100, (5, 2))
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            rule = module.ops.delta
            watched = module.ops._replace(
                delta=lambda *x, rule=rule: slowest.append(x[3].exp().min().item()) or rule(*x)
            )
            monkeypatch.setattr(module, "ops", watched)
    grpo_step(model, group, chunk=64)
    assert slowest
    assert min(slowest) > 0.99


def test_gradients_are_added():
    model = tiny_model()
    group = make_group(model, 70, (4, 3))
    grpo_step(model, group, chunk=64)
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    grpo_step(model, group, chunk=64)
    twice = take_gradients(model)
    assert worst(twice, {name: 2 * gradient for name, gradient in once.items()})[0] < BAR
