"""What lives as long as a job: model, data, optimizer, and one step after the other with its record."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstraw.config import RunConfig
from longstraw.data import Task, build_task
from longstraw.group import Group
from longstraw.grpo import advantages, branch_losses
from longstraw.memory.estimate import known
from longstraw.models import build_model, load_model
from longstraw.models.decoder import Decoder
from longstraw.models.hf_save import save_model
from longstraw.models.lora import adapters_off, add_adapter, save_adapter
from longstraw.ops.host_sync import read_scalar
from longstraw.parallel.materialize import build_sharded, gather_model
from longstraw.parallel.mesh import Mesh, build_mesh
from longstraw.parallel.parallel_dims import ParallelDims, resolve_dims
from longstraw.parallel.parallelize import Parallel
from longstraw.rollout.group import Policy, Rollout
from longstraw.rollout.sources import SOURCES, request_group
from longstraw.step import (
    PreparedGroup,
    StepOptions,
    StepResult,
    check_group,
    finish_step,
    prefill,
    prepare_group,
    score_fresh,
    skip_step,
)
from longstraw.training.flops import step_flops
from longstraw.training.monitor import Monitor
from longstraw.training.optimizer import Optimizer
from longstraw.training.rank_metrics import reduce_rank_metrics


def prompt_number(step: int, every: int, dp: int, dp_rank: int) -> int:
    """Return which of the run's prompts a step takes: ``every`` steps share one, prompts side by side take one each."""
    return step // every * dp + dp_rank


@dataclass(frozen=True)
class SharedPrompt:
    """A group with its retained prompt, which several optimizer steps may share; ``age`` counts those before."""

    prepared: PreparedGroup
    rollout: Rollout
    age: int = 0

    @property
    def group(self) -> Group:
        return self.prepared.group

    def older(self) -> SharedPrompt:
        """Return what the next step has of it: nothing is evaluated for it again."""
        return SharedPrompt(replace(self.prepared, prefilled=0, scored=0), self.rollout, self.age + 1)


