"""Run a case on one rank: each task shards the case's model over all ranks and returns what is compared."""

import functools
import gc
import itertools
from unittest import mock

import cases
import controls
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from longstraw.errors import RankLostError
from longstraw.memory.meter import MemoryMeter
from longstraw.observer import Observer
from longstraw.ops.host_sync import use_stated_counts
from longstraw.ops.latent import LATENT
from longstraw.ops.past import Past
from longstraw.parallel.collectives import Group
from longstraw.parallel.comm_meter import TrafficMeter
from longstraw.parallel.fsdp import local_gradient, total_norm
from longstraw.parallel.latent_context_parallel import SpreadLatent, select_rows
from longstraw.parallel.mesh import build_mesh
from longstraw.parallel.parallel_dims import ParallelDims, resolve_dims
from longstraw.parallel.parallelize import parallelize
from longstraw.rollout.sampling import draw
from longstraw.state import Appended
from longstraw.step import prefill, score

build_mesh = functools.cache(build_mesh)  # process groups are for ever


def spread(case, world):
    """Return the model of a case over all ranks, and what spreads it."""
    model = cases.build(case)
    mesh = build_mesh(resolve_dims(model.config, cases.hardware(case, world)), "cpu")
    return model, parallelize(model, mesh)


def parity(case, groups, world):
    """Return this rank's loss and log-probabilities, and norm and gradients put together from all ranks."""
    model, parallel = spread(case, world)
    prompt = parallel.mesh.dp_rank
    result = cases.step(case, model, groups[prompt], replay_tokens=case.replay_tokens, state=cases.state(case))
    norm = finish(model, parallel)
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


def unforced(case, groups, world):
    """Return gloo's error if FSDP's gradient factor is set to 1 without forcing sums."""
    with mock.patch.object(FSDPModule, "set_force_sum_reduction_for_comms"):
        try:
            parity(case, groups, world)
        except RuntimeError as error:
            return str(error)


def finish(model, parallel):
    """Complete the gradients and return their norm."""
    parallel.finish_gradients()
    there = [p for p in model.parameters() if p.grad is not None]
    return total_norm(((local_gradient(p), parallel.share(p)) for p in there), there[0].device)


def gathered(model):
    """Return the gradients by name, put together from all ranks."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


def sampling(case, groups, world, seeds, options, dropped=None):
    """Return what is drawn for this rank's ``seeds``, what replay gives for it on the same state, and all collectives.

    The collective ``dropped`` is left out while drawing.
    """
    model, parallel = spread(case, world)
    mine = parallel.mesh.dp_rank
    retained = prefill(model, groups[mine].prompt, chunk=case.chunk)
    with controls.left_out(dropped) as called:
        samples = draw(model, retained, seeds[mine], options)
    again = score(model, retained, samples.responses, temperature=options.temperature)
    return {"prompt": mine, "samples": samples, "again": again, "called": called}


def traffic(case, groups, world):
    """Return what this rank sent in a step in which all experts get as many tokens, by verb, collective and label."""
    model, parallel = spread(case, world)
    meter = TrafficMeter()
    with meter, use_stated_counts(evenly):
        cases.step(case, model, groups[parallel.mesh.dp_rank], state=cases.state(case), observer=Verbs(meter))
        with meter.verb("optimizer"):
            finish(model, parallel)
    return dict(meter.sent)


def evenly(places, number):
    each, rest = divmod(places.numel(), number)
    return [each + (place < rest) for place in range(number)]


class Verbs(Observer):
    """Tells a meter which verb runs."""

    def __init__(self, meter):
        self.meter = meter

    def verb(self, name, positions):
        return self.meter.verb(name)


def memory(case, groups, world):
    """Return what this rank holds after the prefill and after the step, counted, and whose rows it holds."""
    meter = MemoryMeter(rounding=1)
    with meter:
        model, parallel = spread(case, world)
        gc.collect()
        group = groups[parallel.mesh.dp_rank]
        parameters = meter.tag("parameters", model.parameters())
        retained = prefill(model, group.prompt, chunk=case.chunk, grad_from=0)
        kept = [tensor for state in retained.states for kind, tensor in state.held() if kind == "retained"]
        meter.tag("retained", kept)
        meter.tag("snapshots", [t for state in retained.states for kind, t in state.held() if kind == "snapshots"])
        after_prefill = meter.bytes_by_kind()
        appended = [state for state in retained.states if isinstance(state, Appended)]
        spans = {state.leaves(retained.positions, grad=False).spans for state in appended}
        by_name = retained.num_bytes()
        del retained, kept, appended
        result = cases.step(case, model, group)
        meter.tag("gradients", [p.grad for p in model.parameters() if p.grad is not None])
        del result
        return {
            "parameters": parameters,
            "after_prefill": after_prefill,
            "after_step": meter.bytes_by_kind(),
            "retained": by_name,
            "spans": spans,
        }


def selection(world, asked):
    """Return the positions that ``select_rows`` chooses over all ranks, for each of ``asked``, as sets a query."""
    group = Group(dist.group.WORLD)
    return [_chosen(group, **one) for one in asked]


def _chosen(group, q, weights, keys, count, cuts):
    """Choose for the last of ``cuts`` chunks of positions; every chunk's keys are spread as the model spreads them."""
    borders = list(itertools.accumulate(cuts, initial=0))
    pieces = [group.split(size) for size in cuts]
    spans = [(start + x.start, start + x.stop) for start, x in zip(borders, pieces, strict=False) if x.start < x.stop]
    positions, chunk = borders[-2], pieces[-1]
    own = slice(positions + chunk.start, positions + chunk.stop)
    spans = [span for span in spans if span[0] < positions]
    past = torch.cat([keys[:0], *(keys[slice(*span)] for span in spans)])
    before = Past(positions, {"index_key": past}, spans=tuple(spans))
    before.chunk = chunk
    spread = SpreadLatent(group, LATENT["reference"], 1.0)
    rows = select_rows(q[chunk.own], weights[chunk.own], keys[own], before, count, spread)
    held = [i for span in (*spans, (own.start, own.stop)) for i in range(*span)]
    return [{held[row] for row in line if row >= 0} for line in rows.tolist()]


def decided(world, dp, fails):
    """Return what ranks of ``dp`` prompts hold after one of each prompt has decided, or failed, and who was asked."""
    mesh = build_mesh(ParallelDims(dp, world // dp, 1), "cpu")
    asked = []

    def find():
        asked.append(dist.get_rank())
        if fails:
            raise KeyError("no reward")
        return {"rewards": [0.5, dist.get_rank()]}

    try:
        return mesh.decide(find), asked
    except (KeyError, RankLostError) as error:
        return f"{type(error).__name__}: {error}", asked


def updates(case, groups, world, config, steps):
    """Return how ``steps`` steps of an optimizer change the parameters, put together from all ranks, and the norms."""
    model, parallel = spread(case, world)
    mine = groups[parallel.mesh.dp_rank]
    return cases.changes(model, config, steps, parallel, lambda: cases.step(case, model, mine).loss)
