"""The user's own prompts, one a line: what is read, cut, skipped and refused, with file, line and reason."""

import gzip
import json
import math
import re

import pytest
import torch

from longstraw.config import HardwareConfig, JsonlConfig, RunConfig, load_model_config
from longstraw.data import DataError, build_task

GOOD = {"id": "a", "prompt": "hello", "responses": [{"text": "yes", "reward": 1.0}, {"text": "n", "reward": 0}]}


def make_task(path, *, context=40, response_length=10, group_size=2, steps=1, refresh_every=1, checkpoint=None, **data):
    config = RunConfig(
        model=load_model_config("qwen3_6_tiny", checkpoint=checkpoint),
        hardware=HardwareConfig(name="cpu", backend="cpu"),
        data=JsonlConfig(path=str(path), **data),
        context=context,
        response_length=response_length,
        chunk=64,
        group_size=group_size,
        steps=steps,
        refresh_every=refresh_every,
    )
    return build_task(config)


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_raw(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return path


def line(**changes):
    return {**GOOD, **changes}


def responses(*changes):
    """Two responses of token ids 1, 2 and 3, with changes to the second."""
    second = {"tokens": [3], "reward": 0.0}
    for change in changes:
        second.update(change)
    second = {key: value for key, value in second.items() if value is not ...}
    return line(responses=[{"tokens": [1, 2], "reward": 1.0}, second])


def text(ids):
    return bytes(ids.tolist()).decode()


# ---- what works


def test_text_becomes_bytes(tmp_path):
    task = make_task(write(tmp_path, line(prompt="grüß", responses=[*GOOD["responses"], {"text": "x", "reward": 9}])))
    group = task.group(0)
    assert text(group.prompt) == "grüß"
    assert [text(response) for response in group.responses] == ["yes", "n"]
    assert group.rewards == [1.0, 0.0]
    assert (group.id, group.old_logprobs, group.loss_masks) == ("a", None, None)
    assert task.description["responses_left_out"] == 1  # of three, group_size=2 takes two


def test_token_ids_logprobs_and_masks(tmp_path):
    answers = [
        {"tokens": [0, 255, 7], "reward": -1.5, "logprobs": [-0.5, None, -2], "loss_mask": [1, 0, True]},
        {"tokens": [9], "reward": 2, "logprobs": [0.0]},
    ]
    group = make_task(write(tmp_path, {"prompt": [1, 2, 255], "responses": answers})).group(0)
    assert group.prompt.tolist() == [1, 2, 255]
    assert [r.tolist() for r in group.responses] == [[0, 255, 7], [9]]
    assert [m.tolist() for m in group.loss_masks] == [[True, False, True], [True]]
    assert group.old_logprobs[0][[0, 2]].tolist() == [-0.5, -2.0]
    assert math.isnan(group.old_logprobs[0][1])
    assert group.rewards == [-1.5, 2.0]
    assert group.id == "line-1"


def test_odd_but_good_groups(tmp_path):
    one = [{"tokens": [1], "reward": 1}, {"tokens": [1], "reward": 1}]
    mask = [{"text": "yes", "reward": 1, "loss_mask": [0, 0, 0]}, {"text": "n", "reward": 0, "loss_mask": None}]
    lines = [
        line(id=0, responses=one),
        line(id="0x", prompt="p", responses=[{"text": "y", "reward": True}, {"text": "n", "reward": False}]),
        line(id="m", responses=mask, comment="keys of the user's own are none of our business", source={"n": 1}),
    ]
    task = make_task(write(tmp_path, *lines))
    assert task.group(0).rewards == [1.0, 1.0]
    assert task.group(1).rewards == [1.0, 0.0]
    assert task.group(1).prompt_positions == 1
    assert [m.tolist() for m in task.group(2).loss_masks] == [[False] * 3, [True]]
    assert [task.group(step).id for step in range(3)] == ["0", "0x", "m"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["", "newline", "blank"])
def test_ways_to_write_a_text_file(tmp_path, newline, bom, end):
    rows = [json.dumps(line(id=str(i), prompt="é" * (i + 1)), ensure_ascii=False) for i in range(3)]
    rows.insert(1, "   ")
    rows.insert(2, "")
    body = bom + newline.join(rows) + {"": "", "newline": newline, "blank": newline * 3}[end]
    task = make_task(write_raw(tmp_path, body.encode()))
    assert task.description["prompts"] == 3
    for step in (2, 0, 1, 5):
        assert task.group(step).id == str(step % 3)
        assert text(task.group(step).prompt) == "é" * (step % 3 + 1)


def test_line_numbers_count_blank_lines(tmp_path):
    body = "\ufeff" + json.dumps(GOOD) + "\n\n\n{]\n"
    with pytest.raises(DataError, match=r"data\.jsonl:4: no JSON"):
        make_task(write_raw(tmp_path, body.encode()))


def test_steps_that_share_a_retained_prompt_get_one_group(tmp_path):
    task = make_task(write(tmp_path, line(), line(id="b")), refresh_every=3, steps=9)
    assert [task.group(step).id for step in range(9)] == list("aaabbbaaa")
    assert task.group(0) is task.group(1)


# ---- truncation


@pytest.mark.parametrize(("truncate", "kept"), [("left", "56789"), ("right", "01234")])
def test_truncation_cuts_the_named_side(tmp_path, truncate, kept):
    path = write(tmp_path, line(prompt="0123456789"), line(id="short", prompt="abc"))
    task = make_task(path, context=15, truncate=truncate)
    assert text(task.group(0).prompt) == kept
    assert text(task.group(1).prompt) == "abc"
    assert task.description["truncated_prompts"] == 1


def test_a_prompt_that_just_fits_is_taken_and_a_longer_one_refused(tmp_path):
    assert make_task(write(tmp_path, line(prompt="x" * 30))).group(0).prompt_positions == 30
    with pytest.raises(DataError, match=r":1: prompt of 31 tokens, .* leaves 30; .*data.truncate=left\|right"):
        make_task(write(tmp_path, line(prompt="x" * 31)))


def test_a_long_response_is_refused_whatever_truncate_says(tmp_path):
    path = write(tmp_path, line(responses=[GOOD["responses"][0], {"text": "x" * 11, "reward": 0}]))
    for truncate in (None, "left"):
        with pytest.raises(DataError, match=r"responses\[1\] has 11 tokens, and response_length=10"):
            make_task(path, truncate=truncate)


# ---- what is refused, with file, line and reason

BAD = [
    ([1, 2], "the line holds a list, must be one object"),
    ("text", r'the line holds text \("text"\)'),
    (None, "the line holds null"),
    ({"responses": GOOD["responses"]}, "no prompt"),
    (line(prompt=""), "prompt is empty"),
    (line(prompt=[]), "prompt is empty"),
    (line(prompt=None), "prompt is null, must be text, a list of token ids or a list of chat messages"),
    (line(prompt=7), r"prompt is a number \(7\), must be"),
    (line(prompt={"role": "user", "content": "x"}), "prompt is an object, must be"),
    (line(prompt=[1, "2"]), r'prompt\[1\] is text \("2"\), must be a token id'),
    (line(prompt=[1, 2.0]), r"prompt\[1\] is a number \(2.0\), must be a token id"),
    (line(prompt=[True, 1]), r"prompt\[0\] is a boolean \(true\), must be a token id"),
    (line(prompt=[1, None]), r"prompt\[1\] is null"),
    (line(prompt=[[1, 2]]), r"prompt\[0\] is a list"),
    (line(prompt=[1, 256]), r"prompt\[1\] is 256, must be below the vocabulary of 256 ids"),
    (line(prompt=[-1]), r"prompt\[0\] is -1"),
    (line(prompt=[10**30]), r"prompt\[0\] is 10{30}"),
    (line(prompt="a\ud800"), "prompt has '.ud800' at character 2, which is no character"),
    (line(id="\ud800"), "id has '.ud800'"),
    (responses({"tokens": ..., "text": "\ud800"}), r"responses\[1\].text has '.ud800'"),
    (line(prompt=[{"role": "user", "content": "hi"}]), "chat messages need a tokenizer with a chat template"),
    (line(prompt=[{"role": "user", "content": "hi"}, 5]), r"prompt\[1\] is no chat message"),
    (line(prompt=[{"content": "hi"}]), r"prompt\[0\] is no chat message"),
    *(
        (
            line(prompt=[{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]),
            rf"content\[1\] is {words}",
        )
        for part, words in (
            ({"type": "image", "image": "a.png"}, "a part of type 'image' without text"),
            ({"image": "a.png"}, "a part of type 'image' without text"),
            ({"type": "video_url", "video_url": {"url": "b"}}, "a part of type 'video_url' without text"),
            ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio' without text"),
            ("hi", "text"),
        )
    ),
    (line(prompt=[{"role": "user"}]), r"prompt\[0\] has no content"),
    (line(prompt=[{"role": "assistant", "content": "hi"}]), "the last message of the prompt is the assistant's"),
    (line(id=None), "id is null"),
    (line(id=[1]), "id is a list"),
    (line(id=True), "id is a boolean"),
    ({"prompt": "x"}, "no responses"),
    ({"prompt": "x", "response": []}, "unknown key 'response'; did you mean 'responses'"),
    (line(responses={}), "responses is an object, must be a list"),
    (line(responses=[]), "0 responses, and group_size=2"),
    (line(responses=GOOD["responses"][:1]), "1 responses, and group_size=2"),
    (line(responses=["yes", "no"]), r'responses\[0\] is text \("yes"\), must be an object'),
    (responses({"tokens": ...}), r"responses\[1\] has neither text nor tokens"),
    (responses({"text": "x"}), r"responses\[1\] has both text and tokens"),
    (responses({"tokens": []}), r"responses\[1\].tokens is empty"),
    (responses({"tokens": "abc"}), r"responses\[1\].tokens is text"),
    (responses({"tokens": [300]}), r"responses\[1\].tokens\[0\] is 300, must be below"),
    (responses({"tokens": ..., "text": ""}), r"responses\[1\].text is empty"),
    (responses({"tokens": ..., "text": None}), r"responses\[1\].text is null"),
    (responses({"tokens": ..., "text": ["x"]}), r"responses\[1\].text is a list"),
    (responses({"reward": ...}), r"responses\[1\] has no reward"),
    (responses({"reward": ..., "rewards": 1}), r"responses\[1\]: unknown key 'rewards'; did you mean 'reward'"),
    (responses({"reward": None}), r"responses\[1\].reward is null, must be a number"),
    (responses({"reward": "1"}), r'responses\[1\].reward is text \("1"\), must be a number'),
    (responses({"reward": [1]}), r"responses\[1\].reward is a list"),
    (responses({"reward": math.nan}), r"responses\[1\].reward is nan, must be finite"),
    (responses({"reward": -math.inf}), r"responses\[1\].reward is -inf, must be finite"),
    (responses({"reward": 10**400}), r"responses\[1\].reward is inf, must be finite"),
    (responses({"logprobs": [-1.0]}), r"responses\[1\] has logprobs and responses\[0\] has none"),
    (responses({"loss_mask": [1, 1]}), r"responses\[1\].loss_mask has 2 values for 1 tokens"),
    (responses({"loss_mask": [2]}), r"responses\[1\].loss_mask\[0\] is 2, must be 0 or 1"),
    (responses({"loss_mask": [1.0]}), r"responses\[1\].loss_mask\[0\] is 1.0, must be 0 or 1"),
    (responses({"loss_mask": ["1"]}), r"responses\[1\].loss_mask\[0\] is '1'"),
    (responses({"loss_mask": 1}), r"responses\[1\].loss_mask is a number"),
    (responses({"loss_masks": [1]}), "unknown key 'loss_masks'; did you mean 'loss_mask'"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason[:50] for _, reason in BAD])
def test_a_bad_line_stops_with_file_line_and_reason_or_is_skipped(tmp_path, bad, reason):
    path = write(tmp_path, GOOD, bad, line(id="c"))
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}:2: .*{reason}"):
        make_task(path)
    task = make_task(path, on_error="skip")
    assert [task.group(step).id for step in range(3)] == ["a", "c", "a"]
    (skipped,) = task.description["skipped"]
    assert skipped["line"] == 2
    assert re.search(reason, skipped["reason"])
    assert task.description["skipped_lines"] == 1


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([-1.0, -1.0], r"responses\[1\].logprobs has 2 values for 1 tokens"),
        ([], r"logprobs has 0 values for 1 tokens"),
        (-1.0, "logprobs is a number"),
        (["-1"], r"responses\[1\].logprobs\[0\] is text"),
        ([False], r"responses\[1\].logprobs\[0\] is a boolean"),
        ([0.7], "has 0.7; a log-probability is at most 0, are these probabilities"),
        ([math.nan], "old_logprobs of response 1: nan at token 0, must be finite"),
        ([None], "old_logprobs of response 1: nan at token 0, must be finite"),
        ([-math.inf], "old_logprobs of response 1: -inf at token 0, must be finite"),
        ([-(10**400)], "old_logprobs of response 1"),
    ],
)
def test_bad_logprobs(tmp_path, logprobs, reason):
    bad = responses({"logprobs": logprobs})
    bad["responses"][0]["logprobs"] = [-1.0, -0.5]
    with pytest.raises(DataError, match=rf":1: .*{reason}"):
        make_task(write(tmp_path, bad))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "x", "responses": [{"te', r":2: no JSON: Unterminated string.*; the line seems cut off"),
        (b'{"prompt": "x", "responses": [', r":2: no JSON: Expecting value at character 31; the line seems cut off"),
        (b"{'prompt': 1}", ":2: no JSON: Expecting property name.* at character 2"),
        (b'{"prompt": "x"} {"prompt": "y"}', ":2: no JSON: Extra data at character 17"),
        (b'{"prompt": "\xff"}', ":2: no UTF-8: invalid start byte at byte 13 of the line"),
        (b'{"prompt": ' + b"[" * 200_000, ":2: no JSON that can be read"),
        (b'{"prompt": [' + b"1" * 5000 + b"]}", ":2: no JSON that can be read: Exceeds the limit"),
        (b"\x00\x00", ":2: no JSON"),
    ],
)
def test_a_broken_last_line(tmp_path, content, reason):
    path = write_raw(tmp_path, json.dumps(GOOD).encode() + b"\n" + content)
    with pytest.raises(DataError, match=reason):
        make_task(path)
    assert make_task(path, on_error="skip").description["prompts"] == 1


