"""Qwen3.6's mixture of experts: against transformers' class, plain autograd and PEFT; checkpoints both ways."""

import json

import pytest
import torch
from helpers import (
    assert_adapter_is_theirs,
    assert_step_is_theirs,
    enlarge,
    furthest,
    hf_logprobs,
    make_group,
    moe_model,
    oracle,
    relative,
    take_gradients,
    worst,
)
from safetensors.torch import load_file

from longstraw import build_model, grpo_step, load_model
from longstraw.config import AdapterConfig, ConfigError, read_model_config
from longstraw.layers import feedforward
from longstraw.models.hf_save import save_model
from longstraw.models.lora import add_adapter

transformers = pytest.importorskip("transformers")

SINGLE, EXACT = 1e-5, 1e-12
SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return transformers' model of the tiny configuration, ours from what it saved, and the folder."""
    config = build_model("qwen3_6_moe_tiny", device="meta").config
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 0.25}
    sizes = {name: getattr(config, name) for name in SAME}
    theirs = transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(
            **sizes, rope_parameters=rope, max_position_embeddings=4096, experts_implementation="eager"
        )
    ).float()
    enlarge(theirs.named_parameters())
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, dtype="float32"), folder


def test_names_shapes_and_values_are_theirs(models):
    theirs, ours, _ = models
    expected = dict(theirs.named_parameters())
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in expected.items()}
    assert all(torch.equal(p, expected[n]) for n, p in ours.named_parameters())


def test_logprobs_and_gradients_are_theirs(models):
    theirs, ours, _ = models
    assert_step_is_theirs(theirs, ours, make_group(ours, 193, (33, 9)), SINGLE)


def _not_normalised(logits, count):
    return logits.softmax(-1).topk(count).indices, logits.softmax(-1).topk(count).values


def _sigmoid(logits, count):
    weights, chosen = logits.sigmoid().topk(count)
    return chosen, weights / weights.sum(-1, keepdim=True)


def _one_more(logits, count):
    return _ROUTE(logits, count + 1)


def _not_shared(self, x):
    return self.experts(x, *self.gate(x))


def _not_gated(self, x):
    return self.experts(x, *self.gate(x)) + self.shared_expert(x)


_ROUTE = feedforward.route_softmax
WRONG = {
    "weights not normalised": (feedforward, "route_softmax", _not_normalised),
    "sigmoid scores": (feedforward, "route_softmax", _sigmoid),
    "one expert more a token": (feedforward, "route_softmax", _one_more),
    "no shared expert": (feedforward.GatedMixture, "forward", _not_shared),
    "a shared expert without its gate": (feedforward.GatedMixture, "forward", _not_gated),
}


@pytest.mark.parametrize("part", WRONG)
def test_another_mixture_is_seen(models, monkeypatch, part):
    theirs, ours, _ = models
    group = make_group(ours, 66, (9, 3))
    expected = hf_logprobs(theirs, group)
    assert furthest(grpo_step(ours, group, chunk=64).logprobs, expected) < SINGLE
    monkeypatch.setattr(*WRONG[part])
    assert furthest(grpo_step(ours, group, chunk=64).logprobs, expected) > 100 * SINGLE
    ours.zero_grad(set_to_none=True)


def test_the_router_is_theirs():
    modeling = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    config = build_model("qwen3_6_moe_tiny", device="meta", num_experts_per_tok=3).config
    own, theirs = feedforward.SoftmaxRouter(config), modeling.Qwen3_5MoeTopKRouter(config)
    with torch.no_grad():
        theirs.weight.normal_(0, 0.3)
    own.load_state_dict(theirs.state_dict())
    x = torch.randn(50, 64)
    (_, weights, chosen), (own_chosen, own_weights) = theirs(x), own(x)
    assert torch.equal(own_chosen, chosen)
    assert relative(own_weights, weights) < 1e-6
    assert own.bfloat16()(x.bfloat16())[1].dtype == torch.float32
    assert feedforward.route_softmax(torch.zeros(1, 4), 2)[0].tolist() == [[0, 1]]  # of experts that tie, the first


@pytest.mark.parametrize("border", [None, 0, 64])
def test_a_step_is_plain_autograd(border):
    """Exact, detached and a window: the cut of the graph lies at 0, before the last prompt token, at a border."""
    model = moe_model()
    group = make_group(model, 130, (5, 9), masked=True)
    loss, logprobs = oracle(model, group, border={None: 0, 0: 129, 64: 64}[border])
    target = take_gradients(model)
    keys = {None: {}, 0: {"prompt_grad": "detached"}, 64: {"prompt_grad_window": 65}}[border]
    result = grpo_step(model, group, chunk=64, **keys)
    distance, name = worst(take_gradients(model), target)
    assert distance < EXACT, name
    assert result.loss.item() == pytest.approx(loss.item(), rel=EXACT)
    assert furthest(result.logprobs, logprobs) < EXACT


def test_what_is_saved_loads_in_the_same_class(models, tmp_path):
    theirs, _, folder = models
    ours = load_model(folder, dtype="float32")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.01)
    save_model(ours, tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, experts_implementation="eager"
    )
    assert type(again) is type(theirs)
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in ours.named_parameters())
    said, expected = again.config.to_dict(), theirs.config.to_dict()
    assert {key for key in expected if said[key] != expected[key]} <= {"_name_or_path", "dtype", "architectures"}
    assert load_file(folder / "model.safetensors").keys() == load_file(tmp_path / "saved" / "model.safetensors").keys()
    reloaded = load_model(tmp_path / "saved")
    assert all(torch.equal(p, reloaded.get_parameter(n)) for n, p in ours.named_parameters())


def test_fused_experts_are_read_as_they_are_published(models, tmp_path):
    """Published files hold all experts of a layer in one tensor, with the text model inside the multimodal class."""
    from safetensors.torch import save_file

    theirs, ours, folder = models
    fused = {n.replace("model.", "model.language_model.", 1): p.detach() for n, p in theirs.named_parameters()}
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in fused
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    read = load_model(tmp_path, dtype="float32")
    assert all(torch.equal(p, read.get_parameter(n)) for n, p in ours.named_parameters())


@pytest.mark.parametrize("targets", [[], ["q_proj", "gate_proj", "up_proj", "down_proj"]])
def test_adapters_are_those_of_peft_on_transformers(models, tmp_path, caplog, targets):
    """By default three maps of each delta layer and four of the full one; the shared experts' if they are named."""
    pytest.importorskip("peft")
    theirs, _, folder = models
    ours = add_adapter(
        load_model(folder, dtype="float32"), AdapterConfig(name="lora", rank=4, alpha=8, targets=targets)
    )
    assert not [record for record in caplog.records if "not in PEFT" in record.message]
    fresh = type(theirs).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    adapted = (1 + 3 * 4) if targets else (3 * 3 + 4)
    assert_adapter_is_theirs(fresh, ours, tmp_path / "adapter", adapted=adapted, bar=SINGLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_experts=8"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types must be full_attention in every 4th"),
    ],
)
def test_what_would_compute_something_else_is_refused(models, tmp_path, change, words):
    _, _, folder = models
    content = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ConfigError, match=words):
        read_model_config(tmp_path)
