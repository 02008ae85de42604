"""Import a module when it is first used, so that Triton is needed only where a kernel is launched."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Imports a module when one of its attributes is first read."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # of a protocol of Python's own, such as copying: not asked of the module
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
