"""GLM-5.2 against plain autograd over whole sequences in float64, and against itself cut in other places."""

from unittest import mock

import pytest
import torch
from glm_helpers import FROZEN, glm_gradients, glm_model, glm_oracle, rows_chosen
from helpers import furthest, make_group, relative, whole, worst
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.config import gradient_start
from longstraw.models import build_model
from longstraw.models.decoder import Decoder
from longstraw.models.glm_5_2 import Glm52Block
from longstraw.ops.latent import reference
from longstraw.step import grpo_step, prefill

BAR = 1e-12
CASES = [
    (1, (1, 5), 64),
    (2, (1, 3), 64),
    (64, (5, 1, 7), 128),
    (193, (9, 30), 64),
    (257, (2, 33), 128),
    (321, (20, 9, 3), 192),
]


@pytest.mark.parametrize(("positions", "lengths", "chunk"), CASES)
def test_exact_is_plain_autograd(positions, lengths, chunk):
    model = glm_model()
    group = make_group(model, positions, lengths, masked=positions == 257)
    loss, logprobs = glm_oracle(model, group)
    target = glm_gradients(model)
    result = grpo_step(model, group, chunk=chunk)
    distance, name = worst(glm_gradients(model), target)
    assert distance < BAR, name
    assert result.loss.item() == pytest.approx(loss.item(), rel=BAR, abs=BAR)
    assert furthest(result.logprobs, logprobs) < BAR
    assert result.recompute_difference == (0.0 if positions > 1 else None)


def test_detached_misses_the_prompt():
    model = glm_model()
    group = make_group(model, 193, (9, 30))
    glm_oracle(model, group)
    target = glm_gradients(model)
    result = grpo_step(model, group, chunk=64, prompt_grad="detached")
    assert relative(whole(glm_gradients(model)), whole(target)) > 1e-2
    assert result.recomputed_positions == 0


@pytest.mark.parametrize("window", [1, 64, 130])
def test_window_is_a_cut_of_the_graph(window):
    model, chunk = glm_model(), 64
    group = make_group(model, 200, (6, 2))
    border = gradient_start(199, chunk, "exact", window)
    glm_oracle(model, group, border=border)
    target = glm_gradients(model)
    grpo_step(model, group, chunk=chunk, prompt_grad_window=window)
    gradients = glm_gradients(model)
    distance, name = worst(gradients, target)
    assert distance < BAR, name
    glm_oracle(model, group, border=border + 64 if border < 128 else 0)
    assert relative(whole(gradients), whole(glm_gradients(model))) > 1e-3


# Choosing rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_cut_chooses_the_same_rows(dtype):
    """Chunks of 64, 128 and 320 and one pass: not one row differs, and hidden states agree to rounding."""
    model = glm_model(dtype=dtype)
    tokens = torch.randint(256, (450,), generator=torch.Generator().manual_seed(1))
    target, hidden = rows_chosen(model, tokens, 450)
    for chunk in (64, 128, 320):
        chosen, other = rows_chosen(model, tokens, chunk)
        differences = sum(a != b for layer in target for a, b in zip(chosen[layer], target[layer], strict=True))
        assert differences == 0
        assert relative(other, hidden) < (1e-5 if dtype == torch.float32 else BAR)
    assert all(len(line) == 32 for layer in target.values() for line in layer[31:])
    assert all(target[0][i] != target[2][i] for i in range(100, 450))


def _chosen_by_topk(scores, rows, count):
    """Break ties as PyTorch's top-k happens to."""
    best = scores.topk(count)
    return best.values, rows.gather(1, best.indices)


def test_an_order_with_ties_depends_on_the_cut():
    """Without the total order the test above fails: scores do tie at 0."""
    model = glm_model(dtype=torch.float32)
    tokens = torch.randint(256, (450,), generator=torch.Generator().manual_seed(1))
    with mock.patch.object(reference, "keep_best", _chosen_by_topk):
        target, chosen = (rows_chosen(model, tokens, chunk)[0] for chunk in (450, 64))
    assert sum(a != b for layer in target for a, b in zip(chosen[layer], target[layer], strict=True)) > 0


def _handed_nothing_new(block, x, past, handed):
    """Hand on the first layer's rows for ever."""
    mixed, update, rows = block.self_attn(x, past, handed)
    return mixed, update, rows if handed is None else handed


