"""How an exception reads in a record and on a terminal."""

from __future__ import annotations


class RankLostError(RuntimeError):
    """A rank is gone: it failed, it stopped answering or it never came. ``status`` is what its record would say."""

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
    """Return an exception in one line; a message meant for the user stands alone, without the class's name."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return (
        text
        if text and (is_users(error) or isinstance(error, RankLostError))
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )


def is_users(error: BaseException) -> bool:
    """Return whether an exception speaks of what the user wrote: configuration, data, files."""
    return isinstance(error, ValueError | OSError) or status_of(error) == "oom"
