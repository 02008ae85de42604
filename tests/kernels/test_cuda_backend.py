"""What choosing the CUDA path imports, and what it falls back to. Nothing is launched here."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longstraw.memory.meter import MemoryMeter
from longstraw.ops import choose_ops
from longstraw.ops.attention import attend
from longstraw.ops.host_offload import QueryGradients, RetainedRows

pytest.importorskip("triton")
from longstraw.ops.attention import fused as flash

ROOT = Path(__file__).resolve().parents[2]


def python(*lines):
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_only_the_cuda_backend_needs_triton():
    done = python(
        "import sys",
        "sys.modules.update(dict.fromkeys(('triton', 'fla')))",  # any import of these fails
        "import longstraw.models, longstraw.step",
        "from longstraw.ops import BACKENDS, choose_ops",
        "assert 'cuda' in BACKENDS",
        "assert all(choose_ops(x).attention.part_forward for x in BACKENDS if x != 'cuda')",
        "longstraw.models.build_model('qwen3_6_tiny')",
        "import longstraw.ops.attention.kernels",
    )
    assert "attention/kernels.py" in done.stderr
    assert done.stderr.strip().endswith("import of triton halted; None in sys.modules"), done.stderr


@pytest.mark.parametrize(
    ("missing", "code", "words"),
    [
        (("triton",), 1, "ValueError: backend='cuda' needs Triton: pip install"),
        (("fla",), 0, "delta layers run on their plain reference"),
    ],
)
def test_what_is_not_installed_is_named(missing, code, words):
    done = python(
        "import importlib.util as u, sys",
        f"real = u.find_spec; u.find_spec = lambda name, *x: None if name in {missing!r} else real(name, *x)",
        f"sys.modules.update(dict.fromkeys({missing!r}))",
        "from longstraw.ops import choose_ops",
        "from longstraw.ops.delta import reference",
        "assert [choose_ops('cuda').delta for _ in range(2)] == [reference.gated_delta_rule] * 2",
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count(words) == 1


def test_attention_on_fake_tensors():
    with FakeTensorMode():
        q, grad = (torch.empty(70, 6, 64, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(70, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        retained = [torch.empty(100, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
        buffers = [torch.empty(100, 2, 64) for _ in range(2)]
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attend(
            *leaves, RetainedRows(tuple(retained), tuple(buffers)), scale=0.1, parts=choose_ops("cuda").attention
        )
        gradients = torch.autograd.grad(out, leaves, grad)
    assert [(x.shape, x.dtype) for x in (out, *gradients)] == [(x.shape, x.dtype) for x in (q, *leaves)]


def test_what_flash_takes_inside_is_counted():
    """Six query heads share a key head: PyTorch makes a key and a value gradient for each of them."""
    inside = flash.flash_backward_bytes(1, 6, 256, 256, 64, 2)
    copies, sums, expanded = 2 * 6 * 256 * 64 * 2, 6 * 256 * (64 + 1) * 4, 2 * 6 * 256 * 64 * 2
    assert inside == copies + sums + expanded
    with FakeTensorMode(), MemoryMeter(rounding=1) as meter:
        q, k = torch.empty(1, 6, 256, 64, dtype=torch.bfloat16), torch.empty(256, 1, 64, dtype=torch.bfloat16)
        before = meter.tag("inputs", [q, k])
        lse = torch.empty(1, 6, 256)
        flash.part_backward(QueryGradients(q, q, q, lse), k, k, causal=True, scale=1.0)
    results, unused = 2 * (q.numel() + 2 * k.numel()), 16
    assert meter.peak == before + lse.nbytes + inside + results + unused


@pytest.mark.parametrize(
    ("heads", "count", "rows", "width", "parts"),
    [
        (24, 16384, 16384, 256, 0),
        (24, 321, 16384, 256, 0),  # 144 programs: at most a fifth of the 156 that run at once would idle
        (24, 64, 16384, 256, 6),  # as many as fill them but for an eighth
        (24, 64, 128, 256, 2),  # two blocks of rows
        (24, 64, 64, 256, 0),
        (4, 1, 4096, 64, 16),  # blocks of 256 rows: no more parts than those
        (4, 0, 4096, 64, 0),
    ],
)
def test_parts_of_the_flash_forward_are_counted(heads, count, rows, width, parts):
    """Where queries alone do not fill a GPU, PyTorch splits the rows: an output and a log-sum-exp in float32 a part."""
    assert flash.flash_forward_bytes(heads, count, rows, width) == parts * heads * count * (width + 1) * 4
    with FakeTensorMode(), MemoryMeter(rounding=1) as meter:
        q, k = (
            torch.empty(1, heads, count, width, dtype=torch.bfloat16),
            torch.empty(rows, 1, width, dtype=torch.bfloat16),
        )
        before = meter.tag("inputs", [q, k])
        flash.part_forward(q, k, k, causal=False, scale=1.0)
    inside, lse, small = parts * heads * count * (width + 1) * 4, heads * count * 4, 24 if count else 0
    assert meter.peak == before + lse + small + max(q.nbytes + inside, 3 * q.nbytes)


def test_no_queries():
    """Ranks whose prompt has fewer chunks than another's evaluate none; PyTorch's operator would not launch."""
    q, k = torch.empty(2, 3, 0, 16, dtype=torch.bfloat16), torch.ones(5, 2, 16, dtype=torch.bfloat16)
    out, lse = flash.part_forward(q, k, k, causal=False, scale=1.0)
    assert (out.shape, lse.shape, out.dtype, lse.dtype) == (q.shape, q.shape[:-1], torch.float32, torch.float32)
    grad_q, *grads = flash.part_backward(QueryGradients(out, q, out, lse), k, k, causal=False, scale=1.0)
    assert grad_q.shape == q.shape
    assert all(x.shape == k.shape and not x.any() for x in grads)


def test_a_causal_part_is_square():
    q, k = torch.empty(1, 1, 4, 16, dtype=torch.bfloat16), torch.empty(5, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="as many queries as rows, not 4 and 5"):
        flash.part_forward(q, k, k, causal=True, scale=1.0)
