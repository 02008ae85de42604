"""The mixture of experts against a plain dense one and transformers' router."""

from types import SimpleNamespace

import pytest
import torch
from glm_helpers import plain_experts
from helpers import relative
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.layers.feedforward import MixtureOfExperts, Router
from longstraw.models import build_model
from longstraw.ops import choose_ops
from longstraw.ops.host_sync import counts, use_stated_counts
from longstraw.ops.moe import mix_experts, route

F64 = torch.float64
BAR = 1e-12
E, D, I = 6, 10, 7  # noqa: E741  experts, model width, inner width


def draw(tokens, taken, dtype=F64, seed=0):
    """Return tokens, their experts out of the first ``taken``, the weights and the experts' matrices."""
    generator = torch.Generator().manual_seed(seed)

    def rnd(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

    chosen = torch.stack([torch.randperm(taken, generator=generator)[: min(taken, 3)] for _ in range(tokens)])
    weights = rnd(*chosen.shape).sigmoid().to(torch.promote_types(dtype, torch.float32))
    return rnd(tokens, D), chosen, weights, rnd(E, 2 * I, D), rnd(E, D, I)


@pytest.mark.parametrize(("tokens", "taken"), [(1, 6), (40, 6), (40, 1), (40, 4)])
def test_experts_are_plain_autograd(tokens, taken):
    """Whatever the imbalance: all experts, one alone, some without any token."""
    x, chosen, weights, *experts = draw(tokens, taken)
    leaves = [t.requires_grad_() for t in (x, weights, *experts)]
    expected = plain_experts(x, chosen, weights, *experts)
    grad = torch.randn_like(expected)
    target = torch.autograd.grad(expected, leaves, grad)
    out = mix_experts(x, chosen, weights, *experts)
    assert relative(out, expected) < BAR
    for value, wanted in zip(torch.autograd.grad(out, leaves, grad), target, strict=True):
        assert relative(value, wanted) < BAR


def test_frozen_experts_get_no_gradient():
    x, chosen, weights, *experts = draw(20, 6)
    x.requires_grad_()
    out = mix_experts(x, chosen, weights, *experts)
    out.sum().backward()
    target = torch.autograd.grad(plain_experts(x, chosen, weights, *experts).sum(), x)[0]
    assert relative(x.grad, target) < BAR
    assert experts[0].grad is None


def test_a_scaled_expert_is_seen():
    x, chosen, weights, gate_up, down = draw(40, 6)
    out = mix_experts(x, chosen, weights, gate_up, down)
    down[2] *= 1.01
    changed = mix_experts(x, chosen, weights, gate_up, down)
    assert relative(changed, out) > 1e-4
    untouched = (chosen != 2).all(-1)
    assert torch.equal(out[untouched], changed[untouched])


def test_bfloat16_adds_up_in_float32():
    """Against float64 on the same rounded inputs: three roundings to bfloat16 inside an expert, and one of the sum."""
    results = []
    for dtype in (torch.bfloat16, F64):
        x, chosen, weights, *experts = (
            t.to(dtype) if t.dtype == torch.bfloat16 else t for t in draw(40, 6, torch.bfloat16)
        )
        leaves = [t.requires_grad_() for t in (x, *experts)]
        out = mix_experts(x, chosen, weights.to(torch.promote_types(dtype, torch.float32)), *experts)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        assert out.dtype == dtype
    for value, wanted in zip(*results, strict=True):
        assert relative(value.to(F64), wanted) < 2**-6


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_nothing_stands_for_all_entries_at_once():
    """With tokens spread over experts no tensor has an inner width, or a model width, for every (token, expert)."""
    tokens, taken = 600, 6
    x, chosen, weights, *experts = draw(tokens, taken)
    for leaf in (x, weights, *experts):
        leaf.requires_grad_()
    with Largest() as largest:
        mix_experts(x, chosen, weights, *experts).sum().backward()
    busiest = max(counts(chosen, E))
    assert largest.elements <= max(tokens * D, busiest * 2 * I)
    assert largest.elements < chosen.numel() * min(D, I)
    with Largest() as dense:
        plain_experts(x, chosen, weights, *experts)
    assert dense.elements > chosen.numel() * min(D, I)


# The router


def config(**overrides):
    return build_model("glm_5_2_tiny", device="meta", **overrides).config


@pytest.mark.parametrize("normalise", [True, False])
def test_router_is_theirs(normalise):
    modeling = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    own = Router(config(norm_topk_prob=normalise, num_experts_per_tok=3))
    theirs = modeling.GlmMoeDsaTopkRouter(
        SimpleNamespace(**vars(own.config), num_local_experts=8, n_group=1, topk_group=1)
    )
    with torch.no_grad():
        theirs.weight.normal_(0, 0.3)
        theirs.e_score_correction_bias.normal_(0, 0.3)
    own.load_state_dict(theirs.state_dict())
    x = torch.randn(50, 64)
    _, weights, chosen = theirs(x)
    own_chosen, own_weights = own(x)
    dense, own_dense = (torch.zeros(50, 8).scatter(1, c, w) for c, w in ((chosen, weights), (own_chosen, own_weights)))
    assert torch.equal(own_chosen.sort(-1).values, chosen.sort(-1).values)
    assert relative(own_dense, dense) < 1e-6
    own.e_score_correction_bias.zero_()
    assert not torch.equal(own(x)[0].sort(-1).values, chosen.sort(-1).values)


def test_bias_chooses_and_does_not_weigh():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0])
    chosen, weights = route(logits, bias, 2, normalise=True, scale=2.5)
    assert chosen.tolist() == [[3, 0]]
    scores = logits.sigmoid()[0, [3, 0]]
    assert torch.allclose(weights[0], scores / scores.sum() * 2.5)
    chosen, _ = route(torch.zeros(1, 4), torch.zeros(4), 2, normalise=True, scale=1.0)
    assert chosen.tolist() == [[0, 1]]  # of experts that tie, the first


def test_bias_keeps_its_dtype():
    """A bias that bfloat16 would round to another choice stays as it is when the model is cast."""
    router = Router(config())
    with torch.no_grad():
        router.weight.zero_()
        router.e_score_correction_bias.copy_(torch.tensor([1, 1 + 1e-3, 1 + 2e-3, 0, 0, 0, 0, 0]))
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32
    assert router(torch.randn(1, 64).bfloat16())[0].tolist() == [[2, 1]]
    assert router.double().e_score_correction_bias.dtype == torch.float32
    assert "e_score_correction_bias" in router.state_dict()
    model = build_model("glm_5_2_tiny", dtype="bfloat16")
    assert {b.dtype for _, b in model.named_buffers()} == {torch.float32}
    assert build_model("glm_5_2", device="meta").model.layers[5].mlp.gate.e_score_correction_bias.is_meta


def test_only_counts_reads_a_value():
    """On tensors without values the mixture runs, forward and backward, given stated counts; and without, it cannot."""

    def even(places, number):
        share, rest = divmod(places.numel(), number)
        return [share + (i < rest) for i in range(number)]

    sizes = config()
    with FakeTensorMode():
        mixture = MixtureOfExperts(sizes, choose_ops("reference"))
        x = torch.randn(37, 64, requires_grad=True)
        with use_stated_counts(even):
            mixture(x).sum().backward()
        assert x.grad.shape == (37, 64)
        assert mixture.experts.down_proj.grad.shape == mixture.experts.down_proj.shape
        with pytest.raises(Exception, match="_local_scalar_dense"):
            mixture(x)
