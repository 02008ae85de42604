"""What a CUDA job asks of its device, seen without one: operations without a fixed order, and reads by the host."""

import functools
import traceback
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from longstraw.config import HardwareConfig, SimulationConfig, from_dict, load_model_config, to_dict
from longstraw.layers.feedforward import Experts
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.ops import host_sync
from longstraw.parallel.expert_parallel import ExpertGroup
from longstraw.simulation import simulate as simulation
from longstraw.simulation.simulate import simulate

DENSE, SPARSE = ("qwen3_6_tiny", "llama_tiny"), ("qwen3_6_moe_tiny", "glm_5_2_tiny")
CHUNKS = 3

# PyTorch's list of operations whose sums or writes have no fixed order on CUDA (torch.use_deterministic_algorithms);
# index_put with accumulate=True sorts first, so it is not among them.
UNORDERED = (
    *("index_add", "scatter_add", "scatter_reduce", "index_reduce", "put", "bincount", "histc", "kthvalue"),
    *("embedding_bag", "grid_sampler", "max_unpool", "adaptive_avg_pool", "interpolate", "ctc_loss", "nll_loss2d"),
)
ALLOWED = {  # operation, file: why its order does not matter
    ("index_add_", "ops/moe/reference.py"): "the tokens of one expert are distinct",
    ("index_add", "backward"): "of index_select, whose places are distinct",
    ("scatter_add", "backward"): "of gather, whose places are distinct in each row",
}


def job(model):
    """Return an exact step of four ranks, every chunk, branch and block of it simulated."""
    return from_dict(
        {
            "model": to_dict(load_model_config(model, dtype="bfloat16")),
            "hardware": to_dict(HardwareConfig(name="gpus", gpus_per_node=4, memory_gb=80)),
            "simulation": to_dict(SimulationConfig(every=True)),
            "data": {"name": "needle"},
            "context": 64 * CHUNKS + 16,
            "chunk": 64,
            "response_length": 16,
            "group_size": 2,
            "prompt_grad": "exact",
        }
    )


class Recording(MemoryMeter):
    """Notes what is called of ``UNORDERED``, with the file that calls it."""

    found: set[tuple[str, str]]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name.rstrip("_") in UNORDERED:
            files = [f.filename for f in traceback.extract_stack() if "/longstraw/" in f.filename]
            inner = files[-1].rpartition("/longstraw/")[2]
            calls = "backward" if inner.startswith(("memory/", "step.py", "simulation/")) else inner
            self.found.add((name, calls))
        return super().__torch_dispatch__(func, types, args, kwargs)


def observe(model):
    """Simulate a step; return what it calls of ``UNORDERED``, and how often the host reads a value, by verb."""
    reads, verb = Counter(), simulation.SimulationMonitor.verb

    @contextmanager
    def counting(self, name, positions):
        before = host_sync.reads()
        with verb(self, name, positions):
            yield
        reads[name] += host_sync.reads() - before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "found", set(), raising=False)
        patch.setattr(simulation, "MemoryMeter", Recording)
        patch.setattr(simulation.SimulationMonitor, "verb", counting)
        list(simulate(job(model)))
        return Recording.found, reads


observed = functools.cache(observe)


@pytest.mark.parametrize("model", DENSE + SPARSE)
def test_a_cuda_step_calls_nothing_whose_order_is_not_fixed(model):
    assert observed(model)[0] <= ALLOWED.keys()


def test_an_operation_without_a_fixed_order_is_found(monkeypatch):
    mix = ExpertGroup.mix

    def unordered(self, x, *args, **kwargs):
        out = mix(self, x, *args, **kwargs)
        return out.index_add(0, torch.zeros(len(x), dtype=torch.long), x * 0)

    monkeypatch.setattr(ExpertGroup, "mix", unordered)
    found, _ = observe("qwen3_6_moe_tiny")
    assert {name for name, _ in found - ALLOWED.keys()} == {"index_add"}


@pytest.mark.parametrize("model", DENSE)
def test_no_layer_of_a_dense_model_makes_the_host_wait(model):
    reads = observed(model)[1]
    assert {verb: reads[verb] for verb in ("prefill", "replay", "prompt_backward")} == dict.fromkeys(
        ("prefill", "replay", "prompt_backward"), 0
    )


@pytest.mark.parametrize("model", SPARSE)
def test_a_layer_of_experts_makes_the_host_wait_only_for_its_counts(model):
    """One read a layer; a backward evaluates it again. The prompt's last block ends with its state, before experts."""
    experts = sum(isinstance(module, Experts) for module in build_model(job(model).model, device="meta").modules())
    reads = observed(model)[1]
    assert reads["prefill"] == (experts - 1) * CHUNKS
    assert reads["prompt_backward"] == 2 * reads["prefill"]
