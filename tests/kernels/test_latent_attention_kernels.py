"""Attention over chosen latent rows by the Triton kernels, against the reference in float64, gradients included."""

from unittest import mock

import pytest
import torch
from harness import BARS, assert_close, assert_killed, draw, far, padded, surroundings_unchanged
from interpreter import shuffled_programs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from longstraw.memory.meter import MemoryMeter
from longstraw.ops.host_offload import QueryGradients
from longstraw.ops.latent import fused, reference

SCALE = 0.3
CASES = [  # queries, retained rows, chosen rows a query, heads, latent width, rotary width, retained rows with gradient
    (3, 0, 5, 3, 12, 4, 0),
    (5, 100, 70, 20, 24, 8, 37),
    (4, 40, 64, 4, 32, 8, 40),
    (2, 20, 40, 65, 16, 16, 1),
]
SMALL = (4, 140, 130, 3, 12, 4, 90)


def choice(queries, retained, count, generator):
    """Return rows in any order with -1 anywhere; the second query has none, the last one all it can have."""
    rows = torch.full((queries, count), -1, dtype=torch.int32)
    for t in range(queries):
        seen = torch.randperm(retained + t + 1, generator=generator)[
            : count if t == queries - 1 else min(count, count // 2 + t)
        ]
        rows[t, torch.randperm(count, generator=generator)[: len(seen)]] = seen.int()
    rows[1] = -1
    return rows


def inputs(case, dtype=torch.float32):
    """Return grad, q, past, new, rows, buffers; rows lie side by side with others, as views of wider tensors."""
    queries, retained, count, heads, width, rope, covered = case
    q = draw(queries, heads, width + rope, dtype=dtype, seed=1)
    grad = draw(queries, heads, width, dtype=dtype, seed=2)
    past = draw(retained, width, dtype=dtype, seed=3), draw(retained, rope, dtype=dtype, seed=4)
    new = draw(queries, width + rope + 3, dtype=dtype, seed=5).split([width, rope, 3], -1)[:2]
    buffers = tuple(draw(covered, x, seed=6 + x) for x in (width, rope))
    rows = choice(queries, retained, count, torch.Generator().manual_seed(0))
    return grad, q, past, new, rows, buffers


def attended(module, grad, q, past, new, rows, buffers, whole=None):
    """Return all results by name; ``whole`` are out and lse of a softmax over more rows than these."""
    out, lse = module.attend_forward(q, past, new, rows, scale=SCALE)
    added = tuple(None if x is None else x.clone() for x in buffers)
    gradients = module.attend_backward(
        QueryGradients(grad, q, *(whole or (out, lse))), past, new, rows, added, scale=SCALE
    )
    names = ("out", "lse", "q", "latent", "rope", "past latent", "past rope")
    results = zip(names, (out, lse, *gradients, *added), strict=True)
    return {name: x for name, x in results if x is not None}


def wide(arguments):
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, arguments)


def net(results, buffers):
    """Take from gradients what the buffers held before; of infinite log-sum-exps only the place is kept."""
    held = {name: x for name, x in zip(("past latent", "past rope"), buffers, strict=True) if x is not None}
    net = {name: x - held[name] if name in held else x for name, x in results.items()}
    return net | {"lse": net["lse"].masked_fill(net["lse"] == -torch.inf, 1e3)}


def check(module, case=SMALL, dtype=torch.float32):
    arguments = inputs(case, dtype)
    values, targets = attended(module, *arguments), attended(reference, *wide(arguments))
    assert all(values[name].dtype == dtype for name in ("out", "q", "latent", "rope"))
    assert values["lse"].dtype == torch.promote_types(dtype, torch.float32)
    assert_close(net(values, arguments[-1]), net(targets, wide(arguments[-1])), BARS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, dtype):
    check(fused, case, dtype)


def test_float64_stays_float64():
    grad, q, past, new, rows, buffers = wide(inputs(SMALL))
    values, targets = (attended(module, grad, q, past, new, rows, buffers) for module in (fused, reference))
    assert_close(net(values, buffers), net(targets, buffers), 1e-13)


def test_a_query_without_rows_gives_nothing():
    values = attended(fused, *inputs(SMALL))
    assert not values["out"][1].any()
    assert not values["q"][1].any()
    assert values["lse"][1].eq(-torch.inf).all()
    assert values["lse"][[0, 2, 3]].isfinite().all()


def beyond(x):
    """Return the whole buffer of NaN in which `padded` put ``x``."""
    return x.new_empty(0).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes() // x.stride(0) // 4, x.shape[1]))


