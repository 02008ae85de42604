"""The SLURM that the other tests of this folder run on is configured as they expect."""

import pytest

pytestmark = pytest.mark.slurm


def test_the_cluster_is_what_the_other_tests_take_it_for(slurm):
    assert slurm("sinfo", "-h", "-o", "%P %D %G", "-p", "h20") == "h20* 2 gpu:h20:8"
    shape = ["--partition=h20", "--time=1", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:h20:3", "--immediate=20"]
    said = slurm("srun", *shape, "sh", "-c", "echo $SLURM_NODEID $SLURM_LOCALID $SLURM_PROCID $CUDA_VISIBLE_DEVICES")
    assert sorted(said.splitlines()) == ["0 0 0 0,1,2", "0 1 1 0,1,2", "1 0 2 0,1,2", "1 1 3 0,1,2"]
