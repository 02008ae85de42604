"""Loaded by every Python of a job: a rank tells where it is and, at a stated place of the loop, waits to be killed.

``LONGSTRAW_PLACES`` names a file of JSON: by run folder and attempt the rank, the step and the place. Places are
``prefill 2``, the second chunk or branch of a verb; ``before replay``; ``optimizer``, this rank's part updated and the
others' perhaps not; ``checkpoint``, this rank's part written and the whole not named yet.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path

WAIT_SECONDS = 180


class Hook(importlib.abc.MetaPathFinder):
    """Change the training loop as soon as it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "longstraw.training.loop":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def changed(module):
            run(module)
            change(module)

        spec.loader.exec_module = changed
        return spec


def wait_for(holds):
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)


def told(run_dir, attempt, ranks):
    """Write down who this rank is, and wait until every job of the sweep has come as far, so that all begin at once."""
    me = {"pid": os.getpid(), "parent": os.getppid(), "rank": ranks.rank if ranks else 0}
    if ranks is not None:
        me |= {"local_rank": ranks.local_rank, "node": ranks.node, "world_size": ranks.world_size}
    me |= {name: os.environ.get(name) for name in ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID")}
    (run_dir / f"seen.{attempt}.{me['rank']}.json").write_text(json.dumps(me))
    together = int(os.environ.get("LONGSTRAW_TOGETHER", "0"))
    if attempt == 0 and together:
        wait_for(lambda: len(list(run_dir.parent.glob("*/seen.0.0.json"))) >= together)
    return me["rank"]


class Places:
    """Where this rank is, counted by step and verb."""

    def __init__(self, run_dir, attempt, rank):
        known = json.loads(Path(os.environ["LONGSTRAW_PLACES"]).read_text())
        place = known.get(run_dir.name, {}).get(str(attempt))
        self.run_dir, self.attempt = run_dir, attempt
        self.wanted = place if place and place["rank"] == rank else None
        self.count = 0

    def at(self, step, place):
        """Wait here for ever, or nearly, if this is the place."""
        if self.wanted and (step, place) == (self.wanted["step"], self.wanted["at"]):
            self.wanted = None
            (self.run_dir / f"at.{self.attempt}").touch()
            wait_for((self.run_dir / f"go.{self.attempt}").exists)


def change(train):
    from longstraw.training import checkpoint
    from longstraw.training import optimizer as optimize
    from longstraw.training.monitor import Progress

    run_job, start, advance = train.run_job, Progress.start, Progress.advance
    sums, update = checkpoint._sums, optimize.Optimizer._step
    now = []

    def run(config, run_dir, identity, ranks=None):
        now.append(Places(Path(run_dir), identity.attempt, told(Path(run_dir), identity.attempt, ranks)))
        return run_job(config, run_dir, identity, ranks)

    def started(progress, verb, total):
        now[-1].verb, now[-1].count, now[-1].step = verb, 0, progress.step
        now[-1].at(progress.step, f"before {verb}")
        start(progress, verb, total)

    def advanced(progress, positions):
        now[-1].count += 1
        now[-1].at(progress.step, f"{now[-1].verb} {now[-1].count}")
        advance(progress, positions)

    def updated(optimizer):
        update(optimizer)
        now[-1].at(now[-1].step, "optimizer")

    def summed(folder, names):
        if folder.name.startswith("."):  # of a checkpoint that is being written
            now[-1].at(now[-1].step, "checkpoint")
        return sums(folder, names)

    train.run_job, Progress.start, Progress.advance = run, started, advanced
    checkpoint._sums, optimize.Optimizer._step = summed, updated


sys.meta_path.insert(0, Hook())
