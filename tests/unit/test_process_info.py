"""How this process was started and which rank it is; the first failure written counts."""

import json

import pytest

from longstraw.config import ConfigError, HardwareConfig
from longstraw.errors import RankLostError, describe, status_of
from longstraw.runtime import process_info as module
from longstraw.runtime.failure_files import failure_fields, first_failure, ranks_folder, read_failure, write_failure
from longstraw.runtime.process_info import ProcessInfo, check_world_size, process_info, threads

SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "8"}
STEP = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "4"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
LOCAL = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_NTASKS": "4",
    "SUBMITIT_LOCAL_GLOBALID": "2",
    "SUBMITIT_LOCAL_LOCALID": "2",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_JOB_ID": "99",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ProcessInfo(start="0.0")),
        (STEP, ProcessInfo("slurm", 5, 8, 1, 2, 2, "7.0")),
        (
            {**STEP, "SLURM_RESTART_COUNT": "3", "SUBMITIT_EXECUTOR": "slurm"},
            ProcessInfo("slurm", 5, 8, 1, 2, 2, "7.3"),
        ),
        # A batch script sees its job's tasks and is none of them.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ProcessInfo("slurm", 0, 1, 0, 1, 2, "7.0")),
        (TORCHRUN, ProcessInfo("torchrun", 3, 4, 1, 2, 1, "0")),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}, ProcessInfo("torchrun", 3, 4, 1, 2, 1, "1")),
        ({key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE")}, ProcessInfo(start="0.0")),
        (LOCAL, ProcessInfo("local", 2, 4, 2, 4, 0, "99")),
        # srun may start torchrun, and a job of this machine may be started inside an allocation.
        ({**STEP, **TORCHRUN}, ProcessInfo("torchrun", 3, 4, 1, 2, 1, "0")),
        ({**STEP, **LOCAL}, ProcessInfo("local", 2, 4, 2, 4, 0, "99")),
    ],
)
def test_how_this_process_was_started(environment, expected):
    assert process_info(environment) == expected


def test_as_many_ranks_as_the_hardware_has():
    four = HardwareConfig(name="cpu", backend="cpu", ranks=4)
    check_world_size(process_info(TORCHRUN), four)
    with pytest.raises(ConfigError, match=r"torchrun started 4 ranks and hardware=cpu has 3: give hardware\.ranks=4"):
        check_world_size(process_info(TORCHRUN), HardwareConfig(name="cpu", backend="cpu", ranks=3))
    with pytest.raises(ConfigError, match=r"has 4 ranks and 1 was started: .*python -m longstraw\.run"):
        check_world_size(process_info({}), four)


def test_the_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: range(10), raising=False)
    assert threads(process_info(LOCAL), {}) == 2
    assert threads(process_info(TORCHRUN), {}) == 5
    assert threads(ProcessInfo("local", world_size=64, local_world_size=64), {}) == 1
    assert threads(process_info(LOCAL), {"OMP_NUM_THREADS": "3"}) == 3
    assert threads(process_info(STEP), {"SLURM_CPUS_PER_TASK": "12"}) == 12


def test_a_lost_rank_in_words():
    lost = RankLostError(2, "n7", "failed: no memory", "oom")
    assert describe(lost) == "rank 2 on n7 failed: no memory"
    assert status_of(lost) == "oom"


def test_the_first_word_of_an_attempt_counts(tmp_path):
    assert first_failure(tmp_path, 10) is None
    for attempt, rank, lost in ((0, 1, 3), (10, 2, 1), (10, 1, 0), (9, 0, 3)):
        word = failure_fields(RankLostError(lost, "n7", f"failed in attempt {attempt}"))
        write_failure(ranks_folder(tmp_path, attempt), rank, word)
    (ranks_folder(tmp_path, 10) / "5.json").write_text("{")  # torn
    found = first_failure(tmp_path, 10)
    assert (found.rank, found.reason) == (1, "failed in attempt 10")


def test_the_first_word_of_a_rank_stands(tmp_path):
    for reason in ("first", "second"):
        write_failure(tmp_path, 1, failure_fields(RankLostError(1, "n7", reason)))
    assert json.loads(read_failure(tmp_path, 1))["reason"] == "first"
    assert read_failure(tmp_path, 2) is None
