"""Checkpoints as transformers' classes save them, with vision, in shards, in FP8: loaded, stepped, saved, read."""

import json
import logging
import shutil

import pytest
import torch
from helpers import enlarge, furthest, hf_logprobs, make_group
from safetensors.torch import load_file, save_file

from longstraw import grpo_step, load_model
from longstraw.config import AdapterConfig, ConfigError, read_model_config
from longstraw.config.hf_files import INDEX, SINGLE, CheckpointError, check_weights
from longstraw.models.hf_save import save_model
from longstraw.models.lora import add_adapter, save_adapter
from longstraw.step import score_fresh

transformers = pytest.importorskip("transformers")
SAME = 1e-5
TEXT = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 1024,
    "mtp_num_hidden_layers": 1,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}
MTP = "mtp.fc.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a float32 model of the multimodal class, in shards with a tensor of an MTP layer, and its folder."""
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION, image_token_id=250)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    enlarge(model.named_parameters())
    folder = tmp_path_factory.mktemp("published")
    model.save_pretrained(folder, max_shard_size="500KB")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][MTP] = "model-mtp.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    save_file({MTP: torch.full((4, 4), 0.5)}, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder, model


def stepped(model):
    """Take one step of plain gradient descent; return a group and its log-probabilities after it."""
    group = make_group(model, 65, (12, 9))
    before = grpo_step(model, group, chunk=64).logprobs
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter -= 0.05 * parameter.grad / parameter.grad.norm().clamp(min=1e-6)
    after = score_fresh(model, group, chunk=64)
    assert furthest(before, after) > 100 * SAME
    return group, before, after


