"""`conf/` composed by Hydra into typed configurations: defaults, checkpoints' own sizes, and what is refused."""

import json

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from longstraw.config import (
    ConfigError,
    JsonlConfig,
    NeedleConfig,
    RunConfig,
    available,
    conf_dir,
    from_composed,
    from_dict,
    load_model_config,
    option,
    to_dict,
)
from longstraw.config.overrides import FOLDERS, check
from longstraw.run import parse, register

OPTIONS = [(group, name) for group in FOLDERS if group != "sweep" for name in available(group) if name != "auto"]
NEEDS = {"jsonl": ["data.path=prompts.jsonl"], "rollouts": ["data.path=rollouts.jsonl"]}


def composed(*overrides):
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return from_composed(compose("config", list(overrides)))


def test_the_defaults_are_the_papers():
    config = composed()
    assert isinstance(config, RunConfig)
    assert (config.model.name, config.hardware.name, config.hardware.world_size) == ("qwen3_6_27b", "h20x8", 8)
    assert (config.context, config.response_length, config.chunk) == (2_100_000, 8192, 16_384)
    assert (config.adapter.name, config.data.name, config.tracking.mode) == ("lora", "needle", "auto")
    assert isinstance(config.data, NeedleConfig)


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes_to_typed_objects_and_back(group, name):
    config = composed(f"{group}={name}", *NEEDS.get(name, []))
    assert getattr(config, group).name == name
    frozen = json.loads(json.dumps(to_dict(config)))
    assert from_dict(frozen) == config
    assert type(from_dict(frozen).data) is type(config.data)


@pytest.mark.parametrize("name", available("model"))
def test_a_model_is_the_same_without_hydra(name):
    assert load_model_config(name) == composed(f"model={name}").model


@pytest.mark.parametrize("name", available("sweep"))
def test_every_sweep_sets_what_exists(name):
    content = option("sweep", name)
    params = content["hydra"]["sweeper"]["params"]
    assert content["hydra"]["mode"] == "MULTIRUN"
    check(parse([f"sweep={name}", *(f"{key}={value}" for key, value in params.items())]))
    first = [f"{key}={str(value).split(',')[0]}" for key, value in params.items()]
    assert composed(f"sweep={name}", *first).claim == name


def test_sizes_follow_the_model_unless_typed():
    tiny = composed("model=qwen3_6_tiny")
    assert (tiny.chunk, tiny.response_length) == (tiny.model.chunk, tiny.model.response_length)
    assert composed("model=qwen3_6_tiny", "chunk=256", "response_length=2Ki").chunk == 256


def test_the_algorithms_differ_where_they_should():
    grpo, dr_grpo, gspo = (composed(f"algorithm={name}").algorithm for name in ("grpo", "dr_grpo", "gspo"))
    assert grpo.scale_rewards == "group"
    assert (dr_grpo.scale_rewards, dr_grpo.normalize) == ("none", "constant")
    assert (gspo.importance, grpo.importance) == ("sequence", "token")
    dapo, cispo, rloo = (composed(f"algorithm={name}").algorithm for name in ("dapo", "cispo", "rloo"))
    assert (dapo.clip_low, dapo.clip_high, dapo.normalize) == (0.2, 0.28, "step")
    assert (cispo.loss, cispo.clip_low, cispo.clip_high) == ("cispo", 1.0, 4.0)
    assert (rloo.scale_rewards, rloo.baseline, rloo.importance) == ("none", "others", "product")
    assert composed("algorithm.scale_rewards=false").algorithm.scale_rewards == "none"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["group_size=1"], "group_size=1 must be at least 2; advantages compare"),
        (["context=100", "response_length=100"], "leaves no prompt"),
        (["chunk=100"], "no multiple of 64"),
        (["prompt_grad=exakt"], "did you mean exact"),
        (["prompt_grad=exact", "refresh_every=2"], "stale"),
        (["model.dtype=half"], "model.dtype='half' is not one of"),
        (["response_length=null"], "response_length has no value"),
        (["chunk=null"], "chunk has no value"),
        (["context=null"], "context has no value"),
        (["data.haystack=[[a]]"], "a list in a list"),
        (["tracking.tags=[[a]]"], "a list in a list"),
        (["optimizer.betas=[[0.9],[0.9]]"], "a list in a list|betas"),
        (["data=jsonl"], "data.path has no value"),
        (["response_length=${nowhere}"], "nowhere"),
        (["data.depth=[0.9,0.1]"], "two rising fractions"),
        (["model.checkpoint=/nowhere/at/all"], "not there"),
    ],
)
def test_wrong_values_say_why_in_one_line(overrides, reason):
    with pytest.raises((ConfigError, OSError), match=reason) as error:
        composed(*overrides)
    assert "\n" not in str(error.value)


