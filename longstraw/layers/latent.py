"""Multi-head latent attention over rows that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556; GLM-5.2).

The up-projection of keys and values is absorbed into queries and outputs, so that every head reads the retained latents
as they are. Some layers have an indexer; the others attend to the same rows as the layer before.

T positions, P retained ones, d model width, H heads, N width of a head without rotary part, R with, V of its values,
C latent width, I index heads, D index width, K chosen rows a query.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstraw.config.architectures import Glm52Config
from longstraw.layers.flops import pairs, weight_flops
from longstraw.layers.lora_weight import effective_weight
from longstraw.layers.norm import RMSNorm
from longstraw.layers.op_cases import Case, Draw, differentiated
from longstraw.layers.rotary import rotary_angles, rotate_pairs
from longstraw.ops import Ops
from longstraw.ops.host_offload import RetainedRows
from longstraw.ops.kept import once
from longstraw.ops.latent import attend_rows
from longstraw.state import DEFAULT_STORAGE, Appended, Past, RowStorage, Tensors


class Indexer(nn.Module):
    """Scores earlier positions with a few small heads and chooses the best ones. No gradient passes: it is frozen."""

    def __init__(self, config: Glm52Config, ops: Ops):
        super().__init__()
        self.ops, self.count = ops, config.index_topk
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)  # the published value, unlike the other norms
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor, q_latent: Tensor, key: Tensor, past: Past, angles: Angles) -> Tensor:
        """Return the rows over (past | new) that each position of ``x`` [T, d] attends to: int32 [T, K], -1 for none.

        ``q_latent`` is the layer's compressed query; ``key`` [T, D] is ``keys(x)``.
        """

        def choose() -> tuple[Tensor]:
            query = angles.turn(self.wq_b(q_latent).unflatten(-1, (self.heads, -1)))
            inner = torch.promote_types(x.dtype, torch.float32)
            weights = F.linear(x.to(inner), self.weights_proj.weight.to(inner)) * self.heads**-0.5
            scale = self.head_dim**-0.5
            return (self.ops.context.select_rows(query, weights, key, past, self.count, scale=scale),)

        return once(past.kept, "rows", choose)[0]

    @torch.no_grad()
    def keys(self, x: Tensor, angles: Angles) -> Tensor:
        """Return the index keys [T, D] of ``x`` [T, d]."""
        return angles.turn(self.k_norm(self.wk(x)).unsqueeze(1)).squeeze(1)

    def flops(self, start: int, end: int, state_only: bool) -> int:
        """Return the FLOPs of scoring positions [start, end) against all up to themselves, projections included."""
        if state_only:
            return (end - start) * weight_flops(self.wk)
        return (end - start) * weight_flops(self) + 2 * self.heads * (self.head_dim + 1) * pairs(start, end)

    def op_cases(self, draw: Draw, positions: int, rows: int) -> list[Case]:
        heads, width = self.heads, self.head_dim
        inputs = {"q": draw(positions, heads, width), "retained key": draw(rows, width), "key": draw(positions, width)}
        inputs["weights"] = draw(positions, heads, wide=True)
        count = min(self.count, rows)

        def run(ops: Ops, tensors: Tensors) -> Tensors:
            q, past, key, weights = tensors.values()
            chosen = ops.latent.select_rows(q, weights, past, key, count, scale=width**-0.5).long()
            marks = torch.zeros(positions, rows + positions + 1, dtype=torch.bool, device=q.device)
            return {"rows": marks.scatter_(1, chosen % marks.shape[1], True)[:, :-1]}  # the last column: none chosen

        return [("choice of rows", inputs, run)]


class LatentAttention(nn.Module):
    """Softmax attention over chosen rows; retains ``latent``, ``rope_key`` and, with an indexer, ``index_key``."""

    def __init__(self, config: Glm52Config, indexes: bool, ops: Ops):
        super().__init__()
        self.config, self.ops, self.heads = config, ops, config.num_attention_heads
        self.widths = [config.qk_nope_head_dim, config.qk_rope_head_dim]  # of a query, of a key
        self.scale = sum(self.widths) ** -0.5
        values = config.qk_nope_head_dim + config.v_head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * sum(self.widths), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + self.widths[1], bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, self.heads * values, bias=False)  # [key | value] a head
        self.o_proj = nn.Linear(self.heads * config.v_head_dim, config.hidden_size, bias=False)
        self.indexer = Indexer(config, ops) if indexes else None

    def new_state(
        self, positions: int, *, grad_from: int | None, dtype: torch.dtype, storage: RowStorage = DEFAULT_STORAGE
    ) -> Appended:
        rows: dict[str, tuple[int, ...]] = {"latent": (self.config.kv_lora_rank,), "rope_key": (self.widths[1],)}
        if self.indexer is not None:
            rows["index_key"] = (self.config.index_head_dim,)
        like = torch.empty(0, dtype=dtype, device=self.q_a_layernorm.weight.device)
        return Appended(positions, rows, grad_from=grad_from, like=like, frozen=("index_key",), storage=storage)

    def forward(self, x: Tensor, past: Past, rows: Tensor | None) -> tuple[Tensor, Tensors, Tensor]:
        """Return the output [T, d] of ``x`` [T, d], the rows these positions add, and the rows attended to [T, K].

        ``rows`` are those that the layer before attended to; an indexer, where there is one, chooses anew.
        """
        angles = self._angles(x, past)
        update = self.update(x, past, angles)
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        if self.indexer is not None:
            rows = self.indexer(x, q_latent, update["index_key"], past, angles)
        if rows is None:
            raise ValueError(
                "a layer without an indexer got no rows from the layer before; the first layer needs an indexer"
            )
        up = effective_weight(self.kv_b_proj).unflatten(0, (self.heads, -1))
        key_up, value_up = up.split([self.widths[0], self.config.v_head_dim], 1)
        plain, turned = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1)).split(self.widths, -1)
        absorbed = torch.einsum("thn,hnc->thc", plain.to(up.dtype), key_up).to(x.dtype)
        query = torch.cat([absorbed, angles.turn(turned)], -1)
        new = (update["latent"], update["rope_key"])
        out = self.ops.context.attend_rows(query, new, rows, past, scale=self.scale)
        values = torch.einsum("thc,hvc->thv", out.to(up.dtype), value_up).to(x.dtype)
        return self.o_proj(values.flatten(1)), update, rows

    def update(self, x: Tensor, past: Past, angles: Angles | None = None) -> Tensors:
        """Return only what these positions add, which needs no attention."""
        angles = angles or self._angles(x, past)
        latent, rope_key = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, self.widths[1]], -1)
        rows = {"latent": self.kv_a_layernorm(latent), "rope_key": angles.turn(rope_key.unsqueeze(1)).squeeze(1)}
        return rows if self.indexer is None else {**rows, "index_key": self.indexer.keys(x, angles)}

    def flops(self, start: int, end: int, state_only: bool) -> int:
        """Return the FLOPs of positions [start, end); the absorbed ``kv_b_proj`` counts as a product of its size."""
        index = 0 if self.indexer is None else self.indexer.flops(start, end, state_only)
        if state_only:
            return index + (end - start) * weight_flops(self.kv_a_proj_with_mqa)
        own = weight_flops(self) - (0 if self.indexer is None else weight_flops(self.indexer))
        return index + (end - start) * own + self._rows_flops(start, end)

    def attention_flops(self, start: int, end: int) -> int:
        """Return those of ``flops`` that ``state.keep_attention`` saves a recomputation, choice of rows included."""
        if self.indexer is None:
            return self._rows_flops(start, end)
        index = self.indexer.flops(start, end, False) - self.indexer.flops(start, end, True)
        return index + self._rows_flops(start, end)

    def _rows_flops(self, start: int, end: int) -> int:
        width = 2 * self.config.kv_lora_rank + self.widths[1]
        return 2 * self.heads * width * self._chosen(start, end)

    def op_cases(self, draw: Draw, positions: int, rows: int) -> list[Case]:
        width, rope = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        count = min(self.config.index_topk, rows)
        inputs = {"q": draw(positions, self.config.num_attention_heads, width + rope)}
        inputs |= {"latent": draw(positions, width), "rotary key": draw(positions, rope)}
        inputs |= {"retained latent": draw(rows, width), "retained rotary key": draw(rows, rope)}
        before = {
            key: draw(rows, inputs[key].shape[1], wide=True) for key in ("retained latent", "retained rotary key")
        }
        order = torch.rand(positions, rows + 1, generator=draw.generator, device=draw.device).argsort(-1)
        chosen = order[:, :count].sort(-1).values.int()
        chosen[:, -1] = rows + torch.arange(positions, device=draw.device)  # a position sees itself
        scale = self.scale

        def run(ops: Ops, tensors: Tensors) -> Tensors:
            buffers = [x.clone() for x in before.values()]

            def call(leaves: Tensors) -> Tensors:
                rows = (leaves["retained latent"], leaves["retained rotary key"])
                past = RetainedRows(rows, (buffers[0], buffers[1]))
                new = (leaves["latent"], leaves["rotary key"])
                return {"output": attend_rows(leaves["q"], new, chosen, past, scale=scale, ops=ops.latent)[0]}

            results = differentiated(tensors, ("q", "latent", "rotary key"), call)
            return results | {f"gradient of {key}": x - before[key] for key, x in zip(before, buffers, strict=True)}

        return [("attention to chosen rows", inputs, run)]

    def _chosen(self, start: int, end: int) -> int:
        """Return how many rows positions [start, end) attend to, at most K each."""
        most = self.config.index_topk
        few = pairs(min(start, most), min(end, most))
        return few + most * (max(end, most) - max(start, most))

    def _angles(self, x: Tensor, past: Past) -> Angles:
        return Angles(self.config, past.new_positions(len(x), x.device))


class Angles:
    """The rotary angles of some positions."""

    def __init__(self, config: Glm52Config, positions: Tensor):
        dtype = getattr(torch, config.rope_angles)
        width, theta, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
        self.angles = rotary_angles(positions, width, theta, dtype=dtype, scaling=scaling)
        self.scale = scaling.attention

    def turn(self, x: Tensor) -> Tensor:
        """Rotate the first dimensions of ``x`` [T, H, .]; the others stay."""
        return rotate_pairs(x, self.angles, self.scale)
