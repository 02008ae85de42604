"""Count the bytes that this rank sends in PyTorch's collectives, by verb, collective and purpose.

A collective over W ranks counts as what the ring algorithm sends, whatever the transport does:

* all-gather: the own part to each of the others, W - 1 times the input;
* reduce-scatter: every part but the own, (W - 1) / W of the input;
* all-reduce: one after the other, 2 (W - 1) / W of the tensor;
* all-to-all: what goes to others.

A step uses no others: broadcasts and point-to-point messages are not counted. The purpose is the caller's label
(``collectives.labelled``). FSDP2 sets none: what it gathers is ``parameters``, what it reduces ``gradients``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.parallel.collectives import UNLABELLED, current_label

NO_VERB = "other"
BY_FSDP = {"all_gather": "parameters", "reduce_scatter": "gradients"}
SENT: dict[str, Callable[[int], int]] = {  # times the input, over the number of ranks
    "all_gather": lambda ranks: (ranks - 1) * ranks,
    "reduce_scatter": lambda ranks: ranks - 1,
    "all_reduce": lambda ranks: 2 * (ranks - 1),
    "all_to_all": lambda ranks: ranks - 1,
}
COLLECTIVES = {  # PyTorch's operations: which collective each is, and the argument that is sent
    "_allgather_base_": ("all_gather", "input_tensor"),
    "allgather_": ("all_gather", "input_tensors"),
    "allgather_coalesced_": ("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "all_gather_into_tensor": ("all_gather", "input"),
    "all_gather_into_tensor_out": ("all_gather", "input"),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "alltoall_base_": ("all_to_all", "input"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "all_to_all_single": ("all_to_all", "input"),
}


class Sent(NamedTuple):
    """What bytes were sent for: the step's verb, the collective operation and the label."""

    verb: str
    collective: str
    label: str


class TrafficMeter(TorchDispatchMode):
    """Count what this rank sends while entered; ``sent`` holds the bytes. It may be entered again and counts on.

    Collectives of a backward are counted too, in whatever thread it runs, because autograd keeps the mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[Sent] = Counter()
        self._verb = NO_VERB

    @contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Count bytes sent in this block under the verb ``name``; an inner verb replaces it until it ends."""
        outer, self._verb = self._verb, name
        try:
            yield
        finally:
            self._verb = outer

    def reset(self) -> None:
        """Start anew from nothing."""
        self.sent.clear()

    def by_collective(self) -> dict[str, int]:
        """Return the bytes by collective operation."""
        total: Counter[str] = Counter()
        for key, size in self.sent.items():
            total[key.collective] += size
        return dict(total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for cls in types:
            if hasattr(cls, "__tensor_flatten__"):  # a wrapper (DTensor): it runs, its inner operations come here
                return NotImplemented
        kwargs = kwargs or {}
        message = message_of(func, args, kwargs)
        if message is not None:
            label = current_label()
            if label == UNLABELLED:
                label = BY_FSDP.get(message.collective, label)
            self.sent[Sent(self._verb, message.collective, label)] += message.size
        return func(*args, **kwargs)


class Message(NamedTuple):
    """What this rank sends in one collective, in bytes, and to whom."""

    collective: str
    size: int
    group: dist.ProcessGroup


def message_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Message | None:
    """Return what this rank sends in the operation ``func``, or None if it is no collective."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2]
    if name not in COLLECTIVES:
        return None
    collective, sent = COLLECTIVES[name]
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _group(given)
    size, ranks = _bytes(given[sent]), group.size()
    splits = given.get("input_split_sizes")
    if splits:
        size = (sum(splits) - splits[group.rank()]) * (size // max(len(given[sent]), 1))
    else:
        size = size * SENT[collective](ranks) // ranks
    return Message(collective, size, group)


def _group(given: Mapping[str, Any]) -> dist.ProcessGroup:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _bytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes, tensors))
