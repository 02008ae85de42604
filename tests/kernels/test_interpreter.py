"""The interpreter with its gaps closed: each gap shown by a small kernel that the stock interpreter lets pass."""

import pytest
import torch
import triton
import triton.language as tl
from harness import draw, far, padded, relative
from interpreter import shuffled_programs
from triton.runtime.errors import InterpreterError


@triton.jit
def combine(A, B, Out, Sum, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    a, b = tl.load(A + at), tl.load(B + at)
    x = a * b + tl.exp(a.to(tl.float32)).to(a.dtype)
    tl.store(Out + at, x)
    tl.store(Sum, tl.sum(x, 0))


@triton.jit
def multiply(A, B, Out, K: tl.constexpr):
    rows, inner = tl.arange(0, 16), tl.arange(0, K)
    a = tl.load(A + rows[:, None] * K + inner[None, :])
    b = tl.load(B + inner[:, None] * 16 + rows[None, :])
    tl.store(Out + rows[:, None] * 16 + rows[None, :], tl.dot(a, b).to(Out.dtype.element_ty))


@triton.jit
def copy_rows(X, Out, stride, count, WIDE: tl.constexpr):
    for i in range(count):
        row = i.to(tl.int64) if WIDE else i
        tl.store(Out + i, tl.load(X + row * stride))


@triton.jit
def assert_small(X, limit):
    x = tl.load(X)
    tl.device_assert(x < limit, "too large")


@triton.jit
def overwrite(Out):
    tl.store(Out, tl.program_id(0))


@triton.autotune([triton.Config({"VALUE": 3}), triton.Config({"VALUE": 5})], key=[])
@triton.jit
def tuned(Out, VALUE: tl.constexpr):
    tl.store(Out, VALUE)


def test_bfloat16_is_computed_in_float32_and_rounded_to_even():
    a, b = (draw(64, dtype=torch.bfloat16, seed=i) for i in range(2))
    out, total = torch.empty_like(a), torch.empty(1, dtype=a.dtype)
    combine[(1,)](a, b, out, total, COUNT=64)
    expected = a * b + a.float().exp().bfloat16()
    assert out.equal(expected)
    assert relative(total, expected.double().sum()[None]) < 2**-8


def test_bfloat16_products():
    a, b = draw(16, 32, dtype=torch.bfloat16, seed=1), draw(32, 16, dtype=torch.bfloat16, seed=2)
    out = torch.empty(16, 16)
    multiply[(1,)](a, b, out, K=32)
    assert relative(out, a.double() @ b.double()) < 1e-6


def test_narrow_products_are_refused():
    with pytest.raises(InterpreterError, match="does not compile"):
        multiply[(1,)](draw(16, 8), draw(8, 16), torch.empty(16, 16), K=8)


def test_an_offset_past_int32_is_refused_and_a_wide_one_is_right():
    x, out = far(draw(20, 1)), torch.empty(20)
    copy_rows[(1,)](x, out, x.stride(0), 20, WIDE=True)
    assert out.equal(x[:, 0])
    with pytest.raises(InterpreterError, match="overflow"):
        copy_rows[(1,)](x, out, x.stride(0), 20, WIDE=False)


def test_asserts_are_live():
    assert_small[(1,)](torch.ones(1), 2)
    with pytest.raises(InterpreterError, match="too large"):
        assert_small[(1,)](torch.ones(1), 1)


def test_programs_run_in_the_drawn_order():
    results = set()
    for seed in range(6):
        out = torch.empty(1, dtype=torch.int32)
        with shuffled_programs(seed):
            overwrite[(5,)](out)
        results.add(int(out))
    assert len(results) > 1
    out = torch.empty(1, dtype=torch.int32)
    overwrite[(5,)](out)
    assert int(out) == 4


def test_autotuned_kernels_take_their_first_configuration():
    out = torch.empty(1, dtype=torch.int32)
    tuned[(1,)](out)
    assert int(out) == 3


def test_uninitialised_memory_and_padding_are_nan():
    assert torch.empty(3).isnan().all()
    x = padded(torch.zeros(5, 2))
    assert torch.as_strided(x, (9, 2), (2, 1), x.storage_offset() - 4)[[0, 1, 7, 8]].isnan().all()
