"""Detect a failed rank by heartbeats, and end the ranks that would otherwise wait for it for ever.

A thread of every rank writes a heartbeat to a store, over its own connection. Rank 0, whose process holds the store,
monitors the others, and they monitor rank 0. The rank that fails first writes its reason to the store and to a file. A
thread that waits inside a collective cannot be interrupted, so the monitor thread records the failure and exits the
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from torch.distributed import Store

from longstraw.errors import RankLostError, describe, status_of
from longstraw.runtime.failure_files import failure_fields, parse_failure, read_failure, write_failure
from longstraw.runtime.process_info import ProcessInfo

EMPTY = "-"
END_SECONDS = 150  # for closing the records and W&B after a rank was lost


class Heartbeat:
    """Monitor the other ranks until ``disconnect`` or ``stop``.

    ``store`` is a connection that nothing else uses: it blocks if rank 0 is stopped. ``folder`` is shared by the ranks.
    ``before_exit`` is called before this process exits from inside a collective, to write the record. A failure is
    handled within about half of ``timeout_s``: a quarter without a heartbeat, then an eighth for the ranks to stop by
    themselves.
    """

    def __init__(
        self,
        me: ProcessInfo,
        store: Store,
        folder: Path,
        timeout_s: float,
        before_exit: Callable[[RankLostError], None],
    ) -> None:
        self.me, self.folder, self.before_exit = me, folder, before_exit
        self.tick = min(max(timeout_s / 60, 0.05), 1.0)
        self.silence = min(timeout_s / 4, 10.0 if me.by == "torchrun" else 60.0)  # torchrun kills the rest after 30 s
        self.patience = 0.8 * timeout_s  # for ranks that have not connected yet
        self.grace = min(max(timeout_s / 8, 6 * self.tick), 10.0)
        self.lost: RankLostError | None = None
        self._store = store
        self._send: dict[str, str] = {}
        self._last_read: dict[str, str] = {}  # last values of `first`, `suspect` and `lost` in the store
        self._beats = dict.fromkeys(range(me.world_size), "")
        now = time.monotonic()
        self._heard, self._at, self._suspected = now, dict.fromkeys(self._beats, now), 0.0
        self._begun, self._gone = now, False
        self._over, self._lock = threading.Event(), threading.Lock()
        self._arrived = self._ending = False  # which thread ends this process: the main one or the monitor
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self.heartbeat_loop, self.monitor_loop)]
        for thread in self._threads:
            thread.start()

    def present(self) -> list[int]:
        """Return the ranks whose heartbeat was seen."""
        return [rank for rank, beat in self._beats.items() if beat]

    def hosts(self) -> str:
        """Return the ranks that have connected, each with its host."""
        return ", ".join(f"{rank} ({self._host(rank)})" for rank in self.present())

    def gather(self) -> None:
        """Wait until every rank has connected; raise ``RankLostError`` for one that does not."""
        while len(self.present()) < self.me.world_size:
            if self.lost is not None:
                raise self.lost
            time.sleep(self.tick / 4)

    def cause(self, error: BaseException) -> BaseException:
        """Return the cause of ``error``: itself, or the ``RankLostError`` of the rank that made a collective fail here.

        A ``RuntimeError`` may come from a collective, so this waits until no other rank can have failed first. Running
        out of memory and all other exceptions are causes themselves and are passed to the other ranks at once.
        """
        with self._lock:
            self._arrived = True
        while self._ending:  # the monitor thread is already ending this process
            time.sleep(1)
        if isinstance(error, RankLostError):
            return error
        own = {"rank": self.me.rank, "host": socket.gethostname(), "status": status_of(error)}
        own["reason"] = f"failed: {describe(error)}"
        if _may_follow(error):
            self._send["suspect"] = json.dumps(own)
            deadline = time.monotonic() + self.silence + 8 * self.tick
            while self.lost is None and time.monotonic() < deadline:
                time.sleep(self.tick / 4)
            if self.lost is not None and self.lost.rank != self.me.rank:
                return self.lost
        else:
            self._send["first"] = json.dumps(own)
        write_failure(self.folder, self.me.rank, own)
        return error

    def disconnect(self, store: Store) -> None:
        """Stop monitoring once every rank has called this; raise ``RankLostError`` if one is lost before.

        ``store`` is the main thread's connection. Rank 0 returns last, because its process holds the store.
        """
        store.add("done", 1)
        while int(store.add("done", 0)) < self.me.world_size:
            if self.lost is not None:
                raise self.lost
            time.sleep(self.tick / 4)
        self._over.set()
        store.add("left", 1)
        deadline = time.monotonic() + self.grace
        while self.me.rank == 0 and time.monotonic() < deadline:
            if int(store.add("left", 0)) == self.me.world_size:
                break
            time.sleep(0.01)

    def stop(self, cause: BaseException) -> None:
        """Stop monitoring on a rank that failed, after the others had time to read why."""
        if isinstance(cause, RankLostError):
            write_failure(self.folder, self.me.rank, failure_fields(cause))
        time.sleep((4 if self.me.rank == 0 else 2) * self.tick)
        self._over.set()

    def _host(self, rank: int) -> str:
        return self._beats[rank].partition(" ")[2] or "an unknown host"

    def heartbeat_loop(self) -> None:
        """Send this rank's heartbeat and failure and read the others'; ``monitor_loop`` detects a call that blocks."""
        keys = ["first", "suspect", "lost", *(f"beat/{rank}" for rank in self._beats)]
        count, host = 0, socket.gethostname()
        try:
            for key in keys:
                self._store.compare_set(key, "", EMPTY)
            while not self._over.is_set():
                count += 1
                self._store.set(f"beat/{self.me.rank}", f"{count} {host}")
                for key in list(self._send):
                    self._store.compare_set(key, EMPTY, self._send.pop(key))
                values = self._store.multi_get(keys)
                self._take(dict(zip(keys, (value.decode() for value in values), strict=True)))
                self._over.wait(self.tick)
        except RuntimeError:
            self._gone = True

    def _take(self, values: dict[str, str]) -> None:
        now = time.monotonic()
        for rank, beat in self._beats.items():
            new = values[f"beat/{rank}"]
            if new not in (EMPTY, beat):
                self._beats[rank], self._at[rank] = new, now
        self._last_read = {key: values[key] for key in ("first", "suspect", "lost") if values[key] != EMPTY}
        if "suspect" in self._last_read and not self._suspected:
            self._suspected = now
        self._heard = now

    def monitor_loop(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self.tick / 2):
            now = time.monotonic()
            if now - last > self.silence / 2:  # this process was stopped: heartbeats missed meanwhile prove nothing
                self._heard, self._at = now, dict.fromkeys(self._at, now)
            last = now
            lost = self._find(now)
            if lost is not None:
                self._end(lost)
                return

    def _find(self, now: float) -> RankLostError | None:
        """Return the rank that is lost, if one is."""
        if "lost" in self._last_read:
            return parse_failure(self._last_read["lost"])
        if self.me.rank != 0:
            unheard = self._gone or now - self._heard > self.silence
            if unheard or (self._beats[0] and now - self._at[0] > 1.5 * self.silence):
                failure = read_failure(self.folder, 0)
                return parse_failure(failure) if failure else self._silent(0, now)
            return None
        if "first" in self._last_read:
            return parse_failure(self._last_read["first"])
        for rank in range(1, self.me.world_size):
            if not self._beats[rank]:
                if failure := read_failure(self.folder, rank):
                    return parse_failure(failure)
                if now - self._begun > self.patience:
                    waited = f"never came: waited {self.patience:.0f} s, there are only {self.hosts()}"
                    return RankLostError(rank, self._host(rank), waited)
            elif now - self._at[rank] > self.silence:
                return self._silent(rank, now)
        if self._suspected and now - self._suspected > self.silence + 4 * self.tick:
            return parse_failure(self._last_read["suspect"])
        return None

    def _silent(self, rank: int, now: float) -> RankLostError:
        since = now - (self._at[rank] if rank else min(self._at[0], self._heard))
        at = datetime.fromtimestamp(time.time() - since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return RankLostError(rank, self._host(rank), f"stopped answering at {at}: it was killed, stopped or cut off")

    def _end(self, lost: RankLostError) -> None:
        """Publish the failure, let the main thread stop by itself for a while, then end the process."""
        self.lost = lost
        if self.me.rank == 0:
            with contextlib.suppress(RuntimeError):
                self._store.set("lost", json.dumps(failure_fields(lost)))
        deadline = time.monotonic() + self.grace
        while not self._arrived and time.monotonic() < deadline:
            time.sleep(self.tick / 4)
        with self._lock:
            self._ending = not self._arrived
        if self._ending:
            with contextlib.suppress(Exception):  # whatever happens, this process ends
                write_failure(self.folder, self.me.rank, failure_fields(lost))
                print(f"longstraw: rank {self.me.rank} ends: {lost}", file=sys.stderr, flush=True)
                self.before_exit(lost)
            os._exit(1)
        if not self._over.wait(END_SECONDS):
            os._exit(1)


def _may_follow(error: BaseException) -> bool:
    """Return whether an exception may be the consequence of another rank's failure: a collective's error, or SIGTERM.

    torchrun sends SIGTERM to the remaining ranks.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGTERM in error.args
    return isinstance(error, RuntimeError) and status_of(error) != "oom"
