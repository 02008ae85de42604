"""Write the tables of tests/README.md: ``pytest --junitxml=junit.xml``, then ``python tests/overview.py junit.xml``.

What each file is for is its docstring; tests and seconds by folder are those of pytest's report. Without a report
there is no table of seconds.
"""

import ast
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
BEGIN = "<!-- python tests/overview.py junit.xml writes what follows -->"


def purpose(file: Path) -> str:
    """Return the first sentence of a file's docstring."""
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def seconds(report: Path) -> dict[str, list[float]]:
    """Return the seconds of each test, by folder."""
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        found[case.get("classname", "").split(".")[1]].append(float(case.get("time", 0)))
    return found


def main(reports: list[str]) -> None:
    """Replace what follows ``BEGIN`` in the README."""
    files = sorted(HERE.glob("*/test_*.py"))
    folders = sorted({file.parent.name for file in files})
    lines = []
    for report in reports:
        found = seconds(Path(report))
        lines += ["", "| folder | tests | seconds | of the slowest |", "|---|---:|---:|---:|"]
        for folder, each in sorted(found.items()):
            lines.append(f"| {folder} | {len(each)} | {sum(each):,.0f} | {max(each):.1f} |")
    for folder in folders:
        lines += ["", f"**{folder}**", ""]
        lines += [f"* `{file.name}`: {purpose(file)}" for file in files if file.parent.name == folder]
    readme = HERE / "README.md"
    readme.write_text(readme.read_text().partition(BEGIN)[0] + "\n".join([BEGIN, *lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
