"""What the meter counts for each collective, on one process of a group of eight that is only pretended."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from longstraw.parallel.collectives import labelled
from longstraw.parallel.comm_meter import TrafficMeter

WORLD, RANK = 8, 3
THREADS = set()  # in which a backward ran

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # newer names are PyTorch 2.13's


@pytest.fixture
def meter():
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield TrafficMeter()
    dist.destroy_process_group()


def floats(*shape):
    return torch.zeros(*shape, dtype=torch.float32)


SENT = {  # the call, whose collective and bytes: floats have four
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(floats(80), floats(10)), "all_gather", 7 * 40),
    "all_gather": (lambda: dist.all_gather([floats(10) for _ in range(WORLD)], floats(10)), "all_gather", 7 * 40),
    "reduce_scatter": (lambda: dist.reduce_scatter_tensor(floats(10), floats(80)), "reduce_scatter", 7 * 40),
    "all_reduce": (lambda: dist.all_reduce(floats(80)), "all_reduce", 2 * 7 * 40),
    "all_to_all": (lambda: dist.all_to_all_single(floats(16, 5), floats(16, 5)), "all_to_all", 14 * 20),
    "all_to_all, uneven": (
        lambda: dist.all_to_all_single(floats(8, 5), floats(36, 5), [1] * 8, [1, 2, 3, 4, 5, 6, 7, 8]),
        "all_to_all",
        (36 - 4) * 20,
    ),
    "functional": (
        lambda: functional.wait_tensor(functional.all_reduce(floats(80), "sum", dist.group.WORLD)),
        "all_reduce",
        2 * 7 * 40,
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_what_a_collective_sends(meter, name):
    call, collective, size = SENT[name]
    call()
    assert not meter.sent  # not entered
    with meter:
        call()
        call()
    assert meter.by_collective() == {collective: 2 * size}
    meter.reset()
    assert meter.by_collective() == {}


def test_labels_and_verbs(meter):
    with meter, meter.verb("replay"), labelled("attention"):
        dist.all_reduce(floats(4))
        with meter.verb("prefill"), labelled("heads"):
            dist.all_reduce(floats(8))
        dist.all_reduce(floats(4))
    with meter:
        dist.all_gather_into_tensor(floats(8), floats(1))
        dist.reduce_scatter_tensor(floats(1), floats(8))
    assert meter.sent == {
        ("replay", "all_reduce", "attention"): 2 * 28,
        ("prefill", "all_reduce", "heads"): 56,
        ("other", "all_gather", "parameters"): 28,  # without a label it is FSDP's
        ("other", "reduce_scatter", "gradients"): 28,
    }


class Nested(torch.autograd.Function):
    """Sends in its backward, which runs another one: deep enough, in another thread."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        THREADS.add(threading.get_ident())
        dist.all_reduce(floats(4))
        if ctx.depth > 1:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return grad, None


def test_a_backward_in_another_thread_is_counted(meter):
    with meter:
        Nested.apply(torch.ones(1, requires_grad=True), 100).sum().backward()
    assert len(THREADS) > 1
    assert meter.by_collective() == {"all_reduce": 100 * 28}
