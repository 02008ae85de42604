"""Checks of configured values, whose messages say what would be valid."""

from __future__ import annotations

import difflib
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be what the user meant; the message says what would be valid."""


def choose(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``, with the nearest one as a hint."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{key}={value!r} is not one of {', '.join(choices)}{hint}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise ``ConfigError`` if ``value`` is below ``least``, or NaN; ``None`` passes."""
    if value is not None and not value >= least:
        raise ConfigError(f"{key}={value} must be at least {least}")
