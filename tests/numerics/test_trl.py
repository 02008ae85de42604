"""The loss and the advantages against TRL's own code, value and gradient.

TRL's ``GRPOTrainer._compute_loss`` runs on an object made without its ``__init__`` (which wants a model and data), with
the function that yields log-probabilities replaced. Definitions that differ on purpose are named in ``longstraw.grpo``.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longstraw.config import AlgorithmConfig, option
from longstraw.group import Group, StepTotals
from longstraw.grpo import (
    ADVANTAGE_EPS,
    BranchTerms,
    Statistics,
    advantages,
    branch_loss,
    branch_losses,
    correction_weights,
    denominators,
)

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL cannot be imported", exc_type=ImportError)
rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer", reason="TRL cannot be imported", exc_type=ImportError)

RESPONSE_LENGTH = 12  # of the config; no response of the batch is that long
LENGTHS = (1, 9, 5, 7)
BAR = 1e-13  # relative, float64
PRESETS = {name: option("algorithm", name) for name in ("dapo", "cispo", "rloo")}
CORRECTIONS = {  # ours, TRL's attributes, and what must NOT agree with them
    "token_tis": ({}, ("token_truncate", None, 2.0), {"correction_high": 1.2}),
    "icepop": ({"correction_low": 0.8, "correction_high": 1.5}, ("token_mask", 0.8, 1.5), {"correction": "token_tis"}),
    "sequence_mask": ({}, ("sequence_mask", None, 3.0), {"correction_high": 1e5}),
}
CASES = {  # ours, TRL's attributes, and what must NOT agree with them
    "grpo": (AlgorithmConfig(), {"loss_type": "grpo"}, {"normalize": "group"}),
    "asymmetric": (
        AlgorithmConfig(clip_low=0.1, clip_high=0.3),
        {"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.3},
        {"clip_low": 0.3, "clip_high": 0.1},
    ),
    "kl": (AlgorithmConfig(kl_coef=0.05), {"loss_type": "grpo", "beta": 0.05}, {"kl_coef": 0.0}),
    "dapo": (AlgorithmConfig(normalize="group"), {"loss_type": "dapo"}, {"normalize": "response"}),
    "bnpo": (AlgorithmConfig(normalize="group"), {"loss_type": "bnpo"}, {"normalize": "constant"}),
    "dr_grpo": (AlgorithmConfig(normalize="constant"), {"loss_type": "dr_grpo"}, {"normalize": "response"}),
    "gspo": (
        AlgorithmConfig(importance="sequence", clip_low=0.03, clip_high=0.04),
        {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"importance": "token"},
    ),
    "dual_clip": (
        AlgorithmConfig(clip_dual=1.25),
        {"args": SimpleNamespace(delta=1.25, use_bias_correction_kl=False, steps_per_generation=1)},
        {"clip_dual": None},
    ),
    "cispo": (
        AlgorithmConfig(loss="cispo", normalize="step", clip_low=1.0, clip_high=0.3, kl_coef=0.1),
        {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.1},
        {"loss": "clip"},
    ),
    "dapo_preset": (
        AlgorithmConfig(**PRESETS["dapo"]),
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"clip_high": 0.2},
    ),
    "gspo_kl_group": (
        AlgorithmConfig(importance="sequence", normalize="group", kl_coef=0.3),
        {"importance_sampling_level": "sequence", "loss_type": "dapo", "beta": 0.3},
        {"normalize": "response"},
    ),
}


def make_batch(masked: bool) -> SimpleNamespace:
    """Ragged log-probabilities, off policy far enough that all clips act, on both signs of the advantage."""
    rng = torch.Generator().manual_seed(3)

    def draw(scale):
        return [scale * torch.randn(n, generator=rng, dtype=torch.float64) for n in LENGTHS]

    logprobs = [-3 - x.abs() for x in draw(1.0)]
    masks = [torch.ones(n, dtype=torch.bool) for n in LENGTHS]
    if masked:  # a tool's output in the middle, and a response of which the policy wrote nothing
        masks[1][5:8] = False
        masks[2][:] = False
    return SimpleNamespace(
        logprobs=logprobs,
        old=[lp + x for lp, x in zip(logprobs, draw(0.4), strict=True)],
        reference=[lp + x for lp, x in zip(logprobs, draw(0.3), strict=True)],
        masks=masks,
        advantages=advantages([1.0, 0.0, 0.25, 1.0]),
    )


def ours(algorithm, batch, *, old=True):
    """Return the group's loss, its gradient by response, and the statistics, branch by branch."""
    group = Group([1], [range(n) for n in LENGTHS], [0.0] * len(LENGTHS), loss_masks=batch.masks)
    loss, grads, statistics = 0.0, [], Statistics(torch.tensor(0), torch.tensor(0), torch.tensor(0.0))
    for i, divisor in enumerate(denominators(group, algorithm, RESPONSE_LENGTH)):
        lp = batch.logprobs[i].clone().requires_grad_()
        branch = branch_loss(
            lp,
            BranchTerms(
                advantage=batch.advantages[i],
                denominator=divisor,
                old_logprobs=batch.old[i] if old else None,
                reference_logprobs=batch.reference[i] if algorithm.kl_coef else None,
                mask=batch.masks[i],
            ),
            algorithm,
        )
        branch.loss.backward()
        loss += float(branch.loss.detach())
        grads.append(lp.grad)
        statistics += branch.statistics
    return loss, torch.cat(grads), statistics


