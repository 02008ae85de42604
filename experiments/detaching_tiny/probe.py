"""Train adapters that act while the prompt is evaluated, and nothing else; print a CSV row a point of a curve.

    python experiments/detaching_tiny/probe.py --task gap --seed 1

The adapters add to the key and value projections at all prompt positions but the last, whose query asks. The loss
reaches them through the retained state alone: the detached gradient has nothing for them, the exact one has all.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from batched import evaluate
from learning_tasks import draw
from torch import Tensor, nn
from torch.nn import functional as F
from train import ARMS, HELD_OUT, TESTS, Run, adamw, started, update

from longstraw.layers.attention import GatedAttention
from longstraw.models.decoder import Decoder

COLUMNS = ("task", "arm", "seed", "lr", "step", "cpu_seconds", "success", "loss", "gradient_norm")


class PromptAdapters(nn.Module):
    """Low-rank additions to all key and value projections of a model, zero at first; off unless inside ``active``."""

    def __init__(self, model: Decoder, rank: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.places: list[tuple[nn.Module, int]] = []  # a projection, and its first column of keys or values
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for block in model.model.layers:
            mixer = block.mixer
            if isinstance(mixer, GatedAttention):
                self.places += [(mixer.k_proj, 0), (mixer.v_proj, 0)]
            else:
                self.places.append((mixer.in_proj_qkv, mixer.widths[0]))
        for projection, first in self.places:
            rows, width = projection.weight.shape
            like = projection.weight.detach()
            self.down.append(torch.randn(rank, width, generator=generator).to(like) / width**0.5)
            self.up.append(like.new_zeros(rows - first, rank))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Add to the projections while the context lasts."""
        with ExitStack() as hooks:
            for (projection, first), down, up in zip(self.places, self.down, self.up, strict=True):

                def add(_: nn.Module, given: tuple[Tensor], out: Tensor, first=first, down=down, up=up) -> Tensor:
                    return out + F.pad(given[0] @ down.T @ up.T, (first, 0))

                hooks.callback(projection.register_forward_hook(add).remove)
            yield


def probed_logits(model: Decoder, adapters: PromptAdapters, prompts: Tensor, arm: str) -> Tensor:
    """Return the logits [B, V] after ``prompts`` [B, P], of which all positions but the last are adapted."""
    tokens = prompts.T
    with adapters.active(), torch.no_grad() if arm == "detached" else nullcontext():
        past = evaluate(model, tokens[:-1], None, 0)[1]
    return model.lm_head(evaluate(model, tokens[-1:], past, len(tokens) - 1)[0][-1])


def probe(run: Run, model: Decoder, rank: int = 16) -> Iterator[dict[str, object]]:
    """Yield a row every ``run.every`` steps: success and loss on held-out prompts, and the last gradient's norm."""
    adapters, begun, norm = PromptAdapters(model, rank, run.seed), time.process_time(), 0.0
    optimizer = adamw(adapters, run.lr)
    held_out, right = draw(run.task, HELD_OUT, 0, TESTS)
    for step in range(run.steps + 1):
        if step % run.every == 0:
            with torch.no_grad():
                scores = probed_logits(model, adapters, held_out, run.arm)
            yield {
                "task": run.task, "arm": run.arm, "seed": run.seed, "lr": run.lr, "step": step,
                "cpu_seconds": round(time.process_time() - begun, 2),
                "success": float((scores.argmax(-1) == right).float().mean()),
                "loss": float(F.cross_entropy(scores, right)), "gradient_norm": norm,
            }  # fmt: skip
        prompts, answers = draw(run.task, run.seed, step, run.batch)
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(probed_logits(model, adapters, prompts, run.arm), answers)
        norm = update(adapters, optimizer, loss, run.lr * min(1, (step + 1) / 50))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--task", nargs="+", required=True)
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3])
    parser.add_argument("--steps", type=int, default=400)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    given = parser.parse_args()
    model = started(given.seed, given.task)
    for task, lr, arm in itertools.product(given.task, given.lr, given.arm):
        for row in probe(Run(task, arm, "golden", given.seed, lr, given.steps), model):
            writer.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
