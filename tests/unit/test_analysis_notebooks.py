"""Memory tables from records, and notebooks that are executed again from the committed ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import memory, memory_figures, notebook
from analysis.records import load_jobs, read_rows
from longstraw.tracking.schema import check, complete, to_line
from longstraw.units import GB

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "analysis" / "notebooks").glob("*.ipynb"))
RECORDS = sorted((ROOT / "experiments").glob("*/records.jsonl"))
CASE = {
    "status": "ok",
    "mode": "simulate",
    "model": "qwen3_6_27b",
    "hardware": "h20x8",
    "world_size": 8,
    "context": 2097152,
    "prompt_positions": 2088960,
    "response_positions": 8192,
    "group_size": 2,
    "prompt_grad": "detached",
    "refresh_every": 1,
    "adapter": "lora",
    "step": 0,
    "peak_allocated_bytes": 30 * GB,
    "peak_verb": "replay",
    "peak_by_verb": {"prefill": 20 * GB, "replay": 30 * GB},
    "peak_bytes_by_kind": {"parameters": 7 * GB, "gathered": 0, "retained": 23 * GB},
    "command": "python -m longstraw.run context=2Mi",
}


def peaks_of(folder, *rows):
    """Return the peaks of one job a row, each row a list of changes to CASE, one a step, or one change."""
    lines = []
    for number, changes in enumerate(rows):
        for step, change in enumerate(changes if isinstance(changes, list) else [changes]):
            lines.append(to_line(complete({**CASE, "run_id": str(number), "attempt": 0, "step": step, **change})))
    (folder / "records.jsonl").write_bytes(b"".join(lines))
    return memory.peaks(load_jobs([folder]))


def source(*cells):
    body = [
        {"cell_type": "code", "id": str(i), "metadata": {}, "execution_count": None, "outputs": [], "source": [text]}
        for i, text in enumerate(cells)
    ]
    return {"cells": body, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_every_notebook_prints_what_is_committed():
    assert NOTEBOOKS
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'hydra', 'IPython'): sys.modules[name] = None\n"
        "from analysis.notebook import main\n"
        "raise SystemExit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "--check", *map(str, NOTEBOOKS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_logic_and_is_executed(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for number, cell in enumerate(cells, start=1):
        assert cell["execution_count"] == number
        assert cell["outputs"]
        assert not re.search(r"^\s*(def|class|for|while|if)\b", "".join(cell["source"]), re.MULTILINE)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_committed_records_are_whole_and_name_no_machine(path):
    for row in read_rows(path, tell=lambda message: None):
        check({key: value for key, value in row.items() if value is not None})
        assert row["commit"]
        assert row["dirty"] is False
        assert row["command"].startswith("python -m longstraw.run ")
        assert not re.search(r"(?<![\w.])[/~]\w", json.dumps(row)), row["command"]
        if row["status"] == "ok":
            assert sum(row["peak_bytes_by_kind"].values()) == row["peak_allocated_bytes"]


def test_a_changed_number_is_found(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(source("x = 6", "print(x)\nx * 7")))
    assert notebook.main([str(path)]) == 0
    assert notebook.main(["--check", str(path)]) == 0
    written = path.read_text()
    assert written.count("42") == 1
    path.write_text(written.replace("42", "43"))
    assert notebook.main(["--check", str(path)]) == 1
    told = capsys.readouterr().out
    assert "-cell 1: 43" in told
    assert "+cell 1: 42" in told
    assert "43" in path.read_text()


def test_a_cell_that_fails_is_named_and_nothing_is_written(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(source("x = 6", "x / 0")))
    before = path.read_text()
    assert notebook.main([str(path)]) == 2
    assert "a.ipynb, cell 1: ZeroDivisionError" in capsys.readouterr().err
    assert path.read_text() == before


def test_outputs_are_those_of_jupyter():
    shows = "from analysis.notebook import Shown\n"
    done = notebook.execute(source(f"{shows}Shown('| a |')", "print('b')", f"{shows}Shown('c', b'png')", "None"))
    table, printed, picture, nothing = (cell["outputs"] for cell in done["cells"])
    assert table[0]["data"] == {"text/markdown": ["| a |"], "text/plain": ["| a |"]}
    assert printed == [{"name": "stdout", "output_type": "stream", "text": ["b\n"]}]
    assert picture[0]["data"] == {"image/png": "cG5n", "text/plain": ["c"]}
    assert nothing == []


def test_the_paper_stands_beside_the_same_case_and_modes_stay_apart(tmp_path):
    others = ({"prompt_grad": "exact"}, {"context": 2100000, "prompt_positions": 2091808}, {"refresh_every": 8})
    glm = {"model": "glm_5_2", "context": 2105344, "prompt_positions": 2097152, "peak_allocated_bytes": 60 * GB}
    frame = peaks_of(tmp_path, {}, glm, {"group_size": 8, "mode": "run"}, *others)
    table = memory.beside_paper(frame).set_index("case")
    assert table["simulated"].dropna().to_dict() == {"qwen_2m_g2": 30 * GB, "glm_2m": 60 * GB}
    assert table["measured"].dropna().to_dict() == {"qwen_2m_g8": 30 * GB}
    lines = {
        line.split("|")[1].strip(): line for line in repr(memory.shown_beside_paper(table.reset_index())).split("\n")
    }
    assert [cell.strip() for cell in lines["qwen_2m_g2"].split("|")[-5:-1]] == ["97.503", "30.000", "", "0.308"]
    assert [cell.strip() for cell in lines["qwen_2m_g8"].split("|")[-5:-1]] == ["97.711", "", "30.000", "0.307"]
    assert [cell.strip() for cell in lines["glm_2m"].split("|")[-5:-1]] == ["", "60.000", "", ""]


def test_growth_is_in_bytes(tmp_path):
    more = {"group_size": 8, "peak_allocated_bytes": 30 * GB + 512}
    exact = {"prompt_grad": "exact"}
    told = repr(memory.group_growth(peaks_of(tmp_path, {}, more, exact, {**more, **exact}))).splitlines()
    assert [[cell.strip() for cell in line.split("|")[3:-1]] for line in told[2:]] == [
        ["detached", "2 to 8", "208,000,000", "512"],
        ["exact", "2 to 8", "", "512"],
    ]


def test_a_job_s_kinds_are_of_its_highest_step_and_its_verbs_of_all(tmp_path):
    higher = {
        "peak_allocated_bytes": 31 * GB,
        "peak_by_verb": {"replay": 31 * GB},
        "peak_bytes_by_kind": {"optimizer": 31 * GB},
    }
    (row,) = peaks_of(tmp_path, [{"steps": 8}, {"steps": 8, **higher}]).to_dict("records")
    assert row["kinds"] == {"optimizer": 31 * GB}
    assert row["by_verb"] == {"prefill": 20 * GB, "replay": 31 * GB}
    assert row["status"] == "ok"  # a simulation has no further steps


def test_tables_leave_out_what_nobody_holds(tmp_path):
    frame = peaks_of(tmp_path, {}, {"context": 4456448, "prompt_positions": 4448256})
    head, _, first, second = repr(memory.by_kind(frame, ["model", "context"])).splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "model",
        "context",
        "peak in",
        "peak GB",
        "parameters",
        "retained",
    ]
    assert "2,097,152 (2Mi)" in first
    assert "4,456,448" in second
    verbs = repr(memory.by_verb(frame, ["model"])).splitlines()
    assert "prompt backward" not in verbs[0]
    assert "30.000" in verbs[2]


@pytest.mark.parametrize(
    ("adapter", "words", "says"),
    [
        ("lora", "", "LoRA, AdamW"),
        ("none", "optimizer=none", "all parameters, fp32 gradients, no optimizer"),
        (
            "none",
            "optimizer=none optimizer.gradient_dtype=model",
            "all parameters, bf16 gradients, no optimizer",
        ),
        ("none", "optimizer.device=cpu", "all parameters, fp32 gradients, AdamW in host memory"),
    ],
)
def test_what_is_trained_is_read_from_the_command(tmp_path, adapter, words, says):
    frame = peaks_of(tmp_path, {"adapter": adapter, "command": f"python -m longstraw.run {words}"})
    assert frame["trained"].tolist() == [says]


@pytest.mark.parametrize("x", ["context", "group_size", "world_size"])
def test_figures_tell_what_they_draw(tmp_path, x):
    larger = {x: 2 * CASE[x], "peak_allocated_bytes": 35 * GB}
    frame = peaks_of(tmp_path, larger, {})
    shown = memory_figures.peak_against(frame, x, paper=x != "world_size", room=memory.room("h20x8"))
    assert shown.png.startswith(b"\x89PNG")
    assert re.search(r"simulated: \w+ 30.000, \w+ 35.000", shown.text)
    assert ("97.503" in shown.text) == (x != "world_size")
    assert "35.000" in memory_figures.stacked(frame, ["model", x]).text


def test_room_is_what_the_card_leaves():
    assert memory.room("h20x8") == pytest.approx(99.6 * GB)
    assert memory.gigabytes(None) == ""
