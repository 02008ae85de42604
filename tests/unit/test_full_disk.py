"""A disk that is really full: what was computed is kept, what to do is said, and the job goes on to the same bits."""

import contextlib
import errno
import json
import shutil
import subprocess

import pytest
import torch
from jobs import cpu_job

from longstraw.config import to_dict
from longstraw.errors import os_error, os_reason, write_error
from longstraw.launch import jobs as launch
from longstraw.launch.prepare import prepare
from longstraw.launch.spec import Draft
from longstraw.tracking.run_folder import read_json, read_lines, read_steps
from longstraw.training.checkpoint import Checkpoints
from longstraw.training.monitor import Monitor

STEPS = 3
SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32, "intermediate_size": 48}


def mount(*words):
    return subprocess.run(["mount", *words], capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def disk(tmp_path):
    """Return a file system of one megabyte: room for one checkpoint of the job and half of another."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not shutil.which("mount"):
        pytest.skip("no mount here: a disk of its own cannot be made")
    done = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    if done.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=True)


def prepared(folder):
    config = cpu_job(
        SMALL,
        algorithm={"old_logprobs": "score", "kl_coef": 0.1},  # a loss that is not 0 on policy
        checkpoint={"every": 1},
        context=152,
        chunk=64,
        steps=STEPS,
        save=True,
    )
    return prepare([Draft(0, [], folder / "0", config)], command="longstraw", sweep=None)


def outcome(folder):
    rows = read_steps(folder / "0")
    assert [(row["step"], row["status"]) for row in rows] == [(step, "ok") for step in range(STEPS)]
    return [(row["loss"], row["grad_norm"]) for row in rows], (folder / "0/model/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert launch.launch(prepared(folder), folder, alone=True) == 0
    return outcome(folder)


def goes_on(disk, undisturbed):
    """Check that the job, once there is room, ends as if nothing had happened."""
    assert mount("-o", "remount,size=20m", str(disk)).returncode == 0
    assert launch.launch(launch.resume_jobs([disk / "0"]), disk, alone=True) == 0
    assert outcome(disk) == undisturbed
    assert read_json(disk / "0" / "result.json")["status"] == "ok"


def test_a_checkpoint_that_does_not_fit_leaves_the_older_one_and_the_record(disk, undisturbed, capsys):
    assert launch.launch(prepared(disk), disk, alone=True) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    words = (
        "the disk is full (No space left on device): the checkpoint of step 2 is not written, that of step 1 is whole; "
        f"once it can be, go on with: python -m longstraw.status {disk / '0'} --again"
    )
    assert words in shown.err
    rows = read_lines(disk / "0" / "records.jsonl")
    assert [(row["step"], row["status"]) for row in rows] == [(0, "ok"), (1, "ok"), (1, "error")]
    assert words in rows[-1]["error"]
    assert words in read_json(disk / "0" / "result.json")["error"]
    assert [path.name for path in (disk / "0" / "checkpoints").iterdir()] == ["step-00000001"]
    goes_on(disk, undisturbed)


def test_a_record_that_does_not_fit_is_shown_and_the_rest_is_kept(disk, undisturbed, capsys, monkeypatch):
    jobs, count, advance = prepared(disk), 0, Monitor.advance

    def filling(self, positions):
        nonlocal count
        count += self.progress.step == 1
        if count == 1:
            with (disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 512):
                    pass
        advance(self, positions)

    monkeypatch.setattr(Monitor, "advance", filling)
    assert launch.launch(jobs, disk, alone=True) == 1
    monkeypatch.undo()
    shown = capsys.readouterr().err.splitlines()
    said = [line for line in shown if not line.startswith("{")]
    assert "the disk is full (No space left on device), so the record of step 1 is not in it" in said[-1]
    assert not any("Traceback" in line for line in said)
    lost = next(json.loads(line) for line in shown if line.startswith("{"))
    assert (lost["step"], lost["status"], lost["loss"]) == (1, "ok", undisturbed[0][1][0])
    assert [(row["step"], row["status"]) for row in read_lines(disk / "0" / "records.jsonl")] == [(0, "ok")]
    (disk / "others").unlink()
    goes_on(disk, undisturbed)


@pytest.mark.parametrize("parts", [1, 7])
def test_torch_s_own_words_do_not_hide_the_full_disk(disk, parts):
    """Where torch's zip writer ends the file, it raises its own error over the system's."""
    tensors = {f"p{part}": torch.nn.Parameter(torch.zeros(1_000_000 // parts)) for part in range(parts)}
    with pytest.raises(OSError, match=r"^\[Errno 28\] the disk is full \(No space left on device\): the checkpoint"):
        Checkpoints(disk / "checkpoints", tensors, None).save(1)
    assert list((disk / "checkpoints").iterdir()) == []


def test_a_model_that_cannot_be_saved_names_the_full_disk(disk, capsys):
    (job,) = prepared(disk)
    job.config.checkpoint.every = None
    (disk / "others").write_bytes(bytes(900_000))
    spec = json.loads((job.run_dir / "spec.json").read_text())
    (job.run_dir / "spec.json").write_text(json.dumps({**spec, "config": to_dict(job.config)}))
    assert launch.launch([job], disk, alone=True) == 1
    assert "the disk is full (No space left on device): what was trained is not saved" in capsys.readouterr().err
    assert "the disk is full" in read_json(job.run_dir / "result.json")["error"]


def test_errors_of_the_system_are_found_behind_those_of_libraries(tmp_path):
    def raised(cause):
        try:
            try:
                raise cause
            except Exception:
                raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904
        except RuntimeError as error:
            return error

    assert os_error(raised(OSError(errno.EDQUOT, "Disk quota exceeded"))).errno == errno.EDQUOT
    assert os_error(RuntimeError("I/O error: No space left on device (os error 28)")).errno == errno.ENOSPC
    assert os_error(raised(ValueError("another"))) is None
    assert os_reason(OSError(errno.EDQUOT, "Disk quota exceeded")) == "the disk quota is used up (Disk quota exceeded)"
    assert os_reason(OSError(errno.EROFS, "Read-only")) == "the file system is read-only (Read-only)"
    assert write_error(tmp_path) is None
    assert write_error(tmp_path / "none").errno == errno.ENOENT
    assert list(tmp_path.iterdir()) == []


def test_the_disk_of_these_tests_is_full_when_it_is(disk):
    with pytest.raises(OSError, match="No space") as raised:
        (disk / "file").write_bytes(b"x" * 2**21)
    assert raised.value.errno == errno.ENOSPC