def check_padded(module, case=SMALL):
    """Nothing is read beyond the tensors' ends, nothing written; queries in tiles of three, and of two."""
    grad, q, past, new, rows, buffers = inputs(case)
    targets = attended(reference, *wide((grad, q, past, new, rows, buffers)))
    grad, q, past, rows, buffers = tree_map_only(torch.Tensor, padded, (grad, q, past, rows, buffers))
    for x in buffers:  # what is added to NaN would not show
        beyond(x).copy_(torch.where(beyond(x).isnan(), 1.0, beyond(x)))
    with mock.patch.object(module, "QUERY_TILE", 3):
        out, lse = module.attend_forward(q, past, new, rows, scale=SCALE)
    tile = 2 * case[2] * case[3]
    with surroundings_unchanged(*buffers), mock.patch.object(module, "WEIGHT_TILE", tile):
        gradients = module.attend_backward(
            QueryGradients(grad, q, padded(out), lse), past, new, rows, buffers, scale=SCALE
        )
    values = dict(zip(targets, (out, lse, *gradients, *buffers), strict=True))
    held = tuple(torch.zeros_like(x) for x in buffers)
    assert_close(net(values, held), net(targets, held), BARS[torch.float32])


def test_reads_and_writes_nothing_beyond_its_tensors():
    check_padded(fused)


def check_finite(module):
    """All scores, and so the log-sum-exp, far below 0."""
    grad, q, past, new, rows, buffers = inputs(SMALL)
    past, new = (tuple(-150 * x.abs() for x in part) for part in (past, new))
    values = attended(module, grad, q.abs(), past, new, rows, buffers)
    assert values["lse"].max() < -100
    assert all(x.isfinite().all() for name, x in values.items() if name != "lse")


def test_very_negative_scores_stay_finite():
    check_finite(fused)
    tail = "tl.where(there[None, :], tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)"
    assert_killed(check_finite, fused, tail, "tl.exp2((scores - lse[:, None]) * LOG2E)")


def check_parts(module):
    """Two that own every other row each: gradients add up, given the output and log-sum-exp of all rows."""
    grad, q, past, new, rows, buffers = inputs(SMALL)
    whole = attended(reference, *wide((grad, q, past, new, rows, buffers)))
    of_all = whole["out"].float(), whole["lse"].float()
    owned = [rows.masked_fill(rows % 2 == parity, -1) for parity in (0, 1)]
    parts = [attended(module, grad, q, past, new, own, buffers, of_all) for own in owned]
    weights = [(part["lse"] - of_all[1]).nan_to_num(0.0, neginf=-torch.inf).exp() for part in parts]
    merged = sum(part["out"] * weight[..., None] for part, weight in zip(parts, weights, strict=True))
    total = {name: parts[0][name] + parts[1][name] for name in ("q", "latent", "rope")}
    total |= {name: parts[0][name] + parts[1][name] - x for name, x in zip(list(whole)[-2:], buffers, strict=True)}
    assert_close(total | {"out": merged}, {name: whole[name] for name in (*total, "out")}, BARS[torch.float32])


def test_parts_add_up_to_the_whole():
    check_parts(fused)


def check_far(module):
    grad, q, past, new, rows, buffers = inputs((4, 20, 12, 2, 16, 8, 18))
    near = attended(module, grad, q, past, new, rows, buffers)
    spread = tuple(far(x) for x in buffers)
    past = tuple(far(x) for x in past)
    out, lse = module.attend_forward(q, past, new, rows, scale=SCALE)
    gradients = module.attend_backward(QueryGradients(grad, q, out, lse), past, new, rows, spread, scale=SCALE)
    values = dict(zip(near, (out, lse, *gradients, *spread), strict=True))
    assert all(values[name].equal(x) for name, x in near.items())


def test_offsets_past_int32():
    check_far(fused)
    assert_killed(check_far, fused, "PAST + rows * past_stride", "PAST + rows.to(tl.int32) * past_stride")
    assert_killed(check_far, fused, "PAST + past_row * past", "PAST + past_row.to(tl.int32) * past")


def test_without_buffers_retained_rows_are_constants():
    grad, q, past, new, rows, buffers = inputs(SMALL)
    expected = attended(fused, grad, q, past, new, rows, buffers)
    for kept in ((None, None), tuple(x[:0] for x in buffers), (None, buffers[1])):
        values = attended(fused, grad, q, past, new, rows, kept)
        assert all(expected[name].equal(x) for name, x in values.items() if x.numel())
    with pytest.raises(TypeError, match=r"torch\.float32"):
        attended(fused, grad, q, past, new, rows, tuple(x.bfloat16() for x in buffers))


