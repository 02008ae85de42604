"""``verifiers``: the files ``traces.jsonl`` of verifiers and prime-rl, one episode a line.

    {"group": {"id": ..}?, "ok": true, "traces": [{"nodes": [..], "rewards": {name: {"score", "weight"}}, ..}, ..]}

A node is a message: its ``parent``, the ``token_ids`` it adds, their ``mask`` (the tokens that the policy wrote) and
``logprobs`` (one for each of those, rounded to 1e-4). Every path from a root to a leaf is a response with the reward of
its trace; what paths share is in the loss of the first alone. The prompt ends before the first token that the policy
wrote. Traces of agents that are not trained, traces that failed, and attempts to shorten the context that led nowhere
are left out. Traces without token ids are chat messages, and are tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longstraw.data.rollouts.stored import Format, Row, Stored, column, same_length
from longstraw.data.rollouts.trl import without_nulls
from longstraw.data.task import DataError


def _matches(row: Row) -> bool:
    return isinstance(row.get("traces"), list)


def _read(row: Row, reward_columns: Sequence[str]) -> Iterator[Stored]:
    group = row.get("group")
    name = str(group["id"]) if isinstance(group, dict) and "id" in group else None
    for i, trace in enumerate(column(row, "traces", list)):
        where = f"traces[{i}]"
        if not isinstance(trace, dict):
            raise DataError(f"{where} is no object")
        agent = trace["agent"] if isinstance(trace.get("agent"), dict) else {}
        if agent.get("trainable", True) and trace.get("ok", True):
            own = None if name is None else f"{name}/{agent.get('name', 'agent')}"
            yield from _trace(trace, own, where)


def _trace(trace: Row, group: str | None, where: str) -> Iterator[Stored]:
    nodes = column(trace, "nodes", list, f"{where}.")
    for i, node in enumerate(nodes):
        _check_node(node, f"{where}.nodes[{i}]")
    reward = _reward(trace, where)
    in_loss: set[int] = set()
    for path in _paths(nodes, where):
        own = [nodes[i] for i in path]
        new = [i not in in_loss for i in path]
        in_loss.update(path)
        if not any(node.get("sampled") for node in own):
            continue
        common: dict[str, Any] = {"reward": reward, "group": group, "where": f"{where}: the path to node {path[-1]}"}
        if any(node.get("token_ids") for node in own):
            yield _tokens(own, new, common, _temperature(trace))
        elif not all(new):
            raise DataError(f"{where}: branches of a trace without token ids, which cannot be trained once each")
        else:
            messages = [_message(without_nulls(node.get("message"))) for node in own]
            written = [bool(node.get("sampled")) for node in own]
            tools = [_function(tool) for tool in own[0].get("tools", ())] or None
            yield Stored(messages=messages, written=written, tools=tools, temperature=_temperature(trace), **common)


def _check_node(node: Any, where: str) -> None:
    if not isinstance(node, dict):
        raise DataError(f"{where} is no object")
    for key in ("token_ids", "mask", "logprobs", "semantic_parents", "tools"):
        items = column(node, key, list, f"{where}.") if key in node else []
        if key in ("semantic_parents", "tools") and not all(isinstance(item, dict) for item in items):
            raise DataError(f"{where}.{key} holds what is no object")
    same_length({"mask": node.get("mask", [])}, ("mask",), len(node.get("token_ids", [])), f"{where}.")
    wrote = sum(value is True for value in node.get("mask", []))
    if len(node.get("logprobs", [])) not in (0, wrote):
        raise DataError(f"{where} has {len(node['logprobs'])} logprobs for {wrote} tokens that the policy wrote")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its tool calls as chat templates take them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_function(call) for call in calls]}


def _function(value: Any) -> Any:
    """Return a tool, or a call of one, as the function that chat templates take it for."""
    if not isinstance(value, dict) or "function" in value:
        return value
    call = {key: item for key, item in value.items() if key != "id"}
    return {"type": "function", "function": call} | ({"id": value["id"]} if "id" in value else {})


def _paths(nodes: Sequence[Row], where: str) -> Iterator[list[int]]:
    """Yield the nodes from the root to each leaf that is trained."""
    parents = [node.get("parent") for node in nodes]
    for i, parent in enumerate(parents):
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < i):
            raise DataError(f"{where}.nodes[{i}].parent is {parent!r}, must be an earlier node")
    accepted = {
        link.get("node")
        for node in nodes
        for link in node.get("semantic_parents", ())
        if link.get("type") == "compaction"
    }
    for leaf in sorted(set(range(len(nodes))) - {p for p in parents if p is not None}):
        links = nodes[leaf].get("semantic_parents", ())
        if any(link.get("type") == "compaction_attempt" for link in links) and leaf not in accepted:
            continue
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = parents[at]
        yield path[::-1]


def _tokens(nodes: Sequence[Row], new: Sequence[bool], common: dict[str, Any], temperature: float | None) -> Stored:
    """Return the response of a path; tokens of nodes that are not ``new`` are in the loss of an earlier one."""
    ids: list[int] = []
    wrote: list[bool] = []
    in_loss: list[int] = []
    logprobs: list[float | None] = []
    scored = True
    for node, fresh in zip(nodes, new, strict=True):
        mask = [value is True for value in node.get("mask", [])]
        given = iter(node.get("logprobs", []))
        scored = scored and (bool(node.get("logprobs")) or not any(mask))
        ids += node.get("token_ids", [])
        wrote += mask
        in_loss += [int(m and fresh) for m in mask]
        logprobs += [next(given, None) if m else None for m in mask]
    if True not in wrote:
        raise DataError(f"{common['where']}: the policy wrote none of its tokens")
    start = wrote.index(True)
    return Stored(
        prompt=ids[:start],
        tokens=ids[start:],
        loss_mask=in_loss[start:],
        logprobs=logprobs[start:] if scored else None,
        temperature=temperature,
        **common,
    )


def _reward(trace: Row, where: str) -> float:
    total = 0.0
    for name, reward in column(trace, "rewards", dict, f"{where}.").items():
        if reward is not None:
            if not isinstance(reward, dict):
                raise DataError(f"{where}.rewards.{name} is no object with score and weight")
            whole, number = {"weight": 1.0, **reward}, (int, float)
            own = f"{where}.rewards.{name}."
            total += column(whole, "score", number, own) * column(whole, "weight", number, own)
    return total


def _temperature(trace: Row) -> float | None:
    """Return the temperature of a trace's calls, where they agree on one and say it."""
    calls = trace["calls"] if isinstance(trace.get("calls"), list) else []
    sampling = [call.get("sampling") for call in calls if isinstance(call, dict)]
    said = [each.get("temperature") for each in sampling if isinstance(each, dict)]
    given = {float(value) for value in said if isinstance(value, int | float)}
    return given.pop() if len(given) == 1 else None


FORMAT = Format("traces", _matches, _read)
