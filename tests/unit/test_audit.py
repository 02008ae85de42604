"""The audit passes on a sound model, fails on each kind of error, and says which arguments it knows."""

import subprocess
import sys

import pytest
import torch

from longstraw import audit, step
from longstraw.audit import MODES, TOLERANCES, Finding, Run, Settings, compare, relative
from longstraw.config import ConfigError
from longstraw.config.settings import parse_settings
from longstraw.models import build_model
from longstraw.models.hf_save import save_model
from longstraw.state import Appended, Carried

SMALL = ("layers=4", "prompt=130", "response=9", "group_size=2", "window=60")


def verdicts(text):
    """Return the modes whose row ends in a verdict, by verdict."""
    rows = [[cell.strip() for cell in line.strip("│|\n").split("│")] for line in text.splitlines() if "│" in line]
    return {row[0]: row[-1] for row in rows if row[0] in MODES}


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize(("model", "dtype"), [("qwen3_6_tiny", "float64"), ("glm_5_2_tiny", "float32")])
def test_a_sound_model_passes(capsys, model, dtype, adapter):
    if adapter == "lora":
        pytest.importorskip("peft")
    assert audit.main([f"model={model}", f"dtype={dtype}", f"adapter={adapter}", *SMALL]) == 0
    text = capsys.readouterr().out
    assert verdicts(text) == dict.fromkeys(MODES, "pass")
    assert text.rstrip().endswith("audit: passed")
    assert "self_attn" in text
    left_out = next(line for line in text.splitlines() if line.startswith("│ all ")).split("│")[-2]
    assert 10 < float(left_out.strip().rstrip("%")) < 200


def test_bfloat16_has_tolerances_of_its_own(capsys):
    assert audit.main(["dtype=bfloat16", *SMALL]) == 0
    assert TOLERANCES["bfloat16"].gradient < 0.5  # what detached leaves out is more than that


def nothing(model, retained, *, observer=None):
    """Stand for a prompt backward that was left out."""
    return 0.0


def leaky(self, end, grad):
    """Hand out the state itself, so that the branches' gradient of it is lost."""
    return _carried_leaves(self, end, False)


def stale(self, update, *place):
    """Keep the keys of each chunk a position off their values."""
    _absorb(self, update | {"key": update["key"].roll(1, 0)}, *place)


_carried_leaves, _absorb = Carried.leaves, Appended.absorb


@pytest.mark.parametrize(
    ("where", "name", "broken", "failing"),
    [
        (step, "prompt_backward", nothing, {"exact", "window"}),
        (Carried, "leaves", leaky, {"exact", "window"}),
        (Appended, "absorb", stale, set(MODES)),
    ],
    ids=["no prompt backward", "recurrent state without gradient", "rows out of place"],
)
def test_an_error_in_the_step_fails(capsys, monkeypatch, where, name, broken, failing):
    """The whole sequences must not use what is broken, or both would err alike."""
    monkeypatch.setattr(where, name, broken)
    assert audit.main(list(SMALL)) == 1
    text = capsys.readouterr().out
    assert {mode for mode, verdict in verdicts(text).items() if verdict == "FAIL"} == failing
    assert text.splitlines()[-1].startswith("audit: FAILED")


def test_nan_fails():
    bad = Run(0.0, [torch.tensor([0.0, torch.nan])], {"a": torch.ones(2)})
    good = Run(0.0, [torch.zeros(2)], {"a": torch.ones(2)})
    assert compare("exact", good, good, None, TOLERANCES["float32"]).passed
    assert not compare("exact", bad, good, None, TOLERANCES["float32"]).passed
    broken = Run(0.0, [torch.zeros(2)], {"a": torch.tensor([1.0, torch.nan]), "b": torch.ones(1)})
    other = Run(0.0, [torch.zeros(2)], {"a": torch.ones(2), "b": torch.ones(1)})
    assert not compare("exact", broken, other, None, TOLERANCES["float32"]).passed
    assert not Finding("exact", float("nan"), 0.0, 0.0, "a", None, TOLERANCES["float32"]).passed


def test_relative_differences():
    ours = {"a": torch.tensor([3.0, 4.5]), "only here": torch.ones(1), "tiny": torch.tensor([1e-12])}
    theirs = {"a": torch.tensor([3.0, 4.0]), "only there": torch.ones(1), "tiny": torch.tensor([2e-12])}
    found = relative(ours, theirs)
    assert found["a"] == pytest.approx(0.1)
    assert found["only here"] == found["only there"] == float("inf")
    assert found["tiny"] < 1e-4  # below rounding of the whole gradient
    assert relative({"a": torch.zeros(2)}, {"a": torch.zeros(2)}) == {"a": 0.0}


def test_a_checkpoint_is_cut_without_transformers(tmp_path):
    """In a process of its own, in which importing transformers or peft fails."""
    save_model(build_model("qwen3_6_tiny"), tmp_path / "checkpoint")
    arguments = [f"checkpoint={tmp_path / 'checkpoint'}", "layers=2", "prompt=70", "response=5", "dtype=float32"]
    code = "import sys; sys.modules['transformers'] = sys.modules['peft'] = None\n"
    code += f"from longstraw.audit import main; sys.exit(main({arguments!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "checkpoint, 2 layers, float32 on cpu" in ran.stdout


def test_arguments():
    settings = parse_settings(Settings, ["prompt=1Ki", "model=glm_5_2_tiny", "layers=3", "seed=0"])
    assert settings == Settings(prompt=1024, model="glm_5_2_tiny", layers=3, seed=0)
    for wrong, complaint in (
        ("promt=3", "did you mean prompt"),
        ("prompt", "no key=value"),
        ("prompt=many", "not a count"),
        ("prompt=1", "at least 2"),
        ("group_size=1", "at least 2"),
        ("dtype=float16", "bfloat16"),
        ("adapter=dora", "lora"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            parse_settings(Settings, [wrong])


def test_help_names_the_keys(capsys):
    assert audit.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "    checkpoint=\n" in shown
    assert "    dtype=float64\n" in shown


@pytest.mark.parametrize("wrong", ["model=qwen", "checkpoint=/nowhere", "chunk=100", "device=nonsense"])
def test_meaningless_arguments_are_no_failed_audit(capsys, wrong):
    assert audit.main([wrong, *SMALL]) == 2
    assert capsys.readouterr().err.startswith("longstraw.audit: ")
