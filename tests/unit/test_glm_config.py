"""Layer kinds and limits of GLM-5.2's configuration."""

import json

import pytest

from longstraw.config import ConfigError, load_model_config, read_model_config

PUBLISHED = {"model_type": "glm_moe_dsa", "rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}


def tiny(**overrides):
    return load_model_config("glm_5_2_tiny", **overrides)


def written(folder, **changes):
    """Write a config.json of the tiny sizes, changed; None leaves a key out."""
    sizes = {name: value for name, value in vars(tiny()).items() if name not in ("rope_scaling", "rope_theta")}
    text = PUBLISHED | sizes | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in text.items() if value is not None}))
    return folder


def test_published_pattern():
    assert tiny().indexer_types == ["full"] * 3 + ["shared"] * 3 + ["full"]
    assert tiny(num_hidden_layers=12).indexer_types[7:] == ["shared"] * 3 + ["full", "shared"]
    assert tiny(first_k_dense_replace=1).mlp_layer_types == ["dense"] + ["sparse"] * 6
    assert tiny().num_key_value_heads == 4
    assert tiny().latent_eps == tiny().rms_norm_eps == 1e-5
    assert tiny(latent_norm_eps=1e-6).latent_eps == 1e-6


def test_lists_of_a_checkpoint_stand_before_numbers(tmp_path):
    kinds = ["full", "shared", "full", "shared", "full", "full", "shared"]
    config = read_model_config(written(tmp_path, indexer_types=kinds))
    assert config.indexer_types == kinds
    assert config.rope_theta == 8e6
    assert read_model_config(tmp_path, num_hidden_layers=3).indexer_types == kinds[:3]  # a cut takes the first ones
    with pytest.raises(ConfigError, match="names 7 of num_hidden_layers=8"):
        read_model_config(tmp_path, num_hidden_layers=8)


def test_a_file_without_a_pattern_has_an_indexer_in_every_layer(tmp_path):
    """As transformers reads the files of GLM-5, which know no sharing."""
    absent = dict.fromkeys(("indexer_types", "index_topk_freq", "index_skip_topk_offset"))
    assert read_model_config(written(tmp_path, **absent)).indexer_types == ["full"] * 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"indexer_types": ["shared"] * 7}, "first layer has no layer before it"),
        ({"indexer_types": ["all"] * 7}, "not one of full, shared"),
        ({"mlp_layer_types": ["moe"] * 7}, "not one of dense, sparse"),
        ({"num_experts_per_tok": 9}, "more than n_routed_experts=8"),
        ({"index_topk": 0}, "at least 1"),
        ({"qk_rope_head_dim": 7}, "must be even"),
        ({"qk_rope_head_dim": 32}, "at most index_head_dim=16"),
        ({"num_key_value_heads": 2}, "not num_attention_heads=4"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**overrides)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_group", 8), ("scoring_func", "softmax"), ("rope_interleave", False), ("indexer_rope_interleave", False)],
)
def test_what_would_compute_something_else_is_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=f"{key}=.* is not supported"):
        read_model_config(written(tmp_path, **{key: value}))
