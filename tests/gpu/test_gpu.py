"""What only a GPU can tell: kernels compiled for it, its allocator's peaks, copies on a stream of their own."""

import pytest
import torch

from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.layers.op_cases import Draw
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.selfcheck import check_ops
from longstraw.simulation.simulate import simulate
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use"),
]
MODELS = ("qwen3_6_tiny", "glm_5_2_tiny")


def job(model, backend="cuda", dtype="bfloat16", **changes):
    values = {
        "model": to_dict(load_model_config(model, dtype=dtype)),
        "hardware": {"name": backend, "backend": backend, "gpus_per_node": int(backend == "cuda")},
        "data": {"name": "needle", "ragged": False},
        "tracking": {"mode": "disabled"},
        "context": 4096,
        "response_length": 200,
        "chunk": 1024,
        "prompt_grad": "exact",
        **changes,
    }
    return from_dict(values)


def stepped(config):
    """Return the record of a job's first step and the gradients it took it with."""
    gradients = {}
    with MemoryMeter() as meter:
        trainer = build_trainer(config, Monitor(meter, Progress(None), backend=config.hardware.backend))
        update = trainer.optimizer.update

        def watched(loss):
            gradients.update({i: g.float().cpu() for i, g in enumerate(trainer.optimizer.gradients())})
            return update(loss)

        trainer.optimizer.update = watched
        return trainer.step(0), gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", ["qwen3_6_27b", "glm_5_2", *MODELS])
def test_every_kernel_is_what_its_reference_is(model, dtype):
    config = load_model_config(model)
    device = torch.device("cuda")
    findings = check_ops(config, Draw(device, dtype, 0), backend="cuda", positions=333, rows=1111)
    assert findings
    assert not [x for x in findings if not x.passed]


@pytest.mark.parametrize("model", MODELS)
def test_a_step_has_the_gradients_of_a_processor(model):
    (_, here), (_, there) = (stepped(job(model, backend, "float32", context=700)) for backend in ("cuda", "cpu"))
    assert here.keys() == there.keys()
    for i, gradient in there.items():
        assert (here[i] - gradient).norm() < 2e-2 * gradient.norm() + 1e-6  # products may round to 10 bits


@pytest.mark.parametrize("model", MODELS)
def test_the_allocators_peak_is_the_simulated_one(model):
    config = job(model, context=65536, chunk=8192)
    row, _ = stepped(config)
    (said,) = simulate(config)
    assert row["measured_by"] == "cuda"
    assert abs(row["peak_allocated_bytes"] / said["peak_allocated_bytes"] - 1) < 0.016


@pytest.mark.parametrize("model", MODELS)
def test_rows_in_host_memory_change_nothing(model):
    (_, device), (_, host) = (stepped(job(model, state={"device": where})) for where in (None, "cpu"))
    assert all(torch.equal(device[i], host[i]) for i in device)


def test_a_model_is_built_where_it_runs():
    assert build_model("qwen3_6_tiny", device="cuda").lm_head.weight.is_cuda
