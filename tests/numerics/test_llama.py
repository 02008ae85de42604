"""The llama family: against transformers' three classes, plain autograd and PEFT; checkpoints both ways."""

import json
import logging

import pytest
import torch
from helpers import (
    assert_adapter_is_theirs,
    assert_step_is_theirs,
    furthest,
    hf_logprobs,
    make_group,
    oracle,
    relative,
    take_gradients,
    worst,
)
from llama_helpers import CLASSES, LLAMA3, both, llama_model
from safetensors.torch import load_file, save_file

from longstraw import build_model, grpo_step, load_model
from longstraw.config import AdapterConfig, AlgorithmConfig, ConfigError, read_model_config
from longstraw.models.hf_save import save_model
from longstraw.models.lora import add_adapter
from longstraw.step import score_fresh

transformers = pytest.importorskip("transformers")

SINGLE, EXACT = 1e-5, 1e-12
NAMES = list(CLASSES)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that gives transformers' model of a name, ours from what it saved, and the folder."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[name] = (*both(name, folder), folder)
        return made[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_names_shapes_and_values_are_theirs(models, name):
    theirs, ours, _ = models(name)
    expected = dict(theirs.named_parameters())
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in expected.items()}
    assert all(torch.equal(p, expected[n]) for n, p in ours.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_and_gradients_are_theirs(models, name):
    theirs, ours, _ = models(name)
    assert_step_is_theirs(theirs, ours, make_group(ours, 193, (33, 9)), SINGLE)


def changed(config, key):
    """Change ``config`` so that it computes something else; the weights fit all the same."""
    if key == "factor":
        config.rope_scaling.factor += 1
    elif key == "high_freq_factor":
        config.rope_scaling.high_freq_factor = 2.0
    elif key == "original_max_position_embeddings":
        config.rope_scaling.original_max_position_embeddings = 128
    elif key == "rope_type":
        config.rope_scaling.rope_type = "yarn"
    else:
        config.rope_theta = 20_000.0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "factor"),
        ("llama", "high_freq_factor"),
        ("llama", "original_max_position_embeddings"),
        ("llama", "rope_type"),
        ("llama, biases", "factor"),
        ("qwen2, yarn", "factor"),
        ("qwen3", "rope_theta"),
    ],
)
def test_another_rotary_embedding_is_seen(models, name, key):
    theirs, _, folder = models(name)
    config = read_model_config(folder)
    changed(config, key)
    ours = load_model(folder, dtype="float32", config=config)
    group = make_group(ours, 193, (33, 9))
    with torch.no_grad():
        assert furthest(score_fresh(ours, group, chunk=64), hf_logprobs(theirs, group)) > 10 * SINGLE


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("qwen3", f"self_attn.{x}_norm") for x in "qk"),
        *(("qwen2", f"self_attn.{x}_proj") for x in "qv"),
        *(("llama, biases", f"self_attn.{x}_proj") for x in "qvo"),
        *(("llama, biases", f"mlp.{x}_proj") for x in ("gate", "up", "down")),
    ],
)
def test_a_norm_or_bias_left_out_is_seen(models, name, part):
    """The bias of keys alone is not: it adds the same to all of a query's scores, but for the rotation."""
    theirs, _, folder = models(name)
    ours = load_model(folder, dtype="float32")
    for layer in ours.model.layers:
        module = layer.get_submodule(part)
        if part.endswith("norm"):
            setattr(layer.self_attn, part.rpartition(".")[2], torch.nn.Identity())
        else:
            module.bias = None
    group = make_group(ours, 100, (20, 3))
    with torch.no_grad():
        assert furthest(score_fresh(ours, group, chunk=64), hf_logprobs(theirs, group)) > 10 * SINGLE


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_loads_in_the_same_class(models, name, tmp_path):
    theirs, _, folder = models(name)
    ours = load_model(folder, dtype="float32")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.01)
    save_model(ours, tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert type(again) is type(theirs)
    assert ("lm_head.weight" in load_file(tmp_path / "saved" / "model.safetensors")) != ours.config.tie_word_embeddings
    group = make_group(ours, 100, (20, 3))
    with torch.no_grad():
        assert furthest(score_fresh(ours, group, chunk=64), hf_logprobs(again, group)) < SINGLE
    said, expected = again.config.to_dict(), theirs.config.to_dict()
    assert said.keys() - expected.keys() <= {"head_dim"}  # Qwen2's class reads it where it is there
    rope = said.pop("rope_parameters")  # may spell out a default
    assert rope.items() >= expected.pop("rope_parameters").items()
    assert {key for key in expected if said[key] != expected[key]} <= {"_name_or_path", "dtype", "architectures"}
    assert {n: p.shape for n, p in load_model(tmp_path / "saved").named_parameters()} == {
        n: p.shape for n, p in ours.named_parameters()
    }


def test_a_head_beside_a_tied_embedding_is_left_out(models, tmp_path, caplog):
    """Some published files hold both; transformers reads the embedding."""
    theirs, ours, _ = models("qwen2")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        again = load_model(tmp_path, dtype="float32")
    assert not caplog.records
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in ours.named_parameters()]


SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 24, "num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("border", [None, 0, 64])
def test_a_step_is_plain_autograd(shape, border):
    """Exact, detached and a window: the cut of the graph lies at 0, before the last prompt token, at a border."""
    model = llama_model(**SHAPES[shape])
    group = make_group(model, 193, (5, 67), masked=True)
    cut = {None: 0, 0: 192, 64: 64}[border]
    loss, logprobs = oracle(model, group, border=cut)
    target = take_gradients(model)
    keys = {None: {}, 0: {"prompt_grad": "detached"}, 64: {"prompt_grad_window": 128}}[border]
    result = grpo_step(model, group, chunk=64, **keys)
    distance, name = worst(take_gradients(model), target)
    assert distance < EXACT, name
    assert result.loss.item() == pytest.approx(loss.item(), rel=EXACT)
    assert furthest(result.logprobs, logprobs) < EXACT


def test_both_uses_of_a_tied_weight_count():
    """Without the embedding's part, or without the head's, the gradient is another."""
    model, other = llama_model(), llama_model(tie_word_embeddings=False)
    with torch.no_grad():
        other.lm_head.weight.copy_(model.model.embed_tokens.weight)
        for name, parameter in model.named_parameters():
            other.get_parameter(name).copy_(parameter)
    group = make_group(model, 130, (5, 9))
    grpo_step(model, group, chunk=64)
    grpo_step(other, group, chunk=64)
    tied, apart = take_gradients(model), take_gradients(other)
    head, embedding = apart.pop("lm_head.weight"), apart.pop("model.embed_tokens.weight")
    assert relative(tied["model.embed_tokens.weight"], head + embedding) < EXACT
    assert min(relative(tied["model.embed_tokens.weight"], part) for part in (head, embedding)) > 1e-2
    assert worst({name: tied[name] for name in apart}, apart)[0] < EXACT


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3, biases"])
def test_adapters_are_those_of_peft_on_transformers(models, name, tmp_path):
    pytest.importorskip("peft")
    theirs, _, folder = models(name)
    ours = add_adapter(load_model(folder, dtype="float32"), AdapterConfig(name="lora", rank=4, alpha=8))
    fresh = type(theirs).from_pretrained(folder, dtype=torch.float32)
    adapted = 7 * ours.config.num_hidden_layers
    assert_adapter_is_theirs(fresh, ours, tmp_path / "adapter", adapted=adapted, bar=SINGLE)


def test_adapters_are_plain_autograd_and_refuse_a_tied_head():
    pytest.importorskip("peft")
    model = add_adapter(llama_model(), AdapterConfig(name="lora", rank=4, alpha=8))
    group = make_group(model, 130, (9, 20))
    oracle(model, group)
    target = {n: p.grad for n, p in model.named_parameters() if "lora_B" in n}
    model.zero_grad(set_to_none=True)
    grpo_step(model, group, chunk=64)
    assert worst({n: model.get_parameter(n).grad for n in target}, target)[0] < EXACT
    with pytest.raises(ConfigError, match="'lm_head' matches no linear module"):
        add_adapter(llama_model(), AdapterConfig(name="lora", targets=["lm_head"]))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention; only full_attention"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("llama", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' without original_max"),
        ("llama", {"num_attention_heads": 3}, "no multiple of num_key_value_heads=2"),
    ],
)
def test_what_would_compute_something_else_is_refused(models, tmp_path, name, change, words):
    _, _, folder = models(name)
    content = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ConfigError, match=words):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (  # Llama 3.2 1B, as published
            {
                "model_type": "llama",
                "head_dim": 64,
                "rope_scaling": {
                    "factor": 32.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "llama3",
                },
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
            },
            {"head_dim": 64, "rope_theta": 500000.0, "tie_word_embeddings": True, "longest_position": 131072},
        ),
        (  # Qwen2.5: a window in the file that is switched off
            {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 21},
            {"qkv_bias": True, "attention_bias": False, "head_dim": 16, "rope_theta": 10_000.0},
        ),
        ({"model_type": "qwen3", "rope_theta": 1e6}, {"qk_norm": True, "head_dim": 128, "rope_theta": 1e6}),
        ({"model_type": "llama"}, {"qk_norm": False, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    ],
)
def test_published_files_are_read(tmp_path, content, fields):
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
    kv = {} if content["model_type"] == "llama" else {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | kv | content))
    config = read_model_config(tmp_path)
    assert {key: getattr(config, key) for key in fields} == fields
    build_model(config, device="meta")


@pytest.mark.parametrize("given", [("qk_norm", "qkv_bias"), ("qkv_bias", "mlp_bias"), ("qkv_bias", "attention_bias")])
def test_a_mixture_that_no_class_has_is_refused(given):
    with pytest.raises(ConfigError, match="no class of transformers has"):
        build_model("llama_tiny", device="meta", **dict.fromkeys(given, True))


def test_a_kl_term():
    model = llama_model()
    group = make_group(model, 65, (5, 9))
    algorithm = AlgorithmConfig(kl_coef=0.1)
    reference = llama_model(seed=1)
    loss, _ = oracle(model, group, algorithm, reference=reference)
    target = take_gradients(model)
    result = grpo_step(model, group, chunk=64, algorithm=algorithm, reference=reference)
    assert result.loss.item() == pytest.approx(loss.item(), rel=EXACT)
    assert worst(take_gradients(model), target)[0] < EXACT
