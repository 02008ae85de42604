"""Read offline W&B files without a server, for tests that compare them with the records.

A ``run-ID.wandb`` file is a LevelDB log (blocks of 32 KiB, records of seven header bytes and a body that may span
blocks) of ``wandb.proto`` messages. A killed run leaves a torn tail, which ends the reading and is reported.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
HEADER = struct.Struct("<IHB")  # checksum, length, kind
MAGIC = b":W&B"
FILE_HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbRun:
    """One file, that is one attempt or one fragment of it: several may share an ``id``."""

    path: Path
    id: str | None = None
    name: str | None = None
    project: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)  # the last value of each key
    exit_code: int | None = None  # None: killed, or still running
    torn: bool = False


def read_run(path: str | Path) -> WandbRun:
    """Return one file's run; ``history`` has one dict a logged row, with the keys as logged (``key/subkey``).

    Raises ``ValueError`` if the file is none of W&B's.
    """
    from wandb.proto import wandb_internal_pb2

    run = WandbRun(Path(path))
    for body in _records(run):
        record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(body)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            message = record.run
            run.id, run.name, run.project = message.run_id, message.display_name, message.project
            run.group, run.tags = message.run_group or None, list(message.tags)
            _merge(run.config, message.config.update)
        elif kind == "config":
            _merge(run.config, record.config.update)
        elif kind == "history":
            row: dict[str, Any] = {}
            _merge(row, record.history.item)
            run.history.append({key: value for key, value in row.items() if not key.startswith("_")})
        elif kind == "summary":
            _merge(run.summary, record.summary.update)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    run.config.pop("_wandb", None)
    run.summary = {key: value for key, value in run.summary.items() if not key.startswith("_")}
    return run


def read_runs(root: str | Path) -> list[WandbRun]:
    """Return every run below a folder, fragments of one run in the order in which they began."""
    # wandb leaves a link "latest-run" beside the folders.
    paths = {path.resolve() for path in Path(root).rglob("run-*.wandb")}
    return [read_run(path) for path in sorted(paths)]


def _merge(into: dict[str, Any], items: Any) -> None:
    for item in items:
        keys = list(item.nested_key) or [item.key]
        target = into
        for key in keys[:-1]:
            target = target.setdefault(key, {})
        target[keys[-1]] = json.loads(item.value_json)


def _records(run: WandbRun) -> Iterator[bytes]:
    """Yield the bodies of a file's records; at a torn or damaged one set ``run.torn`` and stop."""
    data = run.path.read_bytes()
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{run.path}: not a file of W&B's; it should begin with {MAGIC.decode()}")
    position, parts = FILE_HEADER, b""
    while position < len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:  # a block's last few bytes are padding
            position += left
            continue
        header = data[position : position + HEADER.size]
        if not any(header):
            return  # preallocated zeros
        checksum, length, kind = HEADER.unpack(header) if len(header) == HEADER.size else (0, 0, 0)
        position += HEADER.size
        body = data[position : position + length]
        position += length
        if len(body) < length or kind not in (FULL, FIRST, MIDDLE, LAST):
            run.torn = True
            return
        if zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
            run.torn = True
            return
        if kind in (FULL, FIRST):
            parts = b""
        parts += body
        if kind in (FULL, LAST):
            yield parts
    run.torn = run.torn or (bool(parts) and kind in (FIRST, MIDDLE))
