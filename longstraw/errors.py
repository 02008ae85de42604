"""Describe exceptions for records and terminals, and find the operating system's error that caused one."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

UNWRITABLE = {  # clearer words than the system's
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission to write",
}


class RankLostError(RuntimeError):
    """A rank failed, stopped answering or never connected. ``status`` is the record's status for it."""

    def __init__(self, rank: int, host: str, reason: str, status: str = "error") -> None:
        super().__init__(f"rank {rank} on {host} {reason}")
        self.rank, self.host, self.reason, self.status = rank, host, reason, status

    def __reduce__(self) -> tuple[type[RankLostError], tuple[int, str, str, str]]:
        return type(self), (self.rank, self.host, self.reason, self.status)


class TooLargeError(ValueError):
    """A run that needs more memory than its machine has, found before it starts."""


def status_of(error: BaseException) -> str:
    """Return the record's status for an exception: ``oom``, ``too_large``, ``error``, or that of a lost rank."""
    if isinstance(error, RankLostError):
        return error.status
    if isinstance(error, TooLargeError):
        return "too_large"
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    # on a CPU PyTorch raises a plain RuntimeError
    return "oom" if out_of_memory or "DefaultCPUAllocator: can't allocate memory" in str(error) else "error"


def describe(error: BaseException) -> str:
    """Return an exception in one line; messages meant for the user without the name of the class."""
    plain = error.strerror if isinstance(error, OSError) and error.filename is None else None  # without [Errno 28]
    lines = str(plain or error).strip().splitlines()
    text = lines[0] if lines else ""
    return (
        text
        if text and (is_users(error) or isinstance(error, RankLostError))
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )


def is_users(error: BaseException) -> bool:
    """Return whether an exception is about the user's input: configuration, data, files."""
    return isinstance(error, ValueError | OSError) or status_of(error) == "oom"


def os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error that led to an exception, ``None`` if none did.

    Libraries raise their own instead: torch's zip writer and OmegaConf chain it, safetensors writes its number.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            return OSError(int(number[1]), os.strerror(int(number[1])))
        error = error.__cause__ or error.__context__
    return None


def write_error(folder: Path) -> OSError | None:
    """Return the error of writing into a folder now; ``None`` if it works."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(bytes(1 << 16))
    except OSError as error:
        return error
    finally:
        probe.unlink(missing_ok=True)
    return None


def os_reason(error: OSError) -> str:
    """Return the reason of an error of the operating system in plain words, with its own behind them."""
    known = UNWRITABLE.get(error.errno or 0)
    return f"{known} ({error.strerror})" if known else str(error.strerror or error)
