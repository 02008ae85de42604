"""The gated delta rule and the convolution by fla's kernels, behind our signatures, against float64: every gradient."""

import pytest
import torch
from harness import BARS, assert_close, assert_killed, draw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from longstraw.ops.conv import fused as conv
from longstraw.ops.conv import reference as conv_reference
from longstraw.ops.delta import fused as delta
from longstraw.ops.delta import kernels as delta_kernels
from longstraw.ops.delta import reference as delta_reference

F32, BF16 = torch.float32, torch.bfloat16
DELTA_CASES = [(66, 1, 2, 16, 32), (3, 2, 2, 32, 16)]  # positions, key and value heads, widths
CONV_CASES = [(70, 40, 4), (2, 33, 4), (1, 16, 3)]  # positions, channels, taps
DELTA_NAMES, CONV_NAMES = ("q", "k", "v", "g", "beta", "state"), ("x", "weight", "tail")


def delta_inputs(case, dtype=F32):
    """Return the six inputs; decays slow enough that the initial state reaches the last position."""
    count, keys, values, key, value = case
    q, k = (draw(count, keys, key, dtype=dtype, seed=i) for i in (1, 2))
    v, beta = draw(count, values, value, dtype=dtype, seed=3), draw(count, values, seed=4).sigmoid().to(dtype)
    decay = 0.02 * F.logsigmoid(draw(count, values, seed=5))
    return q, k, v, decay, beta, draw(values, key, value, seed=6)


def conv_inputs(case, dtype=F32):
    count, channels, taps = case
    x, weight = draw(count, channels, dtype=dtype, seed=1), draw(channels, taps, dtype=dtype, seed=2)
    return x, weight, draw(taps - 1, channels, dtype=dtype, seed=3)


def results(function, inputs, names):
    """Return both results and the gradient of every input, with a cotangent for each result, by name."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    values = function(*leaves)
    cotangents = [draw(*x.shape, seed=9 + i).to(x.dtype) for i, x in enumerate(values)]
    gradients = torch.autograd.grad(values, leaves, cotangents)
    return {"out": values[0], "final": values[1], **dict(zip(names, gradients, strict=True))}


def check_delta(module, case=DELTA_CASES[0], dtype=F32):
    inputs = delta_inputs(case, dtype)
    values = results(module.gated_delta_rule, inputs, DELTA_NAMES)
    assert [values[name].dtype for name in DELTA_NAMES] == [x.dtype for x in inputs]
    expected = results(delta_reference.recurrent, [x.double() for x in inputs], DELTA_NAMES)
    assert_close(values, expected, BARS[dtype])


def check_conv(module, case=CONV_CASES[0], dtype=F32):
    inputs = conv_inputs(case, dtype)
    values = results(module.causal_conv, inputs, CONV_NAMES)
    assert [values[name].dtype for name in CONV_NAMES] == [x.dtype for x in inputs]
    expected = results(conv_reference.causal_conv, [x.double() for x in inputs], CONV_NAMES)
    assert_close(values, expected, BARS[dtype])


@pytest.mark.parametrize(("case", "dtype"), [*((case, F32) for case in DELTA_CASES), (DELTA_CASES[1], BF16)], ids=str)
def test_delta_equals_the_recurrence(case, dtype):
    check_delta(delta, case, dtype)


@pytest.mark.parametrize(("case", "dtype"), [*((case, F32) for case in CONV_CASES), (CONV_CASES[0], BF16)], ids=str)
def test_conv_equals_the_reference(case, dtype):
    check_conv(conv, case, dtype)


@pytest.mark.parametrize(
    ("function", "inputs", "names", "rows"),
    [
        (delta.gated_delta_rule, delta_inputs((5, 1, 1, 16, 16)), DELTA_NAMES, 5),
        (conv.causal_conv, conv_inputs((5, 33, 4)), CONV_NAMES, 1),
    ],
    ids=["delta", "conv"],
)
def test_two_chunks_are_one(function, inputs, names, rows):
    """The state handed on carries values one way and gradients the other."""

    def in_two(*leaves):
        first, constants, state = leaves[:rows], leaves[rows:-1], leaves[-1]
        head, state = function(*(x[:2] for x in first), *constants, state)
        out, state = function(*(x[2:] for x in first), *constants, state)
        return torch.cat([head, out]), state

    assert_close(results(in_two, inputs, names), results(function, inputs, names), BARS[F32])


def test_no_positions():
    inputs = delta_inputs(DELTA_CASES[1])
    out, state = delta.gated_delta_rule(*(x[:0] for x in inputs[:-1]), inputs[-1])
    assert out.shape == (0, 2, 16)
    assert state.equal(inputs[-1])
    x, weight, tail = conv_inputs(CONV_CASES[1])
    out, after = conv.causal_conv(x[:0], weight, tail)
    assert out.shape == (0, 33)
    assert after.equal(tail)


def test_fake_versions_give_the_same_shapes():
    for function, inputs, names in (
        (delta.gated_delta_rule, delta_inputs(DELTA_CASES[1]), DELTA_NAMES),
        (conv.causal_conv, conv_inputs(CONV_CASES[1]), CONV_NAMES),
    ):
        real = results(function, inputs, names)
        with FakeTensorMode() as mode:
            leaves = [x.requires_grad_() for x in tree_map_only(torch.Tensor, mode.from_tensor, inputs)]
            values = function(*leaves)
            gradients = torch.autograd.grad(values, leaves, [torch.empty_like(x) for x in values])
        for fake, x in zip((*values, *gradients), real.values(), strict=True):
            assert (fake.shape, fake.dtype) == (x.shape, x.dtype)


MUTATIONS = [
    (delta, "initial_state=state,\n        do=", "initial_state=torch.zeros_like(state),\n        do="),
    (delta, "dht=grad_state[None]", "dht=torch.zeros_like(grad_state)[None]"),
    (delta, "** -0.5,\n        initial_state=state,\n        do", "** -1,\n        initial_state=state,\n        do"),
    (delta, "l2norm_bwd(k, k_norm, grad_k)", "grad_k"),
    (conv, "(1, 0))[None]", "(0, 1))[None]"),
    (conv, "grad_state[0, :, 1:]", "grad_state[0, :, :-1]"),
    (conv, "dht=_state(grad_tail)", "dht=None"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "before", "after"), MUTATIONS)
def test_mutants_are_seen(module, before, after):
    def check(changed):
        if module is delta:
            check_delta(changed, (3, 1, 1, 16, 16))
        else:
            check_conv(changed, CONV_CASES[1])

    assert_killed(check, module, before, after)


@pytest.mark.parametrize(
    ("version", "capability", "wrong"),
    [("3.6.0", 9, True), ("3.4.0", 9, True), ("3.7.1", 9, False), ("3.3.1", 9, False), ("3.6.0", 8, False)],
)
def test_triton_that_is_wrong_on_hopper_is_known(version, capability, wrong, monkeypatch):
    monkeypatch.setattr(delta_kernels.triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    assert (delta_kernels.wrong_here() is not None) == wrong
