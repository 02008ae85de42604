"""One line of a JSON-lines file to a group or a prompt, or the reason why not."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstraw.config import JsonlConfig, RolloutsConfig, RunConfig
from longstraw.config.hf_files import placeholder_ids
from longstraw.data.task import DataError, Example
from longstraw.data.tokenizer import Tokenizer, check_text

if TYPE_CHECKING:
    import torch

    from longstraw.group import Group

LINE_KEYS = ("prompt", "responses", "tools")
RESPONSE_KEYS = ("text", "tokens", "reward", "logprobs", "loss_mask")
SLACK = 1e-2  # a log-probability of 0 that was rounded may come out above it


class Parser:
    """Turn lines into groups of one run's sizes, and count what was cut to fit while ``counting``."""

    def __init__(self, config: RunConfig, data: JsonlConfig | RolloutsConfig, tokenizer: Tokenizer | None) -> None:
        """``tokenizer`` may be absent where lines are only checked."""
        self._tokenizer, self._vocab_size = tokenizer, config.model.vocab_size
        self._placeholders = placeholder_ids(config.model.checkpoint)
        self._group_size, self._response_length = config.group_size, config.response_length
        self._prompt_positions, self._truncate = config.prompt_positions, data.truncate
        self.counting, self._prompts_only = True, config.rollout != "given"
        self.truncated = self.left_out = 0

    def group(self, line: bytes, number: int) -> Group:
        """Return the group a line holds; ``number`` names a line without an id. Raises ``DataError``."""
        fields = _fields(line)
        return self.build(fields, str(fields.get("id", f"line-{number}")))

    def build(self, fields: dict[str, Any], name: str, places: Sequence[str] = ()) -> Group:
        """Return the group that a line's ``fields`` describe. Raises ``DataError``.

        ``places`` are what messages call the responses, where that is not their number on the line.
        """
        import torch

        from longstraw.group import Group

        prompt, truncated = self._fit(self._prompt(fields))
        items = self._items(fields.get("responses"))
        taken = items[: self._group_size]
        places = places or [f"responses[{i}]" for i in range(len(taken))]
        responses = [self._response(item, place) for item, place in zip(taken, places, strict=False)]
        try:
            group = Group(
                prompt=torch.from_numpy(prompt),
                responses=[torch.from_numpy(ids) for ids in responses],
                rewards=[_reward(item, place) for item, place in zip(taken, places, strict=False)],
                old_logprobs=_logprobs(taken, responses, places),
                loss_masks=_masks(taken, responses, places),
                id=name,
            )
        except ValueError as error:
            raise DataError(str(error)) from None
        if self.counting:
            self.truncated += truncated
            self.left_out += len(items) - len(taken)
        return group

    def example(self, line: bytes, number: int) -> Example:
        """Return the prompt a line holds, its other keys as columns. Raises ``DataError``."""
        fields = _fields(line)
        prompt, truncated = self._fit(self._prompt(fields))
        if self.counting:
            self.truncated += truncated
        columns = {key: value for key, value in fields.items() if key not in ("id", *LINE_KEYS)}
        name = str(fields.get("id", f"line-{number}"))
        return Example(prompt, name, columns, {"length": len(prompt)}, fields["prompt"])

    def check(self, line: bytes) -> None:
        """Raise ``DataError`` for a line without a prompt that fits or, where they are read, enough responses.

        Without torch.

        Where there is no tokenizer text is not looked into.
        """
        fields = _fields(line)
        items = [] if self._prompts_only else self._items(fields.get("responses"))[: self._group_size]
        if self._tokenizer is not None:
            self._fit(self._prompt(fields))
            for i, item in enumerate(items):
                self._response(item, f"responses[{i}]")
        for i, item in enumerate(items):
            _reward(item, f"responses[{i}]")

    def _prompt(self, fields: dict[str, Any]) -> NDArray[np.int64]:
        value, tools = fields["prompt"], fields.get("tools")
        chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        if tools is not None and not chat:
            raise DataError("tools are for a prompt of chat messages, whose template writes them")
        if isinstance(value, str):
            return self._encode(value, "prompt")
        if not isinstance(value, list):
            raise DataError(f"prompt is {kind_of(value)}, must be text, a list of token ids or a list of chat messages")
        if chat:
            assert self._tokenizer is not None
            ids = self._tokenizer.encode_chat(_messages(value), _tools(tools))
            self._check_placeholders(ids, "prompt")
            return ids
        return self._ids(value, "prompt")

    def _fit(self, prompt: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
        room = self._prompt_positions
        if len(prompt) <= room:
            return prompt, False
        if self._truncate is None:
            raise DataError(
                f"prompt of {len(prompt)} tokens, and context less response_length leaves {room}; raise context, or "
                "cut the prompt with data.truncate=left|right"
            )
        return (prompt[-room:] if self._truncate == "left" else prompt[:room]), True

    def _items(self, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise DataError("no responses" if value is None else f"responses is {kind_of(value)}, must be a list")
        for i, item in enumerate(value):
            if not isinstance(item, dict):
                raise DataError(f"responses[{i}] is {kind_of(item)}, must be an object with text or tokens, and reward")
            check_keys(item, RESPONSE_KEYS, f"responses[{i}]: ")
        if len(value) < self._group_size:
            raise DataError(f"{len(value)} responses, and group_size={self._group_size}")
        return value

    def _response(self, item: dict[str, Any], where: str) -> NDArray[np.int64]:
        if ("text" in item) == ("tokens" in item):
            both = "both text and tokens" if "text" in item else "neither text nor tokens"
            raise DataError(f"{where} has {both}, must have one of them")
        if "tokens" in item:
            ids = self._ids(item["tokens"], f"{where}.tokens")
        elif isinstance(item["text"], str):
            ids = self._encode(item["text"], f"{where}.text")
        else:
            raise DataError(f"{where}.text is {kind_of(item['text'])}, must be text")
        if len(ids) > self._response_length:
            raise DataError(
                f"{where} has {len(ids)} tokens, and response_length={self._response_length}; raise response_length, "
                "or cut the response in the file: a reward is for all of it"
            )
        return ids

    def _encode(self, text: str, where: str) -> NDArray[np.int64]:
        check_text(text, where)
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text)
        if len(ids) == 0:
            raise DataError(f"{where} is empty")
        self._check_placeholders(ids, where)
        return ids

    def _check_placeholders(self, ids: NDArray[np.int64], where: str) -> None:
        """Refuse ids where an image, video or audio would go: the text model has no meaning for them."""
        found = [i for i in self._placeholders if i in ids]
        if found:
            at = int(np.isin(ids, found).argmax())
            key = self._placeholders[int(ids[at])]
            raise DataError(
                f"{where}[{at}] is {ids[at]}, the {key} of the model's config.json: it takes the place of what is no "
                "text, and only text is trained on"
            )

    def _ids(self, value: Any, where: str) -> NDArray[np.int64]:
        if not isinstance(value, list):
            raise DataError(f"{where} is {kind_of(value)}, must be a list of token ids")
        if not value:
            raise DataError(f"{where} is empty")
        if set(map(type, value)) != {int}:  # not isinstance: true and false are no token ids
            at = next(i for i, item in enumerate(value) if type(item) is not int)
            raise DataError(f"{where}[{at}] is {kind_of(value[at])}, must be a token id")
        if min(value) < 0 or max(value) >= self._vocab_size:
            at = next(i for i, item in enumerate(value) if not 0 <= item < self._vocab_size)
            raise DataError(f"{where}[{at}] is {value[at]}, must be below the vocabulary of {self._vocab_size} ids")
        ids = np.asarray(value, dtype=np.int64)
        self._check_placeholders(ids, where)
        return ids


def _fields(line: bytes) -> dict[str, Any]:
    """Return the object a line holds, its keys and its id checked."""
    fields = parse_object(line)
    check_keys(fields, LINE_KEYS, "")
    name = fields.get("id", "")
    if not isinstance(name, (str, int)) or isinstance(name, bool):
        raise DataError(f"id is {kind_of(name)}, must be text or a whole number")
    check_text(str(name), "id")
    if "prompt" not in fields:
        raise DataError("no prompt")
    return fields


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object that a line holds, or raise ``DataError``."""
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"no UTF-8: {error.reason} at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        hint = "; the line seems cut off" if cut else ""
        raise DataError(f"no JSON: {error.msg} at character {error.pos + 1}{hint}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"no JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise DataError(f"the line holds {kind_of(fields)}, must be one object: {{...}}")
    return fields


def check_keys(fields: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse what looks like a known key written wrongly; other keys are the user's own business."""
    for key in fields:
        near = [] if key in known else difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.75)
        if near and near[0] not in fields:
            raise DataError(f"{where}unknown key {key!r}; did you mean {near[0]!r}?")