def test_rows_of_the_wrong_layer_fail():
    model = glm_model()
    group = make_group(model, 193, (9, 30))
    _, logprobs = glm_oracle(model, group)
    target = glm_gradients(model)
    with mock.patch.object(Glm52Block, "mix", _handed_nothing_new):
        result = grpo_step(model, group, chunk=64)
    assert furthest(result.logprobs, logprobs) > 1e-3
    assert worst(glm_gradients(model), target)[0] > 1e-2


def _unmasked(q, weights, parts, queried, count, *, scale):
    return _BEST(q, weights, parts, queried.clamp(min=int(queried[-1])), count, scale=scale)


_BEST = reference.best_rows


def test_an_unmasked_future_row_fails():
    model = glm_model()
    group = make_group(model, 193, (9, 30))
    _, logprobs = glm_oracle(model, group)
    target = glm_gradients(model)
    with mock.patch.object(reference, "best_rows", _unmasked):
        result = grpo_step(model, group, chunk=64)
    assert furthest(result.logprobs, logprobs) > 1e-3
    assert worst(glm_gradients(model), target)[0] > 1e-2


def test_causal():
    """What comes later changes nothing before it."""
    model = glm_model()
    tokens = torch.randint(256, (150,), generator=torch.Generator().manual_seed(2))
    other = tokens.clone()
    other[100] = (other[100] + 1) % 256
    hidden, changed = (rows_chosen(model, t, 64)[1] for t in (tokens, other))
    assert relative(changed[:100], hidden[:100]) < BAR
    assert float((changed[100:] - hidden[100:]).abs().amax(-1).min()) > 1e-6


# What is learnt, what is retained


def test_indexers_are_frozen_and_their_keys_are_not_learnt():
    model = glm_model()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if FROZEN in name}
    assert len(frozen) == 4 * 5
    group = make_group(model, 100, (3, 4))
    retained = prefill(model, group.prompt, chunk=64, grad_from=0)
    states = retained.states
    states[0].leaves(99, grad=True)
    assert states[0].cotangent(0, 99).keys() == {"latent", "rope_key"}
    assert [set(state.num_bytes()) for state in states] == [
        {"latent", "rope_key", "index_key"} if i in (0, 1, 2, 6) else {"latent", "rope_key"} for i in range(7)
    ]
    assert retained.num_bytes() == {"latent": 7 * 99 * 32 * 8, "rope_key": 7 * 99 * 8 * 8, "index_key": 4 * 99 * 16 * 8}


def test_published_sizes():
    """The count of an independent audit of the published files, and the layer kinds of its config.json."""
    model = build_model("glm_5_2", device="meta")
    assert sum(p.numel() for p in model.parameters()) == 743_377_000_704
    config = model.config
    assert [i for i, kind in enumerate(config.indexer_types) if kind == "full"] == [0, 1, *range(2, 78, 4)]
    assert config.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 75
    row = {name: rows.shape[1:].numel() * 2 for name, rows in model.new_states(1)[0]._rows.items()}
    assert 78 * (row["latent"] + row["rope_key"]) + 21 * row["index_key"] == 95_232


def test_tiny_has_the_published_pattern_and_is_small():
    model = build_model("glm_5_2_tiny")
    assert model.config.indexer_types == ["full"] * 3 + ["shared"] * 3 + ["full"]
    assert model.config.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 4
    assert sum(p.nbytes for p in model.parameters()) < 4e6


def test_the_last_block_computes_its_state_alone():
    model = glm_model()
    last, modules = model.model.layers[-1], []
    handles = [
        m.register_forward_hook(lambda m, *_: modules.append(m)) for m in last.modules() if isinstance(m, nn.Linear)
    ]
    prefill(model, torch.arange(40), chunk=64)
    for handle in handles:
        handle.remove()
    assert modules == [last.self_attn.kv_a_proj_with_mqa, last.self_attn.indexer.wk]


