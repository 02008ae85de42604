"""Show jobs while they run: a live table on a terminal, elsewhere a line for each change of state."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from longstraw.tracking.run_folder import last_row, progress_place, read_json
from longstraw.units import format_seconds

LINE_SECONDS = 30.0  # between two lines on one job's progress, without a terminal


@dataclass
class JobLine:
    """One job on the screen. ``state`` is ``queued``, ``running``, ``done`` or ``failed``."""

    run_dir: Path
    label: str
    steps: int
    state: str = "queued"
    since: float = field(default_factory=time.monotonic)
    note: str = ""  # what SLURM reports about it
    _verb: tuple[Any, ...] = ()
    _start: tuple[float, float] = (0.0, 0.0)  # when the verb was first seen, and how far it was

    def become(self, state: str) -> bool:
        """Set the state; return whether it changed."""
        if state == self.state:
            return False
        self.state, self.since = state, time.monotonic()
        return True

    def progress(self) -> str:
        """Return how far the job is: its step and verb, position counts and the time left in the verb."""
        if self.state == "queued":
            return self.note
        if self.state in ("done", "failed"):
            return str((last_row(self.run_dir) or {}).get("error") or "")
        now = read_json(self.run_dir / "progress.json")
        if not {"verb", "done", "total"} <= set(now):
            return "starting"
        step, verb, done, total = now.get("step", 0), now["verb"], now["done"], now["total"]
        counts = f" {done:,}/{total:,}" if total else ""
        text = f"{progress_place(now, f'/{self.steps}')}  {verb}{counts}"
        return text + self._left((step, verb), done, total)

    def _left(self, verb: tuple[Any, ...], done: float, total: float) -> str:
        at = time.monotonic()
        if verb != self._verb or done < self._start[1]:
            self._verb, self._start = verb, (at, done)
        passed, moved = at - self._start[0], done - self._start[1]
        if not total or passed < 2 or moved <= 0 or done >= total:
            return ""
        return f"  {100 * done / total:.0f} %, {format_seconds(passed / moved * (total - done))} left"


class Screen:
    """Show jobs until closed; on a terminal in place, otherwise line by line."""

    def __init__(self, lines: Sequence[JobLine], out: TextIO | None = None) -> None:
        self.lines, self.out = lines, out or sys.stdout
        self._shown_at: dict[Path, float] = {}
        self._live: Any = None
        if self.out.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self.out), auto_refresh=False, transient=True)
            self._live.start()

    def update(self, changed: Sequence[JobLine] = ()) -> None:
        """Show the jobs' current states; ``changed`` are the jobs whose state is new."""
        if self._live is not None:
            self._live.update(self._rows(), refresh=True)
            return
        for line in self.lines:
            due = (
                line.state == "running"
                and time.monotonic() - self._shown_at.get(line.run_dir, line.since) > LINE_SECONDS
            )
            if line in changed or due:
                self._shown_at[line.run_dir] = time.monotonic()
                print("  ".join(filter(None, (line.label, line.state, line.progress()))), file=self.out, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _rows(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        colours = {"queued": "dim", "running": "cyan", "done": "green", "failed": "red"}
        rows = Table.grid(padding=(0, 2))
        show_job = [line for line in self.lines if line.state == "running"]
        show_job += [line for line in self.lines if line.state != "running"][: max(30 - len(show_job), 0)]
        for line in sorted(show_job, key=self.lines.index):
            took = format_seconds(time.monotonic() - line.since) if line.state == "running" else ""
            state = Text(line.state, style=colours[line.state])
            progress = Text(line.progress(), no_wrap=True, overflow="ellipsis")
            rows.add_row(Text(line.label, no_wrap=True), state, Text(took, no_wrap=True), progress)
        return rows


@contextmanager
def show_job(line: JobLine) -> Iterator[None]:
    """Show one job that runs in this process, from a thread."""
    line.become("running")
    screen, over = Screen([line]), threading.Event()

    def show() -> None:
        while not over.wait(0.5):
            screen.update()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        screen.close()
