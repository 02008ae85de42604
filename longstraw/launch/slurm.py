"""Query SLURM through its commands, each with a time limit: states of jobs, limits, test submissions, requeue.

``squeue`` lists a job until some minutes after its end. ``sacct`` lists it for longer but exists only on sites that
keep accounts, and is not needed. Jobs are submitted in ``executors.py``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ASK_SECONDS = 30  # time limit of one command
POLL_SECONDS = 2.0  # between two queries of squeue, for all jobs together
NOT_CONFIGURED = "Could not establish a configuration source"  # SLURM's message where no cluster is set up
FORGET_SECONDS = 60.0  # a job that SLURM has not listed for so long is over
LAG_SECONDS = 10.0  # until a file written on a node is visible here
OVER = {  # final states
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
FIELDS = "JobArrayID:|,State:|,RestartCnt:|,Reason:|"


class SlurmError(RuntimeError):
    """SLURM refused a command or does not answer; has SLURM's own message."""


@dataclass(frozen=True)
class Known:
    """What SLURM reports about one job. ``state`` is SLURM's name, or ``UNKNOWN``."""

    state: str = "UNKNOWN"
    restarts: int = 0
    reason: str = ""  # why it waits, or how it ended

    @property
    def over(self) -> bool:
        return self.state in OVER


def ask(*command: str, stdin: str | None = None) -> str:
    """Return the output of a SLURM command; raise ``SlurmError`` if it fails, is missing or does not answer."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=ASK_SECONDS, check=False, errors="replace"
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on PATH; run this where SLURM's commands are") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} has not answered for {ASK_SECONDS} s") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise SlurmError(_words(done.stderr) or f"{command[0]} ended with {done.returncode} and said nothing")
    return done.stdout


@functools.cache
def is_configured() -> bool:
    """Return whether this machine belongs to a cluster: SLURM's commands may be installed without one.

    A cluster whose controller does not answer counts: submitting to it says why it fails.
    """
    try:
        ask("sinfo", "--noheader", "--format=%R")
    except SlurmError as error:
        return NOT_CONFIGURED not in str(error)
    return True


def _words(text: str) -> str:
    """Return a command's output as one line."""
    return "; ".join(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def array_limit() -> int:
    """Return how many jobs one array may have at this site."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return max(int(found[1]), 1) if found else 1001


def minutes_allowed(partition: str) -> int | None:
    """Return how many minutes a job may take in a partition; ``None``: any number, or unknown."""
    try:
        found = re.search(r"MaxTime=(?:(\d+)-)?(\d+):(\d+):\d+", ask("scontrol", "show", "partition", partition))
    except SlurmError:
        return None
    return int(found[1] or 0) * 1440 + int(found[2]) * 60 + int(found[3]) if found else None


def refusal(script: str) -> str:
    """Return the message with which ``sbatch`` would refuse a batch script; empty if it would accept it."""
    try:
        ask("sbatch", "--test-only", stdin=script)
    except SlurmError as error:
        return str(error)
    return ""


def states() -> dict[str, Known]:
    """Return this user's jobs in ``squeue`` by id (``7`` or ``7_0``): pending, running and recently ended ones."""
    said = ask("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", f"--Format={FIELDS}")
    known = {}
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) >= 4:
            reason = "" if cells[3] == "None" else cells[3]
            known[cells[0]] = Known(cells[1], int(cells[2]) if cells[2].isdecimal() else 0, reason)
    return known


def accounts(ids: Iterable[str]) -> dict[str, Known]:
    """Return the jobs in ``sacct`` by id; none if the site keeps no accounts."""
    arrays = sorted({job_id.split("_")[0] for job_id in ids})
    said = ask("sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State", "-j", ",".join(arrays))
    rows = [line.split("|") for line in said.splitlines()]
    return {row[0]: Known(row[1].split()[0]) for row in rows if len(row) >= 2 and row[1].strip()}


