"""Bytes of GLM-5.2's parameters, state and activations, from its configuration alone.

Parameters and state are exact; activations follow the reference ops, whose largest tensors are tiles: of gathered rows,
and of index scores with their order. The mixture of experts counts an even choice of experts.
Widths are values a position: d model, H heads, C latent, R rotary key, K chosen rows a query, I index heads.
``w`` bytes a value in the model's dtype, ``f`` in the inner one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from longstraw.config.architectures import Glm52Config
from longstraw.memory.estimate.sizes import TOKEN, Lengths, Shape, StateShapes

GATHER_TILE, SCORE_TILE, KEY_TILE = 2**24, 2**23, 4096  # ops.latent.reference
POSITION_TILE, VOCABULARY_TILE = 1024, 8192  # ops.logprob
INDEX = 4  # int32


def parameter_shapes(model: Glm52Config) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every parameter."""
    width = model.hidden_size
    yield "model.embed_tokens.weight", (model.vocab_size, width)
    for i in range(model.num_hidden_layers):
        for name, shape in {
            "input_layernorm.weight": (width,),
            **_attention_shapes(model),
            **(_indexer_shapes(model) if _indexes(model, i) else {}),
            "post_attention_layernorm.weight": (width,),
            **(_sparse_shapes(model) if _sparse(model, i) else _dense_shapes("mlp", width, model.intermediate_size)),
        }.items():
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (model.vocab_size, width)


def buffer_shapes(model: Glm52Config) -> Iterator[Shape]:
    """Yield the shape of every buffer: what routers add to scores when they choose, at least float32."""
    for i in range(model.num_hidden_layers):
        if _sparse(model, i):
            yield (model.n_routed_experts,)


def _indexes(model: Glm52Config, layer: int) -> bool:
    assert model.indexer_types is not None
    return model.indexer_types[layer] == "full"


def _sparse(model: Glm52Config, layer: int) -> bool:
    assert model.mlp_layer_types is not None
    return model.mlp_layer_types[layer] == "sparse"


