"""The simulation against runs: the same bytes in every verb, on one rank and on several, by every rank."""

from dataclasses import replace

import pytest
import torch
from counting import Counting, count

from longstraw.config import HardwareConfig, SimulationConfig, from_dict, load_model_config, to_dict
from longstraw.memory import fit
from longstraw.memory.estimate import counts
from longstraw.simulation.emulate import emulate
from longstraw.simulation.sampled_model import ends
from longstraw.simulation.simulate import simulate
from longstraw.simulation.single_rank import expert_token_counts
from longstraw.training.monitor import Progress

BLOCK = 512
BAR = 0.01  # of the peak, as for one process in test_estimate_count
APART = 8 * BLOCK  # numbers that a process makes once, such as the state of a generator

CUT = {"num_hidden_layers": 2, "full_attention_interval": 2}
CUT_GLM = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "index_skip_topk_offset": 2}
CUTS = {"qwen3_6_tiny": CUT, "qwen3_6_moe_tiny": CUT, "glm_5_2_tiny": CUT_GLM, "llama_tiny": {"num_hidden_layers": 2}}


def job(model, ranks=1, dp=1, **changes):
    values = {
        "model": to_dict(load_model_config(model, **CUTS[model])),
        "hardware": {"name": "cpu", "backend": "cpu", "ranks": ranks, "dp": dp},
        "data": {"name": "needle", "ragged": False},
        "tracking": {"mode": "disabled"},
        "context": 137,
        "group_size": 2,
        "response_length": 8,  # as many for each rank: what others send is stated, not told
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


@pytest.mark.parametrize(
    "model", ["qwen3_6_tiny", "qwen3_6_moe_tiny", pytest.param("glm_5_2_tiny", marks=pytest.mark.long), "llama_tiny"]
)
def test_one_rank_holds_what_is_simulated(model):
    config = job(model)
    assert_alike(count(config), simulated(config))


DRAWN = {"rollout": "sample", "group_size": 5, "sample_batch": 3}


@pytest.mark.parametrize("model", ["qwen3_6_tiny", "qwen3_6_moe_tiny", "glm_5_2_tiny", "llama_tiny"])
def test_drawing_holds_what_is_simulated(model):
    config = job(model, **DRAWN)
    counted = count(config)
    assert "sample" in counted[0]
    assert_alike(counted, simulated(config))
    together = replace(config, sample_batch=None, response_length=64, context=193)
    assert simulated(together)[0]["sample"] > simulated(replace(together, sample_batch=1))[0]["sample"] + APART


@pytest.mark.parametrize(
    ("model", "world", "changes"),
    [
        pytest.param(
            *("qwen3_6_tiny", 2, {"adapter": {"name": "lora", "rank": 4}, "state": {"device": "cpu"}}),
            marks=pytest.mark.long,
        ),
        ("glm_5_2_tiny", 2, {}),
        pytest.param("glm_5_2_tiny", 4, {}, marks=pytest.mark.long),
        pytest.param("qwen3_6_tiny", 4, {"dp": 2}, marks=pytest.mark.long),
        ("llama_tiny", 2, {}),
        ("qwen3_6_moe_tiny", 2, {}),
        ("qwen3_6_tiny", 2, DRAWN),
        pytest.param("glm_5_2_tiny", 4, DRAWN, marks=pytest.mark.long),
    ],
)
def test_every_rank_holds_what_is_simulated(ranks, model, world, changes):
    config = job(model, ranks=world, **changes)
    counted = ranks(world).run(Counting(config))
    rank = world - 1 if model == "glm_5_2_tiny" else 0
    assert_alike(counted[rank], simulated(config, rank))


def missed(counted, said):
    """Name what a prediction misses of a rank's count: the peak's verb, any verb's bytes, or a kind's at the peak."""
    verbs, kinds = counted
    verbs = {verb: size for verb, size in verbs.items() if verb != "other"}
    assert verbs.keys() == said.by_verb.keys()
    pairs = {verb: (said.by_verb[verb], size) for verb, size in verbs.items()}
    pairs |= {kind: (size, kinds[kind]) for kind, size in said.by_kind.items()}
    bar = BAR * max(verbs.values())
    far = [f"{name} {a} for {b}" for name, (a, b) in pairs.items() if abs(a - b) > bar]
    return far if verbs[said.verb] == max(verbs.values()) else [*far, f"at {said.verb}"]


@pytest.fixture
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(counts, "_counted", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("model", CUTS)
def test_every_rank_holds_what_is_predicted(ranks, model, nothing_is_known):
    config = job(model, ranks=2, context=265)  # shorter, the mixture holds as much in two verbs
    said = fit.predicted(config)
    for counted in ranks(2).run(Counting(config)):
        assert missed(counted, said) == []


def test_the_prediction_of_a_longer_prompt_is_another(ranks, nothing_is_known):
    config = job("llama_tiny", ranks=2)
    counted, _ = ranks(2).run(Counting(config))
    assert missed(counted, fit.predicted(replace(config, context=config.context + config.chunk)))


def test_the_comparison_sees_what_is_left_out():
    """A control: a prompt of one more chunk is no longer what is simulated."""
    config = job("glm_5_2_tiny", prompt_grad="detached")
    with pytest.raises(AssertionError):
        assert_alike(count(config), simulated(replace(config, context=config.context + 64)))


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("qwen3_6_tiny", 1),
        pytest.param("qwen3_6_tiny", 4, marks=pytest.mark.long),
        pytest.param("glm_5_2_tiny", 4, marks=pytest.mark.long),
    ],
)
def test_what_is_stepped_over_decides_no_peak(model, gpus):
    deep = {"qwen3_6_tiny": {"num_hidden_layers": 10}, "glm_5_2_tiny": {"num_hidden_layers": 13, "index_topk_freq": 2}}
    cut = {**(CUT if model == "qwen3_6_tiny" else CUT_GLM), **deep[model]}
    values = to_dict(job(model)) | {
        "model": to_dict(load_model_config(model, dtype="bfloat16", **cut)),
        "hardware": to_dict(HardwareConfig(name="gpus", gpus_per_node=gpus)),
        "context": 64 * 4 + 31 + 8,
        "group_size": 4,
    }
    stepped, every = (simulated(from_dict(values), every=every) for every in (False, True))
    assert_alike(every, stepped)


def test_blocks_are_stepped_over_between_the_first_and_last_of_their_kind():
    assert ends([*"aab", *"cccd" * 5]) == {*range(9), *range(17, 23)}


def test_a_rank_that_is_emulated_holds_what_is_simulated():
    config = job("glm_5_2_tiny", ranks=4, simulation={"rank": 3, "every": True})
    (row,) = emulate(config, Progress(None))
    assert_alike((row["peak_by_verb"], row["peak_bytes_by_kind"]), simulated(config, rank=3))
    assert row["seconds"] > 0


@pytest.mark.parametrize("imbalance", [0.0, 1.0, 1.7, 100.0])
def test_an_imbalance_is_stated_of_the_rank_that_is_played(imbalance):
    config = job("glm_5_2_tiny", ranks=4, simulation={"imbalance": imbalance, "rank": 2})
    experts, places = 8, torch.zeros(90, 2, dtype=torch.int64)
    counts = expert_token_counts(config)(places, experts)
    assert sum(counts) == places.numel()
    own = sum(counts[4:6])  # two of eight are on each of four ranks
    assert own == min(round(180 / 4 * imbalance), 180)
    assert max(counts[4:6]) - min(counts[4:6]) <= 1