@dataclass
class Queue:
    """The states of many jobs, from one query every ``POLL_SECONDS``."""

    trouble: str = ""  # SLURM's last error, empty if it answers
    _known: dict[str, Known] = field(default_factory=dict)
    _asked: float = -1e9
    _seen: dict[str, float] = field(default_factory=dict)  # when a job was last known, or first asked for
    _over: dict[str, float] = field(default_factory=dict)  # when it was first known to be over

    def look(self, job_id: str) -> Known:
        """Return the state of a job; ``UNKNOWN`` if SLURM no longer lists it (see ``forgotten``)."""
        now = time.monotonic()
        self._seen.setdefault(job_id, now)
        if now - self._asked >= POLL_SECONDS:
            self._asked = now
            self._refresh()
        return self._known.get(job_id, Known())

    def forgotten(self, job_id: str) -> bool:
        """Return whether SLURM answers and has not listed the job for ``FORGET_SECONDS``: then it is over."""
        return not self.trouble and time.monotonic() - self._seen.get(job_id, time.monotonic()) > FORGET_SECONDS

    def over_for(self, job_id: str) -> float:
        """Return for how many seconds a job has been known to be over."""
        return time.monotonic() - self._over.get(job_id, time.monotonic())

    def _refresh(self) -> None:
        try:
            found = states()
            self.trouble = ""
        except SlurmError as error:  # the controller may be restarting while jobs go on: keep the last states
            self.trouble = str(error)
            return
        lost = [job_id for job_id in self._seen if job_id not in found and not self._known.get(job_id, Known()).over]
        if lost:
            with contextlib.suppress(SlurmError):  # only some sites keep accounts
                found = {**accounts(lost), **found}
        self._known |= found
        now = time.monotonic()
        for job_id in self._seen:
            over = self._known.get(job_id, Known()).over
            if over:
                self._over.setdefault(job_id, now)
            else:
                self._over.pop(job_id, None)
            if job_id in found or over:
                self._seen[job_id] = now
            else:
                self._known.pop(job_id, None)


@dataclass(frozen=True)
class Submitted:
    """A submitted job, with the interface of submitit's handles, which need accounting to see that a job died."""

    job_id: str
    paths: Any  # submitit's, of rank 0
    queue: Queue
    has_result: Callable[[], bool] = lambda: False  # whether the job has written its result

    @property
    def known(self) -> Known:
        return self.queue.look(self.job_id)

    @property
    def state(self) -> str:
        """The state to show: ``PENDING`` for any waiting job, else SLURM's own name."""
        state = self.known.state
        return "PENDING" if state in WAITING else state

    def done(self) -> bool:
        """Return whether the job is over; without its result only after a delay, as shared file systems lag."""
        if not self.known.over:
            return self.queue.forgotten(self.job_id)
        return self.has_result() or self.queue.over_for(self.job_id) > LAG_SECONDS

    def note(self) -> str:
        """Return a remark for the user: why the job is pending, or that SLURM does not answer."""
        known = self.known
        if self.queue.trouble:
            return f"SLURM does not answer ({self.queue.trouble}); the job goes on"
        again = f"preempted {known.restarts} time{'s' * (known.restarts > 1)}" if known.restarts else ""
        waits = known.reason if known.state in WAITING and known.reason not in ("Resources", "Priority") else ""
        return ", ".join(filter(None, (again, advice(waits))))

    def cancel(self, check: bool = True) -> None:
        try:
            ask("scancel", self.job_id)
        except SlurmError:
            if check:
                raise


ADVICE = {
    "PartitionTimeLimit": "longer than the partition allows, it will never start; lower hardware.time_min",
    "PartitionNodeLimit": "more nodes than the partition allows; lower hardware.nodes",
    "launch failed requeued held": "held after a failed start; release it with scontrol release, or scancel it",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held; release it with scontrol release",
    "BeginTime": "",  # the pause after a requeue
}


def advice(reason: str) -> str:
    """Return SLURM's reason why a job waits, with an explanation of the less clear ones."""
    meaning = ADVICE.get(reason)
    if meaning is None:
        return reason
    return f"{reason}: {meaning}" if meaning else ""


def own_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return this process's SLURM job id, with the index in its array; ``None`` outside of SLURM."""
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def requeue(job_id: str) -> bool:
    """Put the running job back into the queue; return whether that was done. A cancelled job is not requeued."""
    known = states().get(job_id)
    if known is not None and known.state != "RUNNING":
        return False
    ask("scontrol", "requeue", job_id)
    return True
