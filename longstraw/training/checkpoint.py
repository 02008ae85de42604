"""Write and read a job's checkpoints: trained parameters, optimizer, random states and step; whole or not at all.

A checkpoint is a folder ``step-00000012``: 12 optimizer steps are in it, and the next one is number 12. Data and
learning rate follow from the step's number and need no state of their own. The retained prompt is not saved but
evaluated anew. All ranks write, through torch.distributed.checkpoint, so tensors may be DTensors and another
number of ranks may read.

    step-00000012/state.json     step, attempt, ranks, configuration, length and sum of every other file; written last
                 /.metadata      torch's: names, shapes, who wrote what
                 /__0_0.distcp   rank 0's part

It is written under a temporary name and renamed when every rank is done.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from longstraw.config.specification import differing_keys
from longstraw.errors import RankLostError, describe, os_error, os_reason, status_of, write_error
from longstraw.parallel.fsdp import local_tensor

log = logging.getLogger(__name__)

STATE = "state.json"
FORMAT = 1
BLOCK = 1 << 24  # bytes read at a time for a file's sum


class CheckpointMismatchError(ValueError):
    """A checkpoint is intact but does not fit the job; the message says how they differ."""


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` holds on any rank; every rank must call it."""
    if not _ranks_are_several():
        return flag
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    held = torch.tensor(int(flag), device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return bool(held)


@dataclass(frozen=True)
class Owner:
    """The run that checkpoints belong to: its configuration (without one nothing is checked) and its attempt.

    ``keep_last`` checkpoints are kept.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    keep_last: int = 2


class Checkpoints:
    """The checkpoints of one job, in a folder that all its ranks share.

    ``parameters`` are the trained ones by name, restored in place; ``updated`` the tensors that the optimizer updates
    for them, such as copies in host memory; ``owner`` the run they belong to. ``superseded`` returns whether a later
    attempt of the job has begun: then nothing more is written.
    """

    def __init__(
        self,
        folder: str | Path,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        *,
        updated: Mapping[str, Tensor] | None = None,
        owner: Owner | None = None,
        superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder = Path(folder)
        self.parameters, self.optimizer = dict(parameters), optimizer
        self.updated = self.parameters if updated is None else dict(updated)
        named = {id(tensor) for tensor in self.updated.values()}
        groups = optimizer.param_groups if optimizer is not None else []
        if set(self.updated) != set(self.parameters) or not {id(p) for g in groups for p in g["params"]} <= named:
            raise ValueError("the optimizer updates tensors without a name; their state would be lost")
        self.owner, self.superseded = owner or Owner(), superseded
        self.newest: int | None = None  # step of the newest one written or read

    def save(self, step: int) -> bool:
        """Write a checkpoint of the first ``step`` steps; return whether it was written. All ranks call it together."""
        place = self.folder / _name(step)
        beside = self.folder / f".{place.name}.attempt-{self.owner.attempt}"
        try:
            return self._write(step, place, beside)
        except Exception as error:
            found = os_error(error) or write_error(beside if beside.exists() else self.folder)
            if _rank() == 0:
                shutil.rmtree(beside, ignore_errors=True)  # on a full disk, leave room for the record
            if found is None:
                raise
            reason = self._unwritten(step, found)
            if isinstance(error, RankLostError):
                raise RankLostError(error.rank, error.host, f"failed: {reason}", error.status) from error
            raise OSError(found.errno, reason) from error

    def _write(self, step: int, place: Path, beside: Path) -> bool:
        if _rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)  # left by a save that was killed
            beside.mkdir(parents=True)
        _together()
        with _plain():
            dcp.save(self._tensors(), checkpoint_id=beside, no_dist=not _ranks_are_several())
        sums = _sums(beside, _from_first(lambda: sorted(path.name for path in beside.iterdir())))
        stands = not any_rank(self.superseded())
        if _rank() == 0:
            if stands:
                self._publish(beside, place, step, sums)
            else:
                shutil.rmtree(beside, ignore_errors=True)
        _together()
        if stands:
            self.newest = step
        return stands

    def _unwritten(self, step: int, error: OSError) -> str:
        """Return the error message for a checkpoint that could not be written."""
        older = f"that of step {self.newest} is whole" if self.newest is not None else "there is no older one"
        again = f"once it can be, go on with: python -m longstraw.status {self.folder.parent} --again"
        return f"{os_reason(error)}: the checkpoint of step {step} is not written, {older}; {again}"

    def load(self) -> int | None:
        """Restore the newest whole checkpoint; return its step, or ``None`` where there is none.

        A broken one is skipped with a warning, before anything is read into the parameters. Raises
        ``CheckpointMismatchError`` if an intact one does not fit.
        """
        for name, state in _from_first(lambda: [(x, read_state(self.folder / x)) for x in _steps(self.folder)]):
            if wrong := _wrong(self.folder / name, state):
                if _rank() == 0:
                    log.warning("checkpoint %s is broken and skipped: %s", self.folder / name, wrong)
                continue
            self._check_owner(self.folder / name, state)
            self._read(self.folder / name)
            self.newest = int(state["step"])
            return self.newest
        return None

    def restore(self, place: Path) -> None:
        """Read the checkpoint in ``place``, of whatever run; raise ``CheckpointMismatchError`` if it is broken."""
        if wrong := _wrong(place, read_state(place)):
            raise CheckpointMismatchError(f"{place} is broken: {wrong}")
        self._read(place)

    def _tensors(self) -> dict[str, Tensor]:
        """Return all that is written, by name."""
        tensors = {f"parameters.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        if self.optimizer is not None:
            for name, updated in self.updated.items():
                for key, value in self.optimizer.state.get(updated, {}).items():
                    tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
        return tensors | random_states()

    def _publish(self, beside: Path, place: Path, step: int, sums: dict[str, list[int]]) -> None:
        """Give a written checkpoint its name, and remove those no longer kept."""
        state = {"format": FORMAT, "step": step, "attempt": self.owner.attempt, "ranks": _ranks(), "files": sums}
        state["config"] = self.owner.config
        with (beside / STATE).open("w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():  # from an earlier attempt
            old = place.with_name(f".{place.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        beside.rename(place)
        _sync(self.folder)
        kept = [name for name in _steps(self.folder) if read_state(self.folder / name)]
        for path in self.folder.iterdir():
            stale = path.name.startswith(".step-") and path.name != beside.name
            if stale or (path.name in kept[self.owner.keep_last :]):
                shutil.rmtree(path, ignore_errors=True)

    def _read(self, place: Path) -> None:
        held = {
            name: item
            for name, item in dcp.FileSystemReader(place).read_metadata().state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
        }
        self._check(place, {name: tuple(item.size) for name, item in held.items()})
        wanted = {f"parameters.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        random = {name: state for name, state in random_states().items() if name in held}
        moments = self._moments(held)
        made = {f"optimizer.{name}.{key}": value for (name, key), value in moments.items()}
        with _plain():
            dcp.load(wanted | random | made, checkpoint_id=place, no_dist=not _ranks_are_several())
        with torch.no_grad():
            for name, updated in self.updated.items():
                if updated is not self.parameters[name]:
                    local_tensor(updated).copy_(local_tensor(self.parameters[name]))
        if self.optimizer is not None:
            self.optimizer.state.clear()
            for (name, key), value in moments.items():
                self.optimizer.state[self.updated[name]][key] = value
        set_random_states(random)

    def _moments(self, held: Mapping[str, TensorStorageMetadata]) -> dict[tuple[str, str], Tensor]:
        """Return zeros to read the optimizer's tensors into, by parameter and key, laid out like the parameter."""
        if self.optimizer is None:
            return {}
        moments = {}
        for full, item in held.items():
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            if not full.startswith("optimizer.") or name not in self.updated:
                continue
            like, dtype = self.updated[name].detach(), item.properties.dtype
            if tuple(item.size) == tuple(like.shape):
                moments[name, key] = torch.zeros_like(like, dtype=dtype)
            else:  # such as the step count, which fused kernels need on the parameter's device
                device = like.device if self.optimizer.defaults.get("fused") else "cpu"
                moments[name, key] = torch.zeros(tuple(item.size), dtype=dtype, device=device)
        return moments

    def _check_owner(self, place: Path, state: Mapping[str, Any]) -> None:
        """Raise ``CheckpointMismatchError`` if the checkpoint is of a run with another configuration."""
        keys = differing_keys(state.get("config") or self.owner.config, self.owner.config) if self.owner.config else {}
        steps = self.owner.config.get("steps")
        if steps is not None and int(state["step"]) > steps:
            keys["steps"] = (f"{state['step']} taken", steps)
        if keys:
            wrong = ", ".join(f"{key} ({before} there, {now} here)" for key, (before, now) in keys.items())
            raise CheckpointMismatchError(
                f"{place} is of a run with another configuration: {wrong}; resume it with that "
                "configuration, or start a run in another folder"
            )

    def _check(self, place: Path, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``CheckpointMismatchError`` unless the checkpoint holds these parameters."""
        held = {
            name.removeprefix("parameters."): size for name, size in sizes.items() if name.startswith("parameters.")
        }
        for what, names in (
            ("lacks", sorted(set(self.parameters) - set(held))),
            ("has besides", sorted(set(held) - set(self.parameters))),
            ("has in another shape", sorted(n for n, p in self.parameters.items() if held.get(n, p.shape) != p.shape)),
        ):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise CheckpointMismatchError(
                    f"{place} {what} {', '.join(names[:3])}{more}: it is of another model or adapter; use the run's "
                    f"own folder, or move the checkpoints away to start anew"
                )


def read_state(place: Path) -> dict[str, Any]:
    """Return the ``state.json`` of a checkpoint; empty if it is missing, incomplete or of another format."""
    try:
        state = json.loads((place / STATE).read_text())
    except (OSError, ValueError):
        return {}
    whole = isinstance(state, dict) and state.get("format") == FORMAT and isinstance(state.get("files"), dict)
    return state if whole else {}


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _steps(folder: Path) -> list[str]:
    """Return the names of the folders that should be checkpoints, the newest first."""
    return sorted((path.name for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def _wrong(place: Path, state: dict[str, Any]) -> str:
    """Return how a checkpoint differs from what was written; empty if it is intact."""
    if not state:
        return f"{STATE} is missing or torn"
    written = state["files"]
    found = _sums(place, sorted(written))
    return ", ".join(f"{f} {_difference(written[f], found[f])}" for f in sorted(written) if found[f] != written[f])


def _sums(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """Return length and CRC-32 of each file, [-1, 0] for one that is not there; the ranks share the work."""
    mine = {name: _sum(folder / name) for name in names[_rank() :: _ranks()]}
    if not _ranks_are_several():
        return mine
    parts: list[Any] = [None] * _ranks()
    dist.all_gather_object(parts, mine)
    return {name: value for part in parts for name, value in part.items()}


def _sum(path: Path) -> list[int]:
    length, total = 0, 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                length, total = length + len(block), zlib.crc32(block, total)
    except OSError:
        return [-1, 0]
    return [length, total]


def _difference(written: list[int], found: list[int]) -> str:
    if found[0] < 0:
        return "is missing"
    return f"has {found[0]:,} of {written[0]:,} bytes" if found[0] != written[0] else "has other content"


def random_states() -> dict[str, Tensor]:
    """Return this rank's random states by name."""
    states = {f"random.{_rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.{_rank()}.cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Set this rank's random states; a rank without saved ones keeps its own."""
    for name, state in states.items():
        (torch.cuda.set_rng_state if name.endswith(".cuda") else torch.set_rng_state)(state)


def _sync(folder: Path) -> None:
    """Sync a folder's entries to disk, if the file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Silence torch's warning about a single rank, and raise the original error, with its rank, in place of torch's.

    torch's own is no ``Exception``, so handlers of exceptions would miss a full disk.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: (item[0] != _rank(), item[0]))
        if rank == _rank() or not isinstance(cause, Exception):
            raise cause from error
        raise RankLostError(rank, "its host", f"failed: {describe(cause)}", status_of(cause)) from error


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _ranks_are_several() -> bool:
    return _ranks() > 1


def _together() -> None:
    """Wait for all ranks."""
    if _ranks_are_several():
        dist.barrier()


def _from_first(look: Callable[[], list[Any]]) -> list[Any]:
    """Return rank 0's result on all ranks: on a shared file system their listings may differ for a while."""
    if not _ranks_are_several():
        return look()
    said = [look() if _rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    return said[0] or []
