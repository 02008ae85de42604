"""The two growth laws of retained state, by hand-worked numbers."""

import pytest
import torch

from longstraw.state import Appended, Carried


def appended(capacity=6, grad_from=None, dtype=torch.float32, **options):
    shapes = {"key": (2, 3), "value": (2, 3)}
    return Appended(capacity, shapes, grad_from=grad_from, like=torch.empty(0, dtype=dtype), **options)


def rows(count, value):
    return {name: torch.full((count, 2, 3), float(value), requires_grad=True) for name in ("key", "value")}


def carried(grad_from=0, dtype=torch.float32):
    return Carried({"recurrent": torch.zeros(2, 2, dtype=dtype)}, grad_from=grad_from)


def filled(state, value=1.0):
    return {"recurrent": torch.full((2, 2), value, dtype=state.leaves(state.positions, False)["recurrent"].dtype)}


def test_appended_keeps_rows_in_order():
    state = appended()
    state.absorb(rows(2, 1), 2)
    state.absorb(rows(3, 2), 3)
    past = state.leaves(4, grad=False)
    assert past.positions == 4
    assert past["key"][:, 0, 0].tolist() == [1, 1, 2, 2]
    assert not past["key"].requires_grad
    assert past.grad("key") is None
    assert state.positions == 5


def test_appended_never_moves_its_rows():
    state = appended()
    state.absorb(rows(1, 1), 1)
    at = state.leaves(1, False)["key"].data_ptr()
    state.absorb(rows(5, 1), 5)
    assert state.leaves(6, False)["key"].data_ptr() == at


def test_appended_gradient_covers_the_window():
    state = appended(grad_from=2)
    state.absorb(rows(6, 1), 6)
    assert state.leaves(2, grad=True).grad("key") is None
    buffer = state.leaves(5, grad=True).grad("key")
    assert buffer.shape == (3, 2, 3)
    buffer += 1
    state.leaves(6, grad=True).grad("key")[3] += 5
    assert state.cotangent(2, 4)["key"][:, 0, 0].tolist() == [1, 1]
    assert state.cotangent(4, 6)["key"][:, 0, 0].tolist() == [1, 5]
    with pytest.raises(IndexError, match="no gradient is kept for position 1, only from 2"):
        state.cotangent(1, 3)


@pytest.mark.parametrize(
    ("dtype", "inner"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_gradients_are_at_least_float32(dtype, inner):
    state = appended(grad_from=0, dtype=dtype)
    assert state.leaves(6, grad=True).grad("key").dtype == inner
    state = carried(dtype=dtype)
    state.leaves(0, grad=True)["recurrent"].sum().backward()
    assert state.cotangent(0, 0)["recurrent"].dtype == inner


def test_frozen_rows_get_no_gradient():
    past = appended(grad_from=0, frozen=("value",)).leaves(6, grad=True)
    assert past.grad("value") is None
    assert past.grad("key") is not None


def test_appended_bytes_and_kinds():
    state = appended(grad_from=4, dtype=torch.bfloat16)
    assert state.num_bytes() == {"key": 6 * 6 * 2, "value": 6 * 6 * 2}
    assert [kind for kind, _ in state.held()] == ["retained"] * 2  # a prefill holds no gradient yet
    state.absorb(rows(6, 1), 6)
    state.leaves(6, grad=True)
    assert [(kind, x.nbytes) for kind, x in state.held()][2:] == [("state_gradient", 2 * 6 * 4)] * 2


def test_difference_is_the_largest():
    state = appended()
    state.absorb(rows(3, 1), 3)
    assert state.difference(rows(2, 1), 1, 3) == 0.0
    assert state.difference(rows(2, 1.5) | {"value": torch.full((2, 2, 3), 3.0)}, 1, 3) == 2.0
    assert state.difference(rows(2, torch.nan), 1, 3) == torch.inf


def test_carried_without_gradient_holds_one_summary():
    state = carried(grad_from=None)
    for value in (1, 2):
        state.absorb(filled(state, value), 64)
    assert [kind for kind, _ in state.held()] == ["retained"]
    assert state.leaves(128, grad=False)["recurrent"].tolist() == [[2, 2], [2, 2]]
    with pytest.raises(IndexError, match=r"there is no snapshot at position 64, only at \[128\]"):
        state.leaves(64, grad=False)


def test_carried_keeps_a_snapshot_a_border_from_the_window_on():
    state = carried(grad_from=128)
    for value in range(1, 5):
        state.absorb(filled(state, value), 64)
    assert [kind for kind, _ in state.held()] == ["snapshots", "snapshots", "retained"]  # at 128, 192, 256
    assert state.num_bytes() == {"recurrent": 16}
    assert state.leaves(128, grad=True)["recurrent"].tolist() == [[2, 2], [2, 2]]


def test_carried_sums_branches_and_forgets_what_it_paid():
    state = carried()
    state.absorb(filled(state), 64)
    for factor in (2, 3):
        (state.leaves(64, grad=True)["recurrent"] * factor).sum().backward()
    assert state.cotangent(0, 64)["recurrent"].tolist() == [[5, 5], [5, 5]]
    assert state.cotangent(0, 64) == {}
    assert [kind for kind, _ in state.held()] == ["snapshots"]  # what lies to the right is gone


def test_carried_waits_for_the_whole_gradient_of_a_leaf():
    """A leaf read twice owes the sum, once."""
    state = carried()
    leaf = state.leaves(0, grad=True)["recurrent"]
    (leaf * 2 + leaf.square() + leaf).sum().backward()
    assert leaf.grad is None
    assert state.cotangent(0, 0)["recurrent"].tolist() == [[3, 3], [3, 3]]


def test_branches_cannot_change_a_summary():
    state = carried()
    state.absorb(filled(state), 64)
    first = state.leaves(64, grad=True)["recurrent"]
    (first * 2).sum().backward()
    assert torch.equal(state.leaves(64, grad=False)["recurrent"], torch.ones(2, 2))
    assert state.leaves(64, grad=True)["recurrent"] is not first


def test_rows_of_some_positions_are_found_by_position():
    """As where two ranks share each chunk: of chunks of 4 and 3 positions, this one has the first 2 and the last 1."""
    state = appended(capacity=3, grad_from=4)
    state.absorb(rows(2, 1), 4, 0)
    state.absorb(rows(1, 2), 3, 2)
    past = state.leaves(7, grad=True)
    assert past["key"][:, 0, 0].tolist() == [1, 1, 2]
    assert past.spans == ((0, 2), (6, 7))
    assert past.grad("key").shape[0] == 1
    assert state.leaves(4, grad=True).grad("key") is None
    assert state.leaves(4, grad=False).spans == ((0, 2),)
    past.grad("key").fill_(5)
    assert state.cotangent(4, 7)["key"].unique().tolist() == [5]
    assert len(state.leaves(4, grad=False)["key"]) == 2
    assert state.difference(rows(1, 2), 4, 7) == 0
    assert state.difference(rows(1, 1), 4, 7) == 1
    assert state.difference(rows(0, 1), 7, 7) == 0


def test_neighbouring_runs_are_one():
    state = appended()
    state.absorb(rows(2, 1), 2)
    state.absorb(rows(3, 2), 3)
    assert state.leaves(5, grad=False).spans == ((0, 5),)
