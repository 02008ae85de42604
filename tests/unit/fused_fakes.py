"""The CUDA path on fake tensors in a process that has neither Triton nor fla.

`test_fused_fakes.py` calls `main` there. It evaluates each op, and both tiny models, forward and backward, in bfloat16,
and prints the operators that were called.
"""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.models import build_model
from longstraw.ops import choose_ops
from longstraw.ops.attention import attend
from longstraw.ops.host_offload import RetainedRows
from longstraw.ops.host_sync import use_stated_counts
from longstraw.ops.latent import attend_rows
from longstraw.ops.logprob import token_logprobs
from longstraw.ops.moe import mix_experts
from longstraw.step import prefill, prompt_backward

F32, BF16 = torch.float32, torch.bfloat16
MODELS = {  # of each kind of layer one
    "qwen3_6_tiny": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "glm_5_2_tiny": {"num_hidden_layers": 2, "first_k_dense_replace": 1, "index_skip_topk_offset": 1},
}
MARKS = ("longstraw.", "flash_attention")


class Called(TorchDispatchMode):
    """Names of our own operators and of PyTorch's flash ones, as they are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(mark in str(function) for mark in MARKS):
            self.names.add(str(function).removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def balanced(places, number):
    """Share entries out evenly: a fake tensor does not say where they go."""
    return [places.numel() // number + (i < places.numel() % number) for i in range(number)]


def trainable(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def with_gradients(values, leaves):
    """Return shapes and dtypes of ``values`` and of the gradients of ``leaves``."""
    values = [x for x in values if x.requires_grad or not leaves]
    gradients = torch.autograd.grad(values, leaves, [torch.empty_like(x) for x in values], allow_unused=True)
    found = [*values, *(x for x in gradients if x is not None)]
    assert all(isinstance(x, FakeTensor) for x in found)
    return [(tuple(x.shape), x.dtype) for x in found]


def full_attention(ops, t, p):
    q, k, v = trainable(t, 6, 32), trainable(t, 2, 32), trainable(t, 2, 32)
    past, grads = ([torch.empty(n, 2, 32, dtype=x) for _ in range(2)] for n, x in ((p, BF16), (p // 2, F32)))
    return with_gradients(
        [attend(q, k, v, RetainedRows(tuple(past), tuple(grads)), scale=0.1, parts=ops.attention)], [q, k, v]
    )


def chosen_rows(ops, t, p):
    leaves = [trainable(t, *shape) for shape in ((4, 24), (16,), (8,))]
    past, grads = ([torch.empty(n, w, dtype=x) for w in (16, 8)] for n, x in ((p, BF16), (p // 2, F32)))
    index = [torch.empty(t, 3, 16, dtype=BF16), torch.empty(t, 3)]
    keys = [torch.empty(n, 16, dtype=BF16) for n in (p, t)]
    rows = ops.latent.select_rows(*index, *keys, 12, scale=0.1)
    out, _ = attend_rows(
        leaves[0], tuple(leaves[1:]), rows, RetainedRows(tuple(past), tuple(grads)), scale=0.1, ops=ops.latent
    )
    return [(tuple(rows.shape), rows.dtype), *with_gradients([out], leaves)]


def vocabulary(ops, t, _):
    hidden, weight = trainable(t, 24), trainable(9000, 24)
    return with_gradients(
        token_logprobs(hidden, weight, torch.zeros(t, dtype=torch.int64), logits=ops.logits), [hidden, weight]
    )


def delta(ops, t, _):
    q, k, v, beta = trainable(t, 2, 32), trainable(t, 2, 32), trainable(t, 6, 16), trainable(t, 6)
    leaves = [q, k, v, trainable(t, 6, dtype=F32), beta, trainable(6, 32, 16, dtype=F32)]
    return with_gradients(ops.delta(*leaves), leaves)


def convolution(ops, t, _):
    leaves = [trainable(*shape) for shape in ((t, 40), (40, 4), (3, 40))]
    return with_gradients(ops.conv(*leaves), leaves)


def experts(ops, t, _):
    x, weights = trainable(t, 24), trainable(t, 2, dtype=F32)
    gate_up, down = trainable(4, 32, 24), trainable(4, 24, 16)
    out = mix_experts(x, torch.zeros(t, 2, dtype=torch.int64), weights, gate_up, down, ops=ops.moe)
    return with_gradients([out], [x, weights, gate_up, down])


def check_ops():
    """Every op at odd sizes, none and one among them, gives what its reference gives."""
    fused, plain = choose_ops("cuda", fake=True), choose_ops("reference")
    for op in (full_attention, chosen_rows, vocabulary, delta, convolution, experts):
        for t, p in ((0, 1), (1, 0), (1, 1), (70, 100)):
            expected, found = op(plain, t, p), op(fused, t, p)
            assert found == expected, f"{op.__name__} of {t} tokens, {p} rows: {found}, not {expected}"


def check_model(name):
    """Prefill, branches and prompt backward, of lengths none and one among them; every parameter gets a gradient."""
    model = build_model(name, dtype="bfloat16", backend="cuda", fake=True, **MODELS[name])
    assert all(isinstance(p, FakeTensor) for p in model.parameters())
    for positions, lengths in ((0, (1,)), (66, (0, 5))):
        retained = prefill(model, torch.zeros(positions + 1, dtype=torch.int64), chunk=64, grad_from=0)
        for length in lengths:
            past = [state.leaves(positions, grad=True) for state in retained.states]
            tokens = torch.zeros(length, dtype=torch.int64)
            hidden, _ = model(tokens, past)
            logprobs, entropy = model.logprobs(hidden, tokens)
            (logprobs.sum() + entropy.sum()).backward()
        prompt_backward(model, retained)
    past = [state.leaves(0, grad=False) for state in model.new_states(1)]
    _, updates = model(torch.zeros(0, dtype=torch.int64), past, state_only=True)
    sum(x.sum() for update in updates for x in update.values() if x.requires_grad).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None and "indexer" not in n]
    assert not missing, missing


def main():
    with pytest.raises(ValueError, match="needs Triton"):
        choose_ops("cuda")
    with pytest.raises(ImportError, match="import of triton halted"):  # what would run without fake tensors
        choose_ops("cuda", fake=True).logits(torch.zeros(1, 8), torch.zeros(8, 8), torch.zeros(1, dtype=torch.int64))
    called = {}
    for what in ("ops", *MODELS):
        with use_stated_counts(balanced), FakeTensorMode(), Called() as calls:
            check_ops() if what == "ops" else check_model(what)
        called[what] = sorted(calls.names)
    print(json.dumps(called))
