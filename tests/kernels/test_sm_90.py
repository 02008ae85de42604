"""The kernels compiled for Hopper at the models' shapes, compared with the recorded table `sm_90.csv`."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHARED_LIMIT = 232_448
with (HERE / "sm_90.csv").open(newline="") as file:
    RECORDED = list(csv.DictReader(file))
OPS = list(dict.fromkeys(row["op"] for row in RECORDED))
KEY = ("op", "case", "kernel", "dtype", "blocks", "warps", "stages")


def too_much(row, recorded):
    """Yield what is wrong with a compiled row, given what is recorded of it."""
    if int(row["shared_bytes"]) > SHARED_LIMIT:
        yield f"{row['shared_bytes']} bytes of shared memory, {SHARED_LIMIT} are there"
    if recorded is None:
        yield "is not in sm_90.csv: python tests/kernels/sm_90.py --write " + row["op"]
    elif int(row["spill_bytes"]) > int(recorded["spill_bytes"]):
        yield f"spills {row['spill_bytes']} bytes, recorded are {recorded['spill_bytes']}"
    elif row != recorded:
        yield f"is {row}, recorded is {recorded}"


def problems(table, recorded):
    """Return what is wrong with a compiled table."""
    known = {tuple(row[x] for x in KEY): row for row in recorded}
    keys = [tuple(row[x] for x in KEY) for row in table]
    wrong = [(key, x) for key, row in zip(keys, table, strict=True) for x in too_much(row, known.get(key))]
    return wrong + [(key, "is recorded and not compiled") for key in known if key not in keys]


@pytest.mark.slow
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the table is that of Triton 3.7.1")
@pytest.mark.parametrize("op", OPS)
def test_compiles_as_recorded(op):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / "sm_90.py"), op]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not problems(list(csv.DictReader(io.StringIO(done.stdout))), [x for x in RECORDED if x["op"] == op])


def test_every_op_with_kernels_is_in_the_table():
    folder = ROOT / "longstraw" / "ops"
    written = {x.relative_to(folder).parts[0] for x in folder.rglob("*.py") if "@triton.jit" in x.read_text()}
    assert sorted(written) == sorted(OPS)


@pytest.mark.parametrize(
    ("column", "value"), [("shared_bytes", "232449"), ("spill_bytes", "99999"), ("tensor_cores", "none")]
)
def test_comparison_can_fail(column, value):
    assert not problems(RECORDED, RECORDED)
    row = next(row for row in RECORDED if row["tensor_cores"] != "none")
    assert problems([row | {column: value} if x is row else x for x in RECORDED], RECORDED)
    assert problems(RECORDED[1:], RECORDED)
    assert problems(RECORDED, RECORDED[1:])
