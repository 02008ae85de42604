"""What a sweep's jobs are checked for and frozen with, how they reach SLURM, and how bad ends are recorded."""

import dataclasses
import json
import os
import signal
import stat
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from longstraw import run
from longstraw.config import ConfigError, HardwareConfig, RunConfig, from_dict, load_model_config, to_dict
from longstraw.errors import describe, status_of
from longstraw.launch import display as watch
from longstraw.launch import executors as submit
from longstraw.launch import jobs as launch
from longstraw.launch import placement
from longstraw.launch.prepare import prepare
from longstraw.launch.result import record_failure
from longstraw.launch.slurm import is_configured
from longstraw.launch.spec import Draft
from longstraw.launch.worker import rank
from longstraw.runtime.process_info import is_running
from longstraw.tracking.job_table import table
from longstraw.tracking.run_folder import last_row, read_json, read_rows

CPU = {"name": "cpu", "backend": "cpu"}
FULL = {
    "name": "site",
    "nodes": 4,
    "gpus_per_node": 8,
    "gpu": "h20",
    "cpus_per_task": 12,
    "host_memory_gb": 900.0,
    "time_min": 61,
    "partition": "gpu",
    "account": "acc",
    "qos": "high",
    "constraint": "nvlink",
    "exclude": "n7",
    "comment": "straw",
    "warn_s": 60,
    "setup": ["module load cuda"],
    "slurm": {"slurm_mail_user": "me"},
}
WRITTEN = {"spec.json", "process.json", "error.txt", "result.json", "records.jsonl"}
NOT_SLURMS = {"python", "dp", "ep", "name", "backend", "ranks", "memory_gb", "reserve_gb", "timeout_s", "rates"}


def config(hardware=CPU, **values):
    model = to_dict(load_model_config("qwen3_6_tiny"))
    return from_dict({"model": model, "hardware": hardware, "data": {"name": "needle"}, "context": 1024, **values})


def drafts(folder, *configs):
    return [Draft(num, [f"seed={num}", "steps=1"], folder / str(num), c) for num, c in enumerate(configs)]


def prepared(folder, *configs):
    return prepare(drafts(folder, *configs), command="longstraw -m", sweep="s")


def test_every_job_is_checked_before_any_is_frozen(tmp_path):
    wrong = [Draft(3, [], tmp_path / "3", None, "context: not a count")]
    good, early = config(), config({"name": "gpu", "gpus_per_node": 1}, mode="run")
    with pytest.raises(ConfigError) as error:
        prepare([*drafts(tmp_path, good, early, early), *wrong], command="c", sweep="s")
    lines = str(error.value).splitlines()
    assert lines[0] == "3 of 4 jobs are wrong, none was started"
    assert [line.split(":")[0] for line in lines[1:]] == ["jobs 1, 2", "job 3"]
    assert list(tmp_path.iterdir()) == []


def test_what_was_typed_is_frozen(tmp_path):
    job = prepared(tmp_path, config(mode="auto", seed=5, claim="c"))[0]
    spec = json.loads((job.run_dir / "spec.json").read_text())
    assert set(spec) == {"run_id", "sweep", "num", "overrides", "command", "config"}
    frozen = from_dict(spec["config"])
    assert isinstance(frozen, RunConfig)
    assert (frozen.mode, frozen.seed, frozen.context) == ("run", 5, 1024)
    assert frozen == job.config


def test_run_ids_differ_within_and_between_sweeps(tmp_path):
    ids = set()
    for name in ("a", "b"):
        for job in prepared(tmp_path / name / "20260101-000000", config(), config()):
            ids.add(json.loads((job.run_dir / "spec.json").read_text())["run_id"])
    assert len(ids) == 4


def test_commands_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))
    folders = [run.new_folder("a/claim %j") for _ in range(3)]
    assert folders == [f"runs/a_claim__j/20260101-000000{suffix}" for suffix in ("", "-2", "-3")]
    run._remove_unused()
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.parametrize("claim", ["..", ".", "../..", "a" * 300])
def test_a_claim_of_any_shape_keeps_its_records_below_runs(tmp_path, monkeypatch, claim):
    monkeypatch.chdir(tmp_path)
    folder = Path(run.new_folder(claim)).resolve()
    assert folder.parent.parent == tmp_path / "runs"


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(HardwareConfig) if f.name not in NOT_SLURMS])
def test_every_key_of_the_hardware_reaches_slurm(key):
    full = submit.slurm_parameters(HardwareConfig(**FULL))
    without = submit.slurm_parameters(HardwareConfig(**{name: value for name, value in FULL.items() if name != key}))
    assert full != without


