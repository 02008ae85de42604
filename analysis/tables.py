"""Write tables of strings as Markdown, LaTeX and CSV."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class Shown:
    """What a notebook's cell ends in: a table in Markdown, or a picture with a text that says the same."""

    text: str
    png: bytes | None = None

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str | None:
        return self.text if self.png is None else None

    def _repr_png_(self) -> bytes | None:
        return self.png


def markdown(frame: pd.DataFrame, right: Sequence[str] = ()) -> str:
    """Return a table that is readable as it stands; columns named in ``right`` are aligned right."""
    header = [str(column) for column in frame.columns]
    body = [[str(cell).replace("|", r"\|").replace("\n", " ") for cell in row] for row in frame.to_numpy()]
    widths = [max(3, *(len(row[i]) for row in [header, *body])) for i in range(len(header))]
    to_right = [column in right for column in header]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, to_right, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, to_right, strict=True))
    return "\n".join([line(header), f"|{rule}|", *map(line, body)])


def latex(frame: pd.DataFrame, right: Sequence[str] = ()) -> str:
    """Return a ``tabular`` in the style of booktabs."""
    spec = "".join("r" if column in right else "l" for column in frame.columns)
    rows = [" & ".join(_escape(cell) for cell in row) + r" \\" for row in [list(frame.columns), *frame.to_numpy()]]
    lines = [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}"])


def _escape(cell: object) -> str:
    return "".join(_LATEX.get(character, character) for character in str(cell).replace("\n", " "))


def write_csv(frame: pd.DataFrame, target: str) -> None:
    """Write a table of exact values to a file, or to stdout for ``-``."""
    text = frame.to_csv(index=False, lineterminator="\n")
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def read_beside(name: str) -> pd.DataFrame:
    """Return one of the tables that lie beside this file, such as ``paper.csv``."""
    return pd.read_csv(Path(__file__).with_name(name))