def trl(attributes, batch, *, old=True):
    """Return TRL's loss, its gradient in the same order, and the metrics it logged."""

    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    lp = pad(batch.logprobs).requires_grad_()
    trainer = make_trainer(attributes, lp)
    mask = pad(batch.masks).long()
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": pad([torch.ones(n, dtype=torch.long) for n in LENGTHS]),
        "tool_mask": mask,
        "advantages": torch.tensor(batch.advantages, dtype=torch.float64),
        "ref_per_token_logps": pad(batch.reference),
        "num_items_in_batch": mask.sum(),
    }
    if old:
        inputs["old_per_token_logps"] = pad(batch.old)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    grad = torch.cat([row[:n] for row, n in zip(lp.grad, LENGTHS, strict=True)])
    return float(loss.detach()), grad, {key: values[0] for key, values in trainer._metrics["train"].items()}


def make_trainer(attributes, logprobs):
    trainer = object.__new__(grpo_trainer.GRPOTrainer)
    settings = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": RESPONSE_LENGTH,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }
    for name, value in (settings | attributes).items():
        setattr(trainer, name, value)
    return trainer


def difference(mine, theirs):
    """Return the larger of the relative errors of loss and gradient."""
    loss = abs(mine[0] - theirs[0]) / abs(theirs[0])
    return max(loss, float((mine[1] - theirs[1]).norm() / theirs[1].norm()))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, masked):
    algorithm, attributes, wrong = CASES[name]
    batch = make_batch(masked)
    theirs = trl(attributes, batch)
    assert difference(ours(algorithm, batch), theirs) < BAR
    assert difference(ours(replace(algorithm, **wrong), batch), theirs) > 1e-2


