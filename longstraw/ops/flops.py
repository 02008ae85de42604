"""FLOPs of operators from their arguments, for operators that PyTorch's own flop counter does not know or miscounts.

A module that calls such operators lists them in its ``FLOPS``; a multiply-add is two. The rate is the key of
``hardware.rates`` at which the operator runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class OpFlops(NamedTuple):
    """At which rate an operator runs, and its FLOPs as a function of its positional arguments."""

    rate: str
    of: Callable[..., int]


Flops = dict[Any, OpFlops]  # by operator, such as torch.ops.aten.mm


def pairs(queries: int, rows: int, causal: bool) -> int:
    """Return how many pairs of a query and a row an attention evaluates; causal attention is square."""
    return queries * (queries + 1) // 2 if causal else queries * rows
