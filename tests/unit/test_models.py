"""Models by name: sizes as published, weights by seed, memory while they are drawn."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from longstraw.config import ConfigError, load_model_config, read_model_config
from longstraw.group import Group
from longstraw.models import build_model, draw_weights, qwen3_6
from longstraw.models.hf_config import to_hf_config
from longstraw.step import grpo_step

PUBLISHED = {  # parameters of the text model
    "qwen3_5_0_8b": 752_393_024,
    "qwen3_5_2b": 1_881_825_088,
    "qwen3_5_4b": 4_205_751_296,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_6_27b": 26_895_998_464,
    "qwen3_6_35b_a3b": 34_660_610_688,
    "qwen3_5_122b_a10b": 122_111_526_912,
    "qwen3_5_397b_a17b": 396_346_350_336,
    "glm_5_2": 743_377_000_704,
    "llama_3_1_8b": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_published_model_has_the_parameters_of_its_class_in_transformers(name, parameters):
    transformers = pytest.importorskip("transformers")
    model = build_model(name, device="meta")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    content = to_hf_config(model.config, "bfloat16")
    their_class = getattr(transformers, content["architectures"][0])
    with torch.device("meta"):
        theirs = {n: p.shape for n, p in their_class(their_class.config_class(**content)).named_parameters()}
    assert {n: p.shape for n, p in model.named_parameters()} == theirs
    assert sum(shape.numel() for shape in theirs.values()) == parameters


def test_the_published_configuration_of_a_size_is_the_one_in_conf(tmp_path):
    """The text part of Qwen3.5-0.8B's own config.json, but for what is not read."""
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3584,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(24)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    }
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": True}))
    listed = load_model_config("qwen3_5_0_8b")
    read = read_model_config(tmp_path, default_adapter="lora")
    assert replace(read, name=listed.name, checkpoint=None) == listed


@pytest.mark.parametrize("name", ["qwen3_6_tiny", "qwen3_6_moe_tiny", "glm_5_2_tiny", "llama_tiny"])
def test_a_seed_gives_the_same_weights_in_every_dtype(name):
    single, double, other = (build_model(name, seed=s, dtype=d) for s, d in ((1, None), (1, "float64"), (2, None)))
    assert all(torch.equal(a.double(), b) for a, b in zip(single.parameters(), double.parameters(), strict=True))
    assert not torch.equal(single.lm_head.weight, other.lm_head.weight)
    assert all(p.isfinite().all() for p in single.parameters())


def test_the_default_device_is_where_a_model_is_built():
    with torch.device("meta"):
        assert {p.device.type for p in build_model("qwen3_6_tiny").parameters()} == {"meta"}
        drawn = build_model("llama_tiny", seed=3, device="cpu")
    target = build_model("llama_tiny", seed=3)
    assert all(torch.equal(a, b) for a, b in zip(drawn.parameters(), target.parameters(), strict=True))


def test_a_tied_head_is_the_embedding_in_copies_too():
    model = build_model("llama_tiny")
    copied = copy.deepcopy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight is not model.lm_head.weight
    assert "lm_head.weight" not in copied.state_dict()
    assert copied.double().lm_head.weight.dtype == torch.float64


def test_a_family_without_a_module_is_named():
    config = load_model_config("llama_tiny")
    config.architecture = "mamba"
    with pytest.raises(NotImplementedError, match=r"mamba: longstraw\.models has no module"):
        build_model(config)


def test_weights_are_drawn_one_module_at_a_time(monkeypatch):
    built, held, build, draw = [], [], qwen3_6.build, qwen3_6.initialise
    monkeypatch.setattr(qwen3_6, "build", lambda *a: built.append(build(*a)) or built[0])

    def spy(module, *rest):
        draw(module, *rest)
        held.append(sum(p.nbytes for p in built[0].parameters() if not p.is_meta))

    monkeypatch.setattr(qwen3_6, "initialise", spy)
    model = build_model("qwen3_6_tiny", dtype="bfloat16")
    final = sum(p.nbytes for p in model.parameters())
    largest = max(p.numel() for p in model.parameters()) * 4
    assert final / 2 < max(held) <= final + largest < 2 * final


def test_a_wrong_name_or_field_names_the_right_ones():
    with pytest.raises(ConfigError, match="did you mean qwen3_6_tiny"):
        build_model("qwen36_tiny")
    with pytest.raises(ConfigError, match="did you mean hidden_size"):
        build_model("qwen3_6_tiny", hiden_size=3)
    with pytest.raises(TypeError, match="so set num_hidden_layers there"):
        build_model(load_model_config("qwen3_6_tiny"), num_hidden_layers=4)


@pytest.mark.parametrize("name", ["qwen3_6_tiny", "glm_5_2_tiny"])
def test_a_copy_is_a_model_of_its_own(name):
    model = build_model(name)
    copied = copy.deepcopy(model)
    assert copied.ops == model.ops
    group = Group([1, 2, 3], [[1], [2, 3]], [0.0, 1.0])
    logprobs = [grpo_step(m, group, chunk=64).logprobs[1] for m in (model, copied)]
    assert torch.equal(*logprobs)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert model.lm_head.weight.any()
    grads = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, copied)]
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][n], grads[1][n]) and grads[0][n] is not grads[1][n] for n in grads[0])


def test_only_the_experts_that_are_kept_are_drawn():
    """A rank with experts 2 and 3 draws two, and they are those that one process draws."""
    whole = dict(build_model("glm_5_2_tiny", seed=3).named_parameters())
    name = next(name for name in whole if name.endswith("experts.down_proj"))
    drawn = {}

    def keep(tensor, part, first):
        if tensor.dim() == 3:
            drawn.setdefault(tuple(tensor.shape), (first, part))
        return part.expand_as(tensor) if part.shape == tensor.shape else torch.zeros(tensor.shape)

    draw_weights(build_model("glm_5_2_tiny", device="meta"), seed=3, keep=keep, rows=lambda tensor: range(2, 4))
    first, part = drawn[tuple(whole[name].shape)]
    assert first == 2
    assert torch.equal(part, whole[name][2:4])
