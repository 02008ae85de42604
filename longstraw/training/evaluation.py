"""The evaluations of a running job: when one is due, and its row. None is run twice, also after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longstraw.models.decoder import Decoder
from longstraw.observer import Holder, Observer
from longstraw.rollout.evaluation import HeldOut, answers, held_out
from longstraw.rollout.group import Decide, decide_here
from longstraw.tracking.evaluations import summary
from longstraw.tracking.run_folder import read_evaluations
from longstraw.training.checkpoint import any_rank
from longstraw.training.checkpoint_policy import CheckpointPolicy
from longstraw.training.monitor import Monitor
from longstraw.training.trainer import Trainer


class Evaluations:
    """Evaluate what a job trains before its first step, every ``evaluate.every`` steps and after the last."""

    def __init__(self, trainer: Trainer, checkpoints: CheckpointPolicy) -> None:
        """Read the held-out prompts, so that what is wrong with them is said before the first step."""
        self.trainer, self.checkpoints = trainer, checkpoints
        self._every, self._steps = trainer.config.evaluate.every, trainer.config.steps
        if self._every is None:
            return
        self._prompts = held_out(trainer.config, trainer.task)
        self._recorded = {row.get("step") for row in read_evaluations(checkpoints.recorder.path.parent)}

    def after(self, step: int) -> None:
        """Evaluate the model that has taken ``step`` steps and record it, if that is due and was not done before.

        A job that is asked to end raises ``Preempted``, and the evaluation is run again from its beginning.
        """
        if self._every is None or (step % self._every and step < self._steps) or any_rank(step in self._recorded):
            return
        watch = self.trainer.watch
        watch.progress.step = step
        self.trainer.shared = None  # a prompt that steps shared: the next step evaluates its own
        parallel = self.trainer.parallel
        decide = decide_here if parallel is None else parallel.mesh.decide
        row = evaluate(self.trainer.model, self._prompts, watch, decide)
        self.checkpoints.attempt_keys(step)  # raises if a later attempt has begun
        self.checkpoints.recorder.log_evaluation({"step": step, **row})


def evaluate(model: Decoder, prompts: HeldOut, watch: Monitor, decide: Decide = decide_here) -> dict[str, Any]:
    """Return the keys of a row that the answers of ``model`` and the measurement by ``watch`` give."""
    watch.start()
    found = []
    with watch.verb("evaluate", len(prompts.numbers())):
        for answer in answers(model, prompts, _Within(watch), decide):
            watch.progress.advance(1)
            found.append(answer)
    watch.peaks.collect()
    measured = {"seconds": watch.seconds["evaluate"], "peak_allocated_bytes": watch.peaks.peak}
    chance = prompts.tasks[0].description.get("chance")
    return {"temperature": prompts.config.evaluate.temperature, "chance": chance, **summary(found), **measured}


class _Within(Observer):
    """Observe what happens within an evaluation, itself one verb: tag memory, and stop between two tokens if asked."""

    def __init__(self, watch: Monitor) -> None:
        self._watch = watch

    def advance(self, positions: int) -> None:
        self._watch.stop.check()

    def holds(self, states: Sequence[Holder]) -> None:
        self._watch.holds(states)
