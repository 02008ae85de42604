"""Without any one of its collectives a step on two ranks is wrong, and the comparison with one process says so."""

import pytest
from cases import Case, alone, distances, request
from controls import ARRIVING, MEAN

LEAST = 1e-6  # where the bar of parity is 1e-12

BOTH = [
    "_Embedding.forward reduce_scatter 1",
    "_Embedding.backward all_gather 1",
    "_GatherHidden.forward all_gather 1",
    "_GatherHidden.backward reduce_scatter 1",
    "_Stack.forward stack 1",
    "total_norm all_reduce 1",
]
QWEN = [
    "GatherHeads.forward gather_heads 1",
    "GatherHeads.backward gather_positions 1",
    "GatherPositions.forward gather_positions 1",
    "GatherPositions.backward gather_heads 1",
    *(f"_SpreadAttention.forward {name}" for name in ("all_gather 1", "stack 1", "reduce_scatter 1")),
    *(f"_SpreadAttention.backward all_gather {i}" for i in (1, 2, 3)),
    "_SpreadAttention.backward reduce_scatter 1",
]
ROWS = [
    *(f"select_rows all_gather {i}" for i in (1, 2)),
    *(f"last_chosen {name} {i}" for name in ("gather_positions", "all_gather") for i in (1, 2)),
    *(f"_SpreadRows.forward {name}" for name in ("all_gather 1", "stack 1", "reduce_scatter 1")),
    *(f"_SpreadRows.backward all_gather {i}" for i in (1, 2, 3)),
    "_SpreadRows.backward reduce_scatter 1",
]
EXPERTS = [
    ARRIVING,
    *(f"ExpertGroup.mix exchange {i}" for i in (1, 2, 3)),
    *(f"ExpertGroup.mix exchange {i} backward" for i in (1, 2, 3)),
]
SUMMED = ["Parallel.finish_gradients all_reduce 1"]  # of what several ranks hold alike

DENSE, SPARSE = ((("num_hidden_layers", n), ("first_k_dense_replace", dense)) for n, dense in ((2, 2), (3, 1)))
CASES = {  # with all collectives that each has, and those that are left out of it in turn
    "qwen": (Case(groups=((98, (5, 3)),)), BOTH + QWEN, BOTH + QWEN),
    "rows": (Case("glm", groups=((98, (5, 3)),), options=DENSE), BOTH + ROWS, ROWS),
    "experts": (Case("glm", groups=((66, (5, 3)),), options=SPARSE), BOTH + ROWS + EXPERTS, EXPERTS),
    "side by side": (Case(groups=((66, (5, 3)), (65, (2, 3))), dp=2), None, SUMMED),
    "experts on every rank": (Case("glm", groups=((66, (5, 3)),), ep=1, options=SPARSE), None, SUMMED),
}


def ask(ranks, name, dropped=None):
    """Return the largest distance from one process, and the collectives that were called, with one left out."""
    case = CASES[name][0]
    answers = ranks(2).run(request(case, "control", dropped=dropped))
    worst = max(max(distances(answer["parity"], alone(case)).values()) for answer in answers)
    return worst, set().union(*(answer["called"] for answer in answers))


@pytest.mark.parametrize("name", ["qwen", "rows", "experts"])
def test_no_collective_is_forgotten_here(ranks, name):
    worst, called = ask(ranks, name)
    assert worst < 1e-12
    assert called == set(CASES[name][1])


@pytest.mark.parametrize(("name", "dropped"), [(name, one) for name, (*_, dropped) in CASES.items() for one in dropped])
def test_a_collective_left_out(ranks, name, dropped):
    worst, _ = ask(ranks, name, dropped)
    assert worst > LEAST


def test_means_for_sums(ranks):
    worst, _ = ask(ranks, "qwen", MEAN)
    assert worst > LEAST


def test_gloo_multiplies_no_float32_sum_by_a_factor(ranks):
    """Where FSDP is not told to sum, it would: in float64, which all the others run in, gloo does not mind."""
    case = Case(groups=((2, (3, 2)),), dtype="float32")
    for answer in ranks(2).run(request(case, "unforced")):
        assert "PREMUL_SUM" in answer
