"""Latent attention over chosen rows and the choice of rows, against plain autograd on whole matrices."""

from unittest import mock

import pytest
import torch
from glm_helpers import plain_attend_rows, plain_select
from helpers import relative

from longstraw.ops.host_offload import QueryGradients, RetainedRows
from longstraw.ops.latent import attend_rows, reference

F64 = torch.float64
C, R, H = 12, 4, 3  # latent width, width of the rotary key, heads
BAR = 1e-12


def draw(past, new, count, dtype=F64, seed=0):
    """Return query, new rows, past rows and a causal choice of rows in which some are none."""
    generator = torch.Generator().manual_seed(seed)

    def rnd(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

    rows = torch.full((new, count), -1, dtype=torch.int32)
    for t in range(new):
        seen = torch.randperm(past + t + 1, generator=generator)[: max(count - t % 3, 1)]
        rows[t, count - len(seen) :] = seen.sort().values.int()
    return rnd(new, H, C + R), (rnd(new, C), rnd(new, R)), (rnd(past, C), rnd(past, R)), rows


@pytest.fixture(params=[2**24, 200], ids=["one tile", "many tiles"])
def tiles(request):
    """Small tiles: one query at a time, a few keys at a time."""
    with (
        mock.patch.object(reference, "GATHER_TILE", request.param),
        mock.patch.object(reference, "SCORE_TILE", request.param),
        mock.patch.object(reference, "KEY_TILE", 4096 if request.param > 4096 else 7),
    ):
        yield


@pytest.mark.parametrize(
    ("past", "new", "count", "kept"), [(0, 9, 5, 0), (40, 17, 8, 40), (40, 1, 64, 13), (33, 20, 6, 1)]
)
def test_attention_is_plain_autograd(tiles, past, new, count, kept):
    """Forward, log-sum-exp, and the gradients of queries, new rows and the last ``kept`` retained ones."""
    q, rows_new, rows_past, rows = draw(past, new, count)
    leaves = [x.clone().requires_grad_() for x in (q, *rows_new, *rows_past)]
    expected, lse = plain_attend_rows(leaves[0], leaves[1:3], rows, RetainedRows(tuple(leaves[3:])), scale=0.3)
    weight = torch.randn_like(expected)
    target = torch.autograd.grad((expected * weight).sum(), leaves)

    buffers = tuple(torch.ones(kept, width, dtype=F64) for width in (C, R))  # ones: the gradient is added
    own = [x.clone().requires_grad_() for x in (q, *rows_new)]
    out, own_lse = attend_rows(own[0], tuple(own[1:3]), rows, RetainedRows(rows_past, buffers), scale=0.3)
    gradients = torch.autograd.grad((out * weight).sum(), own)
    assert relative(out, expected) < BAR
    assert relative(own_lse, lse) < BAR
    assert not own_lse.requires_grad
    for value, wanted in zip(gradients, target[:3], strict=True):
        assert relative(value, wanted) < BAR
    for buffer, wanted in zip(buffers, target[3:], strict=True):
        if kept:
            assert relative(buffer - 1, wanted[past - kept :]) < BAR


def test_another_row_is_another_result():
    q, new, past, rows = draw(40, 17, 8)
    other = rows.clone()
    other[5, -1] = next(row for row in range(40) if row not in rows[5].tolist())
    out, changed = (attend_rows(q, new, r, RetainedRows(past), scale=0.3)[0] for r in (rows, other))
    assert relative(out[5], changed[5]) > 1e-3
    assert torch.equal(out[:5], changed[:5])


def test_a_query_without_rows_gives_nothing():
    """As a rank finds it that owns none of the rows: 0 and -inf, no NaN, no gradient."""
    q, new, past, rows = draw(10, 4, 3)
    rows[2] = -1
    q.requires_grad_()
    out, lse = attend_rows(q, new, rows, RetainedRows(past), scale=0.3)
    out.sum().backward()
    assert torch.equal(out[2], torch.zeros(H, C, dtype=F64))
    assert torch.equal(lse[2], torch.full((H,), -torch.inf, dtype=F64))
    assert torch.equal(q.grad[2], torch.zeros_like(q[2]))
    assert float(q.grad[[0, 1, 3]].abs().sum(-1).min()) > 0
    empty = tuple(part[:0] for part in new)
    out, lse = attend_rows(q.detach(), new, rows.fill_(-1), RetainedRows(empty), scale=0.3)
    assert float(out.abs().max()) == 0


def test_parts_merge_by_log_sum_exp():
    """Two ranks that own a part of the rows each: outputs merge, and gradients add up given the merged output."""
    q, new, past, rows = draw(40, 6, 8)
    grad = torch.randn(6, H, C, dtype=F64)
    whole, lse = reference.attend_forward(q, past, new, rows, scale=0.3)
    target = reference.attend_backward(QueryGradients(grad, q, whole, lse), past, new, rows, (None, None), scale=0.3)
    owned = [rows.masked_fill(rows % 2 == parity, -1) for parity in (0, 1)]
    parts = [reference.attend_forward(q, past, new, own, scale=0.3) for own in owned]
    merged = sum(out * (part_lse - lse).exp()[..., None] for out, part_lse in parts)
    assert relative(merged, whole) < BAR
    sums = zip(
        *(
            reference.attend_backward(QueryGradients(grad, q, whole, lse), past, new, own, (None, None), scale=0.3)
            for own in owned
        ),
        strict=True,
    )
    for pieces, wanted in zip(sums, target, strict=True):
        assert relative(sum(pieces), wanted) < BAR


def test_bfloat16_computes_in_float32():
    """Results differ from float64's of the same rounded inputs by the rounding of outputs alone: 2^-9 relative."""
    q, new, past, rows = draw(40, 17, 8, dtype=torch.bfloat16)
    grad = torch.randn(17, H, C).bfloat16()
    results = []
    for dtype in (torch.bfloat16, F64):
        inputs = [x.to(dtype).requires_grad_() for x in (q, *new)]
        buffers = tuple(torch.zeros(40, w, dtype=torch.promote_types(dtype, torch.float32)) for w in (C, R))
        out, _ = attend_rows(
            inputs[0], tuple(inputs[1:]), rows, RetainedRows(tuple(p.to(dtype) for p in past), buffers), scale=0.3
        )
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype)), *buffers])
        assert out.dtype == dtype
    for value, wanted in zip(*results, strict=True):
        assert relative(value.to(F64), wanted) < 2**-7
    assert relative(results[0][0].to(F64), results[1][0]) < 2**-8


