"""A step's end against torch's own clipping and AdamW, and what gradients lose where they add up in bfloat16."""

import copy

import pytest
import torch
from torch import nn

from longstraw.config import ConfigError, OptimizerConfig
from longstraw.memory.meter import MemoryMeter
from longstraw.training.optimizer import Optimizer

LOSS = torch.tensor(1.0)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 4), (5,))]


def backward(weights, factor=1.0):
    """Leave a gradient that differs from weight to weight."""
    sum((w.float().square() * factor).sum() for w in weights).backward()


def config(**changes):
    return OptimizerConfig(**{"lr": 0.1, "max_grad_norm": 0.5, "weight_decay": 0.01} | changes)


def values(weights):
    return [w.detach().clone() for w in weights]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_steps_are_those_of_torch(device):
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, config(device=device))
    adamw = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.01)
    for factor in (1.0, 0.3, 1e-3):  # the last is not clipped
        backward(ours, factor)
        backward(theirs, factor)
        expected = nn.utils.clip_grad_norm_(theirs, 0.5)
        adamw.step()
        adamw.zero_grad()
        assert optimizer.update(LOSS) == pytest.approx(float(expected), rel=1e-6)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)
        assert all(p.grad is None for p in ours)
    unclipped = parameters()
    backward(unclipped)
    Optimizer(unclipped, config(max_grad_norm=None)).update(LOSS)
    backward(clipped := parameters())
    Optimizer(clipped, config(max_grad_norm=0.01, eps=1.0)).update(LOSS)
    assert not torch.allclose(unclipped[0], clipped[0], rtol=1e-3)


def test_what_lies_on_the_host_is_told():
    weights = parameters()
    with MemoryMeter(rounding=1) as meter:
        meter.tag("parameters", weights)
        optimizer = Optimizer(weights, config(device="cpu"), note=meter.tag)
        backward(weights)
        meter.reset_peak()
        held = meter.current
        optimizer.update(LOSS)
    size = sum(w.nbytes for w in weights)
    assert meter.host == 3 * size + 4 * len(weights)  # the copy, two moments, counts of steps
    assert meter.host_peak == meter.host + size  # a gradient comes and goes
    assert meter.peak - held < size  # no moments on the device
    assert not {x.data_ptr() for x in optimizer.updated} & {x.data_ptr() for x in weights}


def summed(gradient_dtype, terms):
    """Return the norm of the gradients that many small backward passes add up to, in bfloat16."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], config(name="none", gradient_dtype=gradient_dtype))
    for term in terms:
        (weight * term).sum().backward()
    return optimizer.update(LOSS)


def test_small_gradients_are_not_lost():
    terms = [1.0] + [2**-9] * 512  # each a quarter of the last bit of 1 in bfloat16, together 1
    assert summed("float32", terms) == pytest.approx(2 * 2.0)
    assert summed("model", terms) == pytest.approx(2 * 1.0)


def test_the_step_of_narrow_parameters_is_that_of_the_whole_sum():
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = Optimizer(ours, config(max_grad_norm=None))
    adamw = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.01, fused=True)
    for _ in range(3):
        backward(ours)
        backward(theirs)
        optimizer.update(LOSS)
        adamw.step()
        adamw.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_no_step_is_taken_on_what_is_not_finite(wrong, where, device):
    weights = parameters()
    optimizer = Optimizer(weights, config(device=device))
    before = values(weights)
    backward(weights, wrong if where == "gradient" else 1.0)
    optimizer.update(torch.tensor(wrong) if where == "loss" else LOSS)
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
    assert all(w.grad is None for w in weights)
    backward(weights)
    optimizer.update(LOSS)
    assert not torch.equal(weights[0], before[0])


def test_every_gradient_is_told_once_it_is_there():
    told = []
    weights = parameters(torch.bfloat16)
    optimizer = Optimizer(weights, config(), note=lambda kind, tensors: told.append((kind, tensors)))
    backward(weights)
    backward(weights)
    assert [(kind, x.dtype) for kind, x in told] == [("gradients", torch.float32)] * 2  # the sums, not what is added
    optimizer.update(LOSS)
    assert [kind for kind, _ in told[2:]] == ["gradients", "gradients", "optimizer"]
    assert told[2][1].dtype == torch.bfloat16


def test_a_copy_of_gradients_is_not_needed_for_wide_ones():
    weights = parameters()
    optimizer = Optimizer(weights, config(name="none"))
    backward(weights)
    assert [x.data_ptr() for x in optimizer.gradients()] == [w.grad.data_ptr() for w in weights]
    assert optimizer.state() == []
    backward(copy.deepcopy(weights))


@pytest.mark.parametrize(("key", "value"), [("gradient_dtype", "bfloat17"), ("device", "gpu")])
def test_choices_are_named(key, value):
    with pytest.raises(ConfigError, match=f"optimizer.{key}"):
        OptimizerConfig(**{key: value})
