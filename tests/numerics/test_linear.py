"""Products of bfloat16 numbers in float32 on a processor: one rounding from float64, in tiles of any size."""

import pytest
import torch
from glm_helpers import glm_model
from helpers import relative, tiny_model
from torch import nn

from longstraw.layers.cpu_linear import WideLinear
from longstraw.ops import linear as op
from longstraw.ops.moe import MOE
from longstraw.ops.moe.reference import ExpertGradients, Routed

ROUNDING = 2.0**-8  # half the distance of two neighbouring bfloat16 numbers, relative
POSITIONS, INPUTS, OUTPUTS = 20, 48, 30


@pytest.fixture(params=[1, 7 * INPUTS, 2**22], ids=["a row", "seven rows", "whole"])
def tile(request, monkeypatch):
    monkeypatch.setattr(op, "WEIGHT_TILE", request.param)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def largest(ours, exact):
    """Return the largest difference, relative to the number it belongs to or the smallest of note."""
    return float(((ours.double() - exact) / exact.abs().clamp(min=0.1)).abs().max())


def differences():
    """Return how far result and gradients are from those in float64."""
    x, weight, grad = drawn(2, POSITIONS, INPUTS), drawn(OUTPUTS, INPUTS, seed=1), drawn(2, POSITIONS, OUTPUTS, seed=2)
    ours = [t.clone().requires_grad_() for t in (x, weight)]
    exact = [t.double().requires_grad_() for t in (x, weight)]
    out, target = op.linear(*ours), nn.functional.linear(*exact)
    out.backward(grad)
    target.backward(grad.double())
    pairs = [(out, target), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    assert all(a.dtype is torch.bfloat16 and a.shape == b.shape for a, b in pairs)
    return [largest(a.detach(), b.detach()) for a, b in pairs]


def test_one_rounding_from_float64(tile):
    assert max(differences()) <= 1.01 * ROUNDING


def test_a_tile_left_out_is_seen(monkeypatch):
    monkeypatch.setattr(op, "_tiles", lambda weight: [slice(0, len(weight) - 1)])
    assert differences()[1] > 10 * ROUNDING


def test_a_frozen_weight_keeps_no_input():
    x, weight = drawn(POSITIONS, INPUTS).requires_grad_(), drawn(OUTPUTS, INPUTS)
    assert op.linear(x, weight).grad_fn.saved_tensors[0] is None
    assert op.linear(x, weight.requires_grad_()).grad_fn.saved_tensors[0] is not None


def test_models_on_a_processor_have_them_and_compute_the_same():
    """In float32 and float64 bit for bit; the backend ``reference`` keeps ``nn.Linear``."""
    for make in (tiny_model, glm_model):
        ours, plain = make(dtype=torch.float32), make(dtype=torch.float32, backend="reference")
        kinds = [{type(m) for m in model.modules() if isinstance(m, nn.Linear)} for model in (ours, plain)]
        assert kinds == [{WideLinear}, {nn.Linear}]
        assert ours.state_dict().keys() == plain.state_dict().keys()
    layer = WideLinear(INPUTS, OUTPUTS, bias=False)
    x = drawn(POSITIONS, INPUTS)
    assert torch.equal(layer(x.float()), nn.functional.linear(x.float(), layer.weight))
    layer.bfloat16()
    assert torch.equal(layer(x), nn.functional.linear(x.float(), layer.weight.float()).bfloat16())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_experts_are_rounded_once(backend):
    """The reference rounds after each product; on a processor only results are rounded."""
    experts, width, inner = 3, 32, 24
    counts, token = [4, 0, 6], torch.tensor([0, 2, 3, 4, 0, 1, 2, 3, 4, 4])
    x, grad = drawn(5, width), drawn(5, width, seed=1)
    gate_up, down = drawn(experts, 2 * inner, width, seed=2) * 0.25, drawn(experts, width, inner, seed=3) * 0.25
    weight = torch.rand(10, generator=torch.Generator().manual_seed(4))

    def run(ops, dtype):
        tensors = [t.to(dtype) for t in (grad, x, gate_up, down)]
        wide = weight.to(torch.promote_types(dtype, torch.float32))
        routed, weights = Routed(token, wide, counts), tensors[2:]
        out = ops.experts_forward(tensors[1], routed, *weights)
        return out, *ops.experts_backward(tensors[1], routed, *weights, ExpertGradients(tensors[0], True))

    ours, exact = run(MOE[backend], torch.bfloat16), run(MOE["reference"], torch.float64)
    distance = max(relative(a.double(), b) for a, b in zip(ours, exact, strict=True))
    assert (distance < 0.6 * ROUNDING) == (backend == "cpu")
    assert distance < 3 * ROUNDING
