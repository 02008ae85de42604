"""Reconstruct the command that started this process, for records."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def typed_command() -> str:
    """Return the command line that started this process, quoted for a shell."""
    program = Path(sys.argv[0])
    start = ["python", "-m", "longstraw.run"] if program.name == "run.py" else [program.name]
    return shlex.join([*start, *sys.argv[1:]])
