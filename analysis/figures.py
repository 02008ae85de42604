"""Draw figures of peak memory from the capacity table. Needs no display."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.cases import SETUP, differing, gradient
from longstraw.units import GB, MIB

# Okabe and Ito's palette, distinct for colour-blind readers
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
_KINDS: dict[str, dict[str, Any]] = {  # how a peak is known
    "measured": {"linestyle": "-", "marker": "o", "linewidth": 1.8, "markersize": 6},
    "simulated": {"linestyle": "--", "marker": "s", "linewidth": 1.4, "markersize": 6, "markerfacecolor": "white"},
    "emulated": {"linestyle": "-.", "marker": "^", "linewidth": 1.4, "markersize": 6},
    "predicted": {"linestyle": ":", "marker": "x", "linewidth": 1.2, "markersize": 6, "alpha": 0.9},
}


def draw_capacity(frame: pd.DataFrame, target: str | Path) -> None:
    """Draw peak against the positions of a branch, and against group size.

    ``frame`` is ``capacity()``'s. A line joins jobs that differ in nothing but what its axis shows: on the left each
    group has a line of its own, on the right each context. Jobs that did not finish show what was predicted for them.
    """
    points = _points(frame)
    figure, axes = plt.subplots(1, 2, figsize=(11, 5.6), sharey=True, layout="constrained")
    unit, name = (GB, "GB") if (points["peak"].max() or 0) >= GB else (10**6, "MB")
    points = points.assign(peak=points["peak"] / unit)
    colors = dict(zip(sorted(set(points["series"])), cycle(COLORS), strict=False))
    _lines(axes[0], points, "context", ["series", "kind", "group_size"], colors)
    _lines(axes[1], points, "group_size", ["series", "kind", "context"], colors)
    _failed(axes, points, colors)
    _dress(axes, points, name)
    _name_contexts(axes[1], points)
    _legend(figure, points, colors)
    figure.savefig(target, dpi=160)
    plt.close(figure)


def _points(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row a marker: series, kind, context, group_size, peak in bytes, failed."""
    rows = []
    apart = differing(frame, ["hardware", *SETUP])
    for row in frame.to_dict("records"):
        context = row["context"] if pd.isna(row["positions"]) else row["positions"]
        if pd.isna(context) or pd.isna(row["group_size"]):
            continue
        point = {"series": _series(row, apart), "context": int(context), "group_size": int(row["group_size"])}
        kind = {"simulate": "simulated", "emulate": "emulated"}.get(row["mode"], "measured")
        if row["status"] in ("ok", "simulated", "emulated") and not pd.isna(row["peak_allocated_bytes"]):
            rows.append({**point, "kind": kind, "peak": int(row["peak_allocated_bytes"]), "failed": None})
        failed = row["status"] if row["status"] in ("oom", "too_large") else None
        # A job that ran out of memory was heading for what was predicted, not for what it had got so far.
        expected = row["predicted_peak_bytes"]
        if failed and pd.isna(expected):
            expected = row["peak_allocated_bytes"]
        if not pd.isna(expected):
            rows.append({**point, "kind": "predicted", "peak": int(expected), "failed": failed})
    return pd.DataFrame(rows, columns=["series", "kind", "context", "group_size", "peak", "failed"])


def _series(row: dict[str, Any], apart: Sequence[str]) -> str:
    """Return a line's name: model, prompt gradient, and the values in which the jobs of the figure differ."""
    units = {"world_size": "{} ranks", "nodes": "{} node(s)", "chunk": "chunk {}", "refresh_every": "{} steps a prompt"}
    units |= {
        "dp": "dp {}",
        "learning_rate": "lr {}",
        "ep": "ep {}",
        "state_dtype": "rows {}",
        "state_gradient_dtype": "row gradients {}",
    }
    words = [units.get(key, "{}").format(row[key]) for key in apart if not pd.isna(row[key]) and key != "device_name"]
    return ", ".join([str(row["model"]), gradient(row), *words])


