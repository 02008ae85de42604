"""Stop a job on a signal: the handler only sets a flag, which the loop checks where it is safe to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = {  # sent by a user or a site; SLURM sends them before it takes a job's nodes away
    signal.SIGINT: "interrupted (SIGINT)",
    signal.SIGTERM: "asked to end (SIGTERM)",
    signal.SIGUSR2: "the time limit is near, or the nodes are wanted (SIGUSR2)",
}


class Preempted(Exception):
    """The job was asked to end and has stopped at a safe place, between two chunks or branches."""

    signal: signal.Signals | None = None
    reason = ""  # for the record
    progressed = False  # whether this attempt has written a newer checkpoint than it started from


class Superseded(Exception):
    """A later attempt of the same job has begun, so this one must not write anything more."""


class Stop:
    """Whether the job was asked to end. ``agree`` combines the flags of all ranks; every rank must call it."""

    def __init__(self, agree: Callable[[bool], bool] = bool) -> None:
        self._agree = agree
        self.asked: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Handle the signals in this block; only the main thread can, in other threads nothing is handled.

        A signal that an enclosing ``Stop`` has received counts here too.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        for handler in before.values():
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, Stop) and outer.asked is not None:
                self.asked = outer.asked
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        if number == signal.SIGINT:
            if self.asked == signal.SIGINT:
                raise KeyboardInterrupt(number)  # pressed twice: not even to the next safe place
            os.write(2, b"longstraw: interrupted: stopping at the next safe place; Ctrl-C again ends at once\n")
        if self.asked is None or number == signal.SIGUSR2:  # its reason says more
            self.asked = signal.Signals(number)

    def check(self) -> None:
        """Raise ``Preempted`` if any rank was asked to end. Every rank must call it at the same places."""
        if self._agree(self.asked is not None):
            raise self.preempted()

    def preempted(self) -> Preempted:
        """Return the ``Preempted`` for a job that was asked to end."""
        asked = Preempted(SIGNALS[self.asked] if self.asked else "another rank was asked to end")
        asked.signal = self.asked
        return asked
