"""The number of ranks changes no loss, no log-probability and no gradient."""

import pytest
import torch
from cases import Case, alone
from helpers import furthest, worst

BAR = 1e-12


def check(case, answers, bar=BAR):
    target = alone(case)
    for answer in answers:
        dp = answer["dp_rank"]
        assert torch.allclose(answer["loss"], target["loss"][dp], rtol=bar, atol=bar)
        assert furthest(answer["logprobs"], target["logprobs"][dp]) < bar
        distance, name = worst(answer["gradients"], target["gradients"])
        assert distance < bar, name


@pytest.mark.parametrize("case", [Case(), Case(prompt_grad="detached"), Case(model="glm")])
def test_two_ranks(ranks, case):
    check(case, ranks(2).run(case))
