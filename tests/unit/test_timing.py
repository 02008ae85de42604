"""What an operation costs, and what the costs of a step's parts add up to."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from longstraw.config import HardwareConfig, RatesConfig
from longstraw.ops.attention import cpu, fused, reference
from longstraw.ops.host_offload import QueryGradients
from longstraw.parallel.comm_meter import Message
from longstraw.timing.costs import bytes_of, flops_of
from longstraw.timing.meter import WorkMeter, link_seconds
from longstraw.timing.work import BlockKind, Piece, Work, all_pieces, seconds, step_seconds

aten = torch.ops.aten
ONES = RatesConfig(**dict.fromkeys(vars(RatesConfig()), 1.0))
HARDWARE = HardwareConfig(name="test", gpus_per_node=4, nodes=2, rates=ONES)


def moved(func, *args, **kwargs):
    return bytes_of(func, args, kwargs, func(*args, **kwargs))


def test_bytes():
    x, y, index = torch.zeros(6, 4), torch.zeros(6, 4), torch.tensor([1, 2])
    assert moved(aten.add.Tensor, x, y) == 3 * 96
    assert moved(aten.add_.Tensor, x, y) == 3 * 96
    assert moved(aten.copy_.default, x, y) == 2 * 96
    assert moved(aten.zero_.default, x) == 96
    assert moved(aten.zeros_like.default, x) == moved(aten.new_zeros.default, x, [24]) == 96
    assert moved(aten.mul.Tensor, x, torch.zeros(1, 4).expand(6, 4)) == 2 * 96 + 16
    assert moved(aten.cat.default, [x, y]) == 4 * 96
    assert moved(aten.embedding.default, x, index) == 2 * 32 + 16
    assert moved(aten.index_add_.default, x, 0, index, torch.ones(2, 4)) == 3 * 32 + 16
    for nothing in ((aten.view.default, x, [24]), (aten.t.default, x), (aten.empty_like.default, x)):
        assert moved(*nothing) == 0
    assert moved(aten.add.out, x, y, out=torch.empty(6, 4)) == 3 * 96


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_attention_counts_the_products_of_the_reference():
    """Of a part without a mask, which the reference evaluates in plain products."""
    heads, repeats, count, rows, width = 2, 3, 512, 1024, 16
    q, k, v = torch.randn(heads, repeats, count, width), *torch.randn(2, rows, heads, width).unbind(0)
    expected = counted(lambda: reference.part_forward(q, k, v, causal=False, scale=1.0))
    out, lse = reference.part_forward(q, k, v, causal=False, scale=1.0)
    flat = q.flatten(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    assert flops_of(cpu._forward.default, (*flat, 0.0, False), {}, None) == (expected, "attention")
    tokens = q.flatten(0, 1).transpose(0, 1)[None], k[None], v[None]
    forward = (*tokens, None, None, count, rows, 0.0, False, False)
    assert flops_of(aten._flash_attention_forward.default, forward, {}, None) == (expected, "attention")

    gradients = QueryGradients(torch.randn_like(q), q, out, lse)
    expected = counted(lambda: reference.part_backward(gradients, k, v, causal=False, scale=1.0))
    backward = (flat[0], *flat, flat[0], lse, 0.0, False)
    assert flops_of(cpu._backward.default, backward, {}, None) == (expected, "attention_backward")
    backward = (tokens[0], *tokens, tokens[0], lse, None, None, count, rows, 0.0, False, lse, lse)
    assert flops_of(aten._flash_attention_backward.default, backward, {}, None) == (expected, "attention_backward")
    own = torch.ops.longstraw.attention_rows_backward.default
    given = (*(q.flatten(0, 1),) * 2, k, v, q.flatten(0, 1), lse, lse)
    assert flops_of(own, (*given, k, v, 1.0), {}, None)[0] == expected * 7 // 5  # scores and weights twice
    assert flops_of(own, (*given, None, None, 1.0), {}, None)[0] == expected * 3 // 5


def test_a_causal_part_counts_the_pairs_that_are_seen():
    q = torch.randn(1, 10, 2, 4)
    flops = flops_of(aten._flash_attention_forward.default, (q, q, q, None, None, 10, 10, 0.0, True, False), {}, None)
    assert flops[0] == 4 * 2 * 4 * 55
    assert fused.FLOPS.keys().isdisjoint(cpu.FLOPS)
    q = torch.randn(1, 2, 1100, 4)  # a processor's operator evaluates tiles of 512 rows whole
    seen = 512 * 512 + 512 * 1024 + 76 * 1100
    assert flops_of(cpu._forward.default, (q, q, q, 0.0, True), {}, None)[0] == 4 * 2 * 4 * seen


@pytest.fixture
def world():
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_links(world):
    whole, node = dist.group.WORLD, dist.new_group([4, 5, 6, 7])
    rates = RatesConfig(**{**vars(ONES), "links": 100.0, "links_across": 20.0})
    hardware = HardwareConfig(name="test", gpus_per_node=4, nodes=2, rates=rates)
    size = 10**9
    assert link_seconds(Message("all_gather", size, node), hardware) == pytest.approx(0.01)
    assert link_seconds(Message("all_gather", size, whole), hardware) == pytest.approx(1 / 80)  # four adapters
    assert link_seconds(Message("all_to_all", size, node), hardware) == pytest.approx(0.01)
    assert link_seconds(Message("all_to_all", size, whole), hardware) == pytest.approx(4 / 7 / 20)


def test_a_meter_needs_every_rate():
    with pytest.raises(ValueError, match=r"hardware\.rates has no value for memory$"):
        WorkMeter(HardwareConfig(name="test", rates=RatesConfig(**{**vars(ONES), "memory": None})))


def test_an_operation_is_bound_by_its_arithmetic_or_its_bytes():
    rates = RatesConfig(**{**vars(ONES), "products_float32": 1e-6, "memory": 1e-6, "operation_us": 3.0})
    meter = WorkMeter(HardwareConfig(name="test", rates=rates))
    with meter, meter.verb("prefill"):
        torch.mm(torch.zeros(2, 8), torch.zeros(8, 2))
    (piece,) = meter.verbs["prefill"]
    assert piece.rest.flops == 64
    assert piece.rest.memory > (32 * 2 + 16 + 128) * 1e-6  # the product itself moves fewer bytes than it has FLOPs
    rates.products_float32 = 1e-7
    meter = WorkMeter(HardwareConfig(name="test", rates=rates))
    x, y = torch.zeros(2, 8), torch.zeros(8, 2)
    with meter, meter.verb("prefill"):
        torch.mm(x, y)
    (piece,) = meter.verbs["prefill"]
    assert piece.rest == Work(products=pytest.approx(64e-5), launches=pytest.approx(3e-6), flops=64)


def test_operations_by_which_shapes_are_worked_out_are_left_out():
    with FakeTensorMode() as fake, WorkMeter(HARDWARE) as meter, meter.verb("optimizer"):
        x = torch.zeros(4)
        with fake:
            _ = torch.zeros(4) + 1
        x.add_(1)
    (piece,) = meter.verbs["optimizer"]
    assert piece.rest.launches == pytest.approx(2e-6)


def test_what_was_not_evaluated_lies_between():
    kinds = [BlockKind("a", 1), BlockKind("a", 1), BlockKind("b", 2)]

    def piece(one, two, **more):
        return Piece(blocks={0: Work(products=one), 2: Work(products=two)}, **more)

    pieces = [piece(1, 2), piece(3, 4, rest=Work(memory=1)), Piece(False, rest=Work(memory=99)), Piece(False)]
    pieces.append(piece(9, 10, parameters=Work(hidden=6)))
    parts = all_pieces(pieces, kinds)
    assert [[round(x.products, 9) for x in part] for part in parts] == [
        [1, 1, 2, 0], [3, 3, 4, 0], [5, 5, 6, 0], [7, 7, 8, 0], [9, 9, 10, 0]
    ]  # fmt: skip
    assert [round(part[-1].memory, 9) for part in parts] == [0, 1, pytest.approx(2 / 3), pytest.approx(1 / 3), 0]
    assert [x.hidden for x in parts[-1]] == [2, 2, 4, 0]  # by bytes of those that were evaluated


def test_overlap():
    part = Work(products=2, memory=1, links=1, hidden=2.5, launches=3.5)
    assert seconds([part], overlap=True) == {"products": 2, "attention": 0, "memory": 1, "links": 1, "launches": 0}
    assert sum(seconds([part], overlap=False).values()) == 10
    waited = Work(products=2, memory=1, links=3.5, launches=3.5)  # the same without overlap of the parameters
    assert sum(seconds([waited], overlap=True).values()) == 6.5
    late = Work(products=1, links=1, hidden=2.5, launches=3)
    assert seconds([late], overlap=True)["links"] == 3.5
    late = Work(products=1, links=1, hidden=2.5, launches=4)
    assert seconds([late], overlap=True)["launches"] == 4
    assert step_seconds({"replay": [Piece(rest=part)]}, [], overlap=True)["replay"]["links"] == 1
