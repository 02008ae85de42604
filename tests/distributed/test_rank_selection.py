"""The rows chosen by several ranks are the rows that one chooses, whoever holds them and however scores tie."""

import pytest
import torch
from cases import Call

from longstraw.ops.latent import reference

CUTS = [(1,), (3,), (64,), (64, 2), (64, 64, 63), (65, 1), (130, 7, 1), (64, 64, 64, 3)]


def drawn(cuts, count, seed, tied):
    """Return what a chunk of the last of ``cuts`` positions is asked; small integers tie often."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=generator) for shape in ((cuts[-1], 2, 4), (cuts[-1], 2), (sum(cuts), 4))]
    q, weights, keys = (x.round() if tied else x for x in made)
    return {"q": q, "weights": weights, "keys": keys, "count": count, "cuts": cuts}


ASKED = [drawn(cuts, count, i, tied) for i, cuts in enumerate(CUTS) for count in (8, 32) for tied in (True, False)]


def alone(q, weights, keys, count, cuts):
    past = sum(cuts[:-1])
    rows = reference.select_rows(q, weights, keys[:past], keys[past:], count, scale=1.0)
    return [{row for row in line if row >= 0} for line in rows.tolist()]


@pytest.mark.parametrize("world", [2, 4])
def test_rows_are_those_of_one_rank(ranks, world):
    answers = ranks(world).run(Call("selection", {"asked": ASKED}))
    for i, asked in enumerate(ASKED):
        wanted = alone(**asked)
        chosen = [answer[i] for answer in answers]
        for query, target in enumerate(wanted):
            of_ranks = [rank[query] for rank in chosen]
            assert set().union(*of_ranks) == target, (asked["cuts"], asked["count"], query)
            assert sum(map(len, of_ranks)) == len(target)  # no row twice


def test_scores_tie_at_the_last_row_chosen():
    """The choice above is not made by scores alone: at the lowest score chosen, some rows are left out."""
    asked = ASKED[CUTS.index((64, 64, 63)) * 4]
    past = sum(asked["cuts"][:-1])
    scores = reference.index_scores(asked["q"], asked["weights"], asked["keys"], scale=1.0)
    tied = 0
    for query, rows in enumerate(alone(**asked)):
        seen = scores[query, : past + query + 1]
        tied += int((seen == seen[list(rows)].min()).sum()) > sum(seen[list(rows)] == seen[list(rows)].min())
    assert tied > 10
