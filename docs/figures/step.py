"""Draw docs/figures/step.svg, the picture of a step: ``python docs/figures/step.py``."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FORWARD, BACKWARD, STATE = "#0072B2", "#D55E00", "#009E73"  # of the Okabe-Ito palette, told apart by the colour-blind
CHUNKS = 5
LEFT, WIDTH, GAP = 1.2, 1.35, 0.15


def box(ax: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    """Draw a rounded box of one unit's height with ``text`` in it."""
    style = "round,pad=0,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch((x, y), width, 0.62, boxstyle=style, facecolor=colour + "22", edgecolor=colour, lw=1.3))
    ax.text(x + width / 2, y + 0.31, text, ha="center", va="center", fontsize=9.5)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, *, dashed: bool = False) -> None:
    """Draw an arrow; gradients are dashed."""
    line = "--" if dashed else "-"
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, lw=1.4, linestyle=line))


def draw(ax: Axes) -> None:
    """Draw prompt, retained state and responses, and what flows between them."""
    starts = [LEFT + i * (WIDTH + GAP) for i in range(CHUNKS)]
    right = starts[-1] + WIDTH
    for i, x in enumerate(starts):
        box(ax, x, 4.3, WIDTH, f"chunk {i + 1}", FORWARD)
        arrow(ax, (x + WIDTH / 2 - 0.18, 4.3), (x + WIDTH / 2 - 0.18, 3.16), FORWARD)
        arrow(ax, (x + WIDTH / 2 + 0.18, 3.16), (x + WIDTH / 2 + 0.18, 4.3), BACKWARD, dashed=True)
    box(ax, LEFT, 2.54, right - LEFT, "retained state, per layer: keys and values · recurrent state · latents", STATE)
    arrow(ax, (starts[0], 5.25), (right, 5.25), FORWARD)
    ax.text(LEFT, 5.4, "1  prefill: the prompt once, without autograd, chunk by chunk", color=FORWARD, fontsize=10)
    arrow(ax, (right, 3.85), (starts[0], 3.85), BACKWARD, dashed=True)
    words = "3  prompt backward (exact):\n    chunks last to first,\n    each evaluated again"
    ax.text(right + 0.2, 3.72, words, color=BACKWARD, fontsize=10, va="center")
    for i, y in enumerate((1.35, 0.55)):
        x = LEFT + 2.2 * i
        box(ax, x, y - 0.1, 2.6, f"response {i + 1}", FORWARD)
        arrow(ax, (x + 1.05, 2.54), (x + 1.05, y + 0.52), FORWARD)
        arrow(ax, (x + 1.45, y + 0.52), (x + 1.45, 2.54), BACKWARD, dashed=True)
    words = "2  replay: responses one at a time,\n    with autograd"
    ax.text(right - 2.6, 1.6, words, color=FORWARD, fontsize=10, va="center")
    ax.text(right + 0.2, 2.2, "gradient", color=BACKWARD, fontsize=10, va="center")
    arrow(ax, (right + 1.25, 2.2), (right + 2.1, 2.2), BACKWARD, dashed=True)
    ax.text(right + 0.2, 1.8, "values", color=FORWARD, fontsize=10, va="center")
    arrow(ax, (right + 1.25, 1.8), (right + 2.1, 1.8), FORWARD)
    ax.set_xlim(LEFT - 0.1, right + 3.3)
    ax.set_ylim(0.3, 5.8)
    ax.axis("off")


def main() -> None:
    """Write the figure beside this script."""
    figure, ax = plt.subplots(figsize=(10.5, 4.3))
    draw(ax)
    figure.subplots_adjust(0, 0, 1, 1)
    plt.rcParams["svg.hashsalt"] = "step"  # the same file at every run
    figure.savefig(Path(__file__).with_name("step.svg"), metadata={"Date": None})


main()
