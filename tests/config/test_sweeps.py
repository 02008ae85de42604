"""The paper's sweeps are the paper's cases, and a sweep's jobs are what its table says."""

import csv
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from longstraw.config import conf_dir, from_composed, option
from longstraw.memory.fit import predicted
from longstraw.run import register
from longstraw.units import GB

ROOT = Path(__file__).resolve().parents[2]
RECEIPTS = {row["receipt"]: row for row in csv.DictReader((ROOT / "analysis" / "paper.csv").open())}


def jobs(name):
    """Return the configuration of every job of a sweep."""
    register()
    params = option("sweep", name)["hydra"]["sweeper"]["params"]
    values = [[f"{key}={value}" for value in str(listed).split(",")] for key, listed in params.items()]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return [from_composed(compose("config", [f"sweep={name}", *chosen])) for chosen in product(*values)]


@pytest.mark.parametrize(
    ("sweep", "receipts"),
    [
        ("paper_group_size", ["qwen_2m_g2", "qwen_2m_g8"]),
        ("paper_stress", ["qwen_4m_reuse"]),
        ("glm_full", ["glm_2m"]),
    ],
)
def test_the_papers_cases_are_swept_as_it_reports_them(sweep, receipts):
    detached = [config for config in jobs(sweep) if config.prompt_grad == "detached"]
    assert len(detached) == len(receipts)
    for config, receipt in zip(detached, map(RECEIPTS.get, receipts), strict=True):
        assert config.model.name == receipt["model"]
        assert config.hardware.world_size == int(receipt["gpus"])
        assert config.group_size == int(receipt["group_size"])
        assert config.refresh_every == config.steps == int(receipt["refresh_every"])
        of_prompt = receipt["prompt_positions"] == str(config.prompt_positions)
        assert of_prompt or config.context == int(receipt["context"])
        assert config.response_length == int(receipt["response_positions"] or 8192)
        assert config.adapter.name == "lora"
        assert config.state.device is None


def test_the_exact_sweep_differs_from_the_papers_by_its_gradient_alone():
    for ours, paper in zip(jobs("ours_exact"), jobs("paper_group_size"), strict=True):
        changed = {key for key in vars(ours) if getattr(ours, key) != getattr(paper, key)}
        assert changed == {"prompt_grad", "claim"}
        assert ours.prompt_grad == "exact"


def test_glm_runs_in_full_and_in_both_modes():
    detached, exact = jobs("glm_full")
    assert (detached.prompt_grad, exact.prompt_grad) == ("detached", "exact")
    assert detached.model.num_hidden_layers == 78


@pytest.mark.long
def test_the_limits_are_within_a_hundredth_of_what_the_budget_finds_room_for():
    reach = {("detached", None): 10609, ("exact", None): 3296, ("exact", "bfloat16"): 4837}
    by_case = {(config.prompt_grad, config.context): config for config in jobs("ours_limit")}
    for (grad, dtype), limit in reach.items():
        assert dtype or (grad, limit * 1024) in by_case
        base = by_case[grad, 3296 * 1024]
        room = round((base.hardware.memory_gb - base.hardware.reserve_gb) * GB)

        def peak(context, base=base, dtype=dtype):
            return predicted(replace(base, context=context, state=replace(base.state, gradient_dtype=dtype))).peak

        assert peak(round(0.99 * limit) * 1024) <= room < peak(round(1.01 * limit) * 1024)
