"""The rows of stored rollouts: lines of JSON, and tables in Parquet or as ``datasets`` saves them."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from longstraw.data.jsonl import read_lines
from longstraw.data.jsonl_schema import parse_object
from longstraw.data.rollouts.tables import DatasetFolder, ParquetFile
from longstraw.data.task import DataError

PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt")
SAVED = "state.json"  # in every folder that ``Dataset.save_to_disk`` writes
SPLITS = "dataset_dict.json"  # in one of ``DatasetDict.save_to_disk``
NO_PICKLE = (
    "is a pickle, which can run any code when it is opened, so none is; write its rollouts as one of the other "
    "formats, such as lines of {group, prompt_ids, response_ids, logprobs, reward}"
)


class Source(Protocol):
    """A file, or folder, of rows that can be read in order and again by their place."""

    path: Path

    def rows(self) -> Iterator[tuple[int, int, Any]]:
        """Yield place, number from 1 and raw content of every row."""
        ...

    def raw(self, place: int) -> Any: ...

    def parse(self, raw: Any) -> dict[str, Any]: ...


class JsonLines:
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield byte offset, line number and content of every line that is not blank."""
        return read_lines(self.path)

    def raw(self, place: int) -> bytes:
        """Return the line that begins at byte ``place``."""
        with self.path.open("rb") as file:
            file.seek(place)
            return file.readline()

    def parse(self, raw: bytes) -> dict[str, Any]:
        """Return the object of a line; raise ``DataError`` for what is none."""
        return parse_object(raw)


def find_sources(path: str) -> list[Source]:
    """Return the sources that ``data.path`` names, files in the order of the numbers in their names.

    Of a folder's files those below a folder ``eval`` are left out, and those below ``all`` where ``effective`` is
    beside it: prime-rl writes the same rollouts to both. Raises ``DataError`` or ``FileNotFoundError``.
    """
    named = Path(path).expanduser()
    if "*" in path:
        fixed = Path(*named.parts[: next(i for i, part in enumerate(named.parts) if "*" in part)])
        found = sorted(fixed.glob(str(named.relative_to(fixed))), key=_natural)
        if not found:
            raise FileNotFoundError(f"data.path={path} matches no file")
        return [source for each in found for source in find_sources(str(each))]
    if not named.exists():
        raise FileNotFoundError(f"data.path={path} is not there; give a file or folder of stored rollouts")
    if named.is_file():
        return [_open(named)]
    if (named / SPLITS).is_file():
        splits = ", ".join(sorted(p.name for p in named.iterdir() if (p / SAVED).is_file()))
        raise DataError(f"data.path={path} holds the splits {splits}; name one, such as data.path={path}/train")
    if (named / SAVED).is_file():
        return [DatasetFolder(named)]
    inside = [p for p in named.rglob("*") if p.is_file() and p.suffix in (".jsonl", ".parquet", *PICKLES)]
    files = sorted((p for p in inside if p.suffix not in PICKLES and _trained(p, named)), key=_natural)
    if not files:
        if inside and inside[0].suffix in PICKLES:
            raise DataError(f"{inside[0]} {NO_PICKLE}")
        raise DataError(f"data.path={path}: no .jsonl or .parquet file there, and no folder of the datasets library")
    return [_open(file) for file in files]


def _trained(path: Path, folder: Path) -> bool:
    """Whether a file is of rollouts that were trained on, as far as the folders above it say."""
    parts = path.relative_to(folder).parts[:-1]
    if "eval" in parts or path.name.startswith("val_data_step"):
        return False
    for depth, part in enumerate(parts):
        if part == "all" and folder.joinpath(*parts[:depth], "effective", *parts[depth + 1 :], path.name).is_file():
            return False
    return True


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _open(path: Path) -> Source:
    with path.open("rb") as file:
        head = file.read(4)
    if (
        path.suffix in PICKLES
        or head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
        or _is_saved(path, head)
    ):
        raise DataError(f"{path} {NO_PICKLE}")
    return ParquetFile(path) if head == b"PAR1" else JsonLines(path)


def _is_saved(path: Path, head: bytes) -> bool:
    """Whether a file is what ``torch.save`` writes: a zip with a pickle in it."""
    if head != b"PK\x03\x04":
        return False
    with zipfile.ZipFile(path) as packed:
        return any(name.endswith("data.pkl") for name in packed.namelist())
