"""Requests to an inference server, repeated with back-off while it is away, busy or broken. The only user of httpx.

Every failure ends as a ``ServerError`` that says what was asked, and what the server answered last.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from longstraw.config import ServerConfig

log = logging.getLogger(__name__)

T = TypeVar("T")
PASSING = (408, 425, 429, 500, 502, 503, 504)  # statuses after which the same request may succeed
CONNECT = 10.0  # seconds
LONGEST = 60.0  # seconds between two tries
SHOWN = 300  # characters of an answer in a message


class ServerError(OSError):
    """What an inference server could not, or would not, do."""


class RefusedError(ServerError):
    """An answer that repeating the request would not change; ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnavailableError(ServerError):
    """A failure that may pass; ``wait`` is the number of seconds the server asked for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class Client:
    """Talk to the server of a run."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.url is not None
        self.url = config.url.rstrip("/").removesuffix("/v1")
        self.config = config
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line a request
        self._http = httpx.Client(timeout=httpx.Timeout(config.deadline, connect=min(CONNECT, config.deadline)))

    def repeat(self, what: str, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` returns, called again with back-off while it raises ``UnavailableError``."""
        for tries in range(self.config.retries + 1):
            try:
                return attempt()
            except UnavailableError as error:
                if tries == self.config.retries:
                    raise ServerError(f"{self.url}: {what}: {error}; given up after {tries + 1} tries") from error
                wait = max(error.wait, min(self.config.backoff * 2.0**tries, LONGEST))
                log.warning("%s: %s: %s; again in %.0f s", self.url, what, error, wait)
                time.sleep(wait)
            except RefusedError as error:
                raise RefusedError(f"{self.url}: {what}: {error}", error.status) from error
        raise AssertionError("no try")

    def get(self, path: str) -> Any:
        """Return the JSON at ``path``."""
        return self._send("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON with which ``path`` answers; the text where it is no JSON."""
        return self._send("POST", path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events with which ``path`` answers, until the server says that it is done or the deadline is over.

        Raises ``UnavailableError`` where the answer breaks off.
        """
        end = time.monotonic() + self.config.deadline
        with _translated(), self._http.stream("POST", self.url + path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                self._check(response)
            for line in response.iter_lines():
                if time.monotonic() > end:
                    raise UnavailableError(f"not finished after {self.config.deadline:g} s")
                kind, _, data = line.partition(":")
                if kind != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                event = _parsed(data)
                if "error" in event:
                    raise UnavailableError(f"the answer broke off: {str(event['error'])[:SHOWN]}")
                yield event
        raise UnavailableError("the answer broke off")

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        with _translated():
            response = self._http.request(method, self.url + path, json=body)
        self._check(response)
        try:
            return response.json()
        except ValueError:
            return response.text

    def _check(self, response: httpx.Response) -> None:
        """Raise for a status that is no success, with the server's reason."""
        if response.status_code == httpx.codes.OK:
            return
        reason = f"status {response.status_code}: {_reason(response)}"
        if response.status_code not in PASSING:
            raise RefusedError(reason, response.status_code)
        asked = response.headers.get("Retry-After", "")
        raise UnavailableError(reason, float(asked) if asked.isdigit() else 0.0)


@contextmanager
def _translated() -> Iterator[None]:
    """Turn httpx's exceptions into ``UnavailableError``."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise UnavailableError("no answer in time") from error
    except httpx.HTTPError as error:
        raise UnavailableError(str(error) or type(error).__name__) from error


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise UnavailableError(f"an answer that is no JSON object: {data[:SHOWN]!r}")
    return event


def _reason(response: httpx.Response) -> str:
    try:
        said = response.json()
    except ValueError:
        return response.text[:SHOWN]
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:SHOWN]
