"""Parse ``key=value`` arguments of the commands other than ``longstraw.run`` by OmegaConf's rules. No torch.

``longstraw.run`` uses Hydra's grammar, which also has sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from longstraw.config.checks import ConfigError, choose
from longstraw.units import parse_count

Settings = TypeVar("Settings")


def read_arguments(arguments: Sequence[str], keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return ``key=value`` arguments as a dict, values parsed as YAML; the last of a repeated key counts.

    Raises ``ConfigError`` for what is no ``key=value``, or a key that is none of ``keys`` where those are given.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            names = f"; the keys are {', '.join(keys)}" if keys else ""
            raise ConfigError(f"{argument} is no key=value: write key=value{names}")
        if keys:
            choose("key", key, keys)
        try:
            read = OmegaConf.from_dotlist([f"value={text}"])
        except (YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{argument}: {str(error).splitlines()[0]}") from None
        values[key] = OmegaConf.to_container(read)["value"]  # type: ignore[index, call-overload]
    return values


def parse_settings(settings: type[Settings], arguments: Sequence[str], *, least: int = 0) -> Settings:
    """Return ``settings`` from ``arguments``; numbers may be counts such as 4Ki, of at least ``least``.

    Raises ``ConfigError`` that names the argument and, where it is the key that is wrong, the valid ones.
    """
    known = {f.name: f for f in fields(settings)}  # type: ignore[arg-type]
    values, schema = read_arguments(arguments, tuple(known)), OmegaConf.structured(settings)
    OmegaConf.set_readonly(schema, False)  # as a frozen dataclass makes it
    for key, value in values.items():
        try:
            if "int" in str(known[key].type):
                values[key] = parse_count(value, least=least)
            OmegaConf.update(schema, key, values[key])
            values[key] = schema[key]
        except (ValueError, OmegaConfBaseException) as error:
            raise ConfigError(f"{key}={value}: {str(error).splitlines()[0]}") from None
    return settings(**values)
