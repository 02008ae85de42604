"""The launcher and ranks that are gone: what they wrote of it becomes the record, and the others are ended."""

import dataclasses
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.errors import RankLostError
from longstraw.launch import jobs as launch
from longstraw.launch.display import JobLine
from longstraw.launch.placement import Placement
from longstraw.launch.result import record_failure
from longstraw.runtime.failure_files import failure_fields, ranks_folder, write_failure
from longstraw.tracking.recorder import append_row, latest_attempt
from longstraw.tracking.run_folder import last_row


class Handle:
    """A job of submitit's that is over, or is not."""

    def __init__(self, over):
        self.over, self.state, self.cancelled = over, "RUNNING", 0
        self.paths = SimpleNamespace(stdout=Path("log.out"))

    def done(self):
        return self.over

    def cancel(self, check=True):
        self.cancelled += 1


@pytest.fixture
def job(tmp_path):
    model, hardware = to_dict(load_model_config("qwen3_6_tiny")), {"name": "cpu", "backend": "cpu", "ranks": 2}
    config = from_dict({"model": model, "hardware": hardware, "data": {"name": "needle"}, "context": 1024})
    spec = {"run_id": "r", "sweep": None, "num": 0, "command": "c", "overrides": [], "config": to_dict(config)}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    return launch.Job(0, [], tmp_path, config, Placement("run", "local", ""))


def look(job, handle, ended=None):
    line = JobLine(job.run_dir, "", 1, state="running")
    launch._poll(job, line, {job.run_dir: handle}, {job.run_dir: time.monotonic()}, set() if ended is None else ended)
    return line.state


def test_a_dead_job_s_record_says_which_rank_was_first(job):
    write_failure(ranks_folder(job.run_dir, 0), 1, failure_fields(RankLostError(1, "n7", "failed: no memory", "oom")))
    write_failure(ranks_folder(job.run_dir, 0), 0, failure_fields(RankLostError(1, "n7", "follows")))
    assert look(job, Handle(over=True)) == "failed"
    row = last_row(job.run_dir)
    assert (row["status"], row["error"], row["failed_rank"]) == ("oom", "rank 1 on n7 failed: no memory", 1)


def test_a_job_without_a_word_was_killed(job):
    write_failure(ranks_folder(job.run_dir, 1), 1, failure_fields(RankLostError(1, "n7", "of another attempt")))
    assert look(job, Handle(over=True)) == "failed"
    row = last_row(job.run_dir)
    assert row["failed_rank"] is None
    assert row["error"].startswith("the process was killed from outside")


@pytest.mark.parametrize(
    ("executor", "state", "began", "words"),
    [
        ("slurm", "FAILED", False, "it failed before it began"),
        ("slurm", "FAILED", True, r"the process was killed from outside.*\(SLURM: FAILED\)"),
        ("slurm", "COMPLETED", True, "SLURM lost sight of its processes"),
        ("slurm", "TIMEOUT", True, "the time limit of 1440 min was reached"),
        ("local", "FAILED", True, "the process was killed from outside"),
    ],
)
def test_why_a_job_is_taken_for_dead(job, executor, state, began, words):
    job = dataclasses.replace(job, placement=Placement("run", executor, ""))
    if began:
        (job.run_dir / "process.json").write_text("{}")
    handle = Handle(over=True)
    handle.state = state
    assert re.match(words, launch._death_reason(job, handle, 1.0))


def test_a_job_that_could_not_write_why_it_failed_is_not_called_killed(job, tmp_path):
    handle = Handle(over=True)
    handle.paths.stdout = tmp_path / "log.out"
    handle.paths.stdout.write_text("Traceback\nOSError: [Errno 28] No space left on device\n")
    assert "could not record it (OSError: [Errno 28] No space" in launch._death_reason(job, handle, 1.0)


def test_a_job_that_is_started_again_fences_off_what_is_left_of_it(job, monkeypatch):
    monkeypatch.setattr(launch, "resolve", lambda config: job.placement)
    append_row(job.run_dir, {"status": "ok", "step": 0}, 0)
    launch.resume_jobs([job.run_dir])
    assert latest_attempt(job.run_dir) == 1
    before = {path.name: path.read_bytes() for path in job.run_dir.iterdir()}
    record_failure(job.run_dir, "error", "of the earlier attempt", 0)
    assert {path.name: path.read_bytes() for path in job.run_dir.iterdir()} == before
    record_failure(job.run_dir, "error", "of this one", 1)
    assert last_row(job.run_dir)["error"] == "of this one"


@pytest.mark.parametrize(
    ("status", "age", "ranks", "cancelled"),
    [("error", 60, 2, 1), ("error", 0, 2, 0), ("ok", 60, 2, 0), ("error", 60, 1, 0)],
)
def test_a_rank_that_stands_when_its_job_has_failed_is_ended_once(job, status, age, ranks, cancelled):
    job.config.hardware.ranks = ranks
    record_failure(job.run_dir, "error", "rank 1 on n7 stopped answering")
    path = job.run_dir / "result.json"
    path.write_text(json.dumps({"attempt": 0, "status": status}))
    os.utime(path, (time.time() - age, time.time() - age))
    handle, ended = Handle(over=False), set()
    for _ in range(3):
        assert look(job, handle, ended) == "running"
    assert handle.cancelled == cancelled
