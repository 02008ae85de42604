"""Full attention with grouped queries, q/k norm, partial rotary embedding and an output gate.

T positions, d model width, H query heads, N key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longstraw.config import Qwen36Config
from longstraw.layers.norm import ZeroCentredRMSNorm
from longstraw.layers.rotary import rotary_angles, rotate
from longstraw.ops import Ops
from longstraw.state import DEFAULT_STORAGE, Appended, Past, RowStorage, Tensors


class GatedAttention(nn.Module):
    """Softmax attention over (past | new); retains ``key`` and ``value`` [N, D] a position."""

    def __init__(self, config: Qwen36Config, ops: Ops):
        super().__init__()
        self.config, self.ops = config, ops
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim * 2, bias=False)  # [query | gate] a head
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = ZeroCentredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(self.head_dim, config.rms_norm_eps)

    def new_state(
        self, positions: int, *, grad_from: int | None, dtype: torch.dtype, storage: RowStorage = DEFAULT_STORAGE
    ) -> Appended:
        rows: dict[str, tuple[int, ...]] = dict.fromkeys(("key", "value"), (self.kv_heads, self.head_dim))
        device = self.k_proj.weight.device
        return Appended(positions, rows, grad_from=grad_from, dtype=dtype, device=device, storage=storage)

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Tensors]:
        """Return the output [T, d] of ``x`` [T, d] and the rows these positions add."""
        angles = self._angles(x, past)
        update = self.update(x, past, angles)
        query, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        query = rotate(self.q_norm(query), angles, self.config.rope_scaling.attention)
        out = self.ops.context.attend(
            query,
            update["key"],
            update["value"],
            (past.rows("key"), past.rows("value")),
            (past.grad("key"), past.grad("value")),
            scale=self.head_dim**-0.5,
            chunk=past.chunk,
        )
        return self.o_proj((out * gate.sigmoid()).flatten(1)), update

    def update(self, x: Tensor, past: Past, angles: Tensor | None = None) -> Tensors:
        """Return only what these positions add, which needs no attention."""
        if angles is None:
            angles = self._angles(x, past)
        key = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        key = rotate(key, angles, self.config.rope_scaling.attention)
        return {"key": key, "value": self.v_proj(x).unflatten(-1, (self.kv_heads, -1))}

    def _angles(self, x: Tensor, past: Past) -> Tensor:
        config = self.config
        return rotary_angles(
            past.first,
            len(x),
            config.rotary_dim,
            config.rope_theta,
            dtype=getattr(torch, config.rope_angles),
            device=x.device,
            scaling=config.rope_scaling,
        )
