"""Writing a file in one step, so that a reader sees the old content or the new one, whole. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str) -> None:
    """Write ``content`` to a hidden file beside ``path`` and rename it; on ``OSError`` nothing is left behind."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(content)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
