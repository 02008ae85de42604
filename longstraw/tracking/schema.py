"""Define the record: its keys with types and meanings, its file names, and the functions that fill and check a row.

A record is one JSON object a step, flat, with these keys in this order. Keys are added, never renamed. Sizes are exact
integers in bytes, times are seconds, positions are tokens; formats belong to ``analysis/``. A key that does not apply
is null. JSON has no NaN: ``Recorder`` writes the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, and
``numbers`` turns them back.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
STATUSES = ("ok", "oom", "too_large", "preempted", "error")
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Key:
    """One key of the record: its type (``None`` is always allowed) and what it means."""

    name: str
    type: type
    meaning: str


def keys_of(listing: str) -> dict[str, Key]:
    """Return the keys that lines of ``name type meaning`` list."""
    types: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}
    keys = {}
    for line in listing.strip().splitlines():
        name, kind, meaning = line.split(maxsplit=2)
        keys[name] = Key(name, types[kind], meaning)
    return keys


KEYS = keys_of("""
    schema                         int    version of this listing
    run_id                         str    one job, over all its attempts; also its id in W&B
    attempt                        int    0, and one more after each requeue
    claim                          str    name under which analysis groups records
    status                         str    ok, oom, too_large, preempted or error
    error                          str    why, where the status is not ok
    failed_rank                    int    the rank that failed first
    mode                           str    run, simulate or emulate
    evidence                       str    what was shown for this result; finished unless more was proved
    model                          str    name of the model's configuration
    parameters                     int    elements in all parameters
    trainable_parameters           int    elements in those that get a gradient
    frozen                         list   what gets no gradient: base (beneath an adapter), indexer
    adapter                        str    name of the adapter's configuration, or none
    algorithm                      str    name of the policy loss
    optimizer                      str    name of the optimizer's configuration, or none
    learning_rate                  float  of the optimizer, before warm-up or decay
    data                           str    name of the task
    dtype                          str    of parameters and activations
    state_dtype                    str    of the retained rows
    state_gradient_dtype           str    of the gradient of the retained rows
    state_device                   str    where the retained rows and their gradient lie
    keep_attention                 bool   whether attention's results stay for the backward instead of being made again
    rope_scaling                   dict   how angles are scaled beyond the native length
    past_native_length             bool   whether context is beyond what the model was made or scaled for
    hardware                       str    name of the hardware's configuration
    device_name                    str    as the driver, or the processor, calls itself
    world_size                     int    ranks
    cp                             int    ranks that share a prompt's positions
    ep                             int    ranks that share the experts
    dp                             int    groups of ranks, each with a prompt of its own
    simulated_rank                 int    the rank whose step was simulated or emulated; the others were not
    expert_imbalance               float  tokens assumed for that rank's experts, over an even share
    stepped_over                   bool   whether repeating chunks and branches were allocated, not evaluated
    nodes                          int    machines
    selfcheck                      str    outcome of the kernels' self-check on this device
    steps                          int    optimizer steps the job was asked for
    step                           int    optimizer step, from 0
    resumed_step                   int    steps in the checkpoint that this attempt resumed from; null: none
    repeated                       bool   whether an earlier attempt had recorded this step too
    group_size                     int    responses that share the prompt
    context                        int    positions of one branch: prompt and longest allowed response
    prompt_positions               int    tokens in the prompt
    response_positions             int    tokens in the longest response
    prefilled_positions            int    evaluated without autograd to build the state
    replayed_positions             int    evaluated with autograd, over all responses
    scored_positions               int    evaluated without a graph for old or reference log-probabilities
    sampled_positions              int    tokens drawn, those of groups that were drawn again included
    recomputed_positions           int    prompt positions evaluated again by the prompt backward
    recompute_difference           float  largest difference of a state evaluated again from the one retained
    seed                           int    of weights, prompts and responses
    rollout                        str    where responses come from: given, sample, server, or golden in a warm-up step
    rollout_age                    int    optimizer steps since the responses were made
    updates_per_rollout            int    optimizer steps on the same responses
    groups                         int    of the step, over all ranks
    equal_groups                   int    of these, with equal rewards; drawn ones of these are not trained on
    temperature                    float  the policy is softmax(logits / temperature)
    resampled                      int    draws of groups that were dropped for their equal rewards
    truncated_fraction             float  drawn responses that no stop token ended; null: there is none
    response_length_mean           float  tokens
    probe_drift                    float  mean difference of the server's log-probabilities after it got new weights
    sampler_age                    int    optimizer steps since the server got its weights
    retokenized                    bool   whether responses came as text and were made tokens again
    old_logprobs                   str    data, score or none: where the ratio's old log-probabilities are from
    tokens_per_second              float  drawn, over the seconds of the verb sample
    chunk                          int    prompt positions evaluated at a time, over all ranks
    prompt_grad                    str    detached or exact
    prompt_grad_window             int    prompt positions the gradient goes back through; null: all of them
    refresh_every                  int    optimizer steps that share one retained prompt
    state_age                      int    optimizer steps since the prompt was evaluated
    peak_allocated_bytes           int    most bytes allocated at once during the step, on the worst rank
    peak_allocated_bytes_by_rank   list   the same, one number a rank
    peak_verb                      str    the verb during which it was reached
    peak_by_verb                   dict   peak within each verb
    peak_reserved_bytes            int    most bytes held by the allocator, used or not
    predicted_peak_bytes           int    predicted before the step by memory.estimate
    measured_by                    str    cuda, or storages as counted by memory.meter
    peak_bytes_by_kind             dict   what the peak consisted of
    predicted_bytes_by_kind        dict   what it was predicted to consist of
    parameter_bytes                int    parameters on one rank
    gradient_bytes                 int    their gradients
    optimizer_bytes                int    the optimizer's state
    retained_bytes                 int    what is kept of a prompt for the branches
    retained_bytes_by_kind         dict   the same by kind of state
    state_gradient_bytes           int    gradient buffers of the retained state, in host memory too
    snapshot_bytes                 int    states at chunk borders, kept for the prompt backward
    host_bytes                     int    peak in host memory: rows and their gradient
    bytes_sent_by_collective       dict   sent by one rank, by collective operation
    seconds                        float  the whole step
    seconds_by_verb                dict   prefill, sample, score, replay, prompt_backward, optimizer
    predicted_seconds_by_verb      dict   of a simulated step, from hardware.rates: see docs/time.md
    predicted_bound_by_verb        dict   the same seconds by what binds: products, attention, memory, links, launches
    rank_flops_by_verb             dict   arithmetic of the simulated rank, counted operation by operation
    flops                          float  arithmetic of the step by formula, over all ranks
    model_flops_utilization        float  flops over seconds and the device's peak
    loss                           float  of the policy, over the groups; in a warm-up step minus the log-probability
    reward_mean                    float  over the groups, a penalty for length included
    reward_std                     float  within a group, unbiased; mean over the groups
    advantage_abs_mean             float  mean absolute advantage
    kl                             float  estimate against the reference policy
    clip_fraction                  float  tokens whose ratio was clipped
    entropy                        float  mean over tokens, nats
    grad_norm                      float  before clipping
    sampler_drift                  float  mean absolute difference from the log-probabilities at which tokens were drawn
    sampler_drift_max              float  the largest such difference
    logprob_drift                  float  mean absolute difference from a freshly evaluated prompt
    loss_drift                     float  relative difference of the loss from the same; null on policy
    commit                         str    of the checkout; null where there is none
    dirty                          bool   whether tracked files differed from that commit
    versions                       dict   of Python and the packages that matter
    command                        str    as typed
    started_at                     str    of the job, UTC
