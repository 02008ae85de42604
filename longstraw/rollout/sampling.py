"""Responses drawn from a retained prompt: several branches in lockstep, without a second prefill.

Each token costs one evaluation of one position a branch. The prompt's state is shared and never written; what a branch
adds is dropped with it. Nothing here knows a layer: layers know branches by their past (``ops.past.BranchPast``).

n branches, R response positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.models.decoder import Decoder
from longstraw.observer import Observer
from longstraw.ops.host_offload import to_host
from longstraw.step import Retained, pad_to_longest_rank


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Of the tempered distribution softmax(logits / temperature), ``top_k`` keeps the k most likely tokens, then ``top_p``
    the most likely ones that together reach p, then ``min_p`` those at least so likely, relative to the likeliest. What
    is kept is drawn from. The defaults keep every token. Temperature 0 takes the likeliest token.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[int, ...] = ()  # tokens that end a response, as its last token
    batch: int | None = None  # branches at a time, all of the same prompt; None: all

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf")),
            ("top_p", self.top_p, 0 < self.top_p <= 1),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1),
            ("min_p", self.min_p, 0 <= self.min_p <= 1),
            ("batch", self.batch, self.batch is None or self.batch >= 1),
        ):
            if not valid:
                raise ValueError(
                    f"{name}={value}: max_new_tokens, top_k and batch are 1 or more, temperature is 0 (the likeliest "
                    "token) or more, top_p is above 0 and at most 1, min_p from 0 to 1"
                )

    @property
    def keeps_all(self) -> bool:
        """Whether every token can be drawn, so that log-probabilities are those of the distribution drawn from."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k is None and self.min_p == 0


@dataclass(frozen=True)
class Samples:
    """Drawn responses, on the host."""

    responses: list[Tensor]  # [R] each, the stop token included
    logprobs: list[Tensor]  # [R] each, under softmax(logits / temperature); at 0, under softmax(logits); none: unknown
    ended: list[bool]  # by a stop token; the others are as long as allowed


def sample(
    model: Decoder,
    retained: Retained,
    n: int = 8,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    stop: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    batch: int | None = None,
) -> Samples:
    """Draw ``n`` responses to a retained prompt; see ``Sampling`` for how.

    ``seeds`` are one a response, 0 to n - 1 by default: a response depends on its own seed only, up to rounding, not on
    how many are drawn beside it. Memory grows by the rows of ``batch`` branches (None: all) of ``max_new_tokens``.
    """
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, tuple(stop), batch)
    seeds = range(n) if seeds is None else seeds
    if len(seeds) != n or n < 1:
        raise ValueError(f"{len(seeds)} seeds for n={n} responses; give one a response, and draw at least one")
    return draw(model, retained, seeds, sampling)


@torch.no_grad()
def draw(
    model: Decoder, retained: Retained, seeds: Sequence[int], sampling: Sampling, *, observer: Observer | None = None
) -> Samples:
    """Draw a response for each of ``seeds``; ``observer`` is called with what is done."""
    observer = observer or Observer()
    retained.check()
    size = sampling.batch or max(len(seeds), 1)
    found = Samples([], [], [])
    parts = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    with observer.verb("sample", len(seeds) * sampling.max_new_tokens):
        for together in pad_to_longest_rank(model, parts, ()):
            part = draw_together(model, retained, together, sampling, range(sampling.max_new_tokens), observer=observer)
            found.responses.extend(part.responses)
            found.logprobs.extend(part.logprobs)
            found.ended.extend(part.ended)
    return found


def draw_together(
    model: Decoder,
    retained: Retained,
    seeds: Sequence[int],
    sampling: Sampling,
    tokens: Iterable[int],
    *,
    observer: Observer,
) -> Samples:
    """Draw a response for each of ``seeds`` in lockstep; ``tokens`` rise, and only a simulation leaves some out."""
    drawing = Drawing(model, retained, seeds, sampling)
    observer.holds(drawing.pasts)
    for at in tokens:
        if not drawing.going:
            break
        evaluated = len(drawing.alive)
        drawing.step(at)
        observer.advance(evaluated)
    return drawing.samples()


