"""The ops of latent attention in Triton, for CUDA.

Every tensor is allocated in Python, before the custom operation that fills it: a simulation on fake tensors counts the
same bytes. The operations themselves allocate nothing. Row numbers are 64-bit before they meet a stride.
"""

from longstraw.ops.latent.kernels.attend import attend_backward, attend_forward
from longstraw.ops.latent.kernels.choose import best_rows, select_rows

__all__ = ["attend_backward", "attend_forward", "best_rows", "select_rows"]
