"""Tests of kernels run under Triton's interpreter, on CPU tensors, in a process of their own.

Triton reads TRITON_INTERPRET when a kernel is decorated. Without the variable only the files named here are collected;
`test_interpreted.py` runs each of the others in a pytest of its own that has it. One test by hand:

    TRITON_INTERPRET=1 pytest tests/kernels/test_attention_kernels.py -k name
"""

import os

import pytest
import torch
from harness import OUTSIDE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import interpreter

    interpreter.close_gaps()  # before any kernel is imported


def pytest_ignore_collect(collection_path):
    if not collection_path.name.startswith("test_"):
        return None
    return True if (collection_path.name in OUTSIDE) == INTERPRETED else None


@pytest.fixture(autouse=INTERPRETED)
def uninitialised_memory_is_nan():
    """Fill what ``torch.empty`` gives with NaN: a kernel that leaves out a part of its result shows."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # the public function imports a compiler first
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch._C._set_deterministic_algorithms(False)
