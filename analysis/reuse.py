"""Print the reuse table: how far a retained prompt that steps share drifts from a freshly evaluated one.

    python -m analysis.reuse PATH... [--csv FILE|-] [--latex] [--paper] [--claim NAME]

One row for each number of optimizer steps since the prompt was evaluated, from records with refresh_every above 1 in
which the drift was measured: the relative difference of the loss and the mean absolute difference of the
log-probabilities from a freshly evaluated prompt, averaged over the steps of that age. On policy the
loss has no drift; algorithm.old_logprobs=score compares with the policy that evaluated the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.command import parser, refuse, run
from analysis.records import Job, NoRecords, load_jobs
from analysis.tables import latex, markdown, read_beside, write_csv
from longstraw.units import format_count

_KEYS = ["model", "hardware", "context", "group_size", "refresh_every", "state_age"]
_DRIFTS = ["loss_drift", "logprob_drift"]


def reuse(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return mean drifts and the number of steps by case and ``state_age``; raise ``NoRecords`` if there are none."""
    rows = [row for job in jobs for row in job.finished if (row["refresh_every"] or 1) > 1]
    frame = pd.DataFrame(rows, columns=[*_KEYS, *_DRIFTS])
    frame = frame.dropna(subset=_DRIFTS, how="all").dropna(subset=["state_age"])
    if frame.empty:
        raise NoRecords("no finished step with refresh_every above 1 and a measured drift; run with refresh_every=8")
    frame[_DRIFTS] = frame[_DRIFTS].astype("float64").abs()
    groups = frame.groupby(_KEYS, dropna=False, as_index=False)
    return groups.agg(
        loss_drift=("loss_drift", "mean"), logprob_drift=("logprob_drift", "mean"), steps=("context", "size")
    )


def with_paper(frame: pd.DataFrame) -> pd.DataFrame:
    """Add what the paper reports at 1M positions for the same number of steps."""
    paper = read_beside("paper_reuse.csv")[["state_age", *_DRIFTS]]
    return frame.merge(paper.rename(columns={key: f"paper_{key}" for key in _DRIFTS}), on="state_age", how="left")


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table as people read it, all strings."""
    table = pd.DataFrame(
        {
            "model": frame["model"].astype(str),
            "hardware": frame["hardware"].astype(str),
            "context": frame["context"].map(lambda value: "" if pd.isna(value) else format_count(int(value))),
            "group": frame["group_size"].astype(str),
            "refresh every": frame["refresh_every"].astype(str),
            "steps since capture": frame["state_age"].astype(int).astype(str),
            "loss drift": frame["loss_drift"].map(_percent),
            "logprob drift": frame["logprob_drift"].map(_small),
            "measured steps": frame["steps"].astype(str),
        }
    )
    if "paper_loss_drift" in frame:
        table["paper loss drift"] = frame["paper_loss_drift"].map(_percent)
        table["paper logprob drift"] = frame["paper_logprob_drift"].map(_small)
    return table


def _percent(value: float) -> str:
    return "" if pd.isna(value) else f"{100 * value:.4g} %"


def _small(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.4g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0, or 2 if there is nothing to tabulate."""
    options = parser("reuse", __doc__, paper="add what the paper reports at 1M positions").parse_args(arguments)
    try:
        frame = reuse(load_jobs(options.paths, options.claim))
    except NoRecords as error:
        return refuse("reuse", error)
    if options.paper:
        frame = with_paper(frame)
    try:
        if options.csv:
            write_csv(frame, options.csv)
    except OSError as error:
        return refuse("reuse", error)
    if options.csv != "-":
        table = shown(frame)
        print((latex if options.latex else markdown)(table, list(table.columns)[2:]))
    return 0


if __name__ == "__main__":
    run(main)
