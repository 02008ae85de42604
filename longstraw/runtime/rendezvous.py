"""Connect the ranks of a job: find rank 0's store, create the process group, and close both at the end.

Rank 0 opens a store on a free port and writes its address to a file in the run's folder, which the others read; under
torchrun its own address is used. A job of one rank needs none of this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from longstraw.config import HardwareConfig
from longstraw.errors import RankLostError
from longstraw.runtime.failure_files import parse_failure, ranks_folder, read_failure
from longstraw.runtime.heartbeat import EMPTY, Heartbeat
from longstraw.runtime.process_info import ProcessInfo, check_world_size, process_info
from longstraw.runtime.whole_files import write_whole

POLL_SECONDS = 0.05
COMPOSE = timedelta(minutes=5)  # until rank 0 has read the configuration
CONNECT = timedelta(seconds=15)  # timeout for an address that may belong to an earlier store


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its job; ``node`` counts machines, ``local_rank`` the ranks of one."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    device: torch.device
    peers: Heartbeat | None = field(default=None, repr=False, compare=False)

    def cause(self, error: Exception) -> Exception:
        """Return the cause of ``error``: itself, or a ``RankLostError`` that names the rank that failed first.

        To be called before a record about ``error`` is written. Waits until no other rank can have failed first.
        """
        found = error if self.peers is None else self.peers.cause(error)
        return found if isinstance(found, Exception) else error


@contextmanager
def connect(
    hardware: HardwareConfig,
    run_dir: Path,
    attempt: int = 0,
    *,
    before_exit: Callable[[RankLostError], None] = lambda lost: None,
) -> Iterator[Ranks]:
    """Yield this process's place among the job's ranks, in a process group if there is more than one.

    While the block runs the ranks monitor each other. If one fails, stops answering or never connects, the others raise
    ``RankLostError`` within ``hardware.timeout_s``; a rank that waits inside a collective calls ``before_exit`` and
    exits with 1. Leaving the block waits for all ranks. Raises ``ConfigError`` if the ranks started are not those of
    ``hardware``.
    """
    me = process_info()
    check_world_size(me, hardware)
    device = _device(hardware, me)
    if me.world_size == 1:
        yield Ranks(0, 1, 0, me.node, device)
        return
    folder, limit, failed = ranks_folder(run_dir, attempt), timedelta(seconds=hardware.timeout_s), True
    store, host, port = _meet(me, hardware, folder)
    peers = Heartbeat(me, _client(host, port, me, hardware.timeout_s), folder, hardware.timeout_s, before_exit)
    try:
        peers.gather()
        group = dist.PrefixStore("group", store)
        bound = device if device.type == "cuda" else None
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=group, rank=me.rank, world_size=me.world_size, timeout=limit, device_id=bound
        )
        yield Ranks(me.rank, me.world_size, me.local_rank, me.node, device, peers)
        peers.disconnect(store)
        failed = False
    except BaseException as error:
        cause = peers.cause(error)
        peers.stop(cause)
        if cause is error:
            raise
        raise cause from error
    finally:
        _close_groups(abort=failed and device.type == "cuda")
        if me.rank == 0:
            _address_file(folder, me).unlink(missing_ok=True)


def _close_groups(abort: bool) -> None:
    """End all process groups; ``abort`` does not wait for collectives that a failed rank will never take part in."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            (dist.distributed_c10d._abort_process_group if abort else dist.destroy_process_group)()


def _device(hardware: HardwareConfig, me: ProcessInfo) -> torch.device:
    if hardware.backend == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", me.local_rank % max(torch.cuda.device_count(), 1))  # SLURM may show a task one GPU
    torch.cuda.set_device(device)
    return device


def _address_file(folder: Path, me: ProcessInfo) -> Path:
    return folder / f"address.{me.start}"


def _meet(me: ProcessInfo, hardware: HardwareConfig, folder: Path) -> tuple[dist.Store, str, int]:
    """Return a connection to the job's store, and the store's host and port."""
    limit = timedelta(seconds=hardware.timeout_s)
    if me.by == "torchrun":
        store = torchrun_store()
        store.set_timeout(limit)
        return store, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if me.rank == 0:
        # Names need not resolve where all ranks are on one machine.
        host = "127.0.0.1" if me.local_world_size == me.world_size else socket.gethostname()
        store = dist.TCPStore(host, 0, None, True, limit, wait_for_workers=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(_address_file(folder, me), f"{host} {store.port}")
        return _prefixed(store, me), host, store.port
    begun, patience, reason = time.monotonic(), 0.8 * hardware.timeout_s, ""
    while time.monotonic() - begun < patience:
        if failure := read_failure(folder, 0):
            raise parse_failure(failure)
        with contextlib.suppress(OSError):
            host, port = _address_file(folder, me).read_text().split()
            try:
                return _client(host, int(port), me, hardware.timeout_s), host, int(port)
            except RuntimeError as error:  # an old address, or a host that cannot be reached from here
                reason = f" (its store at {host}:{port} cannot be reached: {str(error).splitlines()[0]})"
        time.sleep(POLL_SECONDS)
    raise RankLostError(0, "an unknown host", f"never came: waited {patience:.0f} s for its address{reason}")


def _client(host: str, port: int, me: ProcessInfo, timeout_s: float) -> dist.Store:
    """Return a new connection to the store at ``host``."""
    store = dist.TCPStore(host, port, None, False, CONNECT, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout_s))
    return _prefixed(store, me)


def _prefixed(store: dist.Store, me: ProcessInfo) -> dist.Store:
    return dist.PrefixStore(f"longstraw/{me.start}", store)  # torchrun's store may outlive a restart


@functools.cache
def torchrun_store() -> dist.Store:
    """Return this process's connection to torchrun's store; rank 0 opens it where torchrun's agent does not."""
    me = process_info()
    serves = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return _prefixed(dist.TCPStore(host, port, None, serves, COMPOSE, wait_for_workers=False), me)


def offer_job(run_dir: Path | None) -> None:
    """Publish the job that rank 0 composed to torchrun's other ranks; ``None``: no job, unless one was published."""
    torchrun_store().compare_set("run_dir", "", str(run_dir.absolute()) if run_dir else EMPTY)


def offered_job() -> Path | None:
    """Wait for rank 0 to compose a job and return its folder; ``None`` if there is no job."""
    try:
        said = torchrun_store().get("run_dir").decode()
    except RuntimeError as error:
        raise RankLostError(0, os.environ["MASTER_ADDR"], f"composed no job: {str(error).splitlines()[0]}") from None
    return None if said == EMPTY else Path(said)
