"""Runs every other file of this folder under Triton's interpreter, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import OUTSIDE

pytest.importorskip("triton")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path.name not in OUTSIDE)
LIMIT = 400  # seconds a file may take; a fault that hangs must not hang all


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_file_passes_under_the_interpreter(name):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(HERE / name), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
