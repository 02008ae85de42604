"""One GRPO step over a group that shares a prompt: prefill, retain, score, replay and, if asked, the prompt backward.

With z the retained state, the gradient of the loss l is

    dL/dtheta  =  dl/dtheta |z   +   (dz/dtheta)^T dl/dz

``detached`` computes the first term, as the LongStraw paper does (arXiv 2607.14952); ``exact`` both: the branches leave
dl/dz on the state, and the prompt backward walks the prompt's chunks from last to first, evaluates each again with
autograd on the state before it, and hands the state's gradient on to the left.

The last prompt token is not retained: every branch replays it, so the loss meets the prompt only through the state.
P prompt positions, of which P - 1 are retained; R response positions; d model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longstraw.config import INNER_CHUNK, AlgorithmConfig, StateConfig, gradient_start
from longstraw.group import Group
from longstraw.grpo import Statistics, branch_losses
from longstraw.models.decoder import Decoder
from longstraw.observer import UNOBSERVED, Observer
from longstraw.ops.host_offload import to_host
from longstraw.ops.host_sync import read_scalar
from longstraw.state import RetainedState


@dataclass
class Retained:
    """A prompt that was evaluated once. Consumed by ``prompt_backward``; using it again raises."""

    states: list[RetainedState]
    prompt: Tensor  # [P]
    chunk: int
    grad_from: int | None  # the first position whose state gets a gradient; None: no position's does
    consumed: bool = False

    @property
    def positions(self) -> int:
        return len(self.prompt) - 1

    def check(self) -> None:
        """Raise ``ValueError`` for a consumed prompt: the gradients still on its state would count twice."""
        if self.consumed:
            raise ValueError("this retained prompt was consumed by a prompt backward; prefill the prompt again")

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of the state by tensor name, over all layers."""
        total: dict[str, int] = {}
        for state in self.states:
            for name, size in state.num_bytes().items():
                total[name] = total.get(name, 0) + size
        return total


@dataclass(frozen=True)
class StepOptions:
    """How steps are taken, whatever their groups."""

    chunk: int  # prompt positions evaluated at a time, a multiple of 64
    prompt_grad: str = "exact"  # or ``detached``
    prompt_grad_window: int | None = None  # positions that the exact gradient reaches back; None: all
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    response_length: int | None = None  # read by Dr. GRPO's constant; None: the longest response
    state: StateConfig | None = None  # how retained rows are kept; None: in the model's dtype, on its device
    temperature: float = 1.0  # at which responses were drawn: the policy is softmax(logits / temperature)
    replay_tokens: int | None = None  # response positions in one graph; None: response_length

    def __post_init__(self) -> None:
        for name in ("response_length", "replay_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None for the longest response")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature} must be above 0: the policy is softmax(logits / temperature)"
            )

    @property
    def together(self) -> int | None:
        """How many response positions are evaluated together; None: as many as the longest response has."""
        return self.response_length if self.replay_tokens is None else self.replay_tokens

    def grad_from(self, prompt: Tensor) -> int | None:
        """Return the first position of ``prompt`` [P] whose state gets a gradient; None: no position's does."""
        return gradient_start(len(prompt) - 1, self.chunk, self.prompt_grad, self.prompt_grad_window)


@dataclass(frozen=True)
class PreparedGroup:
    """A group whose prompt is evaluated, with what its loss needs beside the policy's log-probabilities.

    ``prefilled`` and ``scored`` are the positions evaluated for it so far.
    """

    group: Group
    retained: Retained
    old_logprobs: list[Tensor] | None = None  # [R] a response
    reference_logprobs: list[Tensor] | None = None
    prefilled: int = 0
    scored: int = 0


