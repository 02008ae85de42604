"""Jobs in ``mode=simulate`` and ``mode=emulate``: the steps of one rank, written as the records of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from longstraw.config import RunConfig
from longstraw.memory.fit import exceeded
from longstraw.selfcheck import check_job
from longstraw.simulation.emulate import emulate
from longstraw.simulation.simulate import simulate
from longstraw.tracking.recorder import RunIdentity, job_recorder
from longstraw.training.monitor import Progress
from longstraw.training.rank_metrics import MEANS

VALUES = (*MEANS, "grad_norm", "recompute_difference")  # what only a run has
StepRows = Callable[[RunConfig, Progress], Iterable[dict[str, Any]]]


def simulate_job(config: RunConfig, run_dir: str | Path, identity: RunIdentity) -> None:
    """Simulate the largest steps of one job and write their records."""
    run_single_rank(simulate, "simulate", config, run_dir, identity)


def emulate_job(config: RunConfig, run_dir: str | Path, identity: RunIdentity) -> None:
    """Emulate the steps of one job and write their records to ``run_dir``."""
    checked, wrong = check_job(config)
    if wrong is not None:
        raise wrong
    run_single_rank(emulate, "emulate", config, run_dir, identity, selfcheck=checked)


def run_single_rank(
    play: StepRows,
    mode: str,
    config: RunConfig,
    run_dir: str | Path,
    identity: RunIdentity,
    *,
    selfcheck: str | None = "off",
) -> None:
    """Write the rows that ``play`` yields to ``run_dir`` as the records of a job in ``mode``."""
    folder = Path(run_dir)
    with job_recorder(config, folder, identity, mode=mode, selfcheck=selfcheck) as recorder:
        for row in play(config, Progress(folder / "progress.json")):
            own = {"peak_allocated_bytes_by_rank": [row["peak_allocated_bytes"]]}
            chosen = {"simulated_rank": config.simulation.rank, "expert_imbalance": config.simulation.imbalance}
            over = exceeded(config, row["peak_allocated_bytes"], row["peak_verb"], row["peak_bytes_by_kind"])
            recorder.log({**row, **own, **chosen, **dict.fromkeys(VALUES), **over})
            if over:  # a later step that holds less must not be the job's last word
                break
