"""What gated full attention allocates on the CUDA path: see ``passes``.

Widths are values a position: Q queries, N keys (or values).
"""

from __future__ import annotations

from longstraw.config.architectures import Qwen36Config
from longstraw.memory.estimate.ledger import Held
from longstraw.memory.estimate.passes import Pass, Saved
from longstraw.ops.kernel_workspace import flash_backward_bytes, flash_forward_bytes

ROW_TILE = 16384  # ops.attention.ROW_TILE


class AttentionPass(Pass):
    """Full attention with grouped queries, over (past | new) rows of which each rank has some."""

    @property
    def model(self) -> Qwen36Config:
        model = self.layout.config.model
        assert isinstance(model, Qwen36Config)
        return model

    @property
    def queries(self) -> int:
        return self.model.num_attention_heads * self.model.head_dim

    @property
    def keys(self) -> int:
        return self.model.num_key_value_heads * self.model.head_dim

    def state_rows(self, saved: Saved | None) -> None:
        """Keys and values, which are what attention retains."""
        made = self.linear("self_attn.k_proj", self.d, self.keys, saved)
        normed = self.norm("self_attn.k_norm", self.keys, saved)
        self.drop(made)
        self.updates.append(self.take("key", self.piece.t * self.keys * self.w))
        self.drop(normed)
        self.updates.append(self.linear("self_attn.v_proj", self.d, self.keys, saved))

    def state_rows_backward(self, saved: Saved) -> Held:
        given = self.take("of value", self.piece.t * self.keys * self.w)
        by_value = self.linear_backward("self_attn.v_proj", self.d, self.keys, saved, given)
        turned = self.take("of key", self.piece.t * self.keys * self.w)
        plain = self.norm_backward("self_attn.k_norm", self.keys, saved, turned)
        by_key = self.linear_backward("self_attn.k_proj", self.d, self.keys, saved, plain)
        self.drop(by_value)
        return by_key

    def attention(self, saved: Saved | None) -> Held:
        size = self.piece.t * self.queries * self.w
        self.state_rows(saved)
        both = self.linear("self_attn.q_proj", self.d, 2 * self.queries, saved)
        normed = self.norm("self_attn.q_norm", self.queries, saved)
        query = self.take("query", size)
        self.drop(normed)
        merged = self.attend()
        gate, product = self.take("gate", size), self.take("gated", size)
        if saved is None:
            self.drop(gate)
        mixed = self.linear("self_attn.o_proj", self.queries, self.d, saved)
        if saved is None:
            self.drop(product, query, both, merged)
            return mixed
        if self.every:
            saved.keep("self_attn.o_proj", product)
        else:
            self.drop(product)
        self.drop(both)
        lse = self.take("log-sum-exp", self.piece.n * self.model.num_attention_heads * self.f)
        saved.keep("gate", gate)
        saved.keep("merged", merged)
        saved.keep("attend", query, lse)
        return mixed

    def attend(self) -> Held:
        """Attention of all queries to the rows here, merged over ranks; ``ops.attention`` where there is one rank."""
        piece, heads = self.piece, self.model.num_attention_heads
        one = self.queries * self.w
        gathered = self.gather("queries", piece.t, one) if piece.ranks > 1 else None
        queries = self.take("queries", piece.n * one)
        if gathered:
            self.drop(gathered)
            out = self.take("attended", piece.n * self.queries * self.f)
            lse = self.take("log-sum-exp", piece.n * heads * self.f)
            for block in (piece.t, piece.later):
                if block:
                    own = self.take("block", block * one)
                    self.drop(*self.flash(block, piece.t, own))
        else:
            out, lse = self.flash(piece.n, piece.n)
        self.merge_rows()
        if piece.ranks > 1:
            self.spike("log-sum-exp", piece.ranks * piece.n * heads * self.f, "communication")
        whole = self.take("log-sum-exp", piece.n * heads * self.f)
        tokens = self.take(
            "attended", piece.n * self.queries * self.f, "activations" if piece.padded else "communication"
        )
        if piece.ranks > 1:
            own = self.reduce("attended", self.queries * self.f)
            self.drop(tokens)
            tokens = own
        merged = self.take("attended", piece.t * one)
        self.drop(tokens, queries, out, lse, whole)
        return merged

    def flash(self, count: int, rows: int, *operands: Held) -> tuple[Held, Held]:
        """PyTorch's flash forward: output in float32 and log-sum-exp; ``operands`` are let go of."""
        heads, width = self.model.num_attention_heads, self.model.head_dim
        inside = self.take("flash", flash_forward_bytes(heads, count, rows, width), "workspace")
        narrow = self.take("flash", count * self.queries * self.w)
        lse = self.take("flash", count * heads * self.f)
        self.drop(inside)
        out = self.take("flash", count * self.queries * self.f)
        self.drop(narrow, *operands)
        return out, lse

    def merge_rows(self) -> None:
        """Attention of all queries to the retained rows here."""
        if not self.rows or not self.piece.n:
            return
        copies, tile = self.row_copies(backward=False)
        out, lse = self.flash(self.piece.n, tile)
        size = self.piece.n * self.model.num_attention_heads * self.f
        self.spike("merge", 2 * size)
        self.drop(out, lse, *copies)

    def row_copies(self, *, backward: bool) -> tuple[list[Held], int]:
        """What stands on the device for a tile of retained rows, or for their gradient, and the rows of a tile."""
        lengths, tile = self.lengths, min(self.rows, ROW_TILE)
        staged = lengths.on_host
        copied = staged or lengths.row_item != self.w
        added = backward and lengths.graded_before(self.past) > 0 and lengths.added_item > 0
        if not copied and not added:
            return [], self.rows
        held, width = [], 2 * self.keys
        if lengths.row_item != self.w:
            held.append(self.take("rows", tile * width * self.w))
        if staged:
            coming = min(self.rows, 2 * ROW_TILE) - (tile if lengths.row_item != self.w else 0)
            held.append(self.take("rows", coming * width * lengths.row_item))
        if added:
            held.append(self.take("of rows", tile * width * lengths.added_item))
            if staged:
                coming = min(self.rows, 2 * ROW_TILE) - tile
                held.append(self.take("of rows", coming * width * lengths.row_gradient_item))
        return held, tile

    def attention_backward(self, saved: Saved) -> Held:
        size = self.piece.t * self.queries * self.w
        product = self.linear_backward("self_attn.o_proj", self.queries, self.d, saved)
        of_out, of_gate = self.take("of attended", size), self.take("of gate", size)
        self.drop(product)
        gate = self.take("of gate", size)
        self.drop(of_gate, *saved.pop("gate"))
        own_q, rows = self.attend_backward(saved, of_out)
        self.drop(of_out)
        turned = self.take("of query", size)
        self.drop(own_q)
        plain = self.norm_backward("self_attn.q_norm", self.queries, saved, turned)
        both = self.take("of query", 2 * size)
        self.drop(plain, gate)
        by_query = self.linear_backward("self_attn.q_proj", self.d, 2 * self.queries, saved, both)
        self.drop(rows)
        by_rows = self.state_rows_backward(saved)
        self.drop(by_query)
        return by_rows

    def attend_backward(self, saved: Saved, given: Held) -> tuple[Held, Held]:
        """Gradients of own queries, and of own rows."""
        piece, one, heads = self.piece, self.queries * self.w, self.model.num_attention_heads
        operands = []
        merged = saved.pop("merged")
        for number in range(3):
            gathered = self.gather("backward", piece.t, one) if piece.ranks > 1 else None
            operands.append(self.take(("of attended", "queries", "attended")[number], piece.n * one))
            if gathered:
                self.drop(gathered)
        self.drop(*merged)
        if piece.ranks > 1:
            of_queries = self.take("of queries", piece.n * self.queries * self.f)
            of_rows = self.take("of rows", 2 * piece.t * self.keys * self.f)
            for block in (piece.t, piece.later):
                if block:
                    own = [self.take("block", block * one) for _ in range(3)]
                    own.append(self.take("block", block * heads * self.f))
                    self.drop(*self.flash_backward(block, piece.t), *own)
        else:
            of_queries, of_rows = self.flash_backward(piece.n, piece.n)
        if self.rows and piece.n:
            copies, _ = self.row_copies(backward=True)
            self.spike("of queries", piece.n * self.queries * self.f + piece.n * heads * self.f)
            self.drop(*copies)
        kind = "activations" if piece.padded or piece.ranks == 1 else "communication"
        tokens = self.take("of queries", piece.n * self.queries * self.f, kind)
        if piece.ranks > 1:
            own_q = self.reduce("of queries", self.queries * self.f)
            self.drop(tokens)
            tokens = own_q
        result = self.take("of query", piece.t * one)
        narrow = self.take("of rows", 2 * piece.t * self.keys * self.w)
        self.drop(tokens, of_queries, of_rows, *operands, *saved.pop("attend"))
        return result, narrow

    def flash_backward(self, count: int, rows: int) -> tuple[Held, Held]:
        """PyTorch's flash backward: the queries' gradient in float32, and the rows'."""
        model = self.model
        heads, repeats = model.num_key_value_heads, model.num_attention_heads // model.num_key_value_heads
        inside = flash_backward_bytes(heads, repeats, count, rows, model.head_dim, self.w)
        held = self.take("flash", inside, "workspace")
        narrow = self.take("flash", count * self.queries * self.w)
        of_rows = self.take("flash", 2 * rows * self.keys * self.w)
        self.drop(held)
        wide = self.take("flash", count * self.queries * self.f)
        self.drop(narrow)
        return wide, of_rows
