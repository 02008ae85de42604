"""Which prompts a step takes, alone and beside others, and what it shares with the step before."""

import pytest

from longstraw.training.schedule import Schedule


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_prompt_is_taken_once(groups, updates, dp):
    schedule = Schedule(groups=groups, updates=updates)
    steps = 3 * updates
    taken = [[n for rank in range(dp) for n in schedule.prompts(step, dp, rank)] for step in range(steps)]
    assert sorted(n for line in taken[::updates] for n in line) == list(range(3 * dp * groups))
    for step, line in enumerate(taken):
        assert line == taken[step - step % updates]  # responses that are trained on again are this prompt's


def test_alone_it_is_the_step():
    assert [Schedule().prompts(step) for step in range(3)] == [[0], [1], [2]]


def test_warm_up_steps_come_first_and_share_nothing():
    schedule = Schedule(warmup=3, updates=4, refresh=2)
    made = [step for step in range(12) if schedule.makes_responses(step)]
    evaluated = [step for step in range(12) if schedule.evaluates_prompt(step)]
    assert made == [0, 1, 2, 3, 7, 11]
    assert evaluated == [0, 1, 2, 3, 5, 7, 9, 11]
    assert [schedule.warms_up(step) for step in (0, 2, 3)] == [True, True, False]
    assert [schedule.prompts(step) for step in (0, 1, 2, 3, 6, 7)] == [[0], [1], [2], [3], [3], [4]]
