"""The launches that `sm_90.py` compiles: for each op, the calls of its host code at the models' shapes.

To add a case, add a line: a name, and a function without arguments that calls the host code on `empty` tensors.
"""

import torch

from longstraw.ops.attention import kernels as attention

BF16, F32 = torch.bfloat16, torch.float32


def empty(*shape, dtype=BF16):
    """Return a CPU tensor whose memory is never touched, so that it may be of any size."""
    return torch.empty(*shape, dtype=dtype)


def attend_rows(heads, repeats, count, rows, width, dtype=BF16):
    queries = [empty(heads, repeats, count, width, dtype=dtype) for _ in range(3)]
    keys, values = (empty(rows, heads, width, dtype=dtype) for _ in range(2))
    lse, buffers = empty(heads, repeats, count, dtype=F32), [empty(rows, heads, width, dtype=F32) for _ in range(2)]
    attention.rows_backward(queries[0], queries[1], keys, values, queries[2], lse, *buffers, scale=width**-0.5)


CASES = {
    "attention": {
        "qwen3_6_27b": lambda: attend_rows(4, 6, 4096, 16384, 256),
        "qwen3_6_tiny": lambda: attend_rows(2, 2, 128, 2048, 16, F32),
    },
}
