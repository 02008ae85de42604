"""The rows of evaluations: their keys, how they are computed from the answers, their files, and how these are read.

An evaluation is one JSON object in ``evaluations.jsonl`` beside the run's records (``evaluations.1.jsonl`` of the next
attempt), flat but for what is said by length, depth and difficulty. Rules of writing are those of ``schema``.

The interval of a mean success has 95 %: Wilson's where every reward is 0 or 1, else mean +- 1.96 standard errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.tracking.schema import keys_of

Z = statistics.NormalDist().inv_cdf(0.975)
SHOWN = 8  # answers of an evaluation, at most, whose texts are kept
SHOWN_PROMPT, SHOWN_RESPONSE = 200, 1000  # characters
DEPTHS = 5  # equal parts of the prompt
LENGTHS = 12  # of more different lengths, each power of two is a group

KEYS = keys_of("""
    schema                int    version of this listing
    run_id                str    the job's, or one made for this evaluation by the command
    attempt               int    of the job
    claim                 str    name under which analysis groups records
    step                  int    optimizer steps that the model has taken; null: not known
    model                 str    name of the model's configuration
    adapter               str    name of the adapter's configuration, or none
    weights               str    folder they were read from; null: a running job's, or random ones
    data                  str    name of the task
    hardware              str    name of the hardware's configuration
    device_name           str    as the driver, or the processor, calls itself
    dtype                 str    of parameters and activations
    seed                  int    of the run, which decides its prompts
    examples              int    prompts with a reward, one response each
    without_reward        int    prompts to whose responses no reward applies; in no mean
    temperature           float  at which responses were drawn; 0: the likeliest token
    interval              str    wilson (every reward is 0 or 1) or normal (mean and 1.96 standard errors)
    success               float  mean reward; of rewards 0 and 1 the fraction that is right
    success_low           float  lower end of its 95 % interval
    success_high          float  upper end
    chance                float  reward of guessing, where the task says it
    by_length             dict   success, low, high and examples by the prompt's tokens
    by_depth              dict   the same by where the evidence begins, in fifths of the prompt
    by_difficulty         dict   the same by the task's difficulty
    truncated_fraction    float  responses that no stop token ended
    response_length_mean  float  tokens
    prefilled_positions   int    prompt positions evaluated, once a prompt
    sampled_positions     int    tokens drawn
    peak_allocated_bytes  int    most bytes allocated at once during the evaluation, on rank 0
    seconds               float  the whole evaluation
    answers               list   of each prompt id, length, depth, difficulty, reward, tokens
    samples               list   of a few prompts id, the end of the prompt, response and reward
    commit                str    of the checkout; null where there is none
    dirty                 bool   whether tracked files differed from that commit
    versions              dict   of Python and the packages that matter
    command               str    as typed
    started_at            str    of the job, UTC
