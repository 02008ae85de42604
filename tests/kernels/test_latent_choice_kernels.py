"""The choice of rows by the Triton kernels: exactly the reference's, whatever ties and wherever the prompt is cut."""

from unittest import mock

import pytest
import torch
import triton.language as tl
from harness import assert_close, assert_killed, draw, far, padded
from interpreter import shuffled_programs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from longstraw.memory.meter import MemoryMeter
from longstraw.ops.latent import fused, reference

CASES = [(0, 1, 4), (0, 6, 3), (20, 4, 5), (30, 1, 100), (7, 5, 1)]  # retained, new, rows a query


def draw_index(retained, new, dtype=torch.float32, seed=0):
    """Return index queries, weights, keys in small whole numbers: scores are exact and tie, at 0 and elsewhere."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape, dtype=dtype):
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    weights = whole(new, 2, dtype=torch.promote_types(dtype, torch.float32))
    return whole(new, 2, 3), weights, whole(retained, 3), whole(new, 3)


def small_tiles(module):
    """A few candidates at a time, three queries at a time."""
    return mock.patch.multiple(module, CANDIDATES=16, QUERY_TILE=3)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), (CASES[2], torch.bfloat16), (CASES[2], torch.float64)],
    ids=str,
)
def test_choice_is_the_references(case, dtype):
    retained, new, count = case
    arguments = draw_index(retained, new, dtype)
    target = reference.select_rows(*arguments, count, scale=0.5)
    with small_tiles(fused):
        rows = fused.select_rows(*arguments, count, scale=0.5)
    assert rows.dtype == torch.int32
    assert torch.equal(rows, target)


def test_tiles_change_nothing():
    arguments = draw_index(40, 3)
    with small_tiles(fused):
        rows = fused.select_rows(*arguments, 7, scale=0.5)
    assert torch.equal(fused.select_rows(*arguments, 7, scale=0.5), rows)


@pytest.mark.parametrize("border", [1, 9])
def test_choice_does_not_depend_on_the_cut(border):
    """Scores are the same to the last bit wherever a key and a query stand in a tile.

    Products are exact here, for a processor's own depend on the place; sums over heads are not.
    """
    q, weights, key = draw(12, 3, 16, seed=1).mul(8).round(), draw(12, 3, seed=2), draw(12, 16, seed=3).mul(8).round()
    positions = torch.arange(12, dtype=torch.int32)
    scores, rows = fused.best_rows(q, weights, [(key, positions)], positions, 4, scale=0.5)
    parts = [(key[:border], positions[:border]), (key[border:], positions[border:])]
    after = fused.best_rows(q[border:], weights[border:], parts, positions[border:], 4, scale=0.5)
    assert torch.equal(after[0], scores[border:])
    assert torch.equal(after[1], rows[border:])


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float64, 1e-14)])
def test_scores_are_the_references(dtype, bar):
    """Scores have at least float32, of whatever sign; queries that see few rows come first."""
    wide = torch.promote_types(dtype, torch.float32)
    q, key = draw(4, 3, 24, dtype=dtype, seed=1), draw(30, 24, dtype=dtype, seed=2)
    weights, positions = draw(4, 3, dtype=wide, seed=3), torch.arange(30, dtype=torch.int32)
    queried = torch.tensor([0, 2, 20, 29], dtype=torch.int32)
    scores, rows = fused.best_rows(q, weights, [(key, positions)], queried, 6, scale=0.3)
    parts = [(key.double(), positions)]
    expected, chosen = reference.best_rows(q.double(), weights.double(), parts, queried, 6, scale=0.3)
    assert torch.equal(rows, chosen)
    assert scores.dtype == wide
    assert (expected < 0).any()
    assert torch.equal(scores.isinf(), expected.isinf())
    assert_close({"": scores.nan_to_num(neginf=0.0)}, {"": expected.nan_to_num(neginf=0.0)}, bar)


def test_ranks_choose_as_one_does():
    """Each owns every other row; the best of their best, ordered by position, are the best of all."""
    q, weights, _, key = draw_index(0, 20)
    q, weights, queried = q[-3:], weights[-3:], torch.arange(17, 20, dtype=torch.int32)
    positions = torch.arange(20, dtype=torch.int32)
    whole = reference.best_rows(q, weights, [(key, positions)], queried, 4, scale=0.5)
    with small_tiles(fused):
        parts = [[(key[r:9:2], positions[r:9:2]), (key[9 + r :: 2], positions[9 + r :: 2])] for r in range(2)]
        found = [fused.best_rows(q, weights, part, queried, 4, scale=0.5) for part in parts]
    scores, rows = (torch.cat(x, -1) for x in zip(*found, strict=True))
    order = rows.argsort(stable=True, dim=-1)
    merged = reference.keep_best(scores.gather(1, order), rows.gather(1, order), 4)
    assert all(torch.equal(a, b) for a, b in zip(merged, whole, strict=True))


def check_ties(module):
    """Minus zero and zero tie; of equal scores the first positions stay, from one tile to the next."""
    q = torch.ones(3, 1, 1)
    key = torch.tensor([0.0, 1, 0, 1, 1, 0, 0, 2, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0])[:, None]
    weights = torch.tensor([[1.0], [-1.0], [0.0]])
    queried, positions = torch.full((3,), 19, dtype=torch.int32), torch.arange(20, dtype=torch.int32)
    with small_tiles(module):
        scores, rows = module.best_rows(q, weights, [(key, positions)], queried, 5, scale=1.0)
    assert rows.tolist() == [[1, 3, 4, 7, 9], [0, 2, 5, 6, 8], [0, 1, 2, 3, 4]]
    assert scores.tolist() == [[1, 1, 1, 2, 1], [0] * 5, [0] * 5]
    best, rows = torch.full((1, 2), -torch.inf), torch.full((1, 2), -1, dtype=torch.int32)
    scores, seen = torch.tensor([[-0.0, 0.0, -1.0, 0.0]]), torch.tensor([4], dtype=torch.int32)
    sizes = {"COUNT": 2, "BLOCK": 16, "WHOLE": tl.int32, "BITS": 32}
    module.kernels.choose._choose_kernel[(1,)](scores, positions, seen, best, rows, 4, 0, 4, **sizes)
    assert rows.tolist() == [[0, 1]]


def check_whole(module):
    """Inputs in buffers of NaN, several tiles of queries and of keys, two parts, scores compared too."""
    arguments = draw_index(20, 4)
    q, weights, past_key, key = (padded(x) for x in arguments)
    positions, queried = torch.arange(24, dtype=torch.int32), torch.tensor([3, 12, 18, 23], dtype=torch.int32)
    parts = [(past_key, positions[:20]), (key, positions[20:])]
    target = reference.best_rows(*arguments[:2], parts, queried, 5, scale=0.5)
    with small_tiles(module):
        found = module.best_rows(q, weights, parts, queried, 5, scale=0.5)
    assert all(torch.equal(a, b) for a, b in zip(found, target, strict=True))


def test_ties():
    check_ties(fused)


def test_reads_nothing_beyond_its_tensors():
    check_whole(fused)


def check_far(module):
    q, weights, past_key, key = draw_index(20, 2)
    near = module.select_rows(q, weights, past_key, key, 5, scale=0.5)
    assert torch.equal(module.select_rows(q, weights, far(past_key), key, 5, scale=0.5), near)


def test_offsets_past_int32():
    check_far(fused)
    assert_killed(check_far, fused, "rows = (start + s).to(tl.int64)", "rows = start + s")


def test_the_order_of_programs_does_not_matter():
    with shuffled_programs(seed=3):
        check_whole(fused)


def test_more_rows_than_a_program_chooses_from():
    with pytest.raises(ValueError, match="1 to 8192"):
        fused.select_rows(*draw_index(9000, 1), 8193, scale=0.5)


def test_fake_tensors_count_what_is_allocated():
    arguments = draw_index(400, 64)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        with MemoryMeter() as meter:
            rows = fused.select_rows(*fakes, 32, scale=0.5)
    assert (rows.shape, rows.dtype) == ((64, 32), torch.int32)
    expected = 64 * 32 * 8 + 64 * 400 * 4  # the best rows and their scores; a tile of scores
    assert expected <= meter.peak <= expected + 464 * 4 + 4 * 512


MUTATIONS = {
    "a query sees the next position": ("at - COUNT < seen)", "at - COUNT <= seen)"),
    "a query does not see itself": ("right=True", "right=False"),
    "scores are not rectified": ("tl.maximum(product * SCALE, 0.0)", "product * SCALE"),
    "the scale is lost": ("tl.maximum(product * SCALE, 0.0)", "tl.maximum(product, 0.0)"),
    "every head weighs as the first": ("WEIGHTS + t * w_t + head", "WEIGHTS + t * w_t"),
    "every head asks as the first": ("+ head * q_i", ""),
    "the last head is left out": ("range(HEADS)", "range(HEADS - 1)"),
    "the bound lies too high": ("order >= higher", "order > higher - bit"),
    "of equal scores one too few": ("((passed >> 16) <= spare)", "((passed >> 16) < spare)"),
    "equal scores are taken without end": ("(equal & ((passed >> 16) <= spare))", "equal"),
    "a query that sees few rows": ("COUNT, zero, lowest)", "COUNT, zero, zero)"),
    "positions of the first tile": ("POSITIONS + start + at", "POSITIONS + at"),
    "the first tile's visibility": ("tl.load(SEEN + t) - start, keys", "tl.load(SEEN + t), keys"),
    "the second tile of queries is the first": ("q[tile], weights", "q[: tile.stop - tile.start], weights"),
    "the last keys are left out": ("range(0, len(key), keys)", "range(0, len(key) - keys, keys)"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutants_are_seen(mutation):
    assert_killed(check_whole, fused, *MUTATIONS[mutation])


TIES = {
    "minus zero below zero": ("tl.where(scores == 0.0, 0.0, scores)", "scores"),
    "the last of equal scores stay": ("(passed >> 16) <= spare", "(passed >> 16) > tl.max(passed >> 16, 0) - spare"),
}


@pytest.mark.parametrize("mutation", TIES)
def test_another_order_of_ties_is_seen(mutation):
    assert_killed(check_ties, fused, *TIES[mutation])