@dataclass(frozen=True)
class StepResult:
    """What a step computed; gradients are on the model's parameters."""

    loss: Tensor  # 0-d
    logprobs: list[Tensor]  # [R] a response, on the host
    entropy: float  # mean over the tokens in the loss
    statistics: Statistics
    retained_bytes: dict[str, int]  # by tensor name
    recompute_difference: float | None  # largest |state evaluated again - state retained|; None without prompt backward
    prefilled_positions: int
    replayed_positions: int
    scored_positions: int  # evaluated without a graph beyond the prefill, the reference's own prompt included
    recomputed_positions: int  # prompt positions evaluated again by the prompt backward


@torch.no_grad()
def prefill(
    model: Decoder,
    prompt: Tensor,
    *,
    chunk: int,
    grad_from: int | None = None,
    state: StateConfig | None = None,
    observer: Observer = UNOBSERVED,
) -> Retained:
    """Evaluate ``prompt`` [P] without autograd, ``chunk`` positions at a time, and retain its state.

    ``chunk`` is a multiple of 64. ``grad_from`` as ``gradient_start`` gives it: from there on what the prompt backward
    needs is kept too. ``state`` says how rows are kept (None: in the model's dtype, on its device).
    """
    if chunk < INNER_CHUNK or chunk % INNER_CHUNK:
        raise ValueError(f"chunk={chunk} must be a multiple of {INNER_CHUNK}")
    positions = len(prompt) - 1
    states = model.new_states(positions, grad_from, chunk, state)
    retained = Retained(states, prompt, chunk, grad_from)
    with observer.verb("prefill", positions):
        observer.holds(states)
        pieces = prompt[:positions].split(chunk) if positions else ()
        for tokens in pad_to_longest_rank(model, pieces, prompt[:0]):
            _, updates = model(tokens, [s.leaves(s.positions, grad=False) for s in states], state_only=True)
            for layer, update in zip(states, updates, strict=True):
                layer.absorb(update, len(tokens), model.split(len(tokens)).start)
            del updates, update  # the loop's name too: it would keep the last layer's rows over the next chunk
            observer.holds(states)
            observer.advance(len(tokens))
    return retained


@torch.no_grad()
def score(
    model: Decoder,
    retained: Retained,
    responses: Sequence[Tensor],
    *,
    temperature: float = 1.0,
    replay_tokens: int | None = None,
    observer: Observer = UNOBSERVED,
) -> list[Tensor]:
    """Return the log-probabilities [R] of each response on the retained state, without a graph, on the host.

    They are those of softmax(logits / ``temperature``). ``replay_tokens`` positions are evaluated together (None: as
    many as the longest response has).
    """
    scored: dict[int, Tensor] = {}
    lengths = [len(response) for response in responses]
    with observer.verb("score", sum(lengths)):
        for pack in pad_to_longest_rank(model, pack_branches(lengths, replay_tokens), []):
            branches = [responses[i] for i in pack]
            logprobs, _ = _evaluate(model, retained, branches, grad=False, temperature=temperature)
            scored |= zip(pack, map(to_host, logprobs), strict=False)  # a pack of no branches gives one empty tensor
            observer.advance(sum(map(len, branches)))
    return [scored[i] for i in range(len(responses))]


