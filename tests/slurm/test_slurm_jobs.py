"""Jobs on a real SLURM: submitted, failing, out of time, preempted, killed; a loop of sleeps in training's place."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from longstraw import status
from longstraw.config import ConfigError, from_dict, load_model_config, to_dict
from longstraw.launch import executors as submit
from longstraw.launch import jobs as launch
from longstraw.launch import slurm as slurm_module
from longstraw.launch.prepare import prepare
from longstraw.launch.spec import Draft
from longstraw.tracking.run_folder import read_json, read_lines, read_rows, read_steps, write_json

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]


def job(claim, *, steps=2, detach=False, max_parallel=None, **hardware):
    site = {"name": "site", "backend": "cpu", "partition": "h20", "time_min": 5, **hardware}
    values = {"model": to_dict(load_model_config("qwen3_6_tiny")), "data": {"name": "needle"}, "context": 1024}
    waits = {"detach": detach, "max_parallel": max_parallel}
    return from_dict({**values, "hardware": site, "claim": claim, "steps": steps, "launch": waits})


def prepared(folder, *configs):
    drafts = [Draft(num, [f"claim={c.claim}"], folder / str(num), c) for num, c in enumerate(configs)]
    return prepare(drafts, command="longstraw -m", sweep="s")


def ids(folder):
    return {entry["num"]: entry["job_id"] for entry in read_json(folder / "sweep.json").get("jobs", [])}


def steps_done(run_dir):
    return len([row for row in read_steps(run_dir) if row["status"] == "ok"])


def disturb(folder, slurm, wait_for, errors):
    """Move job 2's limit up, requeue job 3 once it has begun, then have a job of a higher partition take its node."""
    try:
        wait_for("job 2 has begun", (folder / "2" / "process.json").exists)
        slurm("scontrol", "update", f"jobid={ids(folder)[2]}", "EndTime=now+1seconds")  # limits are whole minutes
        run_dir = folder / "3"
        wait_for("job 3 has begun", lambda: steps_done(run_dir) >= 2)
        slurm("scontrol", "requeue", ids(folder)[3])
        wait_for("job 3 has begun again", lambda: (run_dir / "records.1.jsonl").exists())
        before = steps_done(run_dir)
        wait_for("job 3 has gone on", lambda: steps_done(run_dir) >= before + 2)
        node = slurm("squeue", "-h", "-j", ids(folder)[3], "-o", "%N")
        slurm("sbatch", "-p", "urgent", "-w", node, "-c", "8", "--time=1", "-o", "/dev/null", "--wrap", "sleep 1")
    except BaseException as error:
        errors.append(error)


def test_a_sweep_of_which_one_ends_one_fails_one_is_too_slow_and_one_is_preempted(
    stand_in, slurm, wait_for, watchdog, capsys
):
    jobs = prepared(
        stand_in,
        job("ends", cpus_per_task=1),
        job("fails", cpus_per_task=2),
        job("deaf", cpus_per_task=3, time_min=1),
        job("long", cpus_per_task=8, steps=12),
    )
    errors = []
    helper = threading.Thread(target=disturb, args=(stand_in, slurm, wait_for, errors), daemon=True)
    helper.start()
    assert launch.launch(jobs, stand_in, alone=False) == 1
    helper.join(60)
    assert errors == []
    shown = capsys.readouterr().out

    results = [read_json(run.run_dir / "result.json") for run in jobs]
    assert [result["status"] for result in results] == ["ok", "error", "error", "ok"]
    assert results[1]["error"] == "RuntimeError: the loop broke"
    assert results[2]["error"].startswith("the time limit of 1 min was reached (hardware.time_min); log: logs/")
    known = slurm_module.states()
    assert [known[ids(stand_in)[num]].state for num in range(4)] == ["COMPLETED", "FAILED", "TIMEOUT", "COMPLETED"]
    assert known[ids(stand_in)[3]].restarts == 2

    rows = read_steps(stand_in / "3")
    assert [row["step"] for row in rows] == list(range(12))  # no gap, nothing twice
    assert {row["status"] for row in rows} == {"ok"}
    assert [row["attempt"] for row in rows] == sorted(row["attempt"] for row in rows)
    assert {row["attempt"] for row in rows} == {0, 1, 2}
    ends = [row["error"] for row in read_steps(stand_in / "3", every=True) if row["status"] == "preempted"]
    assert len(ends) == 2

    assert "job 3 claim=long  queued  preempted 1 time" in shown
    assert "  | RuntimeError: the loop broke" in shown  # the end of the log of the rank that failed
    table = [line.split() for line in shown.splitlines() if "qwen3_6_tiny" in line]
    assert [(line[0], line[5]) for line in table] == [("0", "ok"), ("1", "error"), ("2", "error"), ("3", "ok")]

    assert status.main([str(stand_in)]) == 1
    seen = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:5]}
    assert [seen[str(num)][1] for num in range(4)] == ["done", "failed", "failed", "done"]
    assert seen["3"][2:6] == ["2", "12/12", "1,024", "1.0"]
    assert status.main([str(stand_in), "--job", "1"]) == 0
    assert "the loop broke" in capsys.readouterr().out


