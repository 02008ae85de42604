"""What lives as long as a job: model, data, optimizer, and one step after the other with its record."""

from __future__ import annotations

import logging
import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstraw.config import AlgorithmConfig, RunConfig, check_step_groups
from longstraw.data import Task, build_task
from longstraw.data.rollouts import RolloutsTask
from longstraw.group import Group, StepTotals
from longstraw.grpo import accumulated, branch_losses, step_factor
from longstraw.models.decoder import Decoder
from longstraw.models.lora import adapters_off
from longstraw.parallel.mesh import Mesh, build_mesh
from longstraw.parallel.parallel_dims import ParallelDims, resolve_dims
from longstraw.parallel.parallelize import Parallel
from longstraw.rollout.group import Policy, Rollout, Source, check_drift, decide_here
from longstraw.rollout.sources import golden, request_group, source_of
from longstraw.step import (
    PreparedGroup,
    Retained,
    StepOptions,
    check_group,
    finish_step,
    prefill,
    prepare_group,
    score_fresh,
    skip_step,
)
from longstraw.training import step_record
from longstraw.training.model import MakeModel, configured_model, save_policy
from longstraw.training.monitor import Monitor
from longstraw.training.optimizer import Optimizer
from longstraw.training.rank_metrics import reduce_rank_metrics
from longstraw.training.schedule import Schedule
from longstraw.training.step_record import Taken, differences

log = logging.getLogger(__name__)

SUPERVISED = AlgorithmConfig(name="supervised", loss="cispo", old_logprobs="none")  # on policy: -log p of each token


@dataclass(frozen=True)
class SharedPrompt:
    """A group with its retained prompt, which several steps may share."""

    prepared: PreparedGroup
    rollout: Rollout
    made: int  # the step that made the responses
    evaluated: int  # the step that evaluated the prompt

    @property
    def group(self) -> Group:
        return self.prepared.group


@dataclass(frozen=True)
class Drawn:
    """Responses and what their loss needs, on the host, for the steps that train on them.

    Log-probabilities are [R] a response.
    """

    rollout: Rollout
    old_logprobs: list[Tensor] | None
    reference_logprobs: list[Tensor] | None
    made: int