def test_the_same_id_twice(tmp_path):
    path = write(tmp_path, line(id=7), line(id="b"), line(id="7"))
    with pytest.raises(DataError, match=r":3: id '7' is that of line 1 too"):
        make_task(path)
    assert make_task(path, on_error="skip").description["prompts"] == 2


def test_a_skipped_line_does_not_take_its_id(tmp_path):
    path = write(tmp_path, line(prompt=""), line())
    assert make_task(path, on_error="skip").description["prompts"] == 1


# ---- files that are none


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path, content):
    with pytest.raises(DataError, match="no usable line; the file is empty"):
        make_task(write_raw(tmp_path, content))


def test_a_file_of_which_nothing_is_left(tmp_path):
    with pytest.raises(DataError, match="no usable line; the first of 2 skipped: line 1: prompt is empty"):
        make_task(write(tmp_path, line(prompt=""), line(prompt="")), on_error="skip")


def test_packed_files_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="is packed with gzip, which is not read; unpack it first"):
        make_task(write_raw(tmp_path, gzip.compress(json.dumps(GOOD).encode())))


def test_utf16_is_refused(tmp_path):
    with pytest.raises(DataError, match=":1: no UTF-8"):
        make_task(write_raw(tmp_path, json.dumps(GOOD).encode("utf-16")))


