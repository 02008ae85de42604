"""Counts are kept by all that they depend on, and nothing that goes wrong with their files goes wrong with a run."""

import subprocess
import sys
from dataclasses import replace

import pytest

from longstraw.config import from_dict, option
from longstraw.memory.estimate import counts
from longstraw.memory.kinds import KINDS

COUNTED = counts.Counts({"replay": dict.fromkeys(KINDS, 5)}, host=3, tensors=2, narrow_gradients=1, first_narrowed=0)


def configured(**keys):
    groups = {"model": option("model", "qwen3_6_tiny"), "hardware": option("hardware", "cpu")}
    return from_dict(groups | {"data": {"name": "needle"}, "context": 1024, "response_length": 64} | keys)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counts, "_counted", {})
    return tmp_path / "longstraw" / "memory"


def forget():
    counts._counted.clear()


def test_what_is_kept_is_found_again_by_another_process(folder):
    assert counts.lookup(configured()) is None
    counts.keep(configured(), COUNTED)
    forget()
    assert counts.lookup(configured(seed=5, claim="x", steps=7)) == COUNTED  # none of these changes what a step holds
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "keys",
    [
        {"context": 1025},
        {"prompt_grad": "exact"},
        {"adapter": {"name": "lora"}},
        {"optimizer": {"gradient_dtype": "model"}},
        {"state": {"device": "cpu"}},
        {"hardware": {"name": "cpu", "backend": "cpu", "ranks": 2}},
        {"simulation": {"imbalance": 1.5}},
    ],
)
def test_another_run_has_another_count(keys):
    counts.keep(configured(), COUNTED)
    assert counts.lookup(configured(**keys)) is None


def test_other_code_has_other_counts(monkeypatch):
    counts.keep(configured(), COUNTED)
    forget()
    monkeypatch.setattr(counts, "_version", lambda: "another")
    assert counts.lookup(configured()) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"verbs": 1}'])
def test_a_broken_file_is_none(folder, text):
    counts.keep(configured(), COUNTED)
    forget()
    (path,) = folder.iterdir()
    path.write_text(text)
    assert counts.lookup(configured()) is None


def test_a_folder_that_cannot_be_written_to_keeps_nothing_for_others(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    counts.keep(configured(), COUNTED)
    assert counts.lookup(configured()) == COUNTED
    forget()
    assert counts.lookup(configured()) is None


def test_a_known_count_needs_no_torch():
    counts.keep(replace(configured(), steps=1), COUNTED)
    code = "import sys; sys.modules['torch'] = None; import longstraw.memory.fit, longstraw.memory.estimate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