@dataclass
class Trainer:
    """What lives as long as the job."""

    config: RunConfig
    model: Decoder
    task: Task
    watch: Monitor
    optimizer: Optimizer
    source: Source  # of responses
    reference: Decoder | None  # of the KL term, where it is another model
    parallel: Parallel | None = None  # where there is more than one rank
    shared: SharedPrompt | None = None  # the prompt that is retained, where steps share it
    drawn: dict[int, Drawn] = field(default_factory=dict)  # by prompt, where steps share responses

    @property
    def schedule(self) -> Schedule:
        """Which prompts a step takes, and what it shares with others."""
        return Schedule.of(self.config)

    def options(self, step: int) -> StepOptions:
        """Return how a step is taken."""
        config = self.config
        algorithm = SUPERVISED if self.schedule.warms_up(step) else config.algorithm
        return StepOptions(
            config.chunk,
            config.prompt_grad,
            config.prompt_grad_window,
            algorithm if self._alone else accumulated(algorithm),
            config.response_length,
            config.state,
            config.temperature,
            config.replay_tokens,
        )

    @property
    def _alone(self) -> bool:
        """Whether a step has one group, over all ranks."""
        return self.config.groups_per_step == 1 and (self.parallel is None or self.parallel.mesh.sizes.dp == 1)

    def step(self, step: int) -> dict[str, Any]:
        """Take one optimizer step and return its record."""
        self.watch.start()
        begun = time.perf_counter()
        optimizer_held = bool(self.optimizer.state())  # made by the first step's update
        if self.schedule.makes_responses(step):
            self.drawn.clear()
        beside = (1, 0) if self.parallel is None else (self.parallel.mesh.sizes.dp, self.parallel.mesh.dp_rank)
        taken = [self._take(step, number) for number in self.schedule.prompts(step, *beside)]
        totals = self._totals(taken)
        factor = self._factor(step, totals)
        loss = sum((one.result.loss for one in taken[1:]), taken[0].result.loss)
        loss = loss if factor == 1 else loss * factor
        seconds = time.perf_counter() - begun
        drift = self._drift(step, taken)
        begun = time.perf_counter()
        norm = self._update(loss, factor) if any(one.trained for one in taken) else 0.0
        seconds += time.perf_counter() - begun
        self.watch.peaks.collect()
        row = {
            **step_record.measured(taken, self.watch, self.model, self.config),
            **step_record.predicted(taken, self.config, optimizer_held=optimizer_held),
            **step_record.drawn(taken, self.watch.seconds.get("sample")),
            **step_record.loss_metrics(taken, loss, self.config.algorithm, totals),
            **drift,
        }
        row = reduce_rank_metrics(row, self.parallel)
        row |= {"step": step, "status": "ok", "seconds": seconds, "grad_norm": norm}
        if self.schedule.warms_up(step):
            row["rollout"] = "golden"
        if not math.isfinite(norm) or not math.isfinite(row["loss"]):
            row |= {"status": "error", "error": f"loss {row['loss']}, gradient norm {norm}: no step was taken"}
        return row

    def _take(self, step: int, number: int) -> Taken:
        """Add the gradient of one group's loss; its prompt is gone afterwards unless the next step shares it."""
        shared = self._prompt(step, number)
        trained = self._teaches(shared)
        if trained:
            result = finish_step(self.model, shared.prepared, self.options(step), observer=self.watch)
        else:
            result = skip_step(shared.prepared)
        if shared.prepared.retained.grad_from is not None or self.config.refresh_every == 1:
            self.shared = None
        ages = {"state_age": step - shared.evaluated, "rollout_age": step - shared.made}
        taken = Taken.of(shared.rollout, shared.group, result, trained=trained, **ages)
        if taken.sampler_age == 0 and taken.rollout_age == 0 and taken.sampler_drift is not None:
            check_drift(taken.sampler_drift, self.config.server.max_drift)
        return taken

    def _prompt(self, step: int, number: int) -> SharedPrompt:
        """Return a group of this step with its prompt, evaluated now or by an earlier step."""
        if self.shared is not None and not self.schedule.evaluates_prompt(step):
            prepared = replace(self.shared.prepared, prefilled=0, scored=0)
            self.shared = replace(self.shared, prepared=prepared)
            return self.shared
        self.shared = None  # the old prompt's state is gone before the new one's is made
        earlier = self.drawn.get(number)
        self.shared = self._make_group(step, number) if earlier is None else self._evaluate_again(step, earlier)
        if self.config.updates > self.config.refresh_every or self.config.refresh_above is not None:
            prepared, rollout = self.shared.prepared, self.shared.rollout
            kept = replace(rollout, group=prepared.group.to("cpu"))
            made = self.shared.made
            self.drawn[number] = Drawn(kept, prepared.old_logprobs, prepared.reference_logprobs, made)
        return self.shared

    def _make_group(self, step: int, number: int) -> SharedPrompt:
        """Evaluate a prompt, make its responses and what their loss needs."""
        warmup, options = self.schedule.warms_up(step), self.options(step)
        request = request_group(self.task, self.config, step, number, self.model.lm_head.weight.device)
        self.watch.meter.tag("inputs", request.prompt)
        # the reference evaluates its own prompt, if it can before the policy's is held
        reference = None if request.group is None else self._accept(request.group, options)
        retained = self._prefill(request.prompt, options)
        policy = Policy(self.model, retained, *([] if self.parallel is None else [self.parallel.mesh.decide]))
        rollout = (golden if warmup else self.source)(policy, request, self.watch)
        if request.group is None:
            reference = self._accept(rollout.group, options)
        prepared = prepare_group(
            self.model,
            rollout.group,
            options,
            reference_logprobs=reference,
            retained=retained,
            observer=self.watch,
        )
        return SharedPrompt(prepared, rollout, step, step)

    def _evaluate_again(self, step: int, drawn: Drawn) -> SharedPrompt:
        """Evaluate the prompt of responses that an earlier step made."""
        options, group = self.options(step), drawn.rollout.group.to(self.model.lm_head.weight.device)
        self.watch.meter.tag("inputs", group.prompt)
        retained = self._prefill(group.prompt, options)
        prepared = PreparedGroup(group, retained, drawn.old_logprobs, drawn.reference_logprobs, retained.positions)
        return SharedPrompt(prepared, drawn.rollout, drawn.made, step)

    def _prefill(self, prompt: Tensor, options: StepOptions) -> Retained:
        chunk, start, state = options.chunk, options.grad_from(prompt), options.state
        return prefill(self.model, prompt, chunk=chunk, grad_from=start, state=state, observer=self.watch)

    def _accept(self, group: Group, options: StepOptions) -> list[Tensor] | None:
        """Check a group; return its log-probabilities under the reference, None where the loss has no KL term."""
        check_group(group, self.model, options.algorithm, has_reference=True)
        self.watch.meter.tag("inputs", group.responses, host=True)
        if not options.algorithm.kl_coef:
            return None
        with nullcontext() if self.reference is not None else adapters_off(self.model):
            return self._score_fresh(self.reference or self.model, group, options)

    def _score_fresh(self, model: Decoder, group: Group, options: StepOptions) -> list[Tensor]:
        """Return the log-probabilities of a group's responses on a prompt that is evaluated for them alone."""
        return score_fresh(
            model,
            group,
            chunk=options.chunk,
            state=options.state,
            temperature=options.temperature,
            replay_tokens=options.together,
            observer=self.watch,
        )

    def _teaches(self, shared: SharedPrompt) -> bool:
        """Return whether the loss can have a gradient: not so for drawn groups of equal rewards without a KL term.

        All ranks take part in every pass, so one such group is replayed where a prompt beside it teaches.
        """
        group = shared.group
        equal = group.advantages is None and min(group.rewards) == max(group.rewards)
        own = self.config.rollout == "given" or not equal or shared.prepared.reference_logprobs is not None
        return bool(self.model.agree(int(own)))

    def _totals(self, taken: list[Taken]) -> StepTotals:
        """Return the totals over all groups of the step, those of other ranks included."""
        rewards = tuple(reward for one in taken for reward in one.rewards)
        own = StepTotals(len(taken), sum(one.tokens for one in taken), rewards)
        if self.parallel is None:
            return own
        every = self.parallel.mesh.gather(own)[:: self.parallel.mesh.sizes.cp]
        rewards = tuple(reward for totals in every for reward in totals.rewards)
        return StepTotals(sum(x.groups for x in every), sum(x.tokens for x in every), rewards)

    def _factor(self, step: int, totals: StepTotals) -> float:
        """Return what the sum of this rank's losses is multiplied by; losses are averaged over ranks afterwards."""
        if self._alone:
            return 1.0
        algorithm = SUPERVISED if self.schedule.warms_up(step) else self.config.algorithm
        return step_factor(algorithm, totals, self.config.response_length) / self.config.groups_per_step

    def _drift(self, step: int, taken: list[Taken]) -> dict[str, float | None]:
        """Return how far log-probabilities are from the sampler's and, with the loss, from a freshly evaluated prompt.

        A state of age 0 is the freshly evaluated one, so its drift is 0; it is measured all the same where the state
        will be reused. A loss on policy has none to tell: its ratios are 1 whatever the log-probabilities are.
        """
        means = [one.sampler_drift for one in taken if one.sampler_drift is not None]
        drift: dict[str, float | None] = {"sampler_drift": statistics.fmean(means) if means else None}
        drift["sampler_drift_max"] = max((x for one in taken if (x := one.sampler_drift_max) is not None), default=None)
        if not any(one.trained for one in taken):
            return drift
        if self.config.refresh_every == 1 or self.shared is None:
            return drift | {"logprob_drift": 0.0, "loss_drift": 0.0}
        if self.config.measure_drift and not self.schedule.warms_up(step):
            with self.watch.aside():
                drift |= self._state_drift(self.shared, taken[0].result.logprobs, self.options(step))
        self._refresh_above(drift["sampler_drift"])
        return drift

    def _state_drift(
        self, shared: SharedPrompt, logprobs: list[Tensor], options: StepOptions
    ) -> dict[str, float | None]:
        """Return how far log-probabilities and loss are from those on a freshly evaluated prompt."""
        fresh = self._score_fresh(self.model, shared.group, options)
        drift: dict[str, float | None] = {"logprob_drift": float(differences(shared.group, logprobs, fresh).mean())}
        if shared.prepared.old_logprobs is None and not options.algorithm.kl_coef:
            return drift | {"loss_drift": None}
        stale_loss, fresh_loss = (self._loss(shared, lp, options.algorithm) for lp in (logprobs, fresh))
        change = abs(stale_loss - fresh_loss)
        return drift | {"loss_drift": 0.0 if change == 0 else change / abs(fresh_loss) if fresh_loss else None}

    def _refresh_above(self, drift: float | None) -> None:
        """Have the next step evaluate the prompt anew if this one's log-probabilities were too far from the sampler's.

        One rank of a prompt decides, and one prompt of several is enough: all ranks take part in a prefill.
        """
        most = self.config.refresh_above
        if most is None or drift is None:
            return
        decide = self.parallel.mesh.decide if self.parallel is not None else decide_here
        if self.model.agree(int(decide(lambda: drift > most))):
            self.shared = None

    def _loss(self, shared: SharedPrompt, logprobs: list[Tensor], algorithm: AlgorithmConfig) -> float:
        """Return the group's loss for log-probabilities that are already there."""
        losses = branch_losses(
            shared.group,
            algorithm,
            self.config.response_length,
            shared.prepared.old_logprobs,
            shared.prepared.reference_logprobs,
        )
        return sum(float(loss_of(lp).loss) for loss_of, lp in zip(losses, logprobs, strict=True))

    def _update(self, loss: Tensor, factor: float) -> float:
        """Take the optimizer's step on gradients times ``factor`` if all is finite; return the norm before clipping."""
        self.watch.note()
        with self.watch.verb("optimizer", 0):
            return self.optimizer.update(loss, factor)

    def tag_optimizer(self) -> None:
        """Tell the meter which tensors are the optimizer's."""
        self.watch.meter.tag("optimizer", self.optimizer.state())


