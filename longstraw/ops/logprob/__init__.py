"""Log-probability and entropy of chosen tokens from hidden states, in tiles of vocabulary: no full logits.

T positions, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longstraw.ops.logprob import fused, reference

TokenLogits = Callable[..., tuple[Tensor, Tensor, Tensor]]  # a backend's function; see ``reference.token_logits``

LOGITS: dict[str, TokenLogits] = {
    "reference": reference.token_logits,
    "cpu": reference.token_logits,
    "cuda": fused.token_logits,
}


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, logits: TokenLogits = reference.token_logits
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [T] of ``targets`` [T] and the entropy [T] of softmax(hidden weight^T).

    ``hidden`` [T, d], ``weight`` [V, d]. Both results carry gradients for ``hidden`` and ``weight``.
    """
    logit, lse, mean = logits(hidden, weight, targets)
    return logit - lse, lse - mean


def all_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return all logits [T, V] of ``hidden`` [T, d] and ``weight`` [V, d], in at least float32. For few positions."""
    inner = torch.promote_types(hidden.dtype, torch.float32)
    x = hidden.to(inner)
    if weight.dtype == inner:
        return x @ weight.T
    return torch.cat([x @ rows.to(inner).T for rows in weight.split(reference.VOCABULARY_TILE)], -1)
