"""What is known of jobs, from SLURM's commands (stand-ins here) and from their folders. No torch, no SLURM."""

import json
import os
import socket

import pytest

from longstraw import status
from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.launch import slurm
from longstraw.launch.display import JobLine
from longstraw.launch.logs import failed_tail, tail
from longstraw.launch.manifest import find_entry
from longstraw.launch.result import record_failure
from longstraw.runtime.process_info import process_identity
from longstraw.tracking.run_folder import progress_place, read_json, read_rows, read_steps, write_json


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return a function that puts a stand-in for one of SLURM's commands on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin")
    for name in ("squeue", "sacct", "scontrol", "sbatch", "scancel"):
        (tools / name).write_text(f"#!/bin/sh\necho {name}: not here >&2; exit 1\n")
        (tools / name).chmod(0o755)

    def put(name, script):
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")

    return put


def jobs(folder, *, executor="slurm", count=1, host=None):
    """Write what a command leaves of ``count`` jobs; return their folders."""
    config = from_dict(
        {
            "model": to_dict(load_model_config("qwen3_6_tiny")),
            "hardware": {"name": "cpu", "backend": "cpu"},
            "data": {"name": "needle"},
            "context": 1024,
            "steps": 3,
        }
    )
    entries = []
    for num in range(count):
        run_dir = folder / str(num)
        run_dir.mkdir(parents=True)
        spec = {"run_id": "r", "sweep": "s", "num": num, "overrides": [], "command": "c", "config": to_dict(config)}
        write_json(run_dir / "spec.json", spec)
        entries.append({"num": num, "run_dir": str(num), "executor": executor, "job_id": f"7_{num}"})
        if host:
            write_json(run_dir / "process.json", {"attempt": 0, **process_identity(), "host": host})
    write_json(folder / "sweep.json", {"jobs": entries})
    return [folder / str(num) for num in range(count)]


def steps(run_dir, attempt, *rows):
    name = "records.jsonl" if attempt == 0 else f"records.{attempt}.jsonl"
    lines = [json.dumps({"attempt": attempt, **row}) + "\n" for row in rows]
    (run_dir / name).write_text("".join(lines))


OK = {"status": "ok", "prompt_positions": 1000, "response_positions": 24, "peak_allocated_bytes": 5_000_000}


def listing(*rows):
    return "cat <<'END'\n" + "".join("|".join(row) + "|\n" for row in rows) + "END"


def cells(text, num):
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [str(num)])


def test_a_sweep_on_slurm(tmp_path, commands, capsys, monkeypatch):
    monkeypatch.setattr(status, "LAG_SECONDS", 0.1)
    states = ["PENDING", "RUNNING", "COMPLETED", "TIMEOUT", "PENDING"]
    reasons = ["PartitionTimeLimit", "None", "None", "TimeLimit", "BeginTime"]
    restarts = ["0", "0", "0", "1", "2"]
    rows = [(f"7_{num}", *cell) for num, cell in enumerate(zip(states, restarts, reasons, strict=True))]
    commands("squeue", listing(*rows))
    folders = jobs(tmp_path / "s", count=5)
    steps(folders[1], 0, {**OK, "step": 0})
    write_json(folders[1] / "progress.json", {"step": 1, "verb": "replay", "done": 24, "total": 48})
    steps(folders[2], 0, *({**OK, "step": step} for step in range(3)))
    write_json(folders[2] / "result.json", {"attempt": 0, "status": "ok"})
    steps(folders[3], 0, {**OK, "step": 0}, {"status": "preempted", "step": 1, "error": "asked to end"})
    write_json(folders[3] / "result.json", {"attempt": 0, "status": "preempted"})
    write_json(folders[4] / "result.json", {"attempt": 1, "status": "error"})  # a node of it was lost
    assert status.main([str(tmp_path / "s")]) == 1
    said = capsys.readouterr().out
    assert [cells(said, num)[1] for num in range(5)] == ["pending", "running", "done", "failed", "pending"]
    assert "PartitionTimeLimit: longer than the partition allows" in said
    assert cells(said, 1)[2:8] == ["1/3", "1,024", "5.0", "MB", "step", "2"]
    assert "replay 24/48" in said
    assert cells(said, 2)[2] == "3/3"
    assert (cells(said, 3)[2], cells(said, 4)[2]) == ("1", "2")  # preempted so many times
    assert "logs/7_3/7_3_0_log.out" in said
    (row,) = read_rows(folders[3])  # of the attempt that could not write it
    assert (row["attempt"], row["status"]) == (1, "error")
    assert row["error"] == "the job ended without a record of why (SLURM: TIMEOUT)"
    assert read_json(folders[3] / "result.json")["attempt"] == 1
    assert "job 3: error: the job ended without a record of why (SLURM: TIMEOUT)" in said


