"""GRPO on prompts of a million tokens and more, with exact gradients through the prompt.

Names are resolved when first used, so that ``longstraw.units`` and ``longstraw.config`` can be had without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longstraw.group import Group
    from longstraw.models import build_model, load_model
    from longstraw.rollout.sampling import sample
    from longstraw.step import grpo_step, prefill

_HOMES = {
    "Group": "longstraw.group",
    "build_model": "longstraw.models",
    "load_model": "longstraw.models",
    "grpo_step": "longstraw.step",
    "prefill": "longstraw.step",
    "sample": "longstraw.rollout.sampling",
}
__all__ = ["Group", "build_model", "grpo_step", "load_model", "prefill", "sample"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'longstraw' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
