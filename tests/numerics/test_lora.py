"""Low-rank adapters: gradients against one graph and against PEFT on transformers' classes, files both ways."""

import json
import logging

import pytest
import torch
from glm_helpers import glm_model, glm_oracle, hf_model
from helpers import furthest, make_group, oracle, relative, tiny_model, whole, worst
from safetensors.torch import load_file, save_file

from longstraw import build_model, grpo_step, load_model
from longstraw.config import AdapterConfig, AlgorithmConfig, ConfigError
from longstraw.grpo import BranchTerms, advantages, branch_loss, denominators
from longstraw.models.hf_save import save_model
from longstraw.models.hf_weights import CheckpointError
from longstraw.models.lora import adapters_off, add_adapter, load_adapter, save_adapter
from longstraw.step import PreparedGroup, StepOptions, finish_step, prefill, score_fresh

peft = pytest.importorskip("peft")

EXACT, SINGLE = 1e-12, 1e-4
LENGTHS = (9, 30)


def adapted(model, *targets, seed=1, rank=4):
    """Add an adapter with a B that is not zero, or A would have no gradient."""
    add_adapter(model, AdapterConfig(name="lora", rank=rank, alpha=2 * rank, targets=list(targets)), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return model


def adapter_gradients(model):
    """Return the adapters' gradients by name, PEFT's prefix left out; nothing else has one, and none is missing."""
    gradients = {}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == ("lora_" in name), name
        if parameter.requires_grad:
            gradients[name.removeprefix("base_model.model.")] = parameter.grad
    model.zero_grad(set_to_none=True)
    return gradients


CASES = {
    "qwen, default": (tiny_model, oracle, ()),
    "qwen, last layer": (tiny_model, oracle, ("model.layers.3.mlp.up_proj", "model.layers.3.self_attn.v_proj")),
    "qwen, o_proj": (tiny_model, oracle, ("o_proj",)),
    "qwen, k_proj": (tiny_model, oracle, ("k_proj",)),
    "qwen, gates": (tiny_model, oracle, ("in_proj_a", "in_proj_b")),
    "qwen, head": (tiny_model, oracle, ("lm_head", "q_proj")),
    "glm, default": (glm_model, glm_oracle, ()),
    "glm, kv_b_proj": (glm_model, glm_oracle, ("kv_b_proj",)),
    "glm, shared experts": (glm_model, glm_oracle, ("shared_experts.down_proj",)),
}


@pytest.mark.parametrize("case", CASES)
def test_exact_gradients_are_those_of_one_graph(case):
    build, whole_sequences, targets = CASES[case]
    model = adapted(build(), *targets)
    group = make_group(model, 193, LENGTHS)
    _, logprobs = whole_sequences(model, group)
    target = adapter_gradients(model)
    result = grpo_step(model, group, chunk=64)
    distance, name = worst(adapter_gradients(model), target)
    assert furthest(result.logprobs, logprobs) < EXACT
    assert distance < EXACT, name
    grpo_step(model, group, chunk=64, prompt_grad="detached")
    assert relative(whole(adapter_gradients(model)), whole(target)) > 1e-3


def test_an_adapter_above_every_state_has_no_prompt_gradient():
    """The state has no gradient then, and both modes agree; one layer lower it has one."""
    for target, differs in (("model.layers.3.mlp.up_proj", False), ("model.layers.2.mlp.up_proj", True)):
        model = adapted(tiny_model(), target)
        group = make_group(model, 193, LENGTHS)
        grpo_step(model, group, chunk=64)
        exact = whole(adapter_gradients(model))
        grpo_step(model, group, chunk=64, prompt_grad="detached")
        assert (relative(whole(adapter_gradients(model)), exact) > 1e-2) == differs


# PEFT on transformers' classes


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return for each architecture a folder with weights, a way to load it here, and transformers' class."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bases")
    save_model(tiny_model(dtype=torch.float32), folder / "qwen")
    hf_model(folder / "glm", index_topk=1024)
    return {
        "qwen": (folder / "qwen", {}, transformers.Qwen3_5ForCausalLM),
        "glm": (folder / "glm", {"latent_norm_eps": 1e-6}, transformers.GlmMoeDsaForCausalLM),
    }


def theirs_with(bases, name, adapter):
    folder, _, kind = bases[name]
    model = kind.from_pretrained(folder, attn_implementation="eager")
    if name == "glm":
        model.config._experts_implementation = "eager"
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def their_logprobs(model, group, response):
    tokens = torch.cat([group.prompt, response[:-1]])
    logs = model(tokens[None], use_cache=False).logits[0, len(group.prompt) - 1 :].log_softmax(-1)
    return logs.gather(1, response[:, None])[:, 0]


def their_step(model, group):
    logprobs = []
    parts = zip(group.responses, advantages(group.rewards), denominators(group, AlgorithmConfig(), 1), strict=True)
    for (response, advantage, denominator), old in zip(parts, group.old_logprobs, strict=True):
        lp = their_logprobs(model, group, response)
        branch_loss(lp, BranchTerms(advantage, denominator, old), AlgorithmConfig()).loss.backward()
        logprobs.append(lp.detach())
    return logprobs, adapter_gradients(model)


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen", ()), ("qwen", ("lm_head", "k_proj")), ("glm", ()), ("glm", ("kv_b_proj",))]
)
def test_gradients_are_those_of_peft_on_transformers(bases, tmp_path, name, targets):
    folder, options, _ = bases[name]
    model = adapted(load_model(folder, **options), *targets)
    save_adapter(model, tmp_path / "adapter")
    theirs = theirs_with(bases, name, tmp_path / "adapter")
    group = make_group(model, 193, LENGTHS)
    logprobs, target = their_step(theirs, group)
    result = grpo_step(model, group, chunk=64)
    distance, parameter = worst(adapter_gradients(model), target)
    assert furthest(result.logprobs, logprobs) < SINGLE
    assert distance < SINGLE, parameter
    with adapters_off(model), theirs.disable_adapter(), torch.no_grad():
        off = [their_logprobs(theirs, group, response) for response in group.responses]
        assert furthest(score_fresh(model, group, chunk=64), off) < SINGLE
    assert furthest(off, logprobs) > 100 * SINGLE


