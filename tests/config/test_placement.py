"""Where a job runs (this process, this machine, SLURM, a simulation), and what is said where it cannot."""

import subprocess

import pytest

from longstraw.config import ConfigError, HardwareConfig, from_dict, load_model_config, to_dict
from longstraw.launch import placement, slurm

CPU = {"name": "cpu", "backend": "cpu"}
NODE = {"name": "h20x8", "gpus_per_node": 8, "partition": "h20"}
ONE = {"name": "cuda", "gpus_per_node": 1}


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No SLURM, no GPU; tests add what they need."""
    for key in ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "RANK", "WORLD_SIZE", "SUBMITIT_EXECUTOR"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(placement.shutil, "which", lambda name: None)
    monkeypatch.setattr(placement, "visible_gpus", list)


def job(hardware, mode="auto"):
    model = to_dict(load_model_config("qwen3_6_tiny"))
    return from_dict({"model": model, "hardware": hardware, "data": {"name": "needle"}, "mode": mode, "context": 1024})


def with_slurm(monkeypatch, configured=True):
    monkeypatch.setattr(placement.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "sbatch" else None)
    monkeypatch.setattr(placement, "is_configured", lambda: configured)


def test_a_processor_is_always_here():
    assert placement.find(HardwareConfig(**CPU)).executor == "local"


def test_gpus_are_here_if_there_are_enough(monkeypatch):
    monkeypatch.setattr(placement, "visible_gpus", lambda: ["0"])
    assert placement.find(HardwareConfig(**ONE)).executor == "local"
    assert placement.find(HardwareConfig(**NODE)).executor == "none"
    assert placement.find(HardwareConfig(name="two", nodes=2, gpus_per_node=1)).executor == "none"


def test_slurm_wants_sbatch_and_a_partition(monkeypatch):
    assert placement.find(HardwareConfig(**NODE)).executor == "none"
    with_slurm(monkeypatch)
    assert placement.find(HardwareConfig(**NODE)).executor == "slurm"
    assert placement.find(HardwareConfig(**CPU)).executor == "local"
    assert placement.find(HardwareConfig(**CPU, partition="p")).executor == "slurm"
    assert "names no SLURM partition" in placement.find(HardwareConfig(**{**NODE, "partition": None})).why


def test_commands_of_slurm_without_a_cluster_are_no_slurm(monkeypatch):
    with_slurm(monkeypatch, configured=False)
    found = placement.find(HardwareConfig(**NODE))
    assert (found.mode, found.executor) == ("simulate", "none")
    assert "SLURM's commands know no cluster" in found.why


@pytest.mark.parametrize(
    ("says", "configured"),
    [
        (
            "sinfo: error: DNS SRV lookup failed\nsinfo: fatal: Could not establish a configuration source",
            False,
        ),
        ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", True),
        ("", True),
    ],
)
def test_a_cluster_that_does_not_answer_is_still_one(monkeypatch, says, configured):
    done = subprocess.CompletedProcess([], int(bool(says)), stdout="h20\n", stderr=says)
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: done)
    slurm.is_configured.cache_clear()
    assert slurm.is_configured() == configured
    slurm.is_configured.cache_clear()


def test_inside_an_allocation_a_job_runs_here(monkeypatch):
    with_slurm(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert placement.find(HardwareConfig(**NODE)).executor == "local"


def test_auto_runs_or_simulates_and_says_why():
    assert placement.resolve(job(CPU)).mode == "run"
    found = placement.resolve(job({**NODE, "dp": 2}))
    assert (found.mode, found.executor) == ("simulate", "local")
    assert found.why.startswith("hardware=h20x8 wants 8 GPUs, 0 visible here and ")
    with pytest.raises(ConfigError, match="8 ranks cannot share a prompt"):  # as in a run
        placement.resolve(job(NODE))


def test_a_simulation_is_one_process_whatever_the_hardware(monkeypatch):
    two_nodes = job({**CPU, "nodes": 2, "ranks": 4}, mode="simulate")
    assert placement.resolve(two_nodes).executor == "local"
    assert two_nodes.processes.world_size == 1
    assert job({**CPU, "ranks": 4}).processes.world_size == 4
    torchrun = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="mode=simulate is one process"):
        placement.resolve(two_nodes)


def test_run_without_the_hardware_names_what_is_missing():
    with pytest.raises(ConfigError, match=r"mode=run: hardware=cuda wants 1 GPU, 0 visible here and .*mode=simulate"):
        placement.resolve(job(ONE, mode="run"))
    with pytest.raises(ConfigError, match=r"4 nodes with 8 GPUs each"):
        placement.resolve(job({**NODE, "nodes": 4}, mode="run"))


def test_an_emulation_wants_one_device_of_many():
    found = placement.resolve(job({**CPU, "ranks": 4}, mode="emulate"))
    assert (found.mode, found.executor) == ("emulate", "local")
    with pytest.raises(ConfigError, match=r"rank of hardware=h20x8 on one GPU, and no GPU is visible .*mode=simulate"):
        placement.resolve(job({**NODE, "dp": 2}, mode="emulate"))
    asks = job({**NODE, "dp": 2}, mode="emulate").processes
    assert (asks.backend, asks.gpus_per_node, asks.world_size) == ("cuda", 1, 1)


def test_several_ranks_run_where_they_can_be_started(monkeypatch):
    assert placement.resolve(job({**CPU, "ranks": 4})).why == "4 ranks on this machine's processor (hardware=cpu)"
    with pytest.raises(ConfigError, match=r"hardware=cpu has 2 nodes and the job would run on this one alone"):
        placement.resolve(job({**CPU, "nodes": 2}))
    with pytest.raises(ConfigError, match="key heads"):
        placement.resolve(job({**CPU, "ranks": 7}))


def test_torchrun_s_ranks_are_the_hardware_s(monkeypatch):
    for key, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("MASTER_ADDR", "a"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(key, str(value))
    assert placement.resolve(job({**CPU, "ranks": 2})).why == "2 ranks that torchrun started (hardware=cpu)"
    with pytest.raises(ConfigError, match="torchrun started 2 ranks and hardware=cpu has 1"):
        placement.resolve(job(CPU))
    waits = job({**CPU, "ranks": 2})
    waits.launch.detach = True
    with pytest.raises(ConfigError, match=r"launch\.detach=true: torchrun waits"):
        placement.resolve(waits)


def test_a_command_is_started_once(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError, match="srun started this command 4 times; start it once"):
        placement.resolve(job({**CPU, "ranks": 4}))


def test_a_gpu_of_this_machine_is_taken(monkeypatch):
    monkeypatch.setattr(placement, "visible_gpus", lambda: ["0"])
    found = placement.resolve(job(ONE))
    assert (found.mode, found.executor) == ("run", "local")
    assert "1 GPU of this machine" in found.why


@pytest.mark.parametrize(
    ("named", "seen"),
    [(None, ["0", "1", "10"]), ("", []), ("-1", []), ("2,3", ["2", "3"]), ("0,1,2,3,4", ["0", "1", "2"])],
)
def test_visible_gpus(tmp_path, monkeypatch, named, seen):
    monkeypatch.undo()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert placement.visible_gpus(environment, tmp_path) == seen
