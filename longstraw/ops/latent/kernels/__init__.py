"""The Triton kernels of latent attention and how they are launched; ``fused`` has the operators that do it.

What is launched allocates nothing. Row numbers are 64-bit before they meet a stride.
"""

from longstraw.ops.latent.kernels.attend import attend_backward, attend_forward
from longstraw.ops.latent.kernels.choose import best_rows

__all__ = ["attend_backward", "attend_forward", "best_rows"]