def test_ids_that_images_would_replace_are_refused(tmp_path):
    """By the key of config.json that names them; in responses and text too."""
    (tmp_path / "config.json").write_text(
        json.dumps({"image_token_id": 50, "vision_start_token_id": 51, "eos_token_id": 3})
    )
    with pytest.raises(DataError, match=r"prompt\[2\] is 50, the image_token_id of the model's config.json"):
        make_task(write(tmp_path, line(prompt=[1, 3, 50, 2])), checkpoint=str(tmp_path))
    marked = {"tokens": [7, 51], "reward": 0}
    with pytest.raises(DataError, match=r"responses\[0\].tokens\[1\] is 51, the vision_start_token_id"):
        make_task(write(tmp_path, line(responses=[marked, marked])), checkpoint=str(tmp_path))
    with pytest.raises(DataError, match=r"prompt\[1\] is 50"):
        make_task(write(tmp_path, line(prompt="a2")), checkpoint=str(tmp_path))
    make_task(write(tmp_path, line(prompt=[1, 3, 49, 2])), checkpoint=str(tmp_path))
    make_task(write(tmp_path, line(prompt=[1, 3, 50, 2])))


def test_tools_are_for_a_chat(tmp_path):
    with pytest.raises(DataError, match="tools are for a prompt of chat messages"):
        make_task(write(tmp_path, {**GOOD, "tools": [{"type": "function"}]}))


