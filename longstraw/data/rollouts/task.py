"""The ``rollouts`` task: groups of responses that another trainer stored, in any of the formats beside this file.

Every row is read and checked once at the start; what is kept of it is its place. Groups come in the order in which
their first rows do, and again from the top after the last. Of more than ``group_size`` responses the first are taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longstraw.config import RolloutsConfig, RunConfig
from longstraw.data.jsonl_schema import Parser
from longstraw.data.rollouts import art, nemo_rl, token_lines, trl, verifiers, verl
from longstraw.data.rollouts.conversation import encode_conversation
from longstraw.data.rollouts.sources import Source, find_sources
from longstraw.data.rollouts.stored import Format, Stored
from longstraw.data.task import DataError
from longstraw.data.tokenizer import Tokenizer, check_text

if TYPE_CHECKING:
    from longstraw.group import Group

log = logging.getLogger(__name__)

FORMATS: Mapping[str, Format] = {
    "tokens": token_lines.FORMAT,
    "verl": verl.FORMAT,
    "trl": trl.FORMAT,
    "nemo_rl": nemo_rl.FORMAT,
    "verifiers": verifiers.FORMAT,
    "art": art.FORMAT,
}
SHOWN = 100  # skipped rows listed in the description, beside their number
SKIP = " (data.on_error=skip goes on without it)"
GroupKey = tuple[int, str | None, bytes]  # source, the file's own id, digest of the prompt


@dataclass(frozen=True)
class Member:
    """Where a response lies: the ``item``-th of the row at a place of a source."""

    source: int
    place: int
    number: int
    item: int


class RolloutsTask:
    """Read groups from stored rollouts, of which the places are kept."""

    def __init__(self, config: RunConfig, data: RolloutsConfig, tokenizer: Tokenizer) -> None:
        self._data, self._tokenizer, self._refresh_every = data, tokenizer, config.refresh_every
        self._temperature, self._group_size = config.temperature, config.group_size
        self._parser = Parser(config, data, tokenizer)
        self._sources = find_sources(data.path)
        self._formats = [_format_of(source, data) for source in self._sources]
        self._skipped: list[dict[str, str]] = []
        self.tokenised = self.unscored = 0  # groups stored as text; groups stored without log-probabilities
        self._groups = self._checked(self._index())
        self._last: tuple[int, Group] | None = None
        if not self._groups:
            why = f"; the first of {len(self._skipped)} skipped: {self._skipped[0]['reason']}" if self._skipped else ""
            raise DataError(f"{data.path}: no usable group{why}")
        self._parser.counting = False  # from here on rows are read again
        self.description: dict[str, Any] = {
            "name": data.name,
            "path": data.path,
            "tokenizer": tokenizer.name,
            "files": len(self._sources),
            "prompts": len(self._groups),
            "tokenised_groups": self.tokenised,
            "groups_without_logprobs": self.unscored,
            "truncated_prompts": self._parser.truncated,
            "responses_left_out": self._parser.left_out,
            "skipped_rows": len(self._skipped),
            "skipped": self._skipped[:SHOWN],
        }
        if self.tokenised:
            log.warning("%s: %d groups are stored as text and are tokenised again", data.path, self.tokenised)

    def group(self, step: int) -> Group:
        """Return the group of this step; steps that share a retained prompt get the same one."""
        index = step // self._refresh_every % len(self._groups)
        if self._last is None or self._last[0] != index:
            self._last = (index, self._build(self._groups[index])[0])
        return self._last[1]

    def _index(self) -> dict[GroupKey, list[Member]]:
        """Return the places of every group's responses; only the rows themselves are checked."""
        groups: dict[GroupKey, list[Member]] = {}
        for s, source in enumerate(self._sources):
            prompts: dict[str | None, bytes] = {}  # of the response before, by the file's own id
            for place, number, raw in source.rows():
                try:
                    for item, stored in enumerate(self._read(s, raw)):
                        name = f"line-{number}" if stored.row_is_group else stored.group
                        digest = stored.prompt_key() or prompts.get(name)
                        if digest is None:
                            raise DataError(f"group {name!r} has no prompt on an earlier line")
                        prompts[name] = digest
                        groups.setdefault((s, name, digest), []).append(Member(s, place, number, item))
                except DataError as error:
                    self._refuse(f"{source.path}:{number}: {error}")
        return groups

    def _read(self, source: int, raw: Any) -> Iterator[Stored]:
        row = self._sources[source].parse(raw)
        yield from self._formats[source].read(row, self._data.reward_columns)

    def _refuse(self, reason: str) -> None:
        """Stop at what cannot be used, or note that it is skipped."""
        if self._data.on_error != "skip":
            raise DataError(reason + SKIP) from None
        self._skipped.append({"reason": reason})

    def _checked(self, groups: dict[GroupKey, list[Member]]) -> list[list[Member]]:
        """Return the groups that can be trained on."""
        usable = []
        for members in groups.values():
            try:
                group, is_text = self._build(members)
            except DataError as error:
                self._refuse(str(error))
                continue
            usable.append(members)
            self.tokenised += is_text
            self.unscored += group.old_logprobs is None
        return usable

    def _build(self, members: list[Member]) -> tuple[Group, bool]:
        """Return the group of these responses, and whether it was tokenised."""
        stored = self._stored(members[: self._group_size])
        at = [f"{self._sources[m.source].path}:{m.number}" for m in members]
        places = [f"{place}: {each.where}" for place, each in zip(at, stored, strict=False)]
        try:
            fields = self._fields(stored)
            fields["responses"] += [{} for _ in members[self._group_size :]]
            group = self._parser.build(fields, stored[0].group or at[0].rpartition("/")[2], places)
        except DataError as error:
            reason = str(error)
            raise DataError(reason if any(map(reason.startswith, at)) else f"{at[0]}: {reason}") from None
        return group, isinstance(stored[0].prompt, str) or any(each.tokens is None for each in stored)

    def _stored(self, members: list[Member]) -> list[Stored]:
        """Read responses again, each row once: one row may hold a whole group."""
        rows: dict[int, list[Stored]] = {}
        for member in members:
            if member.place not in rows:
                raw = self._sources[member.source].raw(member.place)
                rows[member.place] = list(self._read(member.source, raw))
        return [rows[member.place][member.item] for member in members]

    def _fields(self, stored: list[Stored]) -> dict[str, Any]:
        """Return what ``Parser`` makes a group of: the prompt, and tokens or text of each response."""
        prompt, items = stored[0].prompt, []
        for each in stored:
            if each.temperature is not None and each.temperature != self._temperature:
                raise DataError(
                    f"drawn at temperature {each.temperature}, and this run's is {self._temperature}: their "
                    f"log-probabilities do not compare; write temperature={each.temperature}"
                )
            item: dict[str, Any] = {"reward": each.reward, "logprobs": each.logprobs, "loss_mask": each.loss_mask}
            if each.messages:
                _check_messages(each)
                prompt, ids, mask = encode_conversation(self._tokenizer, each.messages, each.written, each.tools)
                item |= {"tokens": ids, "loss_mask": mask}
            else:
                item |= {"text": each.text} if each.tokens is None else {"tokens": each.tokens}
            items.append(item)
        return {"prompt": prompt, "responses": items}


