"""The records file and its rows; nothing here opens W&B."""

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from longstraw.config import HardwareConfig, NeedleConfig, RunConfig, load_model_config
from longstraw.memory.estimate import steps_to_count
from longstraw.memory.estimate.counts import Counts, keep
from longstraw.memory.kinds import KINDS
from longstraw.tracking import provenance
from longstraw.tracking.recorder import Recorder, RecordError, append_row, constant_keys, latest_attempt, startup_facts
from longstraw.tracking.schema import KEYS, check, complete, flatten, numbers, to_line

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


def rows(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in Path(path).read_text().splitlines()]


def test_a_row_is_completed_in_the_order_of_the_listing(tmp_path):
    with Recorder(tmp_path, run_id="r", constants={"model": "m"}) as recorder:
        recorder.log({"loss": 0.5, "status": "ok", "step": 0})
    (row,) = rows(tmp_path / "records.jsonl")
    assert list(row) == list(KEYS)
    assert (row["schema"], row["run_id"], row["attempt"], row["model"]) == (1, "r", 0, "m")
    assert row["evidence"] == "finished"
    assert row["error"] is None


def test_only_a_finished_step_is_evidence():
    assert complete({"status": "oom"})["evidence"] is None
    assert complete({"status": "ok", "evidence": "gradient parity"})["evidence"] == "gradient parity"


def test_rows_are_in_the_file_before_close(tmp_path):
    recorder = Recorder(tmp_path, run_id="r")
    for step in range(3):
        recorder.log({"step": step, "status": "ok"})
        assert len(rows(recorder.path)) == step + 1
    recorder.close()
    recorder.close()


def test_non_finite_numbers_survive_strict_json(tmp_path):
    values = {"loss": math.nan, "kl": math.inf, "entropy": -math.inf, "seconds_by_verb": {"replay": math.nan}}
    with Recorder(tmp_path, run_id="r") as recorder:
        recorder.log({"step": 0, "status": "ok", **values})
    (row,) = rows(recorder.path)
    assert row["loss"] == "NaN"
    back = numbers(row)
    assert math.isnan(back["loss"])
    assert math.isnan(back["seconds_by_verb"]["replay"])
    assert (back["kl"], back["entropy"]) == (math.inf, -math.inf)


def test_tensors_and_numpy_scalars_become_numbers():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    row = {
        "loss": torch.tensor(0.5, requires_grad=True),
        "retained_bytes": numpy.int64(2**40),
        "peak_allocated_bytes_by_rank": torch.tensor([1, 2]),
    }
    check({"status": "ok", **row})
    full = json.loads(to_line(complete(row)))
    assert (full["loss"], full["retained_bytes"], full["peak_allocated_bytes_by_rank"]) == (0.5, 2**40, [1, 2])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"peak_alocated_bytes": 1}, "did you mean peak_allocated_bytes"),
        ({"group_size": "2"}, "group_size must be int"),
        ({"group_size": True}, "group_size must be int"),
        ({"dirty": 1}, "dirty must be bool"),
        ({"status": "done"}, "ok, oom, too_large, preempted, error"),
    ],
)
def test_a_bad_row_is_written_and_then_refused(tmp_path, bad, says):
    with Recorder(tmp_path, run_id="r") as recorder, pytest.raises(RecordError, match=says):
        recorder.log({"step": 7, "status": "ok", "loss": 1.0} | bad)
    (row,) = rows(recorder.path)
    assert (row["step"], row["loss"]) == (7, 1.0)


def test_an_integer_may_stand_for_a_float():
    check({"status": "ok", "seconds": 3})


def test_earlier_records_are_not_overwritten(tmp_path):
    with Recorder(tmp_path, run_id="r") as recorder:
        recorder.log({"step": 0, "status": "ok"})
    before = recorder.path.read_bytes()
    with pytest.raises(RecordError, match=r"go on with that run: python -m longstraw.status \S+ --again"):
        Recorder(tmp_path, run_id="r")
    assert recorder.path.read_bytes() == before


def test_an_empty_file_is_nobody_s(tmp_path):
    (tmp_path / "records.jsonl").touch()
    with Recorder(tmp_path, run_id="r") as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert len(rows(recorder.path)) == 1


def test_attempts_have_files_of_their_own_and_fence_off_earlier_ones(tmp_path):
    assert latest_attempt(tmp_path) is None
    first = Recorder(tmp_path, run_id="r")
    assert not first.superseded
    (tmp_path / "records.backup.jsonl").touch()
    assert not first.superseded
    second = Recorder(tmp_path, run_id="r", attempt=11)
    assert first.superseded
    assert not second.superseded
    assert second.path.name == "records.11.jsonl"
    assert latest_attempt(tmp_path) == 11
    first.close()
    second.close()


def test_other_ranks_write_nothing(tmp_path):
    with Recorder(tmp_path / "run", run_id="r", rank=1) as recorder:
        recorder.log({"step": 0, "status": "ok"})
    assert not (tmp_path / "run").exists()


