"""Build models by name, with random weights or from a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longstraw.config import DTYPES, ModelConfig, choose, load_model_config, read_model_config
from longstraw.layers.cpu_linear import widen
from longstraw.layers.feedforward import Experts
from longstraw.models import glm_5_2, llama, qwen3_6, qwen3_6_moe
from longstraw.models.decoder import Decoder
from longstraw.models.hf_weights import load_weights
from longstraw.ops import choose_ops

_FAMILIES: dict[str, Any] = {  # each has build and initialise
    "qwen3_6": qwen3_6,
    "qwen3_6_moe": qwen3_6_moe,
    "glm_5_2": glm_5_2,
    "llama": llama,
}


def build_model(
    model: str | ModelConfig,
    *,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    fake: bool = False,
    **overrides: Any,
) -> Decoder:
    """Return a model with random weights drawn from ``seed``.

    ``model`` is a name in ``conf/model``, of which ``overrides`` change fields, or a configuration. ``device`` None is
    PyTorch's default device, as ``with torch.device(...)`` sets it; on ``meta`` nothing is allocated or drawn.
    ``backend`` chooses the ops: by default ``cpu`` on a CPU, ``cuda`` on CUDA, ``reference`` elsewhere. With ``fake``
    the model is for fake tensors only, and ``cuda`` needs nothing installed.
    The same seed gives the same weights in every dtype, up to rounding.
    """
    if overrides and not isinstance(model, str):
        raise TypeError(f"build_model: a configuration is given, so set {', '.join(overrides)} there")
    config = load_model_config(model, **overrides) if isinstance(model, str) else model
    device = torch.get_default_device() if device is None else torch.device(device)
    decoder = _empty(config, device, backend, fake)
    narrow = _dtype(dtype, config)
    wide = torch.promote_types(narrow, torch.float32)  # for buffers, such as a router's bias

    def keep(tensor: Tensor, whole: Tensor, first: int = 0) -> Tensor:
        return whole.to(device, narrow if isinstance(tensor, nn.Parameter) else wide)

    if device.type == "meta":
        for module in decoder.modules():
            for name, tensor in _own(module).items():
                _put(module, name, keep(tensor, tensor))
    else:
        draw_weights(decoder, seed=seed, keep=keep)
    return decoder


def draw_weights(
    decoder: Decoder,
    *,
    seed: int,
    keep: Callable[[Tensor, Tensor, int], Tensor],
    rows: Callable[[Tensor], range] = lambda tensor: range(len(tensor)),
) -> None:
    """Draw all weights but adapters' from ``seed``, one module at a time, so that only one is held in float32.

    ``keep`` gets a parameter or buffer, the float32 tensor drawn for it and the first of its rows that this has, and
    returns its replacement. ``rows`` says which of a stack of experts are kept here: each expert has a seed of its own,
    and the others are not drawn.
    """
    family = _family(decoder.config)
    generator = torch.Generator("cpu").manual_seed(seed)
    for path, module in decoder.named_modules():
        own = {} if ".lora_" in path else _own(module)
        first = 0
        if isinstance(module, Experts):
            held = rows(next(iter(own.values())))
            first, drawn = held.start, _draw_experts(module, held, f"experts {seed} {path}", decoder.config)
        else:
            for name, tensor in own.items():
                _put(module, name, torch.empty(tensor.shape, dtype=torch.float32, device="cpu"))
            family.initialise(module, decoder.config.initializer_range, generator)
            drawn = {name: getattr(module, name).detach() for name in own}
        for name, tensor in own.items():
            _put(module, name, keep(tensor, drawn[name], first), tensor)


def _draw_experts(module: nn.Module, held: range, seed: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the stacked weights of the experts ``held``; ``module`` is left with those of the last one."""
    shapes = {name: (1, *tensor.shape[1:]) for name, tensor in _own(module).items()}
    drawn = {
        name: torch.empty((len(held), *shape[1:]), dtype=torch.float32, device="cpu") for name, shape in shapes.items()
    }
    for place, expert in enumerate(held):
        for name, shape in shapes.items():
            _put(module, name, torch.empty(shape, dtype=torch.float32, device="cpu"))
        generator = torch.Generator("cpu").manual_seed(random.Random(f"{seed} {expert}").getrandbits(63))
        _family(config).initialise(module, config.initializer_range, generator)
        for name, stack in drawn.items():
            stack[place] = getattr(module, name).detach()[0]
    return drawn


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers that ``module`` itself holds."""
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return dict(named)


def _put(module: nn.Module, name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Replace a parameter or buffer by ``tensor``, as trainable as ``like`` or as the one before."""
    if name in module._buffers:
        module._buffers[name] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        trained = (like if like is not None else getattr(module, name)).requires_grad
        module._parameters[name] = nn.Parameter(tensor, requires_grad=trained)


def load_model(
    folder: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    config: ModelConfig | None = None,
    **overrides: Any,
) -> Decoder:
    """Return the model of a checkpoint folder in transformers' format, or of a GGUF file.

    ``config`` is by default read from the folder, with ``overrides`` of its fields; ``dtype`` defaults to the file's.
    """
    if config is None:
        if isinstance(dtype, str):
            overrides |= {"dtype": dtype}  # the file may name a dtype that is not supported
        config = read_model_config(folder, **overrides)
    elif overrides:
        raise TypeError(f"load_model: config is given, so set {', '.join(overrides)} there")
    device = torch.get_default_device() if device is None else torch.device(device)
    decoder = _empty(config, device, backend)
    load_weights(decoder, config.checkpoint or folder, dtype=_dtype(dtype, config), device=device)
    return decoder


def _empty(config: ModelConfig, device: torch.device, backend: str | None, fake: bool = False) -> Decoder:
    """Return the model on the meta device with the ops for ``device``."""
    backend = backend or {"cpu": "cpu", "meta": "cpu", "cuda": "cuda"}.get(device.type, "reference")
    with torch.device("meta"):
        decoder = _family(config).build(config, choose_ops(backend, fake=fake))
    if backend == "cpu":
        widen(decoder)
    return decoder


def _family(config: ModelConfig) -> Any:
    """Return the module that builds the models of ``config``'s family."""
    if config.architecture not in _FAMILIES:
        raise NotImplementedError(f"{config.architecture}: longstraw.models has no module that builds it")
    return _FAMILIES[config.architecture]


def _dtype(dtype: str | torch.dtype | None, config: ModelConfig) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    choose("dtype", dtype or config.dtype, DTYPES)
    return getattr(torch, dtype or config.dtype)
