"""LongStraw, detached and exact, beside transformers' own class that runs every response with its whole prompt.

    python -m benchmarks.against_transformers [prompt=2048,8192,16384] [chunk=2048] [group=8] [response=64]
        [branches=2]

Both sides compute the same GRPO loss and its gradient for every parameter of one tiny hybrid, from one checkpoint,
in float32. Each measurement is a process of its own, so that peaks are its own; the sides take turns. transformers
runs with gradient checkpointing, a branch at a time, and logits for the response only. Its branches are alike, so
``branches`` of them are run and the rest are counted at the mean of those (0: all are run; the table says which).

Peak bytes are those of live tensor storages during the step, on both sides by ``longstraw.memory.meter.MemoryMeter``,
in a run that is not timed, for counting slows both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstraw.config import AlgorithmConfig
from longstraw.group import Group
from longstraw.grpo import BranchTerms, advantages, branch_loss, denominators
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model, load_model
from longstraw.models.hf_save import save_model
from longstraw.step import grpo_step

SIDES = ("detached", "exact", "transformers")


def make_group(prompt: int, group: int, response: int) -> Group:
    """Draw one prompt, responses, rewards and old log-probabilities away from the policy."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (prompt + group * response,), generator=generator)
    old = [torch.full((response,), -5.5) + 0.1 * torch.randn(response, generator=generator) for _ in range(group)]
    responses = list(tokens[prompt:].split(response))
    return Group(tokens[:prompt], responses, [float(i % 2) for i in range(group)], old_logprobs=old)


def transformers_step(model: Any, group: Group, branches: int) -> tuple[float, list[Tensor]]:
    """Run ``branches`` responses with their whole prompt; return seconds for the group and their log-probabilities."""
    algorithm = AlgorithmConfig()
    weights = denominators(group, algorithm, len(group.responses[0]))
    begun, scored = time.perf_counter(), []
    for i in range(branches):
        response = group.responses[i]
        tokens = torch.cat([group.prompt, response[:-1]])[None]
        logits = model(tokens, use_cache=False, logits_to_keep=len(response)).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        assert group.old_logprobs is not None
        branch_loss(
            logprobs,
            BranchTerms(
                advantage=advantages(group.rewards)[i], denominator=weights[i], old_logprobs=group.old_logprobs[i]
            ),
            algorithm,
        ).loss.backward()
        scored.append(logprobs.detach())
    return (time.perf_counter() - begun) / branches * len(group.responses), scored


def measure(
    side: str, folder: str, prompt: int, group_size: int, response: int, branches: int, chunk: int
) -> dict[str, Any]:
    """Return seconds, peak bytes and the first branch's log-probabilities of one side, in this process."""
    group = make_group(prompt, group_size, response)
    if side == "transformers":
        sys.modules["fla"] = None  # type: ignore[assignment] # else transformers runs its kernels, on processors too
        from transformers import Qwen3_5ForCausalLM

        hf = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        hf.train()
        seconds, scored = transformers_step(hf, group, branches)
        hf.zero_grad()
        with MemoryMeter() as meter:
            meter.tag("parameters", list(hf.parameters()))
            transformers_step(hf, group, 1)
        return {"seconds": seconds, "peak": meter.peak, "logprobs": scored[0].tolist()}
    model = load_model(folder, dtype="float32")
    begun = time.perf_counter()
    result = grpo_step(model, group, chunk=chunk, prompt_grad=side)
    seconds = time.perf_counter() - begun
    model.zero_grad()
    with MemoryMeter() as meter:
        meter.tag("parameters", list(model.parameters()))
        grpo_step(model, group, chunk=chunk, prompt_grad=side)
    return {"seconds": seconds, "peak": meter.peak, "logprobs": result.logprobs[0].tolist()}


def main(arguments: list[str]) -> None:
    """Measure every side at every prompt length and print a table."""
    if arguments[:1] == ["measure"]:
        side, folder, *numbers = arguments[1:]
        print(json.dumps(measure(side, folder, *map(int, numbers))))
        return
    options = {"prompt": "2048,8192,16384", "chunk": "2048", "group": "8", "response": "64", "branches": "2"}
    options |= dict(argument.split("=", 1) for argument in arguments)
    group_size, response = int(options["group"]), int(options["response"])
    branches = int(options["branches"]) or group_size
    ran = f"transformers: {branches} of {group_size} branches run"
    print(f"group {group_size}, response {response}, chunk {options['chunk']}; {ran}\n")
    print("| prompt | side | seconds | speed | peak MB | memory |\n|---:|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        save_model(build_model("qwen3_6_tiny", seed=0), Path(folder) / "model")
        for prompt in map(int, options["prompt"].split(",")):
            found = {}
            for side in SIDES:
                shape = (str(prompt), str(group_size), str(response), str(branches), options["chunk"])
                command = [sys.executable, "-m", __spec__.name, "measure", side, f"{folder}/model", *shape]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found[side] = json.loads(output.splitlines()[-1])
            show(prompt, found)


def show(prompt: int, found: dict[str, dict[str, Any]]) -> None:
    """Print a row a side, against transformers, once their log-probabilities agree."""
    base = found["transformers"]
    for side in SIDES:
        pairs = zip(found[side]["logprobs"], base["logprobs"], strict=True)
        difference = max(abs(a - b) for a, b in pairs)
        if difference > 1e-3:
            raise SystemExit(f"prompt {prompt}: {side} differs from transformers by {difference} in a log-probability")
        seconds, peak = found[side]["seconds"], found[side]["peak"]
        speed, memory = base["seconds"] / seconds, peak / base["peak"]
        print(f"| {prompt:,} | {side} | {seconds:.1f} | {speed:.1f}x | {peak / 1e6:.1f} | {memory:.3f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
