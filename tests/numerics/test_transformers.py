"""The step on one shared prompt against transformers' own class on whole sequences; its checkpoint, loaded here."""

import pytest
import torch
from helpers import (
    assert_step_is_theirs,
    enlarge,
    furthest,
    make_group,
    relative,
    take_gradients,
    whole,
    whole_sequences,
    worst,
)

from longstraw import grpo_step, load_model
from longstraw.config import load_model_config

transformers = pytest.importorskip("transformers")

BAR = 1e-4
SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)


def hf_model(tied=False):
    """Return transformers' float32 model of the tiny configuration with large weights."""
    config = load_model_config("qwen3_6_tiny")
    model = transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **{name: getattr(config, name) for name in SAME},
            rope_parameters={
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.partial_rotary_factor,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
            max_position_embeddings=4096,
            tie_word_embeddings=tied,
        )
    ).float()
    enlarge(model.named_parameters())
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return transformers' model of the tiny configuration and ours, read from what it saved."""
    theirs = hf_model()
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, dtype="float32"), folder


def test_names_and_shapes_are_theirs(models):
    theirs, ours, _ = models
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert all(torch.equal(p, dict(theirs.named_parameters())[n]) for n, p in ours.named_parameters())


@pytest.mark.parametrize(
    ("positions", "lengths", "chunk"),
    [(1, (2, 5), 64), (2, (1, 3), 64), (65, (5, 1, 7), 64), (257, (30, 70), 128), (321, (20, 9, 33), 192)],
)
def test_logprobs_and_gradients(models, positions, lengths, chunk):
    theirs, ours, _ = models
    group = make_group(ours, positions, lengths)
    logprobs = whole_sequences(theirs, group)
    target = take_gradients(theirs)
    result = grpo_step(ours, group, chunk=chunk)
    gradients = take_gradients(ours)
    assert furthest(result.logprobs, logprobs) < BAR
    distance, name = worst(gradients, target)
    assert distance < BAR, name
    if positions > 2:
        detached = grpo_step(ours, group, chunk=chunk, prompt_grad="detached")
        assert furthest(detached.logprobs, logprobs) < BAR
        assert relative(whole(take_gradients(ours)), whole(target)) > 1e-2


def test_a_tied_head_is_theirs(tmp_path):
    """Qwen3.5 has one up to 4B."""
    theirs = hf_model(tied=True)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype="float32")
    assert "lm_head.weight" not in dict(ours.named_parameters())
    assert_step_is_theirs(theirs, ours, make_group(ours, 65, (5, 1, 7)), BAR)


@pytest.mark.parametrize("name", ["model.layers.0.linear_attn.A_log", "model.layers.3.self_attn.k_norm.weight"])
def test_comparison_can_fail(models, name):
    """One small parameter of many, off by 0.05, shows in the log-probabilities."""
    theirs, _, folder = models
    ours = load_model(folder, dtype="float32")
    group = make_group(ours, 100, (20, 3))
    logprobs = whole_sequences(theirs, group)
    take_gradients(theirs)
    with torch.no_grad():
        ours.get_parameter(name).add_(0.05)
    assert furthest(grpo_step(ours, group, chunk=64).logprobs, logprobs) > BAR
