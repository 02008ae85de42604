"""Check the jobs of a command all together, then freeze each to its ``spec.json``, before any of them starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from longstraw.config import ConfigError, to_dict
from longstraw.data import check_responses
from longstraw.launch.executors import check_path, check_slurm
from longstraw.launch.inputs import check_inputs, without_effect
from longstraw.launch.placement import resolve
from longstraw.launch.spec import SPEC, Draft, Job, belongs_to_folder, freeze, new_run_id
from longstraw.runtime.process_info import process_info


def prepare(drafts: Sequence[Draft], *, command: str, sweep: str | None) -> list[Job]:
    """Return the jobs, each frozen to its ``spec.json``; raise ``ConfigError`` naming every job that is wrong."""
    jobs: dict[Path, Job] = {}
    wrong = [(given.num, given.error) for given in drafts if given.error]
    asked: dict[str, str] = {}  # sbatch's answer for each set of resources
    going_on: set[Path] = set()  # folders of jobs that SLURM started again
    for given in drafts:
        if given.config is None:
            continue
        try:
            placement = resolve(given.config)
            if given.run_dir in jobs:
                raise ConfigError(f"{given.run_dir} is also job {jobs[given.run_dir].num}'s folder; hydra.sweep.subdir")
            if belongs_to_folder(given.run_dir, given.config):
                going_on.add(given.run_dir)
            if placement.executor == "slurm":
                check_slurm(given.run_dir.parent, given.config, asked)
            if sweep or placement.executor == "slurm" or given.config.processes.world_size != process_info().world_size:
                check_path(given.run_dir, placement.executor)
            given.config.mode = placement.mode
            check_inputs(given.config)
            if given.config.mode == "run":
                check_responses(given.config)
        except (NameError, ValueError, RuntimeError, OSError) as error:
            wrong.append((given.num, str(error)))
            continue
        jobs[given.run_dir] = Job(given.num, given.overrides, given.run_dir, given.config, placement)
    if wrong:
        raise ConfigError(_error_lines(wrong, len(drafts)))
    for note in dict.fromkeys(filter(None, (without_effect(job.config) for job in jobs.values()))):
        print(f"longstraw: {note}", file=sys.stderr)
    stamp = new_run_id(drafts[0].run_dir.parent.name)
    frozen: list[Path] = []
    try:
        for job in jobs.values():
            if job.run_dir not in going_on:
                spec = {"run_id": f"{stamp}-{job.num}", "sweep": sweep, "num": job.num, "overrides": job.overrides}
                freeze(job.run_dir, {**spec, "command": command, "config": to_dict(job.config)})
                frozen.append(job.run_dir)
    except BaseException:
        for run_dir in frozen:
            (run_dir / SPEC).unlink(missing_ok=True)
        raise
    return list(jobs.values())


def _error_lines(wrong: Sequence[tuple[int, str]], count: int) -> str:
    """Return one line for each reason, with its jobs."""
    reasons: dict[str, list[str]] = {}
    for num, reason in sorted(wrong):
        reasons.setdefault(reason, []).append(str(num))
    if count == 1:
        return next(iter(reasons))
    lines = [f"job{'s' * (len(nums) > 1)} {', '.join(nums)}: {reason}" for reason, nums in reasons.items()]
    return "\n".join([f"{len({num for num, _ in wrong})} of {count} jobs are wrong, none was started", *lines])
