"""How much memory this process may take from its machine: the machine's own, its control group's, ``ulimit -v``."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60  # version 1 of control groups writes a number above it where there is no limit


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that may be held beside what this process holds already, and what says so."""

    left: int
    of: int
    name: str
    shared: bool  # by all processes of this machine, or each has its own


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return every limit on this process's memory. ``root`` is where ``proc`` and ``sys`` are found (Linux)."""
    virtual, resident = _held(root)
    limits = []
    if (machine := _machine(root)) is not None:
        limits.append(MemoryLimit(machine - resident, machine, "the machine's memory", shared=True))
    if (group := _control_group(root)) is not None:
        limits.append(MemoryLimit(group - resident, group, "the control group's memory limit", shared=True))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(MemoryLimit(soft - virtual, soft, "the limit on virtual memory (ulimit -v)", shared=False))
    return limits


def _held(root: Path) -> tuple[int, int]:
    """Return the bytes of address space and of memory that this process holds."""
    try:
        virtual, resident = (root / "proc/self/statm").read_text().split()[:2]
    except (OSError, ValueError):
        return 0, 0
    return int(virtual) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _machine(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), None)


def _control_group(root: Path) -> int | None:
    """Return the least limit among this process's control group and those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = mount / path.strip("/")
        for folder in (inside, *inside.parents):  # in a container the path may be the host's: its mount has the limit
            if folder.is_relative_to(mount):
                limits += _number(folder / name)
    return min(limits, default=None)


def _number(path: Path) -> list[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and int(text) < UNLIMITED else []
