"""Draw a rank's peak memory for the notebooks: against context, group size or ranks, and stacked by kind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from analysis.figures import COLORS, short_count
from analysis.memory import gigabytes, kinds_of
from analysis.tables import Shown, read_beside
from longstraw.units import GB

_AXES = {
    "context": "context, positions of one branch",
    "group_size": "group size, responses that share the prompt",
    "world_size": "ranks that share the prompt",
}
_NEED_LOG = ("context", "world_size")  # doubled from point to point


def peak_against(frame: pd.DataFrame, x: str, *, paper: bool = False, room: float | None = None) -> Shown:
    """Draw peak against ``context``, ``group_size`` or ``world_size``, a line each model, prompt gradient and ranks.

    ``paper`` adds the paper's measured peaks of the same models, ``room`` a line at what a device leaves to a step.
    """
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    lines = [f"peak in GB against {x}"]
    for (name, line), color in zip(_series(frame, x), cycle(COLORS), strict=False):
        axis.plot(line[x], line["peak_allocated_bytes"] / GB, "s--", color=color, markerfacecolor="white", label=name)
        lines.append(_described(name, line[x], line["peak_allocated_bytes"]))
        lines += [_paper(axis, line, x, color)] if paper else []
    if room is not None:
        axis.axhline(room / GB, color="0.4", linewidth=1, linestyle=":", label=f"room for a step, {room / GB:.1f} GB")
    values = sorted(set(frame[x]))
    if x in _NEED_LOG:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(values)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(round(value))))
    axis.set_ylim(bottom=0)
    axis.set(xlabel=_AXES[x], ylabel="peak of a rank, GB")
    _dress(axis)
    axis.legend(frameon=False, fontsize=9)
    return Shown("\n".join(filter(None, lines)), _png(figure))


def _series(frame: pd.DataFrame, x: str) -> list[tuple[str, pd.DataFrame]]:
    by = [key for key in ("model", "prompt_grad", "world_size", "mode") if key != x]
    lines = []
    for key, line in frame.groupby(by):
        known = dict(zip(by, key, strict=True))
        how = {"simulate": "simulated", "emulate": "emulated"}.get(str(known.pop("mode")), "measured")
        words = [f"{value} ranks" if name == "world_size" else value for name, value in known.items()]
        lines.append((f"{', '.join(words)}: {how}", line.sort_values(x).drop_duplicates(x)))
    return lines


def _paper(axis: Axes, line: pd.DataFrame, x: str, color: str) -> str:
    """Mark what the paper measured for the same model and gradient; return it as text."""
    first = line.iloc[0]
    known = read_beside("paper.csv").dropna(subset=["peak_gb"])
    known = known[(known["model"] == first["model"]) & (known["prompt_grad"] == first["prompt_grad"])]
    known = known[known["refresh_every"] == first["refresh_every"]] if x == "group_size" else known
    if known.empty or x not in known:
        return ""
    axis.plot(known[x], known["peak_gb"], "*", color=color, markersize=12, label="the paper: measured on 8 x H20")
    return _described("the paper", known[x], known["peak_gb"] * GB)


def _described(name: str, x: pd.Series, peak: pd.Series) -> str:
    return f"{name}: " + ", ".join(f"{short_count(int(a))} {gigabytes(b)}" for a, b in zip(x, peak, strict=True))


def stacked(frame: pd.DataFrame, columns: Sequence[str], *, room: float | None = None) -> Shown:
    """Draw a bar for each job of what its peak consisted of; ``columns`` are the keys in which the jobs differ."""
    frame = frame.sort_values([*columns], ignore_index=True)
    names = [", ".join(_named(key, row[key]) for key in columns) for row in frame.to_dict("records")]
    kinds = kinds_of(frame)
    figure = Figure(figsize=(8.5, 1.4 + 0.5 * len(frame)), layout="constrained")
    axis = figure.subplots()
    left = [0.0] * len(frame)
    for kind, color in zip(kinds, cycle(COLORS), strict=False):
        width = [each.get(kind, 0) / GB for each in frame["kinds"]]
        hatch = "//" if kinds.index(kind) >= len(COLORS) else None
        axis.barh(names, width, left=left, color=color, label=kind.replace("_", " "), height=0.6, hatch=hatch)
        left = [a + b for a, b in zip(left, width, strict=True)]
    if room is not None:
        axis.axvline(room / GB, color="0.4", linewidth=1, linestyle=":", label=f"room, {room / GB:.1f} GB")
    axis.invert_yaxis()
    axis.set_xlabel("peak of a rank, GB")
    _dress(axis)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    peaks = zip(names, frame["peak_allocated_bytes"], strict=True)
    return Shown("\n".join(["peak in GB", *(f"{name}: {gigabytes(peak)}" for name, peak in peaks)]), _png(figure))


def _named(key: str, value: object) -> str:
    if key == "context":
        return short_count(int(str(value)))
    return {"world_size": f"{value} ranks", "group_size": f"group {value}"}.get(key, str(value))


def _dress(axis: Axes) -> None:
    axis.grid(visible=True, which="major", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=100, metadata={"Software": None})
    return written.getvalue()
