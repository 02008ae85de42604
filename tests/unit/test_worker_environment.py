"""What a job's process sets before torch is imported."""

import pytest

from longstraw.launch.worker import _prepare_process

CUDA = ("PYTORCH_ALLOC_CONF", "FLA_DISABLE_BACKEND_DISPATCH", "TRITON_CACHE_DIR")


@pytest.fixture
def environment(monkeypatch):
    found = {}
    monkeypatch.setattr("os.environ", found)
    return found


def test_a_cuda_job_compiles_into_a_folder_of_its_node(environment, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _prepare_process("cuda")
    assert environment["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_what_the_user_has_set_stays(environment):
    environment |= dict.fromkeys(CUDA, "mine")
    _prepare_process("cuda")
    assert {key: environment[key] for key in CUDA} == dict.fromkeys(CUDA, "mine")


def test_a_job_on_processors_sets_none_of_them(environment):
    _prepare_process("cpu")
    assert not environment.keys() & set(CUDA)
