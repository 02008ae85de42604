"""Prompts [B, P] of keys and values with a one-token answer [B] each, drawn from a seed and a step.

Token ids: keys, then values, then a question mark and a filler.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

KEYS, VALUES, VOCABULARY = 20, 8, 64
QUESTION, FILLER = KEYS + VALUES, KEYS + VALUES + 1

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def shifted(rng: np.random.Generator, count: int, pairs: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Key value key value ..; asked is the value after that of a key. Only the query side has to learn."""
    keys, values = _pairs(rng, count, pairs)
    body = np.stack([keys, KEYS + values], -1).reshape(count, -1)
    at, lines = rng.integers(pairs, size=count), np.arange(count)
    return _asked(body, keys[lines, at]), KEYS + (values[lines, at] + 1) % VALUES


def gap(rng: np.random.Generator, count: int, pairs: int = 4, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """A value stands ``width`` positions behind its key, with fillers between; asked is the value of a key."""
    keys, values = _pairs(rng, count, pairs)
    fillers = np.full((count, pairs, width - 1), FILLER)
    body = np.concatenate([keys[..., None], fillers, KEYS + values[..., None]], -1).reshape(count, -1)
    at, lines = rng.integers(pairs, size=count), np.arange(count)
    return _asked(body, keys[lines, at]), KEYS + values[lines, at]


def duplicate(rng: np.random.Generator, count: int, pairs: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Key value key value ..: one key comes twice, and asked is the value after its second occurrence."""
    keys, values = _pairs(rng, count, pairs)
    both = np.stack([np.sort(rng.permutation(pairs)[:2]) for _ in range(count)])
    lines = np.arange(count)
    keys[lines, both[:, 1]] = keys[lines, both[:, 0]]
    body = np.stack([keys, KEYS + values], -1).reshape(count, -1)
    return _asked(body, np.full(count, QUESTION)), KEYS + values[lines, both[:, 1]]


def chain(rng: np.random.Generator, count: int, pairs: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Key value .., then alias key ..: asked is the value of the key that an alias stands for, two hops."""
    names = np.stack([rng.permutation(KEYS)[: 2 * pairs] for _ in range(count)])
    keys, aliases = names[:, :pairs], names[:, pairs:]
    values = rng.integers(VALUES, size=(count, pairs))
    meant = np.stack([rng.permutation(pairs) for _ in range(count)])
    given = np.stack([keys, KEYS + values], -1).reshape(count, -1)
    passed = np.stack([aliases, np.take_along_axis(keys, meant, 1)], -1).reshape(count, -1)
    at, lines = rng.integers(pairs, size=count), np.arange(count)
    return _asked(np.concatenate([given, passed], 1), aliases[lines, at]), KEYS + values[lines, meant[lines, at]]


TASKS: dict[str, Draw] = {"shifted": shifted, "gap": gap, "duplicate": duplicate, "chain": chain}


def draw(task: str, seed: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` prompts [count, P] of a task and their answers [count]."""
    prompts, answers = TASKS[task](np.random.default_rng([seed, step]), count)
    return torch.from_numpy(prompts), torch.from_numpy(answers)


def repeated_lookup(seed: int, step: int, count: int, length: int = 40, keys: int = 8) -> tuple[Tensor, Tensor]:
    """Return the warm-up's sequences [count, length] of pairs, and the value to predict at known keys, else -100."""
    rng = np.random.default_rng([seed, step, 77])
    names, values = _pairs(rng, count, keys)
    which = rng.integers(keys, size=(count, length // 2))
    name, value = (np.take_along_axis(x, which, 1) for x in (names, KEYS + values))
    seen = np.stack([(which[:, :t] == which[:, t : t + 1]).any(1) for t in range(which.shape[1])], 1)
    targets = np.full((count, length), -100)
    targets[:, 0::2] = np.where(seen, value, -100)
    return torch.from_numpy(np.stack([name, value], -1).reshape(count, -1)), torch.from_numpy(targets)


def _pairs(rng: np.random.Generator, count: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    keys = np.stack([rng.permutation(KEYS)[:pairs] for _ in range(count)])
    return keys, rng.integers(VALUES, size=(count, pairs))


def _asked(body: np.ndarray, last: np.ndarray) -> np.ndarray:
    return np.concatenate([body, np.full((len(body), 1), QUESTION), last[:, None]], 1)
