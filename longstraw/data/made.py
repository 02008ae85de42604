"""Made tasks with a checkable answer, hidden in real text, at any exact prompt length and difficulty.

    lookup   one of ``keys`` statements is asked for: "The code of amber is B."
    chain    a value is passed on over ``hops`` names, among ``chains`` such chains (RULER's variable tracking)
    count    how many of 1 to ``most`` marked lines there are; the reward is 0.75 ** |error|
    multi    ``needles`` of ``keys`` statements are asked for, in order; the reward is the fraction of right places

Answers of all but ``count`` are one of ``symbols`` letters, so that guessing among the letters earns 1 / ``symbols``.
Of a response the first letters or number count that stand alone: to list all of them earns nothing more.
The prompt goes through the tokenizer's chat template where it has one, and has exactly ``prompt_positions`` tokens.
Held-out prompts have their own stream of draws and their own last fifth of the hay.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longstraw.config import MadeConfig, RunConfig, choose
from longstraw.data.haystack import read_haystack
from longstraw.data.needle import SPARE_HAY, WORDS
from longstraw.data.task import SPLITS, DataError, Example
from longstraw.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from longstraw.group import Group

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TRAIN_SHARE = 0.8  # of the hay
EXAMINED = 32  # prompts of each split that are made before a job begins
MARK = "\nThe bell rang once more.\n"


class _Drawn(NamedTuple):
    """What a prompt is made of, beside hay; ``rng`` goes on to draw that."""

    rng: random.Random
    head: NDArray[np.int64]
    needles: list[NDArray[np.int64]]
    tail: NDArray[np.int64]
    asked: set[int]  # the numbers of the needles that are asked for
    answer: str
    room: int  # tokens of hay


class MadeTask:
    """Draw prompts of one made task; ``reward`` checks a response's text."""

    def __init__(self, config: RunConfig, data: MadeConfig, tokenizer: Tokenizer) -> None:
        self._config, self._data, self._tokenizer = config, data, tokenizer
        self._before, self._after = tokenizer.chat_parts() or ("", "")
        wanted = 2 * max(config.prompt_positions, SPARE_HAY)
        text, self._hay, source = read_haystack(data.haystack, tokenizer, wanted)
        if "code of" in text or MARK.strip() in text:
            self._words = [word for word in WORDS if f"code of {word}" not in text]
            if len(self._words) < _words_needed(data) or (data.name == "count" and MARK.strip() in text):
                raise DataError(f"data.haystack: {source} holds the statements of data={data.name} already")
        else:
            self._words = list(WORDS)
        self.description: dict[str, Any] = {
            "name": data.name,
            "tokenizer": tokenizer.name,
            "haystack": source,
            "haystack_tokens": len(self._hay),
            "chance": 1 / data.most if data.name == "count" else 1 / data.symbols,
        }
        drawn = [self._drawn(number, split) for split in SPLITS for number in range(EXAMINED)]
        self._check_room(min(one.room for one in drawn))  # names differ in length
        for one in drawn:
            self._answer_ids(one.answer)

    def group(self, step: int) -> Group:
        """Refuse: the task has no responses."""
        raise DataError(f"data={self._data.name} has prompts and no responses: add rollout=sample")

    def example(self, number: int, split: str = "train") -> Example:
        """Return prompt ``number`` of ``split`` (train | heldout), the same in any order and process."""
        choose("split", split, SPLITS)
        data = self._data
        rng, head, needles, tail, asked, answer, room = self._drawn(number, split)
        self._check_room(room)
        hay = self._stretch(rng, room, split)
        places = sorted(round(rng.uniform(*data.depth) * room) for _ in needles)
        pieces, evidence, last, length = [head], [], 0, len(head)
        for i, (needle, place) in enumerate(zip(needles, places, strict=True)):
            pieces += [hay[last:place], needle]
            length += place - last
            if i in asked:
                evidence.append([length, length + len(needle)])
            length, last = length + len(needle), place
        prompt = np.concatenate([*pieces, hay[last:], tail])
        meta = {
            "length": len(prompt),
            "depth": evidence[0][0] / len(prompt),
            "difficulty": {"lookup": data.keys, "chain": data.hops, "count": data.most, "multi": data.needles}[
                data.name
            ],
            "evidence": evidence,
            "split": split,
        }
        name = f"{data.name}-{self._config.seed}-{split}-{number}"
        return Example(prompt, name, {"answer": answer}, meta)

    def reward(self, example: Example, responses: Sequence[NDArray[np.int64]]) -> list[float | None]:
        """Return from 0.0 to 1.0 for each response: see the module for how each task grades."""
        answer = example.columns["answer"]
        return [grade(self._data.name, self._tokenizer.decode(ids), answer) for ids in responses]

    def golden(self, example: Example) -> NDArray[np.int64]:
        """Return the token ids of the right answer."""
        return self._answer_ids(example.columns["answer"])

    def _answer_ids(self, answer: str) -> NDArray[np.int64]:
        ids = self._tokenizer.encode(answer)
        if len(ids) > self._config.response_length:
            raise DataError(f"response_length={self._config.response_length}: an answer takes {len(ids)} tokens")
        return ids

    def _drawn(self, number: int, split: str) -> _Drawn:
        data, encode = self._data, self._tokenizer.encode
        rng = random.Random(f"{data.name} {self._config.seed} {split} {number}")
        statements, asked, question, answer = _draw(rng, data, self._words)
        needles = [encode(statement) for statement in statements]
        head, tail = encode(self._before), encode(question + self._after)
        room = self._config.prompt_positions - len(head) - len(tail) - sum(map(len, needles))
        return _Drawn(rng, head, needles, tail, asked, answer, room)

    def _check_room(self, room: int) -> None:
        context = self._config.context
        if room < 0:
            raise DataError(f"context={context}: {-room} tokens short of data={self._data.name}; use {context - room}")

    def _stretch(self, rng: random.Random, length: int, split: str) -> NDArray[np.int64]:
        border = int(len(self._hay) * TRAIN_SHARE)
        part = self._hay[:border] if split == "train" else self._hay[border:]
        start = rng.randrange(len(part))
        head = part[start : start + length]
        return np.concatenate([head, np.resize(part, length - len(head))])


