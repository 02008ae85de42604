"""Every number of the configuration has a range: infinity, NaN, what is below and what is far beyond are refused."""

import math
from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_type_hints

import pytest

from longstraw.config import ARCHITECTURES, DATA, GROUPS, ConfigError, RunConfig, from_dict, load_model_config, to_dict
from longstraw.config.architectures.base import RopeScaling
from longstraw.config.checks import SIZE, range_of
from longstraw.config.model import typed

SCHEMAS = {"": RunConfig, **GROUPS, **{f"model:{n}": c for n, c in ARCHITECTURES.items()}}
SCHEMAS |= {f"data:{n}": c for n, c in DATA.items()} | {"model.rope_scaling": RopeScaling}
SCHEMAS = {where: schema for where, schema in SCHEMAS.items() if where not in ("model", "data")}


def numeric(hint):
    parts = {hint, *get_args(hint)}
    return not is_dataclass(hint) and bool(parts & {int, float}) and "dict" not in str(hint)


NUMBERS = [
    (where, f.name)
    for where, schema in SCHEMAS.items()
    for f in fields(schema)
    if numeric(get_type_hints(schema)[f.name]) or "range" in f.metadata
]


def declared(where, name):
    (found,) = (f for f in fields(SCHEMAS[where]) if f.name == name)
    return found


BASES = {
    "qwen3_6": "qwen3_6_tiny",
    "qwen3_6_moe": "qwen3_6_moe_tiny",
    "glm_5_2": "glm_5_2_tiny",
    "llama": "llama_tiny",
}
RUN = from_dict(
    {
        "model": to_dict(load_model_config("qwen3_6_tiny")),
        "hardware": {"name": "cpu", "backend": "cpu"},
        "data": {"name": "needle"},
        "context": 1024,
    }
)
PARTS = {where: to_dict(load_model_config(BASES[where[6:]])) for where in SCHEMAS if where.startswith("model:")}
PARTS |= {"data:jsonl": {"path": "x"}, "data:rollouts": {"path": "x"}, "hardware": {"name": "cpu"}}
PARTS |= {where: {"name": where[5:]} for where in SCHEMAS if where[5:] in ("lookup", "chain", "count", "multi")}


def build(where, name, value):
    """Return the part of a run, or the run, whose one number is ``value``."""
    if not where:
        return replace(RUN, **{name: value})
    schema = SCHEMAS[where]
    values = PARTS.get(where, {})
    default = [0.0, 1.0] if name == "depth" else [0.9, 0.99] if name == "betas" else None
    return typed(schema, {**values, name: value if default is None else [value, default[1]]}, where)


def test_the_walk_finds_the_numbers():
    assert len(NUMBERS) > 80
    for known in (("optimizer", "lr"), ("", "context"), ("model:glm_5_2", "index_topk"), ("data:needle", "depth")):
        assert known in NUMBERS


@pytest.mark.parametrize(("where", "name"), NUMBERS)
def test_every_number_has_a_finite_range(where, name):
    valid = range_of(declared(where, name), SIZE if where.startswith("model:") else None)
    assert valid is not None, f"give {where}.{name} a range: number(default, least, most)"
    assert math.isfinite(valid.least)
    assert math.isfinite(valid.most)


@pytest.mark.parametrize(("where", "name"), NUMBERS)
def test_what_is_in_no_range_is_refused(where, name):
    for value in (math.inf, -math.inf, math.nan, -1, -1e-30, 1e31, 10**30):
        with pytest.raises(ConfigError, match=name):
            build(where, name, value)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("optimizer", "lr", 1e30),
        ("optimizer", "eps", 0),
        ("", "seed", 10**22),
        ("", "group_size", 10**9),
        ("", "context", "99999999999999999999"),
        ("hardware", "reserve_gb", 1e9),
        ("model:qwen3_6", "initializer_range", 1e6),
    ],
)
def test_what_trials_found(where, name, value):
    with pytest.raises(ConfigError, match=name):
        build(where, name, value)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("optimizer", "lr", 0),
        ("optimizer", "max_grad_norm", None),
        ("", "seed", 2**63 - 1),
        ("", "group_size", 2**16),
        ("", "context", "1Gi"),
        ("", "prompt_grad_window", 0),
        ("hardware", "reserve_gb", 0),
        ("model:qwen3_6", "initializer_range", 0),
        ("model:glm_5_2", "first_k_dense_replace", 0),
        ("simulation", "imbalance", 0),
    ],
)
def test_the_ends_that_have_a_use_are_accepted(where, name, value):
    build(where, name, value)
