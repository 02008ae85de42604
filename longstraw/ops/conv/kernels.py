"""Call flash-linear-attention's kernels of the causal convolution; used by the operators in ``fused``.

fla's state has W columns of which the first is padding: [1, C, W] for a tail [W-1, C].
"""

from __future__ import annotations

from fla.modules.causal_conv1d.ops import causal_conv1d_bwd, causal_conv1d_fwd
from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor, weight: Tensor, tail: Tensor) -> Tensor:
    """Return what ``fused.conv_forward`` does."""
    return causal_conv1d_fwd(
        x=x[None], weight=weight, bias=None, residual=None, initial_state=_state(tail), activation="silu"
    )[0][0]


def backward(x: Tensor, weight: Tensor, tail: Tensor, grad: Tensor, grad_tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``fused.conv_backward`` does."""
    grad_x, grad_weight, _, _, grad_state = causal_conv1d_bwd(
        x=x[None],
        dy=grad[None],
        dht=_state(grad_tail),
        weight=weight,
        initial_state=_state(tail),
        activation="silu",
    )
    return grad_x[0], grad_weight, grad_state[0, :, 1:].T.contiguous()


def _state(tail: Tensor) -> Tensor:
    return F.pad(tail.T, (1, 0))[None].contiguous()
