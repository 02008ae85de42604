"""What ended a rank, as it left it: a small JSON file in the run's folder for whoever looks later. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from longstraw.errors import RankLostError


def ranks_folder(run_dir: str | Path, attempt: int) -> Path:
    """Return the folder in which an attempt's ranks leave their words and logs."""
    return Path(run_dir) / "ranks" / str(attempt)


def write_failure(folder: Path, rank: int, word: dict[str, Any]) -> None:
    """Leave what ended ``rank``: ``word`` names the rank to blame, its host, the reason and the status.

    The first word stands. A file that cannot be written is passed over: the others notice the silence.
    """
    path = folder / f"{rank}.json"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps({**word, "time": time.time()}) + "\n")
        os.replace(beside, path)


def read_failure(folder: Path, rank: int) -> str | None:
    """Return the word that ``rank`` left, or ``None``."""
    try:
        return (folder / f"{rank}.json").read_text()
    except OSError:
        return None


def first_failure(run_dir: str | Path, attempt: int) -> RankLostError | None:
    """Return what the earliest word of an attempt's ranks says, or ``None`` if none left one."""
    found = []
    for path in ranks_folder(run_dir, attempt).glob("[0-9]*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = path.read_text()
            found.append((json.loads(text)["time"], text))
    return parse_failure(min(found)[1]) if found else None


def failure_fields(lost: RankLostError) -> dict[str, Any]:
    """Return the word that says who is lost."""
    return {"rank": lost.rank, "host": lost.host, "reason": lost.reason, "status": lost.status}


def parse_failure(text: str) -> RankLostError:
    """Return the error that a word, as JSON, speaks of."""
    word = json.loads(text)
    return RankLostError(word["rank"], word["host"], word["reason"], word["status"])
