"""A causal decoder of pre-norm blocks that reads a retained past. Modules are named as in transformers' classes.

T positions, d model width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longstraw.config import ModelConfig, StateConfig
from longstraw.layers.feedforward import GatedMixture, MixtureOfExperts, SwiGLU
from longstraw.layers.lora_weight import effective_weight
from longstraw.ops import Ops
from longstraw.ops.chunk import Chunk, whole
from longstraw.ops.host_offload import Staging
from longstraw.state import DEFAULT_STORAGE, Past, RetainedState, RowStorage, Tensors


class Mixer(Protocol):
    """The interface of a block's token mixer; see ``layers.attention`` and ``layers.delta``."""

    def __call__(self, x: Tensor, past: Past) -> tuple[Tensor, Tensors]: ...

    def update(self, x: Tensor, past: Past) -> Tensors: ...

    def new_state(
        self, positions: int, *, grad_from: int | None, dtype: torch.dtype, storage: RowStorage = DEFAULT_STORAGE
    ) -> RetainedState: ...

    def flops(self, start: int, end: int, state_only: bool) -> int: ...

    def attention_flops(self, start: int, end: int) -> int: ...


class Block(nn.Module):
    """``x += mixer(norm(x)); x += feedforward(norm(x))``. A subclass names the mixer as its checkpoints do."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mlp: SwiGLU | MixtureOfExperts | GatedMixture

    @property
    def mixer(self) -> Mixer:
        raise AttributeError(f"{type(self).__name__} names no mixer")

    def forward(self, x: Tensor, past: Past, handed: Any, state_only: bool) -> tuple[Tensor | None, Tensors, Any]:
        """Return the block's output [T, d], its update of the state, and the value it passes to the next block.

        ``handed`` is the value from the block before. With ``state_only`` the output and the value passed on are None.
        """
        normed = self.input_layernorm(x)
        if state_only:
            return None, self.mixer.update(normed, past), None
        mixed, update, handed = self.mix(normed, past, handed)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), update, handed

    def mix(self, x: Tensor, past: Past, handed: Any) -> tuple[Tensor, Tensors, Any]:
        """Run the mixer. Overridden by blocks that read ``handed`` or pass a value on."""
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
    """A head that applies the embedding's weight and has no parameter of its own."""

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
    staging = Staging(device) if state.device == "cpu" else None
    return RowStorage(dtype, gradient_dtype, staging, state.keep_attention)


class Decoder(nn.Module):
    """A causal language model that gets the past as an argument and stores nothing between calls.

    With autograd on, every block is checkpointed: its activations are recomputed in the backward. The value that one
    block passes to the next is an input of the next, so each can be recomputed alone.
    """

    def __init__(self, config: ModelConfig, ops: Ops, blocks: Sequence[Block], norm: nn.Module):
        super().__init__()
        self.config, self.ops = config, ops
        self.split: Callable[[int], Chunk] = whole  # how many positions of a chunk are evaluated here, and which
        self.agree: Callable[[int], int] = (
            _alone  # how many passes all ranks take part in, with several prompts at once
        )
        self.model = Trunk(config, blocks, norm)
        self.lm_head: nn.Linear | TiedHead
        if config.tie_word_embeddings:
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
        Positions from ``grad_from`` on get a gradient; None: none do. Layers below the first trained parameter keep no
        gradient, because it would reach no parameter.
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
        self, tokens: Tensor, past: Sequence[Past], state_only: bool = False, segments: tuple[int, ...] = ()
    ) -> tuple[Tensor | None, list[Tensors]]:
        """Return the normed hidden states [t, d] of ``tokens`` [T] and each layer's update of its state.

        t is T, or the number of positions evaluated on this rank. With ``state_only`` the hidden states are None, and
        the last block computes only its update. With ``segments``, lengths that add up to T, each continues the past by
        itself and sees no other.
        """
        chunk = replace(self.split(len(tokens)), segments=segments)
        x: Tensor | None = self.ops.context.embed(tokens, self.model.embed_tokens.weight, chunk)
        updates, handed = [], None
        blocks = self._blocks()
        for i, (block, layer_past) in enumerate(zip(blocks, past, strict=True)):
            layer_past.chunk = chunk
            if not torch.is_grad_enabled():
                layer_past.kept = None  # no backward will come
            arguments = (x, layer_past, handed, state_only and i == len(blocks) - 1)
            if torch.is_grad_enabled():
                x, update, handed = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x, update, handed = block(*arguments)
            if layer_past.kept is not None and x is not None and not x.requires_grad:
                layer_past.kept.clear()  # nothing in the block needs a gradient: it is not recomputed
            updates.append(update)
        return None if state_only else self.model.norm(x), updates

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return log-probability [T] of ``targets`` [T] and entropy [T] after ``hidden`` [t, d].

        Both are of the tempered distribution, softmax(logits / ``temperature``).
        """
        if temperature != 1:
            hidden = hidden / temperature  # the head is linear
        return self.ops.context.logprob(hidden, effective_weight(self.lm_head), targets, self.split(len(targets)))

    def logits(self, hidden: Tensor, count: int, temperature: float = 1.0) -> Tensor:
        """Return the logits [t, V] over ``temperature``, in at least float32, after ``hidden`` [t, d] of ``count``."""
        if temperature != 1:
            hidden = hidden / temperature
        return self.ops.context.logits(hidden, effective_weight(self.lm_head), self.split(count))

    def flops(self, start: int, end: int, state_only: bool = False) -> int:
        """Return the operations of all blocks for positions [start, end) on all before them, two a multiply-add.

        With ``state_only`` the last block computes only its update, as in ``forward``.
        """
        blocks = self._blocks()
        return sum(block.flops(start, end, state_only and i == len(blocks) - 1) for i, block in enumerate(blocks))

    def attention_flops(self, start: int, end: int, state_only: bool = False) -> int:
        """Return those of ``flops`` that joining positions by attention takes, the choice of rows included."""
        blocks = self._blocks()[: -1 if state_only else None]
        return sum(block.mixer.attention_flops(start, end) for block in blocks)

    def head_flops(self, count: int) -> int:
        """Return the FLOPs of the logits of ``count`` positions."""
        return 2 * count * self.lm_head.weight.shape.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        """Copy all but the ops, for a reference policy: some ops are Python modules, which cannot be copied."""
        memo.update({id(part): part for part in self.ops})
        copied = memo[id(self)] = self.__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def _blocks(self) -> list[Block]:
        return list(self.model.layers)  # type: ignore[arg-type]
