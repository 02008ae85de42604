"""Rollouts that other trainers stored, read from samples that their own code wrote, and trained on.

``stored_rollouts/`` holds what verifiers 0.4.0 (``write_episode``), ART 0.5.18 (``serialize_trajectory_groups``,
``write_trajectory_groups_parquet``), verl 0.9.1 (``_write_generations``) and NeMo-RL of August 2026
(``log_batched_dict_as_jsonl``) wrote; TRL and ``datasets`` are installed and write theirs here.
"""

import json
import math
import pickle
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_loop import job, rows

from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.data import DataError, build_task, check_data
from longstraw.data.rollouts.conversation import encode_conversation
from longstraw.data.rollouts.task import FORMATS
from longstraw.data.tokenizer import ByteTokenizer
from longstraw.tracking.recorder import RunIdentity
from longstraw.training.loop import run_job

SAMPLES = Path(__file__).parent / "stored_rollouts"
LINE = {"group": "a", "prompt_ids": [1, 2, 3], "response_ids": [4, 5], "reward": 1.0, "logprobs": [-0.5, -1.5]}
NEXT = {"group": "a", "response_ids": [6], "reward": 0.0, "logprobs": [-0.25]}


def config(path, *, temperature=1.0, checkpoint=None, vocab_size=256, **data):
    group_size = data.pop("group_size", 2)
    return from_dict(
        {
            "model": to_dict(load_model_config("llama_tiny", vocab_size=vocab_size, num_hidden_layers=2)),
            "hardware": {"name": "cpu", "backend": "cpu"},
            "data": {"name": "rollouts", "path": str(path), "tokenizer": checkpoint and str(checkpoint), **data},
            "tracking": {"mode": "disabled"},
            "context": 200,
            "response_length": 100,
            "chunk": 64,
            "group_size": group_size,
            "temperature": temperature,
        }
    )


def task(path, **changes):
    return build_task(config(path, **changes))


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def text(ids):
    return bytes(ids.tolist()).decode()


class Marks(ByteTokenizer):
    """Bytes, a chat template whose turns byte 1 ends, and a newline behind each that nobody wrote."""

    def render(self, messages, tools, *, answer):
        parts = ["".join(tool["function"]["name"] for tool in tools or ())]
        parts += [f"<{m['role'][0]}>{m.get('content') or m['tool_calls']}\x01\n" for m in messages]
        return "".join(parts) + "<a>" * answer

    def special_ids(self):
        return [1]


@pytest.fixture
def chat(monkeypatch):
    monkeypatch.setattr("longstraw.data.load_tokenizer", lambda *_, **__: Marks())


# ---- each format


def test_token_lines_store_the_prompt_once(tmp_path):
    other = {**LINE, "group": "b", "loss_mask": [0, 1], "logprobs": [None, -1]}
    found = task(write(tmp_path / "x.jsonl", LINE, other, NEXT, {**NEXT, "group": "b"}))
    first, second = found.group(0), found.group(1)
    assert (first.id, first.prompt.tolist()) == ("a", [1, 2, 3])
    assert [r.tolist() for r in first.responses] == [[4, 5], [6]]
    assert [lp.tolist() for lp in first.old_logprobs] == [[-0.5, -1.5], [-0.25]]
    assert first.rewards == [1.0, 0.0]
    assert [m.tolist() for m in second.loss_masks] == [[False, True], [True]]
    assert found.group(2).id == "a"  # again from the top
    assert (found.tokenised, found.unscored) == (0, 0)


def test_text_lines_without_a_group_are_grouped_by_prompt_and_tokenised(tmp_path):
    lines = [
        {"prompt": p, "response": r, "reward": i} for i, (p, r) in enumerate([("p", "x"), ("q", "yz"), ("p", "w")])
    ]
    found = task(write(tmp_path / "x.jsonl", *lines, {**lines[1], "reward": 9}))
    assert [text(r) for r in found.group(0).responses] == ["x", "w"]
    assert found.group(1).rewards == [1.0, 9.0]
    assert (found.tokenised, found.unscored) == (2, 2)


