"""The operations that join positions: attention, scan, choice of rows, experts, vocabulary.

Layers call them through ``Ops.context``. ``Local`` runs them where one process has every position. A model that is
spread over ranks has ``parallel.context_parallel.ContextParallel`` instead, with the same methods, in which every
process has a part of a chunk's positions; a layer does not know which it calls. ``chunk`` says which positions are
here; ``Local`` does not read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from longstraw.ops import branches
from longstraw.ops.attention import AttentionParts, attend, attend_segments
from longstraw.ops.chunk import Chunk
from longstraw.ops.latent import LatentOps, attend_rows, packed
from longstraw.ops.logprob import TokenLogits, all_logits, token_logprobs
from longstraw.ops.moe import MoeOps, mix_experts
from longstraw.ops.past import BranchPast, Past

Sections = Sequence[tuple[int, int]]  # (heads, width) of what stands side by side in the last dimension


class Context(Protocol):
    """The operations that join positions; t of a chunk's positions are here.

    Where ``past`` is a ``BranchPast``, one position of each of t branches stands where t positions do otherwise.
    """

    def share(self, size: int) -> int:
        """Return how many of ``size`` heads or channels are this process's own."""

    def embed(self, tokens: Tensor, weight: Tensor, chunk: Chunk | None) -> Tensor:
        """Return the rows [t, d] of ``weight`` [V, d] for this process's part of ``tokens`` [count]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: Past, *, scale: float) -> Tensor:
        """Attend as ``ops.attention.attend`` does, to the retained ``key`` and ``value`` too."""

    def to_heads(
        self, tensors: Sequence[Tensor], sections: Sequence[Sections], chunk: Chunk | None
    ) -> Sequence[Tensor]:
        """Exchange [t, C] of all heads for [count, ``share(C)``] of own heads."""

    def to_positions(self, x: Tensor, chunk: Chunk | None) -> Tensor:
        """Exchange [count, ``share(H)``, D] of own heads for [t, H, D] of all heads."""

    def own_heads(self, weight: Tensor, sections: Sections) -> Tensor:
        """Return the part of ``weight`` [C, ...] that belongs to own heads."""

    def select_rows(self, q: Tensor, weights: Tensor, key: Tensor, past: Past, count: int, *, scale: float) -> Tensor:
        """Choose rows as ``ops.latent.reference.select_rows`` does, of the retained ``index_key`` and of ``key``.

        The result is an argument of ``attend_rows``.
        """

    def attend_rows(self, q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: Past, *, scale: float) -> Tensor:
        """Attend to chosen rows, retained and ``new`` (latent, rope_key), as ``ops.latent.attend_rows`` does."""

    def mix_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Mix experts as ``ops.moe.mix_experts`` does."""

    def logprob(self, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: Chunk | None) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [count] of ``targets`` [count], everywhere, after ``hidden`` [t, d]."""

    def logits(self, hidden: Tensor, weight: Tensor, chunk: Chunk | None) -> Tensor:
        """Return the logits [t, V] after ``hidden`` [t, d], in at least float32; for few positions, without a graph."""

    def gather(self, x: Tensor, chunk: Chunk | None) -> Tensor:
        """Return [count, ...] of all positions from this process's ``x`` [t, ...]; without a graph."""


class Local:
    """One process has every position, every head and every expert."""

    def __init__(self, attention: AttentionParts, latent: LatentOps, moe: MoeOps, logits: TokenLogits):
        self._attention, self._latent, self._moe, self._logits = attention, latent, moe, logits

    def share(self, size: int) -> int:
        return size

    def embed(self, tokens: Tensor, weight: Tensor, chunk: Chunk | None) -> Tensor:
        return F.embedding(tokens, weight)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: Past, *, scale: float) -> Tensor:
        if isinstance(past, BranchPast):
            return branches.attend(q, k, v, past, scale=scale, parts=self._attention)
        if past.chunk is not None and past.chunk.is_packed:
            return attend_segments(q, k, v, past, scale=scale, parts=self._attention)
        return attend(q, k, v, past.pair("key", "value"), scale=scale, parts=self._attention)

    def to_heads(
        self, tensors: Sequence[Tensor], sections: Sequence[Sections], chunk: Chunk | None
    ) -> Sequence[Tensor]:
        return tensors

    def to_positions(self, x: Tensor, chunk: Chunk | None) -> Tensor:
        return x

    def own_heads(self, weight: Tensor, sections: Sections) -> Tensor:
        return weight

    def select_rows(self, q: Tensor, weights: Tensor, key: Tensor, past: Past, count: int, *, scale: float) -> Tensor:
        if isinstance(past, BranchPast):
            return branches.select_rows(self._latent, q, weights, key, past, (count, scale))
        if past.chunk is not None and past.chunk.is_packed:
            at = torch.arange(past.positions + len(key), dtype=torch.int32, device=q.device)
            parts = (past.rows("index_key"), at[: past.positions]), (key, at[past.positions :])
            return packed.best_rows(self._latent, q, weights, parts, past, (count, scale))[1]
        return self._latent.select_rows(q, weights, past.rows("index_key"), key, count, scale=scale)

    def attend_rows(self, q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: Past, *, scale: float) -> Tensor:
        if isinstance(past, BranchPast):
            return branches.attend_rows(q, new, rows, past, scale=scale, ops=self._latent)
        return attend_rows(q, new, rows, past.pair("latent", "rope_key"), scale=scale, ops=self._latent)[0]

    def mix_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return mix_experts(x, chosen, weights, gate_up, down, ops=self._moe)

    def logprob(self, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: Chunk | None) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, targets, logits=self._logits)

    def logits(self, hidden: Tensor, weight: Tensor, chunk: Chunk | None) -> Tensor:
        return all_logits(hidden, weight)

    def gather(self, x: Tensor, chunk: Chunk | None) -> Tensor:
        return x
