"""Positions past the native length: YaRN against transformers' own, angles in float64, the warning without either."""

import json
import math

import pytest
import torch
from glm_helpers import hf_model, hf_step, stable_ties
from helpers import enlarge, furthest, make_group, take_gradients, tiny_model, worst
from omegaconf import OmegaConf

from longstraw import grpo_step, load_model
from longstraw.config import (
    ConfigError,
    from_composed,
    load_model_config,
    native_length_warning,
    option,
    read_model_config,
)
from longstraw.layers.rotary import rotary_angles
from longstraw.models.hf_save import save_model

transformers = pytest.importorskip("transformers")

BAR = 1e-4
CPU = torch.device("cpu")
NATIVE = 64  # of the tiny models here: short, so that a prompt of 193 is past it
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": NATIVE}


def angles(config, start, count, dtype=torch.float32):
    width = config.rotary_dim if hasattr(config, "rotary_dim") else config.qk_rope_head_dim
    positions = torch.arange(start, start + count)
    return rotary_angles(positions, width, config.rope_theta, dtype=dtype, scaling=config.rope_scaling)


def their_rotary(config, **changes):
    """Return cos and sin of transformers, whose configuration says what the model card does."""
    scaling = config.rope_scaling
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    if scaling.factor != 1:
        native = config.max_position_embeddings
        rope |= {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": native}
    sizes = {"head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings}
    theirs = transformers.Qwen3_5TextConfig(rope_parameters=rope | changes, **sizes)
    return transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(theirs)


@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0, 8.0, 17.0])
@pytest.mark.parametrize("start", [0, 262_100, 2_000_000])
def test_cos_and_sin_are_theirs(factor, start):
    config = load_model_config("qwen3_6_27b", rope_scaling={"factor": factor})
    rotary = their_rotary(config)
    positions = torch.arange(start, start + 50)[None, None]
    cos, sin = (f[0, :, : config.rotary_dim // 2] for f in rotary(torch.zeros(1), positions))
    ours, scale = angles(config, start, 50), config.rope_scaling.attention
    assert torch.equal(ours.cos() * scale, cos)
    assert torch.equal(ours.sin() * scale, sin)
    assert scale == rotary.attention_scaling == pytest.approx(0.1 * math.log(factor) + 1)


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("start", [0, 131_000, 2_000_000])
@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, LLAMA3], ids=lambda x: x["rope_type"])
def test_cos_and_sin_of_other_scalings_are_theirs(scaling, start):
    scaling = scaling | {"factor": 8.0}
    rope = scaling | {"rope_theta": 5e5} | ({"original_max_position_embeddings": 8192} if len(scaling) > 2 else {})
    config = load_model_config("llama_3_1_8b", rope_scaling=scaling | {"original_max_position_embeddings": 8192})
    theirs = transformers.LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=rope)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    cos, sin = (f[0, :, :64] for f in rotary(torch.zeros(1), torch.arange(start, start + 50)[None]))
    ours = angles(config, start, 50)
    assert config.rope_scaling.attention == rotary.attention_scaling == 1.0
    assert torch.equal(ours.cos(), cos)
    assert torch.equal(ours.sin(), sin)
    config.rope_scaling.factor = 9.0
    assert not torch.equal(angles(config, start + 1, 50).cos()[:-1], cos[1:])


def test_the_comparison_can_fail():
    """Another ramp, or no scaling of cos and sin, is seen."""
    config = load_model_config("qwen3_6_27b", rope_scaling={"factor": 4.0})
    plain = load_model_config("qwen3_6_27b")
    cos, _ = their_rotary(config, beta_fast=16.0)(torch.zeros(1), torch.arange(1000, 1050)[None, None])
    ours = angles(config, 1000, 50)
    assert (ours.cos() * config.rope_scaling.attention - cos[0, :, :32]).abs().max() > 1e-2
    assert (angles(config, 100_000, 50) - angles(plain, 100_000, 50)).abs().max() > 1
    assert config.rope_scaling.attention > 1.1


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Return transformers' model with YaRN, ours read from what it saved, and the folder."""
    folder = tmp_path_factory.mktemp("yarn")
    ours = tiny_model(dtype=torch.float32, max_position_embeddings=NATIVE)
    save_model(ours, folder / "plain")
    content = json.loads((folder / "plain" / "config.json").read_text())
    content["rope_parameters"] |= YARN
    (folder / "plain" / "config.json").write_text(json.dumps(content))
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(folder / "plain")
    assert theirs.model.rotary_emb.attention_scaling == pytest.approx(1.1386, abs=1e-4)
    enlarge(theirs.named_parameters(), seed=3)
    theirs.save_pretrained(folder / "theirs")
    return theirs, load_model(folder / "theirs"), folder / "theirs"


def compared(theirs, ours, group):
    _, logprobs, target = hf_step(theirs, group)
    result = grpo_step(ours, group, chunk=64)
    return furthest(result.logprobs, logprobs), *worst(take_gradients(ours), target)


def test_step_past_the_native_length(qwen):
    theirs, ours, folder = qwen
    assert ours.config.longest_position == 4 * NATIVE
    group = make_group(ours, 193, (9, 30))
    logprobs, gradient, name = compared(theirs, ours, group)
    assert logprobs < BAR
    assert gradient < BAR, name
    for wrong in ({"factor": 1.0}, {"factor": 8.0}, {"factor": 4.0, "attention_factor": 1.0}):
        other = load_model(folder, rope_scaling=wrong)
        logprobs, gradient, _ = compared(theirs, other, group)
        assert logprobs > 10 * BAR
        assert gradient > 10 * BAR


