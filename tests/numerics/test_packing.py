"""Several branches in one graph give what each gives alone: log-probabilities, loss and gradients, in float64."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from glm_helpers import glm_model
from helpers import furthest, make_group, moe_model, tiny_model, worst
from llama_helpers import llama_model

from longstraw.config import StateConfig
from longstraw.layers.delta import GatedDeltaNet
from longstraw.memory.meter import MemoryMeter
from longstraw.ops.chunk import Chunk
from longstraw.ops.latent import packed as packed_choice
from longstraw.step import (
    PreparedGroup,
    StepOptions,
    grpo_step,
    pack_branches,
    prefill,
    replay,
    score,
)

BAR, SEEN = 1e-12, 1e-6
ALONE, TOGETHER = 1, 10**6  # tokens in one graph: a branch, or all of them
MODELS = {"qwen": tiny_model, "qwen moe": moe_model, "glm": glm_model, "llama": llama_model}
RAGGED = (9, 1, 33, 1, 20, 33, 2)
MODES = {
    "exact": {},
    "detached": {"prompt_grad": "detached"},
    "window": {"prompt_grad_window": 70},
    "host rows": {"state": StateConfig(device="cpu")},
}


@functools.cache
def model_of(name):
    return MODELS[name]()


@functools.cache
def group_of(name, positions, lengths):
    return make_group(model_of(name), positions, lengths, masked=True)


def taken(model):
    """Return the gradients by name, of what has one, and clear them."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    assert gradients
    return gradients


def step(model, group, tokens, **options):
    result = grpo_step(model, group, chunk=64, replay_tokens=tokens, **options)
    return result, taken(model)


def distance(name, positions=130, lengths=RAGGED, tokens=TOGETHER, **options):
    """Return how far packed branches are from single ones: log-probabilities, the worst gradient."""
    model, group = model_of(name), group_of(name, positions, lengths)
    one, target = step(model, group, ALONE, **options)
    several, gradients = step(model, group, tokens, **options)
    assert several.loss.item() == pytest.approx(one.loss.item(), rel=BAR, abs=BAR)
    assert several.entropy == pytest.approx(one.entropy, rel=BAR)
    assert torch.equal(several.statistics.tokens, one.statistics.tokens)
    return furthest(several.logprobs, one.logprobs), worst(gradients, target)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_packed_is_alone(name, mode):
    assert max(distance(name, **MODES[mode])) < BAR


@pytest.mark.parametrize(
    ("positions", "lengths", "tokens"),
    [
        (1, (3, 1, 5, 2), TOGETHER),  # nothing retained
        (2, (1,) * 40, TOGETHER),  # more segments than are evaluated side by side
        (66, (1, 1), TOGETHER),
        (200, (40, 5, 17, 30, 2, 1), 48),  # several graphs
        (66, (150, 290, 7), TOGETHER),  # longer than what is evaluated side by side
    ],
)
@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_lengths(name, positions, lengths, tokens):
    assert max(distance(name, positions, lengths, tokens)) < BAR


def test_a_mask_that_keeps_nothing():
    model, group = model_of("qwen"), group_of("qwen", 130, RAGGED)
    masks = [mask if i % 2 else torch.zeros_like(mask) for i, mask in enumerate(group.loss_masks)]
    group = replace(group, loss_masks=masks)
    one, target = step(model, group, ALONE)
    several, gradients = step(model, group, TOGETHER)
    assert furthest(several.logprobs, one.logprobs) < BAR
    assert worst(gradients, target)[0] < BAR


@pytest.mark.parametrize("name", MODELS)
def test_score(name):
    model, group = model_of(name), group_of(name, 130, RAGGED)
    retained = prefill(model, group.prompt, chunk=64)
    alone = score(model, retained, group.responses, replay_tokens=ALONE)
    for tokens in (None, 48, TOGETHER):
        assert furthest(score(model, retained, group.responses, replay_tokens=tokens), alone) < BAR


def neighbours_are_seen_by_attention(patch):
    patch.setattr(Chunk, "is_whole", property(lambda self: self.count > 0))


def neighbours_are_chosen(patch):
    def best_rows(ops, q, weights, parts, past, choice):
        queried = torch.arange(past.positions, past.positions + len(q), dtype=torch.int32)
        return ops.best_rows(q, weights, parts, queried, min(choice[0], past.positions + len(q)), scale=choice[1])

    patch.setattr(packed_choice, "best_rows", best_rows)


