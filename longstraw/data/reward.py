"""The user's own reward function, ``reward=package.module:function``, called as TRL or verl call it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstraw.data.task import DataError, Example
from longstraw.units import finite_number

SHOWN = 400  # characters of a response in a message
VERL = ("data_source", "solution_str", "ground_truth")


class RewardError(RuntimeError):
    """A reward function that raised, took too long or returned what is no reward; the message holds the response."""


def load_reward(name: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names; raise ``DataError`` where there is none."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise DataError(f"reward={name!r} must be package.module:function")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's, and raises what it likes when it is imported
        raise DataError(f"reward={name}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise DataError(f"reward={name} is no function")
    return function


def call_reward(
    function: Callable[..., Any],
    example: Example,
    texts: Sequence[str],
    ids: Sequence[NDArray[np.int64]],
    timeout: float | None = None,
) -> list[float | None]:
    """Return the rewards of the responses ``texts`` [n] with token ids ``ids``; None where the function says None.

    A function with verl's parameters ``data_source, solution_str, ground_truth`` is called once a response, any other
    once with TRL's lists; both may be async. ``timeout`` is in seconds. Raises ``RewardError``.
    """
    parameters = inspect.signature(function).parameters
    if all(name in parameters for name in VERL):
        return [_one(function, example, text, timeout) for text in texts]
    conversation = isinstance(example.source, list)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if conversation else list(texts)
    size = len(texts)
    values: dict[str, Any] = {name: [value] * size for name, value in example.columns.items()}
    values |= {"prompts": [example.source] * size, "completions": completions}
    values |= {"completion_ids": [list(map(int, row)) for row in ids], "trainer_state": None}
    values |= {"log_extra": lambda *_: None, "log_metric": lambda *_: None}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        values = {name: value for name, value in values.items() if name in parameters}
    shown = f"one of {size} responses, the first: {texts[0][:SHOWN]!r}" if texts else "no response"
    rewards = _run(function, values, timeout, shown)
    if isinstance(rewards, str | dict) or not hasattr(rewards, "__len__") or len(rewards) != size:
        raise RewardError(f"the reward returned {rewards!r:.100} , must be a list of {size}; {shown}")
    return [_checked(reward, text) for reward, text in zip(rewards, texts, strict=True)]


def _one(function: Callable[..., Any], example: Example, text: str, timeout: float | None) -> float | None:
    columns = example.columns
    model = columns.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else columns.get("ground_truth", columns.get("answer"))
    values = {"data_source": columns.get("data_source"), "solution_str": text, "ground_truth": truth}
    parameters = inspect.signature(function).parameters
    if "extra_info" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        values["extra_info"] = columns.get("extra_info")
    result = _run(function, values, timeout, f"response: {text[:SHOWN]!r}")
    if isinstance(result, dict):
        if "score" not in result:
            raise RewardError(f"the reward returned a dict without score; response: {text[:SHOWN]!r}")
        result = result["score"]
    return _checked(result, text)


def _run(function: Callable[..., Any], values: dict[str, Any], timeout: float | None, shown: str) -> Any:
    """Call in a thread of its own, which has no event loop and can be left behind when it takes too long."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    async def awaited(result: Any) -> Any:
        return await result

    def work() -> None:
        try:
            result = function(**values)
            outcome.append(asyncio.run(awaited(result)) if inspect.isawaitable(result) else result)
        except BaseException as error:  # also SystemExit: a checker that ends would otherwise end without a word
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise RewardError(f"the reward took longer than {timeout} s; {shown}")
    if failure:
        raise RewardError(f"the reward raised {type(failure[0]).__name__}: {failure[0]}; {shown}") from failure[0]
    return outcome[0]


def _checked(value: Any, text: str) -> float | None:
    if value is None:
        return None
    try:
        return finite_number(value)
    except ValueError as error:
        raise RewardError(f"the reward must be a number or None: {error}; response: {text[:SHOWN]!r}") from None
