"""The choice of rows for positions of several segments, each of which sees the retained rows and its own segment's."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.ops.host_offload import Rows
from longstraw.ops.latent import LatentOps
from longstraw.ops.latent.reference import keep_best
from longstraw.ops.past import Past


def best_rows(
    ops: LatentOps,
    q: Tensor,
    weights: Tensor,
    parts: tuple[tuple[Rows, Tensor], tuple[Tensor, Tensor]],
    past: Past,
    choice: tuple[int, float],
) -> tuple[Tensor, Tensor]:
    """Return the best rows here of each of a chunk's queries, as ``ops.best_rows`` does for one segment.

    ``q`` [n, I, D] and ``weights`` [n, I] are of all positions of ``past.chunk``. ``parts`` are the retained index keys
    here with their positions, and the new ones here, numbered from ``past.positions`` on over all segments. ``choice``
    are the number of rows and the scale of the scores. The retained keys are scored once for all queries.
    """
    (retained, at), (key, numbers) = parts
    (count, scale), chunk = choice, past.chunk
    assert chunk is not None
    queried = torch.arange(past.positions, past.positions + chunk.count, dtype=torch.int32, device=q.device)
    longest = max((here.stop - here.start for here, _ in chunk.pieces), default=1)
    scores = q.new_full((len(q), min(count, longest)), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    rows = queried.new_full(scores.shape, -1)
    for here, later in chunk.pieces:
        seeing = slice(chunk.start + here.start, later.stop)
        kept = min(count, here.stop - here.start)
        mine = [(key[here], numbers[here])]
        found = ops.best_rows(q[seeing], weights[seeing], mine, queried[seeing], kept, scale=scale)
        scores[seeing, -kept:], rows[seeing, -kept:] = found
    if len(retained):
        best, chosen = ops.best_rows(q, weights, [(retained, at)], queried, min(count, len(retained)), scale=scale)
        scores, rows = torch.cat([best, scores], -1), torch.cat([chosen, rows], -1)
    return keep_best(scores, rows, min(count, scores.shape[1]))
