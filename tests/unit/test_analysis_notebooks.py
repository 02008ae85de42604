"""Memory tables from records, and notebooks that are executed again from the committed ones."""

import json
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from analysis import memory, memory_figures
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


def texts(notebook):
    """Return the lines of all outputs, each with its cell's number; of a picture, the text that says the same."""
    lines = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            plain = output.text if output.output_type == "stream" else output.data["text/plain"]
            lines += [f"cell {number}: {line}" for line in plain.splitlines()]
    return lines


def executed(notebook):
    return nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": ROOT}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path):
    committed = nbformat.read(path, as_version=4)
    before = texts(committed)
    assert texts(executed(committed)) == before
    assert before


def test_a_changed_number_is_found():
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in ("x = 6", "print(x)\nx * 7")]
    )
    committed = texts(executed(notebook))
    assert committed == ["cell 1: 6", "cell 1: 42"]
    notebook.cells[0].source = "x = 7"
    assert texts(executed(notebook)) != committed


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
    for row in read_rows(path, report=lambda message: None):
        check({key: value for key, value in row.items() if value is not None})
        assert row["commit"]
        assert row["dirty"] is False
        assert row["command"].startswith("python -m longstraw.run ")
        assert not re.search(r"(?<![\w.])[/~]\w", json.dumps(row)), row["command"]
        if row["status"] == "ok":
            assert sum(row["peak_bytes_by_kind"].values()) == row["peak_allocated_bytes"]


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
