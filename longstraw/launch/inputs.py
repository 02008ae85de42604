"""Check, before any job starts, that the packages, data and checkpoints it names are there. No torch."""

from __future__ import annotations

import importlib.util
import sys

from longstraw.config import CheckpointConfig, ConfigError, EvaluateConfig, RunConfig
from longstraw.config.converted import checkpoint_folder
from longstraw.config.hf_files import check_adapter, check_weights
from longstraw.data import check_data, held_out_configs, tokenizer_folder


def check_inputs(config: RunConfig) -> None:
    """Raise ``ConfigError`` or ``OSError`` for a package, file or folder that ``config`` names and a job could not use.

    ``config.mode`` is not ``auto``. Only beginnings and headers of files are read; the job checks the rest.
    """
    if config.adapter.name == "lora" and config.adapter.checkpoint is not None:
        check_adapter(config.adapter.checkpoint)
    if config.mode == "run":  # else weights and data are made up
        if config.model.checkpoint is not None:
            folder = checkpoint_folder(config.model.checkpoint)
            embedding = (config.model.vocab_size, config.model.hidden_size)
            check_weights(folder, layers=config.model.num_hidden_layers, embedding=embedding)
        check_data(config)
        if config.evaluate.every is not None:
            held_out_configs(config)
    if config.hardware.python is None:  # another Python has its own packages
        _check_packages(config)


def _check_packages(config: RunConfig) -> None:
    """Raise ``ConfigError`` with the command that installs what is missing; nothing is imported."""
    wanted = {}
    if config.adapter.name == "lora":
        wanted["peft"] = ("adapter=lora", "pip install peft")
    if config.mode == "run" and tokenizer_folder(config) is not None:
        wanted["transformers"] = (f"the tokenizer in {tokenizer_folder(config)}", "pip install transformers")
    if config.hardware.backend == "cuda" and config.mode in ("run", "emulate"):
        wanted["triton"] = ("hardware.backend=cuda", "pip install 'longstraw[gpu]'")
    for package, (why, command) in wanted.items():
        if not is_installed(package):
            raise ConfigError(f"{why} needs {package}, which is not installed: {command}")


def is_installed(package: str) -> bool:
    """Return whether ``package`` can be found; it is not imported."""
    try:
        return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: sys.modules[package] is None
        return False


def without_effect(config: RunConfig) -> str | None:
    """Return one line that names the keys without effect in a job's mode, or None."""
    simulates, detached = config.mode != "run", config.prompt_grad == "detached"
    without = {
        f"mode={config.mode}": {
            "save": simulates and config.save,
            "checkpoint.*": simulates and config.checkpoint != CheckpointConfig(),
            "evaluate.*": simulates and config.evaluate != EvaluateConfig(),
        },
        "prompt_grad=detached": {
            "prompt_grad_window": detached and config.prompt_grad_window is not None,
            "state.gradient_dtype": detached and config.state.gradient_dtype is not None,
        },
    }
    said = {where: ", ".join(key for key, given in keys.items() if given) for where, keys in without.items()}
    return "; ".join(f"{keys}: no effect with {where}" for where, keys in said.items() if keys) or None