""")


class RecordError(RuntimeError):
    """A record could not be written, or a row does not match the listing."""


def plain(value: Any) -> Any:
    """Return ``value`` as JSON types: tensors and numpy scalars as numbers, dataclasses as dicts, others as str."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):  # torch and numpy, without importing either
        return plain(value.detach().tolist() if hasattr(value, "detach") else value.tolist())
    return str(value)


def complete(row: dict[str, Any], keys: dict[str, Key] = KEYS) -> dict[str, Any]:
    """Return ``row`` with every key of the listing ``keys``, in its order, null where ``row`` has none.

    Keys that are not in the listing are dropped; ``check`` finds them.
    """
    full = {name: plain(row.get(name)) for name in keys}
    full["schema"] = SCHEMA
    if full.get("status") == "ok" and full["evidence"] is None and full["mode"] not in ("simulate", "emulate"):
        full["evidence"] = "finished"  # one process alone shows none of the rungs
    return full


def check(row: dict[str, Any], keys: dict[str, Key] = KEYS) -> None:
    """Raise ``RecordError`` for a key that ``keys`` does not list, a value of another type or an unknown status."""
    for name, value in row.items():
        if name not in keys:
            near = difflib.get_close_matches(name, keys, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; the keys are {', '.join(keys)}"
            raise RecordError(f"record key {name!r} is not in the listing{hint}")
        if value is not None and not fits(plain(value), keys[name].type):
            raise RecordError(f"record key {name} must be {keys[name].type.__name__}, not {value!r}")
    if "status" in keys and row.get("status") not in STATUSES:
        raise RecordError(f"record key status={row.get('status')!r} is not one of {', '.join(STATUSES)}")


def fits(value: Any, kind: type) -> bool:
    """Return whether a record may hold ``value`` under a key of type ``kind``: whole numbers pass as floats."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def to_line(row: dict[str, Any]) -> bytes:
    """Return ``row`` as one line of strict JSON; NaN and the infinities become strings (see ``numbers``)."""
    return json.dumps(_strict(row), allow_nan=False).encode() + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list) else value


def numbers(value: Any) -> Any:
    """Return a value read from a record with ``"NaN"`` and the infinities as floats again, at any depth."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    return [numbers(item) for item in value] if isinstance(value, list) else value


def status_word(status: Any, mode: Any) -> str:
    """Return how a job ended in one word; for a finished simulation or emulation its mode, not ``ok``."""
    words = {"simulate": "simulated", "emulate": "emulated"}
    return words.get(str(mode), str(status)) if status == "ok" else str(status)


def after_last_step(row: dict[str, Any]) -> bool:
    """Return whether a row says that a job was asked to end after its last step, in the evaluation that follows."""
    return row.get("status") == "preempted" and row.get("step") is not None and row["step"] == row.get("steps")


def carried_gradient(asked: dict[str, Any], step: dict[str, Any]) -> tuple[str | None, int | None]:
    """Return how far the gradient went into the prompt: ``detached`` or ``exact``, and the window if it was limited.

    ``step`` is a record with the number of prompt positions evaluated again; if it has none, the keys ``prompt_grad``
    and ``prompt_grad_window`` of ``asked`` decide.
    """
    grad, window = asked.get("prompt_grad"), asked.get("prompt_grad_window")
    if grad != "exact":
        return grad, None
    positions, again = step.get("prompt_positions"), step.get("recomputed_positions")
    retained = None if positions is None else positions - 1
    reached = window if again is None else again // (step.get("dp") or 1)  # counted over all prompts side by side
    if reached == 0 and retained != 0:
        return "detached", None
    whole = window is None or (retained is not None and reached is not None and reached >= retained)
    return "exact", None if whole else reached


def flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``row`` as W&B gets it: ``{"a": {"b": 1}}`` as ``{"a/b": 1}``, without nulls."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def records_path(run_dir: str | Path, attempt: int) -> Path:
    """Return the file of one attempt: ``records.jsonl``, then ``records.1.jsonl`` and so on."""
    return Path(run_dir) / (f"records.{attempt}.jsonl" if attempt else "records.jsonl")


def latest_attempt(run_dir: str | Path) -> int | None:
    """Return the highest attempt that has a records file in ``run_dir``; ``None`` if there is none."""
    found = [re.fullmatch(r"records(?:\.(\d+))?\.jsonl", path.name) for path in Path(run_dir).glob("records*.jsonl")]
    return max((int(match[1] or 0) for match in found if match), default=None)