class _LowRank(nn.Module):
    """A linear layer with a low-rank adapter, wrapped as PEFT wraps it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer, self.disable_adapters, self.active_adapters = base, False, ["default"]
        (rows, columns), dtype = base.weight.shape, base.weight.dtype
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, rank, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, rows, bias=False, dtype=dtype)})
        self.scaling = {"default": 0.5}


def test_an_adapter_on_the_absorbed_projection_counts():
    """The step with W and an adapter is the step with W + scaling B A, and the adapter's gradients follow from W's."""
    model, merged = glm_model(), glm_model()
    group = make_group(model, 100, (5, 9))
    attention, plain = (m.model.layers[4].self_attn for m in (model, merged))
    attention.kv_b_proj = wrapped = _LowRank(attention.kv_b_proj)
    a, b = wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight
    before = grpo_step(merged, group, chunk=64)
    merged.zero_grad()
    with torch.no_grad():
        plain.kv_b_proj.weight += 0.5 * b @ a
    result, target = (grpo_step(m, group, chunk=64) for m in (model, merged))
    grad = plain.kv_b_proj.weight.grad
    assert furthest(result.logprobs, target.logprobs) < BAR
    assert furthest(result.logprobs, before.logprobs) > 1e-3
    assert relative(a.grad, 0.5 * b.T @ grad) < BAR
    assert relative(b.grad, 0.5 * grad @ a.T) < BAR
    wrapped.disable_adapters = True
    assert furthest(grpo_step(model, group, chunk=64).logprobs, before.logprobs) < BAR


# Lower precision


def in_both_precisions(model):
    """Return log-probabilities and gradients of one group in bfloat16 and in float32."""
    group, results = make_group(model, 257, (30, 40)), []
    for dtype in (torch.float32, torch.bfloat16):
        result = grpo_step(model.to(dtype), group, chunk=128)
        assert result.recompute_difference == 0.0
        gradients = {name: gradient.float() for name, gradient in glm_gradients(model).items()}
        results.append((torch.cat(result.logprobs), gradients))
    return results


def test_bfloat16_rounds():
    """With every row and every expert chosen only rounding is left: log-probabilities and gradients are compared."""
    model = build_model("glm_5_2_tiny", dtype="float32", index_topk=512, num_experts_per_tok=8)
    (target, gradients), (logprobs, rounded) = in_both_precisions(model)
    assert 0 < float((logprobs - target).abs().max()) < 0.02
    assert relative(whole(rounded), whole(gradients)) < 0.05


def test_bfloat16_chooses_otherwise():
    """With few rows and experts one rounding moves a choice, and that token then differs by any amount.

    So tokens are not compared one by one: log-probabilities on average, against how much they vary from token to token.
    """
    (target, _), (logprobs, rounded) = in_both_precisions(glm_model(dtype=torch.float32))
    assert float((logprobs - target).abs().mean()) < 0.5 * float(target.std())
    assert all(bool(gradient.isfinite().all()) for gradient in rounded.values())


# No tensor grows with the prompt but the state


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor that an operation made, views left out."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not any(result.alias_info for result in func._schema.returns):
            tensors = out if isinstance(out, tuple | list) else (out,)
            self.shapes |= {tuple(tensor.shape) for tensor in tensors if isinstance(tensor, torch.Tensor)}
        return out


def shapes_of_a_step(positions, key_tile):
    model = build_model("glm_5_2_tiny", dtype="float32", num_hidden_layers=5)
    group = make_group(model, positions, (9, 30))
    with Shapes() as seen, mock.patch.object(reference, "KEY_TILE", key_tile):
        grpo_step(model, group, chunk=64)
    return seen.shapes


def grown_by_twice_the_prompt(key_tile):
    """Return the shapes that a step makes only when the prompt has twice the positions, and that have long axes.

    Long: more than the prompt had at first. So many tokens of one expert are left out, and what has a single axis.
    """
    grown = shapes_of_a_step(513, key_tile) - shapes_of_a_step(257, key_tile)
    return {shape for shape in grown if len(shape) > 1 and max(shape) > 257}


def test_only_the_state_grows_with_the_prompt():
    """Rows and their gradient, and beside them single axes: tokens and positions.

    Nothing of prompt x heads x width, prompt x prompt, or queries x index heads x prompt is made.
    """
    latent, rope_key, index_key = 32, 8, 16
    assert grown_by_twice_the_prompt(key_tile=64) == {(512, latent), (512, rope_key), (512, index_key)}


def test_keys_scored_all_at_once_are_seen():
    """The test above can fail: in one tile, queries x index heads x prompt exists."""
    assert {shape for shape in grown_by_twice_the_prompt(key_tile=4096) if shape[-1] == 448}


def test_checkpointing_takes_rows_as_an_input():
    """Each block is evaluated again alone: shared layers choose nothing, so indexers run twice, forward and again."""
    model, calls = glm_model(), []

    def counted(*args, **kwargs):
        calls.append(len(args[0]))
        return _SELECT(*args, **kwargs)

    tokens = torch.arange(40)
    past = [state.leaves(0, grad=False) for state in model.new_states(0)]
    with mock.patch.object(reference, "select_rows", counted):
        assert isinstance(model, Decoder)
        model(tokens, past)[0].sum().backward()
    assert calls == [40] * 8


_SELECT = reference.select_rows
