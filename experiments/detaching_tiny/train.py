"""Train the tiny hybrid with the exact and with the detached gradient; print a CSV row a point of a curve.

    python experiments/detaching_tiny/train.py --task duplicate --learn golden --seed 1

Each seed has its own initial weights and its own warm-up on lookup, from which both arms start.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from batched import CLOSE, build, distance_from_product, grpo_loss, hidden, logits
from learning_tasks import VOCABULARY, draw, repeated_lookup
from torch import Tensor, nn
from torch.nn import functional as F

from longstraw.models.decoder import Decoder

HELD_OUT, TESTS = 10**6, 512  # the seed of the prompts that success is measured on, and how many they are
GROUP = 16
ARMS = ("exact", "detached")
COLUMNS = ("task", "learn", "arm", "seed", "lr", "step", "cpu_seconds", "success", "cosine", "norm_ratio")


@dataclass(frozen=True)
class Run:
    """What one run is."""

    task: str
    arm: str  # exact | detached
    learn: str  # golden: cross entropy on the answer | grpo: sampled answers, reward 1 if right
    seed: int
    lr: float = 1e-3
    steps: int = 500
    batch: int = 64
    every: int = 100

    def border(self, prompts: Tensor) -> int:
        """Return the first position that has a gradient."""
        return 0 if self.arm == "exact" else prompts.shape[1] - 1


def started(seed: int, tasks: Sequence[str], warmup: int = 400) -> Decoder:
    """Return a model that has learnt lookup, whose batched gradient was found to be ``grpo_step``'s."""
    model = build(seed, VOCABULARY)
    warm_up(model, seed, warmup)
    for task in tasks:
        check(model, task, seed)
    return model


def learn(run: Run, model: Decoder) -> Iterator[dict[str, object]]:
    """Yield a row every ``run.every`` steps: success on held-out prompts, and how both gradients compare there."""
    optimizer, begun = adamw(model, run.lr), time.process_time()
    generator = torch.Generator().manual_seed(1000 + run.seed)
    measuring = 0.0
    for step in range(run.steps + 1):
        if step % run.every == 0:
            paused = time.process_time()
            cosine, ratio = compare(model, run, step)
            row = {"task": run.task, "learn": run.learn, "arm": run.arm, "seed": run.seed, "lr": run.lr, "step": step}
            measured = {"success": success(model, run.task), "cosine": cosine, "norm_ratio": ratio}
            yield row | {"cpu_seconds": round(paused - begun - measuring, 2)} | measured
            measuring += time.process_time() - paused
        prompts, answers = draw(run.task, run.seed, step, run.batch)
        loss = loss_of(logits(model, prompts, run.border(prompts)), answers, run.learn, generator)
        update(model, optimizer, loss, run.lr * min(1, (step + 1) / 50))


def warm_up(model: Decoder, seed: int, steps: int) -> None:
    """Teach lookup by cross entropy over whole sequences, which both arms start from."""
    optimizer = adamw(model, 3e-3)
    for step in range(steps):
        tokens, targets = repeated_lookup(seed, step, 32)
        scores = model.lm_head(hidden(model, tokens, 0))
        loss = F.cross_entropy(scores.flatten(0, 1), targets.T.flatten(), ignore_index=-100)
        falling = max(0.1, (steps - step) / (steps / 2))
        update(model, optimizer, loss, 3e-3 * min(1, (step + 1) / 50, falling))


def check(model: Decoder, task: str, seed: int) -> None:
    """Raise where the batched gradient is not ``grpo_step``'s, in any arm."""
    prompts, answers = draw(task, seed, HELD_OUT, 2)
    for arm in ARMS:
        distance = distance_from_product(model, prompts, answers, arm, seed)
        if not distance < CLOSE:
            raise AssertionError(f"{arm}: the batched gradient is {distance:.1e} from grpo_step's")


def loss_of(scores: Tensor, answers: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Return the loss of ``scores`` [B, V]: of golden answers, or of sampled ones."""
    logprobs = scores.log_softmax(-1)
    if how == "golden":
        return F.nll_loss(logprobs, answers)
    drawn = torch.multinomial(logprobs.detach().exp(), GROUP, replacement=True, generator=generator)
    return grpo_loss(logprobs, drawn, (drawn == answers[:, None]).float())


@torch.no_grad()
def success(model: Decoder, task: str) -> float:
    """Return the fraction of held-out prompts whose likeliest answer is right."""
    prompts, answers = draw(task, HELD_OUT, 0, TESTS)
    return float((logits(model, prompts, 0).argmax(-1) == answers).float().mean())


def compare(model: Decoder, run: Run, step: int) -> tuple[float, float]:
    """Return the cosine of the detached and the exact gradient of this step's prompts, and the ratio of their norms."""
    prompts, answers = draw(run.task, run.seed, step, run.batch)
    found = []
    for border in (0, prompts.shape[1] - 1):
        model.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(step)
        loss_of(logits(model, prompts, border), answers, run.learn, generator).backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append(torch.cat([part.flatten() for part in parts]))
    exact, detached = found
    model.zero_grad(set_to_none=True)
    cosine = F.cosine_similarity(exact, detached, dim=0)
    return round(float(cosine), 4), round(float(detached.norm() / exact.norm().clamp(min=1e-12)), 4)


def adamw(trained: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return the optimizer of every run here."""
    return torch.optim.AdamW(trained.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)


def update(trained: nn.Module, optimizer: torch.optim.AdamW, loss: Tensor, lr: float) -> float:
    """Take a step at rate ``lr``; return the gradient's norm before it was clipped to 1."""
    trained.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return float(norm)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--task", nargs="+", required=True)
    parser.add_argument("--learn", nargs="+", choices=("golden", "grpo"), default=["golden"])
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=500)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    given = parser.parse_args()
    model = started(given.seed, given.task)
    for task, how, arm in itertools.product(given.task, given.learn, given.arm):
        run = Run(task, arm, how, given.seed, given.lr, given.steps)
        for row in learn(run, copy.deepcopy(model)):
            writer.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
