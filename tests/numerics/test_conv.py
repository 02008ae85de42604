"""The causal convolution with a tail against PyTorch's own operator: every gradient."""

import pytest
import torch
from helpers import F64, plain_conv, relative

from longstraw.ops.conv import reference
from longstraw.ops.conv.reference import causal_conv


def draw(count, dtype=F64, channels=5, taps=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((count, channels), (channels, taps), (taps - 1, channels))
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def run(conv, inputs):
    """Return output, tail and the gradients of x, weight and tail for random cotangents."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = conv(*leaves)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=F64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, cotangents)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 65])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_equals_conv1d(count, taps, dtype, bar):
    inputs = draw(count, dtype, taps=taps)
    values, targets = run(causal_conv, inputs), run(plain_conv, [x.to(F64) for x in inputs])
    assert {x.dtype for x in values} == {dtype}
    assert max(relative(a, b) for a, b in zip(values, targets, strict=True)) < bar


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_gradcheck(count):
    assert torch.autograd.gradcheck(causal_conv, [x.requires_grad_() for x in draw(count)])


@pytest.mark.parametrize("cut", [1, 2, 3, 10])
def test_the_tail_joins_two_runs(cut):
    x, weight, tail = draw(20)
    out, last = causal_conv(x, weight, tail)
    first, middle = causal_conv(x[:cut], weight, tail)
    second, end = causal_conv(x[cut:], weight, middle)
    assert relative(torch.cat([first, second]), out) < 1e-14
    assert torch.equal(end, last)
    lost, _ = causal_conv(x[cut:], weight, torch.zeros_like(tail))
    assert relative(lost, out[cut:]) > 1e-2


def test_the_tail_is_no_view_of_the_inputs():
    """A view would keep the whole chunk alive in the retained state."""
    tail = causal_conv(*draw(100))[1]
    assert tail.untyped_storage().nbytes() == tail.nbytes


def test_comparison_can_fail(monkeypatch):
    """A convolution that looks one position ahead."""
    inputs = draw(20)
    real = reference._convolve
    monkeypatch.setattr(reference, "_convolve", lambda joined, weight: real(joined.roll(-1, 0), weight))
    values, targets = run(causal_conv, inputs), run(plain_conv, inputs)
    assert relative(values[0], targets[0]) > 1e-2
    assert relative(values[2], targets[2]) > 1e-2
