"""Compare detached with exact gradients of SmolLM2-135M-Instruct on source text of Python's library; CSV on stdout.

A group is a stretch of source text as the prompt and two responses of 32 tokens: the text's own continuation with
reward 1, and a stretch of another file with reward 0. Both gradients are of the same GRPO loss, on policy.
"""

import argparse
import csv
import importlib
import inspect
import itertools
import sys

import torch

from longstraw import grpo_step, load_model
from longstraw.config import AdapterConfig, load_model_config
from longstraw.data.tokenizer import load_tokenizer
from longstraw.fetch import fetch
from longstraw.group import Group
from longstraw.models.decoder import Decoder
from longstraw.models.lora import add_adapter

NAME = "smollm2_135m"
TEXTS = ("argparse", "inspect", "tarfile")  # modules of the library, each longer than the longest prompt
OTHER = "decimal"  # of which the response without reward is a part
RESPONSE, CHUNK = 32, 512
COLUMNS = (
    "text",
    "prompt",
    "trained",
    "cosine",
    "relative_l2",
    "kv_cosine",
    "kv_relative_l2",
    "norm",
    "logprob_difference",
)
KEYS_AND_VALUES = ("k_proj", "v_proj")


def source(module: str) -> str:
    """Return the source text of a module; decimal's is in _pydecimal."""
    return inspect.getsource(importlib.import_module("_pydecimal" if module == "decimal" else module))


def gradients(model: Decoder, group: Group, prompt_grad: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the gradient of every trained parameter, and the responses' log-probabilities."""
    result = grpo_step(model, group, chunk=CHUNK, prompt_grad=prompt_grad)
    taken = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            taken[name], parameter.grad = parameter.grad, None
    return taken, result.logprobs


def compare(
    detached: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], part: tuple[str, ...]
) -> tuple[float, float]:
    """Return cosine and relative L2 over the parameters that ``part`` names; empty: all of them."""
    names = [name for name in exact if not part or any(word in name for word in part)]
    ours, target = (torch.cat([gradient[name].flatten().double() for name in names]) for gradient in (detached, exact))
    return float(ours @ target / (ours.norm() * target.norm())), float((ours - target).norm() / target.norm())


def main() -> None:
    """Measure what the command line names, a row for all parameters and one for the adapters of each text.

    Adapters begin at zero, so the other parameters' gradients are those of the model without them: one step has both.
    """
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("prompts", type=int, nargs="+", help="tokens of the prompt")
    options.add_argument("--texts", type=int, default=len(TEXTS), help="how many texts")
    given = options.parse_args()
    folder = str(fetch(NAME))
    tokenizer = load_tokenizer(folder, checkpoint=None, vocab_size=load_model_config(NAME).vocab_size)
    model = add_adapter(load_model(folder), AdapterConfig(name="lora")).requires_grad_(True)
    other = torch.from_numpy(tokenizer.encode(source(OTHER)[:20_000]))[1000 : 1000 + RESPONSE]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for prompt, text in itertools.product(given.prompts, TEXTS[: given.texts]):
        tokens = torch.from_numpy(tokenizer.encode(source(text)))[: prompt + RESPONSE]
        assert len(tokens) == prompt + RESPONSE
        group = Group(tokens[:prompt], [tokens[prompt:], other], [1.0, 0.0])
        exact, logprobs = gradients(model, group, "exact")
        detached, again = gradients(model, group, "detached")
        difference = max(float((a - b).abs().max()) for a, b in zip(logprobs, again, strict=True))
        for trained in ("all", "adapters"):
            ours, target = (
                {name: tensor for name, tensor in gradient.items() if (".lora_" in name) == (trained == "adapters")}
                for gradient in (detached, exact)
            )
            row = (*compare(ours, target, ()), *compare(ours, target, KEYS_AND_VALUES))
            norm = sum(float(tensor.double().square().sum()) for tensor in target.values()) ** 0.5
            writer.writerow((text, prompt, trained, *(f"{x:.4f}" for x in (*row, norm)), f"{difference:.1e}"))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
