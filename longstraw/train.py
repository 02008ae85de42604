"""The loop of a job: groups in, optimizer steps, one record a step."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstraw.budget import predict, step_flops
from longstraw.checkpoint import agreed
from longstraw.config import RunConfig, gradient_start, native_length_warning, to_dict
from longstraw.data import Task, build_task
from longstraw.failures import describe, status_of
from longstraw.grpo import Group, advantages, branch_losses
from longstraw.memory import MemoryMeter
from longstraw.models import build_model, load_model
from longstraw.models.adapter import adapters_off, add_adapter, save_adapter
from longstraw.models.decoder import Decoder
from longstraw.models.weights import save_model
from longstraw.observe import Progress, Watch
from longstraw.provenance import startup_facts
from longstraw.record import Recorder
from longstraw.resume import Keeper
from longstraw.schema import constant_keys
from longstraw.step import (
    Retained,
    StepResult,
    check_group,
    finish_step,
    old_policy_logprobs,
    prefill,
    score_fresh,
)
from longstraw.stop import Preempted, Stop, Superseded

log = logging.getLogger(__name__)


class NotFiniteError(ValueError):
    """A step whose loss or gradient is NaN or infinite; its record is written, its parameters are unchanged."""


@dataclass
class Shared:
    """A retained prompt that several optimizer steps share."""

    group: Group
    retained: Retained
    old_logprobs: list[Tensor] | None
    reference_logprobs: list[Tensor] | None
    age: int = 0


@dataclass
class Trainer:
    """What lives as long as the job."""

    config: RunConfig
    model: Decoder
    task: Task
    watch: Watch
    optimizer: torch.optim.Optimizer | None
    reference: Decoder | None  # of the KL term, where it is another model
    shared: Shared | None = None
    parameters: list[torch.nn.Parameter] = field(default_factory=list)  # the trained ones

    def step(self, step: int) -> dict[str, Any]:
        """Take one optimizer step and return its record."""
        self.watch.start()
        begun = time.perf_counter()
        optimizer_held = self.optimizer is not None and bool(self.optimizer.state)  # made by the first step's update
        shared, prefilled, scored = self._prompt(step)
        result = finish_step(
            self.model,
            shared.retained,
            shared.group,
            algorithm=self.config.algorithm,
            response_length=self.config.response_length,
            old_logprobs=shared.old_logprobs,
            reference_logprobs=shared.reference_logprobs,
            prefilled=prefilled,
            scored=scored,
            observer=self.watch,
        )
        if shared.retained.grad_from is not None or self.config.refresh_every == 1:
            self.shared = None
        seconds = time.perf_counter() - begun
        with self.watch.aside():
            drift = self._drift(shared, result)
        begun = time.perf_counter()
        norm = self._update(result.loss)
        seconds += time.perf_counter() - begun
        self.watch.peaks.collect()
        row = {**self._measured(shared, result, optimizer_held), **self._learnt(shared, result), **drift}
        row |= {"step": step, "status": "ok", "seconds": seconds, "grad_norm": norm}
        if not math.isfinite(norm) or not math.isfinite(row["loss"]):
            row |= {"status": "error", "error": f"loss {row['loss']}, gradient norm {norm}: no step was taken"}
        return row

    def _prompt(self, step: int) -> tuple[Shared, int, int]:
        """Return the retained prompt of this step, evaluated now or before, and the positions that took."""
        if self.shared is not None and step % self.config.refresh_every:
            self.shared.age += 1
            return self.shared, 0, 0
        self.shared = None  # the old prompt's state is gone before the new one's is made
        config, algorithm = self.config, self.config.algorithm
        group = self.task.group(step)
        check_group(group, self.model, algorithm, self.model if algorithm.kl_coef else None)
        group = group.to(self.model.lm_head.weight.device)
        self.watch.meter.tag("inputs", [group.prompt, *group.responses])
        reference = None
        if algorithm.kl_coef:
            with nullcontext() if self.reference is not None else adapters_off(self.model):
                reference = score_fresh(self.reference or self.model, group, chunk=config.chunk, observer=self.watch)
        grad_from = gradient_start(
            group.prompt_positions - 1, config.chunk, config.prompt_grad, config.prompt_grad_window
        )
        retained = prefill(self.model, group.prompt, chunk=config.chunk, grad_from=grad_from, observer=self.watch)
        old = old_policy_logprobs(self.model, retained, group, algorithm, observer=self.watch)
        self.shared = Shared(group, retained, old, reference)
        scored = sum(group.response_positions) * self._scorings()
        scored += retained.positions if reference is not None else 0  # the reference evaluates the prompt for itself
        return self.shared, retained.positions, scored

    def _scorings(self) -> int:
        """Return how often the responses are evaluated without a graph on a fresh prompt."""
        return bool(self.config.algorithm.kl_coef) + (self.config.algorithm.old_logprobs == "score")

    def _drift(self, shared: Shared, result: StepResult) -> dict[str, float | None]:
        """Return how far log-probabilities and loss are from those on a freshly evaluated prompt.

        A state of age 0 is the freshly evaluated one, so its drift is 0; it is measured all the same where the state
        will be reused. A loss on policy has none to tell: its ratios are 1 whatever the log-probabilities are.
        """
        if self.config.refresh_every == 1:
            return {"logprob_drift": 0.0, "loss_drift": 0.0}
        if not self.config.measure_drift:
            return {}
        fresh = score_fresh(self.model, shared.group, chunk=self.config.chunk, observer=self.watch)
        masks = shared.group.loss_masks or [torch.ones(len(x), dtype=torch.bool) for x in fresh]
        differences = [(a - b).abs()[m.cpu()] for a, b, m in zip(result.logprobs, fresh, masks, strict=True)]
        drift: dict[str, float | None] = {"logprob_drift": float(torch.cat(differences).mean())}
        if shared.old_logprobs is None and not self.config.algorithm.kl_coef:
            return drift
        stale_loss, fresh_loss = (self._loss(shared, logprobs) for logprobs in (result.logprobs, fresh))
        change = abs(stale_loss - fresh_loss)
        return {**drift, "loss_drift": 0.0 if change == 0 else change / abs(fresh_loss) if fresh_loss else None}

    def _loss(self, shared: Shared, logprobs: list[Tensor]) -> float:
        """Return the group's loss for log-probabilities that are already there."""
        losses = branch_losses(
            shared.group,
            self.config.algorithm,
            self.config.response_length,
            shared.old_logprobs,
            shared.reference_logprobs,
            torch.device("cpu"),
        )
        return sum(float(loss_of(lp).loss) for loss_of, lp in zip(losses, logprobs, strict=True))

    def _update(self, loss: Tensor) -> float:
        """Clip the gradients, take the optimizer's step and drop them; return their norm before clipping.

        A loss or norm that is not finite takes no step: the parameters stay as they were.
        """
        self.watch.note()
        with self.watch.verb("optimizer", 0):
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            finite = bool(norm.isfinite() & loss.isfinite())
            if finite and self.config.optimizer.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.optimizer.max_grad_norm, norm)
            if finite and self.optimizer is not None:
                self.optimizer.step()
                self.tag_optimizer()
            for parameter in self.parameters:
                parameter.grad = None
        return float(norm)

    def tag_optimizer(self) -> None:
        """Tell the meter which tensors are the optimizer's."""
        if self.optimizer is not None:
            self.watch.meter.tag("optimizer", [list(state.values()) for state in self.optimizer.state.values()])

    def _measured(self, shared: Shared, result: StepResult, optimizer_held: bool) -> dict[str, Any]:
        peaks = self.watch.peaks
        longest = max(shared.group.response_positions)
        by_kind = self.watch.meter.bytes_by_kind()
        prompt_positions, responses = shared.group.prompt_positions, shared.group.response_positions
        fresh = shared.age == 0
        prediction = predict(
            self.config,
            prompt_positions=prompt_positions,
            response_positions=longest,
            optimizer_held=optimizer_held,
            prefilled=fresh,
        )
        flops = step_flops(
            self.config,
            prompt_positions=prompt_positions,
            responses=responses,
            prefilled=fresh,
            scored=self._scorings() if fresh else 0,
        )
        return {
            "prompt_positions": prompt_positions,
            "response_positions": longest,
            "prefilled_positions": result.prefilled_positions,
            "replayed_positions": result.replayed_positions,
            "scored_positions": result.scored_positions,
            "recomputed_positions": result.recomputed_positions,
            "state_age": shared.age,
            "peak_allocated_bytes": peaks.peak,
            "peak_allocated_bytes_by_rank": [peaks.peak],
            "peak_verb": peaks.verb,
            "peak_by_verb": peaks.by_verb,
            "predicted_peak_bytes": prediction.peak,
            "measured_by": "storages",
            "peak_bytes_by_kind": peaks.by_kind,
            "predicted_bytes_by_kind": prediction.by_kind,
            "parameter_bytes": by_kind["parameters"],
            "gradient_bytes": self.watch.most["gradients"],
            "optimizer_bytes": by_kind["optimizer"],
            "retained_bytes": sum(result.retained_bytes.values()),
            "retained_bytes_by_kind": result.retained_bytes,
            "state_gradient_bytes": self.watch.most["state_gradient"],
            "snapshot_bytes": self.watch.most["snapshots"],
            "seconds_by_verb": dict(self.watch.seconds),
            "flops": flops if self.config.adapter.name == "none" else None,
            "recompute_difference": result.recompute_difference,
        }

    def _learnt(self, shared: Shared, result: StepResult) -> dict[str, Any]:
        rewards = shared.group.rewards
        distances = advantages(rewards, self.config.algorithm.scale_rewards)
        return {
            "loss": float(result.loss),
            "reward_mean": statistics.fmean(rewards),
            "reward_std": statistics.stdev(rewards),
            "advantage_abs_mean": statistics.fmean(map(abs, distances)),
            "entropy": result.entropy,
            **result.statistics.means(),
        }


