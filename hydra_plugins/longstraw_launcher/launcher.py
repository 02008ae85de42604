"""The Hydra launcher of LongStraw: compose all jobs of a sweep and pass them to ``longstraw.launch.jobs``."""

# No `from __future__ import annotations` beside a dataclass here: Hydra executes this module before it is imported.
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


@dataclass
class LauncherConfig:
    """Nothing to set: resources come from each job's ``hardware``, the rest from ``launch``."""

    _target_: str = "hydra_plugins.longstraw_launcher.launcher.LongStrawLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="longstraw", node=LauncherConfig())


class LongStrawLauncher(Launcher):
    """Compose every job first, then launch all of them or, where one is wrong, none."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what ``launch`` needs."""
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Launch the jobs and wait; exit with their status if any failed."""
        from longstraw.launch.jobs import launch
        from longstraw.launch.prepare import prepare
        from longstraw.launch.spec import draft
        from longstraw.tracking.command_line import typed_command

        folder = Path(str(self.config.hydra.sweep.dir)).absolute()
        composed = [self.loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        drafts = []
        for num, config in enumerate(composed, initial_job_idx):
            with open_dict(config):
                config.hydra.job.num, config.hydra.job.id = num, str(num)
            run_dir = folder / str(config.hydra.sweep.subdir)
            drafts.append(draft(num, list(config.hydra.overrides.task), run_dir, _task(config)))
        jobs = prepare(drafts, command=typed_command(), sweep=folder.name)
        for job, config in zip(jobs, composed, strict=True):
            save_composed(_task(config), config.hydra.overrides.task, job.run_dir)
        code = launch(jobs, folder, alone=False)
        if code:
            raise SystemExit(code)
        return [
            JobReturn(overrides=job_overrides[i], working_dir=str(job.run_dir), status=JobStatus.COMPLETED)
            for i, job in enumerate(jobs)
        ]


def _task(composed: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


def save_composed(task: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Write a job's configuration where Hydra would; Hydra itself writes before the folder is known to be free."""
    notes = run_dir / ".hydra"
    notes.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(task, notes / "config.yaml")
    OmegaConf.save(OmegaConf.create(list(overrides)), notes / "overrides.yaml")