@pytest.mark.parametrize("empty", ["queries", "rows"])
def test_nothing_to_do(empty):
    """A rank without queries, or with queries and no rows of its own."""
    queries, new = (0, 0) if empty == "queries" else (3, 0)
    q, rows = torch.ones(queries, 2, 12), torch.full((queries, 4), -1, dtype=torch.int32)
    past, new = ((torch.ones(0, 8), torch.ones(0, 4)) for _ in range(2))
    values = attended(fused, q[..., :8], q, past, new, rows, (None, None))
    assert values["out"].shape == (queries, 2, 8)
    assert not any(x.any() for name, x in values.items() if name != "lse")


def test_the_order_of_programs_matters_by_rounding_alone():
    arguments = inputs(SMALL)
    ordered = attended(fused, *arguments)
    with shuffled_programs(seed=3):
        shuffled = attended(fused, *arguments)
    assert_close(net(shuffled, arguments[-1]), net(ordered, arguments[-1]), 1e-6)


def test_retained_rows_of_another_dtype():
    grad, q, past, new, rows, buffers = inputs(SMALL)
    narrow = tuple(x.bfloat16() for x in past)
    values = attended(fused, grad, q, narrow, new, rows, buffers)
    targets = attended(fused, grad, q, tuple(x.float() for x in narrow), new, rows, buffers)
    assert all(values[name].equal(x) for name, x in targets.items())
    with pytest.raises(TypeError, match=r"torch\.bfloat16"):
        attended(fused, grad, q.to(torch.int32), past, new, rows, buffers)


def test_fake_tensors_count_what_is_allocated():
    """Shapes are those of real tensors, and the workspaces of the backward are seen."""
    grad, q, past, new, rows, buffers = inputs((64, 40, 64, 4, 32, 8, 40))
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, (grad, q, past, new, rows, buffers))
        with MemoryMeter() as meter:
            fake = attended(fused, *fakes)
    real = attended(reference, grad, q, past, new, rows, buffers)
    assert {n: (x.shape, x.dtype, x.stride()) for n, x in fake.items()} == {
        n: (x.shape, x.dtype, x.stride()) for n, x in real.items()
    }
    workspaces = 2 * 64 * 64 * 4 * 4
    expected = sum(x.nbytes for x in real.values()) + rows.nbytes + workspaces
    assert expected <= meter.peak <= expected + 16 * 512


MUTATIONS = {
    "a row too few": ("tl.sum(there, 0))", "tl.sum(there, 0) - 1)"),
    "rows of the tail are not hidden": ('tl.where(there[None, :], scores, float("-inf"))', "scores"),
    "the first new row taken for a retained one": ("tl.where(rows < retained, PAST", "tl.where(rows <= retained, PAST"),
    "new rows at retained rows' stride": ("(rows - retained) * new_stride", "(rows - retained) * past_stride"),
    "the scale of scores is lost": ("* SCALE\n        scores = tl.where", "* 1.0\n        scores = tl.where"),
    "the scale of weights is lost": ("* SCALE\n        weights = tl.where", "* 1.0\n        weights = tl.where"),
    "the scale of gradients is lost": ("(grad_weights - delta[:, None]) * SCALE", "(grad_weights - delta[:, None])"),
    "delta is left out": ("grad_weights - delta[:, None]", "grad_weights"),
    "what was summed does not shrink": ("out * shrink[:, None]", "out"),
    "the total does not shrink": ("total = total * shrink", "total = total"),
    "binary for natural logarithm": ("highest + tl.log(", "highest + tl.log2("),
    "another head's output": ("OUT + (t * H + heads[:, None]) * C", "OUT + (t * H + heads[:, None] * 0) * C"),
    "another head's log-sum-exp": ("lse = tl.load(LSE + t * H + heads,", "lse = tl.load(LSE + t * H + 0 * heads,"),
    "rotary gradients over latent ones": ("grad_query + C + r[None, :]", "grad_query + r[None, :]"),
    "rows get nothing as keys": ("sums = tl.dot(grad_scores, q, sums,", "sums = tl.dot(grad_scores, q * 0, sums,"),
    "what was there is overwritten": ("    tl.atomic_add(target[:, None] + columns[None, :], values, mask=mask, sem=",
                                      "    tl.store(target[:, None] + columns[None, :], values, mask=mask) #"),
    "buffers begin at the first row": ("rows - (retained - kept)", "rows"),
    "rows before the buffer are added": ("(there & (past_row >= 0))[:, None]", "there[:, None]"),
    "the forward's second tile is the first": ("q[first:], past_latent", "q, past_latent"),
    "the second tile of queries is the first": ("t = local + first\n    heads", "t = local\n    heads"),
    "another tile's weights": ("t = local + first\n    number", "t = local + first\n    local = local * 0\n    number"),
    "the last block of rows is left out": ("if start < number:", "if start + BLOCK_N < number:"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutants_are_seen(mutation):
    assert_killed(check_padded, fused, *MUTATIONS[mutation])
