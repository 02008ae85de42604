"""What one evaluation of some positions allocates on the CUDA path, op by op: parts that both architectures share.

A pass is followed as the code runs it, with a ledger in which every tensor of weight is taken and dropped where the
code makes it and lets go of it. What stays below a thousandth of a chunk's activations is left out.

n positions are evaluated together, t of them on this rank, m on the rank with most, to which pieces are padded;
``w`` bytes a value in the model's dtype, ``f`` in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from longstraw.memory.estimate.ledger import Held, Ledger
from longstraw.memory.estimate.ranks import Layout
from longstraw.memory.estimate.sizes import ITEM, Lengths

LOGIT_TILE, LOGIT_SPLIT = 8192, 4096  # ops.logprob.fused: columns of a tile of gradients; those one program reduces
TOKEN = 8


@dataclass(frozen=True)
class Piece:
    """Positions that are evaluated together, and this rank's part of them: the first."""

    n: int
    ranks: int

    @property
    def t(self) -> int:
        return self.n // self.ranks

    @property
    def m(self) -> int:
        return max(-(-self.n // self.ranks), 1)

    @property
    def whole(self) -> int:
        """Positions with their padding."""
        return self.m * self.ranks

    @property
    def padded(self) -> bool:
        return self.whole != self.n

    @property
    def later(self) -> int:
        """Positions after this rank's."""
        return self.n - self.t


@dataclass
class Saved:
    """What a graph keeps for its backward, by name, until the backward takes it up."""

    tensors: dict[str, list[Held]] = field(default_factory=dict)

    def keep(self, name: str, *held: Held) -> None:
        self.tensors.setdefault(name, []).extend(held)

    def pop(self, name: str) -> list[Held]:
        return self.tensors.pop(name, [])


class Pass:
    """Follows blocks forward and backward; a subclass has the mixer and the feed-forward of its architecture."""

    def __init__(self, ledger: Ledger, layout: Layout, lengths: Lengths, n: int, past: int):
        self.ledger, self.layout, self.lengths = ledger, layout, lengths
        self.take, self.drop, self.spike = ledger.take, ledger.drop, ledger.spike
        self.piece, self.past, self.rows = (
            Piece(n, layout.sizes.cp),
            past,
            lengths.own(past),
        )  # retained, and those here
        self.w, self.f = lengths.item, ITEM["float32"]
        self.d = layout.config.model.hidden_size
        self.every = layout.config.adapter.name == "none"
        self.block = ""
        self.gradients: list[Held] = []  # of the parameters of the block whose backward is followed
        self.updates: list[Held] = []  # what layers add to the state
        self.left: dict[object, tuple[list[Held], list[Held]]] = {}  # by kind of block: updates, and what it hands on

    def leave(self, saved: Saved | None, name: str, *held: Held) -> None:
        """Let go of what a call held, unless a backward needs it."""
        if saved is None or not self.every:
            self.drop(*held)
        else:
            saved.keep(name, *held)

    # What is exchanged

    def gather(self, name: str, t: int, width: int) -> Held:
        """All-gather of rows of ``width`` bytes: what comes, its padding taken out."""
        piece = self.piece
        if piece.ranks == 1:
            return self.take(name, t * width)
        came = self.take(name, piece.whole * width, "communication")
        if piece.t != piece.m:
            self.spike(name, piece.m * width, "communication")
        if not piece.padded:
            return came
        closed = self.take(name, piece.n * width)
        self.drop(came)
        return closed

    def reduce(self, name: str, width: int) -> Held:
        """Reduce-scatter to own rows of ``width`` bytes."""
        piece = self.piece
        own = self.take(name, piece.m * width, "communication")
        if piece.padded:
            self.spike(name, piece.whole * width, "communication")
        return own

    def to_heads(self, name: str, width: int) -> Held:
        """All-to-all of rows of ``width`` bytes, all heads, for all positions of own heads."""
        piece, size = self.piece, self.piece.m * width
        padded = [self.take(name, size)] if piece.t != piece.m else []
        sent = self.take(name, size, "communication")
        self.drop(*padded)
        came = self.take(name, size, "communication")
        if piece.padded:
            closed = self.take(name, piece.n * width // piece.ranks)
            self.drop(came)
            came = closed
        self.drop(sent)
        return came

    def to_positions(self, name: str, width: int) -> Held:
        """The way back: ``width`` bytes a position over all heads."""
        piece, size = self.piece, self.piece.m * width
        sent = [self.take(name, size, "communication")] if piece.padded else []
        came = self.take(name, size, "communication")
        columns = self.take(name, piece.t * width)
        self.drop(*sent, came)
        return columns

    # Layers of a position by itself

    def linear(self, name: str, inputs: int, outputs: int, saved: Saved | None, *, last: bool = False) -> Held:
        """A linear map, with its adapter in float32 where it has one; its input is the caller's.

        Evaluated again, the ``last`` one of a block stops when its backward has all it needs.
        """
        t, w, f = self.piece.t, self.w, self.f
        base = self.take(name, t * outputs * w)
        if not self.adapted(name):
            return base
        rank = self.layout.config.adapter.rank
        wide, low = self.take(name, t * inputs * f), self.take(name, t * rank * f)
        if last and saved is not None:
            saved.keep(name, wide, low)
            return base
        high = self.take(name, t * outputs * f)
        scaled = self.take(name, t * outputs * f)
        self.drop(high)
        both = self.take(name, t * outputs * f)
        self.drop(scaled, base)
        result = self.take(name, t * outputs * w)
        self.drop(both)
        if saved is None:
            self.drop(wide, low)
        else:
            saved.keep(name, wide, low)
        return result

    def linear_backward(self, name: str, inputs: int, outputs: int, saved: Saved, *grad: Held) -> Held:
        """Return the gradient of the input; ``grad`` is let go of, unless none is given: then others need it too."""
        t, w, f = self.piece.t, self.w, self.f
        if not self.adapted(name):
            result = self.take(name, t * inputs * w)
            if self.every:
                self.gradients.append(self.take(name, inputs * outputs * w))
            self.drop(*grad, *saved.pop(name))
            return result
        rank = self.layout.config.adapter.rank
        wide = self.take(name, t * outputs * f)
        self.drop(*grad)
        narrow = self.take(name, t * outputs * w)
        scaled = self.take(name, t * outputs * f)
        self.drop(wide)
        self.gradients.append(self.take(name, rank * (inputs + outputs) * f))
        self.drop(scaled)
        low = self.take(name, t * inputs * f)
        self.drop(*saved.pop(name))
        result = self.take(name, t * inputs * w)
        self.drop(low)
        base = self.take(name, t * inputs * w)
        self.drop(narrow, base)
        return result

    def begun(self, layer: int) -> int:
        """Bytes of what a block's backward has made when it first needs what its forward had, which is then made again.

        Of an adapted map at its end: its output's gradient, as it is and scaled.
        """
        ends = self.layout.has(f"model.layers.{layer}.mlp.down_proj.weight")
        return self.piece.t * self.d * (self.w + self.f) if ends else 0

    def adapted(self, name: str) -> bool:
        return self.layout.has(f"{self.block}{name}.weight")

    def norm(self, name: str, width: int, saved: Saved | None) -> Held:
        """Root-mean-square norm of rows of ``width`` values."""
        size = self.piece.t * width * self.f
        wide = self.take(name, size)
        self.spike(name, size)
        normed = self.take(name, size)
        weighted = self.take(name, size)
        if saved is None:
            self.drop(normed, wide)
        else:
            saved.keep(name, wide)
            if self.every:
                saved.keep(name, normed)
            else:
                self.drop(normed)
        result = self.take(name, self.piece.t * width * self.w)
        self.drop(weighted)
        return result

    def norm_backward(self, name: str, width: int, saved: Saved, *grad: Held) -> Held:
        """Return the gradient of the input; ``grad`` is let go of."""
        size = self.piece.t * width * self.f
        first = self.take(name, size)
        self.drop(*grad)
        inside = [self.take(name, size) for _ in range(4)]
        self.drop(*inside, *saved.pop(name))
        result = self.take(name, self.piece.t * width * self.w)
        self.drop(first)
        return result

    def swiglu(self, inner: int, h: Held, saved: Saved | None, prefix: str = "mlp.") -> Held:
        """The feed-forward of ``h``."""
        size = self.piece.t * inner * self.w
        gate = self.linear(f"{prefix}gate_proj", self.d, inner, saved)
        silu = self.take("silu", size)
        if saved is None:
            self.drop(gate)
        up = self.linear(f"{prefix}up_proj", self.d, inner, saved)
        product = self.take("product", size)
        if saved is None:
            self.drop(silu, up)
        result = self.linear(f"{prefix}down_proj", inner, self.d, saved, last=True)
        if saved is not None:
            saved.keep(f"{prefix}silu", gate)
            saved.keep(f"{prefix}product", silu, up)
            if self.every:
                saved.keep(f"{prefix}down_proj", product)
                saved.keep(f"{prefix}gate_proj", h)
        if saved is None or not self.every:
            self.drop(product)
        return result

    def swiglu_backward(self, inner: int, saved: Saved, prefix: str = "mlp.") -> Held:
        """Return the gradient of the input; that of the output is the residual's, which is needed again."""
        size = self.piece.t * inner * self.w
        given = self.linear_backward(f"{prefix}down_proj", inner, self.d, saved)
        of_silu, of_up = self.take("of silu", size), self.take("of up", size)
        self.drop(given, *saved.pop(f"{prefix}product"))
        by_up = self.linear_backward(f"{prefix}up_proj", self.d, inner, saved, of_up)
        of_gate = self.take("of gate", size)
        self.drop(of_silu, *saved.pop(f"{prefix}silu"))
        by_gate = self.linear_backward(f"{prefix}gate_proj", self.d, inner, saved, of_gate)
        self.spike("of input", self.piece.t * self.d * self.w)
        self.drop(by_gate)
        return by_up

    # Vocabulary

    def embed(self) -> Held:
        """Rows of the vocabulary for own positions."""
        piece, size = self.piece, self.d * self.w
        if piece.ranks == 1:
            return self.take("embedding", piece.n * size)
        index = [self.take("embedding", piece.n * TOKEN), self.take("embedding", piece.n)]
        rows = self.take("embedding", piece.n * size, "activations" if piece.padded else "communication")
        own = self.reduce("embedding", size)
        self.drop(rows, *index)
        return own

    def embed_backward(self, grad: Held) -> None:
        """The table's gradient, where it is trained."""
        if not self.every:
            self.drop(grad)
            return
        table = self.layout.stay["model.embed_tokens.weight"]
        given = self.gather("of embedding", self.piece.t, self.d * self.w) if self.piece.ranks > 1 else grad
        inner = self.take("of embedding", table.values * self.f) if self.piece.ranks > 1 else None
        wide = self.take("of embedding", self.piece.n * self.d * self.f) if inner else None
        narrow = self.take("of embedding", table.values * self.w)
        if wide and inner:
            self.drop(wide, inner, given)
        self.drop(narrow, grad)

    def head(self, hidden: Held, saved: Saved | None) -> None:
        """Log-probabilities of ``hidden``, which is let go of."""
        n = self.piece.n
        everyones = hidden
        if self.piece.ranks > 1:
            everyones = self.gather("hidden", self.piece.t, self.d * self.w)
            self.drop(hidden)
        rows = self.layout.stay["lm_head.weight"].rows
        self.spike("logits", 4 * -(-rows // LOGIT_SPLIT) * n * self.f)
        if saved is None:
            self.drop(everyones)
        else:
            saved.keep("head", everyones)

    def head_backward(self, saved: Saved) -> Held:
        """Return the gradient of own hidden states."""
        piece, weight = self.piece, self.layout.stay["lm_head.weight"]
        wide = self.take("of hidden", piece.n * self.d * self.f)
        learnt = [self.take("of head", weight.values * self.w)] if self.lengths.head_trained else []
        tile = self.take("of logits", piece.n * min(LOGIT_TILE, weight.rows) * self.w)
        self.spike("of hidden", piece.n * self.d * self.w)
        narrow = self.take("of hidden", piece.n * self.d * self.w)
        self.drop(wide, tile, *saved.pop("head"))
        if piece.ranks == 1:
            self.drop(*learnt)
            return narrow
        wide = self.take("of hidden", piece.n * self.d * self.f, "communication")
        own = self.reduce("of hidden", self.d * self.f)
        self.drop(wide)
        result = self.take("of hidden", piece.t * self.d * self.w)
        self.drop(own, narrow, *learnt)
        return result
