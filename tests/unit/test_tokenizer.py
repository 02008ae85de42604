"""Tokenizers and chat templates of checkpoints, and bytes where there is none."""

import json

import numpy as np
import pytest

from longstraw.config import HardwareConfig, JsonlConfig, NeedleConfig, RunConfig, load_model_config
from longstraw.data import DataError, build_task
from longstraw.data.tokenizer import ByteTokenizer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE tokenizer with merges and special tokens, saved as a checkpoint has it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|user|>", "<|assistant|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(["The magic number of the import self return number is 12 34 56."] * 50, trainer)
    first = ("<|user|>", inner.token_to_id("<|user|>"))  # a token that many tokenizers put before any text
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<|user|> $A", special_tokens=[first])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE, bos_token="<|user|>")
    path = tmp_path_factory.mktemp("checkpoint")
    wrapped.save_pretrained(path)
    return path


def make_config(data, *, checkpoint=None, vocab_size=400, **sizes):
    return RunConfig(
        model=load_model_config("qwen3_6_tiny", vocab_size=vocab_size, checkpoint=checkpoint and str(checkpoint)),
        hardware=HardwareConfig(name="cpu", backend="cpu"),
        data=data,
        **{"context": 600, "response_length": 60, "chunk": 64, "group_size": 3} | sizes,
    )


def test_bytes_there_and_back():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("aé🌾")
    assert ids.tolist() == list("aé🌾".encode())
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == "aé🌾"
    assert tokenizer.decode(np.array([97, 195])) == "a\ufffd"
    assert tokenizer.decode(np.array([256, 98, 10**6])) == "\ufffdb\ufffd"


def test_the_tokenizer_of_a_checkpoint(folder):
    tokenizer = load_tokenizer(None, checkpoint=str(folder), vocab_size=400)
    ids = tokenizer.encode("The magic number é🌾 <|user|>")
    assert len(ids) < len("The magic number é🌾 <|user|>".encode())
    assert tokenizer.decode(ids) == "The magic number é🌾 <|user|>"
    assert tokenizer.encode("").tolist() == []
    chat = tokenizer.encode_chat([{"role": "user", "content": "number"}])
    assert chat.tolist() == tokenizer.encode("<|user|>number<|assistant|>").tolist()
    assert (chat[0], chat[-1]) == (0, 1)  # each mark one token


def test_tools_reach_the_template(folder):
    tokenizer = load_tokenizer(None, checkpoint=str(folder), vocab_size=400)
    tokenizer._tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool['name'] }};{% endfor %}" + TEMPLATE
    messages = [{"role": "user", "content": "number"}]
    with_tools = tokenizer.encode_chat(messages, [{"name": "magic"}])
    assert tokenizer.decode(with_tools) == "magic;" + tokenizer.decode(tokenizer.encode_chat(messages))


def test_a_template_that_refuses_says_why(folder):
    tokenizer = load_tokenizer(None, checkpoint=str(folder), vocab_size=400)
    with pytest.raises(DataError, match="refuses the messages: no system here"):
        tokenizer.encode_chat([{"role": "system", "content": "x"}])
    with pytest.raises(DataError, match=r"the conversation has '.ud800' at character 10"):
        tokenizer.encode_chat([{"role": "user", "content": "x\ud800"}])


def test_a_tokenizer_without_a_template_says_so(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    with pytest.raises(DataError, match="has no chat template; give the prompt as text or token ids"):
        load_tokenizer(str(tmp_path), checkpoint=None, vocab_size=400).encode_chat([{"role": "user", "content": "x"}])


def test_which_tokenizer_is_taken(folder, tmp_path):
    assert load_tokenizer(None, checkpoint=None, vocab_size=1000).name == "bytes"
    assert load_tokenizer(None, checkpoint=str(tmp_path), vocab_size=256).name == "bytes"
    assert load_tokenizer(str(folder), checkpoint=str(tmp_path), vocab_size=400).name == str(folder)
    with pytest.raises(DataError, match=r"no tokenizer there, which would be one of the files tokenizer\.json"):
        load_tokenizer(None, checkpoint=str(tmp_path), vocab_size=400)
    with pytest.raises(DataError, match="no tokenizer there"):
        load_tokenizer(str(tmp_path), checkpoint=None, vocab_size=256)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_tokenizer("some/model-on-a-hub", checkpoint=None, vocab_size=256)
    with pytest.raises(DataError, match=r"token ids up to \d+, and the model has a vocabulary of 260"):
        load_tokenizer(None, checkpoint=str(folder), vocab_size=260)
    with pytest.raises(DataError, match="bytes as tokens need 256"):
        load_tokenizer(None, checkpoint=None, vocab_size=255)


def test_a_broken_tokenizer_names_its_folder(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=f"{tmp_path}: transformers cannot read the tokenizer"):
        load_tokenizer(str(tmp_path), checkpoint=None, vocab_size=400)


def test_code_that_comes_with_a_checkpoint_is_not_run(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(DataError, match="transformers cannot read the tokenizer"):
        load_tokenizer(str(tmp_path), checkpoint=None, vocab_size=400)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ragged", [True, False])
def test_needle_in_tokens_of_a_checkpoint(folder, ragged):
    task = build_task(make_config(NeedleConfig(ragged=ragged), checkpoint=folder))
    tokenizer = load_tokenizer(None, checkpoint=str(folder), vocab_size=400)
    for step in range(3):
        group = task.group(step)
        assert group.prompt_positions == 540
        assert max(group.response_positions) == 60
        prompt = tokenizer.decode(group.prompt.numpy())
        assert prompt.count("\nThe magic number of ") == 1
        value = prompt.split("\nThe magic number of ")[1].split(" is ")[1][:6]
        for response, reward in zip(group.responses, group.rewards, strict=True):
            assert (value in tokenizer.decode(response.numpy())) == bool(reward)
    assert task.description["tokenizer"] == str(folder)


def test_needle_states_its_least_context_in_tokens_of_the_checkpoint(folder):
    with pytest.raises(DataError, match=r"use context=(\d+) or more") as caught:
        build_task(make_config(NeedleConfig(), checkpoint=folder, context=61))
    least = int(str(caught.value).split("use context=")[1].split()[0])
    assert build_task(make_config(NeedleConfig(), checkpoint=folder, context=least)).group(0).prompt_positions > 20


def test_chat_and_text_from_a_file(folder, tmp_path):
    answers = [{"text": "number", "reward": 1}, {"text": "self", "reward": 0}, {"tokens": [399, 0], "reward": 0.5}]
    rows = [
        {"prompt": [{"role": "user", "content": "The"}], "responses": answers},
        {"prompt": "The", "responses": answers},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build_task(make_config(JsonlConfig(path=str(path), tokenizer=str(folder))))
    tokenizer = load_tokenizer(str(folder), checkpoint=None, vocab_size=400)
    assert task.group(0).prompt.tolist() == tokenizer.encode("<|user|>The<|assistant|>").tolist()
    assert task.group(1).prompt.tolist() == tokenizer.encode("The").tolist()
    assert task.group(1).responses[0].tolist() == tokenizer.encode("number").tolist()
    assert task.group(1).responses[2].tolist() == [399, 0]
