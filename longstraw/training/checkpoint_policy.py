"""Decide when a job's checkpoints are written and from which one an attempt resumes, for the loop and the record.

Where several steps share responses or a retained prompt, checkpoints are written only before the first of them: neither
is in a checkpoint, and both are made anew on resume, by what the model is then. Steps since are repeated.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstraw.config import to_dict
from longstraw.runtime.preemption import Preempted, Stop, Superseded
from longstraw.tracking.recorder import Recorder, records_path
from longstraw.tracking.schema import numbers
from longstraw.training.checkpoint import Checkpoints, Owner, any_rank, random_states, set_random_states

if TYPE_CHECKING:
    from longstraw.training.trainer import Trainer


class CheckpointPolicy:
    """The checkpoints of a running job. Every rank has one and calls its methods at the same places."""

    def __init__(self, trainer: Trainer, recorder: Recorder, stop: Stop) -> None:
        """Checkpoint what ``trainer`` trains, beside the records of ``recorder``."""
        self.config, self.stop, self.recorder = trainer.config, stop, recorder
        folder, attempt = recorder.path.parent, recorder.attempt
        named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            named,
            trainer.optimizer.optimizer,
            updated=dict(zip(named, trainer.optimizer.updated, strict=True)),
            owner=Owner(to_dict(trainer.config), attempt, trainer.config.checkpoint.keep_last),
            superseded=lambda: recorder.superseded,
        )
        self._schedule = trainer.schedule
        self._recorded = last_step(folder, attempt)
        self._first: int | None = None
        self._saved_at = time.monotonic()
        self._random = random_states()

    def resume(self) -> int:
        """Restore the newest intact checkpoint, if there is one; return the next step."""
        self._first = self.checkpoints.load()
        self._saved_at, self._random = time.monotonic(), random_states()
        return self._first or 0

    def before_step(self) -> None:
        """Raise ``Preempted`` if the job was asked to end."""
        self._random = random_states()
        self.stop.check()

    def attempt_keys(self, step: int) -> dict[str, Any]:
        """Return the record's keys about attempts; raise ``Superseded`` if a later attempt has begun."""
        if any_rank(self.recorder.superseded):
            raise Superseded("a later attempt of this job has begun, so this one ends and writes nothing")
        return {"resumed_step": self._first, "repeated": step <= self._recorded}

    def after_step(self, step: int) -> None:
        """Write a checkpoint after ``step`` steps, if one is due."""
        if step < self.config.steps and self._due(step):
            self._save(step)

    def on_preemption(self, step: int, asked: Preempted) -> dict[str, Any]:
        """Write a checkpoint because the job was asked to end during ``step``, which is dropped; return the record."""
        newest = self.checkpoints.newest
        if self._schedule.makes_responses(step) and newest != step:
            set_random_states(self._random)  # the interrupted step may have drawn from them
            self._save(step)
        newest = self.checkpoints.newest
        asked.progressed = newest is not None and newest > (self._first or 0)
        kept = f"the checkpoint of step {newest} is whole" if newest is not None else "there is no checkpoint yet"
        again = f", {step - (newest or 0)} steps will be repeated" if step > (newest or 0) else ""
        asked.reason = f"{asked}; {kept}{again}"
        return {"step": step, "status": "preempted", "error": asked.reason, "resumed_step": self._first}

    def _due(self, step: int) -> bool:
        if not self._schedule.makes_responses(step):
            return False
        every = self.config.checkpoint.every
        if every is not None:
            return step - (self.checkpoints.newest or 0) >= every
        return any_rank(time.monotonic() - self._saved_at >= 60 * self.config.checkpoint.minutes)

    def _save(self, step: int) -> None:
        if not self.checkpoints.save(step):
            raise Superseded("a later attempt of this job has begun; no checkpoint was written")
        self._saved_at = time.monotonic()


def last_step(folder: Path, attempt: int) -> int:
    """Return the last step that an attempt before ``attempt`` recorded; -1 if none did."""
    last = -1
    for earlier in range(attempt):
        try:
            lines = records_path(folder, earlier).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                row = numbers(json.loads(line))
            except ValueError:  # cut off by a kill
                continue
            if isinstance(row, dict) and row.get("status") == "ok" and isinstance(row.get("step"), int):
                last = max(last, row["step"])
    return last
