"""The command line as users meet it: processes of their own, with a stand-in for the training loop."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import records

from longstraw.runtime.process_info import is_running
from longstraw.tracking.run_folder import read_json

TINY = ["model=qwen3_6_tiny", "hardware=cpu", "context=1Ki"]


def folder_of(done):
    return Path(done.stdout.split("records go to ")[1].splitlines()[0])


def wait_for(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not path():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return path()


def test_help_without_torch(longstraw):
    done = longstraw("--help", tiny=False)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("group_size=", "context=2.1M", "qwen3_6_tiny", "h20x8", "gspo", "-m"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["+typo=1"], "longstraw: +typo=1: there is no key typo"),
        (["group_size=many"], "longstraw: group_size=many: Value 'many'"),
        (["group_size=2,8"], "longstraw: group_size=2,8: several values are a sweep, which wants -m"),
        (["mode=emulate", "hardware=cuda"], "longstraw: mode=emulate runs a rank of hardware=cuda on one GPU"),
        (["response_length=1Ki"], "longstraw: response_length=1024 leaves no prompt in context=1024"),
        (["hardware=h20x8", "mode=run"], "longstraw: mode=run: hardware=h20x8 wants 8 GPUs, 0 visible here"),
        (
            ["-m", "chunk=64,100", "seed=1,2"],
            "longstraw: 2 of 4 jobs are wrong, none was started\nlongstraw: jobs 2, 3:",
        ),
    ],
)
def test_a_refusal_is_short_and_leaves_nothing(longstraw, stand_in, arguments, reason):
    done = longstraw(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(reason)
    assert len(done.stderr.splitlines()) <= 2
    assert done.stdout == ""
    assert not list(stand_in.glob("runs/*/*"))


@pytest.mark.parametrize("arguments", [[], ["-m"]])
def test_a_folder_that_cannot_be_made_is_one_line(longstraw, stand_in, arguments):
    (stand_in / "runs").write_text("")
    done = longstraw(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("longstraw: runs/longstraw: Not a directory; records go elsewhere with ")
    assert len(done.stderr.splitlines()) == 1


def test_one_job_runs_in_this_process_and_ends_with_its_table(longstraw):
    done = longstraw("steps=2", "group_size=8")
    assert done.returncode == 0, done.stderr
    first, *_, head, row, last = done.stdout.splitlines()
    assert first.startswith(
        "longstraw: mode=run: on this machine's processor (hardware=cpu); records go to runs/longstraw/"
    )
    assert head.split()[:4] == ["job", "model", "positions", "group_size"]
    assert row.split() == ["0", "qwen3_6_tiny", "1,024", "8", "detached", "ok", "1.0", "MB", "4.00", "s", "0.25"]
    assert last == f"records: {folder_of(done)}/0/records.jsonl"
    assert [record["step"] for record in records(folder_of(done) / "0")] == [0, 1]
    assert not (folder_of(done) / "0" / "log").exists()


def test_a_folder_that_was_asked_for_is_the_one_that_is_named(longstraw, stand_in):
    done = longstraw("hydra.run.dir=elsewhere/mine")
    assert done.stdout.splitlines()[-1] == "records: elsewhere/mine/records.jsonl"
    assert (stand_in / "elsewhere" / "mine" / "records.jsonl").exists()


@pytest.mark.parametrize(("claim", "traceback"), [("data", False), ("raises", True)])
def test_a_users_mistake_is_a_line_and_ours_a_traceback(longstraw, claim, traceback):
    done = longstraw(f"claim={claim}")
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == traceback
    said = {"data": "longstraw: prompts.jsonl:3: reward is NaN", "raises": "longstraw: RuntimeError: the loop broke"}[
        claim
    ]
    assert said in done.stderr
    run_dir = folder_of(done) / "0"
    assert "Traceback" in (run_dir / "error.txt").read_text()
    assert [record["status"] for record in records(run_dir)] == ["error"]


def test_a_failing_job_takes_no_other_down(longstraw):
    done = longstraw("-m", "claim=fine,raises,killed,too_large,last")
    assert done.returncode == 1
    folder = folder_of(done)
    statuses = [records(folder / str(num))[-1]["status"] for num in range(5)]
    assert statuses == ["ok", "error", "error", "too_large", "ok"]
    assert "killed from outside" in records(folder / "2")[-1]["error"]
    table = [line.split()[5] for line in done.stdout.splitlines() if line[:1].isdecimal()]
    assert table == statuses
    for said in (
        "job 1: error: RuntimeError: the loop broke",
        "job 3: too_large: needs 9 GB of 8",
    ):
        assert said in done.stdout
    assert "job 2 claim=killed  failed" in done.stdout
    # One at a time on a processor.
    began = [float((folder / str(num) / "began").read_text()) for num in range(5)]
    assert float((folder / "0" / "ended").read_text()) < began[1]
    assert all(earlier < later for earlier, later in pairwise(began))


def test_an_interrupt_ends_the_jobs_it_started(stand_in):
    command = [sys.executable, "-m", "longstraw.run", "-m", *TINY, "claim=hangs,last"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = wait_for(lambda: [path.read_text() for path in stand_in.glob("runs/*/*/0/pid") if path.read_text()])[0]
    running = read_json(next(stand_in.glob("runs/*/*/0/process.json")))
    assert (running["pid"], is_running(running)) == (int(pid), True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert is_running(running) is False
    assert [line.split()[5] for line in out.splitlines() if line[:1].isdecimal()] == ["error", "not"]
    assert "job 0: error: interrupted" in out
    assert "KeyboardInterrupt" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_job_that_is_stopped_leaves_word(stand_in, number):
    command = [sys.executable, "-m", "longstraw.run", *TINY, "claim=hangs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(stand_in.glob("runs/*/*/0/began")))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    (row,) = records(next(stand_in.glob("runs/*/*/0")))
    assert (row["status"], row["error"]) == ("error", f"interrupted ({number.name})")


@pytest.mark.parametrize("module", ["longstraw.config", "hydra"])
def test_an_interrupt_while_the_command_is_loaded_is_no_traceback(stand_in, module):
    """Ctrl-C in the first second, while the command's own modules or Hydra are imported."""
    hook = stand_in.parent / "hook" / "sitecustomize.py"
    pause = f"""
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r} and not os.path.exists("loading"):
            import time
            open("loading", "w").close()
            time.sleep(30)

sys.meta_path.insert(0, Slow())
"""
    hook.write_text(hook.read_text() + pause)
    command = [sys.executable, "-m", "longstraw.run", *TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (stand_in / "loading").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert (out, err) in (("", ""), ("", "longstraw: interrupted\n"))


def test_a_folder_in_use_is_refused_before_hydra_writes_there(longstraw, stand_in):
    assert longstraw("hydra.run.dir=X/a").returncode == 0
    before = {path: path.read_bytes() for path in stand_in.rglob("*") if path.is_file()}
    done = longstraw("hydra.run.dir=X/a", "optimizer.lr=1", "seed=9")
    assert (done.returncode, done.stdout) == (2, "")
    assert "X/a holds an earlier run that ended with status ok, and nothing in it was changed" in done.stderr
    assert {path: path.read_bytes() for path in stand_in.rglob("*") if path.is_file()} == before
    assert longstraw("hydra.run.dir=X/b").returncode == 0
    again = subprocess.run([sys.executable, "-m", "longstraw.status", "X"], capture_output=True, text=True, timeout=60)
    assert [line.split()[:2] for line in again.stdout.splitlines()[1:]] == [["a", "done"], ["b", "done"]]


@pytest.mark.parametrize("name", ["a b 'c' \"d\" ü $HOME", "100%", "%j"])
def test_odd_characters_in_the_working_folder(longstraw, stand_in, monkeypatch, name):
    (stand_in / name).mkdir()
    monkeypatch.chdir(stand_in / name)
    done = longstraw("-m", "seed=1,2")
    if "%j" in name:
        assert done.returncode == 2
        assert "%j in its name, and submitit puts the job's number there" in done.stderr
        assert longstraw("seed=1").returncode == 0  # one job in this process has no logs of submitit's
        return
    assert done.returncode == 0, done.stderr
    assert [record["status"] for num in "01" for record in records(folder_of(done) / num)] == ["ok", "ok"]


def test_detached_jobs_run_on_alone(longstraw, stand_in):
    begun = time.monotonic()
    done = longstraw("-m", "seed=1,2", "launch.detach=true")
    assert done.returncode == 0, done.stderr
    assert "does not wait" in done.stdout
    folder = folder_of(done)
    assert not (folder / "1" / "result.json").exists(), time.monotonic() - begun
    wait_for(lambda: (folder / "1" / "result.json").exists())
    assert [json.loads((folder / str(num) / "result.json").read_text())["status"] for num in (0, 1)] == ["ok", "ok"]
    wait_for(lambda: "0.25" in (folder / "launch.log").read_text())


def test_a_named_sweep_needs_no_m(longstraw):
    done = longstraw("sweep=laptop", "prompt_grad=detached", "context=4Ki", tiny=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line[:1].isdecimal()]) == 2
    assert folder_of(done).parent.name == "laptop"