def test_hydra_alone_would_take_a_typo():
    """The control of the check before Hydra: ``+typo`` is refused by the schema only where Hydra composes at all."""
    with pytest.raises((HydraException, ConfigError)):
        composed("+typo=1")


def test_from_dict_refuses_what_it_does_not_know():
    values = to_dict(composed("model=qwen3_6_tiny"))
    with pytest.raises(ConfigError, match="did you mean group_size"):
        from_dict({**values, "groupsize": 3})
    with pytest.raises(ConfigError, match="did you mean path"):
        from_dict({**values, "data": {"name": "jsonl", "pth": "x"}})
    with pytest.raises(ConfigError, match="without hardware"):
        from_dict({key: value for key, value in values.items() if key != "hardware"})


def test_from_dict_picks_the_classes():
    values = to_dict(composed("model=qwen3_6_tiny", "data=jsonl", "data.path=a"))
    config = from_dict(values)
    assert isinstance(config.data, JsonlConfig)
    assert type(config.model) is type(load_model_config("qwen3_6_tiny"))


def test_a_checkpoints_own_sizes_hold(tmp_path):
    text = {"model_type": "qwen3_5_text", "hidden_act": "silu", "rope_parameters": {"rope_theta": 1e6}}
    sizes = {key: value for key, value in to_dict(load_model_config("qwen3_6_tiny")).items() if isinstance(value, int)}
    (tmp_path / "config.json").write_text(json.dumps({**text, **sizes, "hidden_size": 96, "dtype": "bfloat16"}))
    config = composed("model=qwen3_6_tiny", f"model.checkpoint={tmp_path}", "model.dtype=float64", "chunk=128")
    assert (config.model.hidden_size, config.model.rope_theta) == (96, 1e6)
    assert (config.model.dtype, config.chunk, config.response_length) == ("float64", 128, 128)
    assert config.model.checkpoint == str(tmp_path)
    assert from_dict(to_dict(config)) == config
    cut = composed("model=qwen3_6_tiny", f"model.checkpoint={tmp_path}", "model.num_hidden_layers=2")
    assert (cut.model.num_hidden_layers, cut.model.hidden_size) == (2, 96)  # what is typed stands before both


def test_a_checkpoints_own_angles_hold_unless_typed(tmp_path):
    """Llama-3.2-1B's, loaded with model=llama_3_1_8b, whose file in conf says a factor of 8."""
    scaling = {"rope_type": "llama3", "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    scaling |= {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {key: value for key, value in to_dict(load_model_config("llama_3_1_8b")).items() if isinstance(value, int)}
    text = {"model_type": "llama", "rope_parameters": scaling, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | text))
    words = ["model=llama_3_1_8b", f"model.checkpoint={tmp_path}"]
    assert composed(*words).model.rope_scaling.factor == 32
    assert composed(*words, "model.rope_scaling.factor=16").model.rope_scaling.factor == 16
    yarn = composed(*words, "model.rope_scaling={rope_type:yarn,factor:2}").model.rope_scaling
    assert (yarn.rope_type, yarn.factor) == ("yarn", 2)


@pytest.mark.parametrize(
    ("overrides", "adapter"),
    [(["model=qwen3_6_27b"], "lora"), (["model=qwen3_6_tiny"], "none"), (["model=glm_5_2", "adapter=none"], "none")],
)
def test_the_published_models_train_adapters_unless_told_otherwise(overrides, adapter):
    assert composed(*overrides).adapter.name == adapter


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optimizer.lr=nan", "optimizer.lr=nan must be at least 0"),
        ("optimizer.lr=-1e-5", "optimizer.lr=-1e-05 must be at least 0"),
        ("optimizer.betas=[0.9]", "must be two numbers"),
        ("optimizer.betas=[0.9,1]", "must be two numbers"),
        ("optimizer.max_grad_norm=-1", "must be above 0; null: no clipping"),  # torch: the gradient turned round
        ("optimizer.max_grad_norm=0", "must be above 0; null: no clipping"),
        ("algorithm.clip_low=nan", "algorithm.clip_low=nan must be at least 0"),
    ],
)
def test_numbers_that_could_only_go_wrong_later_are_refused(override, reason):
    with pytest.raises(ConfigError, match=reason):
        composed("model=qwen3_6_tiny", override)
