"""What a job needs in files and packages is looked at before any job starts; processes of their own, without torch."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import records
from safetensors.torch import save_file

from longstraw.config import ConfigError, conf_dir, from_dict, load_model_config, to_dict
from longstraw.config.hf_files import CheckpointError, check_adapter, check_weights, read_header
from longstraw.config.overrides import check
from longstraw.launch import inputs
from longstraw.launch.jobs import labels
from longstraw.launch.spec import Job
from longstraw.run import parse
from longstraw.tracking.job_table import table

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["context=420", "response_length=8"]
LINE = {"prompt": "hello", "responses": [{"text": "yes", "reward": 1.0}, {"text": "no", "reward": 0}]}


def config(**values):
    model = to_dict(load_model_config("qwen3_6_tiny")) | values.pop("model", {})
    base = {"hardware": {"name": "cpu", "backend": "cpu"}, "data": {"name": "needle"}, "context": 1024, "mode": "run"}
    return from_dict({"model": model, **base, **values})


@pytest.fixture
def files(stand_in):
    """Write what the arguments below name into the folder the command runs in."""
    (stand_in / "good.jsonl").write_text(json.dumps(LINE) + "\n")
    (stand_in / "broken.jsonl").write_text('{"prompt": \n')
    (stand_in / "one.jsonl").write_text(json.dumps({**LINE, "responses": LINE["responses"][:1]}) + "\n")
    (stand_in / "empty.txt").touch()
    (stand_in / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (stand_in / "mine (1), é.jsonl").write_text(json.dumps(LINE) + "\n")
    return stand_in


@pytest.mark.parametrize(
    ("arguments", "wrong", "reason"),
    [
        (["data=jsonl", "data.path=good.jsonl,/nope"], " 1", "data.path=/nope is not there"),
        (["data=jsonl", "data.path=good.jsonl,broken.jsonl"], " 1", "broken.jsonl:1: no JSON"),
        (["data=jsonl", "data.path=good.jsonl,one.jsonl"], " 1", "one.jsonl:1: 1 responses, and group_size=2"),
        (["data=jsonl", "data.path=good.jsonl", "data.tokenizer=null,/nope"], " 1", "/nope: no such folder"),
        (
            ["rollout=sample", "data=needle,lookup", *SHORT],
            " 0",
            "data=needle has its own responses and rewards no others",
        ),
        (["data=lookup", "seed=1,2", *SHORT], "s 0, 1", "data=lookup has prompts and no responses: add rollout=sample"),
        (["data=lookup", "rollout=sample", "context=100,420", "response_length=8"], " 0", "short of data=lookup; use "),
        (["data.haystack=good.jsonl,/nope"], " 1", "data.haystack: /nope is not there"),
        (["data.haystack=good.jsonl,empty.txt"], " 1", "data.haystack: no text in empty.txt"),
        (["data.haystack=good.jsonl,binary.txt"], " 1", "binary.txt is no UTF-8 text"),
        (["data.haystack=[good.jsonl],['']"], " 1", "data.haystack names an empty path"),
        (["response_length=16,3"], " 1", "response_length=3: the needle's number takes 6 tokens"),
        (["response_length=64", "context=256,130"], " 1", "a needle and its question take 74 tokens"),
        (["adapter=lora", "adapter.checkpoint=null,/nope"], " 1", "/nope: not both of adapter_config.json and"),
        (["adapter=none", "seed=1,2", "adapter.checkpoint=/nope"], "s 0, 1", "adapter=none would not be used"),
    ],
)
def test_no_job_is_started_where_one_cannot_be(longstraw, files, arguments, wrong, reason):
    done = longstraw("-m", *arguments)
    assert done.returncode == 2, done.stdout
    assert f"longstraw: job{wrong}: " in done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(files.glob("runs/*/*/*/records.jsonl"))


def test_a_package_that_is_missing_is_asked_for_before_any_job(
    longstraw,
    files,
):
    hook = files.parent / "hook" / "sitecustomize.py"
    hook.write_text(hook.read_text().replace('("torch", "wandb")', '("torch", "wandb", "peft")'))
    done = longstraw("-m", "adapter=none,lora")
    assert done.returncode == 2
    assert "job 1: adapter=lora needs peft, which is not installed: pip install peft" in done.stderr
    assert not list(files.glob("runs/*/*/*/records.jsonl"))


def test_a_path_is_quoted_once_by_the_shell(longstraw, files):
    done = longstraw("data=jsonl", "data.path=mine (1), é.jsonl")
    assert done.returncode == 0, done.stderr
    spec = json.loads(next(files.glob("runs/*/*/0/spec.json")).read_text())
    assert spec["config"]["data"]["path"] == "mine (1), é.jsonl"
    assert shlex.split(spec["command"])[-1] == "data.path=mine (1), é.jsonl"


def test_counts_and_single_files_reach_the_job(longstraw, files):
    done = longstraw("-m", "steps=2e0,1", "data.haystack=good.jsonl", "checkpoint.every=1K")
    assert done.returncode == 0, done.stderr
    assert sorted(len(records(folder)) for folder in files.glob("runs/*/*/[01]")) == [1, 2]


@pytest.mark.parametrize("arguments", [["-x"], ["--cfg", "nonsense"], ["--run", "-m"], ["--resolve"]])
def test_an_option_that_is_not_there_is_one_line_of_ours(longstraw, arguments):
    done = longstraw(*arguments)
    assert done.returncode == 2
    assert re.fullmatch(r"longstraw: .*; options are -m .*\n", done.stderr)


def test_version_and_help_are_ours(longstraw):
    assert re.fullmatch(r"longstraw \d+\.\d+.*\n", longstraw("--version", tiny=False).stdout)
    shown = longstraw("--help", tiny=False).stdout
    for key in ("model.checkpoint=", "save=true", "checkpoint.every=", "data.path=", "data.haystack="):
        assert key in shown
        assert key in (ROOT / "README.md").read_text()


def test_what_has_no_effect_is_said(longstraw):
    done = longstraw("prompt_grad_window=64")
    assert done.stderr == "longstraw: prompt_grad_window: no effect with prompt_grad=detached\n"
    assert longstraw("prompt_grad_window=64", "prompt_grad=exact").stderr == ""


def test_a_simulation_says_what_it_does_not_write():
    simulated = config(mode="simulate", save=True, checkpoint={"every": 1})
    assert inputs.without_effect(simulated) == "save, checkpoint.*: no effect with mode=simulate"
    assert inputs.without_effect(config(save=True, checkpoint={"every": 1})) is None
    assert inputs.without_effect(config(mode="simulate")) is None


def test_targets_of_no_adapter_and_of_a_written_one_are_refused():
    with pytest.raises(ConfigError, match=r"adapter\.targets with adapter=none"):
        config(adapter={"name": "none", "targets": ["q_proj"]})
    with pytest.raises(ConfigError, match="the checkpoint's own targets hold"):
        config(adapter={"name": "lora", "targets": ["q_proj"], "checkpoint": "x"})


def written(folder, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.zeros(3, 5), "b": torch.ones(2)}, folder / name, metadata={"format": "pt"})
    return folder / name


def test_headers_are_read_as_safetensors_writes_them(tmp_path):
    header = read_header(written(tmp_path))
    assert {name: (x["dtype"], x["shape"]) for name, x in header.items()} == {"a": ("F32", [3, 5]), "b": ("F32", [2])}
    check_weights(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_a_file_that_broke_off_is_refused_before_any_job(tmp_path, kept):
    file = written(tmp_path / "shards", "model-1.safetensors")
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file.name}}))
    check_weights(tmp_path / "shards")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: cannot be read, it may be incomplete"):
        check_weights(tmp_path / "shards")
    with pytest.raises(CheckpointError, match="cannot be read"):
        inputs.check_inputs(config(model={"checkpoint": str(tmp_path / "shards")}))


def test_an_adapter_is_looked_at(tmp_path):
    file = written(tmp_path, "adapter_model.safetensors")
    for content, reason in (("{", "cannot be read"), ('{"peft_type": "IA3"}', "type IA3"), ("[]", "cannot be read")):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=reason):
            check_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    check_adapter(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="it may be incomplete"):
        check_adapter(tmp_path)


def test_what_the_defaults_need_is_installed_with_the_project():
    listed = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    for package in ("torch", "peft", "transformers", "hydra-core", "wandb"):
        assert re.search(rf"\b{package}[><=]", listed)


def commands():
    """Yield the arguments of every command of longstraw.run that README shows."""
    for line in (ROOT / "README.md").read_text().splitlines():
        for part in line.partition("   #")[0].split(" && "):
            words = shlex.split(part) if part.strip().startswith("python -m longstraw.run ") else []
            if words and "..." not in words and "hardware=mysite" not in words:
                yield words[3:]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_of_the_readme_is_one(words):
    if "--help" not in words:
        check(parse([word for word in words if word != "-m"], sweep="-m" in words))


def test_the_readme_has_commands():
    assert len(list(commands())) > 8


def test_the_laptop_sweep_is_small():
    """Eight jobs of at most 4Ki: minutes on two cores, each a second or two of computing and the start of a process."""
    text = (conf_dir() / "sweep" / "laptop.yaml").read_text()
    assert "context: 1Ki,4Ki" in text


def row(**values):
    return {"status": "ok", "step": 0, "advantage_abs_mean": 1.0, "reward_std": 0.5, "loss": -2.98e-8, **values}


def shown(folder, *rows):
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps({"config": {"algorithm": {"kl_coef": 0.0}}}))
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, line, *notes = table([folder]).splitlines()
    return line.split()[-1], notes


def test_a_loss_that_is_rounding_is_shown_as_0_and_explained(tmp_path):
    loss, notes = shown(tmp_path / "0", row())
    assert loss == "0"
    assert notes == ["loss 0: on policy each ratio is 1 and the advantages sum to 0; grad_norm is not 0"]
    assert shown(tmp_path / "1", row(loss=-3.1e-5)) == ("-3.1e-05", [])
    assert shown(tmp_path / "2", {"status": "ok", "step": 0, "loss": -2.98e-8}) == ("-2.98e-08", [])


def test_equal_rewards_are_said(tmp_path):
    equal = row(reward_std=0.0, advantage_abs_mean=0.0, loss=0.0)
    loss, notes = shown(tmp_path / "0", row(loss=0.5), {**equal, "step": 1})
    assert loss == "0"
    assert notes == ["job 0: equal rewards in 1 of 2 steps: no gradient in those"]


def test_one_job_s_progress_does_not_repeat_its_command(tmp_path):
    one = Job(0, ["model=qwen3_6_tiny", "hardware.ranks=4"], tmp_path / "0", config(), None)
    assert labels([one]) == ["job 0"]
    assert labels([]) == []