def test_the_stand_in_really_has_no_torch(stand_in):
    """The control of every test here: what needs torch fails in these processes."""
    done = subprocess.run([sys.executable, "-c", "import longstraw.step"], capture_output=True, text=True)
    assert "blocked" in done.stderr


@pytest.mark.parametrize("given", [["--config-dir", "mine"], ["hydra.searchpath=[file://mine]"]], ids=["option", "key"])
def test_option_files_of_the_user_are_options(stand_in, longstraw, given):
    """They may inherit from ours; one that is wrong stops the command that chooses it, and no other."""
    models = stand_in / "mine" / "model"
    models.mkdir(parents=True)
    (models / "small.yaml").write_text("defaults: [qwen3_6_tiny@_here_]\nname: small\nnum_hidden_layers: 4\n")
    (models / "wrong.yaml").write_text("defaults: [qwen3_6_tiny@_here_]\nname: qwen3_6_tiny\n")
    given = [text.replace("file://mine", f"file://{stand_in / 'mine'}") for text in given]
    done = longstraw(*given, *TINY[1:], "model=small")
    assert done.returncode == 0, done.stderr
    (spec,) = stand_in.glob("runs/*/*/0/spec.json")
    model = json.loads(spec.read_text())["config"]["model"]
    assert (model["name"], model["num_hidden_layers"], model["hidden_size"]) == ("small", 4, 64)
    done = longstraw(*given, *TINY[1:], "model=wrong")
    assert done.returncode == 2
    assert "wrong.yaml: name: qwen3_6_tiny is not the file's name; write name: wrong" in done.stderr


def test_a_folder_of_option_files_that_is_missing_is_named(longstraw):
    done = longstraw("--config-dir", "nowhere", *TINY)
    assert done.returncode == 2
    assert "nowhere: no such folder of option files" in done.stderr
