"""Checkpoints: what is read, how much at a time, what is refused and by which name, and what is written back."""

import json
import logging
import pickle
import re
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstraw import build_model, load_model
from longstraw.config import ConfigError
from longstraw.config.hf_files import INDEX, SINGLE
from longstraw.models import hf_weights as weights
from longstraw.models.hf_save import save_model
from longstraw.models.hf_weights import CheckpointError, load_weights

MODELS = ("qwen3_6_tiny", "glm_5_2_tiny")
SMALL = {"qwen3_6_tiny": {"num_hidden_layers": 4}, "glm_5_2_tiny": {"num_hidden_layers": 4}}


def tiny(name="qwen3_6_tiny", **options):
    return build_model(name, seed=5, **SMALL[name], **options)


def saved(folder, name="qwen3_6_tiny", **options):
    """Return a model and the folder that it was saved to, in one file."""
    model = tiny(name)
    save_model(model, folder / "checkpoint", **options)
    return model, folder / "checkpoint"


def rewrite(folder, change):
    """Replace the tensors of a checkpoint in one file by what ``change`` makes of them."""
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE, metadata={"format": "pt"})


def same(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def load_report(model, folder):
    empty = build_model(model.config, device="meta")
    return load_weights(empty, folder, dtype=torch.float32, device=torch.device("cpu"))


# reading


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded_is_the_same(tmp_path, name):
    model, folder = saved(tmp_path, name)
    assert (folder / SINGLE).is_file()
    loaded = load_model(folder)
    assert same(model, loaded)
    with torch.no_grad():
        next(loaded.parameters()).add_(1)
    assert not same(model, loaded)


@pytest.mark.parametrize("name", MODELS)
def test_shards_hold_no_more_than_they_may(tmp_path, name):
    limit = 100_000
    model, folder = saved(tmp_path, name, shard_bytes=limit)
    index = json.loads((folder / INDEX).read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert len(files) > 3
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    assert all(sum(t.nbytes for t in tensors.values()) <= limit or len(tensors) == 1 for tensors in files.values())
    assert same(model, load_model(folder))


def test_published_names_and_extras(tmp_path, caplog):
    model, folder = saved(tmp_path)
    extras = ("mtp.fc.weight", "model.visual.blocks.0.weight", "model.layers.4.self_attn.q_proj.weight", "odd.thing")

    def publish(tensors):
        renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        return renamed | {name: torch.ones(2) for name in extras}

    rewrite(folder, publish)
    with caplog.at_level(logging.INFO, logger="longstraw"):
        report = load_report(model, folder)
    assert sorted(report.left_out) == sorted(extras[:3])
    assert report.unknown == ["odd.thing"]
    assert report.loaded == len(model.state_dict())
    left_out, unknown = caplog.records
    assert all(part in left_out.getMessage() for part in ("mtp (1", "model.visual (1", "model.layers.4 (1"))
    assert "odd.thing" in unknown.getMessage()
    assert unknown.levelno == logging.WARNING
    assert same(model, load_model(folder))


def test_a_cut_reads_only_its_layers(tmp_path):
    model, folder = saved(tmp_path, shard_bytes=100_000)
    cut = load_model(folder, num_hidden_layers=2)
    assert len(cut.model.layers) == 2
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in cut.state_dict().items())


def test_experts_are_published_one_by_one_and_fused_again(tmp_path):
    model, folder = saved(tmp_path, "glm_5_2_tiny")
    stored = load_file(folder / SINGLE)
    fused = model.state_dict()["model.layers.3.mlp.experts.gate_up_proj"]
    rows = fused.shape[1] // 2
    assert torch.equal(stored["model.layers.3.mlp.experts.1.gate_proj.weight"], fused[1, :rows])
    assert torch.equal(stored["model.layers.3.mlp.experts.1.up_proj.weight"], fused[1, rows:])
    assert not any("gate_up_proj" in name for name in stored)
    single = [name for name in stored if ".experts." in name]
    experts = {n: t for n, t in model.state_dict().items() if ".experts." in n}
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n not in single} | experts)
    assert same(model, load_model(folder))  # a file that holds them fused is read too


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen3_6_tiny", "model.layers.3.self_attn.k_proj.weight"),
        ("qwen3_6_tiny", "lm_head.weight"),
        ("glm_5_2_tiny", "model.layers.3.mlp.experts.2.up_proj.weight"),
        ("glm_5_2_tiny", "model.layers.3.mlp.gate.e_score_correction_bias"),
    ],
)
def test_what_is_missing_is_named(tmp_path, name, lost):
    _, folder = saved(tmp_path, name)
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != lost})
    with pytest.raises(CheckpointError, match="1 tensors of the model are missing") as caught:
        load_model(folder)
    assert lost in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3_6_tiny", "model.norm.weight"),
        ("qwen3_6_tiny", "model.layers.0.mlp.up_proj.weight"),
        ("glm_5_2_tiny", "model.layers.3.mlp.experts.0.down_proj.weight"),
    ],
)
def test_another_shape_is_named(tmp_path, name, tensor):
    _, folder = saved(tmp_path, name)
    rewrite(folder, lambda tensors: tensors | {tensor: tensors[tensor][:-1].clone()})
    with pytest.raises(CheckpointError, match=tensor.replace(".", r"\.")):
        load_model(folder)


