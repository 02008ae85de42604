"""What is predicted against a run: a job's own steps on a processor, their bytes by kind and verb."""

import functools
import json

import pytest

from longstraw.config import from_dict, option
from longstraw.memory import fit
from longstraw.memory.estimate import counts, cut, known
from longstraw.memory.meter import MemoryMeter
from longstraw.simulation.single_rank import RandomTask
from longstraw.training.loop import build_trainer
from longstraw.training.monitor import Monitor, Progress

BAR = 0.01  # relative
CASES = {
    "exact, odd lengths, scored": {
        "context": 601,
        "response_length": 77,
        "group_size": 3,
        "prompt_grad": "exact",
        "algorithm": {"old_logprobs": "score"},
    },
    "a window": {"context": 700, "prompt_grad": "exact", "prompt_grad_window": 300},
    "a prompt that two steps share": {"steps": 2, "refresh_every": 2, "measure_drift": False},
    "a reference": {"prompt_grad": "exact", "algorithm": {"kl_coef": 0.1}},
    "bfloat16": {"prompt_grad": "exact", "steps": 2, "model": {"dtype": "bfloat16"}},
    "an optimizer in host memory": {"steps": 2, "optimizer": {"device": "cpu"}},
    "adapters": {"prompt_grad": "exact", "adapter": {"name": "lora"}},
    "a vocabulary wider than all else": {"steps": 2, "model": {"dtype": "bfloat16", "vocab_size": 8192}},
    "drawn, two at a time": {"prompt_grad": "exact", "rollout": "sample", "group_size": 5, "sample_batch": 2},
    "drawn together, from some tokens": {
        "rollout": "sample",
        "group_size": 4,
        "top_p": 0.9,
        "temperature": 0.7,
        "algorithm": {"old_logprobs": "none"},
    },
    "glm": {"prompt_grad": "exact", "model": {"name": "glm_5_2_tiny"}},
}


def configured(**keys):
    """Return a run of a tiny model; all responses as long as the longest."""
    model = keys.pop("model", {})
    model = option("model", model.get("name", "qwen3_6_tiny")) | model
    base = {"hardware": option("hardware", "cpu"), "data": {"name": "needle", "ragged": False}}
    sizes = {"context": 420, "response_length": 64, "group_size": 2, "chunk": 128, "prompt_grad": "detached"}
    return from_dict(base | sizes | {"model": model} | keys)


@functools.cache
def counted(keys, folder):
    """Return the records of a job's steps."""
    config = configured(**json.loads(keys))
    with MemoryMeter() as meter:
        task = RandomTask(config) if config.rollout == "sample" else None
        trainer = build_trainer(config, Monitor(meter, Progress(folder / "progress.json")), task=task)
        return config, [trainer.step(step) for step in range(config.steps)]


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counted")
    return lambda keys: counted(json.dumps(keys, sort_keys=True), folder)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(counts, "_counted", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def differences(config, row):
    """Name what the prediction misses of one step's count."""
    fit.count([config])
    said = known(
        config,
        prompt_positions=row["prompt_positions"],
        response_positions=row["response_positions"],
        optimizer_held=row["step"] > 0,
        prefilled=row["prefilled_positions"] > 0,
    )
    verbs = {verb: size for verb, size in row["peak_by_verb"].items() if verb != "other"}
    assert verbs.keys() == said.by_verb.keys()
    pairs = {verb: (said.by_verb[verb], size) for verb, size in verbs.items()}
    pairs |= {"host": (said.host, row["host_bytes"])}
    pairs |= {kind: (size, row["peak_bytes_by_kind"][kind]) for kind, size in said.by_kind.items()}
    far = [f"{name} {a} for {b}" for name, (a, b) in pairs.items() if abs(a - b) > BAR * row["peak_allocated_bytes"]]
    return far if said.verb == row["peak_verb"] else [*far, f"at {said.verb}, not {row['peak_verb']}"]


@pytest.mark.parametrize("case", CASES)
def test_the_count_is_predicted(count, case):
    config, rows = count(CASES[case])
    assert [differences(config, row) for row in rows] == [[]] * config.steps


DEEP = CASES["bfloat16"] | {"model": {"dtype": "bfloat16", "num_hidden_layers": 16}}  # of 8 blocks none is left out


def test_a_deep_model_is_predicted_from_some_of_its_blocks(count):
    config, rows = count(DEEP)
    assert differences(config, rows[1]) == []


@pytest.mark.parametrize("name", ["make_parameters", "make_optimizer_state"])
def test_without_a_term_it_is_not(count, monkeypatch, name):
    config, rows = count(DEEP)
    monkeypatch.setattr(cut._Cut, name, lambda *_: None)
    assert differences(config, rows[1])


def test_another_run_is_not_predicted(count):
    config, rows = count(CASES["bfloat16"])
    other = configured(**CASES["bfloat16"] | {"context": 484})
    assert differences(config, rows[0]) == []
    assert differences(other, rows[0] | {"prompt_positions": other.prompt_positions})