def replay(
    model: Decoder, prepared: PreparedGroup, options: StepOptions, *, observer: Observer = UNOBSERVED
) -> tuple[Tensor, list[Tensor], float, Statistics]:
    """Run the responses of a group with autograd, as many at a time as ``options.replay_tokens`` holds.

    Each graph is freed before the next one is built. Gradients are accumulated on the parameters and, where it takes
    part, on the retained state. Returns the group's loss, the log-probabilities [R] of each response on the host, the
    mean entropy and the counts of the loss.
    """
    group, retained = prepared.group, prepared.retained
    lengths = group.response_positions
    losses_of = branch_losses(
        group,
        options.algorithm,
        max(lengths) if options.response_length is None else options.response_length,
        prepared.old_logprobs,
        prepared.reference_logprobs,
    )
    masks: Sequence[Tensor | None] = group.loss_masks or [None] * len(group.responses)
    logprobs: dict[int, Tensor] = {}
    sums = None  # of loss, entropy and counts: nothing on the device grows with the group
    grad = retained.grad_from is not None
    packs = pack_branches(lengths, options.together)
    with observer.verb("replay", sum(lengths)):
        rounds = pad_to_longest_rank(model, packs, [])
        for pack in packs:
            branches = [group.responses[i] for i in pack]
            lps, entropies = _evaluate(model, retained, branches, grad=grad, temperature=options.temperature)
            observer.holds(retained.states)
            total = None
            for i, lp, entropy in zip(pack, lps, entropies, strict=True):
                branch = losses_of[i](lp)
                total = branch.loss if total is None else total + branch.loss
                logprobs[i] = to_host(lp.detach())
                own = branch.loss.detach(), _kept_sum(entropy.detach(), masks[i]), branch.statistics
                sums = own if sums is None else (sums[0] + own[0], sums[1] + own[1], sums[2] + own[2])
            assert total is not None  # a pack has a branch or more
            total.backward()
            del total, branch, lps, lp, entropies, entropy, own  # the graph ends here
            observer.advance(sum(map(len, branches)))
        for nothing in rounds[len(packs) :]:
            (_evaluate(model, retained, nothing, grad=False)[0][0].sum() * 0).backward()
            observer.advance(0)
    assert sums is not None  # a group has two responses or more
    loss, entropy_sum, statistics = sums
    mean_entropy = read_scalar(entropy_sum / statistics.tokens.clamp(min=1), math.nan)
    return loss, [logprobs[i] for i in range(len(lengths))], mean_entropy, statistics


def prompt_backward(model: Decoder, retained: Retained, *, observer: Observer = UNOBSERVED) -> float:
    """Carry the gradient that responses left on the state back through the prompt, one recomputed chunk at a time.

    Adds to the gradients of the parameters and consumes ``retained``. Returns the largest absolute difference between
    what was evaluated again and what was retained: 0 where evaluation is deterministic.
    """
    states, positions = retained.states, retained.positions
    difference = retained.prompt.new_zeros((), dtype=torch.float64)
    first = positions if retained.grad_from is None else retained.grad_from
    starts = list(reversed(range(first, positions, retained.chunk)))
    rounds = pad_to_longest_rank(model, starts, None)
    if not rounds:
        return 0.0
    retained.check()
    retained.consumed = retained.grad_from is not None
    with observer.verb("prompt_backward", positions - first):
        for start in rounds:
            if start is None:
                empty_backward(model, retained, first)
                observer.advance(0)
                continue
            end = min(start + retained.chunk, positions)
            past = [state.leaves(start, grad=start > first) for state in states]
            _, updates = model(retained.prompt[start:end], past, state_only=True)
            tensors: list[Tensor] = []
            gradients: list[Tensor] = []
            for state, update in zip(states, updates, strict=True):
                difference = torch.maximum(difference, state.difference(update, start, end))
                for name, gradient in state.cotangent(start, end).items():
                    if update[name].requires_grad:  # not so below the first trained layer
                        tensors.append(update[name])
                        gradients.append(gradient)
            del updates, update
            if tensors:
                torch.autograd.backward(tensors, gradients)
            del tensors, gradients, past
            observer.holds(states)
            observer.advance(end - start)
    return read_scalar(difference, 0.0)