@dataclass
class Trainer:
    """What lives as long as the job."""

    config: RunConfig
    model: Decoder
    task: Task
    watch: Monitor
    optimizer: Optimizer
    reference: Decoder | None  # of the KL term, where it is another model
    parallel: Parallel | None = None  # where there is more than one rank
    shared: SharedPrompt | None = None

    @property
    def options(self) -> StepOptions:
        """How every step is taken."""
        config = self.config
        return StepOptions(
            config.chunk,
            config.prompt_grad,
            config.prompt_grad_window,
            config.algorithm,
            config.response_length,
            config.state,
            config.temperature,
        )

    def step(self, step: int) -> dict[str, Any]:
        """Take one optimizer step and return its record."""
        self.watch.start()
        begun = time.perf_counter()
        optimizer_held = bool(self.optimizer.state())  # made by the first step's update
        shared = self._prompt(step)
        teaches = self._teaches(shared)
        if teaches:
            result = finish_step(self.model, shared.prepared, self.options, observer=self.watch)
        else:
            result = skip_step(shared.prepared)
        if shared.prepared.retained.grad_from is not None or self.config.refresh_every == 1:
            self.shared = None
        seconds = time.perf_counter() - begun
        with self.watch.aside():
            drift = self._drift(shared, result) if teaches else {}
        begun = time.perf_counter()
        norm = self._update(result.loss) if teaches else 0.0
        seconds += time.perf_counter() - begun
        self.watch.peaks.collect()
        row = {**self._measured(shared, result, optimizer_held), **self.loss_metrics(shared, result), **drift}
        row = reduce_rank_metrics(row, self.parallel)
        row |= {"step": step, "status": "ok", "seconds": seconds, "grad_norm": norm}
        if not math.isfinite(norm) or not math.isfinite(row["loss"]):
            row |= {"status": "error", "error": f"loss {row['loss']}, gradient norm {norm}: no step was taken"}
        return row

    def _prompt(self, step: int) -> SharedPrompt:
        """Return this step's group with its prompt, evaluated now or by an earlier step."""
        if self.shared is not None and step % self.config.refresh_every:
            self.shared = self.shared.older()
            return self.shared
        self.shared = None  # the old prompt's state is gone before the new one's is made
        options, device = self.options, self.model.lm_head.weight.device
        request = request_group(self.task, self.config, step, self._number(step), device)
        self.watch.meter.tag("inputs", request.prompt)
        # the reference evaluates its own prompt, if it can before the policy's is held
        reference = None if request.group is None else self._accept(request.group)
        retained = prefill(
            self.model,
            request.prompt,
            chunk=options.chunk,
            grad_from=options.grad_from(request.prompt),
            state=options.state,
            observer=self.watch,
        )
        policy = Policy(self.model, retained, *([] if self.parallel is None else [self.parallel.mesh.decide]))
        rollout = SOURCES[self.config.rollout](policy, request, self.watch)
        if request.group is None:
            reference = self._accept(rollout.group)
        prepared = prepare_group(
            self.model,
            rollout.group,
            options,
            reference_logprobs=reference,
            retained=retained,
            observer=self.watch,
        )
        self.shared = SharedPrompt(prepared, rollout)
        return self.shared

    def _accept(self, group: Group) -> list[Tensor] | None:
        """Check a group; return its log-probabilities under the reference, None where the loss has no KL term."""
        check_group(group, self.model, self.config.algorithm, has_reference=True)
        self.watch.meter.tag("inputs", group.responses, host=True)
        if not self.config.algorithm.kl_coef:
            return None
        with nullcontext() if self.reference is not None else adapters_off(self.model):
            return self._score_fresh(self.reference or self.model, group)

    def _score_fresh(self, model: Decoder, group: Group) -> list[Tensor]:
        """Return the log-probabilities of a group's responses on a prompt that is evaluated for them alone."""
        options = self.options
        return score_fresh(
            model,
            group,
            chunk=options.chunk,
            state=options.state,
            temperature=options.temperature,
            observer=self.watch,
        )

    def _number(self, step: int) -> int:
        """Return which of the run's prompts this rank takes."""
        if self.parallel is None:
            return prompt_number(step, self.config.refresh_every, 1, 0)
        mesh = self.parallel.mesh
        return prompt_number(step, self.config.refresh_every, mesh.sizes.dp, mesh.dp_rank)

    def _teaches(self, shared: SharedPrompt) -> bool:
        """Return whether the loss can have a gradient: not so for drawn groups of equal rewards without a KL term.

        All ranks take part in every pass, so one such group is replayed where a prompt beside it teaches.
        """
        equal = min(shared.group.rewards) == max(shared.group.rewards)
        own = self.config.rollout == "given" or not equal or shared.prepared.reference_logprobs is not None
        return bool(self.model.agree(int(own)))

    def _scorings(self) -> int:
        """Return how often the responses are evaluated without a graph on a fresh prompt."""
        return bool(self.config.algorithm.kl_coef) + (self.config.algorithm.old_logprobs == "score")

    def _drift(self, shared: SharedPrompt, result: StepResult) -> dict[str, float | None]:
        """Return how far log-probabilities and loss are from those on a freshly evaluated prompt.

        A state of age 0 is the freshly evaluated one, so its drift is 0; it is measured all the same where the state
        will be reused. A loss on policy has none to tell: its ratios are 1 whatever the log-probabilities are.
        """
        if self.config.refresh_every == 1:
            return {"logprob_drift": 0.0, "loss_drift": 0.0}
        if not self.config.measure_drift:
            return {}
        fresh = self._score_fresh(self.model, shared.group)
        masks = shared.group.loss_masks or [torch.ones(len(x), dtype=torch.bool) for x in fresh]
        differences = [(a - b).abs()[m.cpu()] for a, b, m in zip(result.logprobs, fresh, masks, strict=True)]
        drift: dict[str, float | None] = {"logprob_drift": float(torch.cat(differences).mean()), "loss_drift": None}
        if shared.prepared.old_logprobs is None and not self.config.algorithm.kl_coef:
            return drift
        stale_loss, fresh_loss = (self._loss(shared, logprobs) for logprobs in (result.logprobs, fresh))
        change = abs(stale_loss - fresh_loss)
        return {**drift, "loss_drift": 0.0 if change == 0 else change / abs(fresh_loss) if fresh_loss else None}

    def _loss(self, shared: SharedPrompt, logprobs: list[Tensor]) -> float:
        """Return the group's loss for log-probabilities that are already there."""
        losses = branch_losses(
            shared.group,
            self.config.algorithm,
            self.config.response_length,
            shared.prepared.old_logprobs,
            shared.prepared.reference_logprobs,
            torch.device("cpu"),
        )
        return sum(float(loss_of(lp).loss) for loss_of, lp in zip(losses, logprobs, strict=True))

    def _update(self, loss: Tensor) -> float:
        """Take the optimizer's step, if all is finite; return the gradients' norm before clipping."""
        self.watch.note()
        with self.watch.verb("optimizer", 0):
            return self.optimizer.update(loss)

    def tag_optimizer(self) -> None:
        """Tell the meter which tensors are the optimizer's."""
        self.watch.meter.tag("optimizer", self.optimizer.state())

    def _measured(self, shared: SharedPrompt, result: StepResult, optimizer_held: bool) -> dict[str, Any]:
        peaks = self.watch.peaks
        longest = max(shared.group.response_positions)
        by_kind = self.watch.meter.bytes_by_kind()
        prompt_positions, responses = shared.group.prompt_positions, shared.group.response_positions
        fresh = shared.age == 0
        prediction = None
        if self.config.rollout == "given":  # drawing has no count yet
            prediction = known(
                self.config,
                prompt_positions=prompt_positions,
                response_positions=longest,
                optimizer_held=optimizer_held,
                prefilled=fresh,
            )
        flops = step_flops(
            self.model,
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
            "peak_verb": peaks.verb,
            "peak_by_verb": peaks.by_verb,
            "predicted_peak_bytes": prediction and prediction.peak,
            "measured_by": peaks.measured_by,
            "peak_reserved_bytes": peaks.reserved,
            "peak_bytes_by_kind": peaks.by_kind,
            "predicted_bytes_by_kind": prediction and prediction.by_kind,
            "parameter_bytes": by_kind["parameters"],
            "gradient_bytes": self.watch.most["gradients"],
            "optimizer_bytes": by_kind["optimizer"],
            "retained_bytes": sum(result.retained_bytes.values()),
            "retained_bytes_by_kind": result.retained_bytes,
            "state_gradient_bytes": self.watch.most["state_gradient"],
            "snapshot_bytes": self.watch.most["snapshots"],
            "host_bytes": peaks.host,
            "bytes_sent_by_collective": self.watch.traffic and self.watch.traffic.by_collective(),
            "seconds_by_verb": dict(self.watch.seconds),
            "flops": flops if self.config.adapter.name == "none" and self.config.rollout == "given" else None,
            "recompute_difference": result.recompute_difference,
            "response_length_mean": statistics.fmean(responses),
            **self._sampled(shared),
        }

    def _sampled(self, shared: SharedPrompt) -> dict[str, Any]:
        """Return what the record says of drawing, in the step that drew."""
        rollout = shared.rollout
        if not rollout.sampled_positions or shared.age:
            return {"sampled_positions": 0}
        return {
            "sampled_positions": rollout.sampled_positions,
            "resampled": rollout.resampled,
            "truncated_fraction": rollout.truncated_fraction,
            "tokens_per_second": rollout.sampled_positions / self.watch.seconds["sample"],
        }

    def loss_metrics(self, shared: SharedPrompt, result: StepResult) -> dict[str, Any]:
        rewards, algorithm = shared.group.rewards, self.config.algorithm
        distances = advantages(rewards, algorithm.scale_rewards, baseline=algorithm.baseline)
        return {
            "loss": read_scalar(result.loss, 0.0),
            "reward_mean": statistics.fmean(rewards),
            "reward_std": statistics.stdev(rewards),
            "advantage_abs_mean": statistics.fmean(map(abs, distances)),
            "entropy": result.entropy,
            **result.statistics.means(),
        }


