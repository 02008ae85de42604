"""Bytes of Qwen3.6's parameters, state and activations, from its configuration alone.

Every function names the tensors that are alive at one moment. Widths are values a position: d model, I feed-forward, Q
queries of full attention, N its keys (or values), A query (or key) heads of the delta rule times their width, B its
value heads, Z these times their width, C = 2A + Z convolution channels.
``w`` bytes a value in the model's dtype, ``f`` in the inner one. T positions evaluated together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from longstraw.config import inner_chunk
from longstraw.config.architectures import Qwen36Config
from longstraw.memory.estimate.sizes import Lengths, Shape, StateShapes

SEGMENT = 512  # ops.delta.reference.SEGMENT: positions of the delta rule whose intermediates are alive together
ROW_TILE = 16384  # ops.attention.ROW_TILE: retained rows evaluated together
POSITION_TILE, VOCABULARY_TILE = 1024, 8192  # ops.logprob


def parameter_shapes(model: Qwen36Config) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every parameter."""
    width, inner = model.hidden_size, model.intermediate_size
    yield "model.embed_tokens.weight", (model.vocab_size, width)
    for i, kind in enumerate(model.layer_types):
        mixer = _attention_shapes(model) if kind == "full_attention" else _delta_shapes(model)
        for name, shape in {
            "input_layernorm.weight": (width,),
            **mixer,
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
        }.items():
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (model.vocab_size, width)