def grpo_step(
    model: Decoder,
    group: Group,
    *,
    chunk: int | None = None,
    prompt_grad: str = "exact",
    prompt_grad_window: int | None = None,
    algorithm: AlgorithmConfig | None = None,
    response_length: int | None = None,
    reference: Decoder | None = None,
    state: StateConfig | None = None,
    replay_tokens: int | None = None,
    observer: Observer = UNOBSERVED,
) -> StepResult:
    """Add the gradient of one group's loss to ``model``'s parameters.

    ``chunk`` is the number of prompt positions evaluated at a time (None: the model's default); ``StepOptions`` says
    what the other options are. ``reference`` is the model of the KL term, needed where ``algorithm.kl_coef`` is not 0.
    Raises ``ValueError`` for token ids beyond the vocabulary.
    """
    algorithm, chunk = algorithm or AlgorithmConfig(), model.config.chunk if chunk is None else chunk
    options = StepOptions(
        chunk, prompt_grad, prompt_grad_window, algorithm, response_length, state, replay_tokens=replay_tokens
    )
    check_autograd(model)
    check_group(group, model, algorithm, has_reference=reference is not None)
    group = group.to(model.lm_head.weight.device)
    reference_logprobs = None
    if reference is not None and algorithm.kl_coef:  # its retained prompt is gone before the policy's is made
        reference_logprobs = score_fresh(
            reference, group, chunk=chunk, state=state, replay_tokens=options.together, observer=observer
        )
    prepared = prepare_group(model, group, options, reference_logprobs=reference_logprobs, observer=observer)
    return finish_step(model, prepared, options, observer=observer)


def prepare_group(
    model: Decoder,
    group: Group,
    options: StepOptions,
    *,
    reference_logprobs: list[Tensor] | None = None,
    retained: Retained | None = None,
    observer: Observer = UNOBSERVED,
) -> PreparedGroup:
    """Evaluate the group's prompt and, where the algorithm asks for it, score its responses before any update.

    ``group`` is on the model's device; ``reference_logprobs`` were scored on a prompt of their own. ``retained`` is the
    prompt's state where it is there already.
    """
    retained = retained or prefill(
        model,
        group.prompt,
        chunk=options.chunk,
        grad_from=options.grad_from(group.prompt),
        state=options.state,
        observer=observer,
    )
    old, scored = group.old_logprobs if options.algorithm.old_logprobs == "data" else None, 0
    if options.algorithm.old_logprobs == "score":
        old = score(
            model,
            retained,
            group.responses,
            temperature=options.temperature,
            replay_tokens=options.together,
            observer=observer,
        )
        scored = sum(group.response_positions)
    if reference_logprobs is not None:
        scored += retained.positions + sum(group.response_positions)
    return PreparedGroup(group, retained, old, reference_logprobs, retained.positions, scored)


def finish_step(
    model: Decoder, prepared: PreparedGroup, options: StepOptions, *, observer: Observer = UNOBSERVED
) -> StepResult:
    """Replay a group on its retained prompt and, where it takes part, carry the gradient back through the prompt."""
    retained = prepared.retained
    retained_bytes = retained.num_bytes()
    loss, logprobs, entropy, statistics = replay(model, prepared, options, observer=observer)
    difference = prompt_backward(model, retained, observer=observer)
    return StepResult(
        loss=loss,
        logprobs=logprobs,
        entropy=entropy,
        statistics=statistics,
        retained_bytes=retained_bytes,
        recompute_difference=None if retained.grad_from is None else difference,
        prefilled_positions=prepared.prefilled,
        replayed_positions=sum(prepared.group.response_positions),
        scored_positions=prepared.scored,
        recomputed_positions=retained.positions - retained.grad_from if retained.grad_from is not None else 0,
    )


def skip_step(prepared: PreparedGroup) -> StepResult:
    """Return what a step over a group of equal rewards computes, without a pass: its advantages and gradient are 0."""
    zero = torch.zeros((), device=prepared.retained.prompt.device)
    return StepResult(
        loss=zero,
        logprobs=[torch.zeros(len(response)) for response in prepared.group.responses],
        entropy=math.nan,
        statistics=Statistics(zero, zero, None),
        retained_bytes=prepared.retained.num_bytes(),
        recompute_difference=None,
        prefilled_positions=prepared.prefilled,
        replayed_positions=0,
        scored_positions=prepared.scored,
        recomputed_positions=0,
    )


