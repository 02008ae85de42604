"""Draw learning curves, and success by depth and length. Needs no display."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures import COLORS
from analysis.learning_runs import Run, depth_by_length, in_order
from analysis.records import note

MAPS = 4  # heat maps in a figure
_X = {"step": "optimizer steps", "seconds": "seconds in steps (evaluations not counted)"}
_Y = {"training": "mean reward of the step's responses", "held-out": "success on held-out prompts"}


def draw_learning(runs: Sequence[Run], frame: pd.DataFrame, target: str | Path) -> None:
    """Draw reward and success against steps and seconds, a line a run, and each run's map of depth by length below.

    ``frame`` is ``learning()``'s. Thin lines are single steps, thick ones running means; bands are 95 % intervals, the
    dotted line is chance, a cross ends a run that broke off.
    """
    colors = {one.run_id: color for one, color in zip(runs, cycle(COLORS), strict=False)}
    maps = [(one, by) for one in runs if (by := depth_by_length(one))]
    if len(maps) > MAPS:
        note(f"the figure has the maps of {MAPS} runs; not those of {'; '.join(one.name for one, _ in maps[MAPS:])}")
    figure = Figure(figsize=(11, 11 if maps else 7.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[7.6, 3.4]) if maps else [figure]
    axes = parts[0].subplots(2, 2, sharex="col", sharey="row")
    for row, kind in enumerate(_Y):
        for column, x in enumerate(_X):
            _curves(axes[row][column], runs, frame[frame["kind"] == kind], x, colors)
            _dress(axes[row][column], _X[x] if row else "", "" if column else _Y[kind])
    chances = {row["chance"] for one in runs for row in one.evaluations if row["chance"] is not None}
    for axis in axes[1] if len(chances) == 1 else []:
        axis.axhline(*chances, color="0.5", linewidth=1, linestyle=":")
    names = [Line2D([], [], color=colors[one.run_id], linewidth=3, label=one.name) for one in runs]
    parts[0].legend(handles=names, loc="outside lower left", frameon=False, fontsize=9, ncols=1 if len(runs) < 4 else 2)
    if maps:
        _maps(parts[1], maps[:MAPS])
    figure.savefig(target, dpi=160)


def _curves(axis: Axes, runs: Sequence[Run], points: pd.DataFrame, x: str, colors: dict[str, str]) -> None:
    for one in runs:
        line = points[(points["run_id"] == one.run_id) & points[x].notna()].sort_values(x)
        if line.empty:
            continue
        color = colors[one.run_id]
        if line["kind"].iloc[0] == "training":
            window = max(len(line) // 20, 1)
            smooth = line["value"].rolling(window, center=True, min_periods=1).mean()
            axis.plot(line[x], line["value"], color=color, linewidth=0.8, alpha=0.35 if window > 1 else 1)
            axis.plot(line[x], smooth, color=color, linewidth=1.8)
        else:
            known = line[line["low"].notna()]
            axis.fill_between(known[x], known["low"], known["high"], color=color, alpha=0.15, linewidth=0)
            axis.errorbar(
                known[x], known["value"], [known["value"] - known["low"], known["high"] - known["value"]],
                fmt="none", ecolor=color, elinewidth=0.9, capsize=2,
            )  # fmt: skip
            axis.plot(line[x], line["value"], "o-", color=color, linewidth=1.8, markersize=4)
        if one.status not in ("ok", "evaluated", "simulated", "emulated"):
            axis.plot(line[x].iloc[-1], line["value"].iloc[-1], "x", color=color, markersize=10, markeredgewidth=2)


def _dress(axis: Axes, x: str, y: str) -> None:
    axis.set(xlabel=x, ylabel=y)
    axis.grid(visible=True, color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _maps(part: Any, maps: Sequence[tuple[Run, dict[tuple[str, str], dict[str, Any]]]]) -> None:
    """Draw success by depth, from the prompt's beginning at the top, and length."""
    axes = part.subplots(1, len(maps), squeeze=False)[0]
    for axis, (one, by) in zip(axes, maps, strict=True):
        depths = sorted({depth for depth, _ in by})
        lengths = in_order(length for _, length in by)
        grid = [[by[depth, n]["success"] if (depth, n) in by else float("nan") for n in lengths] for depth in depths]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for i, depth in enumerate(depths):
            for j, length in enumerate(lengths):
                if (depth, length) in by:
                    value, count = by[depth, length]["success"], by[depth, length]["examples"]
                    ink = "black" if value > 0.6 else "white"
                    axis.text(j, i, f"{value:.2f}\n({count})", ha="center", va="center", fontsize=8, color=ink)
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), depths)
        axis.set(xlabel="tokens of the prompt", ylabel="depth of the evidence")
        step = one.evaluations[-1]["step"]
        axis.set_title(one.name + ("" if step is None else f", step {step}"), fontsize=9)
    part.colorbar(image, ax=list(axes), label="success (prompts)")
