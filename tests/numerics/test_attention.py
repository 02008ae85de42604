"""Split attention against one softmax over the joined rows: output and every gradient, the retained rows' included."""

import pytest
import torch
from helpers import F64, plain_attend, relative

from longstraw.ops import attention
from longstraw.ops.attention import PARTS, attend, reference
from longstraw.ops.host_offload import RetainedRows

BACKENDS = ("reference", "cpu")  # cuda: tests/kernels
BARS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention, "ROW_TILE", 50)
    monkeypatch.setattr(reference, "_TILE", 32)


def draw(count, past, heads, rows, dtype=F64, seed=0):
    """Return q, k, v, past key, past value and a cotangent; scores spread over several units."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((count, heads), (count, rows), (count, rows), (past, rows), (past, rows), (count, heads))
    return [torch.randn(*shape, 16, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def run(parts, tensors, buffers, scale=0.5):
    """Return output and gradients of q, k, v; gradients of the past go to ``buffers``."""
    q, k, v, past_key, past_value, cotangent = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, RetainedRows((past_key, past_value), tuple(buffers)), scale=scale, parts=PARTS[parts])
    return out, *torch.autograd.grad(out, leaves, cotangent)


def target(tensors, scale=0.5):
    """Return output and gradients of q, k, v, past key, past value in float64."""
    *inputs, cotangent = (x.to(F64) for x in tensors)
    leaves = [x.requires_grad_() for x in inputs]
    out = plain_attend(*leaves[:3], RetainedRows(tuple(leaves[3:])), scale=scale)
    return out, *torch.autograd.grad(out, leaves, cotangent)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("count", "past", "heads", "rows"),
    [(70, 130, 4, 2), (70, 0, 4, 4), (1, 130, 6, 1), (1, 0, 6, 1), (64, 50, 2, 2), (33, 49, 6, 1), (3, 101, 12, 2)],
)
def test_equals_one_softmax(backend, count, past, heads, rows):
    tensors = draw(count, past, heads, rows)
    buffers = [torch.zeros_like(tensors[3]), torch.zeros_like(tensors[4])]
    out, *gradients = run(backend, tensors, buffers)
    expected, *expected_gradients = target(tensors)
    assert relative(out, expected) < BARS[F64]
    for gradient, other in zip([*gradients, *buffers], expected_gradients, strict=True):
        assert (gradient - other).norm() <= BARS[F64] * other.norm() + 1e-14  # one position alone: q and k get zeros


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(backend, dtype):
    """Retained rows and activations in ``dtype``, their gradient in float32."""
    tensors = draw(70, 130, 6, 2, dtype)
    buffers = [torch.zeros(130, 2, 16) for _ in range(2)]
    out, *gradients = run(backend, tensors, buffers)
    assert [x.dtype for x in (out, *gradients)] == [dtype] * 4
    expected, *expected_gradients = target(tensors)
    assert relative(out, expected) < BARS[dtype]
    for gradient, other in zip([*gradients, *buffers], expected_gradients, strict=True):
        assert relative(gradient, other) < BARS[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("covered", [1, 20, 50, 99, 130])
def test_buffers_cover_the_last_rows_and_are_added_to(backend, covered):
    tensors = draw(70, 130, 4, 2)
    before = [torch.randn(covered, 2, 16, dtype=F64) for _ in range(2)]
    buffers = [x.clone() for x in before]
    run(backend, tensors, buffers)
    for buffer, start, gradient in zip(buffers, before, target(tensors)[4:], strict=True):
        assert relative(buffer, start + gradient[-covered:]) < BARS[F64]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_buffers_the_past_is_a_constant(backend):
    tensors = draw(20, 130, 4, 2)
    with_buffers = run(backend, tensors, [torch.zeros(130, 2, 16, dtype=F64) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(run(backend, tensors, (None, None)), with_buffers, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    q, k, v, past_key, past_value, _ = draw(5, 7, 4, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    check = lambda *x: attend(*x, RetainedRows((past_key, past_value)), scale=0.5, parts=PARTS[backend])  # noqa: E731
    assert torch.autograd.gradcheck(check, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_stay_finite(backend):
    tensors = draw(70, 130, 4, 2)
    out, *gradients = run(backend, tensors, (None, None), scale=100.0)
    expected, *expected_gradients = target(tensors, scale=100.0)
    assert relative(out, expected) < 1e-10
    assert all(relative(a, b) < 1e-10 for a, b in zip(gradients, expected_gradients[:3], strict=True))


MUTATIONS = {
    "a future row is seen": (
        "_scores",
        lambda real: lambda q, k, t, s, causal, scale: real(q, k, t, s - 1, causal, scale),
    ),
    "the mask is not there": ("_scores", lambda real: lambda q, k, t, s, causal, scale: real(q, k, t, s, False, scale)),
    "a row is left out": ("_row_tiles", lambda real: lambda rows, seen: real(rows - 1, seen) or real(rows, seen)),
    "the last tile is left out": ("_row_tiles", lambda real: lambda rows, seen: real(rows, seen)[:2]),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_can_fail(mutation, monkeypatch):
    name, make = MUTATIONS[mutation]
    monkeypatch.setattr(reference, name, make(getattr(reference, name)))
    tensors = draw(70, 130, 4, 2)
    assert relative(run("reference", tensors, (None, None))[0], target(tensors)[0]) > 1e-3


def test_a_part_backward_needs_the_merged_statistics(monkeypatch):
    """With each part's own log-sum-exp the gradients are wrong: the comparison sees it."""
    real = attention._merge
    monkeypatch.setattr(attention, "_merge", lambda out, lse, *other: real(out, lse.clone(), *other))
    tensors = draw(70, 40, 4, 2)
    assert relative(run("reference", tensors, (None, None))[1], target(tensors)[1]) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_of_the_backward_is_refused(backend):
    q, k, v, past_key, past_value, _ = draw(5, 7, 4, 2)
    out = attend(q.requires_grad_(), k, v, RetainedRows((past_key, past_value)), scale=0.5, parts=PARTS[backend])
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
