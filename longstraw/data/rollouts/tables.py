"""Rows of Parquet files and of folders that the ``datasets`` library saved. The only module that imports pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longstraw.data.task import DataError

ROWS = 64  # read at a time: a row may hold a prompt of a million tokens


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("Parquet files and datasets folders need pyarrow: pip install 'longstraw[rollouts]'") from error
    return pyarrow


class ParquetFile:
    """The rows of one Parquet file; the group of rows that was read last is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[int, Any] = (-1, None)  # number and rows
        pyarrow = _pyarrow()
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: no Parquet that can be read: {error}") from None

    def rows(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield place, number from 1 and columns of every row."""
        place = 0
        for batch in self._file.iter_batches(batch_size=ROWS):
            for i in range(batch.num_rows):
                yield place, place + 1, batch.slice(i, 1).to_pylist()[0]
                place += 1

    def raw(self, place: int) -> dict[str, Any]:
        """Return the columns of the row at ``place``."""
        group, before = 0, 0
        while place >= before + (size := self._file.metadata.row_group(group).num_rows):
            group, before = group + 1, before + size
        if self._last[0] != group:
            self._last = (group, self._file.read_row_group(group))
        return self._last[1].slice(place - before, 1).to_pylist()[0]

    def parse(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the row, which is an object already."""
        return raw


class DatasetFolder:
    """The rows of a folder that ``Dataset.save_to_disk`` wrote; its files are mapped, not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        pyarrow = _pyarrow()
        try:
            files = [path / each["filename"] for each in json.loads((path / "state.json").read_text())["_data_files"]]
            maps = [pyarrow.memory_map(str(file)) for file in files]
            self._table = pyarrow.concat_tables([pyarrow.ipc.open_stream(each).read_all() for each in maps])
        except (OSError, ValueError, KeyError, TypeError) as error:  # of pyarrow too
            raise DataError(f"{path}: no folder of the datasets library that can be read: {error}") from None

    def rows(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield place, number from 1 and columns of every row."""
        for place in range(self._table.num_rows):
            yield place, place + 1, self.raw(place)

    def raw(self, place: int) -> dict[str, Any]:
        """Return the columns of the row at ``place``."""
        return self._table.slice(place, 1).to_pylist()[0]

    def parse(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the row, which is an object already."""
        return raw