def score_fresh(
    model: Decoder,
    group: Group,
    *,
    chunk: int,
    state: StateConfig | None = None,
    temperature: float = 1.0,
    replay_tokens: int | None = None,
    observer: Observer = UNOBSERVED,
) -> list[Tensor]:
    """Evaluate the prompt anew and return the log-probabilities of its responses; the state is dropped again."""
    retained = prefill(model, group.prompt, chunk=chunk, state=state, observer=observer)
    return score(
        model, retained, group.responses, temperature=temperature, replay_tokens=replay_tokens, observer=observer
    )


def check_autograd(model: Decoder) -> None:
    """Raise ``ValueError`` where a step could not leave a gradient on ``model``."""
    if not torch.is_grad_enabled():
        raise ValueError("a step needs autograd: call it outside torch.no_grad() and torch.inference_mode()")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient; set requires_grad_(True) on what is trained")


def check_group(group: Group, model: Decoder, algorithm: AlgorithmConfig, *, has_reference: bool) -> None:
    """Raise ``ValueError`` for what would fail, or be wrong, far from its cause."""
    vocabulary = model.config.vocab_size
    for what, ids in (("prompt", group.prompt), *((f"response {i}", ids) for i, ids in enumerate(group.responses))):
        if (largest := int(read_scalar(ids.max(), 0))) >= vocabulary:
            raise ValueError(f"{what}: token id {largest} is not below the vocabulary size {vocabulary}")
    if algorithm.kl_coef and not has_reference:
        raise ValueError(f"kl_coef={algorithm.kl_coef} needs a reference model")


def pack_branches(lengths: Sequence[int], tokens: int | None) -> list[list[int]]:
    """Return which branches are in one graph, by their numbers: up to ``tokens`` positions, or one longer branch.

    The longest come first, each to the first graph with room. None: as many positions as the longest has.
    """
    most = max(lengths) if tokens is None else tokens
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((at for at, left in enumerate(room) if left >= lengths[i]), len(packs))
        if at == len(packs):
            packs.append([])
            room.append(most)
        packs[at].append(i)
        room[at] -= lengths[i]
    return packs


def _evaluate(
    model: Decoder, retained: Retained, responses: Sequence[Tensor], *, grad: bool, temperature: float = 1.0
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return log-probabilities and entropies [R] of each of ``responses``, a segment each after the prompt.

    Responses wait in host memory for their turn: nothing on the device grows with the group. Without any the model is
    evaluated all the same, at no position.
    """
    retained.check()
    prompt, lengths = retained.prompt, [len(response) for response in responses] or [0]
    targets = [response.to(prompt.device, copy=True) for response in responses] or [prompt[:0]]
    tokens = torch.cat([part for ids in targets for part in (prompt[-1:], ids[:-1])])[: sum(lengths)]
    past = [state.leaves(retained.positions, grad) for state in retained.states]
    hidden, _ = model(tokens, past, segments=tuple(lengths))
    logprobs, entropies = model.logprobs(hidden, targets[0] if len(targets) == 1 else torch.cat(targets), temperature)
    return logprobs.split(lengths), entropies.split(lengths)


def pad_to_longest_rank(model: Decoder, items: Sequence[Any], nothing: Any) -> list[Any]:
    """Return ``items``, followed by nothing as often as prompts that stand beside this one have more of them.

    Ranks of all prompts hold parts of the same parameters, so all take part in every evaluation.
    """
    return [*items, *[nothing] * (model.agree(len(items)) - len(items))]


def empty_backward(model: Decoder, retained: Retained, first: int) -> None:
    """Take part in the prompt backward of prompts with more chunks than this one, whose own has come to ``first``."""
    past = [state.leaves(first, grad=False) for state in retained.states]
    _, updates = model(retained.prompt[:0], past, state_only=True)
    tensors = [tensor for update in updates for tensor in update.values() if tensor.requires_grad]
    torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])


def _kept_sum(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.sum()
    return torch.where(mask.to(values.device), values, torch.zeros_like(values)).sum()
