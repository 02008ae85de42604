"""Check values of the configuration: that a name is a valid choice and a number is within its field's range.

A field declares its range with its default: ``rank: int = number(16, 1, 4096)``. ``check_ranges`` checks an object's
fields; infinity and NaN are in no range.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any


class ConfigError(ValueError):
    """An invalid configuration; the message says what would be valid."""


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` to ``most``, both included unless ``above`` leaves the least out."""

    least: float
    most: float
    above: bool = False
    hint: str = ""  # what to write instead

    def check(self, key: str, value: float) -> None:
        """Raise ``ConfigError`` that names ``key`` unless ``value`` is in the range."""
        low = value > self.least if self.above else value >= self.least  # false for NaN
        if low and value <= self.most:
            return
        if not low:
            bound = f"{'above' if self.above else 'at least'} {self.least:,}"
        else:
            bound = f"{'finite, ' if math.isinf(value) else ''}at most {self.most:,}"
        raise ConfigError(f"{key}={value} must be {bound}{self.hint}")


SIZE = Range(1, 2**24)  # for one dimension; the largest published vocabulary is 2**18
POSITIONS = 2**40  # no context is longer


def number(default: Any, least: float, most: float, *, above: bool = False, hint: str = "") -> Any:
    """Return a dataclass field that holds a number, or several, from ``least`` to ``most``, or None."""
    metadata = {"range": Range(least, most, above, hint)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def range_of(declared: Field[Any], unlisted: Range | None = None) -> Range | None:
    """Return the range of a field: the declared one, ``unlisted`` for other whole numbers, None for other types."""
    whole = "int" in str(declared.type).replace("dict[str, int]", "")
    return declared.metadata.get("range", unlisted if whole else None)


def check_ranges(checked: Any, where: str, unlisted: Range | None = None) -> None:
    """Raise ``ConfigError`` for the first number of the dataclass object ``checked`` that is out of its range.

    ``where`` is the object's key, such as ``optimizer``; empty at the root. ``unlisted`` is the range of whole numbers
    that declare none.
    """
    for declared in fields(checked):
        valid = range_of(declared, unlisted)
        if valid is not None:
            for value in _numbers(getattr(checked, declared.name)):
                valid.check(f"{where}.{declared.name}" if where else declared.name, value)


def _numbers(value: Any) -> Iterator[float]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int | float) and not isinstance(item, bool):
            yield item


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
