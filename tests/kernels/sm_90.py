"""What the kernels become on a Hopper GPU, without one: every launch of the host code compiled, none run.

    python tests/kernels/sm_90.py                    print the table of all cases of `sm_90_cases.py`
    python tests/kernels/sm_90.py --write attention  compile that op's cases, replace its rows of sm_90.csv

The host code runs unmodified on CPU tensors (of any size: memory that is not touched costs nothing); each launch is
compiled with the specialisation that very call would have. Triton's wheel brings the assembler. Must run in a process
of its own without TRITON_INTERPRET, for it puts a driver that is no driver in place.
"""

import csv
import inspect
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCHITECTURE = 90
SHARED_LIMIT = 232_448  # bytes of shared memory a block may ask for
TABLE = Path(__file__).with_name("sm_90.csv")
COLUMNS = (
    *("op", "case", "kernel", "dtype", "blocks", "warps", "stages"),
    *("shared_bytes", "registers", "spill_bytes", "tensor_cores"),
)


class NoDriver:
    """Answers what Triton asks a driver before it compiles, as an H20 would."""

    def __init__(self):
        self.utils = self
        self.get_device_capability = lambda *_: divmod(ARCHITECTURE, 10)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda *_: 0

    def get_current_target(self):
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_properties(self, _):
        return {"max_shared_mem": SHARED_LIMIT, "multiprocessor_count": 78, "warpSize": 32, "max_num_regs": 65536}


def compiled_launches(function):
    """Call ``function`` and return (launched name, its arguments by name, compiled kernel) of every launch."""
    launches = []
    real = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = real(self, *args, grid=grid, warmup=True, **kwargs)
        known = {name: value for name, value in kwargs.items() if name in self.arg_names}
        launches.append((self.fn.__name__, inspect.signature(self.fn).bind_partial(*args, **known).arguments, kernel))
        return kernel

    JITFunction.run = run
    try:
        function()
    finally:
        JITFunction.run = real
    return launches


def resources(kernel):
    """Return the columns of the table that the compiled ``kernel`` decides."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.asm["ptx"])
        # only the assembler's report says how much is spilled: assemble again, and make sure that it is the same
        command = [get_ptxas(ARCHITECTURE).path, "-lineinfo", "-v", "--regAllocOptLevel=2"]
        command += [f"--gpu-name=sm_{ARCHITECTURE}a", str(source), "-o", str(binary)]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
        if binary.read_bytes() != kernel.asm["cubin"]:
            raise RuntimeError("the assembler was not called as Triton calls it: its report is of another binary")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    ptx = kernel.asm["ptx"]
    return {
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "shared_bytes": kernel.metadata.shared,
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spill_bytes": sum(map(int, spills)),
        "tensor_cores": "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none",
    }


def rows(op, case, function):
    """Return the rows of one case, one a different kernel that it launches."""
    found = {}
    for name, arguments, kernel in compiled_launches(function):
        if kernel.hash in found:
            continue
        dtype = next((str(x.dtype).removeprefix("torch.") for x in arguments.values() if torch.is_tensor(x)), "")
        blocks = " ".join(f"{x}={value}" for x, value in arguments.items() if x.startswith("BLOCK"))
        row = {"op": op, "case": case, "kernel": name, "dtype": dtype, "blocks": blocks}
        found[kernel.hash] = {key: str(value) for key, value in (row | resources(kernel)).items()}
    if not found:
        raise RuntimeError(f"the case {case} of {op} launches nothing")
    return list(found.values())


def read_table():
    """Return the rows of the recorded table."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def print_table(table, file):
    """Write rows as CSV to an open file."""
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)


def main(arguments):
    """Compile the cases of the ops named, by default of all."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET is set: nothing would be compiled")
    write = "--write" in arguments
    driver.set_active(NoDriver())
    from sm_90_cases import CASES

    ops = [x for x in arguments if x != "--write"] or list(CASES)
    table = [row for op in ops for case, function in CASES[op].items() for row in rows(op, case, function)]
    if write:
        kept = [row for row in read_table() if row["op"] not in ops]
        with TABLE.open("w", newline="") as file:
            print_table(sorted(kept + table, key=lambda row: list(CASES).index(row["op"])), file)
    else:
        print_table(table, sys.stdout)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        main(sys.argv[1:])