@pytest.mark.parametrize(
    ("name", "target", "where"),
    [("qwen", "lm_head", "longstraw.models.decoder"), ("glm", "kv_b_proj", "longstraw.layers.latent")],
)
def test_a_layer_that_reads_the_bare_weight_is_found(bases, tmp_path, monkeypatch, name, target, where):
    folder, options, _ = bases[name]
    model = adapted(load_model(folder, **options), target)
    save_adapter(model, tmp_path / "adapter")
    group = make_group(model, 65, LENGTHS)
    logprobs, _ = their_step(theirs_with(bases, name, tmp_path / "adapter"), group)
    assert furthest(score_fresh(model, group, chunk=64), logprobs) < SINGLE
    monkeypatch.setattr(f"{where}.effective_weight", lambda module: module.weight)
    assert furthest(score_fresh(model, group, chunk=64), logprobs) > 10 * SINGLE


def test_an_adapter_that_peft_wrote_is_read(bases, tmp_path, caplog):
    """With targets as it spells them, a rank of its own for some of them, and dropout."""
    folder, _, kind = bases["qwen"]
    config = peft.LoraConfig(r=3, target_modules=r".*\.(q_proj|up_proj)", rank_pattern={"q_proj": 5}, use_rslora=True)
    config.lora_dropout = 0.1
    theirs = peft.get_peft_model(kind.from_pretrained(folder), config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    with caplog.at_level(logging.WARNING, logger="longstraw"):
        model = load_adapter(load_model(folder), tmp_path / "adapter")
    assert "dropout is switched off" in caplog.text
    group = make_group(model, 65, LENGTHS)
    with torch.no_grad():
        logprobs = [their_logprobs(theirs, group, response) for response in group.responses]
    assert furthest(score_fresh(model, group, chunk=64), logprobs) < SINGLE
    with torch.no_grad():
        dict(model.named_parameters())["model.layers.1.self_attn.q_proj.lora_A.default.weight"].mul_(1.5)
    assert furthest(score_fresh(model, group, chunk=64), logprobs) > 10 * SINGLE


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_what_is_saved_is_read_back(bases, tmp_path, name):
    folder, options, kind = bases[name]
    model = adapted(load_model(folder, **options))
    group = make_group(model, 65, LENGTHS)
    logprobs = score_fresh(model, group, chunk=64)
    save_adapter(model, tmp_path / "adapter")
    start = AdapterConfig(name="lora", checkpoint=str(tmp_path / "adapter"))
    again = add_adapter(load_model(folder, **options), start)
    assert furthest(score_fresh(again, group, chunk=64), logprobs) == 0
    assert all(p.requires_grad == ("lora_" in n) for n, p in again.named_parameters())
    save_adapter(again, tmp_path / "again")
    for written in ("adapter", "again"):
        config = json.loads((tmp_path / written / "adapter_config.json").read_text())
        assert sorted(config["target_modules"]) == sorted(model.config.adapter_targets)
        assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(folder))
    with pytest.raises(CheckpointError, match="is there already"):
        save_adapter(model, tmp_path / "adapter")
    save_model(model, tmp_path / "merged")
    merged = kind.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    with torch.no_grad():
        assert furthest([their_logprobs(merged, group, r) for r in group.responses], logprobs) < SINGLE
    with adapters_off(model):
        save_model(model, tmp_path / "base")
    original, base = (load_model(path, **options).state_dict() for path in (folder, tmp_path / "base"))
    assert all(torch.equal(tensor, original[n]) for n, tensor in base.items())


# the reference, precision, what is frozen


