"""How an exception reads in a record and on a terminal."""

from __future__ import annotations


def status_of(error: BaseException) -> str:
    """Return the record's status for an exception: ``oom`` or ``error``."""
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    # on a CPU PyTorch raises a plain RuntimeError
    return "oom" if out_of_memory or "DefaultCPUAllocator: can't allocate memory" in str(error) else "error"


def describe(error: BaseException) -> str:
    """Return an exception in one line; a message meant for the user stands alone, without the class's name."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if text and is_users(error) else f"{type(error).__name__}: {text}".removesuffix(": ")


def is_users(error: BaseException) -> bool:
    """Return whether an exception speaks of what the user wrote: configuration, data, files."""
    return isinstance(error, ValueError | OSError) or status_of(error) == "oom"
