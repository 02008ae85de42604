"""Add, load, save and switch off low-rank adapters (Hu et al. 2021, arXiv 2106.09685) through PEFT.

A target is named as PEFT does it: ``q_proj``, ``self_attn.q_proj`` or ``model.layers.3.self_attn.q_proj``. PEFT wraps
the module in place, so W becomes ``q_proj.base_layer.weight`` beside ``q_proj.lora_A.default.weight``; on disk, as for
transformers' class, the latter is ``base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight``.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longstraw.config import AdapterConfig, ConfigError
from longstraw.config.hf_files import ADAPTER, CheckpointError, check_adapter
from longstraw.layers.feedforward import MixtureOfExperts
from longstraw.models.decoder import Decoder
from longstraw.models.hf_config import saved_class, text_prefix
from longstraw.models.hf_weights import new_folder, read_tensors, write_tensors

log = logging.getLogger(__name__)

_ONLY_HERE = ("gate_proj", "up_proj", "down_proj")  # PEFT takes these for GLM's fused experts in transformers' class
_NAME = "default"  # PEFT's name for the only adapter of a model
_PREFIX = "base_model.model."
_NO_GRADIENT = ".indexer."  # indexers get no gradient, so an adapter there would never change


def _copy(parameter: Tensor, whole: Tensor) -> None:
    if not parameter.is_meta:
        parameter.copy_(whole)


def add_adapter(model: Decoder, config: AdapterConfig, *, seed: int = 0) -> Decoder:
    """Freeze ``model`` and wrap its targets with new low-rank adapters, or those of ``config.checkpoint``; in place.

    To be called once, after the weights are loaded and before the model is parallelised. Adapters have at least float32
    whatever the model has; A is drawn from ``seed``, B is zero, so the model's output does not change. With the adapter
    ``none`` the model is returned as it is. Raises ``ConfigError`` for targets that match nothing.
    """
    if config.name == "none":
        return model
    if config.checkpoint is not None:
        return load_adapter(model, config.checkpoint)
    _refuse_second(model)
    defaults = model.config.adapter_targets
    targets = list(config.targets) or [
        t for t in defaults if _matching(_linear(model), [t])
    ]  # a model cut to fewer layers may lack some
    _matched(model, targets)
    if _matching(targets, _ONLY_HERE) and any(isinstance(module, MixtureOfExperts) for module in model.modules()):
        log.warning("adapters of %s load here, not in PEFT on transformers' class of this model", ", ".join(_ONLY_HERE))
    lora = _peft().LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")
    _inject(model, lora)
    fill_adapter(model, config, seed=seed)
    return model


def fill_adapter(
    model: Decoder, config: AdapterConfig, *, seed: int = 0, keep: Callable[[Tensor, Tensor], object] = _copy
) -> None:
    """Give the adapters of ``model`` their first values: those of ``config.checkpoint``, or A from ``seed`` and B zero.

    ``keep`` gets a parameter and the whole tensor it shall have; by default it is copied. For a model that was on the
    meta device when its adapters were added.
    """
    if config.checkpoint is not None:
        tensors = {_here(name): tensor for name, tensor in read_tensors(Path(config.checkpoint) / ADAPTER).items()}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" not in name:
                continue
            if config.checkpoint is not None:
                keep(parameter, tensors[name])
                continue
            whole = torch.zeros(parameter.shape)
            if ".lora_A." in name:  # as nn.Linear, and PEFT with it
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            keep(parameter, whole)


def load_adapter(model: Decoder, folder: str | Path) -> Decoder:
    """Freeze ``model`` and wrap it with the adapter that PEFT, or ``save_adapter``, wrote to ``folder``; in place.

    Rank, alpha and targets are the file's; dropout is switched off, because a chunk evaluated again must give the same.
    Raises ``CheckpointError`` for adapters other than plain LoRA, or that do not fit the model.
    """
    folder = Path(folder)
    _refuse_second(model)
    check_adapter(folder)
    lora = _peft().LoraConfig.from_pretrained(str(folder))
    _check_plain(folder, lora)
    tensors = {_here(name): tensor for name, tensor in read_tensors(folder / ADAPTER).items()}
    wrapped = sorted({name.partition(".lora_")[0] for name in tensors})
    if absent := sorted(set(wrapped) - set(_linear(model))):
        raise CheckpointError(f"{folder}: adapts {', '.join(absent[:5])}, which {model.config.name} has not")
    named = lora.target_modules
    if isinstance(named, str) or sorted(_matching(_linear(model), named or ())) != wrapped:
        lora.target_modules = wrapped
    _inject(model, lora)
    parameters = dict(model.named_parameters())
    ours = {name for name in parameters if ".lora_" in name}
    if ours != set(tensors):
        odd = sorted(ours ^ set(tensors))
        raise CheckpointError(f"{folder}: {len(odd)} tensors have no counterpart: {', '.join(odd[:5])}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != parameters[name].shape:
                raise CheckpointError(f"{folder}: {name} is {[*tensor.shape]}, not {[*parameters[name].shape]}")
            parameters[name].copy_(tensor)
    return model


def save_adapter(model: Decoder, folder: str | Path) -> None:
    """Write the adapter of ``model`` to the new ``folder`` in PEFT's format; it appears whole or not at all.

    Its keys are the module names of the class that the base checkpoint's ``config.json`` names; PEFT and vLLM skip an
    adapter's tensors whose keys fit no module, without an error.
    """
    prefix = text_prefix(model.config)
    named = [(name, tensor) for name, tensor in model.named_parameters() if ".lora_" in name]
    tensors: dict[str, Tensor] = {_on_disk(name, prefix): tensor for name, tensor in named}
    if not tensors:
        raise CheckpointError(f"{folder}: the model has no adapter to save")
    lora: Any = copy.copy(model.peft_config[_NAME])  # type: ignore[index]
    lora.target_modules = [re.sub(r"^model\.", prefix, target) for target in lora.target_modules]
    with new_folder(folder) as made:
        base = model.config.checkpoint
        lora.base_model_name_or_path = base if base is None else str(Path(base).absolute())
        lora.save_pretrained(str(made))
        write_tensors(tensors, made / ADAPTER)
    log.info("%s: an adapter for %s of %s", folder, saved_class(model.config), base or "random weights")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters in this block, for the reference of a KL term. Only without autograd.

    PEFT's own switch also changes ``requires_grad``, which sharded parameters copy when they are first used; here only
    the wrappers' flag is turned.
    """
    wrappers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    if not wrappers:
        raise ValueError("the model has no adapters to switch off; with adapter=none the reference is a second model")
    before = [wrapper._disable_adapters for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper._disable_adapters = True
        yield
    finally:
        for wrapper, flag in zip(wrappers, before, strict=True):
            wrapper._disable_adapters = flag


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("adapter=lora needs peft: pip install peft") from error
    return peft


def _linear(model: nn.Module) -> list[str]:
    """Return the names of the modules that can be adapted."""
    return [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and _NO_GRADIENT not in n]


def _matching(names: Sequence[str], targets: Collection[str]) -> list[str]:
    return [n for n in names if any(n == target or n.endswith(f".{target}") for target in targets)]


def _matched(model: nn.Module, targets: list[str]) -> None:
    """Raise ``ConfigError`` for targets that match no linear module, or one that cannot be adapted."""
    linear = _linear(model)
    short = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    others = [name for name, _ in model.named_modules() if name not in set(linear)]
    for target in targets:
        if not _matching(linear, [target]):
            raise ConfigError(
                f"adapter.targets: {target!r} matches no linear module with a gradient; there are {short}"
            )
        if odd := _matching(others, [target]):
            raise ConfigError(f"adapter.targets: {target!r} also matches {odd[0]}, which cannot be adapted; name more")


def _check_plain(folder: Path, lora: Any) -> None:
    plain = {"use_dora": False, "bias": "none", "modules_to_save": None, "target_parameters": None, "lora_bias": False}
    for key, value in plain.items():
        if getattr(lora, key, value) not in (value, []):
            raise CheckpointError(f"{folder}: {key}={getattr(lora, key)!r} is not supported, only {value!r}")
    if lora.lora_dropout:
        log.warning("%s: dropout is switched off: a chunk evaluated again must give the same", folder)
        lora.lora_dropout = 0.0


def _refuse_second(model: nn.Module) -> None:
    if any(hasattr(module, "lora_A") for module in model.modules()):
        raise ConfigError("the model has an adapter already; add one to a freshly loaded model")


def _inject(model: Decoder, lora: Any) -> None:
    """Wrap the targets; the adapters have PEFT's initial values, which the caller replaces."""
    lora.inference_mode = False
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        _peft().inject_adapter_in_model(lora, model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _on_disk(name: str, prefix: str) -> str:
    return _PREFIX + re.sub(r"^model\.", prefix, name).replace(f".{_NAME}.", ".")


def _here(stored: str) -> str:
    name = stored.removeprefix(_PREFIX).replace("model.language_model.", "model.")
    return re.sub(r"\.(lora_[AB])\.weight$", rf".\1.{_NAME}.weight", name)
