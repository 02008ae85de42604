"""The weight of a module with its low-rank adapter added, for layers that read weights instead of calling modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def effective_weight(module: Any) -> Tensor:
    """Return the weight of ``module``, including active low-rank adapters: W + scaling B A.

    Differentiable in all three. The sum has the wider of the two dtypes: rounded to a bfloat16 W, a small B A would
    vanish. ``module`` is a plain module with a ``weight``, or PEFT's wrapping of one, known by its attributes.
    """
    base = getattr(module, "base_layer", module)
    weight: Tensor = base.weight
    if base is module or module.disable_adapters:
        return weight
    for name in module.active_adapters:
        if name in module.lora_A:
            weight = weight + module.scaling[name] * (module.lora_B[name].weight @ module.lora_A[name].weight)
    return weight