def test_a_signal_that_comes_while_a_job_is_loaded_is_answered(
    stand_in, slurm, wait_for, watchdog, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLOWLY", str(tmp_path))
    jobs = prepared(stand_in, *(job("ends") for _ in range(3)))
    errors = []

    def disturb():
        try:
            wait_for("all are being loaded", lambda: len(list(tmp_path.glob("loading.*"))) == 3)
            known = ids(stand_in)
            slurm("scancel", "--signal=USR2", known[0])
            slurm("scontrol", "requeue", known[1])
            slurm("scancel", known[2])
            time.sleep(1)
            (tmp_path / "loaded").touch()
        except BaseException as error:
            errors.append(error)

    helper = threading.Thread(target=disturb, daemon=True)
    helper.start()
    assert launch.launch(jobs, stand_in, alone=False) == 1
    helper.join(60)
    assert errors == []
    assert [read_json(run.run_dir / "result.json")["status"] for run in jobs] == ["ok", "ok", "preempted"]
    known = slurm_module.states()
    assert [known[ids(stand_in)[num]].restarts for num in range(3)] == [1, 1, 0]
    ends = [[(row["attempt"], row["status"]) for row in read_steps(run.run_dir, every=True)] for run in jobs]
    assert ends == [[(0, "preempted"), (1, "ok"), (1, "ok")]] * 2 + [[(0, "preempted")]]
    told = [read_steps(run.run_dir, every=True)[0]["error"] for run in jobs]
    assert ["SIGUSR2" in text for text in told] == [True, False, False]


def test_arrays_are_no_longer_than_the_site_allows(stand_in, slurm, watchdog, monkeypatch, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sacct").write_text("#!/bin/sh\nexec sleep 600\n")  # one that does not answer is not waited for
    (tools / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    jobs = prepared(stand_in, *(job("ends", max_parallel=3) for _ in range(6)))
    assert launch.launch(jobs, stand_in, alone=False) == 0
    arrays = [job_id.split("_") for job_id in ids(stand_in).values()]
    assert [place for _, place in arrays] == ["0", "1", "2", "3", "0", "1"]
    assert len({array for array, _ in arrays}) == 2
    assert [len(read_rows(run.run_dir)) for run in jobs] == [2] * 6


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ({"partition": "nope"}, "hardware.partition=nope: .*invalid partition"),
        ({"constraint": "nvlink"}, "Invalid feature specification"),
        ({"nodes": 4, "ranks": 4}, "Requested node configuration is not available"),
        ({"time_min": 61}, "hardware.time_min=61 is more than the 60 min that the partition allows"),
        ({"slurm": {"slurm_gpu": 1}}, "slurm_gpu"),
        ({"slurm": {"slurm_additional_parameters": {"nice-try": 1}}}, "unrecognized option '--nice-try=1'"),
    ],
)
def test_what_slurm_would_refuse_is_refused_before_anything_is_submitted(stand_in, slurm, hardware, words):
    before = slurm("squeue", "-h", "-t", "all")
    with pytest.raises(ConfigError, match=words):
        prepared(stand_in, job("ends"), job("ends", **hardware))
    assert list(stand_in.iterdir()) == []
    assert slurm("squeue", "-h", "-t", "all") == before


def test_where_one_array_is_refused_none_is_left(stand_in, slurm, monkeypatch):
    jobs = prepared(stand_in, job("long", cpus_per_task=1), job("long", cpus_per_task=2))
    jobs[1].config.hardware.partition = "gone"  # since it was asked for
    with pytest.raises(
        ConfigError, match=r"SLURM refused some of 2 jobs, so none was submitted.*invalid partition specified: gone"
    ):
        submit.submit_slurm(jobs, stand_in)
    states = slurm("squeue", "-h", "-t", "all", "-n", "longstraw", "-o", "%T").split()
    assert set(states) <= {"CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "COMPLETING"}


def run(*arguments):
    command = [sys.executable, "-m", "longstraw.run", "model=qwen3_6_tiny", "hardware=cpu", "context=1Ki", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_says_what_to_do(stand_in, slurm):
    done = run("hardware.partition=nope")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "hardware.partition=nope" in done.stderr
    assert "invalid partition specified: nope" in done.stderr
    assert not any((stand_in / "runs").glob("*/*/*/spec.json"))
    (stand_in / "file").touch()
    done = run("-m", "hardware.partition=h20", "hardware.time_min=5", f"hydra.sweep.dir={stand_in}/file/sweep")
    assert done.returncode == 2
    assert f"{stand_in}/file" in done.stderr
    assert "records go elsewhere with hydra.sweep.dir=FOLDER" in done.stderr
    assert slurm("squeue", "-h") == ""


def test_what_a_killed_job_could_not_write_is_written_by_status(stand_in, slurm, wait_for, capsys):
    jobs = prepared(stand_in, job("deaf", detach=True), job("long", detach=True, steps=300))
    assert launch.launch(jobs, stand_in, alone=False) == 0
    assert "does not wait" in capsys.readouterr().out
    known = ids(stand_in)
    wait_for("both run", lambda: all((run.run_dir / "process.json").exists() for run in jobs))
    wait_for("one has done a step", lambda: steps_done(stand_in / "1") >= 1)
    assert status.main([str(stand_in)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:3]] == ["running", "running"]
    slurm("scancel", "--signal=KILL", known[0])
    wait_for("the killed one is over", lambda: slurm_module.states()[known[0]].over)
    assert status.main([str(stand_in)]) == 1
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:3]] == ["failed", "running"]
    (row,) = read_rows(stand_in / "0")
    assert (row["status"], row["error"][:46]) == ("error", "the job ended without a record of why (SLURM: ")
    assert read_json(stand_in / "0" / "result.json")["status"] == "error"

    slurm("scancel", known[1])  # it saves, and is not started again
    wait_for("the cancelled one is over", lambda: slurm_module.states()[known[1]].over)
    assert status.main([str(stand_in / "1")]) == 1
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "preempted"
    assert slurm_module.states()[known[1]].restarts == 0
    kept = int((stand_in / "1" / "kept").read_text())
    assert [row["step"] for row in read_rows(stand_in / "1")] == list(range(kept + 1))

    spec = read_json(stand_in / "1" / "spec.json")
    spec["config"]["steps"], spec["config"]["launch"]["detach"] = kept + 2, False
    write_json(stand_in / "1" / "spec.json", spec)
    assert status.main([str(stand_in / "1"), "--again"]) == 0
    rows = read_steps(stand_in / "1")
    assert [row["step"] for row in rows] == list(range(kept + 2))
    assert [row["attempt"] for row in rows] == [0] * kept + [1] * 2
    assert ids(stand_in)[0] == known[0] != ids(stand_in)[1] != known[1]


def test_a_lost_node_gives_a_later_attempt_and_a_zombie_that_writes_nothing(
    cluster, stand_in, slurm, wait_for, start_node, watchdog
):
    (run,) = prepared(stand_in, job("lost", steps=70))
    errors, lost, count = [], [], []

    def lose():
        try:
            wait_for("two steps are done", lambda: steps_done(run.run_dir) >= 2)
            lost.append(slurm("squeue", "-h", "-j", ids(stand_in)[0], "-o", "%N"))
            os.kill(int((cluster / "run" / f"slurmd.{lost[0]}.pid").read_text()), signal.SIGKILL)
            wait_for("it has begun elsewhere", lambda: (run.run_dir / "records.1.jsonl").exists(), 90)
            count.append(len(read_lines(run.run_dir / "records.jsonl")))
        except BaseException as error:
            errors.append(error)

    helper = threading.Thread(target=lose, daemon=True)
    helper.start()
    try:
        assert launch.launch([run], stand_in, alone=False) == 0
        helper.join(10)
        assert errors == []
        assert [row["step"] for row in read_steps(run.run_dir)] == list(range(70))
        assert len(read_lines(run.run_dir / "records.jsonl")) <= count[0] + 1  # a line that was being written then
        result = read_json(run.run_dir / "result.json")
        assert (result["status"], result["attempt"]) == ("ok", 1)
        log = next((stand_in / "logs").glob("*/*_0_log.out"))
        wait_for("the zombie has noticed", lambda: "Superseded: a later attempt has begun" in log.read_text())
        assert slurm_module.states()[ids(stand_in)[0]].restarts == 1
    finally:
        for node in lost:
            start_node(node)