def test_slurm_parameters():
    assert submit.slurm_parameters(HardwareConfig(**FULL)) == {
        "nodes": 4,
        "tasks_per_node": 8,
        "cpus_per_task": 12,
        "mem_gb": 900,
        "timeout_min": 61,
        "stderr_to_stdout": True,
        "slurm_gres": "gpu:h20:8",
        "slurm_setup": ["module load cuda"],
        "slurm_srun_args": ["--kill-on-bad-exit=0", "--wait=1800", "--cpus-per-task=12"],
        "slurm_partition": "gpu",
        "slurm_account": "acc",
        "slurm_qos": "high",
        "slurm_constraint": "nvlink",
        "slurm_exclude": "n7",
        "slurm_comment": "straw",
        "slurm_mail_user": "me",
        "slurm_signal_delay_s": 60,
        "slurm_additional_parameters": {"requeue": True},
    }
    ranks = submit.slurm_parameters(HardwareConfig(name="c", backend="cpu", nodes=2, ranks=4))
    assert (ranks["tasks_per_node"], "slurm_gres" in ranks) == (2, False)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put an sbatch on PATH that keeps what it is given; return a function that reads it."""
    tools, kept = tmp_path / "tools", tmp_path / "kept"
    tools.mkdir()
    kept.mkdir()
    scripts = {
        "sbatch": f'[ "$1" = --test-only ] && exit; n=$(ls {kept} | wc -l); cp "$1" {kept}/$n; echo "job 10$n"',
        "sinfo": "echo p",
        "scontrol": "echo 'MaxArraySize = 3'",
        "srun": "exit 1",
        "scancel": "exit 0",
        "sacct": "exit 0",
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755 | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    is_configured.cache_clear()
    yield lambda: [path.read_text() for path in sorted(kept.iterdir())]
    is_configured.cache_clear()


def test_jobs_with_the_same_resources_are_one_array(tmp_path, slurm):
    small, long = {**CPU, "partition": "p"}, {**CPU, "partition": "p", "time_min": 7}
    jobs = prepared(tmp_path, config(small), config(long), config(small, seed=1))
    assert {job.placement.executor for job in jobs} == {"slurm"}
    handles = submit.submit_slurm(jobs, tmp_path)
    first, second = slurm()
    assert "#SBATCH --array=0-1" in first
    assert "#SBATCH --time=1440" in first
    assert "#SBATCH --time=7" in second
    for script in (first, second):
        assert "--kill-on-bad-exit=0 --wait=1800" in script
        assert "#SBATCH --partition=p" in script
    assert [handles[job.run_dir].job_id for job in jobs] == ["100_0", "101", "100_1"]


def test_a_key_slurm_has_not_is_refused_before_submission(tmp_path, slurm):
    wrong = {**CPU, "partition": "p", "slurm": {"slurm_foo": 1}}
    with pytest.raises(ConfigError, match="foo"):
        prepared(tmp_path, config({**CPU, "partition": "p"}), config(wrong))
    assert slurm() == []


def test_local_jobs_have_the_hardwares_limit_and_its_gpus(monkeypatch):
    assert submit.local_parameters(HardwareConfig(**CPU, time_min=7))["timeout_min"] == 7
    assert "gpus_per_node" not in submit.local_parameters(HardwareConfig(**CPU))
    monkeypatch.setattr(submit, "visible_gpus", lambda: ["2", "3"])
    parameters = submit.local_parameters(HardwareConfig(name="cuda", gpus_per_node=1))
    assert (parameters["gpus_per_node"], parameters["visible_gpus"]) == (1, [2, 3])


def test_a_job_that_reaches_its_time_limit_says_so(stand_in, capsys):
    job = prepared(stand_in, config(claim="hangs"))[0]
    job.config.hardware.time_min = 0.05
    assert launch.run_queue([job], {}) == 1
    assert last_row(job.run_dir)["error"].startswith("the time limit of 0.05 min was reached (hardware.time_min)")
    assert is_running(read_json(job.run_dir / "process.json")) is False


def test_labels_name_what_differs(tmp_path):
    jobs = prepared(tmp_path, config(), config())
    assert launch.labels(jobs) == ["job 0 seed=0", "job 1 seed=1"]


def test_a_bad_end_is_written_once_and_after_a_torn_line(tmp_path):
    job = prepared(tmp_path, config(claim="c"))[0]
    (job.run_dir / "records.jsonl").write_text('{"status": "ok", "step": 0, "commit": "abc"}\n{"status": "o')
    record_failure(job.run_dir, "error", "killed")
    record_failure(job.run_dir, "error", "again")
    rows = read_rows(job.run_dir)
    assert [(row["status"], row.get("error")) for row in rows] == [("ok", None), ("error", "killed")]
    assert (rows[-1]["model"], rows[-1]["context"], rows[-1]["claim"]) == ("qwen3_6_tiny", 1024, "c")
    assert rows[-1]["commit"] == "abc"
    assert json.loads((job.run_dir / "result.json").read_text())["status"] == "error"


def test_exceptions_in_one_line():
    assert describe(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert describe(ValueError("a.jsonl:3: reward is NaN")) == "a.jsonl:3: reward is NaN"
    assert describe(KeyError()) == "KeyError"
    assert (status_of(MemoryError()), status_of(RuntimeError())) == ("oom", "error")


def test_what_pytorch_raises_without_memory_is_oom():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert status_of(caught.value) == "oom"


def test_the_table_has_a_row_a_job(tmp_path):
    jobs = prepared(tmp_path, config(), config({**CPU}, group_size=8), config())
    rows = [
        {"status": "ok", "peak_allocated_bytes": 5_000_000, "seconds": 1.5, "loss": 0.5},
        {"status": "ok", "peak_allocated_bytes": 4_000_000, "seconds": 2.0, "loss": "NaN"},
    ]
    (jobs[0].run_dir / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record_failure(jobs[1].run_dir, "oom", "no memory left")
    lines = table([job.run_dir for job in jobs]).splitlines()
    assert lines[0].split() == [
        "job",
        "model",
        "positions",
        "group_size",
        "prompt_grad",
        "status",
        "peak",
        "total",
        "time",
        "loss",
    ]
    assert lines[1].split() == ["0", "qwen3_6_tiny", "1,024", "2", "detached", "ok", "5.0", "MB", "3.50", "s", "nan"]
    assert lines[2].split() == ["1", "qwen3_6_tiny", "1,024", "8", "detached", "oom"]
    assert lines[3].split() == ["2", "qwen3_6_tiny", "1,024", "2", "detached", "not", "run"]
    assert lines[4:] == ["job 1: oom: no memory left"]


def test_progress_counts_positions_and_time(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    line = watch.JobLine(tmp_path, "job 0", steps=3, state="running")
    assert line.progress() == "starting"
    progress = tmp_path / "progress.json"
    progress.write_text('{"step": 1, "verb": "prefill", "done": 1000, "total": 16000}')
    assert line.progress() == "step 2/3  prefill 1,000/16,000"
    now = 110.0
    progress.write_text('{"step": 1, "verb": "prefill", "done": 6000, "total": 16000}')
    assert line.progress() == "step 2/3  prefill 6,000/16,000  38 %, 20.0 s left"
    progress.write_text('{"step": 1, "ver')
    assert line.progress() == "starting"


def test_only_rank_0_writes(stand_in, monkeypatch):
    assert rank() == 0
    job = prepared(stand_in, config())[0]
    spec = json.loads((job.run_dir / "spec.json").read_text())
    spec["config"]["group_size"] = 1
    (job.run_dir / "spec.json").write_text(json.dumps(spec))
    monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(ConfigError, match="group_size=1"):
        launch.execute(job.run_dir)
    assert {path.name for path in job.run_dir.iterdir()} == {"spec.json"}
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(ConfigError, match="group_size=1"):
        launch.execute(job.run_dir)
    assert {path.name for path in job.run_dir.iterdir()} == WRITTEN


def test_a_disk_too_full_for_a_job_s_last_files_hides_nothing(stand_in, capsys):
    job = prepared(stand_in, config())[0]
    spec = json.loads((job.run_dir / "spec.json").read_text())
    spec["config"]["group_size"] = 1
    (job.run_dir / "spec.json").write_text(json.dumps(spec))
    for name in ("error.txt", "result.json"):
        (job.run_dir / name).mkdir()  # cannot be written, also not by root
    with pytest.raises(ConfigError, match="group_size=1"):
        launch.execute(job.run_dir)
    assert "result.json" in capsys.readouterr().err
    assert last_row(job.run_dir)["status"] == "error"


def test_a_job_without_a_result_has_failed_whatever_its_last_step_says(tmp_path):
    job = prepared(tmp_path, config())[0]
    (job.run_dir / "records.jsonl").write_text('{"status": "ok", "step": 0}\n')
    assert launch.failed(job)
    (job.run_dir / "result.json").write_text('{"status": "ok"}')
    assert not launch.failed(job)


def test_signals_are_as_before_after_a_queue(stand_in):
    before = signal.getsignal(signal.SIGTERM)
    with launch._termination_as_interrupt():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert placement.find(HardwareConfig(**CPU)).executor == "local"
