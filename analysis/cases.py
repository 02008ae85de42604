"""Find the keys in which jobs differ, and format their values for tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from longstraw.units import format_count

SETUP = [  # of these a table shows those in which its jobs differ, and a figure draws a line for each
    *(
        "world_size",
        "dp",
        "ep",
        "nodes",
        "device_name",
        "adapter",
        "algorithm",
        "optimizer",
        "learning_rate",
        "data",
        "chunk",
        "refresh_every",
    ),
    *("dtype", "state_dtype", "state_gradient_dtype", "state_device", "rope_scaling", "frozen"),
    *("simulated_rank", "expert_imbalance"),
]


def differing(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return those of ``keys`` in which jobs differ, or that some jobs' records have and others' have not."""
    return [key for key in keys if len(set(map(text, frame[key]))) > 1]


def gradient(row: dict[str, Any]) -> str:
    """Return the prompt gradient that was carried, with its window where that ended before the prompt."""
    window = row["prompt_grad_window"]
    return text(row["prompt_grad"]) + ("" if pd.isna(window) else f", last {format_count(int(window))}")


def text(value: Any) -> str:
    """Return a cell of a table: nothing for what is not known."""
    return "" if value is None or pd.isna(value) else str(value)
