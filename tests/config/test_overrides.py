"""Arguments checked before Hydra composes them: every typo is named, with the nearest valid keys."""

import pytest

from longstraw.config import ConfigError
from longstraw.config.overrides import check, chosen
from longstraw.run import parse

TINY = ["model=qwen3_6_tiny", "hardware=cpu"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["group_size=2,8", "context=2.1M"],
        ["context=16Ki,64Ki", "chunk=2_048", "prompt_grad_window=null"],
        ["model=qwen3_6_tiny,qwen3_6_27b", "model.dtype=float64"],
        ["model=glob(qwen*)", "model.num_hidden_layers=8"],
        ["data=jsonl", "data.path=/tmp/a.jsonl", "data.on_error=skip"],
        ["seed=range(0,10,2)", "optimizer.lr=1e-5", "optimizer.max_grad_norm=null"],
        ["tracking.tags=[a,b]", "claim='a name'", "launch.detach=true"],
        ["+hardware.slurm.slurm_mail_user=me", "hardware.setup=['module load cuda']"],
        ["++group_size=4"],
        ["hydra.run.dir=/tmp/x", "hydra/launcher=basic", "hydra.verbose=true"],
        ["sweep=laptop", "model.checkpoint=null"],
        ["response_length=${context}"],
    ],
)
def test_valid(arguments):
    check(parse(arguments))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["typo=1"], r"^typo=1: there is no key typo; there are group_size, context"),
        (["+typo=1"], r"^\+typo=1: there is no key typo"),
        (["++typo=1"], r"^\+\+typo=1: there is no key typo"),
        (["~typo"], r"^~typo: there is no key typo"),
        (["groupsize=3"], r"did you mean group_size\?"),
        (["lr=1e-4"], r"did you mean optimizer\.lr\?"),
        (["optimiser.lr=1e-4"], r"did you mean optimizer\.lr"),
        (["model.hiden_size=3"], r"did you mean model\.hidden_size"),
        (["model.dtype.x=3"], r"there is no key model\.dtype\.x"),
        (["launch.max_paralel=3"], r"did you mean launch\.max_parallel"),
        (["hardware.gpu_per_node=3"], r"did you mean hardware\.gpus_per_node"),
        (["data.path=x"], r"there is no key data\.path"),
        (["data=needle,jsonl", "data.path=x"], r"no key data\.path with data=needle"),
        (["model=qwen"], r"model='qwen' is not one of .*qwen3_6_tiny"),
        (["hardware=cpu,h20x9"], r"hardware='h20x9' is not one of .*; did you mean h20x8\?"),
        (["hardware=schema"], r"hardware='schema' is not one of cpu"),
        (["sweep=nothing"], r"sweep='nothing' is not one of"),
        (["model={name: x}"], r"is not one of"),
        (["launch={detach: true}"], r"launch is a set of keys"),
        (["model@other=qwen3_6_tiny"], r"write model=NAME"),
        (["algorithm.name=gspo"], r"write algorithm=NAME"),
        (["~group_size"], r"cannot be removed"),
        (["~model"], r"cannot be removed"),
        (["+group_size=3"], r"write group_size=3"),
        (["hardware.slurm.slurm_mail_user=me"], r"write \+hardware\.slurm\.slurm_mail_user=me"),
        (["group_size=many"], r"^group_size=many: .*Integer"),
        (["group_size=2,many"], r"^group_size=many: .*Integer"),
        (["optimizer.lr=fast"], r"^optimizer\.lr=fast: .*Float"),
        (["launch.detach=perhaps"], r"^launch\.detach=perhaps: .*bool"),
        (["context=99999999999999999999"], r"^context=99999999999999999999: must be at most 1,099,511,627,776"),
        (["steps=" + "9" * 5000], "steps"),
        (["context=1e999"], "at most|not a count"),
        (["context=1.5"], r"^context=1\.5: not a whole number"),
        (["context=16Ki,lots"], r"^context=lots: not a count"),
        (["chunk=32"], r"^chunk=32: must be at least 64"),
        (["hydra.sweeper.max_batch_size=2"], r"launch\.max_parallel"),
        (["context"], r"^context: write key=value"),
        (["context=[1"], r"^context=\[1: "),
        (["seed=interval(0,1)"], r"one by one"),
    ],
)
def test_refused(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        check(parse(arguments))


def texts(arguments, **kwargs):
    return [argument.text for argument in parse(arguments, **kwargs)]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("steps=1e3", "steps=1000"),
        ("steps=4k,1K", "steps=4000,1000"),
        ("hardware.time_min=1_440", "hardware.time_min=1_440"),
        ("checkpoint.every=2Ki", "checkpoint.every=2048"),
        ("model.max_position_embeddings=1Mi", "model.max_position_embeddings=1048576"),
        ("optimizer.lr=1e-3", "optimizer.lr=1e-3"),
        ("data.haystack=FILE", "data.haystack=['FILE']"),
        ("data.haystack=a,b", "data.haystack=['a'],['b']"),
        ("data.haystack=[a,b],[c]", "data.haystack=[a,b],[c]"),
        ("tracking.tags=one", "tracking.tags=['one']"),
        ("data.path=mine (1) é.jsonl", "data.path='mine (1) é.jsonl'"),
        ("data.path='as before'", "data.path='as before'"),
        ("data.path=007", "data.path='007'"),
        ("data.path=it's.jsonl", r"data.path='it\'s.jsonl'"),
        ("model.checkpoint=[v2] model", "model.checkpoint='[v2] model'"),
        ("adapter.checkpoint=null", "adapter.checkpoint=null"),
        ("claim=Größe 1", "claim='Größe 1'"),
        ("hydra.run.dir=Läufe/a, b", "hydra.run.dir='Läufe/a, b'"),
    ],
)
def test_values_are_read_as_a_user_writes_them(typed, read):
    assert texts([typed]) == [read]
    check(parse(["data=jsonl" if "path" in typed else "data=needle", typed]))


def test_a_comma_in_the_name_of_a_file_is_no_sweep(tmp_path):
    file = tmp_path / "a,b.jsonl"
    assert texts(["data.path=a,b"], sweep=False) == ["data.path='a,b'"]
    assert texts([f"data.path={file}"]) == [f"data.path='{tmp_path}/a','b.jsonl'"]
    file.touch()
    assert texts([f"data.path={file}"]) == [f"data.path='{file}'"]


def test_a_home_folder_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse(["model.checkpoint=~/model"])[0].values == ("/home/me/model",)


def test_every_mistake_is_named():
    with pytest.raises(ConfigError) as error:
        check(parse(["typo=1", "group_size=2", "model=no", "context=1.5"]))
    assert [line.split(":")[0].split("=")[0] for line in str(error.value).splitlines()] == ["typo", "model", "context"]


def test_options_come_from_the_command_then_the_sweep_then_the_default():
    assert chosen(parse([]))["model"] == ("qwen3_6_27b",)
    assert chosen(parse(["sweep=laptop"]))["model"] == ("qwen3_6_tiny",)
    assert chosen(parse(["sweep=laptop", "model=qwen3_6_27b"]))["model"] == ("qwen3_6_27b",)
    assert chosen(parse(["data=needle,jsonl"]))["data"] == ("needle", "jsonl")
