"""Jobs of several commands in one folder, copies of it, folders in use, and processes that are gone."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from longstraw import status
from longstraw.config import ConfigError, from_dict, load_model_config, to_dict
from longstraw.launch import jobs as launch
from longstraw.launch.manifest import read_manifest, write_manifest
from longstraw.launch.placement import Placement
from longstraw.launch.prepare import prepare
from longstraw.launch.result import record_failure
from longstraw.launch.spec import Draft, Job
from longstraw.launch.worker import execute
from longstraw.runtime.process_info import is_running, process_identity
from longstraw.tracking.recorder import append_row
from longstraw.tracking.run_folder import read_json, write_json
from longstraw.tracking.schema import RecordError

GONE = {**process_identity(), "pid": 2**22 + 1}  # a number beyond what Linux gives out


def config(**changes):
    values = {"model": to_dict(load_model_config("qwen3_6_tiny")), "hardware": {"name": "cpu", "backend": "cpu"}}
    return from_dict({**values, "data": {"name": "needle"}, "context": 1024, **changes})


def prepared(run_dir, **changes):
    """Return the job of a command without -m, which is number 0 of that command."""
    return prepare([Draft(0, [], run_dir, config(**changes))], command="c", sweep=None)[0]


def entered(folder, *names, launcher=None):
    """Return the jobs of several commands, each entered into the folder's ``sweep.json`` by its own command."""
    jobs = [prepared(folder / name) for name in names]
    for job in jobs:
        write_manifest([job], folder, {}, launcher)
    return jobs


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def started(monkeypatch):
    """Return the folders of the jobs that ``--again`` would start."""
    folders = []
    monkeypatch.setattr(status, "launch", lambda jobs, folder, alone: folders.extend(j.run_dir for j in jobs) or 0)
    return folders