def _messages(value: list[Any]) -> list[dict[str, Any]]:
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"prompt[{i}] is no chat message, which is an object with role and content")
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f"prompt[{i}] has no content")
        _check_parts(message.get("content"), f"prompt[{i}].content")
    if value[-1]["role"] == "assistant":
        raise DataError("the last message of the prompt is the assistant's; it belongs to the responses")
    return value


def _check_parts(content: Any, where: str) -> None:
    """Refuse parts of a message that are no text, such as images: the models here take text only."""
    for j, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict):
            raise DataError(f"{where}[{j}] is {kind_of(part)}, must be an object with type and text")
        kind = part.get("type", "text" if "text" in part else next(iter(part), "nothing"))
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{where}[{j}] is a part of type {kind!r} without text; only parts of type 'text' are taken"
            )


def _tools(value: Any) -> list[Any] | None:
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise DataError(f"tools is {kind_of(value)}, must be a list of JSON schemas")
    return value


def _reward(item: dict[str, Any], where: str) -> float:
    """Return the reward; true and false are 1 and 0, as checkers write them."""
    if "reward" not in item:
        raise DataError(f"{where} has no reward")
    return _number(item["reward"], f"{where}.reward", finite=True, boolean=True)


def _logprobs(
    items: list[dict[str, Any]], responses: list[NDArray[np.int64]], places: Sequence[str]
) -> list[torch.Tensor] | None:
    """Return the log-probabilities, if all responses have them; null where the mask is 0 is never read."""
    given = [i for i, item in enumerate(items) if item.get("logprobs") is not None]
    if not given:
        return None
    if len(given) < len(items):
        without = next(i for i in range(len(items)) if i not in given)
        raise DataError(f"{places[given[0]]} has logprobs and {places[without]} has none; give all or none")
    import torch

    rows = []
    for i, (item, response) in enumerate(zip(items, responses, strict=True)):
        where = f"{places[i]}.logprobs"
        values = _list(item["logprobs"], response, where)
        row = [math.nan if v is None else _number(v, f"{where}[{t}]") for t, v in enumerate(values)]
        if max(row) > SLACK:  # false for NaN, which Group looks at
            raise DataError(f"{where} has {max(row)}; a log-probability is at most 0, are these probabilities?")
        rows.append(torch.tensor(row, dtype=torch.float64))
    return rows


