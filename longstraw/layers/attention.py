"""Full attention with grouped queries and rotary embedding; biases, q/k norm and output gate depend on the family.

T positions, d model width, H query heads, N key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from longstraw.config.architectures.base import RopeScaling
from longstraw.layers.flops import pairs, weight_flops
from longstraw.layers.norm import ZeroCentredRMSNorm
from longstraw.layers.op_cases import Case, Draw, differentiated
from longstraw.layers.rotary import rotary_angles, rotate
from longstraw.ops import Ops
from longstraw.ops.attention import attend
from longstraw.ops.host_offload import RetainedRows
from longstraw.state import DEFAULT_STORAGE, Appended, Past, RowStorage, Tensors

Norm = Callable[[int, float], nn.Module]  # from width and eps


class AttentionSizes(Protocol):
    """The fields of a family's configuration that attention reads."""

    hidden_size: int
    rms_norm_eps: float
    num_attention_heads: int
    rope_theta: float
    rope_angles: str
    rope_scaling: RopeScaling

    @property
    def num_key_value_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def rotary_dim(self) -> int: ...


class Attention(nn.Module):
    """Softmax attention over (past | new); retains ``key`` and ``value`` [N, D] a position."""

    q_norm: nn.Module
    k_norm: nn.Module
    gates = False  # whether q_proj also computes an output gate

    def __init__(
        self,
        config: AttentionSizes,
        ops: Ops,
        *,
        norm: Norm | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
    ):
        """``norm`` creates the norms of queries and keys; None: no norms."""
        super().__init__()
        assert config.num_key_value_heads is not None
        assert config.head_dim is not None
        self.config, self.ops = config, ops
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, width = config.head_dim, config.hidden_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries * (2 if self.gates else 1), bias=qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=qkv_bias)
        self.o_proj = nn.Linear(queries, width, bias=output_bias)
        for name in ("q_norm", "k_norm"):
            setattr(self, name, nn.Identity() if norm is None else norm(self.head_dim, config.rms_norm_eps))

    def new_state(
        self, positions: int, *, grad_from: int | None, dtype: torch.dtype, storage: RowStorage = DEFAULT_STORAGE
    ) -> Appended:
        rows: dict[str, tuple[int, ...]] = dict.fromkeys(("key", "value"), (self.kv_heads, self.head_dim))
        like = torch.empty(0, dtype=dtype, device=self.k_proj.weight.device)
        return Appended(positions, rows, grad_from=grad_from, like=like, storage=storage)

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Tensors]:
        """Return the output [T, d] of ``x`` [T, d] and the rows these positions add."""
        angles = self._angles(x, past)
        update = self.update(x, past, angles)
        query, gate = self._query(x)
        query = rotate(self.q_norm(query), angles, self.config.rope_scaling.attention)
        out = self.ops.context.attend(query, update["key"], update["value"], past, scale=self.head_dim**-0.5)
        out = out if gate is None else out * gate.sigmoid()
        return self.o_proj(out.flatten(1)), update

    def update(self, x: Tensor, past: Past, angles: Tensor | None = None) -> Tensors:
        """Return only what these positions add, which needs no attention."""
        if angles is None:
            angles = self._angles(x, past)
        key = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        key = rotate(key, angles, self.config.rope_scaling.attention)
        return {"key": key, "value": self.v_proj(x).unflatten(-1, (self.kv_heads, -1))}

    def flops(self, start: int, end: int, state_only: bool) -> int:
        """Return the FLOPs of positions [start, end), which attend to all before them."""
        if state_only:
            return (end - start) * weight_flops(self.k_proj, self.v_proj)
        return (end - start) * weight_flops(self) + self.attention_flops(start, end)

    def attention_flops(self, start: int, end: int) -> int:
        """Return those of ``flops`` that ``state.keep_attention`` saves a recomputation."""
        return 4 * self.heads * self.head_dim * pairs(start, end)

    def op_cases(self, draw: Draw, positions: int, rows: int) -> list[Case]:
        heads, width = self.kv_heads, self.head_dim
        inputs = {"q": draw(positions, self.heads, width)}
        inputs |= {key: draw(positions, heads, width) for key in ("k", "v")}
        inputs |= {key: draw(rows, heads, width) for key in ("retained key", "retained value")}
        before = {key: draw(rows, heads, width, wide=True) for key in ("retained key", "retained value")}

        def run(ops: Ops, tensors: Tensors) -> Tensors:
            buffers = {key: x.clone() for key, x in before.items()}

            def call(leaves: Tensors) -> Tensors:
                rows = (leaves["retained key"], leaves["retained value"])
                past = RetainedRows(rows, (buffers["retained key"], buffers["retained value"]))
                new = (leaves["q"], leaves["k"], leaves["v"])
                return {"output": attend(*new, past, scale=width**-0.5, parts=ops.attention)}

            results = differentiated(tensors, ("q", "k", "v"), call)
            return results | {f"gradient of {key}": x - before[key] for key, x in buffers.items()}

        return [("attention", inputs, run)]

    def _query(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries [T, H, D] and the output's gate, if there is one."""
        return self.q_proj(x).unflatten(-1, (self.heads, -1)), None

    def _angles(self, x: Tensor, past: Past) -> Tensor:
        config = self.config
        return rotary_angles(
            past.new_positions(len(x), x.device),
            config.rotary_dim,
            config.rope_theta,
            dtype=getattr(torch, config.rope_angles),
            scaling=config.rope_scaling,
        )


class GatedAttention(Attention):
    """``Attention`` with zero-centred q/k norms and a gated output; ``q_proj`` computes query and gate."""

    gates = True  # [query | gate] a head

    def __init__(self, config: AttentionSizes, ops: Ops):
        super().__init__(config, ops, norm=ZeroCentredRMSNorm)

    def _query(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        query, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        return query, gate