# The choice of rows


def draw_index(past, new, seed=0, dtype=F64):
    """Return index queries, weights and keys in small whole numbers: scores tie all the time, at 0 and elsewhere."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    return whole(new, 2, 3), whole(new, 2), whole(past, 3), whole(new, 3)


@pytest.mark.parametrize(("past", "new", "count"), [(0, 1, 4), (0, 30, 8), (50, 30, 8), (50, 1, 200), (7, 70, 1)])
def test_choice_is_a_stable_sort(tiles, past, new, count):
    q, weights, past_key, key = draw_index(past, new)
    rows = reference.select_rows(q, weights, past_key, key, count, scale=0.5)
    assert rows.dtype == torch.int32
    assert torch.equal(rows, plain_select(q, weights, past_key, key, count, scale=0.5))


@pytest.mark.parametrize("border", [0, 1, 7, 40, 79])
def test_choice_does_not_depend_on_the_cut(tiles, border):
    q, weights, _, key = draw_index(0, 80)
    whole = reference.select_rows(q, weights, key[:0], key, 8, scale=0.5)
    after = reference.select_rows(q[border:], weights[border:], key[:border], key[border:], 8, scale=0.5)
    assert torch.equal(whole[border:], after)


def test_ties_matter_here():
    """Breaking ties by falling position, the same scores choose other rows in most lines."""
    q, weights, past_key, key = draw_index(50, 30)
    rows = reference.select_rows(q, weights, past_key, key, 8, scale=0.5)
    keys = torch.cat([past_key, key])
    scores = reference.index_scores(q, weights, keys, scale=0.5)
    scores.masked_fill_(torch.arange(80) > torch.arange(50, 80)[:, None], -torch.inf)
    last = 79 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert (last.sort(-1).values != rows).any(-1).sum() > 20


def test_a_query_sees_itself_and_nothing_later(tiles):
    q, weights, past_key, key = draw_index(20, 60)
    rows = reference.select_rows(q, weights, past_key, key, 90, scale=0.5)
    for t, line in enumerate(rows.tolist()):
        assert [row for row in line if row >= 0] == list(range(20 + t + 1))


def test_ranks_choose_as_one_does(tiles):
    """Each owns every other row; the best of their best, ordered by position, are the best of all."""
    q, weights, _, key = draw_index(0, 60)
    positions = torch.arange(60, dtype=torch.int32)
    whole = reference.best_rows(q, weights, [(key, positions)], positions, 8, scale=0.5)
    parts = [(key[r::2], positions[r::2]) for r in range(2)]
    found = [reference.best_rows(q, weights, [part], positions, 8, scale=0.5) for part in parts]
    scores, rows = (torch.cat(x, -1) for x in zip(*found, strict=True))
    order = rows.argsort(stable=True, dim=-1)
    merged = reference.keep_best(scores.gather(1, order), rows.gather(1, order), 8)
    assert all(torch.equal(a, b) for a, b in zip(merged, whole, strict=True))


def test_scores_are_at_least_float32():
    """Index keys in bfloat16 whose scores differ by less than bfloat16 resolves are still told apart."""
    q = torch.ones(2, 1, 2, dtype=torch.bfloat16)
    key = torch.tensor([[256.0, 0.0], [256.0, 0.5]], dtype=torch.bfloat16)
    weights = torch.ones(2, 1)
    assert reference.select_rows(q, weights, key[:0], key, 1, scale=1.0).tolist() == [[0], [1]]
    assert (key.sum(-1)[0] == key.sum(-1)[1]).item()  # in bfloat16 they tie
