"""A decoder of pre-norm blocks over a retained past. Modules carry the names of transformers' classes.

T positions, d model width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longstraw.config import ModelConfig, StateConfig
from longstraw.layers.feedforward import MixtureOfExperts, SwiGLU
from longstraw.layers.lora_weight import effective_weight
from longstraw.ops import Ops
from longstraw.ops.chunk import Chunk, whole
from longstraw.ops.host_offload import Staging
from longstraw.ops.logprob import all_logits
from longstraw.state import DEFAULT_STORAGE, Past, RetainedState, RowStorage, Tensors


class Mixer(Protocol):
    """What a block asks of its token mixer; see ``layers.attention`` and ``layers.delta``."""

    def __call__(self, x: Tensor, past: Past) -> tuple[Tensor, Tensors]: ...

    def update(self, x: Tensor, past: Past) -> Tensors: ...

    def new_state(
        self, positions: int, *, grad_from: int | None, dtype: torch.dtype, storage: RowStorage = DEFAULT_STORAGE
    ) -> RetainedState: ...

    def flops(self, start: int, end: int, state_only: bool) -> int: ...


class Block(nn.Module):
    """``x += mixer(norm(x)); x += feedforward(norm(x))``. The subclass names the mixer as its checkpoint does."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mlp: SwiGLU | MixtureOfExperts

    @property
    def mixer(self) -> Mixer:
        raise AttributeError(f"{type(self).__name__} names no mixer")

    def forward(self, x: Tensor, past: Past, handed: Any, state_only: bool) -> tuple[Tensor | None, Tensors, Any]:
        """Return the block's output [T, d], what it adds to the state, and what it hands to the next block.

        ``handed`` is what the block before handed on. Where only the state is wanted, the other two are None.
        """
        normed = self.input_layernorm(x)
        if state_only:
            return None, self.mixer.update(normed, past), None
        mixed, update, handed = self.mix(normed, past, handed)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), update, handed

    def mix(self, x: Tensor, past: Past, handed: Any) -> tuple[Tensor, Tensors, Any]:
        """Run the mixer. Overridden where a block reads what it is handed, or hands something on."""
        mixed, update = self.mixer(x, past)
        return mixed, update, handed

    def flops(self, start: int, end: int, state_only: bool) -> int:
        """Return the operations of positions [start, end) on all before them, two a multiply-add."""
        return self.mixer.flops(start, end, state_only) + (0 if state_only else self.mlp.flops(end - start))


class Trunk(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: ModelConfig, blocks: Sequence[Block], norm: nn.Module):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm


class TiedHead(nn.Module):
    """A head that applies the embedding's weight and holds none of its own: one parameter, wherever it is put."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self._embedding = (embedding,)  # no submodule: its parameter has one name

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight


def _alone(count: int) -> int:
    return count


def _row_storage(state: StateConfig, device: torch.device) -> RowStorage:
    dtype, gradient_dtype = (
        None if name is None else getattr(torch, name) for name in (state.dtype, state.gradient_dtype)
    )
    return RowStorage(dtype, gradient_dtype, Staging(device) if state.device == "cpu" else None)


class Decoder(nn.Module):
    """A causal language model that reads its past from outside and stores nothing.

    With autograd on, every block is checkpointed: its activations are made again in the backward. What one block hands
    to the next is an input of the next, so each can be made again alone.
    """

    def __init__(self, config: ModelConfig, ops: Ops, blocks: Sequence[Block], norm: nn.Module):
        super().__init__()
        self.config, self.ops = config, ops
        self.split: Callable[[int], Chunk] = whole  # how many positions of a chunk are evaluated here, and which
        self.agree: Callable[[int], int] = _alone  # how often all must take part, where prompts stand side by side
        self.model = Trunk(config, blocks, norm)
        self.lm_head: nn.Linear | TiedHead
        if config.tied_embeddings:
            self.lm_head = TiedHead(self.model.embed_tokens)
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_states(
        self,
        positions: int,
        grad_from: int | None = None,
        chunk: int | None = None,
        state: StateConfig | None = None,
    ) -> list[RetainedState]:
        """Return an empty state a layer for ``positions`` prompt positions, evaluated ``chunk`` at a time (None: all).

        ``state`` says how rows are kept (None: in the model's dtype, on its device).
        A gradient can be had for positions from ``grad_from`` on; None: for none. Layers below the first one with a
        trained parameter keep none: it would reach nothing.
        """
        dtype = self.lm_head.weight.dtype
        chunk = chunk or max(positions, 1)
        pieces = [self.split(min(chunk, positions - start)) for start in range(0, positions, chunk)]
        rows = sum(piece.stop - piece.start for piece in pieces)
        storage = _row_storage(state or StateConfig(), self.lm_head.weight.device)
        states = []
        trained = any(p.requires_grad for p in self.model.embed_tokens.parameters())
        for block in self._blocks():
            layer = block.mixer.new_state(rows, grad_from=grad_from, dtype=dtype, storage=storage)
            trained = trained or any(p.requires_grad for p in block.parameters())
            if not trained:
                layer.freeze()
            states.append(layer)
        return states

    def forward(
        self, tokens: Tensor, past: Sequence[Past], state_only: bool = False
    ) -> tuple[Tensor | None, list[Tensors]]:
        """Return the normed hidden states [t, d] of ``tokens`` [T] and what each layer adds to its state.

        t is T, or the part of it that is evaluated here. With ``state_only`` the hidden states are None, and the last
        block does no more than its state asks for.
        """
        chunk = self.split(len(tokens))
        x: Tensor | None = self.ops.context.embed(tokens, self.model.embed_tokens.weight, chunk)
        updates, handed = [], None
        blocks = self._blocks()
        for i, (block, layer_past) in enumerate(zip(blocks, past, strict=True)):
            layer_past.chunk = chunk
            arguments = (x, layer_past, handed, state_only and i == len(blocks) - 1)
            if torch.is_grad_enabled():
                x, update, handed = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x, update, handed = block(*arguments)
            updates.append(update)
        return None if state_only else self.model.norm(x), updates

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return log-probability [T] of ``targets`` [T] and entropy [T] after ``hidden`` [t, d].

        Both are of the tempered distribution, softmax(logits / ``temperature``).
        """
        if temperature != 1:
            hidden = hidden / temperature  # the head is linear
        return self.ops.context.logprob(hidden, effective_weight(self.lm_head), targets, self.split(len(targets)))

    def logits(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the logits [t, V] after ``hidden`` [t, d] over ``temperature``, in at least float32."""
        return all_logits(hidden if temperature == 1 else hidden / temperature, effective_weight(self.lm_head))

    def flops(self, start: int, end: int, state_only: bool = False) -> int:
        """Return the operations of all blocks for positions [start, end) on all before them, two a multiply-add.

        With ``state_only`` the last block stops at what its state asks for, as in ``forward``.
        """
        blocks = self._blocks()
        return sum(block.flops(start, end, state_only and i == len(blocks) - 1) for i, block in enumerate(blocks))

    def head_flops(self, count: int) -> int:
        """Return the operations of the logits of ``count`` positions."""
        return 2 * count * self.lm_head.weight.shape.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        """Copy everything but the ops, as for a reference policy: Python's modules, of which some are, have no copy."""
        memo.update({id(part): part for part in self.ops})
        copied = memo[id(self)] = self.__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def _blocks(self) -> list[Block]:
        return list(self.model.layers)  # type: ignore[arg-type]
