"""Find the log files of a job's ranks and read their last lines."""

from __future__ import annotations

from pathlib import Path

from longstraw.launch.manifest import Entry
from longstraw.tracking.run_folder import last_row
from longstraw.units import format_bytes

TAIL_BYTES = 1 << 16  # read from the end of a log


def log_path(entry: Entry, rank: int = 0) -> Path | None:
    """Return where a job's rank writes what it prints; ``None`` where it wrote to the terminal of its command."""
    if entry.executor == "slurm":
        return entry.folder / "logs" / f"{entry.job_id}" / f"{entry.job_id}_{rank}_log.out"
    written = sorted((entry.run_dir / "log").glob(f"*_{rank}_log.out"), key=lambda path: path.stat().st_mtime)
    return written[-1] if written else None


def tail(path: Path, lines: int = 8) -> list[str]:
    """Return the last lines of a file that are not blank; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    said = [line.rstrip() for line in text.splitlines() if line.strip()]
    return said[-lines:]


def failed_tail(entry: Entry, lines: int = 8) -> str:
    """Return the last lines of the rank that failed first, under a line that says which; empty where there are none."""
    rank = (last_row(entry.run_dir) or {}).get("failed_rank") or 0
    path = log_path(entry, rank)
    said = tail(path, lines) if path is not None else []
    if not said:
        return ""
    assert path is not None
    head = f"job {entry.name}, rank {rank}, the end of {path} ({format_bytes(path.stat().st_size)}):"
    return "\n".join([head, *(f"  | {line}" for line in said)])
