"""A drawn response ends at the checkpoint's own end tokens unless ``stop`` is given."""

import json

import pytest
from test_loop import job

from longstraw.config import ConfigError, from_dict, load_model_config, to_dict
from longstraw.config.hf_files import CheckpointError, end_tokens
from longstraw.group import kept_tokens
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.models.hf_save import save_model
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

TOKENIZER = {"added_tokens": [{"id": 5, "content": "<pad>"}, {"id": 7, "content": "<end>"}]}
FILES = {  # in the order in which they count
    "generation_config.json": {"eos_token_id": [2, 3]},
    "config.json": {"eos_token_id": 4},
    "tokenizer_config.json": {"eos_token": {"content": "<end>"}},
    "tokenizer.json": TOKENIZER,
}


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_the_files_count_in_their_order(tmp_path):
    write(tmp_path, **{name.removesuffix(".json"): content for name, content in FILES.items()})
    for name, tokens in (("generation_config.json", [2, 3]), ("config.json", [4]), ("tokenizer_config.json", [7])):
        assert end_tokens(tmp_path) == tokens
        (tmp_path / name).unlink()
    assert end_tokens(tmp_path) == end_tokens(None) == []


def test_an_id_of_the_text_model_and_a_plain_eos_token_count_too(tmp_path):
    write(tmp_path, config={"text_config": {"eos_token_id": 0}})
    assert end_tokens(tmp_path) == [0]
    write(tmp_path, config={"eos_token_id": None}, tokenizer_config={"eos_token": "<pad>"}, tokenizer=TOKENIZER)
    assert end_tokens(tmp_path) == [5]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config"):
        end_tokens(tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_model(build_model(load_model_config("llama_tiny", num_hidden_layers=2), seed=0), folder)
    ends = list(range(64))  # a quarter of the vocabulary, so that some responses end
    write(folder, generation_config={"eos_token_id": ends})
    return folder


def drawing(checkpoint, **changes):
    model = to_dict(load_model_config("llama_tiny", num_hidden_layers=2, checkpoint=str(checkpoint)))
    return job(**{"model": model, "rollout": "sample", "data": {"name": "lookup"}, "context": 420} | changes)


def test_drawn_responses_end_at_the_checkpoints_end_tokens_and_these_are_in_the_loss(checkpoint):
    config = drawing(checkpoint, group_size=8, refresh_every=2, measure_drift=False)
    assert config.stop == list(range(64))
    assert from_dict(to_dict(config)).stop == config.stop
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None)))
        row = trainer.step(0)
    group = trainer.shared.group
    ended = [int(response[-1]) < 64 for response in group.responses]
    assert sum(ended) >= 4
    assert row["truncated_fraction"] == 1 - sum(ended) / 8
    assert all(int((response[:-1] < 64).sum()) == 0 for response in group.responses)
    assert kept_tokens(group) == group.response_positions


def test_stop_takes_their_place_and_given_responses_have_none(checkpoint):
    assert drawing(checkpoint, stop=[9]).stop == [9]
    assert drawing(checkpoint, stop=[]).stop == []
    assert drawing(checkpoint, rollout="given", data={"name": "needle"}).stop == []
    with pytest.raises(ConfigError, match="below the vocabulary size 256"):
        drawing(checkpoint, stop=[256])
