"""Patch Triton's interpreter so that it fails on a CPU for more of the faults that a GPU would show.

The stock interpreter (3.7.1) computes bfloat16 on its bit patterns, wraps int32 offsets silently, ignores
``tl.device_assert``, takes products too narrow for tensor cores, gives loop variables as Python integers that never
overflow, asks a GPU to choose between autotuned configurations, and runs programs in order, which hides races.

What it still cannot show: tf32 rounding, races within a program, and what a compiler gets wrong.
"""

import ast
import contextlib
import dataclasses

import numpy as np
import triton.language as tl
from triton.runtime import autotuner
from triton.runtime import interpreter as stock

Builder, Handle = stock.InterpreterBuilder, stock.TensorHandle
NARROWEST_DOT = 16  # the least inner dimension that tensor cores take


def close_gaps():
    """Change the interpreter of this process, once, before any kernel is imported."""
    if getattr(stock, "gaps_are_closed", False):
        return
    stock.gaps_are_closed = True
    stock.interpreter_builder.options = dataclasses.replace(stock.interpreter_builder.options, debug=True)
    _first_configuration()
    _loop_variables_are_int32()
    _bfloat16_arithmetic()
    _bfloat16_reductions()
    Builder.create_assert = _raise_unless
    _language_is_changed_once()


@contextlib.contextmanager
def shuffled_programs(seed):
    """Run the programs of every grid in an order drawn from ``seed``: no result may depend on it."""
    real = Builder.set_grid_idx

    def set_grid_idx(self, x, y, z):
        grid = self.grid_dim
        order = np.random.default_rng(seed).permutation(int(np.prod(grid)))
        real(self, *(int(i) for i in np.unravel_index(order[np.ravel_multi_index((x, y, z), grid)], grid)))

    Builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        Builder.set_grid_idx = real


def _raise_unless(self, condition, message):
    if not np.all(condition.data):
        raise AssertionError(message)


def _first_configuration():
    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.prune_configs(kwargs)[0] if len(self.configs) > 1 else self.configs[0]
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        result = self.fn.run(*args, **{**kwargs, **config.all_kwargs()})
        self.nargs = None
        return result

    autotuner.Autotuner.run = run


def _language_is_changed_once():
    """Spare what takes most of the time: the stock interpreter changes the language again at each call in a kernel."""
    changed = set()

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in changed:
            stock._patch_lang(self.fn)
            changed.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **kwargs)

    stock.InterpretedFunction.__call__ = call


def _loop_variables_are_int32():
    """Let ``range`` and ``tl.range`` give int32 tensors, as on a GPU, by renaming them in the kernel's source."""

    def integer(x):
        return int(x.value) if isinstance(x, tl.constexpr) else int(x)

    def loop(first, end=None, step=1, **_):
        first, end = (0, first) if end is None else (first, end)
        for i in range(integer(first), integer(end), integer(step)):
            yield tl.core.tensor(Handle(np.array([i], dtype=np.int32), tl.int32), tl.int32)

    class Renamed(stock.ASTTransformer):
        def visit_For(self, node):
            self.generic_visit(node)
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "range":
                called.id = "int32_range"
            return node

    patch_core = stock._patch_lang_core

    def patch(lang, scope):
        patch_core(lang, scope)
        scope.set_attr(lang, "range", loop)

    stock._patch_lang_core = patch
    stock.int32_range = loop  # kernels see every global of the interpreter's module
    stock.FunctionRewriter.ast_transformer = Renamed()


# bfloat16: decoded to float32 for each operation, its result rounded to nearest even, as the GPU does.


def _is_bfloat16(handle):
    return getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16 and handle.data.dtype == np.uint16


def _decoded(handle):
    if not _is_bfloat16(handle):
        return handle.data
    return (np.ascontiguousarray(handle.data).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _encoded(data):
    data = np.ascontiguousarray(data, dtype=np.float32)
    bits = data.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def _bfloat16_arithmetic():
    binary_op, ternary_op, unary_op = Builder.binary_op, Builder.ternary_op, Builder.unary_op
    cast_impl, create_fp_to_fp = Builder.cast_impl, Builder.create_fp_to_fp
    create_dot, create_fma = Builder.create_dot, Builder.create_fma

    def binary(self, a, b, op):
        if not (_is_bfloat16(a) or _is_bfloat16(b)):
            return binary_op(self, a, b, op)
        out = op(_decoded(a), _decoded(b))
        return Handle(out if out.dtype == bool else _encoded(out), a.dtype.scalar)

    def ternary(self, a, b, c, op):
        if op is np.where or not any(map(_is_bfloat16, (a, b, c))):
            return ternary_op(self, a, b, c, op)
        return Handle(_encoded(op(_decoded(a), _decoded(b), _decoded(c))), c.dtype.scalar)

    def unary(self, a, op):
        return Handle(_encoded(op(_decoded(a))), a.dtype.scalar) if _is_bfloat16(a) else unary_op(self, a, op)

    def cast(self, a, target):
        target = target.scalar
        if _is_bfloat16(a) == (target == tl.bfloat16):
            return cast_impl(self, a, target)
        if target == tl.bfloat16:
            return Handle(_encoded(a.data.astype(np.float32)), target)
        return Handle(_decoded(a).astype(stock._get_np_dtype(target)), target)

    def fp_to_fp(self, a, target, rounding):
        wide = getattr(a.dtype.scalar, "primitive_bitwidth", 32) >= 16
        if wide and (_is_bfloat16(a) or target.scalar == tl.bfloat16):
            return self.cast_impl(a, target)
        return create_fp_to_fp(self, a, target, rounding)

    def dot(self, a, b, d, precision, imprecise):
        if a.data.shape[-1] < NARROWEST_DOT:
            raise ValueError(f"tl.dot over {a.data.shape[-1]} < {NARROWEST_DOT} elements does not compile for a GPU")
        a, b = (Handle(_decoded(x), tl.float32) if _is_bfloat16(x) else x for x in (a, b))
        return create_dot(self, a, b, d, precision, imprecise)

    def fma(self, a, b, c):
        if not _is_bfloat16(c):
            return create_fma(self, a, b, c)
        return Handle(_encoded(_decoded(a) * _decoded(b) + _decoded(c)), c.dtype.scalar)

    Builder.binary_op, Builder.ternary_op, Builder.unary_op = binary, ternary, unary
    Builder.cast_impl, Builder.create_fp_to_fp = cast, fp_to_fp
    Builder.create_dot, Builder.create_fma = dot, fma
    Builder.get_bf16 = lambda self, value: Handle(_encoded(np.array([value])), tl.bfloat16)


def _bfloat16_reductions():
    apply = stock.ReduceScanOpInterface.apply

    def typed(data, dtype, like):
        return tl.core.tensor(Handle(data, dtype), tl.block_type(dtype, list(like.shape)) if like.shape else dtype)

    def applied(self, values):
        if not isinstance(values, tuple) or not any(x.dtype == tl.bfloat16 for x in values):
            return apply(self, values)
        wide = tuple(typed(_decoded(x.handle), tl.float32, x) if x.dtype == tl.bfloat16 else x for x in values)
        return tuple(
            typed(_encoded(result.handle.data), tl.bfloat16, result) if x.dtype == tl.bfloat16 else result
            for result, x in zip(apply(self, wide), values, strict=False)
        )

    stock.ReduceScanOpInterface.apply = applied