def test_the_launcher_writes_for_a_dead_job(tmp_path):
    torn = b'{"schema": 1, "step": 0, "sta'
    (tmp_path / "records.jsonl").write_text("")
    (tmp_path / "records.2.jsonl").write_bytes(torn)
    path = append_row(tmp_path, {"run_id": "r", "status": "error", "error": "killed by signal 9"})
    assert path.name == "records.2.jsonl"
    lines = path.read_bytes().splitlines()
    assert lines[0] == torn
    row = json.loads(lines[1])
    assert (row["attempt"], row["status"], row["error"]) == (2, "error", "killed by signal 9")


def test_a_full_disk_is_named_and_the_row_shown(tmp_path, capsys):
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    with Recorder(tmp_path, run_id="r") as recorder:
        with pytest.raises(RecordError, match=r"records.jsonl: the disk is full .*record of step 3"):
            recorder.log({"step": 3, "status": "ok"})
        assert json.loads(capsys.readouterr().err)["step"] == 3


def test_a_write_that_stops_half_way_leaves_whole_lines(tmp_path, capsys):
    recorder = Recorder(tmp_path, run_id="r")
    recorder.log({"step": 0, "status": "ok"})
    size = recorder.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        with pytest.raises(RecordError, match="File too large, so the record of step 1 is not in it"):
            recorder.log({"step": 1, "status": "ok"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorder.path.stat().st_size == size
    recorder.log({"step": 2, "status": "ok"})
    recorder.close()
    assert [row["step"] for row in rows(recorder.path)] == [0, 2]


def test_constant_keys_come_from_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = RunConfig(
        model=load_model_config("qwen3_6_tiny"),
        hardware=HardwareConfig(name="cpu", backend="cpu"),
        data=NeedleConfig(),
        context="16Ki",
        response_length=64,
        chunk=4096,
        prompt_grad="exact",
        prompt_grad_window="1Ki",
        claim="c",
    )
    keys = constant_keys(config)
    check({"status": "error", **keys})
    assert keys["mode"] is None
    assert (keys["model"], keys["hardware"], keys["data"], keys["claim"]) == ("qwen3_6_tiny", "cpu", "needle", "c")
    assert (keys["context"], keys["prompt_positions"], keys["prompt_grad_window"]) == (16384, 16320, 1024)
    assert keys["predicted_peak_bytes"] is None  # nobody has counted it
    kinds = dict.fromkeys(KINDS, 10**6) | {"optimizer": 0}
    (step,) = steps_to_count(config)
    keep(
        step,
        Counts(
            {"replay": kinds, "optimizer": dict.fromkeys(KINDS, 0)},
            host=0,
            tensors=1,
            narrow_gradients=0,
            first_narrowed=0,
        ),
    )
    keys = constant_keys(config)
    check({"status": "error", **keys})
    assert keys["predicted_bytes_by_kind"] == kinds
    assert keys["predicted_peak_bytes"] == 10**6 * (len(KINDS) - 1)
    config.mode = "run"
    assert constant_keys(config)["mode"] == "run"


def test_startup_facts_are_record_keys():
    facts = startup_facts("cpu")
    check({"status": "ok", **facts})
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["versions"]["longstraw"]
    assert facts["device_name"]
    assert startup_facts(None)["device_name"] is None


def test_commit_is_null_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    facts = startup_facts()
    assert (facts["commit"], facts["dirty"]) == (None, None)


def test_commit_is_that_of_a_repository_which_tracks_the_file(tmp_path, monkeypatch):
    def git(*arguments):
        names = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *names, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    source = tmp_path / "provenance.py"
    source.write_text("x")
    monkeypatch.setattr(provenance, "__file__", str(source))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "somebody else's")
    assert provenance._commit() == (None, None)
    git("add", "provenance.py")
    git("commit", "-q", "-m", "ours")
    assert provenance._commit() == (git("rev-parse", "HEAD"), False)
    source.write_text("y")
    assert provenance._commit() == (git("rev-parse", "HEAD"), True)


def test_recording_needs_neither_torch_nor_wandb(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['wandb'] = None\n"
        "from longstraw.tracking.recorder import Recorder, startup_facts\n"
        f"with Recorder({str(tmp_path)!r}, run_id='r', constants=startup_facts()) as recorder:\n"
        "    recorder.log({'step': 0, 'status': 'ok'})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert len(rows(tmp_path / "records.jsonl")) == 1
    assert result.stderr.count("going on without it") == 1


def test_dict_values_become_keys_of_their_own():
    flat = flatten({"step": 0, "error": None, "seconds_by_verb": {"replay": 1.0, "deep": {"x": 2}}, "cp": None})
    assert flat == {"step": 0, "seconds_by_verb/replay": 1.0, "seconds_by_verb/deep/x": 2}
