"""What one operation computes and moves: its FLOPs, the rate at which it runs, and its bytes read and written."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from longstraw.ops.attention import cpu as cpu_attention
from longstraw.ops.attention import fused as fused_attention
from longstraw.ops.conv import fused as conv
from longstraw.ops.delta import fused as delta
from longstraw.ops.fake_workspace import SCRATCH
from longstraw.ops.flops import Flops, OpFlops
from longstraw.ops.host_offload import HOST_EMPTY
from longstraw.ops.latent import fused as latent
from longstraw.ops.logprob import fused as logprob

_aten = torch.ops.aten


def _solve_flops(matrix: Tensor, right: Tensor) -> int:
    """Half of a product's: the matrix is triangular."""
    return right.numel() * matrix.shape[-1]


FLOPS: Flops = {
    **cpu_attention.FLOPS,
    **fused_attention.FLOPS,
    **conv.FLOPS,
    **delta.FLOPS,
    **latent.FLOPS,
    **logprob.FLOPS,
    _aten.linalg_solve_triangular: OpFlops("products", _solve_flops),
}
RESOURCE_OF = {"products": "products", "products_float32": "products", "scan": "products"}
RESOURCE_OF |= {"attention": "attention", "attention_backward": "attention"}
RESOURCE_OF |= {"chosen_rows": "attention", "scores": "attention"}
ALLOCATING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_", "resize_", "lift_fresh")
NO_COPY = ("_unsafe_view", "_reshape_alias", "_local_scalar_dense", "is_same_size", "wait_tensor")
OVERWRITING = ("copy_", "fill_", "zero_")
FILLING = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")  # read nothing
PICKING = ("embedding", "index", "index_select", "gather")  # read of their first argument what they return
ADDING = ("index_add_", "index_put_", "scatter_add_", "scatter_")  # change of it what their last argument has


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> tuple[int, str]:
    """Return the FLOPs of an operation and the key of ``hardware.rates`` at which it runs; 0 where it has no product.

    Arithmetic that is not of matrix products is not counted: such operations are bound by the memory they move.
    """
    own = FLOPS.get(func._overloadpacket)
    if own is not None:
        rate = _by_dtype(args) if own.rate == "products" else own.rate
        return own.of(*args), rate
    counted = flop_registry.get(func._overloadpacket)
    if counted is None:
        return 0, "products"
    return counted(*args, **kwargs, out_val=out), _by_dtype(args)


def bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the bytes that an operation reads and writes, each tensor once; 0 for views and allocations.

    Of an expanded tensor its own elements count. What a kernel reads twice, or writes for itself, does not.
    """
    moves = _moves(func)
    if moves is None:
        return 0
    return moves(func, args, kwargs, out)


Moves = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], int]


@functools.cache
def _moves(func: Any) -> Moves | None:
    """Return what counts the bytes of an operation; None: it moves none."""
    name = func._schema.name.partition("::")[2]
    if func in (SCRATCH, HOST_EMPTY) or func.namespace == "prim" or func.is_view or name in (*ALLOCATING, *NO_COPY):
        return None
    if name in PICKING:
        return _picked
    if name in FILLING:
        return _filled
    return _added if name in ADDING else _all_once


def _filled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    return _size(out)


def _picked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    return 2 * _size(out) + sum(map(_size, _tensors(args[1:])))


def _added(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    given = list(_tensors(args[1:]))
    return 2 * _size(given[-1]) + sum(map(_size, given)) if given else 2 * _size(args[0])


def _all_once(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Tensors that are changed count twice, read and written, unless all of them is written anew."""
    overwritten = func._schema.name.partition("::")[2] in OVERWRITING
    total, given = 0, set()
    for value, argument in _with_schema(func, args, kwargs):
        changed = argument.alias_info is not None and argument.alias_info.is_write
        for x in _tensors([value]):
            given.add(id(x))
            total += _size(x) * (2 if changed and not (overwritten or argument.is_out) else 1)
    return total + sum(_size(x) for x in _tensors([out]) if id(x) not in given)


def _with_schema(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(args, arguments, strict=False)
    if kwargs:
        by_name = {argument.name: argument for argument in arguments}
        yield from ((value, by_name[name]) for name, value in kwargs.items())


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _size(x: Tensor) -> int:
    if 0 in x.stride():  # expanded
        return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.itemsize
    return x.numel() * x.itemsize


def _by_dtype(args: Sequence[Any]) -> str:
    first = next(_tensors(args))
    return "products" if first.itemsize <= 2 else "products_float32"
