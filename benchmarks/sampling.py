"""Sampling a group from the retained prompt, beside transformers' ``generate`` on a cache filled with the same prompt.

    python -m benchmarks.sampling [model=smollm2_135m,qwen3_6_tiny] [prompt=2048,8192] [group=8] [tokens=64]
        [turns=3] [profile=no]

Both sides have evaluated the prompt once, in float32, before the clock runs; transformers' cache is then copied once a
response. Both draw ``tokens`` tokens of every response at temperature 1, in turns in one process. A rate is tokens of
all responses a second of processor time, the best of ``turns``: another job beside this one makes either slower.
Memory is what a side keeps between two tokens: rows of the prompt and of the responses, and recurrent states. With
``profile=yes`` the operators that take the most time in LongStraw's side are printed too, from a run that is not timed.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from longstraw.fetch import fetch
from longstraw.models import build_model, load_model
from longstraw.models.decoder import Decoder
from longstraw.models.hf_save import save_model
from longstraw.rollout.sampling import Drawing, Samples, Sampling, draw
from longstraw.step import Retained, prefill

FETCHED = ("smollm2_135m",)
OPERATORS = 14


def both(name: str, folder: Path) -> tuple[Any, Decoder]:
    """Return one model as transformers' class and as LongStraw's, from one checkpoint."""
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type] # else transformers runs its kernels, on processors too
    from transformers import AutoModelForCausalLM

    if name in FETCHED:
        folder = fetch(name)
    else:
        save_model(build_model(name, seed=0), folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None  # all responses are as long
    return theirs, load_model(folder, dtype="float32")


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the keys, values and linear-attention states of one of transformers' caches."""
    held = [value for layer in cache.layers for value in vars(layer).values()]
    states = [state for value in held if isinstance(value, dict) for state in value.values()]
    return sum(value.nbytes for value in held + states if isinstance(value, Tensor))


@torch.no_grad()
def their_side(model: Any, prompt: Tensor, group: int, tokens: int) -> tuple[Callable[[], Tensor], Callable[[], int]]:
    """Return what generates [group, tokens], and what tells the bytes of the cache after the last time."""
    from transformers import DynamicCache

    filled = DynamicCache(config=model.config)
    model(prompt[None, :-1], past_key_values=filled, use_cache=True, logits_to_keep=1)
    rows, last = prompt.expand(group, -1), []

    def generate() -> Tensor:
        cache = copy.deepcopy(filled)
        cache.reorder_cache(torch.zeros(group, dtype=torch.long))  # a copy for each response
        last[:] = [cache]
        chosen = {"max_new_tokens": tokens, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        return model.generate(rows, past_key_values=cache, **chosen)[:, len(prompt) :]

    return generate, lambda: cache_bytes(last[0])


def our_bytes(model: Decoder, retained: Retained, group: int, sampling: Sampling) -> int:
    """Return the bytes of the prompt's state and of the branches' own rows and states."""
    drawing = Drawing(model, retained, range(group), sampling)
    with torch.no_grad():
        drawing.step(0)  # recurrent states are a branch's own from the first token on
    own = sum(tensor.nbytes for past in drawing.pasts for _, tensor in past.held())
    return sum(retained.num_bytes().values()) + own


def rate(run: Callable[[], Any], tokens: int) -> float:
    """Return ``tokens`` a second of processor time."""
    begun = time.process_time()
    run()
    return tokens / (time.process_time() - begun)


def show_profile(run: Callable[[], Any]) -> None:
    """Print the operators that take the most time."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        run()
    averages = watched.key_averages()
    total = sum(row.self_cpu_time_total for row in averages)
    print("\n| operator | share | calls |\n|---|---:|---:|")
    for row in sorted(averages, key=lambda row: -row.self_cpu_time_total)[:OPERATORS]:
        print(f"| {row.key} | {row.self_cpu_time_total / total:.1%} | {row.count:,} |")
    print()


def compare(
    theirs: Any, ours: Decoder, prompt: Tensor, group: int, tokens: int, turns: int
) -> tuple[str, Callable[[], Samples]]:
    """Return the end of a row of the table for one prompt, and what draws LongStraw's side once more."""
    generate, held = their_side(theirs, prompt, group, tokens)
    retained, sampling = prefill(ours, prompt, chunk=1024), Sampling(tokens)

    def draw_group() -> Samples:
        return draw(ours, retained, range(group), sampling)

    rates = [(rate(draw_group, group * tokens), rate(generate, group * tokens)) for _ in range(turns)]
    mine, other = map(max, zip(*rates, strict=True))
    own, cached = our_bytes(ours, retained, group, sampling), held()
    speeds = f"| {mine:,.0f} | {other:,.0f} | {mine / other:.2f}x "
    return f"{speeds}| {own / 1e6:,.1f} | {cached / 1e6:,.1f} | {own / cached:.3f} |", draw_group


def main(arguments: list[str]) -> None:
    """Draw with both sides for every model and prompt length, and print a table."""
    options = {"model": "smollm2_135m,qwen3_6_tiny", "prompt": "2048,8192", "group": "8", "tokens": "64"}
    options |= {"turns": "3", "profile": "no"} | dict(argument.split("=", 1) for argument in arguments)
    group, tokens = int(options["group"]), int(options["tokens"])
    threads = torch.get_num_threads()
    print(f"group {group}, {tokens} tokens, float32, {threads} thread{'s' * (threads > 1)}\n")
    print("| model | prompt | tokens/s | transformers | speed | MB | transformers | memory |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in options["model"].split(","):
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = both(name, Path(folder) / "model")
        for length in map(int, options["prompt"].split(",")):
            generator = torch.Generator().manual_seed(0)
            prompt = torch.randint(ours.config.vocab_size, (length,), generator=generator)
            row, draw_group = compare(theirs, ours, prompt, group, tokens, int(options["turns"]))
            print(f"| {name} | {length:,} {row}", flush=True)
            if options["profile"] == "yes":
                show_profile(draw_group)


if __name__ == "__main__":
    main(sys.argv[1:])
