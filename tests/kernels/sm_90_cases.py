"""The launches that `sm_90.py` compiles: for each op, the calls of its host code at the models' shapes.

To add a case, add a line: a name, and a function without arguments that calls the host code on `empty` tensors.
"""

import torch

from longstraw.ops.attention import fused as attention
from longstraw.ops.host_offload import QueryGradients
from longstraw.ops.latent import fused as latent
from longstraw.ops.logprob import fused as logprob

BF16, F32 = torch.bfloat16, torch.float32


def empty(*shape, dtype=BF16):
    """Return a CPU tensor whose memory is never touched, so that it may be of any size."""
    return torch.empty(*shape, dtype=dtype)


def attend_rows(heads, repeats, count, rows, width, dtype=BF16):
    queries = [empty(heads, repeats, count, width, dtype=dtype) for _ in range(3)]
    keys, values = (empty(rows, heads, width, dtype=dtype) for _ in range(2))
    lse, buffers = empty(heads, repeats, count, dtype=F32), [empty(rows, heads, width, dtype=F32) for _ in range(2)]
    attention.rows_backward(QueryGradients(*queries, lse), keys, values, buffers, scale=width**-0.5)


def logits(count, vocabulary, width, dtype=BF16):
    hidden, weight, targets = empty(count, width, dtype=dtype), empty(vocabulary, width, dtype=dtype), empty(count)
    parts, row = empty(4, -(-vocabulary // logprob.SPLIT), count, dtype=F32), empty(count, dtype=F32)
    logprob.reduce_logits(hidden, weight, targets.long(), parts, logprob.SPLIT)
    tile = weight[: logprob.GRADIENT_TILE]
    out = empty(count, len(tile), dtype=dtype)
    logprob._logit_gradients(hidden, tile, targets.long(), row, row, row, row, row, 0, out)


def latent_attention(heads, width, rope, count, dtype=BF16):
    q, rows = empty(64, heads, width + rope, dtype=dtype), empty(64, count, dtype=torch.int32)
    past, new = ([empty(n, x, dtype=dtype) for x in (width, rope)] for n in (4096, 64))
    out, lse = latent.attend_forward(q, past, new, rows, scale=0.0625)
    buffers = [empty(1000, x, dtype=F32) for x in (width, rope)]
    latent.attend_backward(QueryGradients(out, q, out, lse), past, new, rows, buffers, scale=0.0625)


def latent_choice(heads, width, count, dtype=BF16):
    q, weights = empty(64, heads, width, dtype=dtype), empty(64, heads, dtype=F32)
    past_key, key = (empty(n, width, dtype=dtype) for n in (16384, 64))
    latent.select_rows(q, weights, past_key, key, count, scale=width**-0.5)


CASES = {
    "attention": {
        "qwen3_6_27b": lambda: attend_rows(4, 6, 4096, 16384, 256),
        "qwen3_6_tiny": lambda: attend_rows(2, 2, 128, 2048, 16, F32),
    },
    "logprob": {
        "qwen3_6_27b": lambda: logits(8192, 248320, 5120),
        "glm_5_2": lambda: logits(8192, 154880, 6144),
        "qwen3_6_tiny": lambda: logits(128, 256, 64, F32),
    },
    "latent": {
        "glm_5_2": lambda: latent_attention(64, 512, 64, 2048),
        "glm_5_2 choice": lambda: latent_choice(32, 128, 2048),
        "glm_5_2_tiny": lambda: latent_attention(4, 32, 8, 32, F32),
        "glm_5_2_tiny choice": lambda: latent_choice(4, 16, 32, F32),
    },
}
