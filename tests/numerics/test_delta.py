"""The chunked gated delta rule against the rule itself, one position after the other: every gradient."""

import pytest
import torch
from helpers import F64, relative

from longstraw.ops.delta import reference
from longstraw.ops.delta.reference import gated_delta_rule, recurrent

NAMES = ("q", "k", "v", "g", "beta", "state")
BAR = 1e-12


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(reference, "SEGMENT", 128)


def draw(count, *, decay=0.01, heads=(2, 4), dtype=F64, seed=0):
    """Return the six inputs; log decays are uniform in [-decay, 0]."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = heads

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    q, k, v = normal(count, keys, 8), normal(count, keys, 8), normal(count, values, 6)
    g = -decay * torch.rand(count, values, generator=generator, dtype=F64)
    beta = torch.rand(count, values, generator=generator, dtype=F64)
    return [x.to(dtype) for x in (q, k, v, g, beta)] + [
        normal(values, 8, 6).to(torch.promote_types(dtype, torch.float32))
    ]


def run(rule, inputs, seed=1):
    """Return output, final state and the gradient of every input for random cotangents."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = rule(*leaves)
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=F64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, cotangents)]


def distances(inputs):
    """Return the relative L2 distance to the recurrent rule in float64, by name."""
    values, targets = run(gated_delta_rule, inputs), run(recurrent, [x.to(F64) for x in inputs])
    names = ("out", "final", *NAMES)
    return {name: relative(a, b) for name, a, b in zip(names, values, targets, strict=True)}


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 129, 256, 300])
def test_equals_the_recurrent_rule(count):
    assert max(distances(draw(count)).values()) < BAR


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (1, 6)])
def test_head_ratios(heads):
    assert max(distances(draw(70, heads=heads)).values()) < BAR


@pytest.mark.parametrize("decay", [0.0, 1.0, 10.0])
def test_decays(decay):
    assert max(distances(draw(150, decay=decay)).values()) < 1e-10


def test_extreme_decay_forgets_and_stays_finite():
    """g = -50 everywhere: the ratios within a chunk span exp(3200), which no number holds."""
    inputs = draw(150)
    inputs[3] = torch.full_like(inputs[3], -50.0)
    values, targets = run(gated_delta_rule, inputs), run(recurrent, inputs)
    assert all(x.isfinite().all() for x in values)
    for name, value, other in zip(("out", "final", *NAMES), values, targets, strict=True):
        assert (value - other).norm() <= 1e-10 * (1 + other.norm()), name


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_low_precision(dtype, bar):
    inputs = draw(150, dtype=dtype)
    results = run(gated_delta_rule, inputs)
    assert [x.dtype for x in results] == [dtype, torch.float32, *[dtype] * 5, torch.float32]
    assert max(distances(inputs).values()) < bar


def test_no_positions_pass_the_state():
    inputs = draw(0)
    out, final, *gradients = run(gated_delta_rule, inputs)
    assert out.shape == (0, 4, 6)
    assert torch.equal(final, inputs[-1])
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    assert gradients[-1].abs().sum() > 0


def test_gradcheck():
    inputs = draw(3, decay=0.5, heads=(1, 2))
    assert torch.autograd.gradcheck(gated_delta_rule, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_the_state_joins_two_runs(cut):
    *rows, state = draw(300)
    out, final = gated_delta_rule(*rows, state)
    first, middle = gated_delta_rule(*(x[:cut] for x in rows), state)
    second, last = gated_delta_rule(*(x[cut:] for x in rows), middle)
    assert relative(torch.cat([first, second]), out) < BAR
    assert relative(last, final) < BAR
    lost, _ = gated_delta_rule(*(x[cut:] for x in rows), torch.zeros_like(middle))
    assert relative(lost, out[cut:]) > 0.1


MUTATIONS = {
    "a wrong head's key": lambda x: [x[0], x[1].flip(1), *x[2:]],
    "no decay": lambda x: [*x[:3], x[3] * 0, *x[4:]],
    "no initial state": lambda x: [*x[:5], x[5] * 0],
    "rows of the last chunk shifted": lambda x: [*(y.roll(1, 0) for y in x[:5]), x[5]],
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_can_fail(mutation):
    inputs = draw(130, decay=0.1)
    values, targets = run(gated_delta_rule, MUTATIONS[mutation](inputs)), run(recurrent, inputs)
    assert relative(values[0], targets[0]) > 1e-2
    assert relative(values[2], targets[2]) > 1e-2


def test_a_segment_that_loses_its_state_gradient_is_seen(monkeypatch):
    real = reference._segment
    monkeypatch.setattr(reference, "_segment", lambda *x: real(*x[:5], x[5].detach() + 0 * x[5]))
    assert distances(draw(300))["k"] > 1e-3


def test_a_backward_of_the_backward_is_refused():
    """A gradient without a graph of its own would count as a constant."""
    inputs = [x.requires_grad_() for x in draw(5)]
    (gradient,) = torch.autograd.grad(gated_delta_rule(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
