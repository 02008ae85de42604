"""The ``needle`` task: one sentence with a number, hidden in real text, and a question about it at the end.

The prompt has exactly ``prompt_positions`` tokens:

    hay .. "\\nThe magic number of amber is 481029.\\n" .. hay "\\nWhat is the magic number of amber?\\n"

Word, number, depth and the stretch of hay are drawn from seed and step. Responses are constructed, not sampled:
right ones state the number, wrong ones have one digit changed. The reward is computed from the response's text: 1.0 if
the number occurs in it, not as part of a longer one, else 0.0.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstraw.config import NeedleConfig, RunConfig
from longstraw.data.haystack import read_haystack
from longstraw.data.task import DataError
from longstraw.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from longstraw.group import Group

WORDS = tuple(  # five letters each, so that in bytes every prompt has the same least length
    word
    for line in (
        "amber birch brook cedar chalk cider clove coral crane delta ember fjord flint glass grove heron honey ivory",
        "lemon linen maple marsh mirth nylon ocean olive opals orbit otter pearl plume quail raven robin slate solar",
    )
    for word in line.split()
)
DIGITS = 6
SPARE_HAY = 2**18  # tokens read beyond what a short prompt needs, so that prompts of different steps differ
TRIES = 100


def check_room(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise ``DataError`` if the prompt could be too short for needle and question, or a response for an answer."""
    least = max(sum(map(len, needle_texts(tokenizer, word, "8" * DIGITS))) for word in WORDS)
    if config.prompt_positions < least:
        raise DataError(
            f"a needle and its question take {least} tokens, and context={config.context} less "
            f"response_length={config.response_length} leaves {config.prompt_positions} for the prompt; use "
            f"context={least + config.response_length} or more"
        )
    least = len(tokenizer.encode("8" * DIGITS))
    if config.response_length < least:
        raise DataError(f"response_length={config.response_length}: the needle's number takes {least} tokens")


def needle_texts(tokenizer: Tokenizer, word: str, value: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of the needle and of the question."""
    needle = tokenizer.encode(f"\nThe magic number of {word} is {value}.\n")
    return needle, tokenizer.encode(f"\nWhat is the magic number of {word}?\n")


class NeedleTask:
    """Draw groups for one needle in a haystack; ``score`` rewards any response to a step's prompt."""

    def __init__(self, config: RunConfig, data: NeedleConfig, tokenizer: Tokenizer) -> None:
        self._config, self._data, self._tokenizer = config, data, tokenizer
        check_room(config, tokenizer)
        wanted = max(config.prompt_positions, SPARE_HAY)
        self._text, self._hay, source = read_haystack(data.haystack, tokenizer, wanted)
        self._words = [word for word in WORDS if f"magic number of {word}" not in self._text]
        if not self._words:
            raise DataError(
                f"data.haystack: {source} already contains a magic number for every word that the needle could use"
            )
        self.description: dict[str, Any] = {
            "name": data.name,
            "tokenizer": tokenizer.name,
            "haystack": source,
            "haystack_tokens": len(self._hay),
        }

    def _index(self, step: int) -> int:
        return step // self._config.refresh_every

    def _draw(self, step: int) -> tuple[random.Random, str, str]:
        """Return a generator for the rest of the step's prompt, and its word and number."""
        rng = random.Random(f"needle {self._config.seed} prompt {self._index(step)}")
        return rng, rng.choice(self._words), str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))

    def _stretch(self, rng: random.Random, length: int) -> NDArray[np.int64]:
        """Return ``length`` tokens of hay from a random position on, continued at the beginning after its end."""
        start = rng.randrange(len(self._hay))
        head = self._hay[start : start + length]
        return np.concatenate([head, np.resize(self._hay, length - len(head))])

    def group(self, step: int) -> Group:
        """Return the group of this step; steps that share a retained prompt get the same one."""
        import torch

        from longstraw.group import Group

        rng, word, value = self._draw(step)
        needle, question = needle_texts(self._tokenizer, word, value)
        length = self._config.prompt_positions - len(needle) - len(question)
        if length < 0:  # the tokenizer needs more tokens for this number than for the one measured
            raise DataError(f"context={self._config.context}: {-length} tokens short of needle and question")
        hay = self._stretch(rng, length)
        cut = round(rng.uniform(*self._data.depth) * length)
        prompt = np.concatenate([hay[:cut], needle, hay[cut:], question])
        responses, rewards = self._responses(step, word, value)
        return Group(
            prompt=torch.from_numpy(prompt),
            responses=[torch.from_numpy(response) for response in responses],
            rewards=rewards,
            id=f"needle-{self._config.seed}-{self._index(step)}",
        )

    def score(self, step: int, response: NDArray[np.int64]) -> float:
        """Return the reward of a response to this step's prompt: 1.0 if it holds the right number, else 0.0."""
        return _holds(self._tokenizer.decode(response), self._draw(step)[2])

    def _responses(self, step: int, word: str, value: str) -> tuple[list[NDArray[np.int64]], list[float]]:
        size, longest = self._config.group_size, self._config.response_length
        rng = random.Random(f"needle {self._config.seed} responses {self._index(step)}")
        right = int(self._data.correct_fraction * size + 0.5)
        if 0 < self._data.correct_fraction < 1:  # equal rewards have no gradient
            right = min(max(right, 1), size - 1)
        rewards = [1.0] * right + [0.0] * (size - right)
        rng.shuffle(rewards)
        lengths = [longest] * size
        if self._data.ragged:
            least = len(self._tokenizer.encode(value))
            lengths = [rng.randint(least, longest) for _ in range(size)]
            lengths[rng.randrange(size)] = longest  # one reaches the full context
        return [self._response(rng, word, value, *pair) for pair in zip(lengths, rewards, strict=True)], rewards

    def _response(self, rng: random.Random, word: str, value: str, length: int, reward: float) -> NDArray[np.int64]:
        """Return a response of exactly ``length`` tokens that earns ``reward``: an answer, then text."""
        encode = self._tokenizer.encode
        for _ in range(TRIES):
            said = value if reward else _near_miss(rng, value)
            sentence, number = encode(f"The magic number of {word} is {said}."), encode(said)
            answer = sentence if len(sentence) <= length else number
            text = np.concatenate([answer, encode("\n"), self._stretch(rng, length)])[:length]
            if _holds(self._tokenizer.decode(text), value) == reward:
                return text
        raise DataError(f"data.haystack: no stretch of it without the number {value}, so no wrong answer can be made")


def _holds(text: str, value: str) -> float:
    return 1.0 if re.search(rf"(?<!\d){value}(?!\d)", text, re.ASCII) else 0.0


def _near_miss(rng: random.Random, value: str) -> str:
    """Return ``value`` with one digit changed."""
    at = rng.randrange(len(value))
    return value[:at] + rng.choice([digit for digit in "123456789" if digit != value[at]]) + value[at + 1 :]