def test_quantised_weights_are_refused(tmp_path):
    """Without the scales beside them they would load without complaint and mean nothing."""
    _, folder = saved(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load_model(folder)


def test_broken_folders_say_what_is_wrong(tmp_path):
    _, folder = saved(tmp_path)
    whole = (folder / SINGLE).read_bytes()
    for length in (len(whole) - 1000, 100, 4, 0):
        (folder / SINGLE).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="it may be incomplete"):
            load_model(folder)
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_model(folder)
    (folder / INDEX).write_text('{"weight_map": {"lm_head.weight": "absent.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"absent\.safetensors"):
        load_model(folder)
    for broken in ("{", "{}", "[]", '{"weight_map": ["lm_head.weight"]}', '{"weight_map": {"lm_head.weight": 3}}'):
        (folder / INDEX).write_text(broken)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_model(folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")


class Trap:
    """Unpickling it would show."""

    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def test_nothing_is_unpickled(tmp_path):
    _, folder = saved(tmp_path)
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        load_model(folder)
    assert not Trap.sprung
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert Trap.sprung


class Spy:
    """Stands for ``safe_open``: counts the tensors that are read and still alive."""

    def __init__(self):
        self.alive, self.most, self.read = 0, 0, []

    def __call__(self, *arguments, **options):
        self.file = weights_safe_open(*arguments, **options)
        return self

    def __enter__(self):
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.opened.keys()

    def get_slice(self, name):
        return Slice(self, name, self.opened.get_slice(name))

    def died(self):
        self.alive -= 1


class Slice:
    def __init__(self, spy, name, inner):
        self.spy, self.name, self.inner = spy, name, inner
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, index):
        tensor = self.inner[index]
        self.spy.read.append((self.name, tensor.numel()))
        self.spy.alive += 1
        self.spy.most = max(self.spy.most, self.spy.alive)
        weakref.finalize(tensor, self.spy.died)
        return tensor


weights_safe_open = weights.safe_open


@pytest.mark.parametrize("name", MODELS)
def test_one_tensor_is_read_at_a_time(tmp_path, monkeypatch, name):
    model, folder = saved(tmp_path, name)
    rewrite(folder, lambda tensors: tensors | {"mtp.fc.weight": torch.ones(3)})
    spy = Spy()
    monkeypatch.setattr(weights, "safe_open", spy)
    loaded = load_model(folder)
    assert same(model, loaded)
    assert spy.most == 1
    assert sum(count for _, count in spy.read) == sum(t.numel() for t in model.state_dict().values())
    assert not any("mtp" in stored for stored, _ in spy.read)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loaded.state_dict().values()}
    assert sum(storages.values()) == sum(t.nbytes for t in loaded.state_dict().values())  # no file stays mapped


