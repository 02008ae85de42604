"""Advantages, loss and gradient against numbers worked out by hand and finite differences."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from longstraw.config import AlgorithmConfig, ConfigError
from longstraw.group import Group
from longstraw.grpo import (
    BranchTerms,
    advantages,
    branch_loss,
    branch_losses,
    correction_weights,
    denominators,
    mask_truncated,
    overlong_penalty,
)

GRPO = AlgorithmConfig()
ALGORITHMS = [
    AlgorithmConfig(importance=importance, normalize=normalize, kl_coef=0.1)
    for importance in ("token", "sequence")
    for normalize in ("response", "group", "constant")
]


def loss_and_grad(logprobs, **kwargs):
    lp = torch.tensor(logprobs, dtype=kwargs.pop("dtype", torch.float64), requires_grad=True)
    algorithm = kwargs.pop("algorithm", GRPO)
    terms = BranchTerms(**{"advantage": 1.0, "denominator": 1.0} | kwargs)
    branch = branch_loss(lp, terms, algorithm)
    branch.loss.backward()
    return replace(branch, loss=branch.loss.detach()), lp.grad


# ---- advantages


def test_advantages_by_hand():
    half = math.sqrt(0.5)
    assert advantages([1.0, 0.0]) == pytest.approx([0.5 / (half + 1e-6), -0.5 / (half + 1e-6)], rel=1e-15)
    assert advantages([1.0, 0.0], scale=False) == [0.5, -0.5]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_advantages_have_mean_zero_and_order_of_the_rewards(rewards):
    values = advantages(rewards)
    assert all(math.isfinite(value) for value in values)
    assert abs(sum(values)) < 1e-6
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert values[best] == max(values)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_advantages_against_the_statistics_module(rewards):
    std = statistics.stdev(rewards)
    assume(std > 1e-3)
    mean = statistics.fmean(rewards)
    assert advantages(rewards) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("reward", [0.1, 0.0, 1 / 3, 1e149, -7e-310])
@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_give_exact_zeros(reward, count, scale):
    assert advantages([reward] * count, scale) == [0.0] * count


@pytest.mark.parametrize("rewards", [[], [1.0], [math.nan, 1.0], [1.0, math.nan], [math.inf, 0.0], [1e200, 0.0]])
def test_advantages_refuse(rewards):
    with pytest.raises(ValueError, match="reward"):
        advantages(rewards)


# ---- denominators


def test_denominators_by_hand():
    group = Group([1], [[1], [1, 2, 3]], [1, 0], loss_masks=[[1], [1, 0, 1]])
    assert denominators(group, GRPO, 10) == [2.0, 4.0]
    assert denominators(group, replace(GRPO, normalize="group"), 10) == [3.0, 3.0]
    assert denominators(group, replace(GRPO, normalize="constant"), 10) == [20.0, 20.0]
    unmasked = Group([1], [[1], [1, 2, 3]], [1, 0])
    assert denominators(unmasked, GRPO, 10) == [2.0, 6.0]


# ---- the loss of a branch


def test_on_policy_value_and_gradient_by_hand():
    branch, grad = loss_and_grad([-1.0, -2.0, -3.0], advantage=0.5, denominator=6.0)
    assert float(branch.loss) == pytest.approx(-0.5 * 3 / 6)
    assert grad.tolist() == pytest.approx([-0.5 / 6] * 3)
    assert int(branch.statistics.tokens) == 3
    assert int(branch.statistics.clipped) == 0


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "passes"),
    [
        (1.0, 1.5, 1.3, False),  # clipped above
        (1.0, 1.25, 1.25, True),
        (1.0, 0.5, 0.5, True),  # a good token that became less likely may come back
        (-1.0, 1.5, -1.5, True),
        (-1.0, 0.5, -0.9, False),  # clipped below
        (-1.0, 0.95, -0.95, True),
        (0.0, 1.5, 0.0, False),
    ],
)
def test_clip_side_by_hand(advantage, ratio, value, passes):
    old = torch.tensor([-2.0], dtype=torch.float64)
    algorithm = replace(GRPO, clip_low=0.1, clip_high=0.3)
    start = [-2.0 + math.log(ratio)]
    branch, grad = loss_and_grad(start, advantage=advantage, algorithm=algorithm, old_logprobs=old)
    assert float(branch.loss) == pytest.approx(-value)
    assert (float(grad) != 0) == passes
    assert int(branch.statistics.clipped) == int(not passes and advantage != 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.importance}-{a.normalize}")
def test_gradient_is_that_of_finite_differences(algorithm):
    rng = torch.Generator().manual_seed(1)
    old, reference, start = (torch.randn(5, generator=rng, dtype=torch.float64) * 0.3 - 3 for _ in range(3))
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)

    def loss(lp):
        kwargs = {"old_logprobs": old, "reference_logprobs": reference, "mask": mask}
        return branch_loss(lp, BranchTerms(advantage=-0.7, denominator=3.0, **kwargs), algorithm).loss

    assert torch.autograd.gradcheck(loss, start.requires_grad_())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.importance}-{a.normalize}")
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("gap", [1e3, -1e3, 1e30, -1e30])
def test_extreme_ratios_stay_finite(algorithm, advantage, dtype, gap):
    """A ratio of exp(1000) times an advantage of 0, or on the losing side of a minimum, would be NaN."""
    old = torch.tensor([-1.0, -1.0 - gap, -1.0])
    for reference in (old, torch.tensor([-1.0, -1.0, -1.0])):
        branch, grad = loss_and_grad(
            [-1.0, -1.0, -1.0],
            dtype=dtype,
            advantage=advantage,
            algorithm=algorithm,
            old_logprobs=old,
            reference_logprobs=reference,
        )
        assert branch.loss.isfinite()
        assert grad.isfinite().all()


def test_ordinary_ratios_are_not_limited():
    """A good deal beyond any clip the value is still the textbook's."""
    branch, _ = loss_and_grad([-1.0], advantage=-1.0, old_logprobs=torch.tensor([-11.0], dtype=torch.float64))
    assert float(branch.loss) == pytest.approx(math.exp(10.0), rel=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.importance}-{a.normalize}")
