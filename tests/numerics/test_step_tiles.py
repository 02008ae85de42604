"""No tensor but the retained state and its gradient grows with the prompt; a chunk far from its start costs seconds."""

import pytest
import torch
from helpers import plain_attend, plain_ops, relative, take_gradients, tiny_model, worst
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.group import Group
from longstraw.ops import attention
from longstraw.ops.attention import reference
from longstraw.ops.delta import reference as delta
from longstraw.state import Appended, Past
from longstraw.step import PreparedGroup, StepOptions, prefill, prompt_backward, replay


class Sizes(TorchDispatchMode):
    """Notes for each storage the most elements that a tensor on it has had."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                at = x.untyped_storage().data_ptr()
                self.largest[at] = max(self.largest.get(at, 0), x.numel())
        return result


def largest_tensor(model, positions):
    """Return the elements of the largest tensor of a step that is neither state, nor its gradient, nor the prompt."""
    prompt = torch.arange(positions) % 256
    group = Group(prompt, [[1, 2, 3], [4] * 70], [0.0, 1.0])
    with Sizes() as sizes:
        retained = prefill(model, prompt, chunk=64, grad_from=0)
        replay(model, PreparedGroup(group, retained), StepOptions(64))
        kept = [x for state in retained.states if isinstance(state, Appended) for _, x in state.held()]
        prompt_backward(model, retained)
    take_gradients(model)
    for x in (*kept, prompt):
        sizes.largest.pop(x.untyped_storage().data_ptr(), None)
    return max(sizes.largest.values())


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that a short prompt fills, so that what is bounded by a tile shows as bounded."""
    monkeypatch.setattr(attention, "ROW_TILE", 256)
    monkeypatch.setattr(reference, "_TILE", 64)
    monkeypatch.setattr(delta, "SEGMENT", 64)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nothing_else_grows_with_the_prompt(backend, small_tiles):
    model = tiny_model(num_hidden_layers=2, backend=backend, dtype=torch.float32)
    assert largest_tensor(model, 1025) == largest_tensor(model, 513)


def test_joined_rows_would_be_seen(small_tiles, monkeypatch):
    monkeypatch.setattr("longstraw.ops.sequence_ops.attend", plain_attend)
    model = tiny_model(num_hidden_layers=2, dtype=torch.float32)
    assert largest_tensor(model, 1025) > 1.5 * largest_tensor(model, 513)


def synthetic_states(model, positions, generator):
    """Return states of ``positions`` random rows, keys so large that some hundred rows all over carry the softmax."""
    states = model.new_states(positions, grad_from=positions - 1000)
    for state, block in zip(states, model.model.layers, strict=True):
        if isinstance(state, Appended):
            shape = (positions, block.mixer.kv_heads, block.mixer.head_dim)
            update = {name: torch.randn(shape, generator=generator) for name in ("key", "value")}
            update["key"] *= 3
        else:
            before = state.leaves(0, grad=False)
            update = {name: torch.randn(before[name].shape, generator=generator) for name in ("recurrent", "tail")}
        state.absorb(update, positions)
    return states


@pytest.mark.slow
def test_last_chunk_after_a_million_positions():
    """A chunk of 64 after 1 Mi retained positions: its first tokens against one plain softmax over all rows.

    Later tokens do not reach earlier outputs, so with no loss on them all gradients are those of the first tokens.
    """
    positions, few = 2**20, 4
    model = tiny_model(num_hidden_layers=2, dtype=torch.float32, rope_angles="float64")
    generator = torch.Generator().manual_seed(0)
    states = synthetic_states(model, positions, generator)
    tokens, targets = torch.randint(256, (2, 64), generator=generator)

    hidden, _ = model(tokens, [state.leaves(positions, grad=True) for state in states])
    model.logprobs(hidden, targets)[0][:few].sum().backward()
    gradients, owed = take_gradients(model), states[1].cotangent(positions - 1000, positions)

    past = [state.leaves(positions, grad=False) for state in states]
    rows = {name: past[1][name].detach().requires_grad_() for name in ("key", "value")}
    past[1] = Past(positions, rows)
    with plain_ops(model):
        expected, _ = model(tokens[:few], past)
        model.logprobs(expected, targets[:few])[0].sum().backward()
    assert relative(hidden[:few], expected) < 1e-4
    distance, name = worst(gradients, take_gradients(model))
    assert distance < 1e-3, name
    for name, leaf in rows.items():
        assert relative(owed[name], leaf.grad[-1000:]) < 1e-3

    near = [*past[:1], Past(0, rows)]  # positions counted from the chunk's start
    few_rows = [*past[:1], Past(positions, {name: leaf[positions // 2 :] for name, leaf in rows.items()})]
    with torch.no_grad():
        assert all(relative(model(tokens[:few], other)[0], expected) > 1e-2 for other in (near, few_rows))