@pytest.mark.parametrize(("name", "what"), [("absent.jsonl", "not there"), (".", "a folder")])
def test_no_file(tmp_path, name, what):
    with pytest.raises(FileNotFoundError, match=f"is {what}; give a file with one JSON object a line"):
        make_task(tmp_path / name)


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path):
    path = write(tmp_path, line(), line(id="b"))
    task = make_task(path)
    path.write_text("{}\n")
    with pytest.raises(DataError, match=r":2: .*; the file has changed since the run began"):
        task.group(1)


# ---- size


def test_many_skipped_lines_are_counted_and_the_first_listed(tmp_path):
    task = make_task(write(tmp_path, GOOD, *[{"prompt": ""}] * 300), on_error="skip")
    assert task.description["skipped_lines"] == 300
    assert [entry["line"] for entry in task.description["skipped"]] == list(range(2, 102))


def test_lines_are_found_by_their_place(tmp_path):
    lines = [line(id=i, prompt="é\u2028" * (i % 7 + 1) + str(i)) for i in range(500)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in lines), encoding="utf-8")
    task = make_task(path, context=100)
    for step in (499, 0, 250, 251, 999):
        assert text(task.group(step).prompt) == lines[step % 500]["prompt"]


def test_a_long_prompt(tmp_path):
    ids = [i % 256 for i in range(2**20)]
    group = make_task(write(tmp_path, line(prompt=ids)), context=2**20 + 10).group(0)
    assert torch.equal(group.prompt, torch.tensor(ids))