def _attention_shapes(model: Qwen36Config) -> dict[str, Shape]:
    width, head = model.hidden_size, model.head_dim
    queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
    return {
        "self_attn.q_proj.weight": (2 * queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }


def _delta_shapes(model: Qwen36Config) -> dict[str, Shape]:
    width, heads = model.hidden_size, model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * model.linear_key_head_dim, heads * model.linear_value_head_dim
    return {
        "linear_attn.in_proj_qkv.weight": (2 * keys + values, width),
        "linear_attn.in_proj_z.weight": (values, width),
        "linear_attn.in_proj_b.weight": (heads, width),
        "linear_attn.in_proj_a.weight": (heads, width),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, model.linear_conv_kernel_dim),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (model.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (width, values),
    }


def state_shapes(model: Qwen36Config) -> StateShapes:
    """Return what the layers retain: keys and values, recurrent matrices and tails."""
    full = model.layer_types.count("full_attention")
    linear = model.num_hidden_layers - full
    keys, values = model.linear_key_head_dim, model.linear_value_head_dim
    channels = 2 * model.linear_num_key_heads * keys + model.linear_num_value_heads * values
    return StateShapes(
        learnt_rows=((model.num_key_value_heads, model.head_dim),) * (2 * full),
        summaries=((model.linear_num_value_heads, keys, values),) * linear,
        tails=((model.linear_conv_kernel_dim - 1, channels),) * linear,
    )


@dataclass(frozen=True)
class Activations:
    """The moments at which memory may peak, in bytes beyond parameters, their gradients and the state."""

    model: Qwen36Config
    lengths: Lengths

    # Widths

    @property
    def w(self) -> int:
        return self.lengths.item

    @property
    def f(self) -> int:
        return self.lengths.inner

    @property
    def cast(self) -> int:
        """Bytes of a value's copy in the inner dtype, where that is another one."""
        return 0 if self.w == self.f else self.f

    @property
    def d(self) -> int:
        return self.model.hidden_size

    @property
    def inner_width(self) -> int:
        return self.model.intermediate_size

    @property
    def queries(self) -> int:
        return self.model.num_attention_heads * self.model.head_dim

    @property
    def keys(self) -> int:
        return self.model.num_key_value_heads * self.model.head_dim

    @property
    def delta_keys(self) -> int:
        return self.model.linear_num_key_heads * self.model.linear_key_head_dim

    @property
    def values(self) -> int:
        return self.model.linear_num_value_heads * self.model.linear_value_head_dim

    @property
    def value_heads(self) -> int:
        return self.model.linear_num_value_heads

    @property
    def channels(self) -> int:
        return 2 * self.delta_keys + self.values

    @property
    def summary(self) -> int:
        """Bytes of one recurrent state."""
        return self.values * self.model.linear_key_head_dim * self.f

    # The gated delta rule, a segment in inner chunks

    @property
    def inner(self) -> int:
        return inner_chunk(self.model.linear_key_head_dim)

    @property
    def pairs(self) -> int:
        """Values a position of one matrix of pairs of positions, all value heads."""
        return self.value_heads * self.inner

    @property
    def key_pairs(self) -> int:
        """The same over key heads."""
        return self.model.linear_num_key_heads * self.inner

    @property
    def spread_keys(self) -> int:
        """Keys, or queries, repeated for every value head."""
        return self.value_heads * self.model.linear_key_head_dim

    def _segment_positions(self, count: int) -> int:
        return -(-min(count, SEGMENT) // self.inner) * self.inner

    def segment_forward(self, count: int) -> int:
        """The product that is solved, the solve, or the outputs' three copies; without a graph."""
        inputs = 2 * self.delta_keys + self.values + 4 * self.value_heads
        solved = self.values + self.spread_keys
        product = 3 * self.pairs + inputs  # decay; its product with keys x keys; that times beta
        solve = 2 * self.pairs + 2 * solved + inputs  # decay and product; right side and solution
        left = solved + self.pairs + 2 * self.spread_keys + 4 * self.value_heads  # solution, scores, queries, keys
        return self._segment_positions(count) * max(product, solve, left + 3 * self.values) * self.f

    def segment_graph(self) -> int:
        """What the graph of a segment saves up to its loop, values a position.

        Values, keys and scaled queries as chunks; factors of both products made contiguous; the products; decay, and
        its product with keys x keys without and with beta; the solution; small ones of a value a head.
        """
        factors = self.values + (8 if self.cast else 6) * self.delta_keys  # queries and keys before their norm, cast
        matrices = 2 * self.key_pairs + 3 * self.pairs
        return factors + matrices + self.values + self.spread_keys + 7 * self.value_heads

    def segment_backward(self, count: int) -> int:
        """The graph just complete, the first inner chunk's backward, the scores', or the solve's."""
        positions = self._segment_positions(count)
        inner_chunks = positions // self.inner
        read = self.pairs + 2 * self.spread_keys  # by the loop: scores, queries, keys
        made = self.values * 4  # by the loop: what each chunk adds; outputs, stacked, in order
        complete = positions * (self.segment_graph() + read + made) * self.f + inner_chunks * self.summary

        graph = self.segment_graph() + self.values  # with the outputs
        given = self.values  # their gradient, cut to length: a copy
        grads = self.pairs + 2 * self.spread_keys + self.values  # of scores, queries, solution: all chunks but one
        loop = positions * (graph + given + read + self.spread_keys) + (positions - self.inner) * grads

        passed = 2 * self.delta_keys  # gradients of queries and keys
        solution = self.values + self.spread_keys
        scores = graph + 3 * self.pairs + self.key_pairs + solution + passed
        solve = graph - self.key_pairs - 2 * self.delta_keys + 3 * self.pairs + 2 * solution + passed
        return max(complete, max(loop, positions * scores, positions * solve) * self.f) + 2 * self.summary

    def borders(self, count: int) -> int:
        """The delta rule's states between segments."""
        return (-(-count // SEGMENT) - 1) * self.summary

    # What a block saves for its backward, bytes a position

    @property
    def norm(self) -> int:
        """Root-mean-square norm of the residual: the input in the inner dtype, over its RMS, and the output."""
        return self.d * (self.cast + self.f + self.w)

    @property
    def delta_inputs(self) -> int:
        """Convolution's input with its tail and output, three stages of the decay, beta."""
        return 2 * self.channels * self.w + 3 * self.value_heads * self.f + self.value_heads * self.w

    @property
    def gated_norm(self) -> int:
        """Delta's output, over its RMS, times the weight; gate, SiLU of it; the product."""
        own = (self.w + self.cast) * 2 + 3 * self.f + self.w
        return self.values * own + self.value_heads * self.f

    @property
    def attention_saved(self) -> int:
        """Query with gate, key; both over their RMS; query and key turned; value; output, SiLU gate and product."""
        queries = self.queries * (2 * self.w + self.cast + self.f + self.w + 3 * self.w)
        keys = self.keys * (self.w + self.cast + self.f + 2 * self.w)
        return queries + keys + 2 * self.model.num_attention_heads * self.f + self.model.rotary_dim * self.w

    @property
    def feedforward(self) -> int:
        """Residual, its norm; gate, up, SiLU of the gate, product."""
        return self.d * self.w + self.norm + 4 * self.inner_width * self.w

    def feedforward_backward(self) -> int:
        """More than is saved: gradients of product, SiLU and up, but no product any more; gradient of the residual."""
        return 2 * self.inner_width * self.w + self.d * self.w

    # Moments of one pass over T positions

    def forward(self, count: int, past: int, updates: int) -> int:
        """Return the most that one pass without a graph holds, beside ``updates`` bytes of what layers add."""
        residual = 2 * self.d * self.w
        gates = 2 * self.value_heads * self.w  # beta and the step, before what is made of them
        conv = residual + gates + self.channels * (2 * self.w + self.f + (self.w if self.cast else 0))
        delta = residual + gates + (self.channels + self.values) * self.w + self.value_heads * (self.f + self.w)
        norm = residual + self.values * (2 * self.w + 2 * self.cast + 3 * self.f)
        mlp = 5 * self.d * self.w + 3 * self.inner_width * self.w
        attention = residual + self.queries * (3 * self.w + 3 * self.f) + 2 * self.keys * (self.w + self.cast)
        moments = [count * conv, count * norm, count * mlp, count * attention + self.row_casts(past)]
        moments.append(count * delta + self.segment_forward(count) + self.borders(count))
        return max(moments) + updates

    def row_casts(self, past: int) -> int:
        """Keys and values of a tile of retained rows in the inner dtype; from host memory, those of the next tile too.

        As they come they stay only where they need no cast.
        """
        cast = 0 if self.lengths.row_item == self.f else self.f
        tile = min(past, ROW_TILE)
        coming = min(past, 2 * ROW_TILE) - (tile if cast else 0) if self.lengths.on_host else 0
        return 2 * self.keys * (tile * cast + coming * self.lengths.row_item)

    def added(self, past: int) -> int:
        """What the gradients of a tile of retained rows are added into where that is not their buffer."""
        graded = self.lengths.graded_before(past)
        tile = min(graded, ROW_TILE)
        coming = min(graded, 2 * ROW_TILE) - tile if self.lengths.on_host else 0
        return 2 * self.keys * (tile * self.lengths.added_item + coming * self.lengths.row_gradient_item)

    def head(self, count: int) -> int:
        """Log-probabilities without a graph: a tile of logits, twice, the tile's weights where they are cast."""
        rows, columns = min(count, POSITION_TILE), min(self.model.vocab_size, VOCABULARY_TILE)
        weights = columns * self.d * self.cast
        return count * 2 * self.d * self.w + 2 * rows * columns * self.f + weights + rows * self.d * (self.w + self.f)

    def head_backward(self, count: int) -> int:
        """Checkpointed inputs of all blocks, the final norm, gradients of hidden states and of the whole head.

        A tile's weight or logits are made while those of the tile before are there, or the weight's gradient is.
        """
        layers = self.model.num_hidden_layers
        rows, columns = min(count, POSITION_TILE), min(self.model.vocab_size, VOCABULARY_TILE)
        saved = count * (layers + 1) * self.d * self.w + count * self.norm
        head = self.model.vocab_size if self.lengths.head_trained else 0
        gradients = (count + head) * self.d * (self.f + (self.w if self.cast else 0))
        second = max(columns * self.d * self.cast, rows * columns * self.f) if columns < self.model.vocab_size else 0
        if head:
            second = max(second, columns * self.d * self.f)
        tiles = 2 * rows * columns * self.f + columns * self.d * self.cast + second
        return saved + gradients + tiles

    def block_backward(self, count: int, past: int, last: bool) -> int:
        """Return the most in the backward of the last block of each kind, over ``past`` retained rows.

        ``last``: whether the last block runs whole.
        """
        moments = []
        kinds = self.model.layer_types
        for kind in set(kinds):
            whole = kinds if last else kinds[:-1]
            if kind not in whole:
                continue
            number = len(whole) - whole[::-1].index(kind)  # inputs of blocks up to this one
            inputs = count * number * self.d * self.w
            moments += [inputs + x for x in self._moments(kind, count, past)]
        return max(moments, default=0)

    def _moments(self, kind: str, count: int, past: int) -> list[int]:
        full = kind == "full_attention"
        mixer = self.attention_saved if full else self.delta_inputs + self.gated_norm
        saved = count * (self.norm + mixer + self.feedforward) + (0 if full else self.borders(count))
        mlp = saved + count * self.feedforward_backward()
        core = self.attention_backward(count, past) if full else self.delta_backward(count)
        return [mlp, core]

    def delta_backward(self, count: int) -> int:
        """Input norm, delta's inputs, gradients of its output and inputs, two of the residual's width; one segment."""
        gradients = (self.values + self.channels + 2 * self.d) * self.w + self.value_heads * (self.f + self.w)
        saved = self.norm + self.delta_inputs
        return count * (saved + gradients) + self.borders(count) + self.segment_backward(count)

    def attention_backward(self, count: int, past: int) -> int:
        """Queries, output and their gradients by heads; a tile of retained rows and its gradient."""
        saved = self.norm + self.attention_saved - 2 * self.queries * self.w
        gradients = self.queries * (2 * self.w + 5 * self.f) + 2 * self.keys * self.f + self.d * self.w
        tile = min(past, ROW_TILE) * 2 * self.keys * self.f + self.row_casts(past) + self.added(past)
        return count * (saved + gradients) + tile

    # Verbs

    @property
    def rows(self) -> int:
        """What full attention adds to the state, bytes a position."""
        return 2 * self.keys * self.w * self.model.layer_types.count("full_attention")

    @property
    def carried(self) -> int:
        """What the delta rule's layers add, bytes."""
        return state_shapes(self.model).carried(self.lengths)

    def prefill(self, start: int, count: int) -> int:
        """Return the most that a chunk of ``count`` positions from ``start`` on holds; its last block makes rows."""
        last = 2 * self.keys * self.w if self.model.layer_types[-1] == "full_attention" else 0
        return self.forward(count, start, count * (self.rows - last) + self.carried - self.summary)

    def score(self) -> int:
        """Return the most that a branch without a graph holds."""
        count = self.lengths.response
        return max(self.forward(count, self.lengths.retained, count * self.rows + self.carried), self.head(count))

    def replay(self) -> int:
        """Return the most that a branch with its backward holds."""
        count = self.lengths.response
        return max(self.block_backward(count, self.lengths.retained, last=True), self.head_backward(count))

    def prompt_backward(self, start: int, count: int) -> int:
        """Return the most that a chunk evaluated again holds: all it adds to the state lives as long as its graph."""
        owed = count * self.rows + self.carried + self.lengths.owed(count * self.rows // self.w)
        return self.block_backward(count, start, last=False) + owed
