"""Live bytes of tensor storages, exactly, by kind (what they hold) and by verb (what was running).

`MemoryMeter` is for the CPU and for fake tensors what `torch.cuda.max_memory_allocated` is on a GPU: the bytes of all
live storages, each rounded up to the 512 bytes of the CUDA caching allocator. It counts storages and not tensors, so
views, `.data` swaps and saved activations cost nothing twice. Weak references tell when a storage ends.

What is seen, and what is not:

* Every operation of the thread that entered the meter. On CPU the backward pass, hooks, custom functions and the
  recomputation of checkpoints run in that thread. Operations of other threads (autograd's for a CUDA device, data
  loaders) are not seen; the end of a storage is, in any thread.
* What `torch.tensor`, `torch.from_numpy`, `torch.load` and `copy.deepcopy` make. Not what `torch.frombuffer` makes, nor
  a bare `torch.UntypedStorage(n)` before a tensor is set on it: tag them.
* Nothing allocated before the meter was entered, until `tag` names it: views, in-place operations and `out=` do not
  make an argument's storage known. `UntypedStorage.resize_` does, for its bytes are new; so does `set_` to a storage.
* Results, not scratch memory inside an operation. In `torch.inference_mode` composite operations arrive whole, and
  what they allocate and free on the way is such scratch. Sparse tensors have no storage and count 0.
* Host memory used beside a device's, page-locked or not, is counted apart and is no part of the peaks: what
  `ops.host_offload.host_empty` makes, and what `tag` gets with `host=True`.
* Fake tensors count the bytes of the tensors they replace, if the meter is entered inside their `FakeTensorMode`.
  Those made where a mode is entered later, or that one again, are left out: there DTensor works out shapes. Meta
  tensors count.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.memory.fake_depth import FakeDepth
from longstraw.memory.kinds import KINDS
from longstraw.ops.fake_workspace import SCRATCH
from longstraw.ops.host_offload import HOST_EMPTY

UNTAGGED = "activations"
NO_VERB = "other"
CUDA_BLOCK = 512

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default  # fake tensors are asked for their device as often as for anything else
# These return an argument's storage, or one nobody has seen, although it was made outside the dispatcher a moment ago.
_ADOPTING = (_aten.lift_fresh.default, _aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset)


class _Storage(weakref.ref[torch.UntypedStorage]):
    """One live storage: a weak reference that carries the storage's key, bytes, kind and place to its own end."""

    __slots__ = ("host", "key", "kind", "size")

    key: int
    size: int
    kind: str
    host: bool


