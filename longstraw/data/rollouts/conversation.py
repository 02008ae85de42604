"""A conversation of several turns as token ids: which of them the policy wrote, by the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from longstraw.data.task import DataError
from longstraw.data.tokenizer import Tokenizer


def encode_conversation(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], written: Sequence[bool], tools: list[Any] | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of the prompt, those of the response, and 1 for each of the latter that the policy wrote.

    The response begins where the first ``written`` message does and ends with the last one. Of such a message the
    policy wrote all up to the last special token, which ends the turn, and not what the template adds behind it.
    Raises ``DataError`` where the template writes earlier messages otherwise once later ones follow.
    """
    last = len(written) - 1 - list(reversed(written)).index(True)
    whole = tokenizer.render(messages[: last + 1], tools, answer=False)
    special, at = tokenizer.special_ids(), 0
    pieces: list[list[int]] = []  # the prompt, then by turns what the policy wrote and what it did not
    for i in range(last + 1):
        if not written[i]:
            continue
        start = tokenizer.render(messages[:i], tools, answer=True)
        end = whole if i == last else tokenizer.render(messages[: i + 1], tools, answer=False)
        if not (at <= len(start) <= len(end) and whole.startswith(start) and whole.startswith(end)):
            raise DataError(
                f"messages[{i}]: the chat template writes it otherwise once later messages follow, so nothing says "
                "which tokens the policy wrote; store token ids"
            )
        own = tokenizer.encode(whole[len(start) : len(end)])
        ends = np.flatnonzero(np.isin(own, special))
        border = int(ends[-1]) + 1 if len(ends) else len(own)
        between = tokenizer.encode(whole[at : len(start)]).tolist()
        if pieces:
            pieces[-1] += between
        else:
            pieces.append(between)
        pieces += [own[:border].tolist(), own[border:].tolist()]
        at = len(end)
    prompt, *turns = pieces[:-1]
    mask = [int(i % 2 == 0) for i, piece in enumerate(turns) for _ in piece]
    return prompt, [token for piece in turns for token in piece], mask
