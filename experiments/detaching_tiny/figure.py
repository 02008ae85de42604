"""Draw curves.svg from runs.csv and print the table: success on held-out prompts of both arms, every run."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

from longstraw.tracking.evaluations import mean_interval

HERE = Path(__file__).parent
TESTS = 512
# the best answer without the skill
TRIVIAL = {"shifted": 13 / 48, "gap": 11 / 32, "duplicate": 5 / 12, "chain": 11 / 32}
COLOURS = {"exact": "#0072B2", "detached": "#D55E00"}


def main() -> None:
    """Read the rows, draw a panel a task and column, and print the last point of every run."""
    rows = pd.read_csv(HERE / "runs.csv" if len(sys.argv) < 2 else sys.argv[1])
    panels = list(rows.groupby(["task", "learn"]))
    figure, axes = plt.subplots(len(panels), 3, figsize=(10, 3 * len(panels)), squeeze=False, layout="constrained")
    for line, ((task, learn), part) in zip(axes, panels, strict=True):
        for ax, (x, y) in zip(line, (("step", "success"), ("cpu_seconds", "success"), ("step", "cosine")), strict=True):
            for (arm, _), run in part.groupby(["arm", "seed"]):
                ax.plot(run[x], run[y], color=COLOURS[arm], marker=".", linewidth=1)
            ax.set_xlabel({"step": "step", "cpu_seconds": "CPU-seconds"}[x])
            ax.set_ylabel({"success": "success", "cosine": "cosine, exact and detached"}[y])
            ax.set_ylim(0, 1)
        line[0].axhline(TRIVIAL[task], color="black", linestyle="--", linewidth=1)
        line[1].axhline(TRIVIAL[task], color="black", linestyle="--", linewidth=1)
        line[0].set_title(f"{task}, {learn}", loc="left")
    handles = [plt.Line2D([], [], color=colour, label=arm) for arm, colour in COLOURS.items()]
    axes[0][0].legend(handles=handles, frameon=False)
    plt.rcParams["svg.hashsalt"] = "longstraw"
    figure.savefig(HERE / "curves.svg", metadata={"Date": None})
    print(table(rows))


def table(rows: pd.DataFrame) -> str:
    """Return the last success of every run with its 95 % interval, and the lowest cosine along it, in Markdown."""
    lines = ["| task | answers | seed | arm | steps | CPU-s | success | 95 % | lowest cosine |"]
    lines.append("|---|---|---:|---|---:|---:|---:|---|---:|")
    for (task, learn, seed, arm), run in rows.groupby(["task", "learn", "seed", "arm"]):
        last = run.iloc[-1]
        right = round(last.success * TESTS)
        _, low, high = mean_interval([1.0] * right + [0.0] * (TESTS - right), "wilson")
        cells = f"{last.step} | {last.cpu_seconds:.0f} | {last.success:.3f} | {low:.3f} to {high:.3f}"
        lines.append(f"| {task} | {learn} | {seed} | {arm} | {cells} | {run.cosine.min():.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