""")


SAMPLE_COLUMNS = ("id", "prompt_end", "response", "reward")


@dataclass(frozen=True)
class Table:
    """What W&B shows as a table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Answer:
    """A response to a held-out prompt, its reward, and what the task says of the prompt."""

    id: str
    length: int  # tokens of the prompt
    reward: float | None  # None: no reward applies
    tokens: int  # of the response
    ended: bool  # by a stop token
    depth: float | None = None  # where the evidence begins, as a fraction of the prompt
    difficulty: int | None = None
    prompt_end: str = ""
    response: str = ""

    def kept(self) -> dict[str, Any]:
        """Return what a row keeps of every answer."""
        return {key: getattr(self, key) for key in ("id", "length", "depth", "difficulty", "reward", "tokens")}

    def shown(self) -> dict[str, Any]:
        """Return what a row keeps of a few answers besides: their texts, cut to a size that people read."""
        texts = {"prompt_end": self.prompt_end[-SHOWN_PROMPT:], "response": self.response[:SHOWN_RESPONSE]}
        return {"id": self.id, **texts, "reward": self.reward}


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the keys of a row that follow from its answers, of which there is at least one."""
    known = [(answer, answer.reward) for answer in answers if answer.reward is not None]
    kind = interval_kind(reward for _, reward in known)
    success, low, high = mean_interval([reward for _, reward in known], kind)

    def by(key: str, label: Callable[[Any], str]) -> dict[str, Any] | None:
        values = [(getattr(answer, key), reward) for answer, reward in known]
        ordered = sorted((value, reward) for value, reward in values if value is not None)
        return cells(((label(value), reward) for value, reward in ordered), kind) or None

    return {
        "examples": len(known),
        "without_reward": len(answers) - len(known),
        "interval": kind,
        "success": success,
        "success_low": low,
        "success_high": high,
        "by_length": by("length", length_labels(answer.length for answer, _ in known)),
        "by_depth": by("depth", depth_label),
        "by_difficulty": by("difficulty", str),
        "truncated_fraction": statistics.fmean(not answer.ended for answer in answers),
        "response_length_mean": statistics.fmean(answer.tokens for answer in answers),
        "prefilled_positions": sum(answer.length - 1 for answer in answers),
        "sampled_positions": sum(answer.tokens for answer in answers),
        "answers": [answer.kept() for answer in answers],
        "samples": [answer.shown() for answer in answers[:: -(-len(answers) // SHOWN)]],
    }


def cells(rewards: Iterable[tuple[Any, float]], kind: str) -> dict[Any, dict[str, Any]]:
    """Return success, its interval and the number of examples for each label of ``(label, reward)``, in their order."""
    groups: dict[Any, list[float]] = {}
    for label, reward in rewards:
        groups.setdefault(label, []).append(reward)
    found = {label: mean_interval(group, kind) for label, group in groups.items()}
    return {
        label: {"success": mean, "low": low, "high": high, "examples": len(groups[label])}
        for label, (mean, low, high) in found.items()
    }


def interval_kind(rewards: Iterable[float]) -> str:
    """Return the interval that rewards get: ``wilson`` where each is 0 or 1, else ``normal``."""
    return "wilson" if set(rewards) <= {0, 1} else "normal"


def mean_interval(rewards: Sequence[float], kind: str) -> tuple[float | None, float | None, float | None]:
    """Return the mean of ``rewards`` and the ends of its 95 % interval of ``kind``; None for what is not defined.

    ``wilson``: of a proportion (Wilson 1927, without continuity correction). ``normal``: of rewards that
    are not all equal.
    """
    n = len(rewards)
    if not n:
        return None, None, None
    mean = statistics.fmean(rewards)
    if kind == "wilson":
        centre, half = mean + Z * Z / (2 * n), Z * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
        scale = 1 + Z * Z / n
        return mean, max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)
    if len(set(rewards)) == 1:
        return mean, None, None
    half = Z * statistics.stdev(rewards) / math.sqrt(n)
    return mean, mean - half, mean + half


def depth_label(depth: float) -> str:
    """Return the part of the prompt that a depth from 0 to 1 is in, such as ``0.2-0.4``."""
    part = min(int(depth * DEPTHS), DEPTHS - 1)
    return f"{part / DEPTHS:g}-{(part + 1) / DEPTHS:g}"


def length_labels(lengths: Iterable[int]) -> Callable[[int], str]:
    """Return what names a length: the number itself, or its power of two where there are many different ones."""
    if len(set(lengths)) <= LENGTHS:
        return str
    return lambda length: f"{1 << (length.bit_length() - 1)}-{(1 << length.bit_length()) - 1}"


def evaluations_path(run_dir: str | Path, attempt: int) -> Path:
    """Return the file of one attempt: ``evaluations.jsonl``, then ``evaluations.1.jsonl`` and so on."""
    return Path(run_dir) / (f"evaluations.{attempt}.jsonl" if attempt else "evaluations.jsonl")


def mirrored(row: dict[str, Any]) -> dict[str, Any]:
    """Return what W&B gets of a row: its numbers as ``evaluate/...`` at the step, and the samples as a table."""
    measured = [key for key, known in KEYS.items() if known.type in (int, float, dict) and key != "versions"]
    kept = {key: row[key] for key in measured if key not in ("schema", "attempt", "step", "seed")}
    table = Table(SAMPLE_COLUMNS, [[sample[key] for key in SAMPLE_COLUMNS] for sample in row["samples"] or []])
    return {"step": row["step"], "evaluate": {**kept, "samples": table}}
