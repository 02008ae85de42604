"""Draw gradients.svg from gradients.csv: cosine and relative L2 by length of the prompt."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
PAPER = {"cosine": 0.522, "relative_l2": 0.925}  # the paper's own check of its detached gradient
SETS = {"all": ("all parameters", "#0072B2", "o"), "adapters": ("adapters", "#D55E00", "s")}


def main() -> None:
    """Draw a point for each text and a line through their means."""
    rows = pd.read_csv(HERE / "gradients.csv")
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
    for ax, (column, paper) in zip(axes, PAPER.items(), strict=True):
        for trained, (label, colour, marker) in SETS.items():
            part = rows[rows.trained == trained]
            ax.scatter(part.prompt, part[column], color=colour, marker=marker, s=16, alpha=0.6)
            means = part.groupby("prompt")[column].mean()
            ax.plot(means.index, means, color=colour, label=label)
        ax.axhline(paper, color="black", linestyle="--", linewidth=1, label="the paper's check")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(rows.prompt.unique()), [f"{n}" for n in sorted(rows.prompt.unique())])
        ax.set_xlabel("prompt, tokens")
        ax.set_ylabel({"cosine": "cosine", "relative_l2": "relative L2"}[column])
        ax.set_ylim(0, 1.05)
    axes[0].legend(frameon=False)
    plt.rcParams["svg.hashsalt"] = "longstraw"
    figure.savefig(HERE / "gradients.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
