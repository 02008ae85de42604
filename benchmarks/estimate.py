"""Predicted memory beside the published records in ``experiments``: ``python benchmarks/estimate.py [EXPERIMENT ...]``.

Prints a line a record, peak, verb and largest difference of a kind, and fails where a peak is further off than claimed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from longstraw.config import RunConfig, from_dict, option
from longstraw.memory import fit
from longstraw.memory.estimate import known

ROOT = Path(__file__).resolve().parents[1]


def config_of(row: dict[str, Any]) -> RunConfig:
    """Return the run that left a record."""
    typed = dict(word.lstrip("+").split("=", 1) for word in row["command"].split() if "=" in word)
    groups = {group: {**option(group, row[group])} for group in ("model", "hardware", "adapter", "algorithm")}
    groups["optimizer"] = option("optimizer", typed.get("optimizer", "adamw"))
    for key, value in typed.items():
        group, _, inner = key.partition(".")
        if group in groups and inner and "." not in inner:
            groups[group][inner] = json.loads(value) if value[:1] in "[0123456789" else value
    nodes = row["nodes"]
    if row["hardware"] != "cpu":
        groups["hardware"] |= {"nodes": nodes, "gpus_per_node": row["world_size"] // nodes, "ranks": None}
    groups["model"]["dtype"] = row["dtype"]
    same = ("context", "chunk", "group_size", "prompt_grad", "prompt_grad_window", "refresh_every")
    keys: dict[str, Any] = {key: row[key] for key in same}
    keys["state"] = {"gradient_dtype": row.get("state_gradient_dtype")}
    keys["steps"] = (row["step"] or 0) + 1
    keys["response_length"] = row["context"] - row["prompt_positions"]
    simulation = {"rank": row.get("simulated_rank") or 0, "imbalance": row.get("expert_imbalance") or 1.0}
    return from_dict(groups | keys | {"data": {"name": "needle"}, "simulation": simulation})


def main(names: list[str]) -> int:
    """Print the comparison and return the exit status."""
    far = 0
    print("| experiment | model | ranks | adapter | prompt_grad | context | counted | predicted | off | kind off | s |")
    print("|---|---|---:|---|---|---:|---:|---:|---:|---|---:|")
    for path in sorted((ROOT / "experiments").glob("*/records.jsonl")):
        if names and path.parent.name not in names:
            continue
        for line in path.read_text().splitlines():
            row = json.loads(line)
            config, begun = config_of(row), time.monotonic()
            fit.count([config])
            said = known(config, optimizer_held=bool(row["step"]))
            assert said is not None
            counted = row["peak_allocated_bytes"]
            off = said.peak / counted - 1
            far += abs(off) > fit.MARGIN - 1 or said.verb != row["peak_verb"]
            kinds = {kind: said.by_kind[kind] - size for kind, size in row["peak_bytes_by_kind"].items()}
            kind = max(kinds, key=lambda name: abs(kinds[name]))
            cells = [path.parent.name, row["model"], row["world_size"], row["adapter"], row["prompt_grad"]]
            cells += [row["context"], counted, said.peak, f"{off:+.4%}", f"{kind} {kinds[kind] / counted:+.3%}"]
            print("|", " | ".join(map(str, [*cells, round(time.monotonic() - begun)])), "|", flush=True)
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