def _masks(
    items: list[dict[str, Any]], responses: list[NDArray[np.int64]], places: Sequence[str]
) -> list[torch.Tensor] | None:
    """Return the masks, if any response has one; those without keep all their tokens."""
    if all(item.get("loss_mask") is None for item in items):
        return None
    import torch

    masks = []
    for i, (item, response) in enumerate(zip(items, responses, strict=True)):
        where = f"{places[i]}.loss_mask"
        values = [1] * len(response) if item.get("loss_mask") is None else _list(item["loss_mask"], response, where)
        for t, value in enumerate(values):
            if not isinstance(value, (bool, int)) or value not in (0, 1):
                raise DataError(f"{where}[{t}] is {value!r}, must be 0 or 1")
        masks.append(torch.tensor(values, dtype=torch.bool))
    return masks


def _list(value: Any, response: NDArray[np.int64], where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where} is {kind_of(value)}, must be a list")
    if len(value) != len(response):
        raise DataError(f"{where} has {len(value)} values for {len(response)} tokens")
    return value


def _number(value: Any, where: str, *, finite: bool = False, boolean: bool = False) -> float:
    if not isinstance(value, (int, float)) or (isinstance(value, bool) and not boolean):
        raise DataError(f"{where} is {kind_of(value)}, must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if finite and not math.isfinite(number):
        raise DataError(f"{where} is {number}, must be finite")
    return number


def kind_of(value: Any) -> str:
    """Name a JSON value for a message: its kind, and itself where short."""
    if value is None:
        return "null"
    kind = {dict: "an object", list: "a list", str: "text", bool: "a boolean"}.get(type(value), "a number")
    shown = json.dumps(value) if not isinstance(value, (dict, list)) else ""
    return f"{kind} ({shown})" if 0 < len(shown) <= 40 else kind
