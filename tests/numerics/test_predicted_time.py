"""Predicted seconds of simulated steps: extrapolated as evaluated in full, and changed by what takes longer."""

from dataclasses import replace

import pytest

from longstraw.config import RatesConfig, SimulationConfig, from_dict, load_model_config, to_dict
from longstraw.memory.fit import count
from longstraw.models import build_model
from longstraw.ops.attention import fused
from longstraw.parallel import comm_meter
from longstraw.parallel.collectives import Group
from longstraw.simulation.sampled_model import SampledBlock
from longstraw.simulation.simulate import simulate
from longstraw.timing.estimate import predicted_seconds

RATES = dict.fromkeys(vars(RatesConfig()), 1.0) | {"operation_us": 1e-3, "memory": 100.0, "links": 1e3}
CHUNK, RESPONSE = 64, 40


def job(model="llama_tiny", layers=2, ranks=2, rates=RATES, backend="cuda", **changes):
    values = {
        "model": to_dict(load_model_config(model, dtype="bfloat16", num_hidden_layers=layers)),
        "hardware": {"name": "test", "backend": backend, "gpus_per_node": ranks, "rates": dict(rates)},
        "data": {"name": "needle", "ragged": False},
        "context": 5 * CHUNK - 23 + RESPONSE,  # the last chunk is shorter
        "group_size": 2,
        "response_length": RESPONSE,
        "chunk": CHUNK,
        "prompt_grad": "detached",
        **changes,
    }
    return from_dict(values)


def predicted(config, every=False):
    (row,) = simulate(replace(config, simulation=SimulationConfig(every=every)))
    return row


@pytest.fixture(scope="module")
def plain():
    return predicted(job())


def links(row, verb):
    return row["predicted_bound_by_verb"][verb]["links"]


@pytest.mark.parametrize(("backend", "operation_us"), [("cuda", 1e-3), ("cpu", 44.0)])
def test_extrapolation_agrees_with_a_full_evaluation(backend, operation_us):
    """Within 1 %: seconds by verb and resource. On a processor all resources add up, so each is seen; on a GPU the
    device binds here."""
    config = job(
        layers=7, group_size=4, prompt_grad="exact", backend=backend, rates=RATES | {"operation_us": operation_us}
    )
    sampled, full = predicted(config), predicted(config, every=True)
    assert set(full["predicted_seconds_by_verb"]) == {"prefill", "replay", "prompt_backward", "optimizer"}
    assert sampled["predicted_seconds_by_verb"] == pytest.approx(full["predicted_seconds_by_verb"], rel=0.01)
    assert sampled["rank_flops_by_verb"] == pytest.approx(full["rank_flops_by_verb"], rel=0.001)
    for verb, bound in full["predicted_bound_by_verb"].items():
        assert sampled["predicted_bound_by_verb"][verb] == pytest.approx(bound, rel=0.01)


def differing_peaks(model):
    """Return the verbs whose peak differs by over 0.1 % where blocks are left out, with attention kept."""
    config = job(model, layers=7, prompt_grad="exact", state={"keep_attention": True})
    sampled, full = (predicted(config, every)["peak_by_verb"] for every in (False, True))
    return [verb for verb in ("replay", "prompt_backward") if sampled[verb] != pytest.approx(full[verb], rel=1e-3)]


@pytest.mark.parametrize("model", ["llama_tiny", "glm_5_2_tiny"])
def test_blocks_that_are_left_out_keep_attention(model):
    assert differing_peaks(model) == []


def test_peaks_differ_where_they_keep_none(monkeypatch):
    monkeypatch.setattr(SampledBlock, "_keep", lambda *_: None)
    assert "prompt_backward" in differing_peaks("llama_tiny")


@pytest.mark.parametrize("prompt_grad", ["detached", "exact"])
def test_a_plan_agrees_with_a_simulation(prompt_grad, monkeypatch, tmp_path):
    """Within 5 %: what is predicted from two counted steps, twice as long, and a step that is simulated.

    Of this model some operations are bound by their bytes on few rows and by their arithmetic on many.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = job(prompt_grad=prompt_grad, group_size=3)
    config = replace(config, context=20 * CHUNK + RESPONSE)  # the last chunk lacks one position
    assert predicted_seconds(config) is None
    count([config], line=True)
    simulated = predicted(config)["predicted_seconds_by_verb"]
    del simulated["optimizer"]
    assert predicted_seconds(config) == pytest.approx(simulated, rel=0.05)


def test_flops_are_those_of_the_formula():
    """On one rank the prefill's operations have the FLOPs that the model says."""
    config = job("qwen3_6_tiny", layers=4, ranks=1)
    model = build_model(config.model, device="meta")
    said = model.flops(0, config.prompt_positions - 1, state_only=True)
    assert predicted(config)["rank_flops_by_verb"]["prefill"] == said


def test_a_second_attention_forward_takes_longer(plain, monkeypatch):
    forward = fused.part_forward

    def twice(*arguments, **keywords):
        forward(*arguments, **keywords)
        return forward(*arguments, **keywords)

    monkeypatch.setattr(fused, "part_forward", twice)
    row = predicted(job())
    before, after = (x["predicted_bound_by_verb"]["prefill"]["attention"] for x in (plain, row))
    assert after == pytest.approx(2 * before, rel=0.01)
    assert row["predicted_seconds_by_verb"]["prefill"] > plain["predicted_seconds_by_verb"]["prefill"] + 0.9 * before


def test_a_doubled_gather_takes_longer(plain, monkeypatch):
    gather = Group.all_gather

    def twice(*arguments):
        gather(*arguments)
        return gather(*arguments)

    monkeypatch.setattr(Group, "all_gather", twice)
    assert links(predicted(job()), "prefill") > 1.2 * links(plain, "prefill") > 0


def test_parameters_that_are_waited_for_take_longer(plain, monkeypatch):
    """Without the overlap of FSDP's collectives, their time is added."""
    monkeypatch.setattr("longstraw.timing.meter.UNLABELLED", "nothing has this label")
    row = predicted(job())
    for verb in ("prefill", "replay"):
        assert links(row, verb) > 1.2 * links(plain, verb)
        assert row["predicted_seconds_by_verb"][verb] > plain["predicted_seconds_by_verb"][verb]


def test_hardware_without_rates_has_no_prediction():
    assert "predicted_seconds_by_verb" not in predicted(job(rates={}))


def test_collectives_by_fsdp_alone_have_no_label():
    """What the meter takes for FSDP's is unlabelled: the context ops label all of theirs."""
    assert set(comm_meter.BY_FSDP) == {"all_gather", "reduce_scatter"}