def test_masked_tokens_change_nothing_whatever_stands_there(algorithm):
    def run(junk):
        return loss_and_grad(
            [-1.0, junk, -2.0],
            algorithm=algorithm,
            old_logprobs=torch.tensor([-1.3, junk, -1.9], dtype=torch.float64),
            reference_logprobs=torch.tensor([-1.1, junk, -2.2], dtype=torch.float64),
            mask=torch.tensor([True, False, True]),
        )

    (clean, clean_grad), (dirty, dirty_grad) = run(-1.0), run(math.nan)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean_grad, dirty_grad)
    assert clean_grad[1] == 0
    assert clean.statistics.means() == dirty.statistics.means()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.importance}-{a.normalize}")
def test_a_response_without_kept_tokens_adds_zero(algorithm):
    group = Group([1], [[1, 2], [3]], [1, 0], loss_masks=[[0, 0], [1]])
    divisor = denominators(group, algorithm, 4)[0]
    branch, grad = loss_and_grad(
        [-1.0, -9.0],
        algorithm=algorithm,
        denominator=divisor,
        old_logprobs=torch.tensor([-2.0, -2.0]),
        reference_logprobs=torch.tensor([-3.0, -3.0]),
        mask=group.loss_masks[0],
    )
    assert float(branch.loss) == 0
    assert grad.tolist() == [0, 0]
    assert branch.statistics.means() == {"clip_fraction": 0.0, "kl": 0.0}


def test_a_sequence_has_one_ratio_the_geometric_mean():
    old = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    algorithm = replace(GRPO, importance="sequence", clip_low=0.9, clip_high=9.0)
    branch, grad = loss_and_grad([-1.0 + 0.8, -1.0 - 0.4], algorithm=algorithm, old_logprobs=old, denominator=2.0)
    assert float(branch.loss) == pytest.approx(-math.exp(0.2), rel=1e-14)
    assert float(grad[0]) == float(grad[1]) == pytest.approx(-math.exp(0.2) / 2, rel=1e-14)


def test_kl_is_k3_and_never_negative():
    reference = torch.tensor([-1.0, -2.5, -2.0 + 1e-9], dtype=torch.float64)
    algorithm = replace(GRPO, kl_coef=0.5)
    branch, _ = loss_and_grad([-1.0, -2.0, -2.0], advantage=0.0, algorithm=algorithm, reference_logprobs=reference)
    expected = math.exp(-0.5) - 1 + 0.5 + 0.5e-18
    assert float(branch.statistics.kl) == pytest.approx(expected, rel=1e-12)
    assert float(branch.loss) == pytest.approx(0.5 * expected, rel=1e-12)
    near = torch.tensor([-2.0 + 1e-9], dtype=torch.float64)
    tiny, _ = loss_and_grad([-2.0], algorithm=algorithm, reference_logprobs=near)
    assert float(tiny.statistics.kl) == pytest.approx(0.5e-18, rel=1e-6)  # exp(d) - d - 1 would give 0


def test_kl_without_a_reference_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs .* reference"):
        loss_and_grad([-1.0], algorithm=replace(GRPO, kl_coef=0.1))


