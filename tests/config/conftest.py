"""Replace the training loop in child processes by one that fails on demand, to test how failed jobs are handled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Let no model be fetched, whatever the user's cache holds."""
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path / "cache"))


FINDER = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "longstraw.training.loop":
            return importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), "loop.py"))
        if name in ("torch", "wandb"):
            raise ImportError(name + " is blocked: the command line must not need it")

sys.meta_path.insert(0, Finder())
"""

LOOP = """
import json, os, signal, time
from longstraw.tracking.run_folder import write_json
from longstraw.tracking.recorder import append_row

def run_job(config, run_dir, identity):
    run_id, attempt, command = identity.run_id, identity.attempt, identity.command
    (run_dir / "pid").write_text(str(os.getpid()))
    (run_dir / "began").write_text(str(time.time()))
    fate = config.claim or ""
    for step in range(config.steps):
        write_json(run_dir / "progress.json", {"step": step, "verb": "prefill", "done": 1, "total": 2})
        if fate == "raises":
            raise RuntimeError("the loop broke")
        if fate == "data":
            raise ValueError("prompts.jsonl:3: reward is NaN")
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "hangs":
            time.sleep(300)
        row = {"run_id": run_id, "command": command, "status": "ok", "step": step, "loss": 0.25, "seconds": 2.0}
        append_row(run_dir, {**row, "peak_allocated_bytes": 10**6 + step, "context": config.context}, attempt)
    if fate == "too_large":
        append_row(run_dir, {"run_id": run_id, "status": "too_large", "error": "needs 9 GB of 8"}, attempt)
    (run_dir / "ended").write_text(str(time.time()))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Work in an empty folder; children find the stand-in, and no torch. Returns the folder."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(FINDER)
    (hook / "loop.py").write_text(LOOP)
    (tmp_path / "work").mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("git", "sh"):  # no sbatch, whatever this machine has
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), str(ROOT)]))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def longstraw(stand_in):
    """Return a function that runs the command line in ``stand_in`` on the tiny model."""

    def run(*arguments, tiny=True):
        start = [sys.executable, "-m", "longstraw.run"]
        given = ["model=qwen3_6_tiny", "hardware=cpu", "context=1Ki"] if tiny else []
        return subprocess.run([*start, *given, *arguments], capture_output=True, text=True, timeout=120)

    return run


def records(folder):
    """Return the records in a job's folder."""
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