def test_verl():
    found = task(SAMPLES / "3.jsonl")
    first, second = found.group(0), found.group(1)
    assert (text(first.prompt), [text(r) for r in first.responses], first.rewards) == ("2+3?", ["5", "six"], [1.0, 0.0])
    assert (text(second.prompt), second.rewards) == ("1+1? é", [1.0, 0.5])
    assert found.unscored == found.tokenised == 2


def test_nemo_rl():
    group = task(SAMPLES / "train_data_step1.jsonl").group(0)
    assert text(group.prompt) == "2+3?A:"
    assert [text(r) for r in group.responses] == ["call.T=5A:5.", "six."]  # without the padding
    assert text(group.responses[0][group.loss_masks[0]]) == "call.5."
    assert set(group.old_logprobs[0][group.loss_masks[0]].tolist()) == {-0.25}
    assert group.rewards == [1.0, 0.0]


def test_verifiers_branches_become_responses_and_what_they_share_is_trained_once():
    found = task(SAMPLES / "traces.jsonl", temperature=0.7, group_size=3)
    group = found.group(0)
    assert text(group.prompt) == "U2+3?A:"
    assert [text(r) for r in group.responses] == ["calc.T=5A:5.", "hm.T=5A:6.", "hm.T=9A:9!."]
    kept = [text(r[mask]) for r, mask in zip(group.responses, group.loss_masks, strict=True)]
    assert kept == ["calc.5.", "hm.6.", "9!."]
    assert group.old_logprobs[0][:5].tolist() == [-0.5, -0.5123, -0.5247, -0.537, -0.5494]
    assert math.isnan(group.old_logprobs[0][5])
    assert group.rewards == pytest.approx([1.1, 0.1, 0.1])
    assert found.description["responses_left_out"] == 0  # the judge is not trained, and no response


@pytest.mark.parametrize("name", ["art.jsonl", "art.parquet"])
def test_art(chat, name):
    found = task(SAMPLES / name)
    first, second = found.group(0), found.group(1)
    assert text(first.prompt) == "add<s>be brief\x01\n<u>2+3?\x01\n<a>"
    assert text(first.responses[1]) == "six\x01"
    kept = text(first.responses[0][first.loss_masks[0]])
    assert kept.endswith("\x01five\x01")
    assert "'name': 'add'" in kept
    assert text(first.responses[0][~first.loss_masks[0]]) == "\n<t>5\x01\n<a>"
    assert [text(r) for r in second.responses] == ["5\x01", "maybe 5\x01"]
    assert (first.rewards, second.rewards, found.unscored) == ([1.0, 0.0], [0.5, 0.25], 2)


