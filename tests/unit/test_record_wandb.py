"""W&B as the record's mirror, with wandb's own files and its own background process."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.wandb_files import read_run, read_runs
from longstraw.config import TrackingConfig
from longstraw.tracking import wandb_mirror
from longstraw.tracking.evaluations import Answer, summary
from longstraw.tracking.recorder import Recorder, RecordError, WandbOptions
from longstraw.tracking.run_folder import read_evaluations
from longstraw.tracking.schema import flatten, numbers

pytest.importorskip("wandb")
ROOT = Path(__file__).resolve().parents[2]


def clean_environment(folder):
    """Return this environment without any trace of W&B's configuration, and without its telemetry."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    home = Path(folder) / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {**kept, "HOME": str(home), "NETRC": str(home / "netrc"), "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    for key, value in clean_environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    for key in [key for key in os.environ if key.startswith("WANDB") and key != "WANDB_SERVICE"]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def rows(run_dir):
    return [numbers(json.loads(line)) for line in (run_dir / "records.jsonl").read_text().splitlines()]


def same(left, right):
    """Compare two flat rows, NaN being equal to itself."""
    return left.keys() == right.keys() and all(
        value == right[key] or (value != value and right[key] != right[key]) for key, value in left.items()
    )


def finished_runs(run_dir):
    """Return the runs once wandb's process, which outlives them, has written their last records."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        runs = read_runs(run_dir)
        if runs and all(run.exit_code is not None for run in runs):
            return runs
        time.sleep(0.1)
    return pytest.fail(f"unfinished: {read_runs(run_dir)}")


def warnings(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.name == "longstraw.tracking.wandb_mirror"]


def test_offline_files_hold_what_the_record_holds(tmp_path, caplog):
    config = {"model": {"name": "m", "rope": None}, "context": 2**21, "data": {"depth": [0.0, 1.0]}}
    tracking = TrackingConfig(project="p", tags=["a", "b"])
    run_dir = tmp_path / "run"
    with Recorder(run_dir, run_id="abc", wandb=WandbOptions(tracking, config, "sweep", "7")) as recorder:
        for step in range(20):
            row = {"step": step, "status": "ok", "loss": 0.1 * step, "peak_allocated_bytes": 2**40 + step}
            row |= {"kl": math.nan if step % 2 else 0.0, "entropy": math.inf, "dirty": True, "model": "m"}
            row |= {"peak_by_verb": {"prefill": step, "replay": 2}, "peak_allocated_bytes_by_rank": [1, step]}
            recorder.log(row)
    (run,) = finished_runs(run_dir)
    assert (run.id, run.project, run.group, run.name, run.tags) == ("abc", "p", "sweep", "7", ["a", "b"])
    assert run.config == {**config, "attempt": 0}
    assert (run.exit_code, run.torn) == (0, False)
    history = [numbers(row) for row in run.history]
    expected = [flatten(row) for row in rows(run_dir)]
    assert len(history) == len(expected) == 20
    assert all(same(left, right) for left, right in zip(history, expected, strict=True))
    assert history[3]["peak_by_verb/prefill"] == 3
    assert same(numbers(run.summary), expected[-1])
    assert not same(history[3], expected[4])
    assert warnings(caplog) == []


def test_an_evaluation_is_sent_with_its_table_of_samples(tmp_path):
    run_dir = tmp_path / "run"
    told = [Answer("a", 10, 1.0, 3, True, depth=0.5, prompt_end="where?", response="here")]
    told += [Answer("b", 10, 0.0, 3, True, depth=0.9, prompt_end="who?", response="no\none")]
    with Recorder(run_dir, run_id="abc", wandb=WandbOptions(TrackingConfig())) as recorder:
        recorder.log_evaluation({"step": 0, **summary(told)})
        recorder.log({"step": 0, "status": "ok", "reward_mean": 0.25})
        with pytest.raises(RecordError, match="'succes' is not in the listing; did you mean success"):
            recorder.log_evaluation({"step": 1, "succes": 0.5})
    (run,) = finished_runs(run_dir)
    evaluated, step, *_ = run.history
    assert (evaluated["step"], evaluated["evaluate/success"], evaluated["evaluate/examples"]) == (0, 0.5, 2)
    assert evaluated["evaluate/by_depth/0.4-0.6/success"] == 1.0
    assert not any(key.startswith("evaluate") for key in step)
    tables = [json.loads(path.read_text()) for path in run_dir.glob("wandb/**/*.table.json")]
    content = next(table for table in tables if table["data"])
    assert content["columns"] == ["id", "prompt_end", "response", "reward"]
    assert content["data"] == [["a", "where?", "here", 1.0], ["b", "who?", "no\none", 0.0]]
    assert [row["step"] for row in read_evaluations(run_dir)] == [0, 1]
    assert [row["step"] for row in rows(run_dir)] == [0]


def test_a_failed_run_says_so(tmp_path):
    def fail():
        with Recorder(tmp_path / "run", run_id="abc") as recorder:
            recorder.log({"step": 0, "status": "error", "error": "boom"})
            raise KeyError("boom")

    with pytest.raises(KeyError):
        fail()
    (run,) = finished_runs(tmp_path / "run")
    assert (run.exit_code, len(run.history)) == (1, 1)


CHILD = """
import os, sys, time
from longstraw.tracking.recorder import Recorder
recorder = Recorder(sys.argv[1], run_id="abc")
cores = []
for step in range(2400):  # two minutes and more: whoever started this may be gone
    recorder.log({"step": step, "status": "ok", "seconds": time.monotonic()})
    if recorder._mirror._opened and not cores:
        cores = [recorder._mirror._process.pid]
    print(step, *cores, flush=True)
    time.sleep(0.05)
    if os.path.exists(sys.argv[1] + "/stop"):
        break
