"""The simulation against runs: the same bytes in every verb, on one rank and on several, by every rank."""

from dataclasses import replace

import pytest
import torch
from counting import Counting, count

from longstraw.config import HardwareConfig, SimulationConfig, from_dict, load_model_config, to_dict
from longstraw.emulate import emulate
from longstraw.observe import Progress
from longstraw.played import stated_counts
from longstraw.simulate import simulate

BLOCK = 512
APART = 8 * BLOCK  # numbers that a process makes once, such as the state of a generator

CUT = {"num_hidden_layers": 2, "full_attention_interval": 2}
CUT_GLM = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "index_skip_topk_offset": 2}


def job(model, ranks=1, dp=1, **changes):
    cut = CUT if model == "qwen3_6_tiny" else CUT_GLM
    values = {
        "model": to_dict(load_model_config(model, **cut)),
        "hardware": {"name": "cpu", "backend": "cpu", "ranks": ranks, "dp": dp},
        "data": {"name": "needle", "ragged": False},
        "tracking": {"mode": "disabled"},
        "context": 214,
        "group_size": 2,
        "response_length": 21,
        "chunk": 64,
        "prompt_grad": "exact",
        "steps": 1,
        **changes,
    }
    return from_dict(values)


def simulated(config, rank=0, every=False):
    chosen = SimulationConfig(rank=rank, every=every, imbalance=config.simulation.imbalance)
    (row,) = simulate(replace(config, simulation=chosen))
    return row["peak_by_verb"], row["peak_bytes_by_kind"]


def assert_alike(counted, said):
    (verbs, kinds), (said_verbs, said_kinds) = counted, said
    assert verbs.keys() == said_verbs.keys()
    far = {verb: (verbs[verb], said_verbs[verb]) for verb in verbs if abs(verbs[verb] - said_verbs[verb]) > APART}
    assert not far
    far = {kind: (kinds[kind], said_kinds[kind]) for kind in kinds if abs(kinds[kind] - said_kinds[kind]) > APART}
    assert not far


@pytest.mark.parametrize("model", ["qwen3_6_tiny", "glm_5_2_tiny"])
def test_one_rank_holds_what_is_simulated(model):
    config = job(model)
    assert_alike(count(config), simulated(config))


@pytest.mark.parametrize(
    ("model", "world", "changes"),
    [
        ("qwen3_6_tiny", 2, {"adapter": {"name": "lora", "rank": 4}, "state": {"device": "cpu"}}),
        ("qwen3_6_tiny", 4, {"dp": 2}),
        ("glm_5_2_tiny", 4, {}),
    ],
)
def test_every_rank_holds_what_is_simulated(ranks, model, world, changes):
    config = job(model, ranks=world, **changes)
    counted = ranks(world).run(Counting(config))
    rank = world - 1 if model == "glm_5_2_tiny" else 0
    assert_alike(counted[rank], simulated(config, rank))


def test_the_comparison_sees_what_is_left_out():
    """A control: a prompt of one more chunk is no longer what is simulated."""
    config = job("glm_5_2_tiny", prompt_grad="detached")
    with pytest.raises(AssertionError):
        assert_alike(count(config), simulated(replace(config, context=config.context + 64)))


@pytest.mark.parametrize(("model", "group_size"), [("qwen3_6_tiny", 5), ("glm_5_2_tiny", 4)])
def test_what_is_stepped_over_decides_no_peak(model, group_size):
    deep = {"num_hidden_layers": 16} if model == "qwen3_6_tiny" else {"num_hidden_layers": 14}
    values = to_dict(job(model)) | {
        "model": to_dict(load_model_config(model, dtype="bfloat16", **deep)),
        "hardware": to_dict(HardwareConfig(name="gpus", nodes=1, gpus_per_node=4)),
        "context": 470,
        "group_size": group_size,
    }
    config = from_dict(values)
    for grad in ("detached", "exact"):
        stepped, every = (simulated(replace(config, prompt_grad=grad), every=every) for every in (False, True))
        assert_alike(every, stepped)


@pytest.mark.parametrize("model", ["qwen3_6_tiny", "glm_5_2_tiny"])
def test_a_rank_that_is_emulated_holds_what_is_simulated(model):
    config = job(model, ranks=4, simulation={"rank": 3}, steps=1)
    (row,) = emulate(config, Progress(None))
    assert_alike((row["peak_by_verb"], row["peak_bytes_by_kind"]), simulated(config, rank=3))
    assert row["seconds"] > 0


@pytest.mark.parametrize("imbalance", [0.0, 1.0, 1.7, 100.0])
def test_an_imbalance_is_stated_of_the_rank_that_is_played(imbalance):
    config = job("glm_5_2_tiny", ranks=4, simulation={"imbalance": imbalance, "rank": 2})
    experts, places = 8, torch.zeros(90, 2, dtype=torch.int64)
    counts = stated_counts(config)(places, experts)
    assert sum(counts) == places.numel()
    own = sum(counts[4:6])  # two of eight are on each of four ranks
    assert own == min(round(180 / 4 * imbalance), 180)
    assert max(counts[4:6]) - min(counts[4:6]) <= 1
