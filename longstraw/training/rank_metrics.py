"""Combine the rows of all ranks into the one record of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from longstraw.parallel.parallelize import Parallel

SUMMED = (
    "prefilled_positions",
    "replayed_positions",
    "scored_positions",
    "recomputed_positions",
    "sampled_positions",
    "groups",
    "equal_groups",
    "resampled",
    "flops",
)
LARGEST = ("prompt_positions", "response_positions", "recompute_difference", "peak_reserved_bytes", "host_bytes")
MEANS = (
    "loss",
    "reward_mean",
    "reward_std",
    "advantage_abs_mean",
    "entropy",
    "kl",
    "clip_fraction",
    "truncated_fraction",
    "response_length_mean",
    "sampler_drift",
    "logprob_drift",
    "loss_drift",
)
SLOWEST = "seconds_by_verb"


def reduce_rank_metrics(row: dict[str, Any], parallel: Parallel | None) -> dict[str, Any]:
    """Return the record of a step, alike on all ranks, from this rank's ``row``.

    Bytes are those of the rank with the highest peak. Over data-parallel prompts positions are summed, and loss and
    rewards averaged.
    """
    if parallel is None:
        return row | {"peak_allocated_bytes_by_rank": [row["peak_allocated_bytes"]]}
    rows = parallel.mesh.gather(row)
    return merge(rows, prompts=parallel.mesh.sizes.dp)


def merge(rows: list[dict[str, Any]], prompts: int) -> dict[str, Any]:
    """Merge the rows of all ranks, in rank order; each of the ``prompts`` has an equal number of consecutive ranks."""
    firsts = rows[:: len(rows) // prompts]  # all ranks of one prompt have the same values
    merged = dict(max(rows, key=lambda row: row["peak_allocated_bytes"]))
    merged["peak_allocated_bytes_by_rank"] = [row["peak_allocated_bytes"] for row in rows]
    merges: list[tuple[tuple[str, ...], Callable[[Any], Any]]] = [
        (SUMMED, sum),
        (LARGEST, max),
        (MEANS, statistics.fmean),
    ]
    for keys, function in merges:
        for key in keys:
            if key in merged:
                given = [row.get(key) for row in (rows if key in LARGEST else firsts)]
                merged[key] = None if None in given else function(given)
    verbs = {verb for row in rows for verb in row[SLOWEST]}
    merged[SLOWEST] = {verb: max(row[SLOWEST].get(verb, 0.0) for row in rows) for verb in sorted(verbs)}
    return merged
