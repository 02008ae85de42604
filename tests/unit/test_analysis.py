"""Records in, tables and figures out."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from analysis import capacity, reuse
from analysis.figures import draw_capacity, short_count
from analysis.records import NoRecords, find_files, load_jobs, read_rows
from analysis.tables import latex, markdown
from longstraw.tracking.schema import complete, to_line

ROOT = Path(__file__).resolve().parents[2]
CASE = {
    "model": "qwen3_6_tiny",
    "hardware": "cpu",
    "mode": "run",
    "prompt_grad": "detached",
    "context": 16384,
    "group_size": 2,
    "chunk": 4096,
    "status": "ok",
    "commit": "0123456789abcdef",
    "dirty": False,
}


def write(folder, rows, name="records.jsonl", **shared):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [to_line(complete({"run_id": folder.name, "attempt": 0, **CASE, **shared, **row})) for row in rows]
    (folder / name).write_bytes(b"".join(lines))
    return folder / name


def table_of(*paths, **kw):
    return capacity.capacity(load_jobs(paths, **kw))


def test_a_job_is_one_row_with_its_worst_peak_and_median_seconds(tmp_path):
    peaks, seconds = (100, 10**9 + 7, 200), (5.0, 1.0, 3.0)
    rows = [
        {"step": i, "peak_allocated_bytes": peak, "predicted_peak_bytes": 10 * peak, "seconds": second}
        for i, (peak, second) in enumerate(zip(peaks, seconds, strict=True))
    ]
    write(tmp_path / "a", rows)
    (row,) = table_of(tmp_path).to_dict("records")
    assert row["peak_allocated_bytes"] == 10**9 + 7
    assert row["predicted_peak_bytes"] == 10 * (10**9 + 7)
    assert (row["ratio"], row["seconds"], row["steps"]) == (10.0, 3.0, 3)


def test_predicted_times_have_a_column_where_there_are_any(tmp_path, capsys):
    steps = [{"prefill": 3000.0, "replay": 60.0}, {"replay": 60.0}]
    write(tmp_path / "a", [{"step": i, "predicted_seconds_by_verb": verbs} for i, verbs in enumerate(steps)])
    assert table_of(tmp_path / "a")["predicted_seconds"].tolist() == [3060.0]
    assert capacity.main([str(tmp_path)]) == 0
    assert " 51 min 00 s |" in capsys.readouterr().out
    write(tmp_path / "b", [{"step": 0, "seconds": 1.0}])
    assert capacity.main([str(tmp_path / "b")]) == 0
    assert "predicted time" not in capsys.readouterr().out


def test_integers_stay_exact_in_csv(tmp_path, capsys):
    exact = 2**60 + 1  # no float64
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": exact}])
    write(tmp_path / "b", [{"step": 0, "status": "error"}])  # a gap in the column
    assert capacity.main([str(tmp_path), "--csv", "-"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out), dtype=str)
    assert frame["peak_allocated_bytes"].tolist() == [str(exact), frame["peak_allocated_bytes"][1]]
    assert frame["context"].tolist() == ["16384", "16384"]


def test_of_each_step_the_highest_attempt_counts(tmp_path):
    first = [{"step": step, "peak_allocated_bytes": 900, "seconds": 9.0} for step in range(3)]
    write(tmp_path / "a", [*first, {"step": None, "status": "preempted", "error": "SIGUSR2"}])
    again = [{"step": step, "peak_allocated_bytes": 500, "seconds": 5.0, "attempt": 10} for step in (1, 2, 3)]
    write(tmp_path / "a", again, "records.10.jsonl")
    middle = [{"step": step, "peak_allocated_bytes": 700, "seconds": 7.0, "attempt": 2} for step in (0, 1)]
    write(tmp_path / "a", middle, "records.2.jsonl")
    (job,) = load_jobs([tmp_path])
    assert [row["peak_allocated_bytes"] for row in job.steps] == [700, 500, 500, 500]
    (row,) = table_of(tmp_path).to_dict("records")
    assert (row["status"], row["peak_allocated_bytes"], row["attempt"], row["steps"]) == ("ok", 700, 10, 4)


def test_the_attempt_may_stand_in_the_file_s_name_alone(tmp_path):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 2, "attempt": None, "run_id": None}], "records.1.jsonl")
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 1, "attempt": None, "run_id": None}])
    (row,) = table_of(tmp_path).to_dict("records")
    assert (row["peak_allocated_bytes"], row["run_id"]) == (2, str(tmp_path / "a"))


def test_a_job_that_was_preempted_and_not_continued_says_so(tmp_path):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}, {"step": None, "status": "preempted"}])
    assert table_of(tmp_path)["status"].tolist() == ["preempted"]


def test_the_same_records_found_twice_count_once(tmp_path):
    path = write(tmp_path / "runs" / "a", [{"step": 0, "peak_allocated_bytes": 5}])
    copy = tmp_path / "experiments" / "claim" / "records.jsonl"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(path.read_bytes())
    assert len(table_of(tmp_path, path)) == 1


@pytest.mark.parametrize("status", ["oom", "too_large", "preempted", "error"])
def test_jobs_that_failed_have_their_row(tmp_path, capsys, status):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 10**9, "seconds": 1.0}])
    reason = "first line | of\na long reason " + 100 * "x"
    write(tmp_path / "b", [{"status": status, "error": reason, "predicted_peak_bytes": 3 * 10**9}], group_size=8)
    assert capacity.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if line.startswith("|")]
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1  # aligned
    assert f"| {status}: first line \\| of a long" in lines[3]
    assert "..." in lines[3]
    assert "3.000" in lines[3]
    assert table_of(tmp_path)["error"][1] == reason


def test_a_dead_job_s_row_takes_what_it_lacks_from_earlier_ones(tmp_path):
    last = {"status": "error", "error": "killed", "model": None, "context": None}
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}, last])
    (row,) = table_of(tmp_path).to_dict("records")
    assert (row["status"], row["model"], row["context"]) == ("error", "qwen3_6_tiny", 16384)


def test_broken_lines_are_told_and_left_out(tmp_path, capsys):
    path = write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}, {"step": 1, "peak_allocated_bytes": 6}])
    path.write_bytes(path.read_bytes() + b"[1]\n\xff\n" + path.read_bytes()[:100])
    assert len(read_rows(path)) == 2
    notes = capsys.readouterr().err.splitlines()
    assert [re.search(r":(\d+): (.*)", line).groups() for line in notes] == [
        ("3", "no record, left out"),
        ("4", "broken off, left out"),
        ("5", "broken off, left out"),
    ]


def test_values_of_another_type_are_told_and_taken_as_unknown(tmp_path, capsys):
    path = write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}])
    wrong = {"step": "1", "attempt": "2", "run_id": [1], "schema": "2", "refresh_every": "3", "loss_drift": "x"}
    for key, value in wrong.items():
        rows = [{"step": 0, "peak_allocated_bytes": 5, "run_id": "a"}, {**json.loads(path.read_text()), key: value}]
        (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert 5 in table_of(tmp_path / "b.jsonl")["peak_allocated_bytes"].tolist()
        assert re.search(rf":2: {key} must be \w+ of 64 bits .*; taken as unknown", capsys.readouterr().err)
        with pytest.raises(NoRecords):
            reuse.reuse(load_jobs([tmp_path / "b.jsonl"]))


def test_what_cannot_be_read_is_told_and_left_out(tmp_path, capsys):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}])
    (tmp_path / "b" / "records.jsonl").mkdir(parents=True)
    assert table_of(tmp_path)["peak_allocated_bytes"].tolist() == [5]
    told: list[str] = []
    assert read_rows(tmp_path / "b" / "records.jsonl", told.append) == []  # a folder stands for any unreadable file
    assert "cannot be read" in told[0]


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, capsys):
    drifts = {"refresh_every": 8, "state_age": 1, "loss_drift": 0.1, "logprob_drift": 0.1}
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5, "context": None, **drifts}])
    for main, arguments in (
        (capacity.main, ["--csv", str(tmp_path / "nowhere" / "a.csv")]),
        (capacity.main, ["--figure", str(tmp_path / "nowhere" / "a.png")]),
        (capacity.main, ["--figure", str(tmp_path / "a.xyz")]),
        (reuse.main, ["--csv", str(tmp_path / "nowhere" / "a.csv")]),
    ):
        assert main([str(tmp_path), *arguments]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert reuse.main([str(tmp_path)]) == 0  # of a context nobody knows


def test_newer_schemas_and_unknown_keys_are_read(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({**CASE, "schema": 2, "step": 0, "peak_allocated_bytes": 5, "a_new_key": 1}) + "\n")
    assert table_of(path)["peak_allocated_bytes"].tolist() == [5]
    assert "of schema 2" in capsys.readouterr().err


def test_nothing_to_tabulate_is_an_error(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "records.jsonl").write_text("\n")
    write(tmp_path / "a", [{"step": 0}], claim="growth")
    for arguments, says in (
        ([tmp_path / "empty"], "no records*.jsonl below"),
        ([tmp_path / "void"], "no record in 1 file"),
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path / "a", "--claim", "other"], "there are growth"),
    ):
        assert capacity.main([str(argument) for argument in arguments]) == 2
        captured = capsys.readouterr()
        assert says in captured.err
        assert captured.out == ""
    assert reuse.main([str(tmp_path / "a")]) == 2
    with pytest.raises(NoRecords):
        find_files([tmp_path / "nowhere"])


def test_rows_are_sorted_by_number_not_by_text(tmp_path):
    for context in (131072, 16384, 2097152):
        for group in (8, 2, 16):
            write(tmp_path / f"{context}-{group}", [{"step": 0}], context=context, group_size=group)
    frame = table_of(tmp_path)
    expected = [(context, group) for context in (16384, 131072, 2097152) for group in (2, 8, 16)]
    assert list(zip(frame["context"], frame["group_size"], strict=True)) == expected


def test_markdown_shows_windows_dirt_and_claims(tmp_path):
    write(tmp_path / "a", [{"step": 0}], prompt_grad="exact", prompt_grad_window=1024, dirty=True, claim="growth")
    table = capacity.shown(table_of(tmp_path))
    assert table["prompt grad"].tolist() == ["exact, last 1,024 (1Ki)"]
    assert table["commit"].tolist() == ["012345678+dirty"]
    assert table["claim"].tolist() == ["growth"]
    assert "claim" not in capacity.shown(table_of(write(tmp_path / "b", [{"step": 0}])))


def test_what_was_simulated_is_never_called_ok(tmp_path):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}], mode="simulate")
    write(tmp_path / "b", [{"step": 0, "peak_allocated_bytes": 5}])
    write(tmp_path / "c", [{"step": 0, "peak_allocated_bytes": 5, "evidence": "finished"}], mode="emulate")
    frame = table_of(tmp_path)
    assert dict(frame[["mode", "status"]].values) == {"run": "ok", "simulate": "simulated", "emulate": "emulated"}
    assert capacity.shown(frame).sort_values("status")["evidence"].tolist() == ["none", "finished", "none"]


@pytest.mark.parametrize(
    ("asked", "window", "again", "shows"),
    [
        ("exact", None, 481, "exact"),
        ("exact", 0, 0, "detached"),
        ("exact", 64, 128, "exact, last 128"),  # rounded up to a chunk border
        ("exact", 10**6, 481, "exact"),
        ("detached", 64, 0, "detached"),
    ],
)
def test_the_gradient_that_was_carried_is_shown(tmp_path, asked, window, again, shows):
    done = {"step": 0, "prompt_positions": 482, "response_positions": 30, "recomputed_positions": again}
    write(tmp_path / "a", [done], prompt_grad=asked, prompt_grad_window=window, context=2**20)
    table = capacity.shown(table_of(tmp_path))
    assert table["prompt grad"].tolist() == [shows]
    assert table["positions"].tolist() == ["512"]
    assert table["asked context"].tolist() == ["1,048,576 (1Mi)"]


def test_a_job_that_never_began_shows_what_it_asked_for(tmp_path):
    shared = {"prompt_grad": "exact", "status": "too_large"}
    write(tmp_path / "a", [{}], **shared, prompt_grad_window=0)
    write(tmp_path / "b", [{}], **shared, prompt_grad_window=1024, group_size=4)
    assert capacity.shown(table_of(tmp_path))["prompt grad"].tolist() == ["detached", "exact, last 1,024 (1Ki)"]


def test_whatever_differs_is_a_column_and_the_rest_one_line(tmp_path, capsys):
    shared = {"nodes": 1, "dp": 1, "adapter": "lora", "state_device": "cpu"}
    for ranks in (4, 8):
        write(tmp_path / str(ranks), [{"step": 0, "peak_allocated_bytes": 5}], world_size=ranks, **shared)
    table = capacity.shown(table_of(tmp_path))
    assert table["ranks"].tolist() == ["4", "8"]
    assert not {"adapter", "nodes", "state device"} & set(table)
    assert capacity.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        "In all rows: dp 1, nodes 1, adapter lora, chunk 4096, state device cpu.\n"
    )


def test_a_value_that_only_some_records_have_is_a_column(tmp_path):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}], world_size=8)
    write(tmp_path / "b", [{"step": 0, "peak_allocated_bytes": 5}], world_size=None)
    frame = table_of(tmp_path)
    assert sorted(capacity.shown(frame)["ranks"]) == ["", "8"]
    assert "ranks" not in capacity.common(frame)


def test_jobs_that_differ_in_their_optimizer_are_told_apart(tmp_path):
    for rate in (1e-4, 1e-5):
        write(tmp_path / str(rate), [{"step": 0, "peak_allocated_bytes": 5}], optimizer="adamw", learning_rate=rate)
    assert sorted(capacity.shown(table_of(tmp_path))["learning rate"]) == ["0.0001", "1e-05"]


def test_small_peaks_have_a_unit_that_shows_them(tmp_path):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 4_990_000, "retained_bytes": 12_300}])
    table = capacity.shown(table_of(tmp_path))
    assert (table["peak"][0], table["retained"][0]) == ("5.0 MB", "12.3 kB")


def test_a_row_with_a_number_too_large_costs_no_other(tmp_path, capsys):
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5}])
    write(tmp_path / "b", [{"step": 0, "peak_bytes_by_kind": {"retained": 10**30}}], context=10**20)
    assert table_of(tmp_path)["context"].dropna().tolist() == [16384]
    told = capsys.readouterr().err
    assert "context must be int of 64 bits at most, not 100000000000000000000" in told
    assert "peak_bytes_by_kind must be" in told


def test_the_paper_stands_beside_the_same_case_only(tmp_path):
    case = {"model": "qwen3_6_27b", "context": 2097152}
    write(tmp_path / "a", [{"step": 0}], **case)
    write(tmp_path / "b", [{"step": 0}], **case, group_size=8)
    write(tmp_path / "c", [{"step": 0}], **case | {"context": 2100000})
    write(tmp_path / "d", [{"step": 0}], **case, prompt_grad="exact")
    frame = capacity.with_paper(table_of(tmp_path)).set_index("run_id")
    assert len(frame) == 4
    assert frame["paper_gb"].dropna().to_dict() == {"a": 97.503, "b": 97.711}
    assert frame["paper_source"]["a"] == "arXiv 2607.14952"
    assert "97.503" in markdown(capacity.shown(frame.reset_index()))


def test_latex_escapes(tmp_path):
    frame = pd.DataFrame({"a_b": ["50 % & {x}"], "n": ["1"]})
    lines = latex(frame, right=["n"]).splitlines()
    assert lines[0] == r"\begin{tabular}{lr}"
    assert lines[2] == r"a\_b & n \\"
    assert lines[4] == r"50 \% \& \{x\} & 1 \\"
    write(tmp_path / "a", [{"step": 0}])
    assert latex(capacity.shown(table_of(tmp_path))).count(r"\\") == 2


@pytest.mark.parametrize("statuses", [("ok", "oom"), ("ok",), ("too_large",), ("error",)])
def test_the_figure_is_drawn_from_whatever_there_is(tmp_path, statuses):
    for i, status in enumerate(statuses):
        peak = 50 * 10**6 if status == "ok" else None
        predicted = None if status == "error" else 60 * 10**6
        row = {"step": 0, "status": status, "peak_allocated_bytes": peak, "predicted_peak_bytes": predicted}
        write(tmp_path / str(i), [row], context=4096 << i)
    target = tmp_path / "out.png"
    draw_capacity(table_of(tmp_path), target)
    assert target.read_bytes().startswith(b"\x89PNG")


def drawn(frame, monkeypatch, tmp_path):
    """Return the points of every line that a figure of ``frame`` joins, by axis."""
    axes = []
    monkeypatch.setattr(plt, "close", lambda figure: axes.extend(figure.axes))
    draw_capacity(frame, tmp_path / "out.png")
    points = [[zip(*line.get_data(), strict=True) for line in axis.get_lines()] for axis in axes]
    return [sorted([[float(x), float(y)] for x, y in line] for line in lines) for lines in points]


def test_a_line_joins_jobs_that_differ_in_its_axis_alone(tmp_path, monkeypatch):
    cases = [(4, 2, 1024, 40), (8, 2, 1024, 20), (8, 8, 1024, 21), (8, 2, 2048, 30)]
    for ranks, group, context, peak in cases:
        row = {"step": 0, "peak_allocated_bytes": peak * 10**6, "mode": "simulate"}
        write(tmp_path / f"{ranks}-{group}-{context}", [row], world_size=ranks, group_size=group, context=context)
    by_context, by_group = drawn(table_of(tmp_path), monkeypatch, tmp_path)
    assert by_context == [[[1024, 20], [2048, 30]], [[1024, 21]], [[1024, 40]]]
    assert by_group == [[[2, 20], [8, 21]], [[2, 30]], [[2, 40]]]


@pytest.mark.parametrize(
    ("count", "short"),
    [
        (16384, "16Ki"),
        (2**21, "2Mi"),
        (4456448, "4.25Mi"),
        (2_100_000, "2.1M"),
        (1023, "1,023"),
        (1_000_001, "1,000,001"),
    ],
)
def test_short_counts_are_exact(count, short):
    assert short_count(count) == short


def test_reuse_averages_by_age(tmp_path, capsys):
    rows = [
        {"step": step, "state_age": step % 4, "loss_drift": -0.01 * (step % 4), "logprob_drift": 0.1 * (step + 1)}
        for step in range(8)
    ]
    write(tmp_path / "a", rows, refresh_every=4)
    write(tmp_path / "b", [{"step": 0, "state_age": 0, "loss_drift": 9.0, "logprob_drift": 9.0}], refresh_every=1)
    frame = reuse.reuse(load_jobs([tmp_path]))
    assert frame["state_age"].tolist() == [0, 1, 2, 3]
    assert frame["loss_drift"].tolist() == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert frame["logprob_drift"].tolist() == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert frame["steps"].tolist() == [2, 2, 2, 2]
    assert reuse.main([str(tmp_path), "--paper"]) == 0
    out = capsys.readouterr().out
    assert "0.1236 %" in out
    assert "0.0137" in out


def test_analysis_runs_where_torch_cannot_be_imported(tmp_path):
    drifts = {"refresh_every": 8, "state_age": 1, "loss_drift": 0.1, "logprob_drift": 0.1}
    write(tmp_path / "a", [{"step": 0, "peak_allocated_bytes": 5, "predicted_peak_bytes": 6, **drifts}])
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'hydra', 'submitit'): sys.modules[name] = None\n"
        "import analysis.wandb_files\n"
        "from analysis import capacity, reuse\n"
        f"assert capacity.main([{str(tmp_path)!r}, '--paper', '--figure', {str(tmp_path / 'out.png')!r}]) == 0\n"
        f"assert reuse.main([{str(tmp_path)!r}, '--paper', '--latex']) == 0\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out.png").exists()


def test_a_job_that_stopped_without_a_word_is_not_ok(tmp_path):
    done = [{"step": step, "steps": 3, "peak_allocated_bytes": 5} for step in range(3)]
    write(tmp_path / "killed", done[:2])
    write(tmp_path / "whole", done)
    assert {row["run_id"]: row["status"] for row in table_of(tmp_path).to_dict("records")} == {
        "killed": "unfinished",
        "whole": "ok",
    }
