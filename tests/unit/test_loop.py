"""The loop: records of real steps of the tiny model, in this process."""

import json
import math

import pytest
import torch

from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.memory.fit import predicted
from longstraw.models import build_model, load_model
from longstraw.tracking.recorder import RunIdentity
from longstraw.tracking.schema import KEYS, numbers
from longstraw.training.loop import run_job
from longstraw.training.optimizer import Optimizer

SMALL = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48}


def job(**changes):
    values = {
        "model": to_dict(load_model_config("qwen3_6_tiny", **SMALL)),
        "hardware": {"name": "cpu", "backend": "cpu"},
        "data": {"name": "needle"},
        "tracking": {"mode": "disabled"},
        "context": 320,
        "response_length": 24,
        "chunk": 128,
        "optimizer": {"lr": 1e-3},
    }
    for key, value in changes.items():
        if key == "model":
            values[key] = value
            continue
        values[key] = {**values[key], **value} if isinstance(value, dict) and key in values else value
    return from_dict(values)


def rows(folder):
    return [numbers(json.loads(line)) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("prompt_grad", ["detached", "exact"])
def test_a_job_records_every_step(tmp_path, prompt_grad):
    run_job(job(prompt_grad=prompt_grad, steps=2, group_size=3), tmp_path, RunIdentity("x"))
    first, second = rows(tmp_path)
    assert list(first) == list(KEYS)
    assert (first["step"], second["step"], first["status"]) == (0, 1, "ok")
    assert first["prefilled_positions"] == first["prompt_positions"] - 1 == 320 - 24 - 1
    assert first["recomputed_positions"] == (first["prefilled_positions"] if prompt_grad == "exact" else 0)
    assert first["recompute_difference"] == (0.0 if prompt_grad == "exact" else None)
    assert 24 < first["replayed_positions"] <= 3 * 24
    assert sum(first["peak_bytes_by_kind"].values()) == first["peak_allocated_bytes"]
    assert max(first["peak_by_verb"].values()) == first["peak_allocated_bytes"]
    state = first["prefilled_positions"] * 2 * 2 * 16 * 4  # one full layer: key and value of two heads, 16 wide, fp32
    assert first["retained_bytes_by_kind"]["key"] + first["retained_bytes_by_kind"]["value"] == state
    gradient = -(-state // 1024) * 1024
    assert (first["state_gradient_bytes"] >= gradient) == (prompt_grad == "exact")
    assert first["gradient_bytes"] == first["parameter_bytes"]
    assert first["grad_norm"] > 0 == first["logprob_drift"]
    assert second["entropy"] != first["entropy"]  # the step changed the model


def test_drift_is_zero_on_a_fresh_state_and_not_on_a_stale_one(tmp_path):
    config = job(steps=3, refresh_every=2, algorithm={"old_logprobs": "score"}, optimizer={"lr": 1e-2})
    run_job(config, tmp_path, RunIdentity("x"))
    fresh, stale, again = rows(tmp_path)
    assert [row["state_age"] for row in (fresh, stale, again)] == [0, 1, 0]
    assert fresh["logprob_drift"] == fresh["loss_drift"] == again["logprob_drift"] == 0.0
    assert stale["logprob_drift"] > 1e-3
    assert stale["loss_drift"] > 1e-3
    assert stale["prefilled_positions"] == 0 < fresh["prefilled_positions"]
    assert stale["scored_positions"] == 0 < fresh["scored_positions"]


def test_measuring_drift_changes_neither_peak_nor_parameters(tmp_path):
    for name, measured in (("with", True), ("without", False)):
        run_job(job(steps=2, refresh_every=2, measure_drift=measured), tmp_path / name, RunIdentity("x"))
    with_drift, without = rows(tmp_path / "with"), rows(tmp_path / "without")
    assert [row["peak_allocated_bytes"] for row in with_drift] == [row["peak_allocated_bytes"] for row in without]
    assert [row["grad_norm"] for row in with_drift] == [row["grad_norm"] for row in without]
    assert without[1]["logprob_drift"] is None
    assert with_drift[1]["logprob_drift"] > 0
    assert with_drift[1]["loss_drift"] is None  # on policy: the loss is the same whatever the prompt's state


def test_kl_is_zero_at_first_and_grows(tmp_path):
    run_job(job(steps=3, algorithm={"kl_coef": 0.1}, optimizer={"lr": 1e-2}), tmp_path, RunIdentity("x"))
    kl = [row["kl"] for row in rows(tmp_path)]
    assert kl[0] == 0.0
    assert kl[2] > 1e-4
    first = rows(tmp_path)[0]
    assert first["prefilled_positions"] == first["prompt_positions"] - 1
    assert first["scored_positions"] == first["prefilled_positions"] + first["replayed_positions"]


def test_an_adapter_trains_only_itself(tmp_path):
    pytest.importorskip("peft")
    run_job(job(adapter={"name": "lora", "rank": 2}, prompt_grad="exact"), tmp_path, RunIdentity("x"))
    row = rows(tmp_path)[0]
    assert row["frozen"] == ["base"]
    assert row["trainable_parameters"] < row["parameters"] / 4
    assert row["gradient_bytes"] < row["parameter_bytes"] / 4
    assert row["grad_norm"] > 0


def test_what_was_trained_is_saved_where_asked_for(tmp_path):
    pytest.importorskip("peft")
    run_job(job(save=True), tmp_path / "full", RunIdentity("x"))
    run_job(job(save=True, adapter={"name": "lora", "rank": 2}), tmp_path / "lora", RunIdentity("x"))
    saved = load_model(tmp_path / "full" / "model")
    fresh = build_model(job().model, seed=0)
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), fresh.parameters(), strict=True))
    assert (tmp_path / "lora" / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "lora" / "model").exists()


def test_glms_indexer_is_recorded_as_frozen(tmp_path):
    run_job(job(model=to_dict(load_model_config("glm_5_2_tiny"))), tmp_path, RunIdentity("x"))
    row = rows(tmp_path)[0]
    assert row["frozen"] == ["indexer"]
    assert 0 < row["parameters"] - row["trainable_parameters"] < row["parameters"] / 2


def test_a_failing_step_leaves_its_record(tmp_path, monkeypatch):
    predicted(job())

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("longstraw.training.trainer.finish_step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        run_job(job(), tmp_path, RunIdentity("x"))
    (row,) = rows(tmp_path)
    assert (row["status"], row["step"]) == ("oom", 0)
    assert "no memory left" in row["error"]
    assert row["peak_verb"] == "prefill"
    assert row["model"] == "qwen3_6_tiny"
    assert row["predicted_peak_bytes"] > row["peak_allocated_bytes"]


def test_a_loss_that_is_not_finite_is_recorded_and_ends_the_job(tmp_path, monkeypatch):
    real = Optimizer.update

    def diverge(self, *arguments):
        norm = real(self, *arguments)
        self.parameters[0].data.fill_(math.nan)
        return norm

    monkeypatch.setattr(Optimizer, "update", diverge)
    with pytest.raises(ValueError, match="step 1: loss nan"):
        run_job(job(steps=3), tmp_path, RunIdentity("x"))
    first, second = rows(tmp_path)
    assert (first["status"], second["status"]) == ("ok", "error")
    assert math.isnan(second["loss"])
    assert "no step was taken" in second["error"]


def test_progress_is_there_for_others(tmp_path):
    run_job(job(), tmp_path, RunIdentity("x"))
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert set(progress) == {"step", "verb", "done", "total"}
