"""What choosing the CUDA path imports, and what it falls back to. Nothing is launched here."""

import subprocess
import sys
from pathlib import Path

import pytest

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
