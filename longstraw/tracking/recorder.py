"""Write one record a step to the job's records file, and send a copy to W&B.

The file is authoritative: one line of strict JSON a step, flushed at once, one file an attempt. A thread sends the same
rows to W&B, so that a slow or failing W&B neither delays nor ends a run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from longstraw.config import native_length_warning, to_dict
from longstraw.tracking import evaluations
from longstraw.tracking.constants import constant_keys
from longstraw.tracking.jsonl_writer import JsonlWriter
from longstraw.tracking.provenance import startup_facts
from longstraw.tracking.schema import RecordError, check, complete, latest_attempt, plain, records_path
from longstraw.tracking.wandb_mirror import WandbMirror

if TYPE_CHECKING:
    from longstraw.config import RunConfig, TrackingConfig

__all__ = ["RecordError", "Recorder", "append_row", "constant_keys", "latest_attempt", "records_path", "startup_facts"]

log = logging.getLogger(__name__)


def append_row(run_dir: str | Path, row: dict[str, Any], attempt: int | None = None) -> Path:
    """Append a row for a job that was killed and cannot write it; return the file.

    Called by the launcher. The row goes to the latest attempt's file unless ``attempt`` is given. A last line that was
    cut off is ended first, so that only that line is lost.
    """
    attempt = latest_attempt(run_dir) or 0 if attempt is None else attempt
    path = records_path(run_dir, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    with JsonlWriter(path, fresh=False) as lines:
        lines.write(complete({"attempt": attempt, **row}))
    check(row)
    return path


def write_evaluation(run_dir: Path, row: dict[str, Any], config: RunConfig) -> Path:
    """Append the row of an evaluation that belongs to no running job to ``run_dir``; return the file."""
    path = evaluations.evaluations_path(run_dir, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    row = _with_constants(row, {**constant_keys(config), **startup_facts(config.processes.backend), "attempt": 0})
    with JsonlWriter(path, fresh=False) as lines:
        lines.write(complete(row, evaluations.KEYS))
    check(row, evaluations.KEYS)
    return path


def _with_constants(row: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any]:
    """Return the row of an evaluation with those ``constants`` that such rows have."""
    return {**{key: value for key, value in constants.items() if key in evaluations.KEYS}, **row}


@dataclass(frozen=True)
class RunIdentity:
    """Identify a job: ``run_id`` is the same over all its attempts; ``sweep`` is its command's folder."""

    run_id: str
    attempt: int = 0
    sweep: str | None = None
    command: str | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class WandbOptions:
    """What W&B gets besides the rows: the configuration as nested dicts, the run's name and its group."""

    tracking: TrackingConfig | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    name: str | None = None


def job_recorder(
    config: RunConfig,
    run_dir: str | Path,
    identity: RunIdentity,
    *,
    mode: str,
    selfcheck: str | None,
    rank: int = 0,
) -> Recorder:
    """Return the recorder of a job in ``mode``, with the keys that all its rows share; warn of an over-long context."""
    if warning := native_length_warning(config.model, config.context):
        log.warning(warning)
    facts = startup_facts(config.processes.backend)
    ours = {"mode": mode, "command": identity.command or facts["command"], "selfcheck": selfcheck}
    name = " ".join(identity.overrides) or config.model.name
    return Recorder(
        run_dir,
        run_id=identity.run_id,
        attempt=identity.attempt,
        constants={**constant_keys(config), **facts, **ours},
        wandb=WandbOptions(config.tracking, to_dict(config), identity.sweep, name),
        rank=rank,
    )


class Recorder:
    """Write a job's rows to its records file, and mirror them to W&B.

    ``run_dir`` is the job's folder, ``constants`` are keys that every row shares. Only rank 0 writes; on other ranks
    every call does nothing. A records file with rows in it is never overwritten: ``RecordError``.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        run_id: str,
        attempt: int = 0,
        constants: dict[str, Any] | None = None,
        wandb: WandbOptions | None = None,
        rank: int = 0,
    ) -> None:
        self.path = records_path(run_dir, attempt)
        self.attempt = attempt
        self._constants = {"run_id": run_id, "attempt": attempt, **(constants or {})}
        self._lines: JsonlWriter | None = None
        self._evaluations: JsonlWriter | None = None
        self._mirror: WandbMirror | None = None
        self._status: str | None = None
        if rank != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonlWriter(self.path, fresh=True)
        wandb = wandb or WandbOptions()
        tracking = wandb.tracking
        options = {
            "id": run_id,
            "group": wandb.group and wandb.group[:128],  # a server takes no longer ones
            "name": wandb.name and wandb.name[:128],
            "project": getattr(tracking, "project", "longstraw"),
            "entity": getattr(tracking, "entity", None),
            "tags": list(getattr(tracking, "tags", [])),
            "config": {**plain(wandb.config), "attempt": attempt},
        }
        # Two processes that open one run id in one folder within a second overwrite each other's file.
        folder = self.path.parent / "wandb" / f"attempt-{attempt}"
        self._mirror = WandbMirror.start(folder, getattr(tracking, "mode", "auto"), options)

    @property
    def superseded(self) -> bool:
        """Whether a later attempt of this job has begun, so that this one must stop and write nothing more."""
        return (latest_attempt(self.path.parent) or 0) > self.attempt

    def log(self, row: dict[str, Any]) -> None:
        """Write one row; keys it lacks are null.

        Raises ``RecordError`` if the file cannot be written, and, with the row safely written without it, for a key
        that is not in the listing or a value of the wrong type.
        """
        if self._lines is None:
            return
        row = {**self._constants, **row}
        full = complete(row)
        self._lines.write(full)
        self._status = full["status"]
        if self._mirror is not None:
            self._mirror.log(full)
        check(row)

    def log_evaluation(self, row: dict[str, Any]) -> None:
        """Write the row of an evaluation into its own file; keys of the listing in ``evaluations``, else as ``log``."""
        if self._lines is None:
            return
        row = _with_constants(row, self._constants)
        full = complete(row, evaluations.KEYS)
        if self._evaluations is None:  # a job without evaluations has no such file
            path = evaluations.evaluations_path(self.path.parent, self.attempt)
            self._evaluations = JsonlWriter(path, fresh=True)
        self._evaluations.write(full)
        if self._mirror is not None:
            self._mirror.log(evaluations.mirrored(full))
        check(row, evaluations.KEYS)

    def close(self, exit_code: int = 0) -> None:
        """Close the files, synced to the disk, and let W&B finish, for two minutes at most."""
        for lines in (self._lines, self._evaluations):
            if lines is not None:
                lines.close()
        if self._mirror is not None:
            self._mirror.close(exit_code, preempted=self._status == "preempted")
            self._mirror = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = error.code if isinstance(error, SystemExit) else 0 if error is None else 1
        self.close(code if isinstance(code, int) else 0 if code is None else 1)
