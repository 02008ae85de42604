"""Cases for tests on several ranks: one step of a small model, on one process or sharded, and how results compare."""

import functools
from dataclasses import dataclass, replace

import torch
from glm_helpers import glm_model
from helpers import make_group, moe_model, tiny_model
from llama_helpers import llama_model

from longstraw.config import AdapterConfig, AlgorithmConfig, HardwareConfig, StateConfig
from longstraw.step import grpo_step
from longstraw.training.optimizer import Optimizer


@dataclass(frozen=True)
class Case:
    """One step of ``model``. ``groups`` are (prompt positions, response lengths), one for each of ``dp``."""

    model: str = "qwen"
    groups: tuple = ((257, (63, 5)),)
    chunk: int = 64
    prompt_grad: str = "exact"
    window: int | None = None
    dtype: str = "float64"
    adapter: tuple = ()  # the modules that have one
    dp: int = 1
    ep: int | None = None
    favoured: int | None = None  # so many experts get all tokens
    equal_rewards: bool = False
    keep_attention: bool = False  # on the ranks; one process makes it again
    replay_tokens: int | None = None  # in one graph on the ranks; one process evaluates a branch at a time
    options: tuple = ()  # of the model's configuration, as pairs
    algorithm: tuple = ()  # its configuration, as pairs


@dataclass
class Call:
    """What a rank is to do: a function of ``tasks``, which gets the number of ranks too."""

    task: str
    arguments: dict

    def run(self, world):
        import tasks

        return getattr(tasks, self.task)(world=world, **self.arguments)


def request(case, task="parity", **arguments):
    """Return the call for a case, with the groups that its prompts make."""
    return Call(task, {"case": case, "groups": groups(case), **arguments})


def build(case):
    """Return the model of a case, alike in every process."""
    make = {"qwen": tiny_model, "qwen moe": moe_model, "glm": glm_model, "llama": llama_model}[case.model]
    model = make(dtype=getattr(torch, case.dtype), **dict(case.options))
    if case.favoured:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[: case.favoured] += 100
    if case.adapter:
        adapt(model, case.adapter)
    return model


@torch.no_grad()
def adapt(model, targets):
    """Add adapters to ``targets`` in which every part matters."""
    from longstraw.models.lora import add_adapter  # imports slowly

    add_adapter(model, AdapterConfig(name="lora", rank=4, alpha=8, targets=list(targets)), seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.1, generator=generator)


@functools.cache
def groups(case):
    """Return the groups of a case, one for each of its prompts."""
    model = build(replace(case, adapter=()))
    made = [make_group(model, n, lengths, seed=i, masked=True) for i, (n, lengths) in enumerate(case.groups)]
    return [replace(group, rewards=[1.0] * len(group.rewards)) for group in made] if case.equal_rewards else made


def state(case):
    return StateConfig(keep_attention=case.keep_attention)


def step(case, model, group, **options):
    return grpo_step(
        model,
        group,
        chunk=case.chunk,
        prompt_grad=case.prompt_grad,
        prompt_grad_window=case.window,
        algorithm=AlgorithmConfig(**dict(case.algorithm)),
        reference=model if dict(case.algorithm).get("kl_coef") else None,
        **options,
    )


@functools.cache
def alone(case):
    """Return losses, log-probabilities, norm and gradients by name of one process; of several groups the mean."""
    model = build(case)
    results = [step(case, model, group, replay_tokens=1) for group in groups(case)]
    gradients = {name: p.grad / len(results) for name, p in model.named_parameters() if p.grad is not None}
    return {
        "loss": [result.loss for result in results],
        "logprobs": [result.logprobs for result in results],
        "norm": torch.nn.utils.get_total_norm(gradients.values()),
        "gradients": gradients,
    }


def changes(model, config, steps, parallel, loss):
    """Return what ``steps`` steps of an optimizer add to the parameters by name, and the norms of their gradients.

    ``loss`` adds gradients and returns the loss.
    """
    optimizer = Optimizer([p for p in model.parameters() if p.requires_grad], config, parallel)

    def values():
        named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for name, p in named}

    before = values()
    norms = [optimizer.update(loss()) for _ in range(steps)]
    return {name: after - before[name] for name, after in values().items()}, norms


def distances(answer, target):
    """Return how far a rank's ``answer`` is from the ``target``, by what is compared; parameters by their names.

    Loss and log-probabilities absolutely, norm and gradients relatively, or absolutely where the target is 0.
    """
    prompt = answer["prompt"]
    found = {"loss": difference(answer["loss"], target["loss"][prompt])}
    for i, (values, wanted) in enumerate(zip(answer["logprobs"], target["logprobs"][prompt], strict=True)):
        found[f"log-probabilities of response {i}"] = difference(values, wanted)
    found["norm"] = relative(answer["norm"], target["norm"])
    assert answer["gradients"].keys() == target["gradients"].keys()
    return found | {name: relative(answer["gradients"][name], g) for name, g in target["gradients"].items()}


def difference(value, target):
    """Return the largest absolute difference, infinite for NaN."""
    return float((value.double() - target.double()).abs().max().nan_to_num(nan=torch.inf))


def relative(value, target):
    """Return |value - target| / |target| in L2, |value| where the target is 0."""
    scale = float(target.double().norm()) or 1.0
    return float((value.double() - target.double()).norm().nan_to_num(nan=torch.inf)) / scale


def hardware(case, world):
    return HardwareConfig(name="cpu", backend="cpu", ranks=world, dp=case.dp, ep=case.ep)
