"""The real training loop on a real SLURM: requeued, it gives bitwise what an undisturbed job gives."""

import threading

import pytest

from longstraw import launch
from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.table import read_json, read_steps

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 6
SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32, "intermediate_size": 48}


def job(**changes):
    values = {
        "model": to_dict(load_model_config("qwen3_6_tiny", **SMALL)),
        "hardware": {"name": "site", "backend": "cpu", "partition": "h20", "time_min": 10, "setup": ["export A=1"]},
        "data": {"name": "needle"},
        "tracking": {"mode": "disabled"},
        "algorithm": {"old_logprobs": "score", "kl_coef": 0.1},  # a loss that is not 0 on policy
        "optimizer": {"lr": 1e-3},
        "context": 1600,
        "response_length": 24,
        "chunk": 64,
        "steps": STEPS,
        "save": True,
    }
    return from_dict({**values, **changes})


def test_a_requeued_job_ends_bitwise_where_an_undisturbed_one_does(slurm, wait_for, watchdog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drafts = [launch.Draft(num, [], tmp_path / str(num), job()) for num in range(2)]
    jobs = launch.prepare(drafts, command="longstraw -m", sweep="s")
    errors = []

    def disturb():
        try:
            wait_for("a step is done", lambda: len(read_steps(tmp_path / "1")) >= 1, 120)
            entry = next(entry for entry in read_json(tmp_path / "sweep.json")["jobs"] if entry["num"] == 1)
            slurm("scontrol", "requeue", entry["job_id"])
        except BaseException as error:
            errors.append(error)

    helper = threading.Thread(target=disturb, daemon=True)
    helper.start()
    assert launch.launch(jobs, tmp_path, alone=False) == 0
    helper.join(60)
    assert errors == []
    plain, requeued = (read_steps(tmp_path / str(num)) for num in range(2))
    assert [row["step"] for row in requeued] == [row["step"] for row in plain] == list(range(STEPS))
    assert {row["attempt"] for row in plain} == {0}
    assert {row["attempt"] for row in requeued} == {0, 1}
    assert not any(row["repeated"] for row in requeued)  # it was asked to end, and stopped where it stood
    for key in ("loss", "grad_norm", "entropy", "kl"):
        assert [row[key] for row in plain] == [row[key] for row in requeued]
    assert len({row["grad_norm"] for row in plain}) == STEPS  # they can differ
    saved = [(tmp_path / str(num) / "model" / "model.safetensors").read_bytes() for num in range(2)]
    assert saved[0] == saved[1]
