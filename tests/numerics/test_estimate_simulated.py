"""What is predicted of a step from counts of cut models, against the simulated step at its own length and whole."""

import functools
import json

import pytest

from longstraw.config import from_dict, option
from longstraw.memory import estimate
from longstraw.memory.estimate import KINDS, counts, cut, known, steps_to_count
from longstraw.ops import attention
from longstraw.simulation.sampled_model import SampledBlock
from longstraw.simulation.simulate import simulate

PEAK, VERB = 0.008, 0.016  # relative: half of what is claimed of the peak
EXACT_KINDS = ("parameters", "gradients", "optimizer", "retained", "state_gradient", "snapshots")
TILE = 64  # rows that attention reads at once here, so that short prompts are beyond
QWEN = {"num_hidden_layers": 12, "full_attention_interval": 3}
GLM = {"num_hidden_layers": 9, "first_k_dense_replace": 1, "index_skip_topk_offset": 2, "index_topk_freq": 2}
LENGTHS = {"context": 64 * 9 + 24, "response_length": 16, "chunk": 64, "group_size": 2}
CASES = {
    "qwen, adapters, exact": ("qwen3_6_tiny", QWEN, 2, {"adapter": {"name": "lora"}, "prompt_grad": "exact"}),
    "qwen, everything, narrow": (
        "qwen3_6_tiny",
        QWEN,
        2,
        {"prompt_grad": "exact", "prompt_grad_window": 64 * 4, "optimizer": {"gradient_dtype": "model"}, "steps": 2},
    ),
    "qwen, one GPU, rows on the host": (
        "qwen3_6_tiny",
        QWEN,
        1,
        {"prompt_grad": "exact", "state": {"device": "cpu"}},
    ),
    "qwen, optimizer on the host": ("qwen3_6_tiny", QWEN, 2, {"optimizer": {"device": "cpu"}}),
    "qwen, a reference": ("qwen3_6_tiny", QWEN, 2, {"algorithm": {"kl_coef": 0.1, "old_logprobs": "score"}}),
    "qwen, branches together": ("qwen3_6_tiny", QWEN, 1, {"replay_tokens": 48, "group_size": 7}),
    "glm, exact": ("glm_5_2_tiny", GLM, 2, {"adapter": {"name": "lora"}, "prompt_grad": "exact"}),
}


def configured(case):
    name, layers, ranks, keys = CASES[case]
    model = option("model", name) | layers | {"dtype": "bfloat16", "layer_types": None}
    model = {key: value for key, value in model.items() if value is not None}
    hardware = {"name": "gpus", "backend": "cuda", "gpus_per_node": ranks}
    return from_dict({"model": model, "hardware": hardware, "data": {"name": "needle"}, **LENGTHS, **keys})


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "ROW_TILE", TILE)
    monkeypatch.setattr(estimate, "ROW_TILE", TILE)
    monkeypatch.setattr(counts, "_counted", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@functools.cache
def simulated(case):
    """Return the record of the largest simulated step."""
    *_, row = simulate(configured(case))
    return json.loads(json.dumps({key: row[key] for key in ("peak_by_verb", "peak_bytes_by_kind", "host_bytes")}))


def differences(case):
    """Name what the prediction misses of the simulated step."""
    config, row = configured(case), simulated(case)
    steps = steps_to_count(config)
    assert len(steps) >= 2
    assert max(step.context for step in steps) < config.context
    cut.count_steps(steps)
    said = known(config)
    verbs = {verb: size for verb, size in row["peak_by_verb"].items() if verb != "other"}
    bars = {verb: PEAK if size == max(verbs.values()) else VERB for verb, size in verbs.items()}
    missed = [
        f"{verb} {said.by_verb[verb]} for {size}"
        for verb, size in verbs.items()
        if abs(said.by_verb[verb] / size - 1) > bars[verb]
    ]
    if abs(said.host - row["host_bytes"]) > 0.002 * row["host_bytes"]:
        missed.append(f"host {said.host} for {row['host_bytes']}")
    kinds = row["peak_bytes_by_kind"]
    far = [k for k in EXACT_KINDS if abs(said.by_kind[k] - kinds[k]) > 0.005 * kinds[k]]
    return missed + [f"{k} {said.by_kind[k]} for {kinds[k]}" for k in far]


@pytest.mark.parametrize("case", CASES)
def test_the_simulated_step_is_predicted(case):
    assert differences(case) == []
    assert set(simulated(case)["peak_bytes_by_kind"]) == set(KINDS)


def nothing(*_, **__):
    return ()


def only_ends(kinds):
    return {0, *(kinds.index(kind) for kind in kinds)}


TERMS = {
    "parameters of blocks left out": (cut._Cut, "make_parameters", nothing),
    "their optimizer state": (cut._Cut, "make_optimizer_state", nothing),
    "their gradients": (SampledBlock, "_gradients", nothing),
    "blocks that decide": (cut, "decisive", only_ends),
    "the line": (estimate, "_weights", lambda lengths, counted: [1.0, *[0.0] * (len(counted) - 1)]),
}


@pytest.mark.parametrize("term", TERMS)
def test_without_a_term_it_is_not(monkeypatch, term):
    case = "qwen, everything, narrow"
    simulated(case)
    monkeypatch.setattr(*TERMS[term])
    assert differences(case)


def test_the_tile_is_that_of_attention(monkeypatch):
    monkeypatch.undo()
    assert estimate.ROW_TILE == attention.ROW_TILE
