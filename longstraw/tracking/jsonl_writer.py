"""Append rows to a file of JSON lines that never ends in half a line, even when the disk is full."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from longstraw.errors import os_reason
from longstraw.tracking.schema import RecordError, to_line


class JsonlWriter:
    """Append rows to one file; a row is written whole or not at all."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        if fresh and path.exists() and path.stat().st_size:
            raise RecordError(
                f"{path} holds an earlier run's records and is not overwritten; use another run folder, or go on with "
                f"that run: python -m longstraw.status {shlex.quote(str(path.parent))} --again"
            )
        self._file = path.open("ab+", buffering=0)
        if not fresh and self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, row: dict[str, Any]) -> None:
        """Write one line, or leave the file as it was, show the row on stderr and raise ``RecordError``."""
        line = to_line(row)
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            sys.stderr.write(line.decode())
            raise RecordError(
                f"{self.path}: {os_reason(error)}, so the record of step {row.get('step')} is not in it; "
                f"the row is on stderr. Earlier rows are whole. Free some space and resume from the checkpoint"
            ) from error

    def close(self) -> None:
        if self._file.closed:
            return
        with contextlib.suppress(OSError):  # every line is with the kernel already; some file systems cannot sync
            os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
