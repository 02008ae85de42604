"""Log-probability and entropy by the Triton kernels, values and gradients, against all logits in float64."""

import pytest
import torch
from harness import BARS, assert_close, assert_killed, draw, far, padded
from interpreter import shuffled_programs

from longstraw.ops.logprob import fused, token_logprobs

CASES = [(37, 150, 40), (1, 33, 16), (130, 300, 64)]  # positions, vocabulary, width
SMALL = CASES[0]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    shrink(fused, monkeypatch)


def shrink(module, monkeypatch):
    """Let a vocabulary of a hundred rows have several tiles; both sizes are multiples of a block."""
    monkeypatch.setattr(module, "SPLIT", 64)
    monkeypatch.setattr(module, "GRADIENT_TILE", 96)


def inputs(case, dtype=torch.float32):
    """Return hidden states, weight and targets, of which two are outside the vocabulary."""
    count, vocabulary, width = case
    hidden, weight = draw(count, width, dtype=dtype, seed=1), draw(vocabulary, width, dtype=dtype, seed=2, spread=0.4)
    targets = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(3))
    if count > 2:
        targets[0], targets[1], targets[2] = -1, vocabulary, vocabulary - 1
    return hidden, weight, targets


def plain(hidden, weight, targets):
    logits = hidden @ weight.T
    here = (targets >= 0) & (targets < len(weight))
    logit = torch.where(here, logits.gather(1, (targets * here)[:, None])[:, 0], 0)
    return logit, logits.logsumexp(-1), (logits.softmax(-1) * logits).sum(-1)


def results(function, hidden, weight, targets, with_mean=True):
    """Return the three results and both gradients, with a cotangent for each result, by name."""
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    values = function(*leaves, targets)
    number = 3 if with_mean else 2
    cotangents = [draw(len(hidden), dtype=x.dtype, seed=5 + i) for i, x in enumerate(values[:number])]
    gradients = torch.autograd.grad(values[:number], leaves, cotangents)
    return dict(zip(("logit", "lse", "mean", "hidden", "weight"), (*values, *gradients), strict=True))


def check(module, case=SMALL, dtype=torch.float32, with_mean=True):
    hidden, weight, targets = inputs(case, dtype)
    values = results(module.token_logits, padded(hidden), padded(weight), padded(targets), with_mean)
    assert [x.dtype for x in values.values()] == [torch.float32] * 3 + [dtype] * 2
    assert_close(values, results(plain, hidden.double(), weight.double(), targets, with_mean), BARS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_all_logits(case, dtype):
    check(fused, case, dtype)


def test_without_a_gradient_of_the_mean():
    check(fused, with_mean=False)


def test_log_probability_and_entropy():
    hidden, weight, targets = inputs(SMALL)
    targets = targets.clamp(0, len(weight) - 1)
    logs = (hidden.double() @ weight.double().T).log_softmax(-1)
    expected = {"logprob": logs.gather(1, targets[:, None])[:, 0], "entropy": -(logs.exp() * logs).sum(-1)}
    values = token_logprobs(hidden, weight, targets, logits=fused.token_logits)
    assert_close(dict(zip(expected, values, strict=True)), expected, BARS[torch.float32])


def test_only_what_is_asked_for():
    hidden, weight, targets = inputs(SMALL)
    both = results(fused.token_logits, hidden, weight, targets)
    for wanted, name in ((hidden, "hidden"), (weight, "weight")):
        leaves = [x.detach().requires_grad_(x is wanted) for x in (hidden, weight)]
        values = fused.token_logits(*leaves, targets)
        cotangents = [draw(len(hidden), seed=5 + i) for i in range(3)]
        (gradient,) = torch.autograd.grad(values, [x for x in leaves if x.requires_grad], cotangents)
        assert gradient.equal(both[name])


def test_large_logits_stay_finite():
    hidden, weight, targets = inputs(SMALL)
    values = results(fused.token_logits, 1e3 * hidden, weight, targets)
    expected = results(plain, 1e3 * hidden.double(), weight.double(), targets)
    assert all(x.isfinite().all() for x in values.values())
    assert_close({"lse": values["lse"]}, {"lse": expected["lse"]}, BARS[torch.float32])


def test_no_positions():
    hidden, weight, targets = inputs(SMALL)
    values = results(fused.token_logits, hidden[:0], weight, targets[:0])
    assert [len(x) for x in values.values()] == [0, 0, 0, 0, len(weight)]
    assert not values["weight"].any()


def test_offsets_past_int32():
    hidden, weight, targets = inputs((20, 40, 16))
    near = results(fused.token_logits, hidden, weight, targets)
    spread = fused.token_logits(far(hidden), far(weight), targets)
    assert all(a.equal(near[name]) for name, a in zip(("logit", "lse", "mean"), spread, strict=True))


def check_narrow(module):
    hidden, weight, targets = inputs((20, 40, 16))
    module.token_logits(far(hidden), far(weight), targets)


def test_the_order_of_programs_does_not_matter():
    ordered = results(fused.token_logits, *inputs(SMALL))
    with shuffled_programs(seed=4):
        shuffled = results(fused.token_logits, *inputs(SMALL))
    assert all(shuffled[name].equal(x) for name, x in ordered.items())


MUTATIONS = {
    "a row too many": ("inside = row[None, :] < tl", "inside = row[None, :] <= tl"),
    "a column too many is read": ("& (column[None, :] < width)", "& (column[None, :] <= width)"),
    "the decay of the sum is lost": ("total * decay + tl.sum(mass, 1)", "total + tl.sum(mass, 1)"),
    "the decay of the mean is lost": ("weighted * decay", "weighted"),
    "the sum starts anew": ("total = total * decay + tl.sum(mass, 1)", "total = tl.sum(mass, 1)"),
    "the columns of the width end early": ("range(0, width, BLOCK_D)", "range(0, width - BLOCK_D, BLOCK_D)"),
    "two parts in one place": ("out + 2 * parts_kind", "out + parts_kind"),
    "the target of another tile": ("(first + row)[None, :] == target", "row[None, :] == target"),
    "one is left out": ("1 + logits - mean", "logits - mean"),
    "splits are not weighed": ("(total * shares).sum(0)", "total.sum(0)"),
    "only the last tile's gradient": ("grad_hidden += grad @ rows", "grad_hidden = grad @ rows"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutants_are_seen(mutation, monkeypatch):
    def check_shrunk(module):
        shrink(module, monkeypatch)
        check(module)

    assert_killed(check_shrunk, fused, *MUTATIONS[mutation])


@pytest.mark.parametrize("offset", ["at.to(tl.int64)[:, None] * hidden_t", "row.to(tl.int64)[None, :] * weight_v"])
def test_narrow_offsets_are_seen(offset):
    assert_killed(check_narrow, fused, offset, offset.replace(".to(tl.int64)", ""))
