"""Convert text to token ids and back: as bytes, or with a checkpoint's tokenizer, chat template included.

The only module that imports transformers' tokenizers. Only local files are read, and no code of a checkpoint is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longstraw.data.task import DataError

BYTES = 256
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
)  # a checkpoint with a tokenizer has one of them


class Tokenizer(Protocol):
    """What tasks need from a tokenizer. No tokens are added at either end of a text."""

    name: str

    def encode(self, text: str) -> NDArray[np.int64]: ...

    def decode(self, ids: NDArray[np.int64]) -> str: ...

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> NDArray[np.int64]: ...

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, answer: bool) -> str: ...

    def special_ids(self) -> list[int]: ...

    def chat_parts(self) -> tuple[str, str] | None: ...


class ByteTokenizer:
    """Take the bytes of UTF-8 text as tokens."""

    name = "bytes"

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return one id from 0 to 255 a byte."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of the bytes; cut characters, invalid UTF-8 and ids above 255 become U+FFFD."""
        return np.where(ids < BYTES, ids, 0xFF).astype(np.uint8).tobytes().decode(errors="replace")

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> NDArray[np.int64]:
        """Raise ``DataError``: bytes have no tokens for roles."""
        return self.encode(self.render(messages, tools, answer=True))

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, answer: bool) -> str:
        """Raise ``DataError``: bytes have no tokens for roles."""
        raise DataError(
            "chat messages need a tokenizer with a chat template, and this run takes bytes as tokens; give the prompt "
            "as text or token ids, or set model.checkpoint or data.tokenizer to a folder with a tokenizer"
        )

    def special_ids(self) -> list[int]:
        """Return none: each byte is text."""
        return []

    def chat_parts(self) -> None:
        """Return None: bytes have no chat template."""


class CheckpointTokenizer:
    """Wrap the tokenizer of a checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer  # imported here: it takes seconds and byte tokens do not need it
        except ImportError as error:
            raise DataError(f"{folder}: its tokenizer needs transformers: pip install transformers") from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many types of exceptions
            raise DataError(f"{folder}: transformers cannot read the tokenizer: {error}") from error
        self.name = str(folder)
        self.size = 1 + max(self._tokenizer.get_vocab().values())  # not the count of tokens: ids may have gaps
        self._tokenizer.model_max_length = 10**12  # prompts are longer than any; the warning would be noise

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``text``; strings such as ``<|im_end|>`` become the special tokens they name."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of the ids, with special tokens and unchanged spaces."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> NDArray[np.int64]:
        """Apply the chat template; return the ids of the conversation up to where the assistant's answer begins.

        ``tools`` are the JSON schemas of functions that the assistant may call.
        """
        return self.encode(self.render(messages, tools, answer=True))

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, answer: bool) -> str:
        """Return the conversation as the chat template writes it; with ``answer``, up to where the next answer begins.

        Raises ``DataError`` where there is no template or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise DataError(f"the tokenizer of {self.name} has no chat template; give the prompt as text or token ids")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=answer
            )
        except Exception as error:  # a template may raise any exception
            raise DataError(f"the chat template of {self.name} refuses the messages: {error}") from error
        check_text(str(text), "the conversation")
        return str(text)

    def special_ids(self) -> list[int]:
        """Return the ids of tokens that are no text, such as the one that ends a turn."""
        return list(self._tokenizer.all_special_ids)

    def chat_parts(self) -> tuple[str, str] | None:
        """Return what the chat template writes before and after a user's one message; None without a template."""
        if not self._tokenizer.chat_template:
            return None
        mark = "LONGSTRAW-CONTENT"
        messages = [{"role": "user", "content": mark}]
        text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        before, found, after = text.partition(mark)
        if not found:
            raise DataError(f"the chat template of {self.name} leaves out the user's message")
        return before, after


def check_text(text: str, where: str) -> None:
    """Raise for half a surrogate pair, which JSON can escape and no encoding can represent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[error.start])
        raise DataError(f"{where} has {shown} at character {error.start + 1}, which is no character") from None


def load_tokenizer(folder: str | None, *, checkpoint: str | None, vocab_size: int) -> Tokenizer:
    """Return the tokenizer that ``find_tokenizer`` finds; raise ``DataError`` where its ids would not fit the model."""
    path = find_tokenizer(folder, checkpoint=checkpoint, vocab_size=vocab_size)
    if path is None:
        return ByteTokenizer()
    tokenizer = CheckpointTokenizer(path)
    if tokenizer.size > vocab_size:
        raise DataError(
            f"{path}: token ids up to {tokenizer.size - 1}, and the model has a vocabulary of {vocab_size}; take the "
            "tokenizer that belongs to the model"
        )
    return tokenizer


def find_tokenizer(folder: str | None, *, checkpoint: str | None, vocab_size: int) -> Path | None:
    """Return the folder of the tokenizer: ``folder``, or else the checkpoint's; None where bytes are the tokens.

    Bytes serve random weights of any vocabulary of 256 or more, and a checkpoint whose vocabulary is the 256 bytes.
    Raises ``DataError`` where a checkpoint of another vocabulary comes without a tokenizer.
    """
    for place, wanted in ((folder, True), (checkpoint, vocab_size != BYTES)):
        if place is None:
            continue
        path = Path(place).expanduser()
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such folder; a tokenizer is a folder in transformers' format")
        if any((path / name).is_file() for name in FILES):
            return path
        if wanted:
            raise DataError(f"{path}: no tokenizer there, which would be one of the files {', '.join(FILES)}")
    if vocab_size < BYTES:
        raise DataError(f"model.vocab_size={vocab_size}: bytes as tokens need {BYTES}")
    return None
