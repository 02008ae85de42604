"""The ``jsonl`` task: the user's own prompts from a text file, one JSON object a line, with responses or without.

    {"id": "a", "prompt": "text" | [ids] | [{"role": .., "content": ..}, ..], "tools": [{..}, ..]?,
     "responses": [{"text": ".." | "tokens": [ids], "reward": 1.0, "logprobs": [..]?, "loss_mask": [..]?}, ..]}

With ``rollout=sample`` responses are drawn, and rewarded by the function that ``reward`` names. A line's responses are
then not read, and its other keys are columns that the function gets, as in TRL:

    {"id": "a", "prompt": as above, "tools": as above, "answer": "..", "difficulty": 3}

UTF-8, with or without a byte order mark, LF or CRLF, not compressed; blank lines are skipped. Every line is read and
checked once at the start, so that a bad line 900 does not stop a run on its second day; only line offsets are kept.
Prompts come in the file's order, and again from the top after the last. Of more than ``group_size`` responses the first
are taken. Text is tokenised as it is, with no token added at either end; chat messages go through the chat template.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from longstraw.config import JsonlConfig, RunConfig, choose
from longstraw.data.jsonl_schema import Parser
from longstraw.data.reward import call_reward, load_reward
from longstraw.data.task import DataError, Example
from longstraw.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from longstraw.group import Group

T = TypeVar("T")
SHOWN = 100  # skipped lines listed in the description, beside their number
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
BOM = b"\xef\xbb\xbf"
LOOKED_AT = 2**26  # bytes of the first line that are read before a job starts


class JsonlTask:
    """Read groups, or prompts alone, from a JSON-lines file, whose line offsets are kept."""

    def __init__(self, config: RunConfig, data: JsonlConfig, tokenizer: Tokenizer) -> None:
        self._path, self._refresh_every = Path(data.path).expanduser(), config.refresh_every
        self._parser, self._tokenizer, self._config = Parser(config, data, tokenizer), tokenizer, config
        self._function = None if config.reward is None else load_reward(config.reward)
        self._places, self._numbers = array("Q"), array("Q")  # of the usable lines: byte offset and line number
        self._last: tuple[int, Group] | None = None
        skipped = self._index(data.on_error == "skip")
        if not self._places:
            why = "the file is empty"
            if skipped:
                why = f"the first of {len(skipped)} skipped: line {skipped[0]['line']}: {skipped[0]['reason']}"
            raise DataError(f"{self._path}: no usable line; {why}")
        self.description: dict[str, Any] = {
            "name": data.name,
            "path": str(self._path),
            "tokenizer": tokenizer.name,
            "prompts": len(self._places),
            "truncated_prompts": self._parser.truncated,
            "responses_left_out": self._parser.left_out,
            "skipped_lines": len(skipped),
            "skipped": skipped[:SHOWN],
        }

    def _index(self, skip: bool) -> list[dict[str, Any]]:
        """Check every line and keep the offset of each usable one; return the lines that were skipped."""
        parse = self._parser.group if self._config.rollout == "given" else self._parser.example
        seen: dict[str, int] = {}
        skipped: list[dict[str, Any]] = []
        for place, number, line in read_lines(self._path):
            try:
                name = parse(line, number).id
                if name in seen:
                    raise DataError(f"id {name!r} is that of line {seen[name]} too")
            except DataError as error:
                if not skip:
                    raise DataError(f"{self._path}:{number}: {error} (data.on_error=skip goes on without it)") from None
                skipped.append({"line": number, "reason": str(error)})
                continue
            seen[name] = number
            self._places.append(place)
            self._numbers.append(number)
        self._parser.counting = False  # from here on lines are read again
        return skipped

    def group(self, step: int) -> Group:
        """Return the group of this step; steps that share a retained prompt get the same one."""
        index = step // self._refresh_every % len(self._places)
        if self._last is None or self._last[0] != index:
            self._last = (index, self._read(index))
        return self._last[1]

    def example(self, number: int, split: str = "train") -> Example:
        """Return the prompt of usable line ``number``, from the top again after the last; the only split is train."""
        choose("split", split, ("train",))
        return self._parsed(number % len(self._places), self._parser.example)

    def reward(self, example: Example, responses: Sequence[NDArray[np.int64]]) -> list[float | None]:
        """Return what the user's function says of each response, whose text is without its stop token.

        Raises ``RewardError``.
        """
        if self._function is None:
            raise DataError("drawn responses need a reward: reward=package.module:function")
        source = example.source
        if isinstance(source, list) and isinstance(source[0], int):  # a function of text cannot read token ids
            source = self._tokenizer.decode(example.prompt)
        stop = self._config.stop or ()
        texts = [self._tokenizer.decode(ids[:-1] if ids[-1] in stop else ids) for ids in responses]
        shown = replace(example, source=source)
        return call_reward(self._function, shown, texts, responses, self._config.reward_timeout)

    def golden(self, example: Example) -> NDArray[np.int64]:
        """Return the token ids of the line's ``answer``; raise ``DataError`` where there is no such text."""
        answer = example.columns.get("answer")
        if not isinstance(answer, str) or not answer:
            raise DataError(f"{self._path}: {example.id}: no text under answer, which would be the right response")
        ids = self._tokenizer.encode(answer)
        if len(ids) > self._config.response_length:
            raise DataError(
                f"{self._path}: {example.id}: the answer has {len(ids)} tokens, and "
                f"response_length={self._config.response_length}"
            )
        return ids

    def _read(self, index: int) -> Group:
        return self._parsed(index, self._parser.group)

    def _parsed(self, index: int, parse: Callable[[bytes, int], T]) -> T:
        with self._path.open("rb") as file:
            file.seek(self._places[index])
            line = file.readline()
        number = self._numbers[index]
        try:
            return parse(line, number)
        except DataError as error:
            raise DataError(f"{self._path}:{number}: {error}; the file has changed since the run began") from None


def check_jsonl(config: RunConfig, data: JsonlConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ``DataError`` or ``OSError`` for a file that cannot be read, or whose first line cannot be used."""
    path = Path(data.path).expanduser()
    for _, number, line in read_lines(path, LOOKED_AT):
        if data.on_error == "stop" and len(line) < LOOKED_AT:
            try:
                Parser(config, data, tokenizer).check(line)
            except DataError as error:
                raise DataError(f"{path}:{number}: {error} (data.on_error=skip goes on without it)") from None
        return
    raise DataError(f"{path}: no usable line; the file is empty")


def read_lines(path: Path, longest: int = -1) -> Iterator[tuple[int, int, bytes]]:
    """Yield byte offset, line number and content of every line that is not blank, at most ``longest`` bytes of it."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no plain file" if path.exists() else "not there"
        raise FileNotFoundError(f"data.path={path} is {what}; give a file with one JSON object a line")
    with path.open("rb") as file:
        head = file.read(6)
        for magic, name in PACKED.items():
            if head.startswith(magic):
                raise DataError(f"{path} is packed with {name}, which is not read; unpack it first")
        place = len(BOM) if head.startswith(BOM) else 0
        file.seek(place)
        for number, line in enumerate(iter(lambda: file.readline(longest), b""), start=1):
            if line.strip():
                yield place, number, line
            place += len(line)