def with_scores(config: RunConfig, task: Task) -> RunConfig:
    """Return ``config`` with old log-probabilities scored where some of the task's stored groups have none."""
    if not isinstance(task, RolloutsTask) or not task.unscored or config.algorithm.old_logprobs != "data":
        return config
    log.warning("%d groups are stored without log-probabilities: those of all are scored here", task.unscored)
    return replace(config, algorithm=replace(config.algorithm, old_logprobs="score"))


def build_trainer(
    config: RunConfig,
    watch: Monitor,
    *,
    task: Task | None = None,
    make_model: MakeModel | None = None,
    run_dir: Path = Path(),
    source: Source | None = None,
) -> Trainer:
    """Return model, data and optimizer of a job, with their bytes known to the meter.

    ``task``, what makes the model and the source of responses are the configured ones where none are given.
    Adapters for a server go to ``run_dir``.
    """
    task = task or build_task(config)
    config = with_scores(config, task)
    torch.manual_seed(config.seed)
    make_model = make_model or partial(configured_model, mesh=_build_mesh(config))
    model, parallel = make_model(config)
    if parallel is not None and parallel.mesh.sizes.dp > 1:
        check_step_groups(config.algorithm)
    reference = None
    if config.algorithm.kl_coef and config.adapter.name == "none":
        reference = make_model(config)[0].requires_grad_(False)
        watch.meter.tag("parameters", list(reference.parameters()))
    watch.meter.tag("parameters", [*model.parameters(), *model.buffers()])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Optimizer(parameters, config.optimizer, parallel, note=watch.meter.tag)
    if source is None:
        source = source_of(config, partial(save_policy, model, parallel, config.adapter), run_dir / "served")
    return Trainer(config, model, task, watch, optimizer, source, reference, parallel)


def _build_mesh(config: RunConfig) -> Mesh | None:
    """Return the mesh of the ranks of a job; None: one process has the model."""
    if config.hardware.world_size == 1:
        return None
    limit = timedelta(seconds=config.hardware.timeout_s)
    return build_mesh(resolve_dims(config.model, config.hardware), config.hardware.backend, limit)


def save_trained(trainer: Trainer, folder: Path) -> None:
    """Write what was trained into the run's folder: the adapter in PEFT's format, or the model in transformers'."""
    adapter = trainer.config.adapter
    save_policy(trainer.model, trainer.parallel, adapter, folder / ("model" if adapter.name == "none" else "adapter"))


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