@pytest.mark.parametrize("masked", [False, True])
def test_statistics_are_those_of_trl(masked):
    algorithm = AlgorithmConfig(clip_low=0.1, clip_high=0.3, kl_coef=0.05)
    attributes = {"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.3, "beta": 0.05}
    batch = make_batch(masked)
    metrics = trl(attributes, batch)[2]
    means = ours(algorithm, batch)[2].means()
    assert means["kl"] == pytest.approx(metrics["kl"], rel=1e-6)
    assert means["clip_fraction"] == pytest.approx(metrics["clip_ratio/region_mean"], rel=1e-6)
    assert min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0  # both sides were at work
    wide = ours(replace(algorithm, clip_low=0.15, clip_high=1.0), batch)[2].means()
    assert wide["clip_fraction"] != pytest.approx(metrics["clip_ratio/region_mean"], rel=1e-2)


def test_on_policy_gradient_is_that_of_trl():
    batch = make_batch(masked=True)
    theirs = trl({"loss_type": "dr_grpo"}, batch, old=False)
    mine = ours(AlgorithmConfig(normalize="constant"), batch, old=False)
    assert difference(mine, theirs) < BAR
    assert difference(ours(AlgorithmConfig(normalize="constant"), batch, old=True), theirs) > 1e-2


def test_rloo_loss_and_gradient_are_those_of_trl():
    batch = make_batch(masked=False)
    lp = torch.nn.utils.rnn.pad_sequence(batch.logprobs, batch_first=True).requires_grad_()
    trainer = object.__new__(rloo_trainer.RLOOTrainer)
    trainer.__dict__.update(make_trainer({}, lp).__dict__)
    mask = torch.nn.utils.rnn.pad_sequence(batch.masks, batch_first=True).long()
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "old_logps": torch.stack([old.sum() for old in batch.old]),
        "advantages": torch.tensor(batch.advantages, dtype=torch.float64),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    theirs = float(loss.detach()), torch.cat([row[:n] for row, n in zip(lp.grad, LENGTHS, strict=True)])
    algorithm = AlgorithmConfig(**PRESETS["rloo"])
    assert difference(ours(algorithm, batch), theirs) < BAR
    assert difference(ours(replace(algorithm, importance="sequence"), batch), theirs) > 1e-2


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.3, 0.3, 0.7, 1e-3, -2.0], [5.0, 5.0, 5.0]])
def test_rloo_advantages_are_against_the_mean_of_the_others(rewards):
    wanted = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    mine = advantages(rewards, "none", baseline="others")
    assert mine == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    if any(wanted):
        assert advantages(rewards, "none") != pytest.approx(wanted, rel=1e-3)


def test_a_step_of_two_groups_has_the_loss_of_trl_over_both():
    """TRL's batch holds both groups; here each branch is alone and knows of the others by the step's totals only."""
    halves, rewards = (slice(0, 2), slice(2, 4)), [1.0, 0.0, 0.25, 1.0]
    for loss_type, normalize in (("dapo", "step"), ("grpo", "response"), ("dr_grpo", "constant")):
        batch = make_batch(masked=True)
        batch.advantages = [a for h in halves for a in advantages(rewards[h], "batch", batch=rewards)]
        theirs = trl({"loss_type": loss_type}, batch)[0]
        groups = [Group([1], [range(n) for n in LENGTHS[h]], rewards[h], batch.old[h], batch.masks[h]) for h in halves]

        def total(algorithm, groups=groups, batch=batch):
            done = 0.0
            for group, half in zip(groups, halves, strict=True):
                parts = branch_losses(group, algorithm, RESPONSE_LENGTH, group.old_logprobs, None)
                done += sum(float(part(lp).loss) for part, lp in zip(parts, batch.logprobs[half], strict=True))
            return done

        algorithm = AlgorithmConfig(normalize=normalize, scale_rewards="batch")
        assert total(algorithm) != pytest.approx(theirs, rel=1e-3)  # each group as if it were alone
        for group in groups:
            group.step = StepTotals.of(groups)
        assert total(algorithm) == pytest.approx(theirs, rel=BAR)
        assert total(replace(algorithm, scale_rewards="group")) != pytest.approx(theirs, rel=1e-3)


