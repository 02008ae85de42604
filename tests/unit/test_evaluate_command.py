"""``python -m longstraw.evaluate``: what a run had trained and saved is evaluated as the run itself did."""

import json

import pytest
from test_evaluation import LOOKUP, rewarded  # noqa: F401  (a fixture)
from test_rollout import sampled_job

from longstraw import evaluate
from longstraw.config import to_dict, use_conf_dirs
from longstraw.tracking.evaluations import KEYS
from longstraw.tracking.recorder import RunIdentity
from longstraw.tracking.run_folder import read_evaluations
from longstraw.training.loop import run_job

UNTRAINED = ["model=llama_tiny", "model.num_hidden_layers=2", "data=lookup", "response_length=8"]


def finished(folder, **changes):
    config = sampled_job(**{**LOOKUP, "save": True, **changes})
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps({"config": to_dict(config)}))
    run_job(config, folder, RunIdentity("x"))
    return folder, {row["step"]: row for row in read_evaluations(folder)}


@pytest.fixture(scope="module")
def run(rewarded, tmp_path_factory):  # noqa: F811
    """Return the folder of a finished run that trained a whole model, and its evaluations by step."""
    return finished(tmp_path_factory.mktemp("runs") / "0")


def evaluated(tmp_path, *arguments):
    assert evaluate.main([*map(str, arguments), f"out={tmp_path}"]) == 0
    return read_evaluations(tmp_path)[-1]


def texts(row):
    return [sample["response"] for sample in row["samples"]]


def test_a_runs_checkpoint_gives_the_runs_own_answers(run, tmp_path, capsys):
    folder, own = run
    row = evaluated(tmp_path, f"checkpoint={folder / 'checkpoints' / 'step-00000002'}")
    assert list(row) == list(KEYS)
    assert (row["answers"], texts(row)) == (own[2]["answers"], texts(own[2]))
    assert texts(row) != texts(own[0])  # of the weights that were not trained
    assert (row["step"], row["success"], row["weights"][-8:]) == (2, own[2]["success"], "00000002")
    printed = capsys.readouterr().out
    assert f"│ all              │   {row['success']:.3f} │" in printed
    assert f"95 % interval ({row['interval']})" in printed.replace("W", "w")
    assert str(tmp_path / "evaluations.jsonl") in printed


def test_the_model_a_run_saved_gives_the_answers_of_its_last_evaluation(run, tmp_path):
    folder, own = run
    row = evaluated(tmp_path, f"checkpoint={folder / 'model'}")
    assert (row["answers"], texts(row), row["step"]) == (own[3]["answers"], texts(own[3]), None)


def test_an_adapter_is_evaluated_on_its_base(tmp_path):
    pytest.importorskip("peft")
    folder, own = finished(tmp_path / "0", adapter={"name": "lora", "rank": 2}, optimizer={"lr": 1e-1})
    row = evaluated(tmp_path / "out", f"checkpoint={folder / 'adapter'}")
    assert (row["answers"], texts(row), row["adapter"]) == (own[3]["answers"], texts(own[3]), "lora")
    assert texts(row) != texts(own[0])


def test_keys_change_what_is_evaluated_and_rows_are_added(run, tmp_path):
    folder, _ = run
    where = f"checkpoint={folder / 'checkpoints' / 'step-00000002'}"
    changed = ["evaluate.examples=2", "evaluate.contexts=[420,600]", "data=multi", "data.needles=1"]
    row = evaluated(tmp_path, where, *changed)
    assert (row["data"], row["examples"], list(row["by_length"])) == ("multi", 4, ["396", "576"])
    evaluated(tmp_path, where, "evaluate.examples=2", "evaluate.temperature=0.5")
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").open()]
    assert [line["data"] for line in lines] == ["multi", "lookup"]
    assert lines[0]["run_id"] != lines[1]["run_id"]


def test_an_untrained_model_has_taken_no_step(tmp_path):
    row = evaluated(tmp_path, *UNTRAINED, "context=420", "evaluate.examples=2")
    assert (row["step"], row["weights"], row["model"], row["examples"]) == (0, None, "llama_tiny", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["checkpoint={run}"], "a run's folder; give "),
        (["checkpoint={run}/nowhere"], "config.json: not there"),
        (["checkpoint={run}/checkpoints/step-00000002", "data.key=3"], "did you mean data.keys"),
        (UNTRAINED, "context=4Ki"),
        ([*UNTRAINED, "context=420", "data=needle"], "no held-out prompts"),
        ([*UNTRAINED, "context=420", "hardware=cpu", "hardware.ranks=2"], "one process"),
        ([*UNTRAINED, "context=100"], "tokens short of data=lookup"),
        ([*UNTRAINED, "context=420", "contexts=3"], "did you mean evaluate.contexts"),
    ],
)
def test_a_mistake_is_one_line(run, arguments, said, capsys):
    assert evaluate.main([argument.format(run=run[0]) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_torn_checkpoint_is_refused(run, tmp_path, capsys):
    folder, _ = run
    place = folder / "checkpoints" / "step-00000002"
    copy = tmp_path / place.name
    copy.mkdir()
    for path in place.iterdir():
        (copy / path.name).write_bytes(path.read_bytes()[: -10 if path.suffix == ".distcp" else None])
    assert evaluate.main([f"checkpoint={copy}"]) == 2
    assert "is broken" in capsys.readouterr().err


def test_a_users_own_option_files_are_found(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [llama_tiny]\nname: mine\nnum_hidden_layers: 2\n")
    arguments = ["model=mine", "data=lookup", "response_length=8", "context=420", "evaluate.examples=2"]
    row = evaluated(tmp_path, f"--config-dir={tmp_path}", *arguments)
    use_conf_dirs([])
    assert row["model"] == "mine"


def test_help_is_the_page(capsys):
    assert evaluate.main(["--help"]) == 0
    assert "evaluate.contexts" in capsys.readouterr().out
