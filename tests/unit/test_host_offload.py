"""Rows in host memory: what comes to the device when, what goes back, and where both are counted."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longstraw.config import ConfigError, StateConfig
from longstraw.memory.meter import MemoryMeter
from longstraw.ops import host_offload as staging
from longstraw.ops.host_offload import HostRows, Staging, device_grad_buffers, host_empty, tiles, whole
from longstraw.state import Appended, RowStorage

CPU = torch.device("cpu")


def staged(*layers):
    """Return a staging with layers of the given rows, and what was copied so far as (layer, rows)."""
    place = Staging(CPU)
    for rows in layers:
        place.add({"latent": rows})
    return place


@pytest.fixture
def copied(monkeypatch):
    """Lists the first row of all that is copied to the device."""
    copies, seen = staging._copies, []

    def watched(homes, device):
        seen.append(int(homes[0][0]))
        return copies(homes, device)

    monkeypatch.setattr(staging, "_copies", watched)
    return seen


def test_the_next_layer_comes_while_one_is_used(copied):
    place = staged(*(torch.full((4,), i) for i in range(4)))
    for i in range(4):
        assert place.layer(i, 4, backward=False)["latent"].tolist() == [i] * 4
        assert copied == list(range(min(i + 2, 4)))


def test_a_backward_turns_round(copied):
    place = staged(*(torch.full((4,), i) for i in range(4)))
    for i in range(4):
        place.layer(i, 4, backward=False)
    copied.clear()
    for i in (3, 2, 1, 0):
        assert place.layer(i, 4, backward=False)["latent"][0] == i  # evaluated again
        assert place.layer(i, 4, backward=True)["latent"][0] == i
    assert copied == [2, 1, 0]  # the last one was there still
    assert not place._here


def test_other_lengths_and_passes_come_anew(copied):
    place = staged(torch.arange(4))
    assert place.layer(0, 2, backward=False)["latent"].tolist() == [0, 1]
    assert place.layer(0, 3, backward=False)["latent"].tolist() == [0, 1, 2]
    place.restart()
    place.layer(0, 3, backward=False)
    assert len(copied) == 3


def test_whole_rows_are_copies():
    home = torch.arange(3.0)
    place = staged(home)
    here, there = whole([HostRows(home, place, 0, "latent"), torch.ones(2)], torch.float64)
    assert here.dtype == torch.float64
    here += 1
    assert home.tolist() == [0, 1, 2]
    assert there.tolist() == [1, 1]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tiles_cover_rows_and_what_is_added_is_kept(on_host, dtype):
    rows, buffer = torch.arange(7, dtype=dtype), torch.zeros(5, dtype=dtype)
    place = Staging(CPU)
    past, kept = (HostRows(x, place, 0, "key") if on_host else x for x in (rows, buffer))
    seen = []
    for (tile,), (added, nothing) in tiles([past], [kept, None], torch.float64, 3):
        assert nothing is None
        assert added.dtype == torch.promote_types(dtype, torch.float32)
        assert added.data_ptr() != rows.data_ptr()
        seen.append((tile.tolist(), len(added)))
        added += 1 + 2**-12
        added += 1
        del tile, added
    assert seen == [([0, 1, 2], 1), ([3, 4, 5], 3), ([6], 1)]
    assert buffer.tolist() == torch.full((5,), 2 + 2**-12).to(dtype).tolist()


def test_buffers_are_rounded_once():
    buffer = torch.ones(2, dtype=torch.bfloat16)
    with device_grad_buffers([None, buffer]) as (nothing, added):
        assert nothing is None
        for _ in range(8):
            added += 2**-10  # each alone would be lost
    assert buffer.tolist() == [1 + 2**-7] * 2


def test_host_memory_is_counted_apart():
    with MemoryMeter() as meter:
        kept = host_empty((1000,), torch.float32)
        assert (meter.current, meter.peak, meter.host, meter.host_peak) == (0, 0, 4096, 4096)
        meter.tag("retained", kept)
        assert meter.host_bytes_by_kind()["retained"] == 4096
        moved = torch.ones(128)
        meter.tag("optimizer", moved, host=True)
        assert (meter.current, meter.host) == (0, 4096 + 512)
        assert meter.host_bytes_by_kind()["optimizer"] == 512
        del kept
        assert (meter.host, meter.host_peak, sum(meter.bytes_by_kind().values())) == (512, 4608, 0)
        meter.reset_peak()
        assert meter.host_peak == 512


def test_host_memory_of_a_simulation():
    with FakeTensorMode(), MemoryMeter() as meter:
        kept = host_empty((1000, 2), torch.bfloat16)
        assert (tuple(kept.shape), kept.dtype, meter.host, meter.current) == ((1000, 2), torch.bfloat16, 4096, 0)
        place = staged(kept)
        here = place.layer(0, 500, backward=False)["latent"]
        assert (tuple(here.shape), meter.current) == ((500, 2), 2048)


def appended(**storage):
    kept = RowStorage(staging=Staging(CPU), **storage)
    return Appended(3, {"key": (2,)}, grad_from=4, like=torch.empty(0), storage=kept)


def test_rows_of_some_positions_in_host_memory():
    """As where two ranks share each chunk: of chunks of 4 and 3 positions, this one has the first 2 and the last 1."""
    state = appended(dtype=torch.bfloat16)
    state.absorb({"key": torch.full((2, 2), 1 + 2**-10)}, 4, 0)
    state.absorb({"key": torch.full((1, 2), 2.0)}, 3, 2)
    past = state.leaves(7, grad=True)
    assert past.spans == ((0, 2), (6, 7))
    assert isinstance(past.rows("key"), HostRows)
    with pytest.raises(TypeError, match=r"key is in host memory: use rows\('key'\)"):
        past["key"]
    assert whole([past.rows("key")], torch.float32)[0].tolist() == [[1, 1], [1, 1], [2, 2]]
    with device_grad_buffers([past.grad("key")]) as (added,):
        added += 5
    owed = state.cotangent(4, 7)["key"]
    assert (owed.tolist(), owed.dtype) == ([[5, 5]], torch.float32)
    owed += 1
    assert state.cotangent(4, 7)["key"].tolist() == [[5, 5]]  # what was given away is a copy
    assert state.difference({"key": torch.full((2, 2), 1 + 2**-10)}, 0, 4) == 0
    assert state.difference({"key": torch.full((2, 2), 3.0)}, 0, 4) == 2
    assert state.num_bytes() == {"key": 3 * 2 * 2}


def test_a_gradient_is_as_wide_as_asked_for():
    assert appended()._gradient_dtype == torch.float32
    assert appended(gradient_dtype=torch.bfloat16)._gradient_dtype == torch.bfloat16
    wide = Appended(
        1, {"key": (2,)}, grad_from=0, like=torch.empty(0, dtype=torch.float64), storage=RowStorage(torch.bfloat16)
    )
    assert wide._gradient_dtype == torch.float64


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [("dtype", "float16", "float32"), ("gradient_dtype", "fp32", "float32"), ("device", "cuda", "cpu")],
)
def test_what_a_state_may_be(key, value, valid):
    with pytest.raises(ConfigError, match=rf"state.{key}.*{valid}"):
        StateConfig(**{key: value})
