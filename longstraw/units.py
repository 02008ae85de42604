"""Parse counts such as 2.1M or 256Ki, and other numbers; format counts, bytes and seconds for people.

``2.1M`` and ``256K`` are powers of ten, ``2Mi`` and ``256Ki`` powers of two. One GB is 10^9 bytes, one GiB is 2^30.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

GB = 10**9
GIB = 2**30
MIB = 2**20

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_COUNT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:e\+?\d{1,4})?)\s*([a-z]*)\s*", re.IGNORECASE)
_FORMS = "write 2100000, 2_100_000, 2.1M (10^6), 256K (10^3), 2Mi (2^20) or 256Ki (2^10)"


def parse_count(value: int | float | str, *, least: float = 1, most: float = 2**63 - 1) -> int:
    """Return the whole number that ``value`` means.

    Decimal arithmetic throughout: ``int(8.2 * 1e6)`` would be 8,199,999. Raises ``ValueError`` for what is no whole
    number from ``least`` to ``most``, naming the forms that are understood.
    """
    match = None if isinstance(value, bool) else _COUNT.fullmatch(str(value))
    if match is None or match[2].lower() not in _SUFFIXES:
        raise ValueError(f"not a count: {value!r}; {_FORMS}")
    count = Decimal(match[1].replace("_", "")) * _SUFFIXES[match[2].lower()]
    if count != count.to_integral_value():
        raise ValueError(f"not a whole number: {value!r} is {count.normalize():f}; {_FORMS}")
    if count < least:
        raise ValueError(f"must be at least {least}: {value!r}")
    if count > most:
        raise ValueError(f"must be at most {most:,}: {value!r}")
    return int(count)


def finite_number(value: Any) -> float:
    """Return ``value``, a number of Python, NumPy or PyTorch, as a float; raise ``ValueError`` for text and NaN."""
    try:
        number = float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise ValueError(f"{value!r:.100} is no number")
    if not math.isfinite(number):
        raise ValueError(f"{number}, must be finite")
    return number


def format_count(count: int) -> str:
    """Return ``count`` with thousands separated, and with a binary suffix where that is exact: ``2,097,152 (2Mi)``."""
    for suffix, size in (("Mi", 2**20), ("Ki", 2**10)):
        if count >= size and count % size == 0:
            return f"{count:,} ({count // size}{suffix})"
    return f"{count:,}"


def format_bytes(count: int | float) -> str:
    """Return a number of bytes in the decimal unit that keeps it readable: ``97.503 GB``, ``12.3 MB``, ``512 B``."""
    for suffix, size, digits in (("TB", 10**12, 3), ("GB", GB, 3), ("MB", 10**6, 1), ("kB", 10**3, 1)):
        if abs(count) >= size:
            return f"{count / size:,.{digits}f} {suffix}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as ``0.42 s``, ``12.3 s``, ``4 min 05 s`` or ``1 h 26 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