def test_commands_that_share_a_folder_keep_their_jobs(tmp_path, capsys, started):
    a, b = entered(tmp_path, "a", "b")
    write_json(a.run_dir / "process.json", {"attempt": 0, **GONE})
    append_row(a.run_dir, {"status": "ok", "step": 0}, 0)
    record_failure(b.run_dir, "error", "no memory")
    assert [entry.name for entry in read_manifest(tmp_path)] == ["a", "b"]
    assert status.main([str(a.run_dir)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert (shown[1].split()[:2], shown[-1].split(": ")[0]) == (["a", "failed"], "job a")
    assert status.main([str(tmp_path), "--again"]) == 0
    assert [path.name for path in started] == ["a", "b"]


def test_a_copy_names_its_own_jobs_and_leaves_the_original_alone(tmp_path, started, capsys):
    (job,) = entered(tmp_path / "sw", "0")
    running = {"attempt": 0, "folder": {"path": str(job.run_dir), "inode": job.run_dir.stat().st_ino}}
    write_json(job.run_dir / "process.json", {**running, **process_identity()})
    append_row(job.run_dir, {"status": "ok", "step": 0}, 0)
    shutil.copytree(tmp_path / "sw", tmp_path / "sw2")
    before = content(tmp_path / "sw")
    assert status.main([str(tmp_path / "sw2"), "--again"]) == 0
    assert started == [tmp_path / "sw2" / "0"]
    assert "this folder is a copy" in capsys.readouterr().out
    assert content(tmp_path / "sw") == before
    (tmp_path / "sw").rename(tmp_path / "sw3")  # a folder that is moved while its job runs is no copy
    assert status.main([str(tmp_path / "sw3")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["0", "running"]


def test_an_entry_of_an_earlier_version_never_leads_out_of_the_folder(tmp_path):
    write_json(tmp_path / "sweep.json", {"jobs": [{"num": 0, "run_dir": "/original/0", "executor": "local"}]})
    assert [entry.run_dir for entry in read_manifest(tmp_path)] == [tmp_path / "0"]


def test_commands_that_write_at_once_lose_no_entry(tmp_path):
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for turn in range(5):
                    job = Job(0, [], tmp_path / f"{number}-{turn}", config(), Placement("run", "local", ""))
                    write_manifest([job], tmp_path, {}, None)
                status = 0
            finally:
                os._exit(status)  # whatever happens: this is a copy of the process that runs the tests
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    assert len(read_manifest(tmp_path)) == 40


def test_a_folder_of_jobs_survives_a_lost_sweep_json(tmp_path, capsys):
    (job,) = entered(tmp_path, "a")
    record_failure(job.run_dir, "error", "no memory")
    (tmp_path / "sweep.json").write_text("")
    assert status.main([str(job.run_dir)]) == 1
    assert "job a: error: no memory" in capsys.readouterr().out


def test_a_folder_in_use_is_refused_and_stays_as_it_is(tmp_path):
    job = prepared(tmp_path / "a")
    append_row(job.run_dir, {"status": "ok", "step": 0}, 0)
    for result, advice in (("ok", "another folder$"), ("error", f"status {job.run_dir} --again$")):
        write_json(job.run_dir / "result.json", {"attempt": 0, "status": result})
        before = content(tmp_path)
        with pytest.raises(ConfigError, match=f"ended with status {result}, and nothing in it was changed.*{advice}"):
            prepared(tmp_path / "a", optimizer={"lr": 1.0})
        with pytest.raises(RecordError, match="nothing was changed"):
            execute(job.run_dir)
        assert content(tmp_path) == before


def test_a_sweep_whose_jobs_share_one_folder_is_refused(tmp_path):
    drafts = [Draft(num, [], tmp_path / "same", config(seed=num)) for num in range(2)]
    with pytest.raises(ConfigError, match="is also job 0's folder"):
        prepare(drafts, command="c", sweep="s")
    assert not (tmp_path / "same").exists()


def test_a_job_that_slurm_started_again_goes_on_in_its_folder(tmp_path, monkeypatch):
    job = prepared(tmp_path / "a")
    append_row(job.run_dir, {"status": "preempted", "step": 0}, 0)
    spec = read_json(job.run_dir / "spec.json")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    prepared(tmp_path / "a", steps=50)
    assert read_json(job.run_dir / "spec.json") == spec
    with pytest.raises(ConfigError, match="holds an earlier run"):
        prepared(tmp_path / "a", seed=7)


def test_run_ids_hold_64_random_bits_and_are_what_wandb_takes(tmp_path):
    jobs = [prepared(tmp_path / ("ä #?:;,' " * 9) / str(number)) for number in range(3)]
    ids = {read_json(job.run_dir / "spec.json")["run_id"] for job in jobs}
    assert len(ids) == 3
    for run_id in ids:
        assert len(run_id) <= 64
        assert not set(run_id) & set(":;,#?/'\\% ")
        assert len(run_id.split("-")[-2]) >= 16


@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_a_folder_that_a_log_s_name_cannot_hold_is_refused(tmp_path, executor):
    from longstraw.launch.executors import check_path

    check_path(tmp_path / "a b ü $x 'y'", executor)
    with pytest.raises(ConfigError, match="%j in its name" if executor == "local" else "% in its name"):
        check_path(tmp_path / "%j" / "0", executor)


def test_a_zombie_and_a_number_given_anew_do_not_run():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_identity(child.pid)
    assert is_running(identity)
    assert is_running({**identity, "started": identity["started"] + "0"}) is False
    assert is_running({**identity, "started": "another-boot/1", "pid_namespace": "another"}) is False
    assert is_running({**identity, "host": "another"}) is None
    assert is_running({**identity, "pid_namespace": "another"}) is None
    child.stdin.close()
    deadline = time.monotonic() + 20
    while is_running(identity) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, 0)  # it is there still: nobody has waited for it
    assert is_running(identity) is False
    child.wait()


@pytest.mark.parametrize(
    ("process", "launcher", "says"),
    [
        (process_identity(), None, f"job a is running (process {os.getpid()} on "),
        (None, process_identity(), f"job a is pending (process {os.getpid()} on "),
        (None, None, "job a is pending (not begun; if it has ended: python -m longstraw.status "),
        ({**GONE, "host": "another"}, None, "job a is unknown (on another, which cannot be asked; no progress for 2 h"),
    ],
    ids=["running", "launcher waits", "not begun", "on another machine"],
)
def test_again_says_why_it_starts_nothing(tmp_path, capsys, started, process, launcher, says):
    (job,) = entered(tmp_path, "a", launcher=launcher)
    if process:
        write_json(job.run_dir / "process.json", {"attempt": 0, **process})
        old = time.time() - (0 if process["host"] != "another" else 7200)
        os.utime(job.run_dir / "process.json", (old, old))
    status.main([str(tmp_path), "--again"])
    assert says in capsys.readouterr().err
    assert not started
    status.main([str(job.run_dir), "--again"])  # whoever names the job itself knows more of it
    assert bool(started) == ("if it has ended" in says or "cannot be asked" in says)


def test_jobs_whose_command_was_killed_before_it_started_them_go_on(tmp_path, started):
    entered(tmp_path, "0", launcher=GONE)
    assert status.main([str(tmp_path), "--again"]) == 0
    assert started == [tmp_path / "0"]


def test_two_commands_do_not_start_one_job_again_at_once(tmp_path, monkeypatch):
    (job,) = entered(tmp_path, "a")
    record_failure(job.run_dir, "error", "no memory")
    monkeypatch.setattr(launch, "latest_attempt", lambda run_dir: 0)  # as both see it
    launch.resume_jobs([job.run_dir])
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="started again by another command"):
        launch.resume_jobs([job.run_dir])
    assert content(tmp_path) == before
    assert json.loads(before["a/spec.json"])["first_attempt"] == 1