def _check_messages(stored: Stored) -> None:
    if stored.written[0]:
        raise DataError(f"{stored.where}: the policy wrote the first message, so there is no prompt")
    for i, message in enumerate(stored.messages):
        if isinstance(message.get("content"), str):
            check_text(message["content"], f"messages[{i}].content")


def _format_of(source: Source, data: RolloutsConfig) -> Format:
    """Return the format of a source: the one asked for, or that of its first row."""
    if data.format != "auto":
        return FORMATS[data.format]
    for _, number, raw in source.rows():
        try:
            row = source.parse(raw)
        except DataError as error:
            if data.on_error == "skip":
                continue
            raise DataError(f"{source.path}:{number}: {error}{SKIP}") from None
        for found in FORMATS.values():
            if found.matches(row):
                return found
        known = "; ".join(f"{name}: {each.columns}" for name, each in FORMATS.items())
        hint = "; this one is for data=jsonl" if {"prompt", "responses"} <= set(row) else ""
        raise DataError(
            f"{source.path}:{number}: a row of {', '.join(map(str, list(row)[:8]))} is of no known format{hint}. "
            f"Known are {known}"
        )
    raise DataError(f"{source.path}: no usable row; the file is empty")


def check_rollouts(data: RolloutsConfig) -> None:
    """Raise ``DataError`` or ``OSError`` where there are no rollouts of a known format; only first rows are read."""
    for source in find_sources(data.path):
        _format_of(source, data)
