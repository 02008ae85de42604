"""What Qwen3.6's blocks allocate on the CUDA path: see ``passes``.

Widths are values a position: A key heads of the delta rule times their width, Z value heads times theirs, B value
heads, C = 2A + Z convolution channels.
"""

from __future__ import annotations

from longstraw.memory.estimate.attention_pass import AttentionPass
from longstraw.memory.estimate.ledger import Held
from longstraw.memory.estimate.passes import Saved
from longstraw.ops.kernel_workspace import conv_backward_bytes, delta_backward_bytes, delta_forward_bytes


class Qwen36Pass(AttentionPass):
    """Gated full attention and Gated DeltaNet, each before a SwiGLU."""

    # Widths

    @property
    def values(self) -> int:
        return self.model.linear_num_value_heads * self.model.linear_value_head_dim

    @property
    def channels(self) -> int:
        return 2 * self.model.linear_num_key_heads * self.model.linear_key_head_dim + self.values

    @property
    def heads(self) -> int:
        """Value heads of the delta rule."""
        return self.model.linear_num_value_heads

    def owed(self) -> int:
        """Bytes of the gradients that a chunk's rows are owed, in the model's dtype, as its backward begins."""
        values = self.piece.t * 2 * self.keys * self.model.layer_types.count("full_attention")
        brought = self.lengths.row_gradient_item if self.lengths.on_host else 0
        return values * (brought + (self.w if self.lengths.row_gradient_item != self.w else 0))

    # A block

    def forward(self, index: int, x: list[Held], saved: Saved | None, *, state_only: bool) -> list[Held]:
        """Follow a block without its gathering; return what its caller gets: the output, where there is one."""
        self.block = f"model.layers.{index}."
        full = self.model.layer_types[index] == "full_attention"
        normed = self.norm("input_layernorm", self.d, saved)
        if state_only and full:
            self.state_rows(saved)
            self.leave(saved, "normed", normed)
            return []
        mixed = self.attention(saved) if full else self.delta(saved)
        if state_only:
            self.leave(saved, "normed", normed, mixed)
            return []
        middle = self.take("residual", self.piece.t * self.d * self.w)
        h = self.norm("post_attention_layernorm", self.d, saved)
        out = self.swiglu(self.model.intermediate_size, h, saved)
        y = self.take("residual", self.piece.t * self.d * self.w)
        self.drop(out, mixed, middle)
        self.leave(saved, "normed", normed)
        if saved is None or not self.every:  # else the feed-forward's maps keep it
            self.drop(h)
        return [y]

    def backward(self, index: int, saved: Saved, *, state_only: bool) -> None:
        """Follow a block's backward; the gradient of its output, and then of its input, is the caller's."""
        self.block = f"model.layers.{index}."
        full = self.model.layer_types[index] == "full_attention"
        if state_only and full:
            given = self.state_rows_backward(saved)
        else:
            if not state_only:
                given = self.swiglu_backward(self.model.intermediate_size, saved)
                self.drop(self.norm_backward("post_attention_layernorm", self.d, saved, given))
            given = self.attention_backward(saved) if full else self.delta_backward(saved)
        self.drop(self.norm_backward("input_layernorm", self.d, saved, given), *saved.pop("normed"))

    # Gated DeltaNet

    def delta(self, saved: Saved | None) -> Held:
        piece, ranks = self.piece, self.piece.ranks
        made = [
            self.linear("linear_attn.in_proj_qkv", self.d, self.channels, saved),
            self.take("scalars", 2 * piece.t * self.heads * self.w),
        ]
        if ranks > 1:
            width = (self.channels + 2 * self.heads) * self.w
            side_by_side = self.take("side by side", piece.t * width)
            own = [self.to_heads("heads", width)]
            self.drop(side_by_side, *made)
        else:
            own = made
        size = piece.n * self.channels * self.w // ranks
        inputs = self.take("convolution", size) if ranks > 1 else None
        convolved = self.take("convolution", size)
        if inputs and saved is None:
            self.drop(inputs)
        out = self.scan(saved)
        self.drop(convolved)
        if saved is None or ranks > 1:
            self.drop(*own)
        else:
            saved.keep("convolution", own[0])
            self.drop(own[1])
        if inputs and saved is not None:
            saved.keep("convolution", inputs)
        if ranks > 1:
            columns = self.to_positions("positions", self.values * self.w)
            self.drop(out)
            out = columns
        return self.gated_output(out, saved)

    def scan(self, saved: Saved | None) -> Held:
        """The gated delta rule for own heads; what it retains is the update."""
        piece, model, ranks = self.piece, self.model, self.piece.ranks
        channels = self.take("scan", piece.n * self.channels * self.w // ranks)
        gates = [self.take("scan", piece.n * self.heads * (3 * self.f + self.w) // ranks)]
        sizes = (model.linear_num_key_heads // ranks, self.heads // ranks)
        widths = (model.linear_key_head_dim, model.linear_value_head_dim)
        inside = self.take("scan", delta_forward_bytes(piece.n, *sizes, *widths, self.w), "workspace")
        out = self.take("scanned", piece.n * self.values * self.w // ranks)
        self.updates.append(self.take("recurrent", self.values * widths[0] * self.f // ranks))
        tail = (model.linear_conv_kernel_dim - 1) * self.channels * self.w // ranks
        self.updates.append(self.take("tail", tail))
        self.drop(inside)
        if saved is None:
            self.drop(channels, *gates)
        else:
            saved.keep("scan", channels, *gates)
        return out

    def gated_output(self, out: Held, saved: Saved | None) -> Held:
        """The gated norm of the scan's output, which is let go of, and the map to the residual."""
        size = self.piece.t * self.values
        gate = self.linear("linear_attn.in_proj_z", self.d, self.values, saved)
        wide = self.take("gated norm", size * self.f)
        self.spike("gated norm", size * self.f)
        normed = self.take("gated norm", size * self.f)
        weighted = self.take("gated norm", size * self.f)
        if saved is None:
            self.drop(normed, wide)
        elif not self.every:
            self.drop(normed)
            saved.keep("gated norm", wide)
        else:
            saved.keep("gated norm", wide, normed)
        wide_gate = self.take("gated norm", size * self.f)
        silu = self.take("gated norm", size * self.f)
        if saved is None:
            self.drop(wide_gate)
        product = self.take("gated norm", size * self.f)
        if saved is None:
            self.drop(silu)
        else:
            saved.keep("gate", weighted, silu)
            saved.keep("gated silu", wide_gate)
        result = self.take("gated norm", size * self.w)
        self.drop(product, gate, out)
        if saved is None:
            self.drop(weighted)
        mixed = self.linear("linear_attn.out_proj", self.values, self.d, saved)
        if saved is not None and self.every:
            saved.keep("linear_attn.out_proj", result)
        else:
            self.drop(result)
        return mixed

    def delta_backward(self, saved: Saved) -> Held:
        piece, size = self.piece, self.piece.t * self.values
        given = self.linear_backward("linear_attn.out_proj", self.values, self.d, saved)
        wide = self.take("of gated norm", size * self.f)
        self.drop(given)
        of_normed, of_silu = self.take("of gated norm", size * self.f), self.take("of gated norm", size * self.f)
        self.drop(wide, *saved.pop("gate"))
        of_gate = self.take("of gated norm", size * self.f)
        self.drop(of_silu, *saved.pop("gated silu"))
        gate = self.take("of gate", size * self.w)
        self.drop(of_gate)
        inside = [self.take("of gated norm", size * self.f) for _ in range(4)]
        self.drop(*inside, *saved.pop("gated norm"))
        out = self.take("of scanned", size * self.w)
        self.drop(of_normed)
        by_gate = self.linear_backward("linear_attn.in_proj_z", self.d, self.values, saved, gate)
        if piece.ranks > 1:
            heads = self.to_heads("of scanned", self.values * self.w)
            self.drop(out)
            out = heads
        mixed = self.scan_backward(saved, out)
        by_channels = self.linear_backward("linear_attn.in_proj_qkv", self.d, self.channels, saved, mixed)
        self.drop(by_gate)
        return by_channels

    def scan_backward(self, saved: Saved, out: Held) -> Held:
        """Gradients of what came to own heads, back at their positions."""
        piece, model, ranks = self.piece, self.model, self.piece.ranks
        size = piece.n * self.channels * self.w // ranks
        sizes = (model.linear_num_key_heads // ranks, self.heads // ranks)
        widths = (model.linear_key_head_dim, model.linear_value_head_dim)
        inside = self.take("scan", delta_backward_bytes(piece.n, *sizes, *widths, self.w), "workspace")
        results = self.take("of scan", size)
        small = self.take("of scan", piece.n * self.heads * (self.f + self.w) // ranks)
        self.drop(inside, out, *saved.pop("scan"))
        joined = self.take("of convolution", size)
        self.drop(results)
        taps = model.linear_conv_kernel_dim
        inside = self.take(
            "convolution", conv_backward_bytes(piece.n, self.channels // ranks, taps, self.w), "workspace"
        )
        mixed = self.take("of convolution", size)
        self.drop(inside, joined, *saved.pop("convolution"))
        if ranks == 1:
            self.drop(small)
            return mixed
        width = (self.channels + 2 * self.heads) * self.w
        side_by_side = self.take("of heads", piece.n * width // ranks)
        self.drop(mixed, small)
        columns = self.to_positions("of heads", width)
        self.drop(side_by_side)
        result = self.take("of channels", piece.t * self.channels * self.w)
        self.drop(columns)
        return result
