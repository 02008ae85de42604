"""What GLM-5.2's blocks allocate on the CUDA path: see ``passes``.

Widths are values a position: H heads, C latent, R rotary key, K chosen rows a query, I index heads, D their width.
A block is handed the residual and the rows that the block before attended to.
"""

from __future__ import annotations

from longstraw.memory.estimate.ledger import Held
from longstraw.memory.estimate.mixture_pass import MixturePass
from longstraw.memory.estimate.passes import Saved

QUERY_TILE, CANDIDATES, WEIGHT_TILE = 2048, 2**13, 2**25  # ops.latent.fused
MERGE_TILE = 2**23  # parallel.latent
INDEX, ORDER = 4, 8  # int32, int64


class Glm52Pass(MixturePass):
    """Latent attention over chosen rows, before a SwiGLU or a mixture of experts."""

    @property
    def outputs(self) -> int:
        """Values of what all heads read."""
        return self.model.num_attention_heads * self.model.kv_lora_rank

    @property
    def queries(self) -> int:
        """Values of all heads' absorbed queries."""
        return self.outputs + self.model.num_attention_heads * self.model.qk_rope_head_dim

    @property
    def chosen(self) -> int:
        """Rows here that a query may attend to."""
        here = self.rows + self.piece.t
        return max(min(self.model.index_topk, self.past + self.piece.n, here), 1)

    def indexes(self, layer: int) -> bool:
        assert self.model.indexer_types is not None
        return self.model.indexer_types[layer] == "full"

    def sparse(self, layer: int) -> bool:
        assert self.model.mlp_layer_types is not None
        return self.model.mlp_layer_types[layer] == "sparse"

    def row(self, layer: int) -> int:
        """Values that a layer retains of a position."""
        learnt = self.model.kv_lora_rank + self.model.qk_rope_head_dim
        return learnt + (self.model.index_head_dim if self.indexes(layer) else 0)

    def owed(self) -> int:
        """Bytes of the gradients that a chunk's rows are owed, in the model's dtype, as its backward begins."""
        learnt = self.model.kv_lora_rank + self.model.qk_rope_head_dim
        values = self.piece.t * self.model.num_hidden_layers * learnt
        brought = self.lengths.row_gradient_item if self.lengths.on_host else 0
        return values * (brought + (self.w if self.lengths.row_gradient_item != self.w else 0))

    # A block

    def forward(self, index: int, x: list[Held], saved: Saved | None, *, state_only: bool) -> list[Held]:
        """Follow a block without its gathering; return what it hands on: the residual and the rows attended to."""
        self.block = f"model.layers.{index}."
        staged = self.staged(index, index + 1)
        normed = self.norm("input_layernorm", self.d, saved)
        self.state_rows(index, saved)
        if state_only:
            self.leave(saved, "normed", normed)
            self.drop(*staged)
            return []
        mixed, chosen = self.attention(index, saved)
        middle = self.take("residual", self.piece.t * self.d * self.w)
        h = self.norm("post_attention_layernorm", self.d, saved)
        if self.sparse(index):
            out = self.mixture(h, saved)
        else:
            out = self.swiglu(self.model.intermediate_size, h, saved)
        y = self.take("residual", self.piece.t * self.d * self.w)
        self.drop(out, mixed, middle, *staged)
        self.leave(saved, "normed", normed)
        if saved is None or not self.every:
            self.drop(h)
        return [y, *(chosen or x[1:])]

    def backward(self, index: int, saved: Saved, *, state_only: bool) -> None:
        """Follow a block's backward; the gradient of its output, and then of its input, is the caller's."""
        self.block = f"model.layers.{index}."
        staged = self.staged(index, index - 1)
        if state_only:
            given = self.state_rows_backward(saved)
        else:
            if self.sparse(index):
                by_mlp = self.mixture_backward(saved)
            else:
                by_mlp = self.swiglu_backward(self.model.intermediate_size, saved)
            self.drop(self.norm_backward("post_attention_layernorm", self.d, saved, by_mlp))
            given = self.attention_backward(saved)
        self.drop(self.norm_backward("input_layernorm", self.d, saved, given), *saved.pop("normed"), *staged)

    def staged(self, *layers: int) -> list[Held]:
        """All rows of those of ``layers`` that there are, brought from host memory."""
        if not self.lengths.on_host:
            return []
        values = sum(self.row(layer) for layer in layers if 0 <= layer < self.model.num_hidden_layers)
        return [self.take("rows", self.rows * values * self.lengths.row_item)]

    def cast_rows(self, values: int) -> Held:
        """``values`` a position of the rows here in the model's dtype, where they are kept in another."""
        return self.take("rows", 0 if self.lengths.row_item == self.w else self.rows * values * self.w)

    # Latent attention

    def state_rows(self, index: int, saved: Saved | None) -> None:
        model, t = self.model, self.piece.t
        latent, turned = model.kv_lora_rank, model.qk_rope_head_dim
        made = self.linear("self_attn.kv_a_proj_with_mqa", self.d, latent + turned, saved)
        self.updates.append(self.norm("self_attn.kv_a_layernorm", latent, saved))
        self.updates.append(self.take("rope key", t * turned * self.w))
        if self.indexes(index):
            self.updates.append(self.take("index key", t * model.index_head_dim * self.w))
        self.drop(made)

    def state_rows_backward(self, saved: Saved) -> Held:
        width = self.model.kv_lora_rank + self.model.qk_rope_head_dim
        given = self.take("of rows", self.piece.t * self.model.kv_lora_rank * self.w)
        given = self.norm_backward("self_attn.kv_a_layernorm", self.model.kv_lora_rank, saved, given)
        joined = self.take("of rows", self.piece.t * width * self.w)
        self.drop(given)
        return self.linear_backward("self_attn.kv_a_proj_with_mqa", self.d, width, saved, joined)

    def attention(self, index: int, saved: Saved | None) -> tuple[Held, list[Held]]:
        """Return the mixer's output and, where the layer has an indexer, the rows it chose; a graph keeps them."""
        model, t = self.model, self.piece.t
        made = self.linear("self_attn.q_a_proj", self.d, model.q_lora_rank, saved)
        q_latent = self.norm("self_attn.q_a_layernorm", model.q_lora_rank, saved)
        self.drop(made)
        chosen = [self.select()] if self.indexes(index) else []
        up = self.effective_weight()
        wide, heads = self.adapted("self_attn.kv_b_proj"), model.num_attention_heads
        plain, turned = model.qk_nope_head_dim, model.qk_rope_head_dim
        queries = self.linear("self_attn.q_b_proj", model.q_lora_rank, heads * (plain + turned), saved)
        operand = self.take("plain", t * heads * plain * self.f if wide else 0)
        product = self.take("absorbed", t * self.outputs * (self.f if wide else self.w))
        if saved is None:
            self.drop(operand)
        absorbed = self.take("absorbed", t * self.outputs * self.w if wide else 0)
        if wide:
            self.drop(product)
            product = absorbed
        joined = self.take("joined", t * self.queries * self.w)
        merged = self.attend()
        operand_out = self.take("merged", t * self.outputs * self.f if wide else 0)
        values = self.take("values", t * heads * model.v_head_dim * self.f if wide else 0)
        narrow = self.take("values", t * heads * model.v_head_dim * self.w)
        self.drop(values)
        copied = self.take("values", t * heads * model.v_head_dim * self.w)
        mixed = self.linear("self_attn.o_proj", heads * model.v_head_dim, self.d, saved)
        self.drop(queries, product)
        if saved is None:
            self.drop(joined, merged, operand_out, up, q_latent, copied, narrow)
            return mixed, chosen
        whole = self.take("log-sum-exp", self.piece.n * heads * self.f)
        saved.keep("attend", joined, whole, *chosen)
        saved.keep("merged", merged)
        saved.keep("values", operand_out)
        saved.keep("absorbed", operand, up)
        self.leave(saved, "self_attn.o_proj", copied)
        self.leave(saved, "self_attn.q_b_proj", q_latent)
        self.drop(narrow)
        return mixed, []

    def effective_weight(self) -> Held:
        """The up-projection with its adapter, in float32; without one it is the parameter itself."""
        model = self.model
        if not self.adapted("self_attn.kv_b_proj"):
            return self.take("up", 0)
        size = model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank * self.f
        product, scaled = self.take("up", size), self.take("up", size)
        self.drop(product)
        up = self.take("up", size)
        self.drop(scaled)
        return up

    def select(self) -> Held:
        """The rows here that each of the chunk's queries attends to."""
        piece, model = self.piece, self.model
        width = model.index_n_heads * model.index_head_dim * self.w
        query, weights = self.take("index query", piece.t * width), self.take("index query", piece.t * self.d * self.f)
        keys, chosen = self.cast_rows(model.index_head_dim), self.chosen
        held = (self.rows + piece.t) * INDEX
        positions = self.take("positions", held)
        if piece.ranks == 1:
            best, rows = self.best_rows(chosen)
            self.drop(best, query, weights, keys, positions)
            return rows
        everyones = self.gather("index queries", piece.t, width)
        scores, rows = self.best_rows(chosen)
        self.drop(everyones)
        wanted = max(min(model.index_topk, self.past + piece.n), 1)
        widened = [self.take("candidates", piece.n * wanted * self.f if wanted > chosen else 0) for _ in range(2)]
        candidates = piece.ranks * wanted
        columns = []
        for wide in widened:
            columns.append(self.to_positions("candidates", candidates * self.f))
            self.drop(wide)
        tile = min(max(MERGE_TILE // candidates, 1), piece.t) * candidates
        self.spike("merge", tile * (2 * INDEX + ORDER + self.f))
        self.drop(*columns)
        masks = self.take("masks", 3 * piece.n * chosen)
        self.spike("masks", piece.n * chosen)
        clamped = self.take("rows", piece.n * chosen * INDEX)
        here = self.take("rows", piece.n * chosen * INDEX)
        self.drop(clamped, masks, scores, rows, query, weights, keys, positions)
        return here

    def best_rows(self, chosen: int) -> tuple[Held, Held]:
        """Scores and positions of each query's best rows here."""
        n, longest = self.piece.n, max(self.rows, self.piece.t)
        best, rows = self.take("best", n * chosen * self.f), self.take("best", n * chosen * INDEX)
        block = min(max(CANDIDATES, power(2 * chosen)), power(chosen + longest))
        self.spike("scores", min(n, QUERY_TILE) * min(block - chosen, longest) * self.f)
        return best, rows

    def attend(self) -> Held:
        """Attention of all queries to their rows here, merged over ranks."""
        piece, heads = self.piece, self.model.num_attention_heads
        several = piece.ranks > 1
        queries = self.gather("queries", piece.t, self.queries * self.w) if several else None
        cast = self.cast_rows(self.model.kv_lora_rank + self.model.qk_rope_head_dim)
        narrow = self.take("attended", piece.n * self.outputs * self.w)
        lse = self.take("log-sum-exp", piece.n * heads * self.f)
        self.spike("compacted", min(piece.n, QUERY_TILE) * (self.chosen + 1) * INDEX)
        self.drop(cast)
        if not queries:
            self.drop(lse)
            return narrow
        self.drop(queries)
        self.spike("log-sum-exp", piece.ranks * piece.n * heads * self.f, "communication")
        whole = self.take("log-sum-exp", piece.n * heads * self.f)
        kind = "activations" if piece.padded else "communication"
        out = self.take("attended", piece.n * self.outputs * self.f, kind)
        self.drop(narrow)
        own = self.reduce("attended", self.outputs * self.f)
        merged = self.take("attended", piece.t * self.outputs * self.w)
        self.drop(own, out, lse, whole)
        return merged

    def attention_backward(self, saved: Saved) -> Held:
        """Return the gradient of the normed residual."""
        model, t = self.model, self.piece.t
        wide, heads = self.adapted("self_attn.kv_b_proj"), model.num_attention_heads
        plain, turned = model.qk_nope_head_dim, model.qk_rope_head_dim
        given = self.linear_backward("self_attn.o_proj", heads * model.v_head_dim, self.d, saved)
        values = self.take("of values", t * heads * model.v_head_dim * self.f if wide else 0)
        of_merged = self.take("of merged", t * self.outputs * (self.f if wide else self.w))
        self.drop(*saved.pop("values"), given)
        narrow = self.take("of merged", t * self.outputs * self.w if wide else 0)
        self.drop(values)
        if wide:
            self.drop(of_merged)
            of_merged = narrow
        joined, rows = self.attend_backward(saved)
        self.drop(of_merged)
        absorbed = self.take("of absorbed", t * self.outputs * self.f if wide else 0)
        of_plain = self.take("of plain", t * heads * plain * self.f if wide else 0)
        up = self.take("of up", heads * (plain + model.v_head_dim) * model.kv_lora_rank * (self.f if wide else self.w))
        self.drop(*saved.pop("absorbed"), absorbed)
        if wide:
            self.spike("of up", up.size)
            self.drop(up)
        else:
            self.gradients.append(up) if self.every else self.drop(up)
        queries = self.take("of queries", t * heads * (plain + turned) * self.w)
        self.drop(of_plain, joined)
        by_latent = self.linear_backward(
            "self_attn.q_b_proj", model.q_lora_rank, heads * (plain + turned), saved, queries
        )
        by_latent = self.norm_backward("self_attn.q_a_layernorm", model.q_lora_rank, saved, by_latent)
        by_query = self.linear_backward("self_attn.q_a_proj", self.d, model.q_lora_rank, saved, by_latent)
        self.drop(rows)
        by_rows = self.state_rows_backward(saved)
        self.drop(by_query)
        return by_rows

    def attend_backward(self, saved: Saved) -> tuple[Held, Held]:
        """Gradients of own queries, and of own rows."""
        piece, model, heads = self.piece, self.model, self.model.num_attention_heads
        several, row = piece.ranks > 1, model.kv_lora_rank + model.qk_rope_head_dim
        operands = []
        if several:
            operands = [
                self.gather(name, piece.t, width * self.w)
                for name, width in (
                    ("of attended", self.outputs),
                    ("queries", self.queries),
                    ("attended", self.outputs),
                )
            ]
        merged = saved.pop("merged")
        if several:
            self.drop(*merged)
        cast = self.cast_rows(row)
        graded = self.lengths.own(self.past) - self.lengths.own(min(self.lengths.grad_from or 0, self.past))
        added = 0 if self.lengths.grad_from is None else graded * row * self.lengths.added_item
        buffers = self.take("of rows", added)
        of_queries = self.take("of queries", piece.n * self.queries * self.w)
        of_new = self.take("of rows", piece.t * row * self.f)
        tile = min(piece.n, max(WEIGHT_TILE // max(self.chosen * heads, 1), 1), 65_535)
        self.spike("weights", tile * ((self.chosen + 1) * INDEX + 2 * self.chosen * heads * self.w))
        self.drop(cast, buffers)
        narrow = self.take("of rows", piece.t * row * self.w)
        self.drop(of_new)
        if not several:
            self.drop(*merged, *saved.pop("attend"))
            return of_queries, narrow
        kind = "activations" if piece.padded else "communication"
        wide = self.take("of queries", piece.n * self.queries * self.f, kind)
        own = self.reduce("of queries", self.queries * self.f)
        self.drop(wide)
        result = self.take("of queries", piece.t * self.queries * self.w)
        self.drop(own, of_queries, *operands, *saved.pop("attend"))
        return result, narrow


def power(size: int) -> int:
    """Round up to a power of two that tensor cores take."""
    return max(1 << (size - 1).bit_length(), 16)
