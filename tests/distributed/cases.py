"""What ranks are asked to do: one step of a small model, alone or spread, and what can be compared of it."""

import contextlib
from dataclasses import dataclass, field

import torch
from glm_helpers import glm_model
from helpers import enlarge, make_group, tiny_model

from longstraw.config import AdapterConfig, HardwareConfig
from longstraw.models.adapter import add_adapter
from longstraw.step import grpo_step


@dataclass
class Case:
    """One step. ``prompts`` are several where ``dp`` is; ``broken`` names a collective that is left out."""

    model: str = "qwen"
    prompts: tuple = (257,)
    lengths: tuple = (63, 5)
    chunk: int = 64
    prompt_grad: str = "exact"
    window: int | None = None
    dtype: str = "float64"
    adapter: tuple = ()
    dp: int = 1
    ep: int | None = None
    broken: str | None = None
    options: dict = field(default_factory=dict)


def build(case):
    """Return the model of a case, alike in every process."""
    make = {"qwen": tiny_model, "glm": glm_model}[case.model]
    model = make(dtype=getattr(torch, case.dtype), **case.options)
    if case.adapter:
        add_adapter(model, AdapterConfig(name="lora", rank=4, alpha=8, targets=list(case.adapter)), seed=1)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(2)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1, generator=generator)
    return model


def groups(case, model):
    """Return the groups of a case, one for each of its prompts."""
    return [make_group(model, n, case.lengths, seed=i, masked=True) for i, n in enumerate(case.prompts)]


def step(case, model, group):
    return grpo_step(model, group, chunk=case.chunk, prompt_grad=case.prompt_grad, prompt_grad_window=case.window)


def alone(case):
    """Return loss, log-probabilities and gradients by name of one process; over groups, the mean."""
    model = build(case)
    results = [step(case, model, group) for group in groups(case, model)]
    gradients = {name: p.grad / len(results) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": [r.loss for r in results], "logprobs": [r.logprobs for r in results], "gradients": gradients}


def run(case, world):
    """Return the same of this rank's part, gradients gathered from all ranks."""
    from longstraw.config import load_model_config
    from longstraw.parallel.apply import parallelize
    from longstraw.parallel.mesh import build_mesh
    from longstraw.parallel.sizes import rank_sizes

    model = build(case)
    given = groups(case, model)
    hardware = HardwareConfig(name="cpu", backend="cpu", ranks=world, dp=case.dp, ep=case.ep)
    mesh = build_mesh(rank_sizes(model.config, hardware), "cpu")
    with left_out(case.broken):
        parallel = parallelize(model, mesh)
        result = step(case, model, given[mesh.dp_rank])
        parallel.finish_gradients()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            gradients[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    del load_model_config
    return {"loss": result.loss, "logprobs": result.logprobs, "gradients": gradients, "dp_rank": mesh.dp_rank}


@contextlib.contextmanager
def left_out(name):
    yield


del enlarge