def test_slurm_that_does_not_answer_ends_no_job(tmp_path, commands, capsys, monkeypatch):
    monkeypatch.setattr(slurm, "ASK_SECONDS", 0.2)
    commands("squeue", "exec sleep 20")
    (folder,) = jobs(tmp_path / "s")
    assert status.main([str(tmp_path / "s")]) == 0
    said = capsys.readouterr()
    assert cells(said.out, 0)[1] == "unknown"
    assert "SLURM does not answer: squeue has not answered for 0.2 s" in said.err
    assert not (folder / "result.json").exists()
    queue = slurm.Queue()
    handle = slurm.Submitted("7_0", None, queue)
    assert (handle.state, handle.done()) == ("UNKNOWN", False)
    assert handle.note() == "SLURM does not answer (squeue has not answered for 0.2 s); the job goes on"
    line = JobLine(folder, "job 0", 3, note=handle.note())
    assert line.progress() == handle.note()


@pytest.mark.parametrize("keeps", ["echo '7_0|COMPLETED'", "exec sleep 20", "echo disabled >&2; exit 1"])
def test_a_job_squeue_has_forgotten(commands, monkeypatch, keeps):
    monkeypatch.setattr(slurm, "ASK_SECONDS", 0.5)
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0)
    commands("squeue", "true")
    commands("sacct", keeps)
    now = 100.0
    monkeypatch.setattr(slurm.time, "monotonic", lambda: now)
    handle = slurm.Submitted("7_0", None, slurm.Queue(), lambda: keeps.startswith("echo '"))
    assert handle.done() == keeps.startswith("echo '")
    now += slurm.FORGET_SECONDS + 1
    assert handle.done()


def test_a_job_that_is_over_is_not_done_before_its_word_could_be_seen(commands, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0)
    commands("squeue", listing(("7_0", "FAILED", "0", "NonZeroExitCode")))
    now = 100.0
    monkeypatch.setattr(slurm.time, "monotonic", lambda: now)
    word = False
    handle = slurm.Submitted("7_0", None, slurm.Queue(), lambda: word)
    assert not handle.done()
    now += slurm.LAG_SECONDS / 2
    assert not handle.done()
    now += slurm.LAG_SECONDS
    assert handle.done()
    other, word = slurm.Submitted("7_0", None, slurm.Queue(), lambda: word), True
    assert other.done()


def test_what_sbatch_says_is_told(commands, monkeypatch):
    commands("sbatch", "cat >/dev/null; echo 'sbatch: error: invalid account' >&2; echo 'no' >&2; exit 1")
    assert slurm.refusal("#!/bin/sh\n") == "sbatch: error: invalid account; no"
    commands("sbatch", "cat >/dev/null; exit 3")
    assert slurm.refusal("") == "sbatch ended with 3 and said nothing"
    commands("sbatch", "true")
    assert slurm.refusal("") == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm.refusal("") == "sbatch is not on PATH; run this where SLURM's commands are"


