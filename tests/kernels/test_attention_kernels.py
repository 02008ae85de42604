"""Gradients of attention to retained rows by the Triton kernels, against the reference in float64."""

import pytest
import torch
from harness import BARS, assert_close, assert_killed, draw, far, padded, surroundings_unchanged
from interpreter import shuffled_programs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from longstraw.ops.attention import fused, reference
from longstraw.ops.host_offload import QueryGradients

CASES = [  # key/value heads, query heads for each, queries, rows, rows with a gradient, width
    (2, 2, 70, 130, 130, 16),
    (1, 3, 33, 65, 20, 64),
    (3, 1, 1, 100, 1, 24),
    (2, 1, 40, 70, 64, 256),
]
SMALL = (2, 2, 40, 70, 60, 16)


def inputs(case, dtype=torch.float32, seed=0):
    """Return grad, q, k, v, out, lse, buffers, scale; out and lse are those of a softmax over these rows and others."""
    heads, repeats, count, rows, covered, width = case
    q, grad = (draw(heads, repeats, count, width, dtype=dtype, seed=seed + i) for i in range(2))
    k, v = (draw(rows, heads, width, dtype=dtype, seed=seed + i) for i in (2, 3))
    others = [draw(7, heads, width, seed=seed + i) for i in (4, 5)]
    keys, values = (torch.cat([a.double(), b.double()]) for a, b in zip((k, v), others, strict=True))
    out, lse = reference.part_forward(q.double(), keys, values, causal=False, scale=0.3)
    buffers = [draw(covered, heads, width, seed=seed + i) for i in (6, 7)]
    return grad, q, k, v, out.to(dtype), lse.float(), buffers, 0.3


def gradients(module, grad, q, k, v, out, lse, buffers, scale):
    """Return the gradient of the queries and what the buffers hold afterwards, by name."""
    buffers = [x.clone() for x in buffers]
    grad_q = module.rows_backward(QueryGradients(grad, q, out, lse), k, v, buffers, scale=scale)
    return {"q": grad_q, "k": buffers[0], "v": buffers[1]}


def target(grad, q, k, v, out, lse, buffers, scale):
    wide = [x.double() for x in (grad, q, k, v, out, lse)]
    return gradients(reference, *wide, [x.double() for x in buffers], scale)


def added(values, buffers):
    """Return gradients less what the buffers held before."""
    return {"q": values["q"], **{name: values[name] - x for name, x in zip("kv", buffers, strict=True)}}


def check(module, case=CASES[0], dtype=torch.float32):
    arguments = inputs(case, dtype)
    buffers = arguments[-2]
    values, expected = gradients(module, *arguments), target(*arguments)
    assert all(x.dtype == torch.float32 for x in values.values())
    assert_close(added(values, buffers), added(expected, buffers), BARS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, dtype):
    check(fused, case, dtype)


