"""Log-probability and entropy in tiles against a log-softmax of all logits, value and gradient."""

import pytest
import torch
from helpers import F64, plain_logprobs, relative
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.ops.logprob import reference, token_logprobs


def draw(count, vocabulary, dtype=F64, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 8, generator=generator, dtype=F64) * spread
    weight = torch.randn(vocabulary, 8, generator=generator, dtype=F64)
    return hidden.to(dtype), weight.to(dtype), torch.randint(vocabulary, (count,), generator=generator)


def run(function, hidden, weight, targets):
    """Return both results and both gradients, with a random cotangent for each result."""
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    results = function(*leaves, targets)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=F64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, cotangents)]


@pytest.mark.parametrize("tiles", [(3, 4), (1, 1), (1000, 1000), (7, 11)])
@pytest.mark.parametrize(("count", "vocabulary"), [(7, 11), (1, 11), (9, 16)])
def test_equals_log_softmax(tiles, count, vocabulary, monkeypatch):
    monkeypatch.setattr(reference, "POSITION_TILE", tiles[0])
    monkeypatch.setattr(reference, "VOCABULARY_TILE", tiles[1])
    inputs = draw(count, vocabulary)
    values, targets = run(token_logprobs, *inputs), run(plain_logprobs, *inputs)
    assert max(relative(a, b) for a, b in zip(values, targets, strict=True)) < 1e-13


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_low_precision(dtype, bar, monkeypatch):
    monkeypatch.setattr(reference, "VOCABULARY_TILE", 7)
    hidden, weight, targets = draw(20, 50, dtype)
    values = run(token_logprobs, hidden, weight, targets)
    assert [x.dtype for x in values] == [torch.float32, torch.float32, dtype, dtype]
    expected = run(plain_logprobs, hidden.to(F64), weight.to(F64), targets)
    assert max(relative(a, b) for a, b in zip(values, expected, strict=True)) < bar


@pytest.mark.parametrize("result", [0, 1])
def test_gradcheck(result, monkeypatch):
    monkeypatch.setattr(reference, "POSITION_TILE", 3)
    monkeypatch.setattr(reference, "VOCABULARY_TILE", 4)
    hidden, weight, targets = draw(7, 11)
    check = lambda h, w: token_logprobs(h, w, targets)[result]  # noqa: E731
    assert torch.autograd.gradcheck(check, (hidden.requires_grad_(), weight.requires_grad_()))


def test_large_logits_stay_finite():
    inputs = draw(7, 11, spread=1e3)
    values, targets = run(token_logprobs, *inputs), run(plain_logprobs, *inputs)
    assert all(x.isfinite().all() for x in values)
    assert relative(values[0], targets[0]) < 1e-12


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize(("function", "whole"), [(token_logprobs, False), (plain_logprobs, True)])
def test_no_logits_of_every_token(function, whole, monkeypatch):
    monkeypatch.setattr(reference, "VOCABULARY_TILE", 100)
    with Largest() as largest:
        run(function, *draw(90, 2000))
    assert (largest.numel >= 90 * 2000) == whole


def test_comparison_can_fail():
    hidden, weight, targets = draw(7, 11)
    values, shifted = (
        run(token_logprobs, hidden, weight, targets),
        run(plain_logprobs, hidden, weight, (targets + 1) % 11),
    )
    assert relative(values[0], shifted[0]) > 1e-2
    assert relative(values[2], shifted[2]) > 1e-2
