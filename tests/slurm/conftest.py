"""A real SLURM for the tests of this folder: two pretended nodes of this machine with eight pretended GPUs each."""

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
PACKAGES = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
REQUIRED = "LONGSTRAW_REQUIRE_SLURM"  # set where the tests must run, as in CI


def _script(name, *arguments, env=None):
    """Run one of the scripts beside this file, for a minute at most; return its exit status and what it said."""
    with tempfile.TemporaryFile("w+") as said:  # no pipe: a daemon that kept it open would keep us waiting
        command = ["bash", str(HERE / name), *map(str, arguments)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=60, env=env, check=False
        )
        said.seek(0)
        return done.returncode, said.read()


def _unavailable():
    """Return why no SLURM can be started here; empty if one can."""
    path = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in NEEDED if not shutil.which(name, path=path)]
    if missing:
        return f"no {', '.join(missing)} here; install SLURM with: {PACKAGES}"
    return "" if os.geteuid() == 0 else "SLURM's daemons with GPUs want root"


@pytest.fixture(scope="session")
def cluster():
    """Start SLURM for the session; return its folder. Skips where it is not installed, unless it is required."""
    if reason := _unavailable():
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(reason)
    worker = re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or "0"
    port = 16817 + 20 * int(worker)
    state = Path(
        tempfile.mkdtemp(prefix="longstraw-slurm-", dir="/tmp")
    )  # not pytest's folder: a socket's path must be short
    code, said = _script("start_slurm.sh", state, 2, env={**os.environ, "LONGSTRAW_SLURM_PORT": str(port)})
    try:
        assert code == 0, said
        yield state
    finally:
        _script("stop_slurm.sh", state)
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def slurm(cluster, monkeypatch):
    """Point this test, and what it starts, at the running SLURM; return a function that calls one of its commands."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLURM_CONF", str(cluster / "etc" / "slurm.conf"))

    def call(*command):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield call
    subprocess.run(["scancel", "--quiet", f"--user={os.getuid()}"], timeout=30, check=False)


@pytest.fixture
def wait_for(slurm):
    """Return a function that waits, for a time, until something holds."""

    def wait(what, holds, seconds=60):
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s; {slurm('squeue')}"
            time.sleep(0.3)

    return wait


@pytest.fixture
def watchdog():
    """Cancel every job after four minutes, so that nobody waits for them longer."""
    timer = threading.Timer(240, subprocess.run, [["scancel", f"--user={os.getuid()}"]], {"timeout": 30})
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


FINDER = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "longstraw.train":
            return importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), "loop.py"))

sys.meta_path.insert(0, Finder())
"""

LOOP = """
import os, signal, time
from pathlib import Path
from longstraw.record import append_row, latest_attempt
from longstraw.stop import Preempted, Stop, Superseded

if "SLOWLY" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:  # as where torch is loaded from a full disk
    folder, deadline = Path(os.environ["SLOWLY"]), time.monotonic() + 60
    (folder / f"loading.{os.environ['SLURM_ARRAY_TASK_ID']}").touch()
    while not (folder / "loaded").exists() and time.monotonic() < deadline:
        time.sleep(0.1)

def run_job(config, run_dir, *, run_id, attempt, sweep, command, overrides, ranks=None):
    fate, kept = config.claim, run_dir / "kept"
    first = int(kept.read_text()) if kept.exists() else 0
    if fate == "deaf":
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(300)
    if fate == "fails":
        raise RuntimeError("the loop broke")
    with Stop().listening() as stop:
        for step in range(first, config.steps):
            row = {"run_id": run_id, "step": step, "status": "ok", "loss": 0.25, "seconds": 1.0}
            try:
                time.sleep(0.05 if fate == "ends" else 1.0)
                stop.check()
            except Preempted as asked:
                kept.write_text(str(step))
                asked.told, asked.progressed = str(asked), step > first
                append_row(run_dir, {**row, "status": "preempted", "error": asked.told}, attempt)
                return asked
            if (latest_attempt(run_dir) or 0) > attempt:
                raise Superseded("a later attempt has begun")
            append_row(run_dir, {**row, "peak_allocated_bytes": 10**6, "prompt_positions": 1000,
                                 "response_positions": 24}, attempt)
            kept.write_text(str(step + 1))
"""


@pytest.fixture
def stand_in(slurm, tmp_path, monkeypatch):
    """Put a loop of sleeps in the place of the training loop of jobs; return the folder to work in."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(FINDER)
    (hook / "loop.py").write_text(LOOP)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), str(ROOT)]))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"
