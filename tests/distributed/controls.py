"""Collectives that are left out on purpose, each named by the function that calls it and where among its calls."""

import contextlib
import inspect
import sys
from unittest import mock

import torch.distributed as dist

from longstraw.parallel import expert_parallel as expert
from longstraw.parallel import parallelize as apply
from longstraw.parallel.collectives import Group

MEAN = "FSDP's sum"  # replaced by the mean
ARRIVING = "ExpertGroup._counts all_to_all 1"  # how many tokens go to which expert; how many in all must stay right


@contextlib.contextmanager
def left_out(dropped=None):
    """Leave out the collective ``dropped``; yield the names of those called.

    Of what other ranks would have sent a rank then has zeros, or its own once more.
    """
    called = set()

    def wanted(name):
        called.add(name)
        return name != dropped

    with contextlib.ExitStack() as stack:
        for method, alone in ALONE.items():
            stack.enter_context(mock.patch.object(Group, method, _either(method, alone, wanted)))
        stack.enter_context(mock.patch.object(expert, "_exchange", _exchange(wanted)))
        stack.enter_context(mock.patch.object(expert.ExpertGroup, "_counts", _counts(wanted)))
        stack.enter_context(mock.patch.object(dist, "all_reduce", _all_reduce(wanted)))
        if dropped == MEAN:
            stack.enter_context(mock.patch.object(apply, "sum_gradients"))
        yield called


def _all_gather(group, x, count):
    gathered = x.new_zeros(count, *x.shape[1:])
    gathered[group.split(count).own] = x
    return gathered


def _reduce_scatter(group, x, count):
    return x[group.split(count).own].clone()


def _gather_heads(group, x, count):
    return _all_gather(group, x[:, group.rank], count)


def _gather_positions(group, x, count):
    return _reduce_scatter(group, x, count).unsqueeze(1).repeat_interleave(group.size, 1)


def _stack(group, x):
    stacked = x.new_zeros(group.size, *x.shape)
    stacked[group.rank] = x
    return stacked


ALONE = {  # what a rank makes of its own part
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather_heads": _gather_heads,
    "gather_positions": _gather_positions,
    "stack": _stack,
}


def _either(method, alone, wanted):
    original = getattr(Group, method)

    def either(group, *arguments):
        name = _name(sys._getframe(1), f".{method}(", method)
        return (original if wanted(name) else alone)(group, *arguments)

    return either


def _exchange(wanted):
    original = expert._exchange

    def either(x, group, sent, received):
        frame = sys._getframe(1)
        context = frame.f_locals["ctx"]
        if frame.f_code.co_name == "forward":
            while frame.f_code.co_name != "mix":
                frame = frame.f_back
            context.name = name = _name(frame, "_Exchange.apply(", "exchange")
        else:
            name = f"{context.name} backward"
        out = original(x, group, sent, received)
        if not wanted(name):
            rank = dist.get_rank(group)
            own = slice(sum(received[:rank]), sum(received[: rank + 1]))
            kept = out[own].clone()
            out.zero_()
            out[own] = kept
        return out

    return either


def _counts(wanted):
    original = expert.ExpertGroup._counts

    def either(*arguments):
        sent, arriving = original(*arguments)
        return sent, arriving if wanted(ARRIVING) else [line[::-1] for line in arriving]

    return either


def _all_reduce(wanted):
    original = dist.all_reduce

    def either(*arguments, **options):
        if wanted(_name(sys._getframe(1), "all_reduce(", "all_reduce")):
            original(*arguments, **options)

    return either


def _name(frame, call, method):
    """Return the name of a call: its function, what it calls, and where it stands among the function's such calls."""
    lines, first = inspect.getsourcelines(frame.f_code)
    numbers = [first + i for i, line in enumerate(lines) if call in line]
    function = frame.f_code.co_qualname.removesuffix(".<locals>.evaluate")
    return f"{function} {method} {numbers.index(frame.f_lineno) + 1}"
