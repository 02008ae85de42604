"""Which group a step takes, alone and beside others."""

import pytest

from longstraw.training.trainer import group_number


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_group_is_taken_once(every, dp):
    """A task gives group ``number // every``, as the needle and the user's own prompts do."""
    steps = 3 * every
    taken = [[group_number(step, every, dp, rank) // every for rank in range(dp)] for step in range(steps)]
    fresh = [group for line in taken[::every] for group in line]
    assert fresh == list(range(3 * dp))
    for step, line in enumerate(taken):
        assert line == taken[step - step % every]  # a prompt that is kept is the one that was evaluated


def test_alone_it_is_the_step():
    assert [group_number(step, 1, 1, 0) for step in range(3)] == [0, 1, 2]