def _lines(axis: Axes, points: pd.DataFrame, x: str, by: list[str], colors: dict[str, str]) -> None:
    for key, line in points.groupby(by):
        line = line.groupby(x, as_index=False)["peak"].max()
        axis.plot(line[x], line["peak"], color=colors[key[0]], zorder=2, **_KINDS[key[1]])


def _failed(axes: Any, points: pd.DataFrame, colors: dict[str, str]) -> None:
    """Ring the jobs that did not fit, where their prediction lies."""
    failed = points[points["failed"].notna()]
    for axis, x in zip(axes, ("context", "group_size"), strict=True):
        edges = [colors[series] for series in failed["series"]]
        axis.scatter(failed[x], failed["peak"], s=130, facecolors="none", edgecolors=edges, linewidths=1.6, zorder=3)


def _dress(axes: Any, points: pd.DataFrame, unit: str) -> None:
    left, right = axes
    contexts = sorted(set(points["context"]))
    if len(contexts) > 1:
        left.set_xscale("log", base=2)
        left.set_xticks(_thinned(contexts))
        left.xaxis.set_minor_locator(NullLocator())
    else:
        left.set_xticks(contexts)
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(round(value))))
    if len(points) and points["peak"].max() > 20 * points["peak"].min():
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_minor_locator(NullLocator())
    else:
        left.set_ylim(bottom=0, top=1.08 * points["peak"].max() if len(points) else 1)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(points):
        groups = sorted(set(points["group_size"]))
        right.set_xticks(groups if len(groups) <= 8 else groups[:: -(-len(groups) // 8)])
        room = 0.05 * (groups[-1] - groups[0]) or 1
        right.set_xlim(groups[0] - room, groups[-1] + 4 * room)  # the contexts are named there
    left.set(xlabel="positions of one branch: prompt and response", ylabel=f"peak allocated, {unit}")
    left.set_title("Peak against context (a line each group)", fontsize=11)
    right.set_xlabel("group size, responses that share the prompt")
    right.set_title("Peak against group size (a line each context)", fontsize=11)
    for axis in axes:
        axis.grid(visible=True, which="major", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)


def _thinned(contexts: list[int]) -> list[int]:
    """Return those that lie far enough apart on a binary axis to be named."""
    kept = [contexts[0]]
    for context in contexts[1:]:
        if context >= 1.5 * kept[-1]:
            kept.append(context)
    return kept


def _name_contexts(axis: Axes, points: pd.DataFrame) -> None:
    """Write a context at the right end of its highest line, if nothing is written there yet."""
    ends = points.sort_values("group_size").groupby(["series", "kind", "context"], as_index=False).last()
    ends = ends.sort_values("peak", ascending=False).drop_duplicates("context")
    span = points["peak"].max() or 1
    used: list[float] = []
    for end in ends.to_dict("records"):
        if axis.get_yscale() == "linear" and any(abs(end["peak"] - other) < 0.035 * span for other in used):
            continue
        used.append(end["peak"])
        axis.annotate(
            short_count(end["context"]),
            (end["group_size"], end["peak"]),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color="0.35",
        )


def _legend(figure: Any, points: pd.DataFrame, colors: dict[str, str]) -> None:
    series = [Line2D([], [], color=color, linewidth=3, label=name) for name, color in colors.items()]
    present = set(points["kind"])
    kinds = [Line2D([], [], color="0.3", label=kind, **style) for kind, style in _KINDS.items() if kind in present]
    if points["failed"].notna().any():
        ring: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "linestyle": ""}
        kinds.append(Line2D([], [], color="0.3", label="did not fit", **ring))
    look = {"frameon": False, "fontsize": 9}
    figure.legend(handles=series, loc="outside lower left", ncols=1 if len(series) < 4 else 2, **look)
    figure.legend(handles=kinds, loc="outside lower right", ncols=len(kinds), **look)


def short_count(count: int) -> str:
    """Return a count as short as it can be said exactly: ``16Ki``, ``4.25Mi``, ``2.1M``, ``1,023``."""
    for suffix, size in (("Mi", MIB), ("Ki", 1024), ("M", 10**6), ("K", 10**3)):
        if count >= size and 100 * count % size == 0:
            return f"{count / size:g}{suffix}"
    return f"{count:,}"
