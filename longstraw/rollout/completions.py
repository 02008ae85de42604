"""Responses from ``/v1/completions``: as token ids with log-probabilities (vLLM), or as text that is made tokens again.

Token ids go in and come out, so that nothing is tokenised twice. One streamed request draws a whole group; of a request
that breaks off, or takes too long, the finished responses are kept and only the others are asked for again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from longstraw.data.tokenizer import Tokenizer
from longstraw.rollout.client import Client, RefusedError, UnavailableError
from longstraw.rollout.sampling import Samples, Sampling

PATH = "/v1/completions"
SLACK = 1e-3  # a log-probability of 0 that was rounded may come out above it
SEEDS = 2**62  # below it: seed + index still fits in 64 bits with a sign
FINISHED = ("stop", "length")

Progress = Callable[[int], None]


@dataclass
class Answer:
    """One response as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None  # stop, length, or None as long as it goes on


@dataclass(frozen=True)
class Asked:
    """What is asked of a server's ``model``: responses to a prompt of token ids."""

    model: str
    prompt: list[int]
    sampling: Sampling
    vocab_size: int

    def body(self) -> dict[str, Any]:
        """Return the request but its seed; all is said, because a server's own defaults may be a checkpoint's."""
        how = self.sampling
        return {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": how.max_new_tokens,
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k or 0,
            "min_p": how.min_p,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(how.stop),
            "ignore_eos": True,  # only the tokens of ``stop`` end a response
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }

    def fault(self, answer: Answer) -> str | None:
        """Return what no answer of the right model could have, or None."""
        tokens, room = answer.tokens, self.sampling.max_new_tokens
        if not 0 < len(tokens) <= room:
            return f"has {len(tokens)} tokens, and {room} were asked for at most"
        odd = [token for token in tokens if type(token) is not int or not 0 <= token < self.vocab_size]
        if odd:
            return f"has the token id {odd[0]!r}, and the vocabulary has {self.vocab_size}"
        bad = [lp for lp in answer.logprobs if not isinstance(lp, int | float) or not -math.inf < lp <= SLACK]
        if bad:
            return f"has the log-probability {bad[0]!r}"
        if answer.ended == "stop" and tokens[-1] not in self.sampling.stop:
            return f"ended with token {tokens[-1]}, which is none of stop={list(self.sampling.stop)}"
        return None


def ask_tokens(client: Client, asked: Asked, seeds: Sequence[int], progress: Progress) -> Samples:
    """Return a response for each of ``seeds``; ``progress`` is called with numbers of tokens as they come.

    Of several responses a server makes the seeds from the first one's, as vLLM does, so that a response that is asked
    for again, alone, is the same.
    """
    answers: dict[int, Answer] = {}

    def attempt() -> None:
        missing = [i for i in range(len(seeds)) if i not in answers]
        requests = [[i] for i in missing] if answers else [missing]
        reasons = [_request(client, asked, seeds[0] % SEEDS, indices, answers, progress) for indices in requests]
        if len(answers) < len(seeds):
            raise next(reason for reason in reasons if reason is not None)

    client.repeat(f"{len(seeds)} responses", attempt)
    drawn = [answers[i] for i in range(len(seeds))]
    return Samples(
        [torch.tensor(answer.tokens) for answer in drawn],
        [torch.tensor(answer.logprobs) for answer in drawn],
        [answer.ended == "stop" for answer in drawn],
    )


def _request(
    client: Client, asked: Asked, seed: int, indices: list[int], answers: dict[int, Answer], progress: Progress
) -> UnavailableError | None:
    """Ask for the responses ``indices``; add those that ended to ``answers`` and return why others are missing."""
    found = {i: Answer() for i in indices}
    body = asked.body() | {"n": len(indices), "seed": seed + indices[0]}
    if not client.config.seeds:
        del body["seed"]
    failure: UnavailableError | None = None
    try:
        _stream(client, body, found, progress)
    except UnavailableError as error:
        failure = error
    for i, answer in found.items():
        if answer.ended not in FINISHED:
            failure = failure or UnavailableError(f"response {i} did not end: {answer.ended}")
        elif (wrong := asked.fault(answer)) is not None:
            failure = UnavailableError(f"response {i} {wrong}")
        else:
            answers[i] = answer
    return failure


