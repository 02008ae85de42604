"""``key=value`` arguments of the small commands, whose keys are the fields of one dataclass; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from longstraw.config.checks import ConfigError, choose
from longstraw.units import parse_count

Settings = TypeVar("Settings")


def parse_settings(settings: type[Settings], arguments: Sequence[str], *, least: int = 0) -> Settings:
    """Return the ``settings`` that ``arguments`` mean; numbers are counts such as 4Ki, of at least ``least``.

    Raises ``ConfigError`` that names the argument and, where it is the key that is wrong, the valid ones.
    """
    known = {f.name: f for f in fields(settings)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no key=value; the keys are {', '.join(known)}")
        choose("key", key, tuple(known))
        try:
            values[key] = parse_count(value, least=least) if "int" in str(known[key].type) else value
        except ValueError as error:
            raise ConfigError(f"{argument}: {error}") from None
    return settings(**values)
