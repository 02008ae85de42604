"""What the host code of each op allocates where its kernels run is what it allocates on fake tensors, to the byte.

The bodies of the operators stand in for the operators, on fake tensors too, and nothing is launched: what a body or fla
allocates inside is then seen. PyTorch's flash operators, which are in C++, have no such body: `test_cuda_backend.py`.
"""

import pytest
import torch
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode

from longstraw.memory.meter import MemoryMeter
from longstraw.ops.host_offload import QueryGradients

pytest.importorskip("triton")
pytest.importorskip("fla")
from triton.runtime import autotuner
from triton.runtime.jit import JITFunction

from longstraw.ops.attention import fused as attention
from longstraw.ops.conv import fused as conv
from longstraw.ops.delta import fused as delta
from longstraw.ops.latent import fused as latent
from longstraw.ops.logprob import fused as logprob

F32, BF16 = torch.float32, torch.bfloat16


def fakes(*shapes, dtype=BF16):
    return [torch.empty(*shape, dtype=dtype) for shape in shapes]


def trainable(tensors):
    return [x.requires_grad_() for x in tensors]


def delta_inputs(count, keys, values, key, value, dtype):
    rows = fakes((count, keys, key), (count, keys, key), (count, values, value), dtype=dtype)
    decay, beta, state = (
        torch.empty(count, values),
        *fakes((count, values), dtype=dtype),
        torch.empty(values, key, value),
    )
    return trainable([*rows, decay, beta, state])


def both_ways(function, leaves, *arguments):
    """Return the bytes at the peak of a forward and of its backward, beside the inputs."""
    with MemoryMeter(rounding=1) as meter:
        values = function(*leaves, *arguments)
        forward = meter.peak
        cotangents = [torch.empty_like(x) for x in values]
        meter.reset_peak()
        torch.autograd.grad(values, leaves, cotangents)
    return forward, meter.peak


def one_way(function, *arguments, **scale):
    with MemoryMeter(rounding=1) as meter:
        function(*arguments, **scale)
    return (meter.peak,)


def attention_rows(heads, repeats, count, rows, covered, width, dtype):
    grad, q, out = fakes(*[(heads, repeats, count, width)] * 3, dtype=dtype)
    k, v = fakes(*[(rows, heads, width)] * 2, dtype=dtype)
    lse, *buffers = fakes((heads, repeats, count), *[(covered, heads, width)] * 2, dtype=F32)
    return one_way(attention.rows_backward, QueryGradients(grad, q, out, lse), k, v, buffers, scale=1.0)


def vocabulary(count, rows, width, dtype):
    leaves = trainable(fakes((count, width), (rows, width), dtype=dtype))
    return both_ways(logprob.token_logits, leaves, torch.zeros(count, dtype=torch.int64))


def latent_rows(count, retained, chosen, heads, width, rope, dtype):
    q, grad = fakes((count, heads, width + rope), (count, heads, width), dtype=dtype)
    past, new = (fakes((n, width), (n, rope), dtype=dtype) for n in (retained, count))
    rows, buffers = torch.zeros(count, chosen, dtype=torch.int32), fakes((retained, width), (retained, rope), dtype=F32)
    forward = one_way(latent.attend_forward, q, past, new, rows, scale=1.0)
    lse = torch.empty(count, heads)
    backward = one_way(latent.attend_backward, QueryGradients(grad, q, grad, lse), past, new, rows, buffers, scale=1.0)
    return *forward, *backward


def latent_choice(count, retained, chosen, heads, width, dtype):
    q, past_key, key = fakes((count, heads, width), (retained, width), (count, width), dtype=dtype)
    return one_way(latent.select_rows, q, torch.empty(count, heads), past_key, key, chosen, scale=1.0)


def scan(*case):
    return both_ways(delta.gated_delta_rule, delta_inputs(*case))


def convolution(count, channels, taps, dtype):
    leaves = trainable(fakes((count, channels), (channels, taps), (taps - 1, channels), dtype=dtype))
    return both_ways(conv.causal_conv, leaves)


CASES = [  # of the published models on one rank and on one of eight, and odd ones
    (attention_rows, (4, 6, 16384, 16384, 16384, 256, BF16)),
    (attention_rows, (2, 2, 5, 70, 1, 24, F32)),
    (vocabulary, (8192, 248320 // 8, 5120, BF16)),
    (vocabulary, (3, 9000, 24, F32)),
    (latent_rows, (16384, 65536, 2048, 64, 512, 64, BF16)),
    (latent_rows, (3, 0, 5, 3, 12, 4, F32)),
    (latent_choice, (16384, 65536, 2048, 32, 128, BF16)),
    (latent_choice, (1, 0, 4, 2, 16, F32)),
    (scan, (16384, 2, 6, 128, 128, BF16)),
    (scan, (2048, 16, 48, 128, 128, BF16)),
    (scan, (66, 2, 2, 16, 32, F32)),
    (scan, (1, 1, 2, 32, 16, BF16)),
    (convolution, (16384, 1280, 4, BF16)),
    (convolution, (70, 40, 4, F32)),
    (convolution, (1, 33, 3, BF16)),
]  # fmt: skip


@pytest.fixture
def bodies(monkeypatch):
    """Let the operators' bodies run in their place, without their launches; return a list that grows with those."""
    launches = []
    for launched in (JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        monkeypatch.setattr(launched, "run", lambda *arguments, **_: launches.append(arguments[0]))

    def enter():
        for module in (attention, conv, delta, latent, logprob):
            for name, operator in list(vars(module).items()):
                if isinstance(operator, CustomOpDef) and name != "scratch":
                    monkeypatch.setattr(module, name, operator._init_fn)
                elif name == "scratch":
                    monkeypatch.setattr(module, name, lambda like, num_bytes: None)
        return launches

    return enter


@pytest.mark.parametrize(("measure", "case"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))  # no addresses
def test_fake_versions_count_what_is_allocated(measure, case, bodies):
    with FakeTensorMode():
        counted = measure(*case)
        launches = bodies()
        assert not launches
        assert measure(*case) == counted
    assert launches


def test_a_formula_that_leaves_something_out_is_seen(bodies, monkeypatch):
    case = (70, 40, 4, F32)
    monkeypatch.setattr(conv, "conv_backward_bytes", lambda *_: 0)
    with FakeTensorMode():
        forward, backward = convolution(*case)
        bodies()
        assert convolution(*case)[0] == forward
        assert convolution(*case)[1] > backward


def test_what_a_body_makes_inside_is_seen(bodies, monkeypatch):
    case = (66, 1, 1, 16, 16, F32)
    with FakeTensorMode():
        forward, backward = scan(*case)
        bodies()
        body = delta.gated_delta_forward
        monkeypatch.setattr(delta, "gated_delta_forward", lambda *x: (torch.empty(1), *body(*x))[1:])
        assert scan(*case) == (forward + 4, backward)