recorder.close()
"""


def child(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "run")]
    return subprocess.Popen(
        command, env=clean_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_until(process, enough):
    """Read the child's lines (step, then the ids of wandb-core) until ``enough(step, cores)``; return that line."""
    for line in process.stdout:
        step, *cores = map(int, line.split())
        if enough(step, cores):
            return step, cores
    process.kill()
    pytest.fail(process.communicate(timeout=60)[1])


def after_opening(steps):
    """Return a condition that holds ``steps`` steps after W&B was opened, which takes seconds on a busy machine."""
    first = []

    def enough(step, cores):
        first.extend([step] if cores and not first else [])
        return bool(first) and step >= first[0] + steps

    return enough


def test_a_killed_run_keeps_every_row_and_wandb_all_but_the_last_seconds(tmp_path):
    process = child(tmp_path)
    step, cores = read_until(process, after_opening(80))
    process.kill()
    os.kill(cores[0], signal.SIGKILL)  # as SLURM does; left alone, it may still write what it has
    process.wait()
    recorded = rows(tmp_path / "run")
    assert [row["step"] for row in recorded] == list(range(len(recorded)))
    assert len(recorded) > step
    (run,) = read_runs(tmp_path / "run")
    assert [row["step"] for row in run.history] == list(range(len(run.history)))
    assert recorded[-1]["seconds"] - run.history[-1]["seconds"] < 3  # written every second; by default every 15
    assert run.exit_code is None


def test_a_dead_wandb_is_opened_again(tmp_path):
    process = child(tmp_path)
    killed_at, cores = read_until(process, after_opening(30))
    os.kill(cores[0], signal.SIGKILL)  # as SLURM's SIGTERM does, which goes to every process of a step
    last, _ = read_until(process, lambda step, _: step >= killed_at + 40)
    (tmp_path / "run" / "stop").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("it will be opened again") == 1
    recorded = [row["step"] for row in rows(tmp_path / "run")]
    assert recorded == list(range(len(recorded)))
    assert recorded[-1] >= last
    first, second = read_runs(tmp_path / "run")
    assert (first.id, second.id) == ("abc", "abc")
    assert (first.exit_code, second.exit_code) == (None, 0)
    steps = [row["step"] for row in first.history + second.history]
    assert sorted(set(steps)) == recorded  # also those it had been given and had not written
    assert len(steps) <= len(recorded) + 3 / 0.05 + 1  # and of those no more than it may have lost again
    assert [row["step"] for row in second.history] == list(range(second.history[0]["step"], recorded[-1] + 1))


def test_what_a_wandb_that_dies_at_the_end_may_not_have_written_is_given_again(tmp_path):
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        recorder.log({"step": 0, "status": "ok"})
        deadline = time.monotonic() + 60
        while not recorder._mirror._sent and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(recorder._mirror._process.pid, signal.SIGKILL)
    first, second = read_runs(tmp_path / "run")
    assert (first.exit_code, second.exit_code) == (None, 0)
    assert [row["step"] for row in second.history] == [0]
    assert second.summary["step"] == 0


def test_a_hanging_wandb_is_left_behind(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wandb_mirror, "INIT_SECONDS", 1)
    monkeypatch.setattr(wandb_mirror, "FINISH_SECONDS", 1)
    recorder = Recorder(tmp_path / "run", run_id="abc")
    recorder.log({"step": 0, "status": "ok"})
    deadline = time.monotonic() + 30
    while recorder._mirror._process is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process = recorder._mirror._process
    os.kill(process.pid, signal.SIGSTOP)
    recorder.log({"step": 1, "status": "ok"})
    recorder.close()
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert "left behind" in "".join(warnings(caplog))
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("a file where the folder should be")
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert len(rows(tmp_path / "run")) == 1
    said = warnings(caplog)  # where wandb's own process is slow it is tried again, with another reason
    assert said
    assert all("going on without it" in line for line in said)