def run_job(
    config: RunConfig,
    run_dir: str | Path,
    *,
    run_id: str,
    attempt: int = 0,
    sweep: str | None = None,
    command: str | None = None,
    overrides: Sequence[str] = (),
) -> Preempted | None:
    """Run the steps of one job and write its records to ``run_dir``; go on from its newest checkpoint, if it has one.

    A step that fails has its record too, with what had been measured until then; the exception goes on. A job that was
    asked to end writes a checkpoint and a record of that, and returns why it ended.
    """
    folder = Path(run_dir)
    facts = startup_facts(config.hardware.backend)
    constants = {**constant_keys(config), **facts, "mode": "run", "command": command or facts["command"]}
    name = " ".join(overrides) or config.model.name
    with (
        Recorder(
            folder,
            run_id=run_id,
            attempt=attempt,
            config=to_dict(config),
            tracking=config.tracking,
            group=sweep,
            name=name,
            constants=constants,
        ) as recorder,
        MemoryMeter() as meter,
        Stop(agreed).listening() as stop,
    ):
        if warning := native_length_warning(config.model, config.context):
            log.warning(warning)
        progress = Progress(folder / "progress.json")
        watch = Watch(meter, progress, stop)
        step = 0
        try:
            trainer = build_trainer(config, watch)
            model_facts = _model_facts(trainer)
            named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
            keeper = Keeper(config, folder, named, trainer.optimizer, recorder=recorder, stop=stop, attempt=attempt)
            first = keeper.resume()
            trainer.tag_optimizer()
            for step in range(first, config.steps):
                progress.step = step
                keeper.begin()
                row = trainer.step(step)
                recorder.log({**model_facts, **row, **keeper.facts(step)})
                if row["status"] != "ok":
                    raise NotFiniteError(f"step {step}: {row['error']}")
                keeper.end(step + 1)
            if config.save:
                _save(trainer, folder)
        except Preempted as asked:
            recorder.log({**model_facts, **keeper.leave(step, asked)})
            return asked
        except (NotFiniteError, Superseded):
            raise
        except Exception as error:
            watch.peaks.collect()
            recorder.log(_failure(error, step, watch))
            raise
    return None


