"""Which group a step takes, alone and beside others."""

import pytest

from longstraw.training.trainer import prompt_number


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_group_is_taken_once(every, dp):
    steps = 3 * every
    taken = [[prompt_number(step, every, dp, rank) for rank in range(dp)] for step in range(steps)]
    fresh = [number for line in taken[::every] for number in line]
    assert fresh == list(range(3 * dp))
    for step, line in enumerate(taken):
        assert line == taken[step - step % every]  # a prompt that is kept is the one that was evaluated


def test_alone_it_is_the_step():
    assert [prompt_number(step, 1, 1, 0) for step in range(3)] == [0, 1, 2]