def test_kl_is_against_the_model_without_its_adapters():
    model, base = adapted(tiny_model()), tiny_model()
    algorithm = AlgorithmConfig(kl_coef=0.3)
    group = make_group(model, 193, LENGTHS)
    loss, _ = oracle(model, group, algorithm, reference=base)
    target = adapter_gradients(model)
    with adapters_off(model):
        reference = score_fresh(model, group, chunk=64)
    for logprobs, close in ((reference, True), (score_fresh(model, group, chunk=64), False)):
        retained = prefill(model, group.prompt, chunk=64, grad_from=0)
        prepared = PreparedGroup(group, retained, group.old_logprobs, logprobs)
        result = finish_step(model, prepared, StepOptions(64, algorithm=algorithm))
        distance, name = worst(adapter_gradients(model), target)
        assert (distance < EXACT) == close, name
        assert (abs(float(result.loss - loss)) < EXACT) == close


def test_switching_adapters_off_leaves_no_trace():
    model = adapted(tiny_model())
    group = make_group(model, 65, LENGTHS)
    before = score_fresh(model, group, chunk=64)
    flags = [p.requires_grad for p in model.parameters()]
    with adapters_off(model):
        assert [p.requires_grad for p in model.parameters()] == flags
        assert furthest(score_fresh(model, group, chunk=64), before) > 1e-3
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        1 / 0  # noqa: B018
    assert furthest(score_fresh(model, group, chunk=64), before) == 0
    with pytest.raises(ValueError, match="no adapters"), adapters_off(tiny_model()):
        pass


@pytest.mark.parametrize("build", [tiny_model, glm_model])
def test_bfloat16_base_with_float32_adapters(build):
    """The adapters keep float32; gradients differ from a float32 base by what rounding activations to 8 bits does."""
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = adapted(build(dtype=dtype))
        assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
        assert {p.dtype for n, p in model.named_parameters() if "lora_" not in n} == {dtype}
        group = make_group(model, 65, LENGTHS, noise=0.0)
        grpo_step(model, group, chunk=64)
        gradients.append(whole(adapter_gradients(model)))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.7
    assert gradients[0].norm() / gradients[1].norm() == pytest.approx(1, rel=0.3)


def test_a_new_adapter_changes_nothing_and_is_drawn_from_the_seed():
    group = make_group(tiny_model(), 65, LENGTHS)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        expected = torch.randn(1)
        torch.manual_seed(seed)
        model = add_adapter(tiny_model(), AdapterConfig(name="lora"), seed=seed)
        assert torch.equal(torch.randn(1), expected)  # the process's own generator has not moved
        drawn.append(dict(model.named_parameters())["model.layers.1.self_attn.q_proj.lora_A.default.weight"])
        assert furthest(score_fresh(model, group, chunk=64), score_fresh(tiny_model(), group, chunk=64)) == 0
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    plain = add_adapter(tiny_model(), AdapterConfig())
    assert all(parameter.requires_grad for parameter in plain.parameters())


# refusals


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(
            ("qwen3_6_tiny", target)
            for target in ("q_pro", "conv1d", "self_attn", "embed_tokens", "norm", "layers.9.o_proj")
        ),
        *(
            ("glm_5_2_tiny", target)
            for target in ("wk", "indexer.wq_b", "gate", "experts.gate_up_proj", "weights_proj")
        ),
    ],
)
def test_targets_that_match_nothing_trained_are_refused(name, target):
    model = build_model(name, device="meta")
    with pytest.raises(ConfigError, match="o_proj") as caught:
        add_adapter(model, AdapterConfig(name="lora", targets=["o_proj", target]))
    assert repr(target) in str(caught.value)
    assert "wq_b" not in str(caught.value).partition("there are")[2]
    assert not any("lora_" in n for n, _ in model.named_parameters())


def test_a_cut_without_some_default_targets_is_adapted():
    model = add_adapter(tiny_model(num_hidden_layers=1), AdapterConfig(name="lora"))
    assert {n.split(".")[4] for n, p in model.named_parameters() if p.requires_grad} == {
        *("in_proj_qkv", "in_proj_z", "out_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_what_peft_would_take_for_experts_is_told(caplog):
    """On transformers' mixtures of experts PEFT reads these names as the fused experts, whatever stands before them."""
    add_adapter(glm_model(), AdapterConfig(name="lora"))
    assert not caplog.records
    add_adapter(glm_model(), AdapterConfig(name="lora", targets=["o_proj", "shared_experts.down_proj"]))
    assert "not in PEFT" in caplog.text


def test_a_second_adapter_is_refused(tmp_path):
    model = adapted(tiny_model())
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="already"):
        add_adapter(model, AdapterConfig(name="lora"))
    with pytest.raises(ConfigError, match="already"):
        load_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("target_parameters", ["x"])],
)
def test_what_is_no_plain_lora_is_refused(tmp_path, key, value):
    save_adapter(adapted(tiny_model()), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=key):
        load_adapter(tiny_model(), tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    save_adapter(adapted(tiny_model(num_hidden_layers=6)), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"model\.layers\.4"):
        load_adapter(tiny_model(), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"\[4, 64\], not \[4, 32\]"):
        load_adapter(tiny_model(num_hidden_layers=6, hidden_size=32), tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    stored.popitem()
    save_file(stored, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="no counterpart"):
        load_adapter(tiny_model(num_hidden_layers=6), tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="not both of"):
        load_adapter(tiny_model(), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="no adapter to save"):
        save_adapter(tiny_model(), tmp_path / "none")
