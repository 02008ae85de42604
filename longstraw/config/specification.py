"""Decide whether two configurations give the same numbers, so that only such a run resumes a checkpoint.

All keys matter but those in ``FREE``: where and on how many ranks a job runs, how it is tracked, evaluated and
saved, and how many steps it takes in all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

FREE = (
    "checkpoint",
    "chunk",
    "claim",
    "evaluate",
    "hardware",
    "launch",
    "mode",
    "reward_timeout",
    "save",
    "server.backoff",
    "server.deadline",
    "server.folder",
    "server.retries",
    "server.url",
    "simulation",
    "state.device",
    "state.keep_attention",
    "steps",
    "tracking",
)


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that decide a run's numbers and differ, as ``a.b``, each with both values."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key in FREE:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, json.loads(json.dumps(value))  # tuples as the lists they are in a file