def trl_correction(mode, low, high, old, sampler, mask):
    """Run the statement of TRL's method that makes the importance sampling ratio of responses from vLLM."""
    source = textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions))
    wanted = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and "per_token_logps_diff =" in "\n".join(map(ast.unparse, node.body[:3]))
    ]
    assert len(wanted) == 1, "TRL's method looks different from when this test was written"
    scope = {
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
        "completion_mask": mask.long()[None],
        "tool_mask": None,
        "old_per_token_logps": old[None],
        "sampling_per_token_logps": sampler[None],
        "torch": torch,
        "math": __import__("math"),
    }
    exec(ast.unparse(wanted[0]), scope)
    return scope["vllm_importance_sampling_ratio"][0].expand_as(old)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_are_those_of_trl(name):
    given, attributes, wrong = CORRECTIONS[name]
    algorithm = AlgorithmConfig(correction=name, old_logprobs="score", **given)
    off = replace(algorithm, **wrong)
    rng, differed, weights = torch.Generator().manual_seed(5), False, set()
    for scale in (0.1, 0.5, 1.0, 2.0) * 8:
        old = -torch.rand(9, generator=rng, dtype=torch.float64)
        sampler = old + scale * torch.randn(9, generator=rng, dtype=torch.float64)
        keep = torch.rand(9, generator=rng) > 0.2
        theirs = trl_correction(*attributes, old, sampler, keep)[keep]
        mine = correction_weights(old, torch.where(keep, sampler, torch.nan), keep, algorithm)[keep]
        torch.testing.assert_close(mine, theirs, rtol=BAR, atol=0)
        differed |= not torch.allclose(correction_weights(old, sampler, keep, off)[keep], theirs, rtol=1e-3)
        weights |= set(mine.tolist())
    assert differed
    assert 0 in weights or 2.0 in weights  # the bound was at work


def test_a_correction_scales_the_loss_of_each_token_and_not_its_kl():
    batch, i = make_batch(masked=False), 1
    algorithm = AlgorithmConfig(correction="token_tis", old_logprobs="score", kl_coef=0.05)
    lp, terms = batch.logprobs[i], {"old_logprobs": batch.old[i], "reference_logprobs": batch.reference[i]}
    corrected = branch_loss(lp, BranchTerms(0.7, 1.0, **terms, sampler_logprobs=batch.old[i] - 0.4), algorithm).loss
    plain, no_kl = replace(algorithm, correction="none"), replace(algorithm, correction="none", kl_coef=0.0)
    policy = branch_loss(lp, BranchTerms(0.7, 1.0, **terms), no_kl).loss
    kl = branch_loss(lp, BranchTerms(0.7, 1.0, **terms), plain).loss - policy
    assert float(corrected) == pytest.approx(float(torch.tensor(0.4).double().exp() * policy + kl), rel=1e-6)
    assert float(corrected) != pytest.approx(float(policy + kl), rel=1e-2)


def trl_advantages(rewards, scale, constant):
    """Run the statement of TRL's method that turns rewards into advantages, with ``constant`` for its 1e-4."""
    source = textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions))
    statements = ast.parse(source).body[0].body
    wanted = [node for node in statements if "multi_objective_aggregation" in ast.unparse(node).split("\n")[0]]
    assert len(wanted) == 1, "TRL's method looks different from when this test was written"
    code = ast.unparse(wanted[0])
    assert "std_rewards + 0.0001" in code
    rewards = torch.tensor(rewards, dtype=torch.float64)
    scope = {
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1),
            scale_rewards="group" if scale else "none",
        ),
        "rewards_per_func": rewards[:, None],
        "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool),
        "num_generations": len(rewards),
        "device": "cpu",
        "torch": torch,
        "nanstd": grpo_trainer.nanstd,
    }
    exec(code.replace("std_rewards + 0.0001", f"std_rewards + {constant!r}"), scope)
    return scope["advantages"]


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.3, 0.3, 0.7, 1e-3, -2.0], [5.0, 5.0, 5.0, 5.5]])
def test_advantages_are_those_of_trl_but_for_the_constant(rewards, scale):
    mine = torch.tensor(advantages(rewards, scale), dtype=torch.float64)
    # TRL forms n / (n - 1) in float32, hence no tighter than 1e-7
    torch.testing.assert_close(mine, trl_advantages(rewards, scale, ADVANTAGE_EPS), rtol=1e-7, atol=1e-15)
    assert not torch.allclose(mine, trl_advantages(rewards, not scale, ADVANTAGE_EPS), rtol=1e-3)
    if scale:  # the one difference: 1e-6 against TRL's 1e-4
        assert not torch.allclose(mine, trl_advantages(rewards, scale, 1e-4), rtol=1e-6)
