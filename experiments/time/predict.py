"""Predict the seconds of the paper's cases, by verb and by what binds; CSV on stdout."""

import csv
import sys
from dataclasses import replace

from longstraw.config import AdapterConfig, RunConfig, from_dict, option
from longstraw.simulation.simulate import simulate
from longstraw.timing.work import RESOURCES

CASES = (
    ("qwen3_6_27b", "h20x8", 2_097_152, "detached"),
    ("qwen3_6_27b", "h20x8", 2_097_152, "exact"),
    ("glm_5_2", "h20x32", 2_105_344, "detached"),
    ("glm_5_2", "h20x32", 2_105_344, "exact"),
)
HEAD = (
    "model",
    "hardware",
    "context",
    "prompt_grad",
    "keep_attention",
    "peak_bytes",
    "verb",
    "seconds",
    *RESOURCES,
    "rank_flops",
)


def configured(model: str, hardware: str, context: int, prompt_grad: str, keep_attention: bool) -> RunConfig:
    groups = {"model": option("model", model), "hardware": option("hardware", hardware), "data": {"name": "needle"}}
    keys = {"context": context, "prompt_grad": prompt_grad, "state": {"keep_attention": keep_attention}}
    config = from_dict(groups | keys | {"mode": "simulate"})
    return replace(config, adapter=AdapterConfig(name="lora"))


def main(names: list[str]) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(HEAD)
    for case in ((*case, kept) for kept in (False, True) for case in CASES):
        if names and case[0] not in names:
            continue
        (row,) = simulate(configured(*case))
        for verb, seconds in row["predicted_seconds_by_verb"].items():
            bound, flops = row["predicted_bound_by_verb"][verb], row["rank_flops_by_verb"][verb]
            parts = [f"{bound[name]:.2f}" for name in RESOURCES]
            table.writerow([*case, row["peak_allocated_bytes"], verb, f"{seconds:.2f}", *parts, f"{flops:.4g}"])
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
