"""What one rank decides, such as rewards, all ranks of its prompt get; the others do not compute it."""

import pytest
from cases import Call


@pytest.mark.parametrize("dp", [1, 2])
def test_the_first_rank_of_a_prompt_decides_for_all(ranks, dp):
    answers = ranks(4).run(Call("decided", {"dp": dp, "fails": False}))
    for rank, (found, asked) in enumerate(answers):
        first = rank - rank % (4 // dp)
        assert found == {"rewards": [0.5, first]}
        assert asked == [rank] * (rank == first)


def test_a_decision_that_fails_fails_on_every_rank(ranks):
    (first, _), *others = ranks(4).run(Call("decided", {"dp": 1, "fails": True}))
    assert first == "KeyError: 'no reward'"
    for found, asked in others:
        assert found.startswith("RankLostError: rank 0 on")
        assert "no reward" in found
        assert asked == []
