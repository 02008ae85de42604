"""What a step leaves alone, how much it evaluates, and what it refuses."""

import functools
import math

import pytest
import torch
from helpers import make_group, take_gradients, tiny_model, worst

from longstraw.config import AlgorithmConfig
from longstraw.group import Group
from longstraw.models import build_model
from longstraw.state import Appended
from longstraw.step import PreparedGroup, StepOptions, grpo_step, prefill, prompt_backward, replay, score


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def held(retained):
    return [(kind, x.clone()) for s in retained.states for kind, x in s.held() if kind in ("retained", "snapshots")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fifty_replays_of_one_branch_are_bitwise_equal(dtype):
    model = tiny_model(dtype=dtype, num_hidden_layers=2)
    group = make_group(model, 200, (7, 7))
    group = Group(group.prompt, [group.responses[0]] * 50, [float(i % 2) for i in range(50)])
    retained = prefill(model, group.prompt, chunk=64, grad_from=0)
    before = held(retained)
    scored = score(model, retained, group.responses[:2])
    _, logprobs, *_ = replay(model, PreparedGroup(group, retained), StepOptions(64))
    assert all(torch.equal(lp, logprobs[0]) for lp in [*logprobs, *scored])
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(before, held(retained), strict=True))
    assert prompt_backward(model, retained) == 0.0


@pytest.mark.parametrize("name", ["qwen3_6_tiny", "glm_5_2_tiny"])
def test_a_consumed_prompt_is_refused(name):
    """Of rows that are appended the gradient is still there: a second step on them would count it twice."""
    model, group = build_model(name), Group(range(100), [[1, 2], [3]], [0.0, 1.0])
    retained = prefill(model, group.prompt, chunk=64, grad_from=0)
    again = (
        lambda: replay(model, PreparedGroup(group, retained), StepOptions(64)),
        lambda: score(model, retained, group.responses),
        lambda: prompt_backward(model, retained),
    )
    for use in again:
        use()
    for use in again:
        with pytest.raises(ValueError, match="prefill the prompt again"):
            use()


def test_chunk_changes_no_retained_row_beyond_rounding(model):
    prompt = make_group(model, 300, (1, 1)).prompt
    states = [prefill(model, prompt, chunk=chunk).states for chunk in (64, 1024)]
    for one, other in zip(*states, strict=True):
        for (_, x), (_, y) in zip(one.held(), other.held(), strict=True):
            assert (x - y).norm() < 1e-12 * y.norm()


CASES = {
    "exact": {},
    "detached": {"prompt_grad": "detached"},
    "window": {"prompt_grad_window": 70},
    "scored": {"algorithm": AlgorithmConfig(old_logprobs="score")},
    "kl": {"algorithm": AlgorithmConfig(kl_coef=0.1)},
}


@pytest.mark.parametrize("name", CASES)
def test_no_hidden_pass(name, model, monkeypatch):
    """Tokens that enter the embedding are what the result counts: the prompt once, every response once."""
    reference = tiny_model(seed=1) if name == "kl" else None
    counts = {}

    def counted(tokens, weight, chunk, context):
        counts[context] = counts.get(context, 0) + len(tokens)
        return type(context).embed(context, tokens, weight, chunk)

    for context in (m.ops.context for m in (model, reference) if m):
        monkeypatch.setattr(context, "embed", functools.partial(counted, context=context))
    group = make_group(model, 200, (5, 1, 70))
    counts.clear()
    result = grpo_step(model, group, chunk=64, reference=reference, **CASES[name])
    take_gradients(model)
    assert result.prefilled_positions == 199
    assert result.replayed_positions == 76
    assert result.recomputed_positions == {"detached": 0, "window": 71}.get(name, 199)
    assert result.scored_positions == {"scored": 76, "kl": 199 + 76}.get(name, 0)
    counted = (
        result.prefilled_positions,
        result.replayed_positions,
        result.recomputed_positions,
        result.scored_positions,
    )
    assert sum(counts.values()) == sum(counted)


def test_blocks_run_once_more_in_a_backward_and_no_oftener(model):
    """Checkpointing evaluates the blocks of what has a graph a second time: 2 x (replayed + recomputed) + prefilled."""
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    group = make_group(model, 200, (5, 1))
    seen.clear()
    grpo_step(model, group, chunk=64)
    handle.remove()
    take_gradients(model)
    assert sum(seen) == 199 + 2 * (6 + 199)


