"""Negative controls of the step: each break of the method, made on purpose, must show against plain autograd."""

import pytest
import torch
from helpers import furthest, make_group, oracle, take_gradients, tiny_model, worst

from longstraw import step
from longstraw.ops.attention import reference
from longstraw.state import Appended, Carried, Past

BAR, SEEN = 1e-12, 1e-6


@pytest.fixture(scope="module")
def case():
    """A model of the reference backend, a group of three over three chunks, and what plain autograd gives."""
    model = tiny_model(backend="reference")
    group = make_group(model, 150, (5, 1, 9))
    _, logprobs = oracle(model, group)
    return model, group, logprobs, take_gradients(model)


def distance(case):
    """Return how far a step is from plain autograd: in log-probabilities, and in the worst parameter's gradient."""
    model, group, logprobs, target = case
    result = step.grpo_step(model, group, chunk=64)
    return furthest(result.logprobs, logprobs), worst(take_gradients(model), target)[0]


def test_unbroken(case):
    assert max(distance(case)) < BAR


def carried_owes_nothing(patch):
    real = Carried.cotangent
    patch.setattr(Carried, "cotangent", lambda *x: real(*x) and {})


def tail_owes_nothing(patch):
    real = Carried.cotangent
    patch.setattr(Carried, "cotangent", lambda *x: {"recurrent": real(*x)["recurrent"]})


def carried_stops_at_the_first_border(patch):
    real = Carried.leaves
    patch.setattr(Carried, "leaves", lambda self, end, grad: real(self, end, grad and end == self.positions))


def appended_owes_nothing(patch):
    patch.setattr(Appended, "cotangent", lambda *_: {})


def appended_buffer_is_not_used(patch):
    real = Appended.leaves
    patch.setattr(Appended, "leaves", lambda self, end, grad: real(self, end, False))


def appended_rows_owe_only_to_branches(patch):
    real = Appended.leaves
    patch.setattr(Appended, "leaves", lambda self, end, grad: real(self, end, grad and end == self.positions))


def gradient_of_a_border_is_kept_twice(patch):
    def cotangent(self, start, end):
        return dict(self._grads)  # not forgotten: adds up with that of the next border

    patch.setattr(Carried, "cotangent", cotangent)


def values_get_the_gradient_of_keys(patch):
    real = Past.pair

    def keys_twice(self, *names):
        pair = real(self, *names)
        return pair._replace(grads=(pair.grads[0], pair.grads[0]))

    patch.setattr(Past, "pair", keys_twice)


GRADIENT_BREAKS = [
    carried_owes_nothing,
    tail_owes_nothing,
    carried_stops_at_the_first_border,
    appended_owes_nothing,
    appended_buffer_is_not_used,
    appended_rows_owe_only_to_branches,
    gradient_of_a_border_is_kept_twice,
    values_get_the_gradient_of_keys,
]


@pytest.mark.parametrize("break_it", GRADIENT_BREAKS)
def test_broken_gradient_is_seen(case, break_it, monkeypatch):
    break_it(monkeypatch)
    logprobs, gradients = distance(case)
    assert logprobs < BAR  # the forward is as it was: only the gradient can tell
    assert gradients > SEEN


def state_leaks_between_branches(patch):
    """The final state of one branch is the start of the next."""
    real = step._evaluate

    def evaluate(model, retained, responses, *, grad, temperature):
        past = [state.leaves(retained.positions, grad) for state in retained.states]
        _, updates = model(torch.cat([retained.prompt[-1:], responses[0][:-1]]), past)
        result = real(model, retained, responses, grad=grad, temperature=temperature)
        for state, update in zip(retained.states, updates, strict=True):
            if isinstance(state, Carried):
                state._snapshots[state.positions] = {name: x.detach() for name, x in update.items()}
        return result

    patch.setattr(step, "_evaluate", evaluate)


def tail_is_zeroed_at_borders(patch):
    real = Carried.absorb
    patch.setattr(Carried, "absorb", lambda self, u, *n: real(self, u | {"tail": torch.zeros_like(u["tail"])}, *n))


def recurrent_starts_anew_at_borders(patch):
    real = Carried.absorb
    patch.setattr(Carried, "absorb", lambda self, u, *n: real(self, u | {"recurrent": 0 * u["recurrent"]}, *n))


def future_row_is_seen(patch):
    real = reference._scores
    patch.setattr(reference, "_scores", lambda q, k, t, s, *x: real(q, k, t + 1, s, *x))


def last_row_is_hidden(patch):
    real = Appended.leaves

    def leaves(self, end, grad):
        past = real(self, end, False)
        return Past(end, {name: rows[:-1] for name, rows in past._tensors.items()})

    patch.setattr(Appended, "leaves", leaves)


def positions_start_anew_at_borders(patch):
    real = Appended.leaves

    def leaves(self, end, grad):
        past = real(self, end, grad)
        past.positions = end % 64
        return past

    patch.setattr(Appended, "leaves", leaves)


def last_prompt_token_is_not_replayed(patch):
    def evaluate(model, retained, responses, *, grad, temperature):
        past = [state.leaves(retained.positions, grad) for state in retained.states]
        targets, lengths = torch.cat(list(responses)), [len(response) for response in responses]
        hidden, _ = model(targets, past, segments=tuple(lengths))
        return [x.split(lengths) for x in model.logprobs(hidden, targets, temperature)]

    patch.setattr(step, "_evaluate", evaluate)


FORWARD_BREAKS = [
    state_leaks_between_branches,
    tail_is_zeroed_at_borders,
    recurrent_starts_anew_at_borders,
    future_row_is_seen,
    last_row_is_hidden,
    positions_start_anew_at_borders,
    last_prompt_token_is_not_replayed,
]


@pytest.mark.parametrize("break_it", FORWARD_BREAKS)
def test_broken_forward_is_seen(case, break_it, monkeypatch):
    break_it(monkeypatch)
    logprobs, gradients = distance(case)
    assert logprobs > SEEN
    assert gradients > SEEN


def test_recomputing_something_else_is_reported(case, monkeypatch):
    """The prompt backward must recompute what was retained; a weight changed in between is not that."""
    model, group, *_ = case
    retained = step.prefill(model, group.prompt, chunk=64, grad_from=0)
    step.replay(model, step.PreparedGroup(group, retained), step.StepOptions(64))
    weight = model.model.layers[0].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1e-9)
    assert 0 < step.prompt_backward(model, retained) < 1e-3
    with torch.no_grad():
        weight.copy_(kept)
    take_gradients(model)
