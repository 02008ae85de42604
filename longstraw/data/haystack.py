"""Read text to hide a needle in: the user's files and folders, or the source of Python's standard library."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longstraw.data.task import DataError
from longstraw.data.tokenizer import Tokenizer

PIECE = 2**20  # characters read and tokenised at a time, so that files of any size work
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}  # of the standard library


def read_haystack(places: list[str], tokenizer: Tokenizer, least: int) -> tuple[str, NDArray[np.int64], str]:
    """Return text, its tokens and a name for where it comes from: ``least`` tokens or more, fewer if there are no more.

    Folders are walked in sorted order and files in them that are not UTF-8 text are skipped; a named file must be text.
    """
    name = ", ".join(places) or f"standard library of Python {platform.python_version()}"
    texts, tokens, count = [], [], 0
    for text in _named(places) if places else _standard_library():
        texts.append(text)
        tokens.append(tokenizer.encode(text))
        count += len(tokens[-1])
        if count >= least:
            break
    if count == 0:
        raise DataError(f"data.haystack: no text in {name}")
    return "".join(texts), np.concatenate(tokens), name


def check_haystack(places: list[str]) -> None:
    """Raise ``DataError`` or ``OSError`` for a place without text; no more than the beginning of each is read."""
    for place in places:
        if not next(_named([place]), ""):
            raise DataError(f"data.haystack: no text in {place}")


def _named(places: list[str]) -> Iterator[str]:
    for place in places:
        if not place:
            raise DataError("data.haystack names an empty path; leave it out, and Python's standard library is taken")
        path = Path(place).expanduser()
        if path.is_file():
            try:
                yield from _pieces(path)
            except UnicodeDecodeError as error:
                raise DataError(f"data.haystack: {path} is no UTF-8 text: {error.reason} at {error.start}") from None
        elif path.is_dir():
            yield from _folder(path, set(), "")
        else:
            raise FileNotFoundError(f"data.haystack: {path} is not there; give text files or folders, several as [A,B]")


def _standard_library() -> Iterator[str]:
    return _folder(Path(sysconfig.get_path("stdlib")), LEFT_OUT, ".py")


def _folder(root: Path, left_out: set[str], suffix: str) -> Iterator[str]:
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in left_out and not name.startswith("."))
        for name in sorted(files):
            if name.startswith(".") or not name.endswith(suffix):
                continue
            try:
                yield from _pieces(Path(folder, name))
            except (UnicodeDecodeError, OSError):
                continue


def _pieces(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        while piece := file.read(PIECE):
            yield piece