def test_a_process_reads_only_its_part(tmp_path, monkeypatch):
    """Two ranks that halve every tensor's first dimension, experts included, hold the whole between them."""
    model, folder = saved(tmp_path, "glm_5_2_tiny")
    halves = []
    for rank in range(2):
        spy = Spy()
        monkeypatch.setattr(weights, "safe_open", spy)
        half = {}

        def place(name, tensor, rank=rank, half=half):
            start = rank * (len(tensor) // 2)
            end = len(tensor) // 2 if rank == 0 else len(tensor)
            half[name] = torch.full((end - start, *tensor.shape[1:]), torch.nan)
            return half[name], (start,) + (0,) * (tensor.dim() - 1)

        empty = build_model(model.config, device="meta")
        load_weights(empty, folder, dtype=torch.float32, device=torch.device("cpu"), place=place)
        assert all(tensor.is_meta for tensor in empty.state_dict().values())  # what is filled is where it was placed
        halves.append(half)
        assert sum(count for _, count in spy.read) == sum(t.numel() for t in halves[-1].values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(torch.cat([half[name] for half in halves]), tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", None])
def test_dtype_is_kept_or_cast_and_buffers_stay_wide(tmp_path, dtype):
    model, folder = saved(tmp_path, "glm_5_2_tiny")
    loaded = load_model(folder, dtype=dtype)
    wanted = torch.float32 if dtype is None else getattr(torch, dtype)
    assert {p.dtype for p in loaded.parameters()} == {wanted}
    assert {b.dtype for b in loaded.buffers()} == {torch.promote_types(wanted, torch.float32)}
    assert {b.dtype for b in tiny("glm_5_2_tiny", dtype="bfloat16").buffers()} == {torch.float32}
    assert all(torch.equal(p, q.to(wanted)) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("model_type", "mistral"),
        ("attn_output_gate", False),
        ("layer_types", ["full_attention"] * 4),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path, key, value):
    _, folder = saved(tmp_path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(ConfigError, match=key):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"num_hidden_layers": -4}, "num_hidden_layers=-4 must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be at least 1"),
        ({"hidden_size": None}, "hidden_size has no value"),
        ({"hidden_size": "wide"}, "wide"),
        ({"dtype": "float16"}, "dtype='float16' is not one of"),
        ({"rope_parameters": None}, "rope_theta has no value"),
        ({"rope_parameters": [1]}, "rope_parameters is no JSON object"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0.0 must be at least 1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": float("inf")}}, "must be finite"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "without a factor"),
        ({"text_config": [1]}, "text_config is no JSON object"),
    ],
)
def test_a_config_that_means_no_model_is_refused_by_its_path(tmp_path, change, said):
    _, folder = saved(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=re.escape(str(path))) as refused:
        load_model(folder)
    assert said in str(refused.value)


@pytest.mark.parametrize("content", ["{", "[]", "null", ""])
def test_a_config_that_is_no_object_is_refused_by_its_path(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "config.json"))):
        load_model(tmp_path)


def test_a_dtype_that_is_asked_for_stands_before_the_file(tmp_path):
    """Also before one that is none of ours."""
    model, folder = saved(tmp_path)
    rewrite(folder, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float16"}))
    loaded = load_model(folder, dtype="float32")
    assert loaded.config.dtype == "float32"
    halves = (p.half().float() for p in model.parameters())
    assert all(torch.equal(p, half) for p, half in zip(loaded.parameters(), halves, strict=True))


# writing


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    model = tiny()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="is there already"):
        save_model(model, tmp_path / "full")
    calls = []

    def break_off(content, file, metadata):
        calls.append(file)
        if len(calls) == 2:
            raise OSError("disk full")
        save_file(content, file, metadata)

    monkeypatch.setattr(weights, "save_file", break_off)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, tmp_path / "broken", shard_bytes=100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_what_lies_beside_the_weights_comes_along(tmp_path):
    _, folder = saved(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    content = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(content))
    save_model(load_model(folder), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").is_file()
    assert not (tmp_path / "again" / "modeling_custom.py").exists()
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == content


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_6_tiny", "Qwen3_5ForCausalLM"), ("glm_5_2_tiny", "GlmMoeDsaForCausalLM")]
)
def test_transformers_loads_what_we_save(tmp_path, name, kind):
    transformers = pytest.importorskip("transformers")
    model, folder = saved(tmp_path, name, shard_bytes=100_000)
    theirs, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    state = theirs.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[n]) for n, tensor in model.state_dict().items())
    tokens = torch.randint(model.config.vocab_size, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        past = [state.leaves(0, grad=False) for state in model.new_states(0)]
        hidden, _ = model(tokens[:-1], past)
        ours, _ = model.logprobs(hidden, tokens[1:])
        logs = theirs(tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1)
    assert (ours - logs.gather(1, tokens[1:, None])[:, 0]).abs().max() < 1e-4
    assert theirs.config.num_hidden_layers == 4
