"""What bytes can be of: the kinds that a count and a prediction are divided into; no torch."""

from __future__ import annotations

KINDS = (
    "parameters",
    "gathered",  # what FSDP2 gathers of them for a block, and the buffers that it gathers into
    "gradients",
    "optimizer",
    "retained",
    "state_gradient",
    "snapshots",
    "activations",
    "workspace",  # what a kernel takes beside its results; on fake tensors ``ops.fake_workspace`` allocates it
    "communication",  # what collectives send from and receive into, as long as it lives
    "inputs",
)
