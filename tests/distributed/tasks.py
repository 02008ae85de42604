"""What a rank does with a case: every task spreads the model of a case over all ranks and returns what it saw."""

import functools

import cases
import controls

from longstraw.parallel.apply import parallelize
from longstraw.parallel.mesh import build_mesh
from longstraw.parallel.shard import local_gradient, total_norm
from longstraw.parallel.sizes import rank_sizes
from longstraw.parallel.traffic import TrafficMeter
from longstraw.step import Observer

build_mesh = functools.cache(build_mesh)  # process groups are for ever


def spread(case, world):
    """Return the model of a case over all ranks, and what spreads it."""
    model = cases.build(case)
    mesh = build_mesh(rank_sizes(model.config, cases.hardware(case, world)), "cpu")
    return model, parallelize(model, mesh)


def parity(case, groups, world):
    """Return this rank's loss and log-probabilities, and norm and gradients put together from all ranks."""
    model, parallel = spread(case, world)
    prompt = parallel.mesh.dp_rank
    result = cases.step(case, model, groups[prompt])
    parallel.finish_gradients()
    there = [p for p in model.parameters() if p.grad is not None]
    norm = total_norm(((local_gradient(p), parallel.share(p)) for p in there), there[0].device)
    return {
        "prompt": prompt,
        "loss": result.loss,
        "logprobs": result.logprobs,
        "norm": norm,
        "gradients": gathered(model),
    }


def control(case, groups, world, dropped=None):
    """Return what ``parity`` does with one collective left out, and the names of all that were called."""
    with controls.left_out(dropped) as called:
        return {"parity": parity(case, groups, world), "called": called}


def gathered(model):
    """Return the gradients by name, put together from all ranks."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


def traffic(case, groups, world):
    """Return what this rank sent in a step, by verb, collective and label."""
    model, parallel = spread(case, world)
    meter = TrafficMeter()
    with meter:
        cases.grpo_step(
            model,
            groups[parallel.mesh.dp_rank],
            chunk=case.chunk,
            prompt_grad=case.prompt_grad,
            prompt_grad_window=case.window,
            observer=Verbs(meter),
        )
        parallel.finish_gradients()
    return dict(meter.sent)


class Verbs(Observer):
    """Tells a meter which verb runs."""

    def __init__(self, meter):
        self.meter = meter

    def verb(self, name, positions):
        return self.meter.verb(name)
