"""The verbs of a step on the CUDA path, on one rank of any number: blocks gathered one after the other, and followed.

FSDP2 gathers a block into a buffer, copies its parameters out of it, and lets go of the buffer when the next block is
there (forward), or at once (backward, where the next block's buffer is filled meanwhile). What a block's gradients are
reduced from stays until the next block's are.
"""

from __future__ import annotations

from collections.abc import Mapping

from longstraw.config.architectures import Glm52Config
from longstraw.memory.estimate.glm_5_2_pass import Glm52Pass
from longstraw.memory.estimate.ledger import Held, Ledger
from longstraw.memory.estimate.passes import Saved
from longstraw.memory.estimate.qwen3_6_pass import Qwen36Pass
from longstraw.memory.estimate.ranks import Layout
from longstraw.memory.estimate.sizes import ITEM, Lengths

Kinds = dict[str, int]


class Spread:
    """Follows each verb at its largest; ``base`` is what the run holds meanwhile."""

    def __init__(self, layout: Layout, lengths: Lengths):
        self.layout, self.lengths = layout, lengths
        self.blocks = layout.blocks
        self._pass = Glm52Pass if isinstance(layout.config.model, Glm52Config) else Qwen36Pass

    def prefill(self, base: Mapping[str, int], start: int, count: int) -> Kinds:
        """Return what is held at most while a chunk of ``count`` positions from ``start`` on is evaluated."""
        ledger = Ledger(base)
        self._forward(ledger, count, start, state_only=True)
        return ledger.at_peak

    def score(self, base: Mapping[str, int]) -> Kinds:
        """Return what is held at most while a branch is evaluated without a graph."""
        ledger = Ledger(base)
        followed, _ = self._forward(ledger, self.lengths.response, self.lengths.retained)
        hidden = self._last_norm(followed, None)
        followed.head(hidden, None)
        return ledger.at_peak

    def replay(self, base: Mapping[str, int]) -> Kinds:
        """Return what is held at most while a branch and its backward are evaluated."""
        ledger = Ledger(base)
        followed, inputs = self._forward(ledger, self.lengths.response, self.lengths.retained, graph=True)
        saved = Saved()
        hidden = self._last_norm(followed, saved)
        followed.head(hidden, saved)
        ledger.drop(*followed.updates)
        grad = followed.head_backward(saved)
        grad = followed.norm_backward("norm", followed.d, saved, grad)
        self._backward(followed, inputs, grad)
        return ledger.at_peak

    def prompt_backward(self, base: Mapping[str, int], start: int, count: int) -> Kinds:
        """Return what is held at most while a chunk is evaluated again with its backward."""
        ledger = Ledger(base)
        followed, inputs = self._forward(ledger, count, start, graph=True, state_only=True)
        ledger.take("owed", followed.owed())
        self._backward(followed, inputs, None, state_only=True)
        return ledger.at_peak

    def _last_norm(self, followed: Qwen36Pass | Glm52Pass, saved: Saved | None) -> Held:
        followed.block = "model."
        return followed.norm("norm", followed.d, saved)

    def _forward(
        self, ledger: Ledger, count: int, past: int, *, graph: bool = False, state_only: bool = False
    ) -> tuple[Qwen36Pass | Glm52Pass, list[list[Held]]]:
        """Follow the blocks; return what followed them and, with a ``graph``, each block's inputs.

        What is held grows from block to block, so of blocks alike only the last is followed.
        """
        followed, last = self._pass(ledger, self.layout, self.lengths, count, past), len(self.blocks) - 1
        x, inputs = [followed.embed()], list[list[Held]]()
        decide = set({self._kinds(i): i for i in range(last)}.values())  # the last of each
        for i in range(last + 1):
            if i in decide or i in (0, last):
                buffer, outputs = self._gather(ledger, i, [ledger.take("gathered", self._buffer(i - 1), "gathered")])
                y = followed.forward(i, x, None, state_only=state_only and i == last)
                ledger.drop(buffer, outputs)
            else:
                y = self._step_over(followed, i, x)
            inputs.append(x)
            if not graph:
                ledger.drop(*(held for held in x if held not in y))
            x = y
        if not graph and not state_only:
            ledger.drop(*x)
        return followed, inputs

    def _kinds(self, i: int) -> object:
        """What the memory of a block depends on: its own parameters and those of its neighbours."""
        return tuple(self.blocks[j].kind if 0 <= j < len(self.blocks) else None for j in (i - 1, i, i + 1))

    def _buffer(self, i: int) -> int:
        """Bytes that block ``i`` is gathered into, if there is one and anything is to be gathered."""
        return self.blocks[i].buffer if self.layout.sizes.world > 1 and i >= 0 else 0

    def _gather(self, ledger: Ledger, i: int, before: list[Held]) -> tuple[Held, Held]:
        """Take a block's buffer and the parameters copied out of it, then let go of the buffer ``before``."""
        buffer = ledger.take("gathered", self._buffer(i), "gathered")
        outputs = ledger.take("gathered", self.blocks[i].outputs if self.layout.sizes.world > 1 else 0, "gathered")
        ledger.drop(*before)
        return buffer, outputs

    def _step_over(self, followed: Qwen36Pass | Glm52Pass, i: int, x: list[Held]) -> list[Held]:
        """Take what a block leaves, without following it; return its outputs."""
        kind = self.blocks[i].kind
        if kind not in followed.left:
            alone = self._pass(Ledger({}), self.layout, self.lengths, followed.piece.n, followed.past)
            y = alone.forward(i, x, None, state_only=False)
            followed.left[kind] = alone.updates, [held for held in y if held not in x]
        updates, outputs = followed.left[kind]
        followed.updates += [followed.take(held.name, held.size, held.kind) for held in updates]
        new = [followed.take(held.name, held.size, held.kind) for held in outputs]
        return [*new, *x[len(new) :]]

    def _backward(
        self,
        followed: Qwen36Pass | Glm52Pass,
        inputs: list[list[Held]],
        grad: Held | None,
        *,
        state_only: bool = False,
    ) -> None:
        """Follow the blocks back, each evaluated again; ``grad`` is that of the last one's output."""
        ledger, last = followed.ledger, len(self.blocks) - 1
        seen = set[object]()
        for i in reversed(range(last + 1)):
            if i not in (0, last - 1, last) and self._kinds(i) in seen:
                ledger.drop(*(held for held in inputs[i] if held not in inputs[i - 1]))
                continue
            if i < last:
                seen.add(self._kinds(i))
            reduced = ledger.take("reduced", self._sent(i + 1), "communication")
            buffer, outputs = self._gather(ledger, i, [])
            ledger.drop(buffer)
            ahead = ledger.take("gathered", self._buffer(i - 1), "gathered")
            saved, number, only = Saved(), len(followed.updates), state_only and i == last
            begun = ledger.take("begun", 0 if only else followed.begun(i))
            again = followed.forward(i, inputs[i], saved, state_only=only)
            ledger.drop(begun, *(held for held in again if held not in inputs[i]), *followed.updates[number:])
            del followed.updates[number:]
            followed.backward(i, saved, state_only=only)
            own = ledger.take("gradient", followed.piece.t * followed.d * followed.w)
            ledger.drop(outputs, reduced, *([grad] if grad else []))
            ledger.drop(*(held for held in inputs[i] if i == 0 or held not in inputs[i - 1]))
            grad = own
            self._reduce(followed, i)
            ledger.drop(ahead)
        if grad:
            followed.embed_backward(grad)

    def _sent(self, i: int) -> int:
        """Bytes that the gradients of block ``i`` are reduced from, on all ranks."""
        if self.layout.sizes.world == 1 or i == len(self.blocks):
            return 0
        return self.layout.sizes.world * self.blocks[i].reduced(ITEM["float32"])

    def _reduce(self, followed: Qwen36Pass | Glm52Pass, i: int) -> None:
        """Follow the gradients of a block's parameters to their sums."""
        ledger, block = followed.ledger, self.blocks[i]
        own, followed.gradients = followed.gradients, []
        sent = ledger.take("reduced", self._sent(i), "communication")
        ledger.drop(*own)
        if sent.size:
            came = ledger.take("gradients", block.reduced(ITEM["float32"]), "communication")
            narrow = ledger.take("gradients", block.reduced(block.learnt[0].item))
            ledger.drop(came, narrow)
        ledger.drop(sent)
