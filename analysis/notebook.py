"""Execute notebooks without Jupyter, and hold what they print against what is committed.

    python -m analysis.notebook [--check] FILE.ipynb...

Each code cell is run in order in one namespace; what it prints and what its last line returns become its outputs, in
Jupyter's own format. ``--check`` writes nothing and fails where a text differs from the committed one. Pictures are
drawn again and not compared: their bytes change with the version that draws them.
"""

from __future__ import annotations

import argparse
import ast
import base64
import difflib
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.command import refuse, run

Notebook = dict[str, Any]


class CellError(Exception):
    """A cell that cannot be executed; the message says which, and why."""


@dataclass(frozen=True)
class Shown:
    """What a cell ends in: a table in Markdown, or a picture with a text that stands for it."""

    text: str
    png: bytes | None = None

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str | None:
        return self.text if self.png is None else None

    def _repr_png_(self) -> bytes | None:
        return self.png


def execute(notebook: Notebook, name: str = "notebook") -> Notebook:
    """Return the notebook with the outputs that its code cells give now; raise ``CellError`` where one fails."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            count += 1
            try:
                outputs = _outputs("".join(cell["source"]), namespace, f"{name}, cell {number}", count)
            except Exception as error:
                raise CellError(f"{name}, cell {number}: {type(error).__name__}: {error}") from error
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, namespace: dict[str, Any], where: str, count: int) -> list[dict[str, Any]]:
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, result = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, where, "exec"), namespace)
        if isinstance(last, ast.Expr):
            result = eval(compile(ast.Expression(last.value), where, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if result is not None:
        shown = {"data": _data(result), "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        outputs.append(shown)
    return outputs


def _data(result: Any) -> dict[str, Any]:
    """Return a value as Jupyter stores it: by media type, text as lines, pictures in base 64."""
    data: dict[str, Any] = {}
    markdown, png = (getattr(result, f"_repr_{kind}_", lambda: None)() for kind in ("markdown", "png"))
    if png is not None:
        data["image/png"] = base64.b64encode(png).decode()
    if markdown is not None:
        data["text/markdown"] = _lines(markdown)
    return {**data, "text/plain": _lines(repr(result))}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def texts(notebook: Notebook) -> list[str]:
    """Return the lines of all outputs, each with its cell's number; a picture is the text that stands for it."""
    lines = []
    for number, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", ()):
            plain = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
            lines += [f"cell {number}: {line}" for line in "".join(plain).splitlines()]
    return lines


def difference(committed: Notebook, now: Notebook) -> str:
    """Return where the texts of two executions differ, as ``diff`` tells it; empty where they do not."""
    return "\n".join(difflib.unified_diff(texts(committed), texts(now), "committed", "now", n=0, lineterm=""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute notebooks in place, or check them; return 0, or 1 where one differs, or 2 where one fails."""
    known = argparse.ArgumentParser(
        prog="python -m analysis.notebook",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known.add_argument("files", nargs="+", type=Path, metavar="FILE.ipynb")
    known.add_argument("--check", action="store_true", help="write nothing; fail where a text is not the committed one")
    options = known.parse_args(arguments)
    differ = False
    for path in options.files:
        try:
            committed = json.loads(path.read_text(encoding="utf-8"))
            now = execute(committed, path.name)
        except (CellError, OSError, ValueError) as error:
            return refuse("notebook", error)
        if not options.check:
            path.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        elif told := difference(committed, now):
            differ = True
            print(f"{path} differs from what its cells give now; python -m analysis.notebook {path} writes it\n{told}")
    return int(differ)


if __name__ == "__main__":
    run(main)
