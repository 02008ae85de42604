"""A run that cannot fit: not started, but a row in the table; a simulated one that does not fit has its numbers."""

from dataclasses import replace

import pytest

from longstraw.config import HardwareConfig, from_dict, option
from longstraw.launch import jobs as launch
from longstraw.launch import worker
from longstraw.launch.prepare import prepare
from longstraw.launch.spec import Draft
from longstraw.memory import fit
from longstraw.memory.estimate import counts, cut
from longstraw.runtime.machine_memory import MemoryLimit
from longstraw.simulation.jobs import simulate_job
from longstraw.tracking.constants import constant_keys
from longstraw.tracking.job_table import table
from longstraw.tracking.recorder import RunIdentity
from longstraw.tracking.run_folder import last_row, read_json
from longstraw.tracking.schema import check


def config(memory_gb, mode="run"):
    hardware = {"name": "small", "backend": "cpu", "memory_gb": memory_gb}
    model = option("model", "qwen3_6_tiny") | {"num_hidden_layers": 2}
    keys = {"context": 192, "response_length": 64, "chunk": 64, "mode": mode, "tracking": {"mode": "disabled"}}
    return from_dict({"model": model, "hardware": hardware, "data": {"name": "needle"}, **keys})


def prepared(folder, *configs):
    drafts = [Draft(num, [f"seed={num}"], folder / str(num), c) for num, c in enumerate(configs)]
    return prepare(drafts, command="longstraw", sweep=None)


def test_a_run_that_cannot_fit_is_a_row_and_no_job(tmp_path, capsys):
    (job,) = prepared(tmp_path, config(0.0005))
    assert launch.launch([job], tmp_path, alone=True) == 1
    row = last_row(job.run_dir)
    check(row)
    assert (row["status"], row["mode"], row["step"], row["peak_allocated_bytes"]) == ("too_large", "run", None, None)
    assert row["predicted_peak_bytes"] > 500_000 * 1.016
    assert sum(row["predicted_bytes_by_kind"].values()) == row["predicted_peak_bytes"]
    assert read_json(job.run_dir / "result.json")["status"] == "too_large"
    assert not (job.run_dir / "process.json").exists()
    said = capsys.readouterr().out
    assert "too_large: a rank holds" in said
    assert "hardware.memory_gb=0.0005 leaves 500.0 kB" in said


def test_the_other_jobs_of_a_sweep_run(tmp_path, monkeypatch):
    jobs = prepared(tmp_path, config(0.0005), config(1.0), config(None))
    begun = []

    def run_queue(started, handles):
        begun.extend(started)
        for job in started:
            launch.record_failure(job.run_dir, "ok", "", 0)
        return 0

    monkeypatch.setattr(launch, "run_queue", run_queue)
    assert launch.launch(jobs, tmp_path, alone=False) == 1  # not all of them succeeded
    assert [job.num for job in begun] == [1, 2]
    assert [last_row(job.run_dir)["status"] for job in jobs] == ["too_large", "ok", "ok"]
    assert len([line for line in table([job.run_dir for job in jobs]).splitlines() if "qwen3_6_tiny" in line]) == 3


def test_a_simulated_job_has_its_numbers_all_the_same(tmp_path):
    (job,) = prepared(tmp_path, config(0.0005, mode="simulate"))
    simulate_job(job.config, job.run_dir, RunIdentity("r"))
    row = last_row(job.run_dir)
    assert row["status"] == "too_large"
    assert row["peak_allocated_bytes"] > 500_000
    assert "(counted, in " in row["error"]
    assert launch.record_too_large([job]) == [job]  # what is simulated takes no memory


def test_a_small_job_on_a_processor_counts_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counts, "_counted", {})
    monkeypatch.setattr(cut, "count_steps", lambda steps: pytest.fail("nothing need be counted"))
    assert worker._predict(config(None)) is None
    small = [MemoryLimit(10**6, 10**6, "a limit", shared=True)]
    monkeypatch.setattr(worker, "memory_limits", lambda: small)
    with pytest.raises(pytest.fail.Exception, match="nothing need be counted"):  # where it may not fit, it must be
        worker._predict(config(None))


def test_a_count_that_fails_is_said_and_stops_no_job(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counts, "_counted", {})
    monkeypatch.setattr(worker, "memory_limits", list)

    def broken(steps):
        raise KeyError("a name that is missing")

    monkeypatch.setattr(cut, "count_steps", broken)
    job = config(None)
    assert worker._predict(job) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "memory cannot be predicted: KeyError" in caplog.text
    assert constant_keys(job)["predicted_peak_bytes"] is None


@pytest.fixture
def two_processes(tmp_path):
    (job,) = prepared(tmp_path, replace(config(None), hardware=HardwareConfig("cpu", backend="cpu", ranks=2)))
    assert (job.placement.mode, job.placement.executor) == ("run", "local")
    return job


def test_a_job_of_several_processes_is_compared_with_the_machine_before_they_start(monkeypatch, two_processes):
    monkeypatch.setattr(launch, "memory_limits", lambda: [MemoryLimit(10**6, 10**6, "a limit", shared=True)])
    assert launch.record_too_large([two_processes]) == []
    row = last_row(two_processes.run_dir)
    assert row["status"] == "too_large"
    assert "a limit, 1.0 MB, leaves 500.0 kB" in row["error"]  # each of the two has half
    monkeypatch.setattr(launch, "memory_limits", lambda: [MemoryLimit(10**10, 10**10, "a limit", shared=True)])
    assert launch.record_too_large([two_processes]) == [two_processes]


def test_a_prediction_that_fails_keeps_no_job_of_several_processes(monkeypatch, caplog, two_processes):
    def broken(*_):
        raise KeyError("a name that is missing")

    monkeypatch.setattr(fit, "machine_refuses", broken)
    assert launch.record_too_large([two_processes]) == [two_processes]
    assert "memory cannot be predicted: KeyError" in caplog.text
