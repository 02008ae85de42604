"""Count what the ranks of one step send (under torchrun), or say what they would (without it); CSV on stdout."""

import argparse
import csv
import os
import sys

import torch
import torch.distributed as dist
from traffic_formula import bytes_sent

from longstraw.config import AdapterConfig, DataConfig, HardwareConfig, RunConfig, load_model_config
from longstraw.group import Group
from longstraw.models import build_model
from longstraw.observer import Observer
from longstraw.parallel.comm_meter import TrafficMeter
from longstraw.parallel.fsdp import local_gradient, total_norm
from longstraw.parallel.mesh import build_mesh
from longstraw.parallel.parallel_dims import resolve_dims
from longstraw.parallel.parallelize import parallelize
from longstraw.step import grpo_step


class Verbs(Observer):
    def __init__(self, meter):
        self.meter = meter

    def verb(self, name, positions):
        return self.meter.verb(name)


def count(run, sizes, prompt, responses):
    """Run one step and return the bytes that each rank sent."""
    dist.init_process_group("gloo")
    parallel = parallelize(build_model(run.model), build_mesh(sizes, "cpu"))
    model, generator, meter = parallel.model, torch.Generator().manual_seed(0), TrafficMeter()
    ids = [torch.randint(run.model.vocab_size, (n,), generator=generator) for n in (prompt, *responses)]
    group = Group(ids[0], ids[1:], rewards=[float(i) for i in range(len(responses))])
    with meter:
        grpo_step(model, group, chunk=run.chunk, prompt_grad=run.prompt_grad, observer=Verbs(meter))
        with meter.verb("optimizer"):
            parallel.finish_gradients()
            there = [p for p in model.parameters() if p.grad is not None]
            total_norm(((local_gradient(p), parallel.share(p)) for p in there), there[0].device)
    everyones = [None] * sizes.world
    dist.all_gather_object(everyones, {tuple(key): size for key, size in meter.sent.items()})
    return everyones


def main():
    options = argparse.ArgumentParser()
    options.add_argument("model")
    options.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    options.add_argument("--context", type=int, required=True)
    options.add_argument("--response", type=int, required=True)
    options.add_argument("--chunk", type=int, required=True)
    options.add_argument("--prompt-grad", default="exact")
    options.add_argument("--adapter", choices=("none", "lora"), default="none")
    given = options.parse_args()
    hardware = HardwareConfig(name="test", backend="cpu", ranks=given.ranks)
    run = RunConfig(
        model=load_model_config(given.model),
        hardware=hardware,
        adapter=AdapterConfig(name=given.adapter, rank=16, alpha=32),
        data=DataConfig(name="jsonl"),
        context=given.context,
        response_length=given.response,
        chunk=given.chunk,
        prompt_grad=given.prompt_grad,
    )
    sizes = resolve_dims(run.model, hardware)
    prompt, responses = given.context - given.response, [given.response] * 2
    predicted = bytes_sent(run, sizes, prompt_positions=prompt, response_positions=responses)
    counted = count(run, sizes, prompt, responses) if "RANK" in os.environ else []
    if os.environ.get("RANK", "0") != "0":
        return
    table = csv.writer(sys.stdout, lineterminator="\n")
    for verb, collective, label in sorted(predicted):
        sent = [rank[verb, collective, label] for rank in counted]
        largest = max(sent) if sent else ""
        row = [verb, collective, label, predicted[verb, collective, label], largest, min(sent) if sent else ""]
        table.writerow([given.model, sizes.cp, sizes.ep, given.context, given.prompt_grad, *row])


if __name__ == "__main__":
    main()
