"""What joins positions, for one position of each of n branches that share a prompt.

The prompt's rows are read once for all branches; each branch has own rows beside them, and both parts are merged by
log-sum-exp, or, where rows are chosen, by the total order of the choice. No gradients.

n branches, P retained rows, F own rows a branch, H query heads, N key/value heads, R = H / N, D width of a head;
I index heads, K chosen rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.ops import latent
from longstraw.ops.attention import AttentionParts, by_heads, by_tokens, merge_past
from longstraw.ops.latent import LatentOps
from longstraw.ops.latent.reference import keep_best
from longstraw.ops.past import BranchPast


def attend(q: Tensor, k: Tensor, v: Tensor, past: BranchPast, *, scale: float, parts: AttentionParts) -> Tensor:
    """Return the attention output [n, H, D] of ``q`` [n, H, D] over the prompt's rows and each branch's own.

    ``k``, ``v`` [n, N, D] are the new position's rows; they are appended to the branch's own.
    """
    heads, operand = k.shape[1], parts.operand_type(q.dtype)
    inner = torch.promote_types(operand, torch.float32)
    key, value = past.append("key", k).to(inner), past.append("value", v).to(inner)  # [n, N, F, D]
    scores = (q.to(inner).unflatten(1, (heads, -1)) * scale) @ key.mT  # [n, N, R, F]
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ value
    out, lse = out.permute(1, 2, 0, 3).contiguous(), lse.permute(1, 2, 0).contiguous()  # [N, R, n, D], [N, R, n]
    merge_past(out, lse, by_heads(q.to(operand), heads), past.pair("key", "value"), scale=scale, parts=parts)
    return by_tokens(out).to(q.dtype)


def select_rows(
    ops: LatentOps, q: Tensor, weights: Tensor, key: Tensor, past: BranchPast, choice: tuple[int, float]
) -> Tensor:
    """Return the best rows of each branch for ``q`` [n, I, D] and ``weights`` [n, I]: int32 [n, K].

    ``choice`` are the number of rows and the scale of the scores. ``key`` [n, D] is the new position's index key; it is
    appended to the branch's own. Own row j of branch b has the number P + b room + j, as in the flat buffer that
    ``attend_rows`` reads. The order is that of ``latent.reference.best_rows``.
    """
    count, scale = choice
    own, room = past.append("index_key", key), past.buffer("index_key").shape[1]
    prompt, branches = past.positions, len(q)
    inner = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(inner) @ own.to(inner).mT).mul_(scale).relu_()  # [n, I, F]
    scores = (weights.to(inner).unsqueeze(1) @ scores).squeeze(1)
    first = torch.arange(branches, dtype=torch.int32, device=q.device) * room + prompt
    rows = first[:, None] + torch.arange(own.shape[1], dtype=torch.int32, device=q.device)
    count = min(count, prompt + own.shape[1])
    if prompt:
        at = torch.arange(prompt, dtype=torch.int32, device=q.device)
        shared = [(past.rows("index_key"), at)]
        best, chosen = ops.best_rows(
            q, weights, shared, at.new_full((branches,), prompt), min(count, prompt), scale=scale
        )
        scores, rows = torch.cat([best, scores], -1), torch.cat([chosen, rows], -1)
    return keep_best(scores, rows, count)[1]


def attend_rows(
    q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: BranchPast, *, scale: float, ops: LatentOps
) -> Tensor:
    """Return the output [n, H, C] of ``q`` [n, H, C + R] over ``rows`` [n, K], as ``select_rows`` numbers them.

    ``new`` are the latent [n, C] and rotary key [n, R] of the new position; they are appended to the branch's own.
    """
    names = ("latent", "rope_key")
    for name, tensor in zip(names, new, strict=True):
        past.append(name, tensor)
    own = (past.buffer(names[0]).flatten(0, 1), past.buffer(names[1]).flatten(0, 1))
    return latent.attend_rows(q, own, rows, past.pair(*names), scale=scale, ops=ops)[0]