def check_padded(module, case=SMALL):
    grad, q, k, v, out, lse, buffers, scale = inputs(case)
    expected = target(grad, q, k, v, out, lse, buffers, scale)
    grad, q, out = (padded(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in (grad, q, out))
    k, v, *buffers = (padded(x) for x in (k, v, *buffers))
    with surroundings_unchanged(*buffers):
        grad_q = module.rows_backward(QueryGradients(grad, q, out, lse), k, v, buffers, scale=scale)
    assert_close({"q": grad_q, "k": buffers[0], "v": buffers[1]}, expected, BARS[torch.float32])


def test_reads_and_writes_nothing_beyond_its_tensors():
    check_padded(fused)


def test_offsets_past_int32():
    grad, q, k, v, out, lse, buffers, scale = inputs((2, 1, 20, 40, 36, 16))
    near = gradients(fused, grad, q, k, v, out, lse, buffers, scale)
    spread = [far(x) for x in buffers]
    grad_q = fused.rows_backward(QueryGradients(grad, q, out, lse), far(k), far(v), spread, scale=scale)
    assert all(a.equal(b) for a, b in zip((grad_q, *spread), near.values(), strict=True))


def test_parts_add_up_to_the_whole():
    grad, q, k, v, out, lse, buffers, scale = inputs(SMALL)
    expected, parts = target(grad, q, k, v, out, lse, buffers, scale), [x.clone() for x in buffers]
    total = torch.zeros_like(q)
    for rows in (slice(0, 37), slice(37, 38), slice(38, 70)):
        tiles = (x[max(rows.start - 10, 0) : rows.stop - 10] for x in parts)  # of 70 rows the last 60 have a gradient
        total += fused.rows_backward(QueryGradients(grad, q, out, lse), k[rows], v[rows], tiles, scale=scale)
    assert_close({"q": total, "k": parts[0], "v": parts[1]}, expected, BARS[torch.float32])


def test_without_buffers_rows_are_constants():
    grad, q, k, v, out, lse, buffers, scale = inputs(SMALL)
    expected = gradients(fused, grad, q, k, v, out, lse, buffers, scale)["q"]
    assert fused.rows_backward(QueryGradients(grad, q, out, lse), k, v, (None, None), scale=scale).equal(expected)
    nothing = (x[:0] for x in buffers)
    assert fused.rows_backward(QueryGradients(grad, q, out, lse), k, v, nothing, scale=scale).equal(expected)
    with pytest.raises(ValueError, match="both"):
        fused.rows_backward(QueryGradients(grad, q, out, lse), k, v, (buffers[0], None), scale=scale)


def test_a_query_that_saw_nothing_owes_nothing():
    grad, q, k, v, out, lse, buffers, scale = inputs(SMALL)
    lse[:, :, 5:9] = -torch.inf
    values = gradients(fused, grad, q, k, v, out, lse, buffers, scale)
    assert values["q"][:, :, 5:9].eq(0).all()
    seen = [i for i in range(40) if not 5 <= i < 9]
    expected = target(*(x[:, :, seen] for x in (grad, q)), k, v, out[:, :, seen], lse[:, :, seen], buffers, scale)
    assert_close(values | {"q": values["q"][:, :, seen]}, expected, BARS[torch.float32])


@pytest.mark.parametrize("empty", [2, 3])
def test_no_queries_or_no_rows(empty):
    grad, q, k, v, out, lse, buffers, scale = inputs((2, 2, 5, 6, 0, 16))
    if empty == 2:
        grad, q, out, lse = (x[:, :, :0] for x in (grad, q, out, lse))
    else:
        k, v = k[:0], v[:0]
    values = gradients(fused, grad, q, k, v, out, lse, buffers, scale)
    assert values["q"].shape == q.shape
    assert not values["q"].any()


def test_the_order_of_programs_does_not_matter():
    arguments = inputs(SMALL)
    ordered = gradients(fused, *arguments)
    with shuffled_programs(seed=3):
        shuffled = gradients(fused, *arguments)
    assert all(shuffled[name].equal(x) for name, x in ordered.items())


def check_finite(module):
    """All scores, and so the log-sum-exp, far below 0."""
    grad, q, k, v, out, lse, buffers, _ = inputs((1, 1, 5, 40, 40, 16))
    q, k = q.abs(), -30 * k.abs()
    out, lse = reference.part_forward(q, k, v, causal=False, scale=1.0)
    assert lse.max() < -100
    assert all(x.isfinite().all() for x in gradients(module, grad, q, k, v, out, lse, buffers, 1.0).values())


def test_very_negative_scores_stay_finite():
    check_finite(fused)
    assert_killed(check_finite, fused, "row[None, :] < rows", "row[None, :] <= rows")


def test_fake_version_gives_the_same_shapes():
    arguments = inputs((2, 2, 5, 6, 6, 16))
    real = gradients(fused, *arguments)["q"]
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        fake = gradients(fused, *fakes)["q"]
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


MUTATIONS = {
    "one row too many is read": ("mask = at[:, None] < count", "mask = at[:, None] <= count"),
    "the scale of keys is lost": ("total_k * scale", "total_k"),
    "the scale of queries is lost": ("total * scale", "total"),
    "the scale of scores is lost": ("tl.dot(q, tl.trans(k), input_precision=\"ieee\") * (scale * LOG2E)",
                                    "tl.dot(q, tl.trans(k), input_precision=\"ieee\") * LOG2E"),
    "keys are overwritten": ("total_k * scale + tl.load(target_k, mask=mask, other=0.0)", "total_k * scale"),
    "values are overwritten": ("total_v + tl.load(target_v, mask=mask, other=0.0)", "total_v"),
    "another head's keys": ("\n    k = _load_tile(K + group * k_n", "\n    k = _load_tile(K"),
    "another head's gradient": ("GradV + group * grad_v_n", "GradV"),
    "heads dealt in turn": ("group * REPEATS + repeat", "group + repeat * tl.num_programs(1)"),
    "delta is left out": ("grad_weights - delta[None, :]", "grad_weights"),
    "the last block of queries is left out": ("range(0, count, BLOCK_T)", "range(0, count - BLOCK_T, BLOCK_T)"),
    "the first rows instead of the last": ("k[rows - covered :]", "k"),
    "natural for binary logarithm": ("value) * LOG2E", "value)"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutants_are_seen(mutation):
    assert_killed(check_padded, fused, *MUTATIONS[mutation])


def test_narrow_offsets_are_seen():
    def check_far(module):
        grad, q, k, v, out, lse, _, scale = inputs((1, 1, 5, 40, 0, 16))
        module.rows_backward(QueryGradients(grad, q, out, lse), far(k), far(v), (None, None), scale=scale)

    check_far(fused)
    assert_killed(check_far, fused, "base + at.to(tl.int64)[:, None]", "base + at[:, None]")