Spread = tuple[Decoder, Parallel | None]
MakeModel = Callable[[RunConfig, Mesh | None], Spread]


def build_trainer(
    config: RunConfig,
    watch: Monitor,
    *,
    task: Task | None = None,
    mesh: Mesh | None = None,
    make_model: MakeModel | None = None,
) -> Trainer:
    """Return model, data and optimizer of a job, with their bytes known to the meter.

    ``task``, ``mesh`` and what makes the model are the configured ones where none are given.
    """
    task, make_model = task or build_task(config), make_model or _model
    torch.manual_seed(config.seed)
    if mesh is None and config.hardware.world_size > 1:
        limit = timedelta(seconds=config.hardware.timeout_s)
        mesh = build_mesh(resolve_dims(config.model, config.hardware), config.hardware.backend, limit)
    model, parallel = make_model(config, mesh)
    reference = None
    if config.algorithm.kl_coef and config.adapter.name == "none":
        reference = make_model(config, mesh)[0].requires_grad_(False)
        watch.meter.tag("parameters", list(reference.parameters()))
    watch.meter.tag("parameters", [*model.parameters(), *model.buffers()])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Optimizer(parameters, config.optimizer, parallel, note=watch.meter.tag)
    return Trainer(config, model, task, watch, optimizer, reference, parallel)


def _model(config: RunConfig, mesh: Mesh | None) -> Spread:
    """Return the model with its adapter, spread over the ranks where there is a mesh of them."""
    device = torch.device(config.hardware.backend)
    if mesh is not None:
        parallel = build_sharded(config.model, config.adapter, mesh, seed=config.seed, device=device)
        return parallel.model, parallel
    if config.model.checkpoint is not None:
        model = load_model(config.model.checkpoint, config=config.model, device=device)
    else:
        model = build_model(config.model, seed=config.seed, device=device)
    return add_adapter(model, config.adapter, seed=config.seed), None


def save_trained(trainer: Trainer, folder: Path) -> None:
    """Write what was trained into the run's folder: the adapter in PEFT's format, or the model in transformers'."""
    model: Decoder | None = trainer.model
    if trainer.parallel is not None:
        model = gather_model(trainer.parallel, trainer.config.adapter)
    if model is None:  # rank 0 has it
        return
    if trainer.config.adapter.name == "none":
        save_model(model, folder / "model")
    else:
        save_adapter(model, folder / "adapter")


def model_facts(trainer: Trainer) -> dict[str, Any]:
    """Return what the record says of the model in every row."""
    sizes = trainer.parallel.mesh.sizes if trainer.parallel is not None else ParallelDims(1, 1, 1)
    named = list(trainer.model.named_parameters())
    return {
        "parameters": sum(p.numel() for _, p in named),
        "trainable_parameters": sum(p.numel() for p in trainer.optimizer.parameters),
        "frozen": sorted({"indexer" if ".indexer." in n else "base" for n, p in named if not p.requires_grad}),
        "cp": sizes.cp,
        "ep": sizes.ep,
        "dp": sizes.dp,
    }
