"""The README's main job as it is, with nothing replaced: a sweep of real steps, then its capacity table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longstraw.units import format_bytes

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["context=320", "response_length=24", "chunk=128", "prompt_grad=exact", "model.num_hidden_layers=4"]


def command(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    environment.pop("SLURM_JOB_ID", None)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_sweep_and_its_table(tmp_path):
    done = command(tmp_path, "longstraw.run", "-m", "model=qwen3_6_tiny", "hardware=cpu", "group_size=2,3", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/longstraw/*/*/records.jsonl"))]
    assert [(row["status"], row["group_size"], row["mode"]) for row in rows] == [("ok", 2, "run"), ("ok", 3, "run")]
    assert all(row["recompute_difference"] == 0.0 < row["grad_norm"] for row in rows)
    assert len(list(tmp_path.glob("runs/**/run-*.wandb"))) == 2
    table = command(tmp_path, "analysis.capacity", "runs")
    assert table.returncode == 0, table.stderr
    assert [line.count("| qwen3_6_tiny ") for line in table.stdout.splitlines()[2:]] == [0, 0, 1, 1]
    for row in rows:
        assert format_bytes(row["peak_allocated_bytes"]) in table.stdout
