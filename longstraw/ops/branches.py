"""What joins positions, for one position of each of n branches that share a prompt.

The prompt's rows are read once for all branches; each branch has own rows beside them, and both parts are merged by
log-sum-exp, or, where rows are chosen, by the total order of the choice. No gradients.

n branches, P retained rows and F own rows a branch that are here, H query heads, N key/value heads, R = H / N, D width
of a head; I index heads, K chosen rows.
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
    return by_tokens(attend_here(q, k, v, past, scale=scale, parts=parts)[0]).to(q.dtype)


def attend_here(
    q: Tensor, k: Tensor, v: Tensor, past: BranchPast, *, scale: float, parts: AttentionParts
) -> tuple[Tensor, Tensor]:
    """Return output [N, R, n, D] and log-sum-exp [N, R, n] over the rows that are here; 0 and -inf where none is."""
    heads, operand = k.shape[1], parts.operand_type(q.dtype)
    inner = torch.promote_types(operand, torch.float32)
    key, value = past.append("key", k).to(inner), past.append("value", v).to(inner)  # [n, N, F, D]
    scores = (q.to(inner).unflatten(1, (heads, -1)) * scale) @ key.mT  # [n, N, R, F]
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ value
    out, lse = out.permute(1, 2, 0, 3).contiguous(), lse.permute(1, 2, 0).contiguous()  # [N, R, n, D], [N, R, n]
    merge_past(out, lse, by_heads(q.to(operand), heads), past.pair("key", "value"), scale=scale, parts=parts)
    return out, lse


def select_rows(
    ops: LatentOps, q: Tensor, weights: Tensor, key: Tensor, past: BranchPast, choice: tuple[int, float]
) -> Tensor:
    """Return the best rows of each branch for ``q`` [n, I, D] and ``weights`` [n, I]: int32 [n, K].

    ``choice`` are the number of rows and the scale of the scores. ``key`` [n, D] is the new position's index key; it is
    appended to the branch's own. The order is that of ``latent.reference.best_rows``; rows are numbered as
    ``row_numbers`` does.
    """
    return row_numbers(best_here(ops, q, weights, key, past, choice)[1], past)


def best_here(
    ops: LatentOps, q: Tensor, weights: Tensor, key: Tensor, past: BranchPast, choice: tuple[int, float]
) -> tuple[Tensor, Tensor]:
    """Return the scores [n, K] and positions, int32 [n, K], of the best rows of each branch of those that are here.

    As ``select_rows``; K is the number asked for, or of the rows here if there are fewer.
    """
    count, scale = choice
    own, positions = past.append("index_key", key), past.held_positions(q.device)
    inner = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(inner) @ own.to(inner).mT).mul_(scale).relu_()  # [n, I, F]
    scores = (weights.to(inner).unsqueeze(1) @ scores).squeeze(1)
    first = past.positions + past.room.start
    rows = torch.arange(first, first + own.shape[1], dtype=torch.int32, device=q.device).expand(scores.shape)
    if len(positions):
        queried = positions.new_full((len(q),), past.positions)
        shared, most = [(past.rows("index_key"), positions)], min(count, len(positions))
        best, chosen = ops.best_rows(q, weights, shared, queried, most, scale=scale)
        scores, rows = torch.cat([best, scores], -1), torch.cat([chosen, rows], -1)
    if scores.shape[1] <= count:
        return scores, rows
    return keep_best(scores, rows, count)


def row_numbers(positions: Tensor, past: BranchPast) -> Tensor:
    """Return the numbers, int32 [n, K], of rows here that stand at ``positions`` [n, K]: as ``attend_rows`` reads them.

    The P retained rows here come first; then own row j of branch b has the number P + b F + j, with room for F here.
    """
    held, own = past.held_positions(positions.device), past.room.stop - past.room.start
    first = torch.arange(len(positions), dtype=torch.int32, device=positions.device).unsqueeze(1) * own + len(held)
    retained = torch.searchsorted(held, positions.contiguous(), out_int32=True)
    return torch.where(positions < past.positions, retained, positions - past.positions - past.room.start + first)


def attend_rows(
    q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: BranchPast, *, scale: float, ops: LatentOps
) -> Tensor:
    """Return the output [n, H, C] of ``q`` [n, H, C + R] over ``rows`` [n, K], as ``row_numbers`` numbers them.

    ``new`` are the latent [n, C] and rotary key [n, R] of the new position; they are appended to the branch's own.
    """
    return attend_rows_here(q, new, rows, past, scale=scale, ops=ops)[0]


def attend_rows_here(
    q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: BranchPast, *, scale: float, ops: LatentOps
) -> tuple[Tensor, Tensor]:
    """Return what ``attend_rows`` does and the log-sum-exp [n, H]; rows -1 are none, 0 and -inf where all are."""
    names = ("latent", "rope_key")
    for name, tensor in zip(names, new, strict=True):
        past.append(name, tensor)
    own = (past.buffer(names[0]).flatten(0, 1), past.buffer(names[1]).flatten(0, 1))
    return latent.attend_rows(q, own, rows, past.pair(*names), scale=scale, ops=ops)