def stored(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_multimodal_class_goes_in_and_out(published, tmp_path, caplog):
    folder, theirs = published
    assert len(list(folder.glob("model-0*.safetensors"))) > 1
    said = json.loads((folder / "config.json").read_text())
    assert (said["dtype"], said["text_config"].get("dtype")) == ("float32", None)
    assert read_model_config(folder).dtype == "float32"
    model = load_model(folder)
    group = make_group(model, 65, (12, 9))
    assert furthest(score_fresh(model, group, chunk=64), hf_logprobs(theirs, group)) < SAME
    group, _, after = stepped(model)
    with caplog.at_level(logging.INFO, logger="longstraw"):
        save_model(model, tmp_path / "saved")
    assert "a checkpoint of Qwen3_5ForConditionalGeneration" in caplog.text
    again, info = type(theirs).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert furthest(hf_logprobs(again, group), after) < SAME
    before, now = stored(folder), stored(tmp_path / "saved")
    assert before.keys() == now.keys()
    untouched = [name for name in before if name.startswith(("model.visual.", "mtp."))]
    assert len(untouched) > 10
    assert all(torch.equal(before[name], now[name]) for name in untouched)
    content = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert content["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert (content["model_type"], content["image_token_id"]) == ("qwen3_5", 250)
    assert content["text_config"]["mtp_num_hidden_layers"] == 1
    assert (tmp_path / "saved" / "generation_config.json").is_file()
    assert (tmp_path / "saved" / "chat_template.jinja").is_file()
    assert furthest(score_fresh(load_model(tmp_path / "saved"), group, chunk=64), after) < SAME


def test_a_tied_head_goes_in_and_out(tmp_path):
    """Qwen3.5's checkpoints up to 4B have no head of their own; transformers reads the outer object's flag."""
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    theirs = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    enlarge(theirs.named_parameters())
    theirs.save_pretrained(tmp_path / "base")
    assert "lm_head.weight" not in stored(tmp_path / "base")
    model = load_model(tmp_path / "base")
    group = make_group(model, 65, (12, 9))
    assert furthest(score_fresh(model, group, chunk=64), hf_logprobs(theirs, group)) < SAME
    group, _, after = stepped(model)
    save_model(model, tmp_path / "saved")
    assert "lm_head.weight" not in stored(tmp_path / "saved")
    again, info = type(theirs).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    assert furthest(hf_logprobs(again, group), after) < SAME

    said = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"1 tensors of the model are missing: lm_head\.weight"):
        load_model(tmp_path / "saved")


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_the_multimodal_mixture_of_experts_goes_in_and_out(tmp_path):
    """As Qwen3.6-35B-A3B is published; its adapter too moves transformers' log-probabilities as ours."""
    peft = pytest.importorskip("peft")
    sizes = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
    text = sizes | EXPERTS | {"shared_expert_intermediate_size": 32, "experts_implementation": "eager"}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
    theirs = transformers.Qwen3_5MoeForConditionalGeneration(config).float().eval()
    enlarge(theirs.named_parameters())
    theirs.save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base")
    group = make_group(model, 65, (12, 9))
    assert furthest(score_fresh(model, group, chunk=64), hf_logprobs(theirs, group)) < SAME
    group, before, after = stepped(model)
    save_model(model, tmp_path / "saved")
    again, info = type(theirs).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    assert furthest(hf_logprobs(again, group), after) < SAME
    assert stored(tmp_path / "base").keys() == stored(tmp_path / "saved").keys()

    model = add_adapter(load_model(tmp_path / "base"), AdapterConfig(name="lora", rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    save_adapter(model, tmp_path / "adapter")
    adapted = score_fresh(model, group, chunk=64)
    served = hf_logprobs(peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter"), group)
    assert furthest(served, adapted) < SAME
    assert furthest(served, before) > 100 * SAME

    expert = "model.language_model.layers.2.mlp.experts.1.up_proj.weight"
    tensors = {name: tensor for name, tensor in stored(tmp_path / "base").items() if name != expert}
    save_file(tensors, tmp_path / "base" / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors of the model are missing: model\.layers\.2\.mlp\.experts\.1"):
        load_model(tmp_path / "base")


def test_a_cut_says_that_it_predicts_no_further_tokens(published, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="longstraw"):
        save_model(load_model(published[0], num_hidden_layers=2), tmp_path / "cut")
    assert "not copied, for the model has fewer layers: mtp (1 tensors)" in caplog.text
    content = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert content["text_config"]["mtp_num_hidden_layers"] == 0
    assert MTP not in stored(tmp_path / "cut")


def test_without_its_base_the_text_model_is_saved(published, tmp_path, caplog):
    folder = shutil.copytree(published[0], tmp_path / "base")
    model = load_model(folder)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING, logger="longstraw"):
        save_model(model, tmp_path / "saved")
    assert "not there any more" in caplog.text
    read, info = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())
    group = make_group(model, 65, (12, 9))
    assert furthest(hf_logprobs(read, group), score_fresh(model, group, chunk=64)) < SAME


def test_an_adapter_fits_the_class_that_its_base_names(published, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    folder, theirs = published
    model = add_adapter(load_model(folder), AdapterConfig(name="lora", rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    group, _, after = stepped(model)
    with caplog.at_level(logging.INFO, logger="longstraw"):
        save_adapter(model, tmp_path / "adapter")
    assert "an adapter for Qwen3_5ForConditionalGeneration" in caplog.text
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in tensors)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(folder)
    base = type(theirs).from_pretrained(folder)
    plain = hf_logprobs(base, group)
    served = hf_logprobs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), group)
    assert furthest(served, after) < SAME
    assert furthest(served, plain) > 100 * SAME
    again = add_adapter(load_model(folder), AdapterConfig(name="lora", checkpoint=str(tmp_path / "adapter")))
    assert furthest(score_fresh(again, group, chunk=64), after) < SAME

    wrong = {name.replace(".language_model.", "."): tensor for name, tensor in tensors.items()}
    save_file(wrong, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    base = type(theirs).from_pretrained(folder)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        unserved = hf_logprobs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), group)
    assert furthest(unserved, plain) < SAME  # the other prefix is an adapter that does nothing


def test_targets_named_in_full_fit_that_class_too(published, tmp_path):
    peft = pytest.importorskip("peft")
    target = "model.layers.3.self_attn.q_proj"
    model = add_adapter(load_model(published[0]), AdapterConfig(name="lora", rank=4, alpha=8, targets=[target]))
    save_adapter(model, tmp_path / "adapter")
    base = type(published[1]).from_pretrained(published[0])
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == 1


# FP8 with block scales

BLOCK = 32


@pytest.fixture(scope="module")
def fp8(published, tmp_path_factory):
    """Return the text model's folder with projections in FP8 and bfloat16 scales, and transformers' reading of it."""
    _, theirs = published
    folder = tmp_path_factory.mktemp("fp8")
    text = transformers.Qwen3_5ForCausalLM(theirs.config.text_config).bfloat16()
    enlarge(text.named_parameters())
    text.save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    for name in [n for n in tensors if "_proj.weight" in n and tensors[n].dim() == 2]:
        rows, columns = tensors[name].shape
        height, width = min(BLOCK, rows), min(BLOCK, columns)
        blocks = tensors[name].float().view(rows // height, height, columns // width, width)
        scale = (blocks.abs().amax((1, 3)) / 448).bfloat16().float()
        tensors[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale.bfloat16()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": said}))
    return folder


def test_fp8_is_dequantised_as_transformers_does(fp8, tmp_path):
    from transformers import FineGrainedFP8Config

    how = FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(fp8, quantization_config=how, dtype=torch.bfloat16)
    expected = theirs.state_dict()
    model = load_model(fp8)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    wide = load_model(fp8, dtype="float32")
    group, _, after = stepped(wide)
    save_model(wide, tmp_path / "saved")
    content = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in content
    assert not any(name.endswith("_scale_inv") for name in stored(tmp_path / "saved"))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert furthest(hf_logprobs(read, group), after) < SAME


PROJECTION = "model.layers.3.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(PROJECTION + "_scale_inv"), "its scales .* are missing"),
        (lambda t: t.update({PROJECTION: t[PROJECTION].to(torch.bfloat16)}), "is BF16, not F8_E4M3"),
        (lambda t: t.update({PROJECTION + "_scale_inv": torch.ones(3, 3)}), "do not divide evenly"),
        (lambda t: t.pop("model.embed_tokens.weight"), "the embedding is not there"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.2.")], "no tensor of layer 2"),
        (lambda t: t.update({PROJECTION: torch.ones(64, 128, dtype=torch.int8)}), "is I8, not F8_E4M3"),
    ],
)
def test_what_is_missing_or_left_over_is_refused_when_the_job_is_submitted(fp8, tmp_path, change, words):
    folder = shutil.copytree(fp8, tmp_path / "broken")
    config = read_model_config(folder)
    sizes = {"layers": config.num_hidden_layers, "embedding": (config.vocab_size, config.hidden_size)}
    check_weights(folder, **sizes)
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        check_weights(folder, **sizes)
    with pytest.raises(CheckpointError):
        load_model(folder)


def test_other_quantisations_are_refused_by_config(fp8, tmp_path):
    folder = shutil.copytree(fp8, tmp_path / "other")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["quant_method"] = "gptq"
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="quantised by 'gptq'"):
        read_model_config(folder)


def test_wide_tensors_of_a_narrow_checkpoint_are_rounded_as_transformers_does(published, tmp_path, caplog):
    """Decays and norms in float32 beside bfloat16 matrices; a float32 model keeps them as they are."""
    transformers.Qwen3_5ForCausalLM(published[1].config.text_config).bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    wide = {n: torch.rand(t.shape) for n, t in tensors.items() if n.endswith("A_log") or "norm" in n}
    save_file(tensors | wide, tmp_path / SINGLE, metadata={"format": "pt"})
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    with caplog.at_level(logging.WARNING, logger="longstraw"):
        rounded = load_model(tmp_path).state_dict()
    assert f"{len(wide)} tensors are wider than bfloat16 and are rounded: model.layers.0" in caplog.text
    assert all(tensor.dtype == theirs[n].dtype and torch.equal(tensor, theirs[n]) for n, tensor in rounded.items())
    assert not any(torch.equal(rounded[n], tensor) for n, tensor in wide.items())
    caplog.clear()
    model = load_model(tmp_path, dtype="float32")
    assert not caplog.records
    assert all(torch.equal(model.state_dict()[n], tensor) for n, tensor in wide.items())
    group, _, after = stepped(model)
    save_model(model, tmp_path / "saved")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert furthest(hf_logprobs(read, group), after) < SAME
