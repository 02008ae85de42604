"""Bytes that one rank sends in a step, in closed form from its configuration; what ``parallel.comm_meter`` counts.

Exact for parameters, gradients and all that joins positions; experts are chosen evenly. Prompts side by side have the
same lengths, and where there are adapters every mixer has one.

Widths are values a position. n positions of a chunk, m = ceil(n / cp) of the longest piece, to which all are padded;
``w`` bytes a value in the model's dtype, ``f`` in the inner one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from longstraw.config import RunConfig, gradient_start
from longstraw.config.architectures import Glm52Config, Qwen36Config
from longstraw.config.architectures.base import ModelConfig
from longstraw.models import build_model
from longstraw.parallel.parallel_dims import ParallelDims

Shape = tuple[int, ...]
ITEM = {"float64": 8, "float32": 4, "bfloat16": 2}  # bytes of a number
FROZEN = ".indexer."

INDEX, COUNT = 4, 8  # int32, int64
STAYS = ("model.embed_tokens.", "lm_head.", ".experts.")  # never gathered
STATE = ("input_layernorm", "k_proj", "v_proj", "k_norm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # what a state reads

Bytes = Counter[tuple[str, str]]  # by collective and by what it is for


def bytes_sent(
    config: RunConfig, sizes: ParallelDims, *, prompt_positions: int, response_positions: Sequence[int]
) -> dict[tuple[str, str, str], int]:
    """Return what one rank sends in a step: bytes by verb, collective and label, as ``TrafficMeter.sent``.

    ``prompt_positions`` include the last prompt token; ``response_positions`` has one number a response.
    """
    step = _Step(config, sizes)
    retained, algorithm = prompt_positions - 1, config.algorithm
    first = gradient_start(retained, config.chunk, config.prompt_grad, config.prompt_grad_window)
    chunks = [(start, min(config.chunk, retained - start)) for start in range(0, retained, config.chunk)]
    again = [chunk for chunk in chunks if first is not None and chunk[0] >= first]
    reference, scored = bool(algorithm.kl_coef), algorithm.old_logprobs == "score"
    prefills, scores = 1 + reference, reference + scored
    verbs = {
        "prefill": _times(_sum(step.evaluate(n, past, state_only=True) for past, n in chunks), prefills),
        "score": _times(_sum(step.branch(n, retained) for n in response_positions), scores),
        "replay": _sum(step.replay(n, retained) for n in response_positions),
        "prompt_backward": _sum(step.chunk_backward(n, past) for past, n in again),
        "optimizer": step.finish(),
        "other": Counter[tuple[str, str]](),
    }
    for verb, number in (("prefill", prefills), ("score", scores), ("replay", 1), ("other", 1)):
        verbs[verb]["all_reduce", "rounds"] += number * (2 * COUNT * (sizes.dp - 1) // sizes.dp)
    return {(verb, *key): size for verb, sent in verbs.items() for key, size in sent.items() if size}


def _is_adapted(config: RunConfig, name: str) -> bool:
    """Return whether a matrix has a low-rank adapter."""
    targets = config.adapter.targets or config.model.adapter_targets
    module = f".{name.removesuffix('.weight')}"
    return FROZEN not in name and any(module.endswith(f".{target}") for target in targets)


def _sum(parts: Iterator[Bytes]) -> Bytes:
    total: Bytes = Counter()
    for part in parts:
        total += part
    return total


def _times(sent: Bytes, number: int) -> Bytes:
    return Counter({key: size * number for key, size in sent.items()})


@dataclass(frozen=True)
class _Sender:
    """What the collectives of a chunk's ranks send, by the rules of ``parallel.comm_meter``."""

    sizes: ParallelDims
    w: int
    f: int

    def rows(self, n: int, size: int) -> int:
        """All-gather of own rows, or reduce-scatter to them, ``size`` bytes each: the same."""
        return (self.sizes.cp - 1) * self.longest(n) * size

    def columns(self, n: int, size: int) -> int:
        """All-to-all of own rows, of which each rank gets a column."""
        return self.rows(n, size) // self.sizes.cp

    def stacked(self, size: int) -> int:
        """All-gather of ``size`` bytes that every rank has."""
        return (self.sizes.cp - 1) * size

    def longest(self, n: int) -> int:
        return max(-(-n // self.sizes.cp), 1)


class _Qwen(_Sender):
    """Full attention and delta layers."""

    def forward(self, model: ModelConfig, layer: int, n: int, past: int, state_only: bool) -> Bytes:
        assert isinstance(model, Qwen36Config)
        if model.layer_types[layer] == "full_attention":
            if state_only:
                return Counter()
            heads, width = model.num_attention_heads, model.num_attention_heads * model.head_dim
            gathered = self.rows(n, width * self.w) + self.stacked(heads * n * self.f)
            return Counter(
                {("all_gather", "attention"): gathered, ("reduce_scatter", "attention"): self.rows(n, width * self.f)}
            )
        return Counter({("all_to_all", "heads"): self.columns(n, self._delta(model) * self.w)})

    def backward(self, model: ModelConfig, layer: int, n: int) -> Bytes:
        assert isinstance(model, Qwen36Config)
        if model.layer_types[layer] == "full_attention":
            width = model.num_attention_heads * model.head_dim
            return Counter(
                {
                    ("all_gather", "attention"): self.rows(n, 3 * width * self.w),  # gradient, queries, output
                    ("reduce_scatter", "attention"): self.rows(n, width * self.f),
                }
            )
        return Counter({("all_to_all", "heads"): self.columns(n, self._delta(model) * self.w)})

    def _delta(self, model: Qwen36Config) -> int:
        """Queries, keys, values and two scalars a head to heads, and outputs back to positions."""
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        values = model.linear_num_value_heads * model.linear_value_head_dim
        return 2 * keys + 2 * values + 2 * model.linear_num_value_heads


class _Glm(_Sender):
    """Latent attention, choice of rows and mixtures of experts."""

    def forward(self, model: ModelConfig, layer: int, n: int, past: int, state_only: bool) -> Bytes:
        assert isinstance(model, Glm52Config)
        if state_only:
            return Counter()
        assert model.indexer_types is not None
        assert model.mlp_layer_types is not None
        heads = model.num_attention_heads
        query = heads * (model.kv_lora_rank + model.qk_rope_head_dim)
        sent = Counter(
            {
                ("all_gather", "attention"): self.rows(n, query * self.w) + self.stacked(heads * n * self.f),
                ("reduce_scatter", "attention"): self.rows(n, heads * model.kv_lora_rank * self.f),
            }
        )
        if model.indexer_types[layer] == "full":
            chosen = max(min(model.index_topk, past + n), 1)
            asked = model.index_n_heads * (model.index_head_dim * self.w + self.f)  # queries and their weights
            sent["all_gather", "selection"] = self.rows(n, asked + self.f + INDEX)
            sent["all_to_all", "selection"] = self.rows(n, chosen * (self.f + INDEX))
        if model.mlp_layer_types[layer] == "sparse":
            sent["all_to_all", "experts"] = self._experts(model, n, COUNT * model.n_routed_experts)
        return sent

    def backward(self, model: ModelConfig, layer: int, n: int) -> Bytes:
        assert isinstance(model, Glm52Config)
        assert model.mlp_layer_types is not None
        heads, latent = model.num_attention_heads, model.kv_lora_rank
        query = heads * (latent + model.qk_rope_head_dim)
        sent = Counter(
            {
                ("all_gather", "attention"): self.rows(n, (2 * heads * latent + query) * self.w),
                ("reduce_scatter", "attention"): self.rows(n, query * self.f),
            }
        )
        if model.mlp_layer_types[layer] == "sparse":
            sent["all_to_all", "experts"] = self._experts(model, n, 0)
        return sent

    def _experts(self, model: Glm52Config, n: int, told: int) -> int:
        """Tokens with their weights to experts, results back; ``told``: bytes that say how many go where."""
        ep = self.sizes.ep
        entries = n * model.num_experts_per_tok / self.sizes.cp
        size = entries * (2 * model.hidden_size * self.w + self.f) + told
        return round(size * (ep - 1) / ep)


class _Step:
    """The verbs of one step."""

    def __init__(self, config: RunConfig, sizes: ParallelDims):
        self.model, self.sizes = config.model, sizes
        self.w = ITEM[config.model.dtype]
        self.f = max(self.w, ITEM["float32"])
        sender = _Glm if isinstance(config.model, Glm52Config) else _Qwen
        self.send = sender(sizes, self.w, self.f)
        self.summed = self.f if config.optimizer.gradient_dtype == "float32" else self.w  # bytes that gradients sum in
        self.everything = config.adapter.name == "none"
        self.kept = config.state.keep_attention
        whole = build_model(config.model, device="meta")
        self.shapes = [(name, tuple(parameter.shape)) for name, parameter in whole.named_parameters()]
        self.blocks = [_Parameters() for _ in range(config.model.num_hidden_layers + 1)]  # the last: the final norm
        adapters = [n for n, shape in self.shapes if len(shape) == 2] if not self.everything else []
        self.adapters = {name for name in adapters if _is_adapted(config, name)}
        self.first = min((int(name.split(".")[2]) for name in self.adapters), default=0)  # block with a gradient
        self._share_out(config.adapter.rank)

    def _share_out(self, rank: int) -> None:
        for name, shape in self.shapes:
            if any(part in name for part in STAYS):
                continue
            parts = name.split(".")
            block = self.blocks[int(parts[2]) if parts[1] == "layers" else -1]
            block.gathered += self._part(shape) * self.w
            trained: list[Shape] = [shape] if self.everything and FROZEN not in name else []
            if name in self.adapters:
                trained = [(rank, shape[1]), (shape[0], rank)]
                block.gathered += sum(map(self._part, trained)) * self.f
            size = sum(map(self._part, trained)) * self.f
            block.trained += size
            block.state += size if parts[-2] in STATE else 0

    def _part(self, shape: Shape) -> int:
        """Values of one rank's part of a parameter, padded to the largest; each is sent to all other ranks."""
        world = self.sizes.world
        return -(-shape[0] // world) * prod(shape[1:]) * (world - 1)

    def evaluate(self, n: int, past: int, *, state_only: bool) -> Bytes:
        """One evaluation of ``n`` positions without a graph, or the forward of one with."""
        layers = range(self.model.num_hidden_layers)
        sent = _sum(self.send.forward(self.model, i, n, past, state_only and i == layers[-1]) for i in layers)
        sent["reduce_scatter", "vocabulary"] += self.send.rows(n, self.model.hidden_size * self.w)
        sent["all_gather", "parameters"] += sum(block.gathered for block in self.blocks)
        return sent

    def branch(self, n: int, past: int) -> Bytes:
        """A response's log-probabilities without a graph."""
        sent = self.evaluate(n, past, state_only=False)
        sent["all_gather", "vocabulary"] += self.send.rows(n, self.model.hidden_size * self.w)
        sent["all_gather", "vocabulary"] += self.send.stacked(3 * n * self.f)
        return sent

    def replay(self, n: int, past: int) -> Bytes:
        """A response with its backward."""
        sent = self.branch(n, past) + self._backward(n, past, self.model.num_hidden_layers)
        sent["reduce_scatter", "vocabulary"] += self.send.rows(n, self.model.hidden_size * self.f)
        sent["reduce_scatter", "gradients"] += sum(block.trained for block in self.blocks)
        return sent

    def chunk_backward(self, n: int, past: int) -> Bytes:
        """A chunk evaluated again with its backward; of the last block, only what its state reads has gradients."""
        last = self.model.num_hidden_layers - 1
        sent = self.evaluate(n, past, state_only=True) + self._backward(n, past, last)
        sent["reduce_scatter", "gradients"] += sum(block.trained for block in self.blocks[:last])
        sent["reduce_scatter", "gradients"] += self.blocks[last].state
        return sent

    def _backward(self, n: int, past: int, layers: int) -> Bytes:
        """Each block evaluated again, and the gradients of what it sent."""
        sent: Bytes = Counter()
        for layer in range(self.first, layers):
            again = self.send.forward(self.model, layer, n, past, False)
            if self.kept:
                again = Counter({key: size for key, size in again.items() if key[1] not in ("attention", "selection")})
            sent += again + self.send.backward(self.model, layer, n)
        sent["all_gather", "parameters"] += sum(block.gathered for block in self.blocks[self.first :])
        if self.everything:
            sent["all_gather", "vocabulary"] += self.send.rows(n, self.model.hidden_size * self.w)
        return sent

    def finish(self) -> Bytes:
        """What several ranks hold alike is summed; the norm is one number."""
        sizes, sent = self.sizes, Counter[tuple[str, str]]()
        alike = {"model.embed_tokens.": (sizes.cp, sizes.dp), "lm_head.": (sizes.cp, sizes.dp)}
        alike[".experts."] = (sizes.ep, sizes.world // sizes.ep)
        for name, shape in self.shapes:
            for part, (owners, holders) in alike.items():
                if part in name and self.everything:
                    size = -(-shape[0] // owners) * prod(shape[1:]) * self.summed
                    sent["all_reduce", "gradients"] += 2 * size * (holders - 1) // holders
        sent["all_reduce", "norm"] += 2 * self.f * (sizes.world - 1) // sizes.world
        return sent


@dataclass
class _Parameters:
    """Bytes that one rank sends for a block's parameters each time: gathered, and reduced from gradients."""

    gathered: int = 0
    trained: int = 0
    state: int = 0  # of ``trained``, what the block's state reads