def test_a_folder_that_wandb_leaves_silently(tmp_path, caplog):
    attempt = tmp_path / "run" / "wandb" / "attempt-0"
    attempt.mkdir(parents=True)
    (attempt / "wandb").write_text("wandb moves to the temporary folder here, without a word")
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert len(rows(tmp_path / "run")) == 1
    said = warnings(caplog)  # where wandb's own process is slow it is tried again, with another reason
    assert said
    assert all("going on without it" in line for line in said)


@pytest.mark.parametrize(
    ("tracking", "environment", "starts"),
    [
        ("auto", None, True),
        ("auto", "disabled", False),
        ("auto", "offline", True),
        ("auto", "dryrun", True),
        ("offline", "disabled", True),
        ("disabled", "online", False),
        ("auto", "sometimes", True),
    ],
)
def test_who_decides_the_mode(tmp_path, monkeypatch, caplog, tracking, environment, starts):
    modes = []
    monkeypatch.setattr(
        wandb_mirror.WandbMirror, "_init", lambda self, mode: modes.append(mode) or pytest.fail("enough")
    )
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    with Recorder(tmp_path / "run", run_id="abc", wandb=WandbOptions(TrackingConfig(mode=tracking))) as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert modes == ["offline"] * starts
    assert any("WANDB_MODE=sometimes" in message for message in warnings(caplog)) == (environment == "sometimes")


def test_a_mode_that_wandb_does_not_know_is_offline(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with Recorder(tmp_path / "run", run_id="abc", wandb=WandbOptions(TrackingConfig())) as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert len(finished_runs(tmp_path / "run")[0].history) == 1
    assert len(warnings(caplog)) == 1


def test_online_without_a_key_goes_on_offline_and_asks_nobody(tmp_path, caplog):
    with Recorder(tmp_path / "run", run_id="abc", wandb=WandbOptions(TrackingConfig(mode="online"))) as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert len(finished_runs(tmp_path / "run")[0].history) == 1
    (warning,) = warnings(caplog)
    assert "no key is configured" in warning


def test_a_key_in_netrc_is_found(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:9")
    wandb.teardown()  # it reads the environment once
    assert not wandb_mirror._has_key(wandb)
    netrc = Path(os.environ["NETRC"])
    netrc.write_text(f"machine localhost:9\n  login user\n  password {'0' * 40}\n")
    netrc.chmod(0o600)
    assert wandb_mirror._has_key(wandb)
    wandb.teardown()


def test_online_that_fails_goes_on_offline(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "x")  # of no valid form, so that it fails at once
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert len(finished_runs(tmp_path / "run")[0].history) == 1
    (warning,) = warnings(caplog)
    assert warning.startswith("W&B: online failed")
    assert warning.endswith("going on offline")


def test_a_broken_wandb_is_said_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('half an installation')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        for step in range(3):
            recorder.log({"step": step, "status": "ok"})
    assert len(rows(tmp_path / "run")) == 3
    (warning,) = warnings(caplog)
    assert "half an installation" in warning


def test_two_attempts_are_two_files_of_one_run(tmp_path):
    for attempt in (0, 1):
        with Recorder(tmp_path / "run", run_id="abc", attempt=attempt) as recorder:
            recorder.log({"step": attempt, "status": "preempted" if attempt == 0 else "ok"})
    first, second = finished_runs(tmp_path / "run")
    assert first.id == second.id == "abc"
    assert [run.config["attempt"] for run in (first, second)] == [0, 1]


def test_a_torn_file_is_read_to_the_tear(tmp_path):
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        for step in range(50):
            recorder.log({"step": step, "status": "ok", "error": "x" * 3000})  # over several 32 KiB blocks
    (whole,) = finished_runs(tmp_path / "run")
    assert len(whole.history) == 50
    data = whole.path.read_bytes()
    torn = tmp_path / "run-torn.wandb"
    for length in (len(data) - 3, len(data) // 2):
        torn.write_bytes(data[:length])
        run = read_run(torn)
        assert run.torn
        assert run.history == whole.history[: len(run.history)]
        assert run.history
    torn.write_bytes(data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :])
    assert read_run(torn).torn
    torn.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a file of W&B"):
        read_run(torn)


def test_a_mirror_far_behind_loses_rows_and_the_record_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wandb_mirror, "BACKLOG_ROWS", 5)
    monkeypatch.setattr(wandb_mirror.WandbMirror, "_open", lambda self: time.sleep(0.5))
    caplog.set_level(logging.WARNING)
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        for step in range(20):
            recorder.log({"step": step, "status": "ok"})
    assert len(rows(tmp_path / "run")) == 20
    assert len([message for message in warnings(caplog) if "behind" in message]) == 1