def positions_go_on(patch):
    patch.setattr(Chunk, "own_offsets", lambda self, device: torch.arange(self.start, self.stop))


def positions_are_one_off(patch):
    real = Chunk.own_offsets
    patch.setattr(Chunk, "own_offsets", lambda self, device: real(self, device) + self.is_packed)


def state_leaks(patch):
    def operations(self, past):
        return self.ops.conv, self.ops.delta

    patch.setattr(GatedDeltaNet, "_operations", operations)


def convolution_leaks(patch):
    real = GatedDeltaNet._operations
    patch.setattr(GatedDeltaNet, "_operations", lambda self, past: (self.ops.conv, real(self, past)[1]))


BREAKS = [
    ("qwen", neighbours_are_seen_by_attention),
    ("llama", neighbours_are_seen_by_attention),
    ("glm", neighbours_are_chosen),
    ("qwen", positions_go_on),
    ("llama", positions_are_one_off),
    ("glm", positions_go_on),
    ("qwen", state_leaks),
    ("qwen", convolution_leaks),
]


@pytest.mark.parametrize(("name", "break_it"), BREAKS)
def test_a_break_is_seen(name, break_it, monkeypatch):
    model, group = model_of(name), group_of(name, 130, RAGGED)
    one, target = step(model, group, ALONE)
    break_it(monkeypatch)
    several, gradients = step(model, group, TOGETHER)
    assert furthest(several.logprobs, one.logprobs) > SEEN
    assert worst(gradients, target)[0] > SEEN


@pytest.mark.parametrize(
    ("lengths", "tokens", "packs"),
    [
        ((3, 5, 1, 4), None, [[1], [3, 2], [0]]),
        ((3, 5, 1, 4), 100, [[1, 3, 0, 2]]),
        ((3, 5, 1, 4), 1, [[1], [3], [0], [2]]),
        ((2,) * 5, 4, [[0, 1], [2, 3], [4]]),
        ((7, 2), 4, [[0], [1]]),  # a longer one stands alone
    ],
)
def test_packs(lengths, tokens, packs):
    assert pack_branches(lengths, tokens) == packs


@pytest.mark.parametrize("seed", range(3))
def test_batches_hold_each_position_once(seed):
    """And no more padding than there is room for."""
    lengths = tuple(torch.randint(1, 60, (23,), generator=torch.Generator().manual_seed(seed)).tolist())
    count = sum(lengths)
    x = torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(seed))
    for start, stop in itertools.pairwise((0, count // 3, count // 3, count)):
        chunk = Chunk(count, start, stop, lengths)
        for batches, rows in ((chunk.batches, x), (chunk.own_batches, x[start:stop])):
            back = torch.full_like(rows, torch.nan)
            for batch in batches:
                folded = batch.fold(rows)
                assert folded.shape == (batch.length, batch.number * 2, 3)
                assert batch.length * batch.number <= max(count // 2, batch.length)
                assert torch.isnan(back[batch._on(x.device)[2]]).all() if batch._run is None else True
                batch.unfold(folded, back)
            assert torch.equal(back, rows)


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_one_branch(name):
    """Of a graph with many segments, and of twice as many branches."""

    def peak(lengths, tokens):
        generator = torch.Generator().manual_seed(0)
        vocabulary = MODELS[name]().config.vocab_size
        # outside the meter: ids of a response are in host memory, which is the device's here
        ids = [torch.randint(vocabulary, (n,), generator=generator) for n in (129, *lengths)]
        with MemoryMeter() as meter:
            model = MODELS[name](dtype=torch.float32)
            group = replace(group_of(name, 130, RAGGED), prompt=ids[0], responses=ids[1:], old_logprobs=None,
                            loss_masks=None, rewards=[float(i % 2) for i in range(len(lengths))])  # fmt: skip
            retained = prefill(model, group.prompt, chunk=64, grad_from=0)
            for _ in range(2):  # the second time all gradients are there
                meter.reset_peak()
                replay(model, PreparedGroup(group, retained), StepOptions(64, replay_tokens=tokens))
            return meter.peak

    one = peak((128, 128), 128)
    assert peak((16,) * 16, 128) < 1.01 * one
    assert peak((16,) * 64, 128) < 1.01 * one
    assert peak((100, 28, 3, 3, 60, 60), 128) < 1.01 * one
    assert peak((16,) * 64, 1024) > 1.3 * one