def _attention_shapes(model: Glm52Config) -> dict[str, Shape]:
    width, heads = model.hidden_size, model.num_attention_heads
    return {
        "self_attn.q_a_proj.weight": (model.q_lora_rank, width),
        "self_attn.q_a_layernorm.weight": (model.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * (model.qk_nope_head_dim + model.qk_rope_head_dim), model.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (model.kv_lora_rank + model.qk_rope_head_dim, width),
        "self_attn.kv_a_layernorm.weight": (model.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank),
        "self_attn.o_proj.weight": (width, heads * model.v_head_dim),
    }


def _indexer_shapes(model: Glm52Config) -> dict[str, Shape]:
    head = model.index_head_dim
    return {
        "self_attn.indexer.wq_b.weight": (model.index_n_heads * head, model.q_lora_rank),
        "self_attn.indexer.wk.weight": (head, model.hidden_size),
        "self_attn.indexer.k_norm.weight": (head,),
        "self_attn.indexer.k_norm.bias": (head,),
        "self_attn.indexer.weights_proj.weight": (model.index_n_heads, model.hidden_size),
    }


def _dense_shapes(prefix: str, width: int, inner: int) -> dict[str, Shape]:
    pairs = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{prefix}.{name}.weight": shape for name, shape in pairs.items()}


def _sparse_shapes(model: Glm52Config) -> dict[str, Shape]:
    number, width, inner = model.n_routed_experts, model.hidden_size, model.moe_intermediate_size
    return {
        "mlp.gate.weight": (number, width),
        "mlp.experts.gate_up_proj": (number, 2 * inner, width),
        "mlp.experts.down_proj": (number, width, inner),
        **_dense_shapes("mlp.shared_experts", width, inner * model.n_shared_experts),
    }


def state_shapes(model: Glm52Config) -> StateShapes:
    """Return what the layers retain: latents and rotary keys, and the index keys of layers that choose."""
    layers = model.num_hidden_layers
    indexers = sum(_indexes(model, i) for i in range(layers))
    learnt: tuple[Shape, ...] = ((model.kv_lora_rank,), (model.qk_rope_head_dim,))
    return StateShapes(learnt_rows=learnt * layers, frozen_rows=((model.index_head_dim,),) * indexers)


@dataclass(frozen=True)
class Activations:
    """The moments at which memory may peak, in bytes beyond parameters, their gradients and the state."""

    model: Glm52Config
    lengths: Lengths

    # Tiles of the ops

    @property
    def cast(self) -> int:
        """Bytes of a value's copy in the inner dtype, where that is another one."""
        return 0 if self.lengths.item == self.lengths.inner else self.lengths.inner

    def _chosen(self, count: int, past: int) -> int:
        return min(self.model.index_topk, past + count)

    def gathered(self, count: int, past: int) -> int:
        """Values of one tile of gathered rows, [t, K, C + R]."""
        row = self.model.kv_lora_rank + self.model.qk_rope_head_dim
        a_query = self._chosen(count, past) * row
        return min(count, max(GATHER_TILE // max(a_query, 1), 1)) * a_query

    def attend(self, count: int, past: int, backward: bool) -> int:
        """Rows of the new part, of the past and where they join; backward: rows, their gradient, a part of it again."""
        values, f = self.gathered(count, past), self.lengths.inner
        row = self.model.kv_lora_rank + self.model.qk_rope_head_dim
        scores = values // row * self.model.num_attention_heads
        if not backward:
            return max(3 * values * self.lengths.item, values * f + 2 * scores * f)
        again = values // row * (self.model.kv_lora_rank * f + TOKEN + INDEX + 2)
        return 2 * values * f + again + 2 * scores * f

    def select(self, count: int, past: int) -> int:
        """Choice of rows: index scores of a tile of keys for all index heads, or the order of what they add up to."""
        f, heads = self.lengths.inner, self.model.index_n_heads
        queries = min(count, max(SCORE_TILE // (heads * KEY_TILE), 1))
        keys, chosen = min(KEY_TILE, max(past, count)), self._chosen(count, past)
        own = queries * keys * (f + INDEX + 1)  # scores, positions, what lies ahead
        scores = queries * keys * (heads * f + f + 1)
        joined = queries * (keys + chosen)
        order = joined * (f + INDEX + 3 + 2 * TOKEN)  # scores and rows, three masks, two sums of a mask
        query = count * heads * (self.model.index_head_dim + 1) * (self.lengths.item + self.cast)
        kept = count * chosen * (f + INDEX) + (past + count) * INDEX
        return max(scores, own + order) + query + kept

    # Retained rows, a layer at a time

    def _row(self, layer: int) -> int:
        """Values a position of what ``layer`` retains."""
        model = self.model
        learnt = model.kv_lora_rank + model.qk_rope_head_dim
        return learnt + (model.index_head_dim if _indexes(model, layer) else 0)

    def _staged(self, past: int, *layers: int) -> int:
        """All rows of those of ``layers`` that there are, brought from host memory."""
        if not self.lengths.on_host:
            return 0
        values = sum(self._row(layer) for layer in layers if 0 <= layer < self.model.num_hidden_layers)
        return past * values * self.lengths.row_item

    def _cast_rows(self, past: int, values: int) -> int:
        """``values`` a position of retained rows in the model's dtype where they are kept in another."""
        return 0 if self.lengths.row_item == self.lengths.item else past * values * self.lengths.item

    def _read(self, past: int) -> int:
        """Latents and rotary keys as attention reads them."""
        return self._cast_rows(past, self.model.kv_lora_rank + self.model.qk_rope_head_dim)

    def _added_into(self, past: int) -> int:
        """What the gradients of retained rows are added into where that is not their buffer."""
        values = self.model.kv_lora_rank + self.model.qk_rope_head_dim
        return self.lengths.graded_before(past) * values * self.lengths.added_item

    # What a block saves for its backward, bytes a position

    def _norm(self, width: int) -> int:
        return width * (self.cast + self.lengths.inner + self.lengths.item)

    @property
    def queries(self) -> int:
        """Compressed query and its norm; queries, absorbed and turned."""
        model, w = self.model, self.lengths.item
        plain, turned = model.qk_nope_head_dim, model.qk_rope_head_dim
        heads = model.num_attention_heads * (plain + turned + model.kv_lora_rank + turned)
        return model.q_lora_rank * w + self._norm(model.q_lora_rank) + heads * w

    @property
    def latents(self) -> int:
        """Latent and rotary key before and after norm and turning."""
        model, w = self.model, self.lengths.item
        return (model.kv_lora_rank + 2 * model.qk_rope_head_dim) * w + self._norm(model.kv_lora_rank)

    @property
    def outputs(self) -> int:
        """What heads read, and their values."""
        model = self.model
        return model.num_attention_heads * ((model.kv_lora_rank + model.v_head_dim) * self.lengths.item + 4)

    def feedforward(self, sparse: bool) -> int:
        """Residual, its norm; gate, up, SiLU and product of the dense part; scores and choice of experts."""
        model, w, f = self.model, self.lengths.item, self.lengths.inner
        inner = model.moe_intermediate_size * model.n_shared_experts if sparse else model.intermediate_size
        saved = model.hidden_size * w + self._norm(model.hidden_size) + 4 * inner * w
        if sparse:
            entries = model.num_experts_per_tok * (3 * TOKEN + 3 * f)
            saved += model.n_routed_experts * f + entries + model.hidden_size * self.cast
        return saved

    # Verbs

    def _inputs(self, count: int, past: int, layer: int) -> int:
        """Checkpointed inputs of blocks up to ``layer``: residuals, and the rows each was handed."""
        handed = sum(_indexes(self.model, i) for i in range(layer))
        residuals = (layer + 1) * self.model.hidden_size * self.lengths.item
        return count * (residuals + handed * self._chosen(count, past) * INDEX)

    def _added(self, count: int, layers: int) -> int:
        """What the first ``layers`` add to the state."""
        model = self.model
        indexers = sum(_indexes(model, i) for i in range(layers))
        values = layers * (model.kv_lora_rank + model.qk_rope_head_dim) + indexers * model.index_head_dim
        return count * values * self.lengths.item

    def _forward(self, count: int, past: int, layers: int) -> int:
        """Without a graph, ``layers`` of them whole."""
        model, w = self.model, self.lengths.item
        residual = 2 * model.hidden_size * w
        mixer = count * (residual + model.q_lora_rank * w + self.latents)
        staged = max((self._staged(past, i, i + 1) for i in range(layers)), default=0)
        choice = mixer + self.select(count, past) + self._cast_rows(past, model.index_head_dim) + staged
        rows = count * self._chosen(count, past) * INDEX
        attend = mixer + rows + count * (self.queries + self.outputs) + self.attend(count, past, backward=False)
        attend += self._read(past) + staged
        mlp = count * (5 * model.hidden_size + 3 * model.intermediate_size) * w + staged
        choosing = max((i + 1 for i in range(layers) if _indexes(model, i)), default=0)
        return max(choice + self._added(count, choosing), max(attend, mlp) + self._added(count, layers))

    def _head(self, count: int, backward: bool) -> int:
        model, f, w = self.model, self.lengths.inner, self.lengths.item
        rows, columns = min(count, POSITION_TILE), min(model.vocab_size, VOCABULARY_TILE)
        tiles = 2 * rows * columns * f + columns * model.hidden_size * self.cast
        tiles += self._staged(self.lengths.retained, model.num_hidden_layers - 1)
        if not backward:
            return tiles + count * 2 * model.hidden_size * w
        head = model.vocab_size if self.lengths.head_trained else 0
        gradients = (count + head) * model.hidden_size * (f + (w if self.cast else 0))
        if columns < model.vocab_size:  # the next tile's weight or logits, made while these are there
            tiles += max(columns * model.hidden_size * self.cast, rows * columns * f)
        return self._inputs(count, self.lengths.retained, model.num_hidden_layers) + gradients + tiles

    def _backward(self, count: int, past: int, layers: int) -> int:
        model, w = self.model, self.lengths.item
        moments = []
        for layer in range(layers):
            before = self._inputs(count, past, layer) + count * (self._norm(model.hidden_size) + model.hidden_size * w)
            mixer = before + count * (self.queries + self.latents + self.outputs)
            rows = count * self._chosen(count, past) * INDEX
            staged = self._staged(past, layer, layer - 1)
            if _indexes(model, layer):
                choice = self.select(count, past) + self._cast_rows(past, model.index_head_dim)
                moments.append(before + count * (model.q_lora_rank * w + self.latents) + choice + staged)
            sparse = _sparse(model, layer)
            inner = model.moe_intermediate_size * model.n_shared_experts if sparse else model.intermediate_size
            saved = count * (self.feedforward(sparse) + 2 * inner * w + model.hidden_size * w)
            moments.append(mixer + rows + saved + staged)
            given = count * model.num_attention_heads * (model.kv_lora_rank - model.v_head_dim) * w  # values are gone
            grads = count * (
                model.num_attention_heads * (model.kv_lora_rank + model.qk_rope_head_dim) + model.hidden_size
            )
            attend = self.attend(count, past, backward=True) + self._read(past) + self._added_into(past)
            moments.append(mixer + rows + given + grads * w + attend + staged)
        return max(moments)

    def prefill(self, start: int, count: int) -> int:
        """Return the most that a chunk of ``count`` positions from ``start`` on holds."""
        return self._forward(count, start, self.model.num_hidden_layers - 1)

    def score(self) -> int:
        """Return the most that a branch without a graph holds."""
        count, layers = self.lengths.response, self.model.num_hidden_layers
        return max(self._forward(count, self.lengths.retained, layers), self._head(count, backward=False))

    def replay(self) -> int:
        """Return the most that a branch with its backward holds."""
        count, layers = self.lengths.response, self.model.num_hidden_layers
        return max(self._backward(count, self.lengths.retained, layers), self._head(count, backward=True))

    def prompt_backward(self, start: int, count: int) -> int:
        """Return the most that a chunk evaluated again holds: all it adds to the state lives as long as its graph."""
        model, layers = self.model, self.model.num_hidden_layers
        learnt = count * layers * (model.kv_lora_rank + model.qk_rope_head_dim)
        owed = self._added(count, layers) + self.lengths.owed(learnt)
        return self._backward(count, start, layers - 1) + owed
