"""Read and write failure files: one small JSON file for each failed rank, with the reason. No torch."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from longstraw.errors import RankLostError
from longstraw.runtime.whole_files import write_whole


def ranks_folder(run_dir: str | Path, attempt: int) -> Path:
    """Return the folder in which an attempt's ranks record failures and logs."""
    return Path(run_dir) / "ranks" / str(attempt)


def write_failure(folder: Path, rank: int, failure: dict[str, Any]) -> None:
    """Write why ``rank`` ended: ``failure`` names the rank that failed first, its host, the reason and the status.

    An earlier file is kept. One that cannot be written is skipped: the other ranks see the missing heartbeat.
    """
    path = folder / f"{rank}.json"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return
        write_whole(path, json.dumps({**failure, "time": time.time()}) + "\n")


def read_failure(folder: Path, rank: int) -> str | None:
    """Return the failure that ``rank`` recorded, as JSON, or ``None``."""
    try:
        return (folder / f"{rank}.json").read_text()
    except OSError:
        return None


def first_failure(run_dir: str | Path, attempt: int) -> RankLostError | None:
    """Return the earliest failure that a rank of an attempt recorded, or ``None``."""
    found = []
    for path in ranks_folder(run_dir, attempt).glob("[0-9]*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = path.read_text()
            found.append((json.loads(text)["time"], text))
    return parse_failure(min(found)[1]) if found else None


def failure_fields(lost: RankLostError) -> dict[str, Any]:
    """Return the fields of a failure file."""
    return {"rank": lost.rank, "host": lost.host, "reason": lost.reason, "status": lost.status}


def parse_failure(text: str) -> RankLostError:
    """Return the error that a failure file's text describes."""
    fields = json.loads(text)
    return RankLostError(fields["rank"], fields["host"], fields["reason"], fields["status"])
