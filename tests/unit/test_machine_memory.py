"""Limits on a process's memory as Linux states them: of the machine, of control groups of both kinds, of ulimit."""

import subprocess
import sys

import pytest

from longstraw.runtime.machine_memory import memory_limits


def machine(root, cgroup, **limits):
    """Write a machine of 16 GiB whose process holds 1000 pages, in the control group of a line ``cgroup``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/statm").write_text("5000 1000 1 1 0 1 0")
    (root / "proc/meminfo").write_text("MemFree: 1 kB\nMemTotal:       16777216 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group_limit(root):
    return [limit.of for limit in memory_limits(root) if "control group" in limit.name]


def test_the_machine_s_memory_less_what_is_held(tmp_path):
    limit, *_ = memory_limits(machine(tmp_path, ""))
    assert (limit.of, limit.of - limit.left) == (16 * 2**30, 1000 * 4096)
    assert limit.shared


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/a/b\n", {"a__b__memory_dot_max": "5000\n", "a__memory_dot_max": "4000\n"}, [4000]),
        ("0::/a/b\n", {"a__b__memory_dot_max": "max\n"}, []),
        ("0::/of/the/host\n", {"memory_dot_max": "7000\n"}, [7000]),
        ("3:cpu:/x\n4:hugetlb,memory:/x\n", {"memory__x__memory.limit_in_bytes": "6000\n"}, [6000]),
        ("4:memory:/x\n", {"memory__x__memory.limit_in_bytes": "9223372036854771712\n"}, []),
    ],
)
def test_control_groups(tmp_path, cgroup, limits, expected):
    assert group_limit(machine(tmp_path, cgroup, **limits)) == expected


def test_a_limit_on_virtual_memory():
    code = "from longstraw.runtime.machine_memory import memory_limits as m; x = m()[-1]; print(x.of, x.left, x.shared)"
    done = subprocess.run(
        ["sh", "-c", f'ulimit -v 4000000; exec "{sys.executable}" -c "{code}"'], capture_output=True, text=True
    )
    of, left, shared = done.stdout.split()
    assert int(of) == 4_000_000 * 1024
    assert 0 < int(left) < int(of)
    assert shared == "False"
