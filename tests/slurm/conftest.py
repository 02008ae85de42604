"""A real SLURM for the tests of this folder: two pretended nodes of this machine with eight pretended GPUs each."""

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import longstraw.launch.slurm
import longstraw.status

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


@pytest.fixture(scope="session")
def point(cluster):
    """Return a function that points a test, and what it starts, at the running SLURM, until ``patch`` is undone.

    It returns another that calls one of SLURM's commands.
    """

    def to_slurm(patch):
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SUBMITIT_", "WANDB_"))]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("SLURM_CONF", str(cluster / "etc" / "slurm.conf"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(longstraw.launch.slurm, "POLL_SECONDS", 1.0)
        for module in (longstraw.launch.slurm, longstraw.status):  # nothing lags where all is on one disk
            patch.setattr(module, "LAG_SECONDS", 3.0)
        return call

    return to_slurm


def call(*command):
    """Return what one of SLURM's commands says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def cancel():
    """Cancel every job."""
    subprocess.run(["scancel", "--quiet", f"--user={os.getuid()}"], timeout=30, check=False)


@pytest.fixture
def slurm(point, monkeypatch):
    """Point this test at the running SLURM; return a function that calls one of its commands."""
    yield point(monkeypatch)
    cancel()


@pytest.fixture(scope="session")
def wait_for(cluster):
    """Return a function that waits, for a time, until something holds."""

    def wait(what, holds, seconds=60):
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s; {call('squeue')}"
            time.sleep(0.4)

    return wait


@pytest.fixture(scope="session")
def cancelling():
    """Return a function: what happens inside is over when all its jobs are cancelled, in the end or after a while."""

    @contextmanager
    def within(seconds):
        timer = threading.Timer(seconds, cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            cancel()

    return within


@pytest.fixture
def watchdog(slurm, cancelling):
    with cancelling(240):
        yield


@pytest.fixture(scope="session")
def start_node(cluster):
    """Return a function that starts a node's daemon again, and gives it jobs."""

    def start(node):
        command = ["slurmd", "-f", str(cluster / "etc" / "slurm.conf"), "-N", node]
        path = os.environ["PATH"] + ":/usr/sbin"
        subprocess.run(command, timeout=30, check=False, env={**os.environ, "PATH": path})
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], timeout=30, check=False)

    return start


FINDER = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "longstraw.training.loop":
            return importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), "loop.py"))

sys.meta_path.insert(0, Finder())
"""

LOOP = """
import os, signal, time
from pathlib import Path
from longstraw.tracking.recorder import append_row, latest_attempt
from longstraw.runtime.preemption import Preempted, Stop, Superseded

if "SLOWLY" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:  # as where torch is loaded from a full disk
    folder, deadline = Path(os.environ["SLOWLY"]), time.monotonic() + 60
    (folder / f"loading.{os.environ['SLURM_ARRAY_TASK_ID']}").touch()
    while not (folder / "loaded").exists() and time.monotonic() < deadline:
        time.sleep(0.1)

def run_job(config, run_dir, identity, ranks=None):
    run_id, attempt, command = identity.run_id, identity.attempt, identity.command
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
                time.sleep(0.05 if fate == "ends" or (fate == "lost" and attempt) else 1.0)
                stop.check()
            except Preempted as asked:
                kept.write_text(str(step))
                asked.reason, asked.progressed = str(asked), step > first
                append_row(run_dir, {**row, "status": "preempted", "error": asked.reason}, attempt)
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
