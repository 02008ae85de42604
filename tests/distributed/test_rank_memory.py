"""What a rank holds, counted: its own rows, its own heads' state, its part of the parameters, and nothing of others."""

import pytest
from cases import Case, alone, build, groups, request

from longstraw.step import prefill

QWEN, GLM = Case(groups=((260, (5, 3)),)), Case("glm", groups=((260, (5, 3)),))
CARRIED = ("recurrent", "tail")
SPARE = 1.03  # of parameters whose rows the ranks do not divide


@pytest.mark.parametrize(("world", "case"), [(2, QWEN), (4, GLM)])
def test_a_rank_holds_its_part(ranks, world, case):
    model = build(case)
    whole = prefill(model, groups(case)[0].prompt, chunk=case.chunk).num_bytes()
    parameters = sum(p.nbytes for p in model.parameters())
    gradients = sum(gradient.nbytes for gradient in alone(case)["gradients"].values())
    positions = case.groups[0][0] - 1
    chunks = -(-positions // case.chunk)
    answers = ranks(world).run(request(case, "memory"))
    for answer in answers:
        assert answer["parameters"] < SPARE * parameters / world
        assert answer["retained"].keys() == whole.keys()
        for name, size in answer["retained"].items():
            row = 0 if name in CARRIED else whole[name] / positions
            assert abs(size - whole[name] / world) <= chunks * row  # a row a chunk, where it does not divide
        after_prefill, after_step = answer["after_prefill"], answer["after_step"]
        assert after_prefill["retained"] == sum(answer["retained"].values())
        assert after_step["gradients"] < SPARE * gradients / world
        for left in (after_prefill, after_step):
            assert left["activations"] < parameters / 100  # nothing else is kept
        assert after_step["retained"] == 0

    assert all(len(answer["spans"]) == 1 for answer in answers)  # the same in all layers
    spans = [span for answer in answers for span in answer["spans"].pop()]
    assert sorted(position for span in spans for position in range(*span)) == list(range(positions))  # each at one rank
