"""Send a copy of the records to W&B from a thread. The only module of the package that imports wandb.

Errors of W&B become warnings and never exceptions in the run; only ``close`` waits, for a limited time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from longstraw.tracking.evaluations import Table
from longstraw.tracking.schema import flatten

log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0  # wandb writes offline files every 15 s by default, and a killed run loses what is between


INIT_SECONDS = 30


FINISH_SECONDS = 60  # wandb's own default waits for a lost server for ever


REOPEN_SECONDS = 60  # a failed W&B run is opened again at most this often


UNSURE_SECONDS = 3 * FLUSH_SECONDS  # rows sent so shortly before W&B failed may not be in its file


BACKLOG_ROWS = 10_000  # rows that wait for W&B; further ones are not sent to it


class WandbMirror:
    """One W&B run, fed by a daemon thread; nothing raises, and only ``close`` waits, with a limit."""

    def __init__(self, wandb: Any, folder: Path, mode: str, options: dict[str, Any]) -> None:
        self._wandb = wandb
        self._folder = folder
        self._mode = mode
        self._options = options
        self._run: Any = None
        self._process: Any = None  # wandb-core, the child that does the work
        self._opened = False  # ever; only a run that was open once is opened again
        self._retry_at = 0.0
        self._given_up = False
        self._said: set[str] = set()
        self._exit_code = 0
        self._preempted = False
        self._stop = threading.Event()
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(BACKLOG_ROWS)
        self._backlog: deque[dict[str, Any]] = deque(maxlen=BACKLOG_ROWS)
        self._sent: deque[tuple[float, dict[str, Any]]] = deque()  # of late, each with its time
        self._thread = threading.Thread(target=self._work, name="longstraw-wandb", daemon=True)
        self._thread.start()

    @staticmethod
    def start(folder: Path, mode: str, options: dict[str, Any]) -> WandbMirror | None:
        """Return the mirror, or ``None`` where it is switched off or wandb is missing or broken."""
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE", "auto").lower()
            mode = {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)
        if mode == "disabled":
            return None
        if mode not in ("auto", "online", "offline"):
            _warn(f"WANDB_MODE={mode} is not one of online, offline, disabled; taken as offline")
            mode = os.environ["WANDB_MODE"] = "offline"  # wandb reads it too, and refuses what it does not know
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry would ask for the network
        try:
            import wandb  # here, not in the thread: simultaneous imports may see half-initialised modules
        except (Exception, SystemExit) as error:
            _warn(f"wandb cannot be imported ({_short(error)}); going on without it")
            return None
        return WandbMirror(wandb, folder, mode, options)

    def log(self, row: dict[str, Any]) -> None:
        """Queue a row; drop it if W&B is too far behind or has failed."""
        if self._given_up:
            return
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._given_up = True
            _warn(f"it is {BACKLOG_ROWS} rows behind; further rows are not sent")

    def close(self, exit_code: int, *, preempted: bool) -> None:
        """Send what is queued and finish the run; give up after a time limit."""
        self._exit_code, self._preempted = exit_code, preempted
        self._stop.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(INIT_SECONDS + FINISH_SECONDS)
        if self._thread.is_alive():
            _warn("it does not finish; left behind")
            if self._process is not None:
                self._process.kill()  # wandb's own exit hook would wait for it for ever
            self._thread.join(5)

    def _work(self) -> None:
        try:
            self._run = self._open()
            self._opened = self._run is not None
            while self._opened:
                row = self._queue.get()
                if row is not None:
                    self._backlog.append(row)
                    self._send()
                if self._stop.is_set() and self._queue.empty():
                    break
            self._finish()
        except BaseException as error:  # the thread ends, the run goes on
            self._warn(f"{_short(error)}; going on without it")
        finally:
            self._given_up = True

    def _send(self) -> None:
        """Send what is queued; after a failure open the run again, but not too often."""
        while self._backlog:
            if self._run is None and not self._reopen():
                return
            try:
                self._run.log(self._values(self._backlog[0]))
            except Exception as error:  # e.g. ConnectionResetError: SLURM's SIGTERM kills wandb's own process too
                self._warn(f"lost ({_short(error)}); it will be opened again")
                self._lose()
                continue
            self._sent.append((time.monotonic(), self._backlog.popleft()))
            while self._sent[-1][0] - self._sent[0][0] > UNSURE_SECONDS:
                self._sent.popleft()

    def _values(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row as ``log`` of a W&B run takes it."""
        table = self._wandb.Table
        return {
            key: table(list(value.columns), list(value.rows)) if isinstance(value, Table) else value
            for key, value in flatten(row).items()
        }

    def _lose(self) -> None:
        """Mark the run as failed and queue its latest rows again: a row twice is better than a missing one."""
        self._drop()
        self._backlog.extendleft(row for _, row in reversed(self._sent))
        self._sent.clear()

    def _reopen(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        self._retry_at = time.monotonic() + REOPEN_SECONDS
        time.sleep(1.1)  # run folders are named by the second
        self._run = self._open()
        return self._run is not None

    def _finish(self) -> None:
        for again in (False, True):
            if self._backlog:
                self._retry_at = 0.0
                self._send()
            if self._run is None:
                return
            try:
                if self._preempted:
                    self._run.mark_preempting()
                self._run.finish(exit_code=self._exit_code)
                return
            except Exception as error:
                self._warn(f"it did not finish properly ({_short(error)})")
                self._lose()
            if again or self._process is None or self._process.poll() is None:  # only a dead one is opened again
                self._backlog.clear()
                return

    def _open(self) -> Any:
        """Return an open run: online, else offline, else ``None``; one line of warning for each that failed."""
        modes = ["online", "offline"] if self._online() else ["offline"]
        for mode, then in zip(modes, [*modes[1:], "without it"], strict=True):
            try:
                return self._init(mode)
            except BaseException as error:
                self._warn(f"{mode} failed ({_short(error)}); going on {then}")
                self._drop()
        return None

    def _online(self) -> bool:
        if self._mode == "offline":
            return False
        has_key = _has_key(self._wandb)
        if self._mode == "online" and not has_key:
            self._warn(
                "online was asked for but no key is configured (WANDB_API_KEY, or `wandb login`); going on offline"
            )
        return has_key

    def _init(self, mode: str) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(
            x_transaction_log_flush_interval=FLUSH_SECONDS,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            console="off",
            silent=True,
            allow_val_change=True,  # a later attempt differs in its number
        )
        self._run = run = self._wandb.init(
            dir=str(self._folder), mode=mode, resume="allow", reinit="create_new", settings=settings, **self._options
        )
        with contextlib.suppress(AttributeError):
            self._process = self._wandb.setup()._connection._proc._process
        # Where it cannot write, wandb moves to the node's own /tmp silently.
        if not Path(run.settings.sync_dir).resolve().is_relative_to(self._folder.resolve()):
            raise OSError(f"wandb cannot write to {self._folder}, it moved to {run.settings.sync_dir}")
        # No step= ever: a server drops steps below its own, and a requeued job repeats some.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _drop(self) -> None:
        """Forget the run and wandb's background process, which may be dead."""
        self._run = None
        with contextlib.suppress(BaseException):
            self._wandb.teardown()

    def _warn(self, message: str) -> None:
        """Warn once for each message: opening a run may fail every minute for days."""
        if message not in self._said:
            self._said.add(message)
            _warn(message)


def _has_key(wandb: Any) -> bool:
    """Whether wandb would find a key without asking: environment, netrc or its settings. No network, no prompt."""
    found = bool(os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))
    try:
        from wandb.sdk.lib import wbauth

        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings  # silent from the start
        host = settings.base_url
        found = found or bool(settings.api_key)
        found = found or bool(
            wbauth.authenticate_session(host=host, source="longstraw", prompt=False, update_session=False)
        )
    except Exception as error:  # wandb may change any of this
        log.debug("looking for a key: %s", _short(error))
    return found


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _warn(message: str) -> None:
    log.warning("W&B: %s", message)