def trl_files(monkeypatch, folder, prompts, completions, rewards):
    """Let TRL's own trainer log a step."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    monkeypatch.setattr("transformers.Trainer.log", lambda *_: None)
    monkeypatch.setattr(trainer_module, "is_rich_available", lambda: False)
    trainer = object.__new__(trainer_module.GRPOTrainer)
    trainer.model, trainer._metrics = SimpleNamespace(training=True), {"train": defaultdict(list)}
    trainer.accelerator, trainer.log_completions = SimpleNamespace(is_main_process=True), True
    trainer.args, trainer.state = SimpleNamespace(report_to=[], output_dir=str(folder)), SimpleNamespace(global_step=7)
    trainer._logs = {"prompt": prompts, "completion": completions, "rewards": rewards, "extra": {}, "images": None}
    trainer._logs["advantages"] = [0.0] * len(prompts)
    (folder / "completions").mkdir()
    trainer.log({})
    return folder / "completions"


def test_trl_text(tmp_path, monkeypatch):
    rewards = {"right": [1.0, 0.0], "short": [0.25, None]}
    folder = trl_files(monkeypatch, tmp_path, ["p", "p"], ["yes", "no"], rewards)
    with pytest.raises(DataError, match=r"completions_00007\.parquet:1: right, short may all be rewards"):
        task(folder)
    with pytest.raises(DataError, match="'wrong' is no column; there are step, prompt"):
        task(folder, reward_columns=["wrong"])
    group = task(folder, reward_columns=["right", "short"]).group(0)
    assert [text(r) for r in group.responses] == ["yes", "no"]
    assert group.rewards == [1.25, 0.0]


def test_trl_conversations(tmp_path, monkeypatch, chat):
    ask = [{"role": "user", "content": "2+3?"}]
    call = {"role": "assistant", "content": "add", "name": "x"}
    used = [call, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "five"}]
    folder = trl_files(monkeypatch, tmp_path, [ask] * 2, [used, [call]], {"right": [1.0, 0.0]})
    group = task(folder).group(0)
    assert text(group.prompt) == "<u>2+3?\x01\n<a>"
    assert text(group.responses[0][group.loss_masks[0]]) == "add\x01five\x01"


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_tables_of_the_datasets_library(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{**LINE, "group": g, "reward": r} for g in "ab" for r in (0.0, 1.0)])
    if kind == "parquet":
        table.to_parquet(tmp_path / "x.parquet")
    else:
        table.save_to_disk(tmp_path)
    found = task(tmp_path)
    assert [found.group(i).id for i in range(2)] == ["a", "b"]
    assert found.group(1).old_logprobs[0].tolist() == [-0.5, -1.5]
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="holds the splits train; name one"):
        task(tmp_path / "splits")


# ---- files and folders


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path):
    for step in (10, 9, 1):
        write(tmp_path / f"{step}.jsonl", {**LINE, "group": str(step)}, {**NEXT, "group": str(step)})
    write(tmp_path / "val_data_step1.jsonl", {"content": "none of the rollouts"})
    found = task(tmp_path)
    assert [found.group(i).id for i in range(3)] == ["1", "9", "10"]
    assert task(f"{tmp_path}/1*.jsonl").description["prompts"] == 2


def test_equal_prompts_of_two_files_are_two_groups(tmp_path):
    for step in (1, 2):
        shutil.copy(SAMPLES / "3.jsonl", tmp_path / f"{step}.jsonl")
    assert task(tmp_path).description["prompts"] == 4


def test_of_prime_rl_only_rollouts_that_were_trained_on_are_read(tmp_path):
    for where in ("step_0/train/all", "step_0/train/effective", "step_0/eval/all", "step_1/train/all"):
        (tmp_path / where).mkdir(parents=True)
        shutil.copy(SAMPLES / "traces.jsonl", tmp_path / where)
    found = task(tmp_path, temperature=0.7)
    assert (found.description["files"], found.description["prompts"]) == (2, 2)


@pytest.mark.parametrize("name", ["rollout_3.pt", "x.pkl", "renamed.jsonl", "alone"])
def test_pickles_are_refused_with_the_reason(tmp_path, name):
    if name.endswith(".pt"):
        torch.save({"samples": []}, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(pickle.dumps({"samples": []}))
    with pytest.raises(DataError, match=f"{name} is a pickle, which can run any code when it is opened"):
        task(tmp_path / name)
    if not name.startswith(("renamed", "alone")):
        with pytest.raises(DataError, match="is a pickle"):
            task(tmp_path)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([LINE, "{"], "x.jsonl:2: no JSON"),
        ([LINE], "x.jsonl:1: 1 responses, and group_size=2"),
        ([LINE, {**NEXT, "group": "b"}], "x.jsonl:2: group 'b' has no prompt on an earlier line"),
        ([LINE, {**NEXT, "response_ids": [999]}], r"x.jsonl:2: response.tokens\[0\] is 999, must be below"),
        ([LINE, {**NEXT, "response_ids": [1] * 101}], "x.jsonl:2: response has 101 tokens, and response_length=100"),
        ([LINE, {**NEXT, "logprobs": None}], "x.jsonl:1: response has logprobs and .*x.jsonl:2: response has none"),
        ([LINE, {**NEXT, "logprobs": [0.5]}], "x.jsonl:2: response.logprobs has 0.5; a log-probability is at most 0"),
        ([LINE, {**NEXT, "reward": "good"}], "x.jsonl:2: response.reward is text"),
        ([LINE, {**NEXT, "loss_mask": [2]}], r"x.jsonl:2: response.loss_mask\[0\] is 2"),
        ([LINE, {"group": "a", "response_ids": [1]}], "x.jsonl:2: no reward"),
        ([LINE, {**NEXT, "temperature": 0.7}], r"x.jsonl:1: drawn at temperature 0.7, and this run's is 1.0"),
        ([{**LINE, "prompt_ids": [1] * 150}, NEXT], "x.jsonl:1: prompt of 150 tokens"),
        ([LINE, {"response_ids": [1], "reward": 1}], "x.jsonl:2: neither group nor prompt_ids"),
        ([LINE, {**NEXT, "loss_masks": [1]}], "x.jsonl:2: unknown key 'loss_masks'; did you mean 'loss_mask'"),
        ([{"hello": 1}], "x.jsonl:1: a row of hello is of no known format.*verl: input, output, score"),
        ([{"prompt": "a", "responses": []}], "this one is for data=jsonl"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path, lines, reason):
    path = tmp_path / "x.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(DataError, match=reason):
        task(path)


def test_broken_rows_are_skipped_where_asked(tmp_path):
    lines = [LINE, NEXT, {**LINE, "group": "b", "response_ids": "none"}, {**LINE, "group": "c"}]
    path = write(tmp_path / "x.jsonl", *lines)
    with path.open("a") as file:
        file.write("{broken\n")
    found = task(path, on_error="skip")
    assert found.description["prompts"] == 1
    assert len(found.description["skipped"]) == 3


def mutations(value, at=()):
    """Yield the same rows with each value replaced by one of another kind."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        for other in (None, 3, "x", [], {}, [None], -1.5):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = other
            yield copy
        for changed in mutations(inner):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = changed
            yield copy


