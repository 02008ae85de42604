"""Arguments and error handling that the table commands share."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def parser(name: str, description: str | None, *, paper: str | None = None) -> argparse.ArgumentParser:
    """Return the arguments that every table takes; ``paper`` says what ``--paper`` adds, if there is that."""
    arguments = argparse.ArgumentParser(
        prog=f"python -m analysis.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add("paths", nargs="+", metavar="PATH", help="record files, or folders searched for records*.jsonl")
    add("--csv", metavar="FILE", help="write exact values there; - prints them instead of the table")
    add("--latex", action="store_true", help="print a booktabs tabular instead of Markdown")
    if paper is not None:
        add("--paper", action="store_true", help=paper)
    add("--claim", help="only records of this claim")
    return arguments


def refuse(name: str, error: Exception) -> int:
    """Say in one line what is wrong and return the exit status 2."""
    print(f"analysis.{name}: {error}", file=sys.stderr)
    return 2


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its status; end quietly under ``| head``."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
