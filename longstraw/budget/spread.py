"""The verbs of a step on the CUDA path, on one rank of any number: blocks gathered one after the other, and followed.

FSDP2 gathers a block into a buffer, copies its parameters out of it, and lets go of the buffer when the next block is
there (forward), or at once (backward, where the next block's buffer is filled meanwhile). What a block's gradients are
reduced from stays until the next block's are.
"""

from __future__ import annotations

from collections.abc import Mapping

from longstraw.budget.glm_5_2_pass import Glm52Pass
from longstraw.budget.ledger import Held, Ledger
from longstraw.budget.passes import Saved
from longstraw.budget.qwen3_6_pass import Qwen36Pass
from longstraw.budget.ranks import Layout
from longstraw.budget.sizes import ITEM, Lengths
from longstraw.model_config import Glm52Config

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
        """Follow the blocks; return what followed them and, with a ``graph``, each block's inputs."""
        followed = self._pass(ledger, self.layout, self.lengths, count, past)
        x, inputs, before = [followed.embed()], [], list[Held]()
        for i, block in enumerate(self.blocks):
            gathered = []
            if self.layout.sizes.world > 1:
                buffer = ledger.take("gathered", block.buffer, "gathered")
                gathered = [ledger.take("gathered", block.outputs, "gathered")]
                ledger.drop(*before)
                before = [buffer]
            y = followed.forward(i, x, None, state_only=state_only and i == len(self.blocks) - 1)
            ledger.drop(*gathered)
            inputs.append(x)
            if not graph:
                ledger.drop(*(held for held in x if held not in y))
            x = y
        ledger.drop(*before)
        if not graph and not state_only:
            ledger.drop(*x)
        return followed, inputs

    def _backward(
        self,
        followed: Qwen36Pass | Glm52Pass,
        inputs: list[list[Held]],
        grad: Held | None,
        *,
        state_only: bool = False,
    ) -> None:
        """Follow the blocks back, each evaluated again; ``grad`` is that of the last one's output."""
        ledger, world = followed.ledger, self.layout.sizes.world
        reduced: list[Held] = []
        ahead: list[Held] = []
        for i in reversed(range(len(self.blocks))):
            block, only = self.blocks[i], state_only and i == len(self.blocks) - 1
            gathered = []
            if world > 1:
                buffer = ahead or [ledger.take("gathered", block.buffer, "gathered")]
                gathered = [ledger.take("gathered", block.outputs, "gathered")]
                ledger.drop(*buffer)
                ahead = [ledger.take("gathered", self.blocks[i - 1].buffer, "gathered")] if i else []
            saved, number = Saved(), len(followed.updates)
            again = followed.forward(i, inputs[i], saved, state_only=only)
            ledger.drop(*(held for held in again if held not in inputs[i]), *followed.updates[number:])
            del followed.updates[number:]
            followed.backward(i, saved, state_only=only)
            own = ledger.take("gradient", followed.piece.t * followed.d * followed.w)
            ledger.drop(*gathered, *([grad] if grad else []))
            ledger.drop(*(held for held in inputs[i] if i == 0 or held not in inputs[i - 1]))
            grad = own
            reduced = self._reduce(followed, i, reduced)
        if grad:
            followed.embed_backward(grad)

    def _reduce(self, followed: Qwen36Pass | Glm52Pass, index: int, before: list[Held]) -> list[Held]:
        """Follow the gradients of a block's parameters to their sums; return what is kept until the next block's."""
        ledger, block = followed.ledger, self.blocks[index]
        own, followed.gradients = followed.gradients, []
        if self.layout.sizes.world == 1 or not block.learnt:
            ledger.drop(*own)
            return before
        ledger.drop(*before)
        wide = max(ITEM["float32"], followed.w)
        sent = ledger.take("reduced", self.layout.sizes.world * block.reduced(wide), "communication")
        ledger.drop(*own)
        came = ledger.take("gradients", block.reduced(wide), "communication")
        narrow = ledger.take("gradients", block.reduced(block.learnt[0].item))
        ledger.drop(came, narrow)
        return [sent]
