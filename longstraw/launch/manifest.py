"""Read and write ``sweep.json``: which jobs a folder holds and where each was submitted.

Several commands may share the folder (``hydra.run.dir=X/a`` and ``X/b``), so a job is known by its run folder, relative
to the folder of ``sweep.json``: a copy, or a folder that was moved, names its own jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.launch.spec import Job
from longstraw.tracking.run_folder import read_json, write_json

MANIFEST = "sweep.json"


@dataclass(frozen=True)
class Entry:
    """A job in ``sweep.json``; ``launcher`` identifies the process that starts it, for local jobs."""

    name: str  # the run folder, relative to ``folder``
    folder: Path
    num: int
    executor: str
    job_id: str | None = None
    launcher: Mapping[str, Any] | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name


def read_manifest(folder: Path) -> list[Entry]:
    """Return the jobs of ``folder/sweep.json``; none where there is no such file."""
    entries = []
    for entry in read_json(folder / MANIFEST).get("jobs", []):
        name = entry["run_dir"]
        if os.path.isabs(name):  # written by an earlier version, or on another machine
            name = Path(name).name
        entries.append(Entry(name, folder, entry["num"], entry["executor"], entry.get("job_id"), entry.get("launcher")))
    return entries


def find_entry(run_dir: Path) -> Entry:
    """Return the entry of a job by its run folder; without an entry, one for a single job of this machine."""
    run_dir = run_dir.resolve()
    for folder in list(run_dir.parents)[:-1]:
        for entry in read_manifest(folder):
            if entry.run_dir.resolve() == run_dir:
                return entry
    return Entry(run_dir.name, run_dir.parent, read_json(run_dir / "spec.json").get("num", 0), "local")


def write_manifest(
    jobs: Sequence[Job], folder: Path, job_ids: Mapping[Path, str], launcher: Mapping[str, Any] | None
) -> None:
    """Add the jobs to ``sweep.json`` and keep those of other commands.

    ``job_ids`` are SLURM's, by run folder; ``launcher`` is the process that starts the others.
    """
    with _locked(folder):
        entries = {entry["run_dir"]: entry for entry in _entries(folder)}
        for job in jobs:
            name = os.path.relpath(job.run_dir.absolute(), folder.absolute())
            local = job.placement.executor == "local"
            entries[name] = {
                "run_dir": name,
                "num": job.num,
                "executor": job.placement.executor,
                "job_id": job_ids.get(job.run_dir),
                "launcher": launcher if local else None,
            }
        write_json(folder / MANIFEST, {"jobs": sorted(entries.values(), key=lambda e: (e["num"], e["run_dir"]))})


def _entries(folder: Path) -> list[dict[str, Any]]:
    """Return the content of ``sweep.json``; raise if the file exists and cannot be read, so that it is not replaced."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return []
    except ValueError:  # for example empty after a power failure
        return []
    return list(content.get("jobs", [])) if isinstance(content, dict) else []


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock ``sweep.json`` against other commands, if the file system supports locks."""
    with (folder / ".sweep.lock").open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