@pytest.mark.parametrize(
    ("name", "sample"),
    [("verl", "3.jsonl"), ("nemo_rl", "train_data_step1.jsonl"), ("verifiers", "traces.jsonl"), ("art", "art.jsonl")],
)
def test_a_row_with_any_wrong_value_is_read_or_refused_as_data(name, sample):
    """No other exception: that would end a run without file and line."""
    refused = 0
    row = json.loads((SAMPLES / sample).read_text().splitlines()[0])
    for changed in mutations(row):
        try:
            for stored in FORMATS[name].read(changed, []):
                stored.prompt_key()
        except DataError:
            refused += 1
    assert refused > 10 * (name != "verl")


# ---- several turns


def test_a_conversation_is_what_the_template_renders_whole():
    messages = [
        {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "x"), ("tool", "t"), ("assistant", "y"))
    ]
    written = [False, True, False, True]
    prompt, response, mask = encode_conversation(Marks(), messages, written)
    whole = Marks().render(messages, None, answer=False)
    assert bytes(prompt + response).decode() == whole.removesuffix("\n")
    assert bytes(token for token, own in zip(response, mask, strict=True) if own).decode() == "x\x01y\x01"


def test_a_template_that_writes_earlier_turns_anew_is_refused():
    class Forgetful(Marks):
        def render(self, messages, tools, *, answer):
            return super().render(messages[-2:], tools, answer=answer)

    messages = [{"role": r, "content": r} for r in ("user", "assistant", "tool", "assistant")]
    with pytest.raises(DataError, match=r"messages\[1\]: the chat template writes it otherwise"):
        encode_conversation(Forgetful(), messages, [False, True, False, True])


# ---- trained


@pytest.mark.parametrize("name", ["traces.jsonl", "train_data_step1.jsonl", "3.jsonl", "art.jsonl"])
def test_each_format_is_trained(tmp_path, chat, name):
    data = {"name": "rollouts", "path": str(SAMPLES / name)}
    temperature = 0.7 if name == "traces.jsonl" else 1.0
    run_job(job(data=data, context=200, response_length=100, temperature=temperature), tmp_path, RunIdentity("x"))
    (row,) = rows(tmp_path)
    assert (row["status"], row["data"]) == ("ok", "rollouts")
    assert row["grad_norm"] > 0
    stored_as_text = name in ("3.jsonl", "art.jsonl")
    assert row["retokenized"] == stored_as_text
    assert row["old_logprobs"] == ("score" if stored_as_text else "data")
    assert row["scored_positions"] == (row["replayed_positions"] if stored_as_text else 0)
    assert (row["sampler_drift"] is None) == stored_as_text


def test_a_missing_file_is_found_before_the_job(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not there; give a file or folder of stored rollouts"):
        check_data(config(tmp_path / "nothing"))
    write(tmp_path / "x.jsonl", {"hello": 1})
    with pytest.raises(DataError, match="no known format"):
        check_data(config(tmp_path))