def test_a_reference_without_kl_coef_is_measured_only():
    reference = torch.tensor([-1.5], dtype=torch.float64)
    with_it, grad = loss_and_grad([-1.0], reference_logprobs=reference)
    without, plain = loss_and_grad([-1.0])
    assert torch.equal(with_it.loss, without.loss)
    assert torch.equal(grad, plain)
    assert float(with_it.statistics.kl) > 0
    assert without.statistics.means()["kl"] is None


def test_statistics_add_up():
    old = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    first, _ = loss_and_grad([-1.0, -1.0], old_logprobs=old, reference_logprobs=old)
    second, _ = loss_and_grad([-1.0], reference_logprobs=old[1:])
    total = first.statistics + second.statistics
    kl = float(first.statistics.kl + second.statistics.kl)
    assert total.means() == {"clip_fraction": pytest.approx(1 / 3), "kl": pytest.approx(kl / 3)}
    assert not any(tensor.requires_grad for tensor in (total.tokens, total.clipped, total.kl))


@pytest.mark.parametrize(
    ("given_dtype", "inner"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_inner_precision_is_at_least_float32(given_dtype, inner):
    branch, grad = loss_and_grad([-1.0, -2.0], dtype=given_dtype, old_logprobs=torch.tensor([-1.0, -2.0]).double())
    assert branch.loss.dtype == inner
    assert grad.dtype == given_dtype


# ---- corrections, truncation


@pytest.mark.parametrize(("shift", "weight"), [(0.009, 1.0), (-0.009, 1.0), (0.011, 0.0), (-0.011, 0.0)])
def test_the_geometric_mask_is_of_the_mean_log_ratio(shift, weight):
    old, keep = torch.tensor([-1.0, -2.0, -3.0, -4.0]).double(), torch.tensor([True, True, True, False])
    uneven = torch.tensor([3.0, -2.0, -1.0, math.nan]).double()  # the mean is 0, no ratio is near 1
    algorithm = replace(GRPO, correction="geometric_mask", old_logprobs="score")
    assert correction_weights(old, old - shift - uneven, keep, algorithm).tolist() == [weight] * 4


def test_a_correction_without_the_samplers_logprobs_is_refused():
    algorithm = replace(GRPO, correction="icepop", old_logprobs="score")
    with pytest.raises(ValueError, match=r"correction=icepop needs the log-probabilities of the sampler"):
        loss_and_grad([-1.0], algorithm=algorithm)
    group = Group([1], [[1], [2]], [1, 0], id="a")
    with pytest.raises(ValueError, match=r"group 'a' has no log-probabilities of its sampler"):
        branch_losses(group, algorithm, 4, None, None)


@pytest.mark.parametrize("length", range(0, 140, 7))
def test_the_overlong_penalty_is_equation_13(length):
    longest, buffer = 100, 40
    wanted = 0 if length <= 60 else (60 - length) / 40 if length <= 100 else -1
    assert overlong_penalty(length, longest, buffer) == wanted


@pytest.mark.parametrize(("length", "longest", "buffer"), [(1, 10, 0), (1, 10, 11), (-1, 10, 5)])
def test_an_overlong_penalty_of_no_sense_is_refused(length, longest, buffer):
    with pytest.raises(ValueError, match="need 0 < buffer <= longest"):
        overlong_penalty(length, longest, buffer)


def test_truncated_responses_leave_the_loss():
    masks = [torch.tensor([True, False]), torch.tensor([True])]
    assert [mask.tolist() for mask in mask_truncated(masks, [True, False])] == [[False, False], [True]]
    assert masks[0].any()
    with pytest.raises(ValueError, match="1 truncated flags for 2 responses"):
        mask_truncated(masks, [True])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_rewards": "bach"}, "did you mean batch"),
        ({"clip_dual": 1.1}, r"clip_dual=1.1 must be above 1 \+ clip_high=1.2"),
        ({"clip_dual": 3.0, "loss": "cispo"}, "would not be used"),
        ({"correction": "icepop"}, "use algorithm.old_logprobs=score"),
        ({"correction_high": 2.0}, "need a correction"),
        ({"correction": "icepop", "old_logprobs": "score", "correction_low": math.nan}, "must be at least 0"),
    ],
)
def test_an_algorithm_of_no_sense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**changes)


def test_scale_rewards_takes_the_booleans_it_always_took():
    assert AlgorithmConfig(scale_rewards=True).scale_rewards == "group"
    assert AlgorithmConfig(scale_rewards=False).scale_rewards == "none"
    assert advantages([1.0, 0.0, 0.0], True) == advantages([1.0, 0.0, 0.0], "group")
    assert advantages([1.0, 0.0, 0.0], False) == advantages([1.0, 0.0, 0.0], "none")
