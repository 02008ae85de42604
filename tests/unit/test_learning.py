"""``analysis.learning``: curves of runs as they are, whole, broken off or with evaluations only."""

import io
import json
import math

import numpy as np
import pandas as pd
import pytest

from analysis import learning
from analysis.learning_figures import draw_learning
from analysis.learning_runs import COLUMNS, depth_by_length, depth_table, load_runs, shown
from longstraw.tracking.evaluations import KEYS, Answer, mean_interval, summary
from longstraw.tracking.schema import complete, to_line

RUN = {"model": "llama_tiny", "hardware": "cpu", "mode": "run", "prompt_grad": "exact", "context": 1024, "dp": 1}
RUN |= {"group_size": 8, "data": "lookup", "learning_rate": 1e-4, "seed": 0, "steps": 20, "status": "ok"}


def answered(right, length=100):
    """Return 10 answers, ``right`` of them right, at depths 0.05 to 0.95."""
    return [
        Answer(str(i), length=length, reward=float(i < right), tokens=1, ended=True, depth=i / 10 + 0.05)
        for i in range(10)
    ]


def write(folder, rewards, evaluations, attempt=0, seconds=2.0, **changes):
    """Write one run: ``rewards`` by step, and the number of right answers by step."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"run_id": f"20261201-010203-0123456789abcdef-{folder.name}", "attempt": attempt, **RUN, **changes}
    rows = [{"step": step, "reward_mean": reward, "seconds": seconds} for step, reward in rewards.items()]
    last = {key: changes[key] for key in ("status", "error") if key in changes}
    lines = [to_line(complete({**shared, "status": "ok", **row})) for row in rows]
    lines += [to_line(complete({**shared, **last, "step": len(rewards)}))] if last else []
    name = f".{attempt}.jsonl" if attempt else ".jsonl"
    (folder / f"records{name}").write_bytes(b"".join(lines))
    told = [{"step": step, **summary(answered(right))} for step, right in evaluations.items()]
    if told:
        lines = [to_line(complete({**shared, **row}, KEYS)) for row in told]
        (folder / f"evaluations{name}").write_bytes(b"".join(lines))
    return folder


def rising(steps=20):
    return {step: step / 20 for step in range(steps)}


def frame_of(*paths):
    runs = load_runs([str(path) for path in paths])
    return runs, learning.learning(runs)


def test_reward_and_success_stand_against_steps_and_seconds(tmp_path):
    write(tmp_path / "0", rising(), {0: 2, 10: 5, 20: 9})
    runs, frame = frame_of(tmp_path)
    held = frame[frame["kind"] == "held-out"]
    assert held["step"].tolist() == [0, 10, 20]
    assert held["seconds"].tolist() == [0.0, 20.0, 40.0]
    assert held["value"].tolist() == [0.2, 0.5, 0.9]
    assert (held["low"].iloc[1], held["high"].iloc[1]) == mean_interval([1.0] * 5 + [0.0] * 5, "wilson")[1:]
    training = frame[frame["kind"] == "training"]
    assert training["seconds"].tolist() == [2.0 * (step + 1) for step in range(20)]
    (row,) = shown(runs, frame).to_dict("records")
    assert (row["run"], row["status"], row["steps"], row["time"]) == ("llama_tiny", "ok", "20", "40.0 s")
    assert (row["reward at first"], row["reward at last"]) == ("0.025", "0.925")  # of two steps each
    assert row["held-out at last"] == "0.900 [0.596, 0.982] at 20"
    assert (row["prompts"], row["interval"]) == ("10", "wilson")


def test_a_resumed_run_counts_each_step_and_evaluation_once(tmp_path):
    write(tmp_path / "0", rising(12), {0: 2, 10: 4}, status="preempted", error="SIGTERM")
    again = dict.fromkeys(range(8, 20), 0.5)
    write(tmp_path / "0", again, {20: 9}, attempt=1)
    runs, frame = frame_of(tmp_path)
    assert (len(runs), runs[0].status) == (1, "ok")
    assert frame[frame["kind"] == "training"]["step"].tolist() == list(range(20))
    assert frame[frame["kind"] == "held-out"]["value"].tolist() == [0.2, 0.4, 0.9]


def test_a_run_asked_to_end_after_its_last_step_is_over_once_it_is_evaluated(tmp_path):
    write(tmp_path / "0", rising(), {0: 2}, status="preempted", error="SIGTERM")
    write(tmp_path / "0", {}, {20: 9}, attempt=1)
    runs, _ = frame_of(tmp_path)
    assert (runs[0].status, len(runs[0].evaluations)) == ("ok", 2)


def test_runs_are_named_by_what_differs(tmp_path):
    for name, changes in (("0", {}), ("1", {"learning_rate": 1e-5}), ("2", {"context": 4096})):
        write(tmp_path / name, rising(), {0: 2}, **changes)
    names = [one.name for one in load_runs([str(tmp_path)])]
    assert names == ["context 1,024, lr 0.0001", "context 1,024, lr 1e-05", "context 4,096, lr 0.0001"]


def test_runs_that_differ_in_nothing_recorded_are_named_by_their_folder(tmp_path):
    write(tmp_path / "0", rising(), {})
    write(tmp_path / "1", rising(), {})
    names = [one.name for one in load_runs([str(tmp_path)])]
    assert names == ["llama_tiny (20261201-010203-0)", "llama_tiny (20261201-010203-1)"]


@pytest.fixture
def mixed(tmp_path):
    """Return runs: whole, broken off, with NaN, without evaluations, of one alone, and of a bare one."""
    write(tmp_path / "0", rising(), {0: 2, 20: 9}, seed=0)
    write(tmp_path / "1", rising(7), {0: 2}, seed=1, status="error", error="loss nan: no step was taken")
    write(tmp_path / "2", {0: 0.1, 1: math.nan, 2: 0.3}, {0: 1}, seed=2)
    write(tmp_path / "3", rising(), {}, seed=3)
    write(tmp_path / "4", {}, {}, seed=4)
    rows = [
        {"run_id": "alone", "model": "llama_tiny", "step": None, "seed": 5, **summary(answered(5))},
        {"run_id": "bare"},
    ]
    lines = [to_line(complete(row, KEYS)) for row in rows]
    (tmp_path / "evaluations.jsonl").write_bytes(b"".join(lines) + b'{"schema": 1, "succ')
    return tmp_path


def test_whatever_a_run_lacks_is_said_and_costs_no_other(mixed, capsys):
    assert learning.main([str(mixed), "--figure", str(mixed / "f.png")]) == 0
    said = capsys.readouterr()
    rows = [
        line
        for line in said.out.split("\n\n")[0].splitlines()
        if "llama_tiny" in line or "seed" in line or "bare" in line
    ]
    assert len(rows) == 6
    assert "evaluations.jsonl:3: broken off, left out" in said.err
    assert "error after 7 steps: loss nan: no step was taken" in said.err
    assert "1 values are missing or not finite" in said.err
    assert "no evaluation in" in said.err
    assert (mixed / "f.png").stat().st_size > 10_000


def test_the_csv_has_every_point(mixed, capsys):
    assert learning.main([str(mixed), "--csv", "-"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert frame.columns.tolist() == COLUMNS
    assert frame.groupby("kind").size().to_dict() == {"held-out": 5, "training": 20 + 7 + 2 + 20}
    alone = frame[frame["run_id"] == "alone"]
    assert alone["seconds"].isna().all()
    assert alone["value"].tolist() == [0.5]


def test_depth_by_length_is_of_the_last_evaluation(tmp_path):
    folder = write(tmp_path / "0", rising(), {0: 2})
    row = {"run_id": load_runs([str(folder)])[0].run_id, "step": 20, **summary(answered(10) + answered(3, length=400))}
    with (folder / "evaluations.jsonl").open("ab") as file:
        file.write(to_line(complete(row, KEYS)))
    (one,) = load_runs([str(folder)])
    by = depth_by_length(one)
    assert [by[depth, "400"]["success"] for depth in ("0-0.2", "0.2-0.4", "0.4-0.6")] == [1.0, 0.5, 0.0]
    assert all(by[depth, "100"]["success"] == 1.0 for depth in ("0-0.2", "0.8-1"))
    table = depth_table([one])
    assert table.columns.tolist() == ["run", "depth", "100 tokens", "400 tokens"]
    assert table["400 tokens"].tolist() == ["1.00 (2)", "0.50 (2)", "0.00 (2)", "0.00 (2)", "0.00 (2)"]


def test_the_figure_draws_a_line_a_run_and_its_map(tmp_path, monkeypatch):
    write(tmp_path / "0", rising(), {0: 2, 20: 9}, seed=0)
    write(tmp_path / "1", rising(9), {0: 2}, seed=1)  # broke off
    runs, frame = frame_of(tmp_path)
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_learning(runs, frame, "x.png")
    curves, maps = drawn[0].subfigs
    reward, _, success, by_time = curves.axes
    ends = [line for line in success.lines if line.get_marker() == "x"]
    assert len(ends) == 1  # a cross where the second run ended
    assert [tuple(line.get_xdata()) for line in success.lines if line.get_marker() == "o"] == [(0, 20), (0,)]
    assert [tuple(line.get_xdata()) for line in by_time.lines if line.get_marker() == "o"] == [(0, 40), (0,)]
    assert len(reward.lines[0].get_xdata()) == 20
    shown_maps = [axis for axis in maps.axes if axis.images]
    assert np.asarray(shown_maps[0].images[0].get_array()).ravel().tolist() == [1.0, 1.0, 1.0, 1.0, 0.5]


def test_nothing_to_show_is_one_line(tmp_path, capsys):
    assert learning.main([str(tmp_path)]) == 2
    assert "no records*.jsonl below" in capsys.readouterr().err
    write(tmp_path / "0", rising(), {0: 2}, claim="a")
    assert learning.main([str(tmp_path), "--claim", "b"]) == 2
    assert "no record of claim=b" in capsys.readouterr().err
    assert learning.main([str(tmp_path), "--figure", str(tmp_path / "f.xyz")]) == 2
    assert json.loads((tmp_path / "0" / "evaluations.jsonl").read_text())["success"] == 0.2