def test_glm_past_the_native_length(tmp_path):
    """The same embedding in pairs, in attention and in the indexer."""
    theirs = hf_model(tmp_path / "plain", index_topk=32, max_position_embeddings=NATIVE)
    theirs.config.rope_parameters |= YARN
    theirs.save_pretrained(tmp_path / "yarn")
    kind = transformers.GlmMoeDsaForCausalLM
    theirs = kind.from_pretrained(tmp_path / "yarn", attn_implementation="eager", experts_implementation="eager")
    ours = load_model(tmp_path / "yarn", latent_norm_eps=1e-6)
    plain = load_model(tmp_path / "plain", latent_norm_eps=1e-6)
    assert (ours.config.rope_label, plain.config.rope_label) == ("yarn 4", "none")
    group = make_group(ours, 193, (9, 30))
    with stable_ties():
        _, logprobs, _ = hf_step(theirs, group)
    assert furthest(grpo_step(ours, group, chunk=64).logprobs, logprobs) < BAR
    assert furthest(grpo_step(plain, group, chunk=64).logprobs, logprobs) > 10 * BAR


def test_saved_scaling_is_read_back(qwen, tmp_path):
    _, ours, folder = qwen
    save_model(ours, tmp_path / "again")
    for read in (read_model_config(folder), read_model_config(tmp_path / "again")):
        assert read.rope_scaling == ours.config.rope_scaling
        assert (read.rope_scaling.factor, read.rope_scaling.original_max_position_embeddings) == (4.0, NATIVE)
    rope = transformers.AutoConfig.from_pretrained(tmp_path / "again").rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    save_model(load_model(folder, rope_scaling={"factor": 1.0}), tmp_path / "plain")
    rope = json.loads((tmp_path / "plain" / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "default"
    assert "factor" not in rope


def test_a_factor_typed_for_a_run_is_of_the_native_length_of_its_checkpoint(tmp_path):
    """Not of the native length of ``model=``, beside which the folder is named."""
    save_model(tiny_model(dtype=torch.float32, max_position_embeddings=NATIVE), tmp_path / "model")
    typed = {**option("model", "qwen3_6_tiny"), "checkpoint": str(tmp_path / "model")}
    run = {"hardware": option("hardware", "cpu"), "data": option("data", "needle"), "context": 300}
    for scaling, longest in (({"factor": 3.0}, 3 * NATIVE), ({}, NATIVE)):
        config = from_composed(OmegaConf.create({**run, "model": {**typed, "rope_scaling": scaling}}))
        assert config.model.longest_position == longest
        assert native_length_warning(config.model, config.context) is not None


@pytest.mark.parametrize(
    ("rope", "complaint"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic'"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "mscale"),
        ({"rope_type": "yarn", "factor": 0.5}, r"factor=0\.5"),
    ],
)
def test_other_scalings_are_refused(tmp_path, rope, complaint):
    save_model(tiny_model(dtype=torch.float32), tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    content["rope_parameters"] |= rope
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=complaint):
        read_model_config(tmp_path / "model")


@pytest.mark.parametrize(("name", "least", "most"), [("qwen3_6_27b", 0.03, 0.09), ("glm_5_2", 0.03, 0.13)])
def test_float64_angles_are_right_where_float32_ones_are_not(name, least, most):
    """At two million positions; the truth from Python's own arithmetic."""
    config = load_model_config(name)
    start, count = 2_097_000, 150
    single, double = angles(config, start, count), angles(config, start, count, torch.float64)
    width = 2 * single.shape[1]
    for i in (0, 1, 5, width // 2 - 1):
        assert abs(float(double[-1, i]) - (start + count - 1) / config.rope_theta ** (2 * i / width)) < 1e-8
    assert least < (single.double() - double).abs().max() < most


def test_float64_angles_reach_the_layers():
    """A million positions on, the option changes what attention computes, and by no more than the angles do."""
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = []
    for rope_angles in ("float32", "float64"):
        layer = tiny_model(rope_angles=rope_angles).model.layers[1].self_attn
        past = layer.new_state(0, grad_from=None, dtype=torch.float64).leaves(0, grad=False)
        past.positions = 3_000_001
        keys.append(layer.update(hidden, past)["key"])
    difference = (keys[0] - keys[1]).abs().max() / keys[1].abs().max()
    assert 1e-6 < difference < 0.2


def test_a_run_past_the_native_length_is_told_once_how_to_cover_it():
    config = load_model_config("qwen3_6_27b")
    assert native_length_warning(config, 262_144) is None
    told = native_length_warning(config, 2_097_152)
    assert "262144" in told
    assert "model.rope_scaling.factor=8" in told
    scaled = load_model_config("qwen3_6_27b", rope_scaling={"factor": 8})
    assert native_length_warning(scaled, 2_097_152) is None
    assert "factor=9" in native_length_warning(scaled, 2_097_153)
    assert native_length_warning(load_model_config("glm_5_2"), 1_048_577) is not None
    assert (config.rope_label, scaled.rope_label) == ("none", "yarn 8")
