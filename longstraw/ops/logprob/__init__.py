"""Log-probability and entropy of chosen tokens from hidden states, in tiles of vocabulary: no full logits.

T positions, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

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