def test_a_site_s_limits(commands):
    commands("scontrol", "echo 'MaxArraySize            = 1001'")
    assert slurm.array_limit() == 1001
    for text, minutes in [("1-02:30:00", 1590), ("01:00:00", 60), ("UNLIMITED", None)]:
        commands("scontrol", f"echo 'PartitionName=p MaxNodes=4 MaxTime={text} MinNodes=0'")
        assert slurm.minutes_allowed("p") == minutes


@pytest.mark.parametrize(("state", "asked"), [("RUNNING", True), ("COMPLETING", False), ("CANCELLED", False)])
def test_only_a_running_job_goes_back_into_the_queue(commands, tmp_path, state, asked):
    commands("squeue", listing(("7_0", state, "0", "None")))
    commands("scontrol", f"echo $* >{tmp_path}/asked")
    assert slurm.requeue("7_0") == asked
    assert (tmp_path / "asked").exists() == asked


def test_the_own_id():
    assert slurm.own_id({}) is None
    assert slurm.own_id({"SLURM_JOB_ID": "9"}) == "9"
    assert slurm.own_id({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}) == "7_2"


def test_jobs_of_this_machine(tmp_path, capsys):
    here = jobs(tmp_path / "s", executor="local", count=3, host=socket.gethostname())
    process = read_json(here[1] / "process.json")
    write_json(here[1] / "process.json", {**process, "pid": 2**22 + 1})  # beyond what Linux gives out
    (here[2] / "process.json").unlink()
    assert status.main([str(tmp_path / "s")]) == 1
    said = capsys.readouterr().out
    assert [cells(said, num)[1] for num in range(3)] == ["running", "failed", "pending"]
    assert "killed from outside" in read_rows(here[1])[0]["error"]


def test_a_job_s_own_folder_and_a_wrong_one(tmp_path, capsys):
    folders = jobs(tmp_path / "runs" / "s", executor="local", count=2)
    assert status.main([str(folders[1])]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert status.main([str(tmp_path)]) == 2
    assert f"no sweep.json; the newest below it is {tmp_path / 'runs' / 's'}" in capsys.readouterr().err


def test_logs_by_job_and_rank(tmp_path, capsys):
    (folder,) = jobs(tmp_path / "s")
    logs = tmp_path / "s" / "logs" / "7_0"
    logs.mkdir(parents=True)
    for rank in range(2):
        (logs / f"7_0_{rank}_log.out").write_text("".join(f"rank {rank} line {n}\n\n" for n in range(100)))
    record_failure(folder, "error", "lost", failed_rank=1)
    end = failed_tail(find_entry(folder), lines=2).splitlines()
    assert end[0].startswith(f"job 0, rank 1, the end of {logs}/7_0_1_log.out")
    assert end[1:] == ["  | rank 1 line 98", "  | rank 1 line 99"]
    assert status.main([str(tmp_path / "s"), "--job", "0", "--rank", "1", "--lines", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"rank 1 line {n}" for n in (97, 98, 99)]
    assert status.main([str(tmp_path / "s"), "--job", "0", "--rank", "2"]) == 2
    assert status.main([str(tmp_path / "s"), "--job", "5"]) == 2
    assert tail(tmp_path / "none") == []


def test_an_evaluation_is_after_a_step():
    at = {"step": 2, "done": 3, "total": 16}
    assert progress_place({**at, "verb": "replay"}) == "step 3"
    assert progress_place({**at, "verb": "evaluate"}, "/2") == "after step 2/2"


def test_records_over_attempts_have_each_step_once(tmp_path):
    steps(tmp_path, 0, *({"step": s, "status": "ok", "a": 0} for s in range(4)), {"step": 4, "status": "preempted"})
    steps(tmp_path, 1, {"step": 3, "status": "ok", "a": 1}, {"step": 4, "status": "error"})
    steps(tmp_path, 2)  # has begun and done nothing yet
    assert [(row["step"], row.get("a")) for row in read_steps(tmp_path)] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, None)]
    assert len(read_steps(tmp_path, every=True)) == 7