@pytest.mark.parametrize("mode", ["exact", "detached"])
def test_equal_rewards_give_zeros(mode, model):
    group = make_group(model, 100, (5, 1, 3))
    group = Group(group.prompt, group.responses, [0.1] * 3, old_logprobs=group.old_logprobs)
    result = grpo_step(model, group, chunk=64, prompt_grad=mode)
    assert result.loss.item() == 0
    assert all((gradient == 0).all() for gradient in take_gradients(model).values())
    unequal = Group(group.prompt, group.responses, [0.1, 0.1, 0.2])
    grpo_step(model, unequal, chunk=64, prompt_grad=mode)
    assert all(gradient.abs().sum() > 0 for gradient in take_gradients(model).values())


@pytest.mark.parametrize("where", ["prompt", "response 1"])
def test_token_beyond_the_vocabulary_is_refused(where, model):
    prompt, responses = [1, 2, 3], [[1], [2]]
    (prompt if where == "prompt" else responses[1])[0] = 256
    with pytest.raises(ValueError, match=f"{where}: token id 256 is not below the vocabulary size 256"):
        grpo_step(model, Group(prompt, responses, [0.0, 1.0]), chunk=64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk": 100}, "chunk=100 must be a multiple of 64"),
        ({"chunk": 0}, "chunk=0 must be a multiple of 64"),
        ({"chunk": -64}, "chunk=-64 must be a multiple of 64"),
        ({"prompt_grad": "exakt"}, "did you mean exact"),
        ({"prompt_grad_window": -1}, "prompt_grad_window=-1 must be 0 or more"),
        ({"algorithm": AlgorithmConfig(kl_coef=0.1)}, "needs a reference model"),
        ({"response_length": 0}, "response_length=0 must be at least 1"),
        ({"response_length": -1, "algorithm": AlgorithmConfig(normalize="constant")}, "response_length=-1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, model):
    group = Group([1, 2, 3], [[1], [2]], [0.0, 1.0])
    with pytest.raises(ValueError, match=message):
        grpo_step(model, group, **{"chunk": 64, **arguments})


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("prompt_grad", ["detached", "exact"])
def test_a_step_without_autograd_or_parameters_to_train_says_so(off, prompt_grad):
    model = tiny_model(num_hidden_layers=2)
    group = make_group(model, 100, (5, 2))
    with off(), pytest.raises(ValueError, match="outside torch"):
        grpo_step(model, group, chunk=64, prompt_grad=prompt_grad)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        grpo_step(model.requires_grad_(False), group, chunk=64, prompt_grad=prompt_grad)


def test_a_group_from_a_rollout_in_inference_mode_serves():
    model = tiny_model(num_hidden_layers=2)
    group = make_group(model, 100, (5, 2))
    with torch.inference_mode():
        tensors = [ids.clone() for ids in (group.prompt, *group.responses)]
        masks = [torch.ones(len(ids), dtype=torch.bool) for ids in tensors[1:]]
        made = Group(tensors[0], tensors[1:], group.rewards, loss_masks=masks)
    assert made.prompt.is_inference()
    losses = [grpo_step(model, g, chunk=64).loss for g in (made, Group(group.prompt, group.responses, group.rewards))]
    assert torch.equal(*losses)


def test_broken_weights_give_a_loss_that_says_so():
    model = tiny_model(num_hidden_layers=2)
    group = make_group(model, 100, (5, 2))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    result = grpo_step(model, group, chunk=64)
    assert result.loss.isnan()
    assert result.recompute_difference != 0.0  # NaN is not "the same"


@pytest.mark.parametrize("layer", range(4))
def test_training_one_layer_gives_its_part_of_the_whole(layer, model):
    """Layers below the first trained one have no gradient to carry, those above only carry it, as with adapters."""
    group = make_group(model, 150, (5, 2))
    grpo_step(model, group, chunk=64)
    target = take_gradients(model)
    trained = {name for name, _ in model.named_parameters() if name.startswith(f"model.layers.{layer}.")}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    grpo_step(model, group, chunk=64)
    model.requires_grad_(True)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    distance, name = worst(gradients, {name: target[name] for name in trained})
    assert distance < 1e-12, name


def test_rows_that_nobody_wrote_are_never_read(model, monkeypatch):
    """Buffers come unset; filled with NaN they change nothing."""
    group = make_group(model, 150, (5, 2))
    clean = grpo_step(model, group, chunk=64)
    target = take_gradients(model)
    real = Appended.__init__

    def poisoned(self, *args, **kwargs):
        real(self, *args, **kwargs)
        for rows in self._rows.values():
            rows.fill_(math.nan)

    monkeypatch.setattr(Appended, "__init__", poisoned)
    again = grpo_step(model, group, chunk=64)
    assert torch.equal(again.loss, clean.loss)
    assert all(torch.equal(gradient, target[name]) for name, gradient in take_gradients(model).items())