def build_trainer(config: RunConfig, watch: Watch) -> Trainer:
    """Return model, data and optimizer of a job, their bytes told to the meter."""
    task = build_task(config)
    torch.manual_seed(config.seed)
    model = add_adapter(_model(config), config.adapter, seed=config.seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reference = None
    if config.algorithm.kl_coef and config.adapter.name == "none":
        reference = _model(config).requires_grad_(False)
        watch.meter.tag("parameters", list(reference.parameters()))
    watch.meter.tag("parameters", [*model.parameters(), *model.buffers()])
    watch.meter.watch_gradients(parameters)
    optimizer = None
    if config.optimizer.name == "adamw":
        o, (beta1, beta2) = config.optimizer, config.optimizer.betas
        optimizer = torch.optim.AdamW(
            parameters, lr=o.lr, betas=(beta1, beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True
        )
    return Trainer(config, model, task, watch, optimizer, reference, parameters=parameters)


def _model(config: RunConfig) -> Decoder:
    if config.model.checkpoint is not None:
        return load_model(config.model.checkpoint, config=config.model)
    return build_model(config.model, seed=config.seed)


def _save(trainer: Trainer, folder: Path) -> None:
    """Write what was trained into the run's folder: the adapter in PEFT's format, or the model in transformers'."""
    if trainer.config.adapter.name == "none":
        save_model(trainer.model, folder / "model")
    else:
        save_adapter(trainer.model, folder / "adapter")


def _model_facts(trainer: Trainer) -> dict[str, Any]:
    named = list(trainer.model.named_parameters())
    dtype = trainer.config.model.dtype
    return {
        "parameters": sum(p.numel() for _, p in named),
        "trainable_parameters": sum(p.numel() for p in trainer.parameters),
        "frozen": sorted({"indexer" if ".indexer." in n else "base" for n, p in named if not p.requires_grad}),
        "dtype": dtype,
        "state_dtype": dtype,
        "state_device": trainer.config.hardware.backend,
        "cp": 1,
        "ep": 1,
        "dp": 1,
    }


def _failure(error: Exception, step: int, watch: Watch) -> dict[str, Any]:
    return {
        "step": step,
        "status": status_of(error),
        "error": describe(error),
        "failed_rank": 0,
        "peak_allocated_bytes": watch.peaks.peak or None,
        "peak_verb": watch.peaks.verb or None,
        "peak_bytes_by_kind": watch.peaks.by_kind or None,
        "seconds_by_verb": dict(watch.seconds),
    }
