"""Print how runs learn: reward and success on held-out prompts against steps and seconds, from any number of files.

    python -m analysis.learning PATH... [--figure out.png] [--csv FILE|-] [--latex] [--claim NAME]

A row a run, named by the keys in which the runs differ: the mean training reward of the first and of the last tenth of
its steps, and success on held-out prompts in its first and its last evaluation with the 95 % interval. Then success by
the evidence's depth and the prompt's length in each run's last evaluation. Seconds are those of the steps: evaluations
are not counted. Runs that broke off, without evaluations, or of an evaluation alone have a row too.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.cases import text
from analysis.command import parser, refuse, run
from analysis.learning_runs import Run, depth_table, learning, load_runs, shown
from analysis.records import NoRecords, note
from analysis.tables import latex, markdown, write_csv


def _say(runs: Sequence[Run]) -> None:
    """Say which runs broke off and why, and which have no evaluations."""
    for one in runs:
        if one.job is not None and one.status not in ("ok", "simulated", "emulated"):
            reason = " ".join(text(one.job.last["error"]).split())
            note(f"{one.name}: {one.status} after {len(one.job.finished)} steps{reason and f': {reason}'}")
    without = [one.name for one in runs if not one.evaluations]
    if without:
        note(f"no evaluation in {'; '.join(without)}; a run with evaluate.every=N has some")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return 0, or 2 if there is nothing to tabulate."""
    known = parser("learning", __doc__)
    known.add_argument("--figure", metavar="FILE", help="draw the curves and the heat map of depth by length")
    options = known.parse_args(arguments)
    try:
        runs = load_runs(options.paths, options.claim)
        frame = learning(runs)
        if options.csv:
            write_csv(frame, options.csv)
        if options.figure:
            from analysis.learning_figures import draw_learning

            draw_learning(runs, frame, options.figure)
    except (NoRecords, OSError, ValueError) as error:  # matplotlib's for a suffix it does not know
        return refuse("learning", error)
    _say(runs)
    if options.csv != "-":
        made = latex if options.latex else markdown
        table, depths = shown(runs, frame), depth_table(runs)
        print(made(table, [name for name in table if name not in ("run", "status", "interval")]))
        if len(depths):
            print("\n" + made(depths, [name for name in depths if name != "run"]))
    return 0


if __name__ == "__main__":
    run(main)
