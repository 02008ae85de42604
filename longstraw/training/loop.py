"""Run the steps of a job: resume from a checkpoint, take each step, write its record, save at the end."""

from __future__ import annotations

import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstraw.config import RunConfig
from longstraw.errors import RankLostError, describe, os_error, os_reason, status_of
from longstraw.memory.meter import MemoryMeter
from longstraw.parallel.comm_meter import TrafficMeter
from longstraw.runtime.preemption import Preempted, Stop, Superseded
from longstraw.selfcheck import check_job
from longstraw.tracking.recorder import Recorder, RunIdentity, job_recorder
from longstraw.training.checkpoint import any_rank
from longstraw.training.checkpoint_policy import CheckpointPolicy, last_step
from longstraw.training.evaluation import Evaluations
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import Trainer, build_trainer, model_facts, save_trained

if TYPE_CHECKING:
    from longstraw.runtime.rendezvous import Ranks


class NotFiniteError(ValueError):
    """The loss or gradient of a step is NaN or infinite; its record is written, the parameters are unchanged."""


def run_job(
    config: RunConfig,
    run_dir: str | Path,
    identity: RunIdentity,
    ranks: Ranks | None = None,
) -> Preempted | None:
    """Run the steps of one job and write its records to ``run_dir``; resume from its newest checkpoint, if it has one.

    A step that fails gets a record with what was measured until then, and the exception propagates. A job that was
    asked to end writes a checkpoint and a record, and returns why it ended.
    """
    folder, rank, attempt = Path(run_dir), ranks.rank if ranks is not None else 0, identity.attempt
    checked, wrong = check_job(config)
    with (
        job_recorder(config, folder, identity, mode="run", selfcheck=checked, rank=rank) as recorder,
        MemoryMeter() as meter,
        Stop(any_rank).listening() as stop,
        ExitStack() as resources,
    ):
        progress = Progress(folder / ("progress.json" if rank == 0 else f"ranks/{attempt}/progress.{rank}.json"))
        traffic = None if ranks is None else resources.enter_context(TrafficMeter())
        watch = Monitor(meter, progress, stop, traffic, backend=config.hardware.backend)
        try:
            if wrong is not None:
                raise wrong
            if any_rank(stop.asked is not None):  # while modules were imported and ranks connected
                return _unbegun(recorder, stop, folder, attempt)
            trainer = build_trainer(config, watch, run_dir=folder)
            checkpoints = CheckpointPolicy(trainer, recorder, stop)
            _take_steps(trainer, checkpoints)
            if config.save:
                if rank == 0 and attempt:
                    _discard_saved(folder)
                _save(trainer, folder)
        except Preempted as asked:
            recorder.log({**model_facts(trainer), **checkpoints.on_preemption(progress.step, asked)})
            return asked
        except (NotFiniteError, Superseded):
            raise
        except Exception as error:
            watch.peaks.collect()
            cause = ranks.cause(error) if ranks is not None else error
            if not recorder.superseded:
                recorder.log(_failure(cause, progress.step, watch))
            raise
    return None


def _unbegun(recorder: Recorder, stop: Stop, folder: Path, attempt: int) -> Preempted:
    """Record that the job was asked to end before its model was loaded, and do not load it: that may take too long."""
    asked = stop.preempted()
    asked.reason = f"{asked}; this attempt had not begun"
    recorder.log({"step": last_step(folder, attempt) + 1, "status": "preempted", "error": asked.reason})
    return asked


def _save(trainer: Trainer, folder: Path) -> None:
    """Save what was trained; report a full disk in plain words whatever the writing library raises."""
    try:
        save_trained(trainer, folder)
    except Exception as error:
        found = os_error(error)
        if found is None:
            raise
        again = f"once there is room: python -m longstraw.status {shlex.quote(str(folder))} --again"
        raise OSError(found.errno, f"{os_reason(found)}: what was trained is not saved; {again}") from error


def _discard_saved(folder: Path) -> None:
    """Remove a model or adapter that an earlier attempt saved before it was killed."""
    for pattern in ("model", "adapter", ".model.*", ".adapter.*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _take_steps(trainer: Trainer, checkpoints: CheckpointPolicy) -> None:
    """Take the remaining steps and write their records, evaluations between them; ``progress.step`` is the current."""
    facts, evaluations = model_facts(trainer), Evaluations(trainer, checkpoints)
    first = checkpoints.resume()
    trainer.tag_optimizer()
    for step in range(first, trainer.config.steps):
        trainer.watch.progress.step = step
        checkpoints.before_step()
        evaluations.after(step)
        row = trainer.step(step)
        checkpoints.recorder.log({**facts, **row, **checkpoints.attempt_keys(step)})
        if row["status"] != "ok":
            raise NotFiniteError(f"step {step}: {row['error']}")
        checkpoints.after_step(step + 1)
    evaluations.after(trainer.config.steps)


def _failure(error: Exception, step: int, watch: Monitor) -> dict[str, Any]:
    return {
        "step": step,
        "status": status_of(error),
        "error": describe(error),
        "failed_rank": error.rank if isinstance(error, RankLostError) else 0,
        "peak_allocated_bytes": watch.peaks.peak or None,
        "peak_verb": watch.peaks.verb or None,
        "peak_bytes_by_kind": watch.peaks.by_kind or None,
        "seconds_by_verb": dict(watch.seconds),
    }