def _stream(client: Client, body: dict[str, Any], found: dict[int, Answer], progress: Progress) -> None:
    """Add what the server sends to the answers that are ``found``, by index from the lowest."""
    first, prompt = min(found), body["prompt"]
    for event in client.stream(PATH, body):
        for choice in event.get("choices") or ():
            answer = found.get(first + choice["index"]) if isinstance(choice.get("index"), int) else None
            if answer is None:
                raise UnavailableError(f"an answer to response {choice.get('index')!r}, which was not asked for")
            read = choice.get("prompt_token_ids")
            if read is not None and read != prompt:
                raise RefusedError(f"it read a prompt of {len(read)} other tokens, and was asked about {len(prompt)}")
            tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
            if not isinstance(tokens, list) or not isinstance(logprobs, list) or len(tokens) != len(logprobs):
                raise RefusedError(
                    "it sends no token ids with log-probabilities; a server of text alone needs server.api=text"
                )
            answer.tokens += tokens
            answer.logprobs += logprobs
            answer.ended = choice.get("finish_reason") or answer.ended
            progress(len(tokens))


def ask_text(client: Client, asked: Asked, seeds: Sequence[int], tokenizer: Tokenizer) -> Samples:
    """Return a response for each of ``seeds`` from a server of text alone; without log-probabilities.

    One request a response. Tokens are made of the text again, the end token added to what ended by itself, and are as
    many as were asked for at most. Raises ``RefusedError`` where the server counts other tokens in the prompt's text
    than ``tokenizer``, because it adds some or cuts it.
    """
    text = tokenizer.decode(np.asarray(asked.prompt, dtype=np.int64))
    positions = len(tokenizer.encode(text))
    found = Samples([], [], [])
    for i, seed in enumerate(seeds):
        body = _text_body(asked, text) | ({"seed": seed % 2**32} if client.config.seeds else {})
        choice = client.repeat(f"response {i}", partial(_text_answer, client, body, positions))
        ended = choice["finish_reason"] == "stop"
        tokens = tokenizer.encode(choice["text"]).tolist() + list(asked.sampling.stop)[: int(ended)]
        if not tokens:
            raise RefusedError(f"response {i} is empty, and there is no end token to stand alone: give stop=[ID]")
        kept = tokens[: asked.sampling.max_new_tokens]
        found.responses.append(torch.tensor(kept))
        found.ended.append(ended and len(kept) == len(tokens))
    return found


def _text_body(asked: Asked, text: str) -> dict[str, Any]:
    """Return a request but its seed; ``transformers serve`` draws only by the generation config that comes with it."""
    how = asked.sampling
    drawing: dict[str, Any] = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p}
    drawing |= {"top_k": how.top_k or 0, "min_p": how.min_p or None, "max_new_tokens": how.max_new_tokens}
    drawing |= {"eos_token_id": list(how.stop)} if how.stop else {}
    body = {"model": asked.model, "prompt": text, "max_tokens": how.max_new_tokens, "temperature": how.temperature}
    return {**body, "generation_config": json.dumps(drawing)}


def _text_answer(client: Client, body: dict[str, Any], positions: int) -> dict[str, Any]:
    answer = client.post(PATH, body)
    try:
        (choice,) = answer["choices"]
        text, reason = choice["text"], choice["finish_reason"]
    except (TypeError, KeyError, ValueError):
        raise UnavailableError(f"an answer without one choice: {str(answer)[:200]}") from None
    if not isinstance(text, str) or reason not in FINISHED:
        raise UnavailableError(f"a choice that is no text or did not end: {str(choice)[:200]}")
    read = (answer.get("usage") or {}).get("prompt_tokens", positions)
    if read != positions:
        raise RefusedError(f"it read a prompt of {read} tokens, and was asked about {positions}")
    return dict(choice)