class MemoryMeter(TorchDispatchMode):
    """Count the live bytes of tensor storages while entered.

    rounding: bytes each storage is rounded up to (512: the CUDA caching allocator; 1: none). All numbers are bytes.
    The numbers stay readable after the meter is left, and it may be entered again: what it knows, it keeps knowing.
    """

    def __init__(self, rounding: int = CUDA_BLOCK) -> None:
        super().__init__()
        if rounding < 1:
            raise ValueError(f"rounding must be at least 1 byte, not {rounding}")
        self.rounding = rounding
        self.current = 0
        self._live: dict[int, _Storage] = {}
        self._by_kind = dict.fromkeys(KINDS, 0)
        self.host = 0
        self._host_by_kind = dict.fromkeys(KINDS, 0)
        self._verb = NO_VERB
        self._handles: list[Any] = []
        self._entered = False
        self._depth = FakeDepth()
        self._resize_before: Any = None
        self.reset_peak()

    # What is read

    @property
    def peak_by_verb(self) -> dict[str, int]:
        """Give, for each verb since `reset_peak`, the most bytes that were live while it was the innermost one."""
        self._close_verb()
        return dict(self._peak_by_verb)

    def bytes_by_kind(self) -> dict[str, int]:
        """Give the bytes that are live now, for each of `KINDS`; their sum is `current`."""
        return dict(self._by_kind)

    def host_bytes_by_kind(self) -> dict[str, int]:
        """Give the bytes in host memory now, for each of `KINDS`; their sum is `host`."""
        return dict(self._host_by_kind)

    @property
    def peak_bytes_by_kind(self) -> dict[str, int]:
        """Give the parts of `peak` at the moment of the peak; their sum is `peak`."""
        return dict(self._by_kind if self._at_peak else self._kinds_at_peak)

    def reset_peak(self) -> None:
        """Start the peaks anew from what is live now (once a step, as `torch.cuda.reset_peak_memory_stats`)."""
        self.peak = self._verb_peak = self.current
        self.host_peak = self.host
        self.peak_verb = self._verb
        self._peak_by_verb: dict[str, int] = {}
        # The parts are copied only when the peak is left: while memory grows, every allocation is a new peak.
        self._at_peak = True
        self._kinds_at_peak = dict(self._by_kind)

    # What callers report

    @contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Attribute the peaks reached in this block to `name`; an inner verb takes over until it ends."""
        outer = self._verb
        self._start_verb(name)
        try:
            yield
        finally:
            self._start_verb(outer)

    def tag(self, kind: str, tensors: Any, host: bool = False) -> int:
        """Move the storages of these tensors to `kind` and give their bytes, each storage once.

        tensors: a tensor, or tensors nested in mappings and iterables (None and plain numbers are passed over).
        A storage unknown so far is known from here on; one that had a kind gets the new one. `host`: they lie in host
        memory, and from here on are no part of what the peaks are made of.
        """
        if kind not in self._by_kind:
            raise ValueError(f"unknown kind {kind!r}; the kinds are {', '.join(KINDS)}")
        tagged: dict[int, int] = {}
        for tensor in _tensors(tensors):
            for plain in _plain_tensors(tensor):
                storage = _storage_of(plain)
                if storage is not None:
                    entry = self._entry(storage, kind, host)
                    tagged[entry.key] = entry.size
        return sum(tagged.values())

    def watch_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Tag the gradients of these parameters, now and as the backward pass makes them, until the meter is left."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._tag_gradient))
            self._tag_gradient(parameter)

    def _tag_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.tag("gradients", parameter.grad)

    # How it sees

    def __enter__(self) -> MemoryMeter:
        if self._entered:
            raise RuntimeError("this MemoryMeter is entered already; one meter counts a whole step, verbs divide it")
        self._entered = True
        self._depth = FakeDepth()
        for entry in list(self._live.values()):  # entered again: sizes may have changed unseen
            storage = entry()
            if storage is not None:
                self._measure(entry, storage)
        # UntypedStorage.resize_ is no dispatched operation, and FSDP frees and refills its gathered blocks with it.
        self._resize_before = torch.UntypedStorage.__dict__.get("resize_")
        torch.UntypedStorage.resize_ = self._watched_resize(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered = False
        if self._resize_before is None:
            del torch.UntypedStorage.resize_  # inherited again
        else:
            torch.UntypedStorage.resize_ = self._resize_before  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device  # as the mode below would answer, in a tenth of the time
        for cls in types:
            if hasattr(cls, "__tensor_flatten__"):  # a wrapper (DTensor): it runs, its inner operations come here
                return NotImplemented
        out = func(*args, **kwargs) if kwargs else func(*args)
        if func is _DEVICE or self._depth.deeper:
            return out
        self._see(out if isinstance(out, (tuple, list)) else (out,), func, args, kwargs)
        kind = _kind_of(func)
        if kind is not None:
            self._sort(kind, [out] if func is SCRATCH else [out, *args, *(kwargs or {}).values()])
        return out

    def _sort(self, kind: str, values: Sequence[Any]) -> None:
        """Move the storages of these to ``kind``, those that have none yet."""
        for value in values:
            if isinstance(value, (tuple, list)):
                self._sort(kind, value)
            elif isinstance(value, torch.Tensor) and (storage := _storage_of(value)) is not None:
                entry = self._live.get(storage._cdata)
                if entry is not None and entry() is storage and entry.kind == UNTAGGED:
                    self._entry(storage, kind)

    def _see(self, results: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Count the storages of an operation's results, but those of arguments that are not known yet."""
        for result in results:
            if isinstance(result, torch.Tensor):
                storage = _storage_of(result)
                if storage is None or (type(result) is FakeTensor and result.fake_mode is not self._depth.mode):
                    continue
                entry = self._live.get(storage._cdata)
                if entry is not None and entry() is storage:
                    self._measure(entry, storage)
                elif func is HOST_EMPTY:
                    self._entry(storage, host=True)
                elif func in _ADOPTING or not _is_among(storage, (*args, *kwargs.values()) if kwargs else args):
                    self._entry(storage)
            elif isinstance(result, (tuple, list)):
                self._see(result, func, args, kwargs)

    def _entry(self, storage: torch.UntypedStorage, kind: str | None = None, host: bool = False) -> _Storage:
        """Find or register a storage, moved to `kind` if one is given, and to host memory if so."""
        key = storage._cdata
        entry = self._live.get(key)
        # Addresses are used again. The weak reference ends the old entry first; identity is compared all the same.
        if entry is None or entry() is not storage:
            if entry is not None:
                self._gone(entry)
            entry = _Storage(storage, self._gone)
            entry.key, entry.size, entry.kind, entry.host = key, 0, UNTAGGED, host
            self._live[key] = entry
        if host and not entry.host:
            self._count(entry, -entry.size)
            entry.host = True
        if kind is not None and kind != entry.kind:
            by_kind = self._host_by_kind if entry.host else self._by_kind
            by_kind[entry.kind] -= entry.size
            by_kind[kind] += entry.size
            entry.kind = kind
        self._measure(entry, storage)
        return entry

    def _measure(self, entry: _Storage, storage: torch.UntypedStorage) -> None:
        rounding = self.rounding
        grown = -(-storage.nbytes() // rounding) * rounding - entry.size
        if grown:
            self._count(entry, grown)

    def _gone(self, entry: _Storage) -> None:
        if self._live.get(entry.key) is entry:
            del self._live[entry.key]
            self._count(entry, -entry.size)

    def _count(self, entry: _Storage, grown: int) -> None:
        # Storages end in other threads and in garbage collections too. Nothing here makes an object that could start a
        # collection, and no thread takes over between lines that do not call.
        if entry.host:
            entry.size += grown
            self._host_by_kind[entry.kind] += grown
            self.host += grown
            if self.host > self.host_peak:
                self.host_peak = self.host
            return
        if grown < 0 and self._at_peak:
            self._kinds_at_peak.update(self._by_kind)
            self._at_peak = False
        entry.size += grown
        self._by_kind[entry.kind] += grown
        self.current += grown
        if self.current > self._verb_peak:
            self._verb_peak = self.current
            if self.current > self.peak:
                self.peak = self.current
                self.peak_verb = self._verb
                self._at_peak = True

    def _close_verb(self) -> None:
        self._peak_by_verb[self._verb] = max(self._verb_peak, self._peak_by_verb.get(self._verb, 0))

    def _start_verb(self, name: str) -> None:
        self._close_verb()
        self._verb, self._verb_peak = name, self.current

    def _watched_resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = original(storage, size)
            if storage.nbytes() != before:
                entry = self._entry(storage)
                if entry.kind == UNTAGGED:
                    self._entry(storage, "gathered")
            return result

        return resize_


@functools.cache
def _kind_of(func: Any) -> str | None:
    """Return the kind of what an operation of communication, or of scratch memory, works on; None for all others."""
    if func is SCRATCH:
        return "workspace"
    gradients = func._schema.name == "fsdp::chunk_cat"  # made ready to be reduced
    if gradients or func.namespace in ("c10d", "_c10d_functional"):
        return "communication"
    return "gathered" if func.namespace == "fsdp" else None


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse
        return None


def _is_among(storage: torch.UntypedStorage, values: Any) -> bool:
    """Tell whether one of these values, or of the lists and tuples among them, is a tensor on this very storage."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if _storage_of(value) is storage:
                return True
        elif type(value) in (list, tuple) and _is_among(storage, value):
            return True
    return False


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give the tensors with memory behind a tensor: itself, or what a wrapper (DTensor) holds on this rank."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # a DTensor lists its mesh too
                yield from _plain_tensors(part)
    else:
        yield tensor


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Walk mappings and iterables down to their tensors; numbers and None are passed over."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        yield from _tensors(nested.values())
    elif isinstance(nested, Iterable) and not isinstance(nested, (str, bytes)):
        for value in nested:
            yield from _tensors(value)
    elif nested is not None and not isinstance(nested, (int, float)):
        raise TypeError(f"expected tensors, or mappings and iterables of tensors, not {type(nested).__name__}")