class Drawing:
    """Branches of one prompt drawn in lockstep. One that has ended is dropped and costs nothing more.

    Where ranks share the prompt, each evaluates its part of the branches, and all of them know what was drawn.
    """

    def __init__(self, model: Decoder, retained: Retained, seeds: Sequence[int], sampling: Sampling):
        n, room, device = len(seeds), sampling.max_new_tokens, retained.prompt.device
        self.pasts = [state.branch(n, model.split(room)) for state in retained.states]
        self.alive = list(range(n))  # the branches that have not ended, rising
        self._model, self._sampling = model, sampling
        self._uniforms = _uniforms(seeds, room).to(device)
        self._stop = torch.tensor(sampling.stop, dtype=torch.long, device=device)
        self._places = torch.arange(n, device=device)  # ``alive``, on the device
        self._last = retained.prompt[-1:].expand(n)
        self._tokens = torch.zeros(n, room, dtype=torch.long, device=device)
        inner = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
        self._logprobs = torch.zeros(n, room, dtype=inner, device=device)
        self._lengths, self._ended = [room] * n, [False] * n

    @property
    def going(self) -> bool:
        """Whether a branch has not ended, of this prompt or of one beside it: all ranks evaluate until the last has."""
        return bool(self._model.agree(len(self.alive)))

    def step(self, at: int) -> None:
        """Draw token ``at`` of each branch that has not ended."""
        for past in self.pasts:
            past.added = at
        hidden, updates = self._model(self._last, self.pasts)
        for past, update in zip(self.pasts, updates, strict=True):
            past.advance(update)
        self._last, logprobs = self._next_tokens(hidden, self._uniforms[self._places, at])
        self._tokens[self._places, at], self._logprobs[self._places, at] = self._last, logprobs
        if self._sampling.stop:
            self._drop(torch.isin(self._last, self._stop).tolist(), at)

    def samples(self) -> Samples:
        """Return what was drawn."""
        rows = (zip(x, self._lengths, strict=True) for x in (self._tokens, self._logprobs))
        responses, logprobs = ([to_host(row[:length]) for row, length in of] for of in rows)
        return Samples(responses, logprobs, self._ended)

    def _next_tokens(self, hidden: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities [n] of all branches after ``hidden`` [t, d] of those evaluated here."""
        context, chunk = self._model.ops.context, self._model.split(len(uniforms))
        logits = self._model.logits(hidden, len(uniforms), self._sampling.temperature or 1.0)
        tokens, logprobs = draw_tokens(logits, uniforms[chunk.own], self._sampling)
        return context.gather(tokens, chunk), context.gather(logprobs, chunk)

    def _drop(self, ends: list[bool], at: int) -> None:
        """Drop the branches of ``alive`` that token ``at`` ended."""
        going = [i for i, end in enumerate(ends) if not end]
        if len(going) == len(ends):
            return
        for branch, end in zip(self.alive, ends, strict=True):
            if end:
                self._lengths[branch], self._ended[branch] = at + 1, True
        self.alive = [self.alive[i] for i in going]
        self._places, self._last = self._places[going], self._last[going]
        for past in self.pasts:
            past.keep(going)


def _uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return ``count`` numbers in [0, 1) for each of ``seeds``, float64 [n, count]: the same on every device."""
    uniforms = torch.empty(len(seeds), count, dtype=torch.float64)
    for row, seed in zip(uniforms, seeds, strict=True):
        torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), out=row)
    return uniforms


def draw_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return a token [n] for each line of tempered ``logits`` [n, V], and its log-probability [n] over all of them.

    The token is where the kept probabilities, added in the vocabulary's order, pass ``uniforms`` [n] of their sum.
    """
    logprobs = logits.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        total = _kept(logprobs.double().exp(), sampling).cumsum(-1)
        highest = total[:, -1:]
        target = torch.minimum(uniforms.unsqueeze(-1) * highest, torch.nextafter(highest, torch.zeros_like(highest)))
        tokens = torch.searchsorted(total, target, right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # NaN is above every sum; the loss will say so
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _kept(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Return ``probabilities`` [n, V] with 0 for what ``sampling`` does not keep; what is kept need not sum to 1."""
    kept = probabilities
    if sampling.top_k is not None and sampling.top_k < kept.shape[-1]:
        least = kept.topk(sampling.top_k, -1).values[:, -1:]
        kept = torch.where(kept < least, 0, kept)
    if sampling.top_p < 1:
        ordered, places = kept.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # what likelier tokens reach
        ordered = torch.where(before >= sampling.top_p * ordered.sum(-1, keepdim=True), 0, ordered)
        kept = torch.zeros_like(kept).scatter_(-1, places, ordered)
    if sampling.min_p > 0:
        kept = torch.where(kept < sampling.min_p * kept.amax(-1, keepdim=True), 0, kept)
    return kept
