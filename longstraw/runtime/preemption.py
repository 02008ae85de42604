"""A job that is asked to end: the signal only sets a flag, which the loop reads where it is safe to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = {  # what a user or a site may send; SLURM does before it takes a job's nodes away
    signal.SIGINT: "interrupted (SIGINT)",
    signal.SIGTERM: "asked to end (SIGTERM)",
    signal.SIGUSR2: "the time limit is near, or the nodes are wanted (SIGUSR2)",
}


class Preempted(Exception):
    """The job was asked to end and has stopped at a safe place, between two chunks or branches."""

    signal: signal.Signals | None = None
    reason = ""  # what the record says of it
    progressed = False  # whether a checkpoint stands that this attempt did not begin with


class Superseded(Exception):
    """A later attempt of the same job has begun, so this one must not write anything more."""


class Stop:
    """Whether the job was asked to end. ``agree`` makes a rank's flag that of all ranks; every rank must call it."""

    def __init__(self, agree: Callable[[bool], bool] = bool) -> None:
        self._agree = agree
        self.asked: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take the signals while inside; only the main thread can, in another one no signal is taken.

        Inside another ``Stop`` a signal that it has taken counts here too.
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
        if self.asked is None or number == signal.SIGUSR2:  # the more telling one
            self.asked = signal.Signals(number)

    def check(self) -> None:
        """Raise ``Preempted`` if any rank was asked to end. To be called at the same places on every rank."""
        if self._agree(self.asked is not None):
            raise self.preempted()

    def preempted(self) -> Preempted:
        """Return what to raise, or to end with, once a rank was asked to end."""
        asked = Preempted(SIGNALS[self.asked] if self.asked else "another rank was asked to end")
        asked.signal = self.asked
        return asked