def grade(name: str, text: str, answer: str) -> float:
    """Return the reward of a response's ``text`` to the made task ``name``."""
    if name == "count":
        number = re.search(r"(?<!\d)\d{1,9}(?!\d)", text, re.ASCII)
        return 0.75 ** abs(int(number[0]) - int(answer)) if number else 0.0
    wanted = answer.split()
    said = re.findall(r"(?<!\w)[A-Z](?!\w)", text)[: len(wanted)]
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)


def _words_needed(data: MadeConfig) -> int:
    return {"chain": data.chains * (data.hops + 1), "count": 0}.get(data.name, data.keys)


def _draw(rng: random.Random, data: MadeConfig, words: list[str]) -> tuple[list[str], set[int], str, str]:
    """Return the statements in their order, the indices of those that are asked for, question and answer."""
    if data.name == "count":
        count = rng.randint(1, data.most)
        return [MARK] * count, set(range(count)), "\nHow many times did the bell ring?\nAnswer: ", str(count)
    names = rng.sample(words, _words_needed(data))
    if data.name == "chain":
        return _chains(rng, data, names)
    letters = [rng.choice(LETTERS[: data.symbols]) for _ in names]
    statements = [f"\nThe code of {name} is {letter}.\n" for name, letter in zip(names, letters, strict=True)]
    asked = rng.sample(range(len(names)), data.needles if data.name == "multi" else 1)
    listed = ", ".join(names[i] for i in asked)
    return statements, set(asked), f"\nWhat is the code of {listed}?\nAnswer: ", " ".join(letters[i] for i in asked)


def _chains(rng: random.Random, data: MadeConfig, names: list[str]) -> tuple[list[str], set[int], str, str]:
    """Weave the chains into each other; within each a name is stated before it is referred to."""
    size = data.hops + 1
    chains = [names[i * size : (i + 1) * size] for i in range(data.chains)]
    letters = [rng.choice(LETTERS[: data.symbols]) for _ in chains]
    order = [i for i in range(data.chains) for _ in range(size)]
    rng.shuffle(order)
    statements: list[str] = []
    asked, done, evidence = rng.randrange(data.chains), [0] * data.chains, set()
    for i in order:
        at = done[i]
        value = f"that of {chains[i][at - 1]}" if at else letters[i]
        if i == asked:
            evidence.add(len(statements))
        statements.append(f"\nThe code of {chains[i][at]} is {value}.\n")
        done[i] += 1
    return statements, evidence, f"\nWhat is the code of {chains[asked][-1]}?\nAnswer: ", letters[asked]
