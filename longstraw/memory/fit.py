"""Whether a run fits its devices, and what would: predicted bytes against what the hardware has.

PyTorch is loaded where something has to be counted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from longstraw.config import ConfigError, HardwareConfig, RunConfig
from longstraw.memory.estimate import Prediction, known, steps_to_count
from longstraw.parallel.parallel_dims import resolve_dims
from longstraw.runtime.machine_memory import MemoryLimit
from longstraw.units import GB, format_bytes

MARGIN = 1.016  # a prediction may be that much too high
STEP = 64  # contexts are given in multiples of
LONGEST = 2**26  # no context beyond is looked for
SHOWN = 4  # kinds that a text names, the largest first


@dataclass(frozen=True)
class Fitting:
    """The largest context that fits, and what is held there."""

    context: int
    prediction: Prediction
    load: float  # of the memory there is, 1: all


def limit_bytes(hardware: HardwareConfig) -> int | None:
    """Return the bytes that a run may hold on one device; None where the hardware's memory is not known."""
    return None if hardware.memory_gb is None else round((hardware.memory_gb - hardware.reserve_gb) * GB)


def too_large(config: RunConfig) -> str | None:
    """Return why a run cannot fit its devices or its nodes, with the parts and what would; None where it may.

    A prediction that is only a little too high is no reason: see ``MARGIN``. What the configuration does not say of the
    memory there is refuses nothing.
    """
    hardware, limit = config.hardware, limit_bytes(config.hardware)
    if limit is None:
        return None
    said = predicted(config)
    if said.peak > limit * MARGIN:
        return explain(config, "predicted", said.peak, said.verb, said.by_kind)
    ranks, host = max(hardware.gpus_per_node, 1), hardware.host_memory_gb
    if host is None or said.host * ranks <= host * GB * MARGIN:
        return None
    text = f"the {ranks} ranks of a node hold {format_bytes(said.host * ranks)} in host memory (predicted)"
    return f"{text}; hardware.host_memory_gb={host:g} is less; {_what_fits(config)}"


def fits_easily(config: RunConfig, limits: Sequence[MemoryLimit], ranks: int) -> bool:
    """Return whether a run on processors fits the machine that this is by far, so that nothing need be counted."""
    if config.hardware.backend != "cpu":
        return False
    from longstraw.memory.estimate.bound import upper_bound  # here: it loads torch

    return upper_bound(config) <= min((_share(limit, ranks) for limit in limits), default=0)


def exceeds_by_far(config: RunConfig, limits: Sequence[MemoryLimit], ranks: int) -> str | None:
    """Return why a run on processors cannot fit the machine that this is, where its parameters and rows alone do not.

    Nothing is counted: of a context that fits by this measure, a count has yet to say whether it does.
    """
    if config.hardware.backend != "cpu":
        return None
    from longstraw.memory.estimate.bound import lower_bound  # here: it loads torch

    def too_small(context: int) -> MemoryLimit | None:
        least = lower_bound(replace(config, context=context))
        return next((limit for limit in limits if least > _share(limit, ranks) * MARGIN), None)

    limit = too_small(config.context)
    if limit is None:
        return None
    least, high = config.response_length // STEP + 1, config.context // STEP
    low = least - 1
    while low < high:  # the largest context that is not ruled out is a multiple of 64 between the two
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if too_small(middle * STEP) else (middle, high)
    return (
        f"a rank holds more than {format_bytes(lower_bound(config))} (its parameters and the prompt's rows alone); "
        f"{limit.name}, {format_bytes(limit.of)}, leaves {format_bytes(_share(limit, ranks))}; "
        + (f"no context above {low * STEP} can fit" if low >= least else "no context can fit")
    )


def _share(limit: MemoryLimit, ranks: int) -> int:
    """Return the bytes that one of ``ranks`` processes has of what a limit leaves."""
    return max(limit.left, 0) // (ranks if limit.shared else 1)


def too_large_here(config: RunConfig, limits: Sequence[MemoryLimit], ranks: int) -> str | None:
    """Return why a run cannot fit the machine that this is, of whose ``limits`` ``ranks`` processes share some.

    On a processor that is all a rank holds; beside a GPU, what it holds in host memory.
    """
    said, on_processor = predicted(config), config.hardware.backend == "cpu"
    needed = said.host + (said.peak if on_processor else 0)
    for limit in limits:
        here = _share(limit, ranks)
        if needed > here * MARGIN:
            parts = _parts(said.by_kind | {"host": said.host} if on_processor else {"host": said.host})
            text = (
                f"a rank holds {format_bytes(needed)} at its peak (predicted, in {said.verb}: {parts}); "
                f"{limit.name}, {format_bytes(limit.of)}, leaves {format_bytes(here)}"
            )
            if not on_processor:
                return text
            memory = replace(config.hardware, memory_gb=max(here, 1) / GB, reserve_gb=0.0)
            return f"{text}; {_what_fits(replace(config, hardware=memory))}"
    return None


def machine_refuses(config: RunConfig, limits: Sequence[MemoryLimit], ranks: int) -> str | None:
    """Return ``too_large_here``, but count nothing where shapes alone say that a run fits, or that it cannot."""
    if fits_easily(config, limits, ranks):
        return None
    return exceeds_by_far(config, limits, ranks) or too_large_here(config, limits, ranks)


def exceeded(config: RunConfig, peak: int, verb: str, by_kind: dict[str, int]) -> dict[str, str]:
    """Return the status of a step whose memory was counted where its hardware does not have it; else nothing."""
    limit = limit_bytes(config.hardware)
    if limit is None or peak <= limit:
        return {}
    return {"status": "too_large", "error": explain(config, "counted", peak, verb, by_kind)}


def explain(config: RunConfig, how: str, peak: int, verb: str, by_kind: dict[str, int]) -> str:
    """Return in one line what does not fit, what it is made of, and what would fit."""
    hardware, limit = config.hardware, limit_bytes(config.hardware) or 0
    reserve = f" less hardware.reserve_gb={hardware.reserve_gb:g}" if hardware.reserve_gb else ""
    return (
        f"a rank holds {format_bytes(peak)} at its peak ({how}, in {verb}: {_parts(by_kind)}); "
        f"hardware.memory_gb={hardware.memory_gb:g}{reserve} leaves {format_bytes(limit)}; {_what_fits(config)}"
    )


def _parts(by_kind: dict[str, int]) -> str:
    parts = sorted(by_kind.items(), key=lambda part: -part[1])[:SHOWN]
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts)


def _what_fits(config: RunConfig) -> str:
    """Return the largest context that fits and, of GPUs, how many nodes would hold the run as it is."""
    more = config.hardware.backend != "cpu"
    longest, larger = largest_context(config), smallest_hardware(config) if more else None
    shorter = longest is not None and longest.context < config.context  # a count may exceed its prediction
    would = [f"context={longest.context}"] if longest is not None and shorter else []
    would += [] if larger is None else [f"hardware.nodes={larger.nodes} ({ranks_text(larger)})"]
    nothing = "no context and no number of nodes would fit" if more else "no context would fit"
    return f"would fit: {' or '.join(would)}" if would else nothing


def ranks_text(hardware: HardwareConfig) -> str:
    """Return the devices of ``hardware`` in words."""
    kind = (hardware.gpu or hardware.backend).upper()
    return f"{hardware.nodes} x {max(hardware.gpus_per_node, 1)} {kind}"


def predicted(config: RunConfig, *, line: bool = False) -> Prediction:
    """Return what the largest step of a run holds; ``line``: as the line through longer prompts says it.

    Where the drift of a shared prompt is measured, a freshly evaluated one stands beside it for that time.
    """
    said = known(config, line=line)
    if said is None:
        count([config], line=line)
        said = known(config, line=line)
        assert said is not None
    if config.refresh_every == 1 or not config.measure_drift:
        return said
    more = said.by_kind["retained"]
    return replace(said, peak=said.peak + more, verb="drift", by_kind=said.by_kind | {"retained": 2 * more})


def count(configs: Sequence[RunConfig], *, line: bool = False) -> None:
    """Count what predictions of ``configs`` need and nobody has counted yet."""
    missing = [
        step for config in configs if known(config, line=line) is None for step in steps_to_count(config, line=line)
    ]
    if missing:
        from longstraw.memory.estimate.cut import count_steps  # here: it takes seconds to load

        count_steps(missing)


def largest_context(config: RunConfig) -> Fitting | None:
    """Return the largest context that fits, to a thousandth and in multiples of 64; None where none does.

    Memory grows with the context almost as a straight line, on which the next guess lies.
    """
    least = config.response_length + STEP

    def at(context: int) -> Fitting:
        context = context // STEP * STEP
        prediction = predicted(replace(config, context=context), line=True)
        return Fitting(context, prediction, _load(config.hardware, prediction))

    low = at(least + STEP)
    high = at(max(2 * least, low.context + STEP))
    if low.load > 1:
        return None
    while high.load <= 1:
        if high.context >= LONGEST:
            return high
        beyond = max(_crossing(low, high) * 33 // 32, high.context + STEP)
        low, high = high, at(min(beyond, 8 * high.context, LONGEST))
    while (span := high.context - low.context) > max(STEP, low.context // 1000):
        margin = max(span // 64, STEP)
        middle = at(min(max(_crossing(low, high), low.context + margin), high.context - 1))
        low, high = (middle, high) if middle.load <= 1 else (low, middle)
    return low


def _load(hardware: HardwareConfig, prediction: Prediction) -> float:
    """Return the share of a device's memory, or of a rank's host memory, that is asked for: the larger one."""
    limit = limit_bytes(hardware)
    if limit is None:
        raise ConfigError(f"hardware={hardware.name} has no memory_gb: give hardware.memory_gb=NUMBER")
    host = hardware.host_memory_gb
    of_host = 0.0 if host is None else prediction.host * max(hardware.gpus_per_node, 1) / (host * GB)
    return max(prediction.peak / max(limit, 1), of_host)


def _crossing(low: Fitting, high: Fitting) -> int:
    """Return where a straight line through both meets all there is."""
    slope = (high.load - low.load) / (high.context - low.context)
    return LONGEST if slope <= 0 else min(low.context + int((1 - low.load) / slope), LONGEST)


def smallest_hardware(config: RunConfig, *, from_one: bool = False) -> HardwareConfig | None:
    """Return the fewest nodes of ``config.hardware``'s kind that hold the run; None where none do.

    ``from_one`` asks for fewer devices than a node has, too. Ranks share at most all that one holds here, so hardware
    that would not fit even then is passed over uncounted.
    """
    here, ranks = _load(config.hardware, predicted(config)), config.hardware.world_size
    for hardware in _larger(config.hardware, from_one):
        bigger = replace(config, hardware=hardware, simulation=replace(config.simulation, rank=0))
        try:
            resolve_dims(config.model, hardware)
        except ConfigError:  # not every number of ranks can share a model
            continue
        if here * min(ranks / hardware.world_size, 1) <= 1 and _load(hardware, predicted(bigger)) <= 1:
            return hardware
    return None


def _larger(hardware: HardwareConfig, from_one: bool) -> Iterator[HardwareConfig]:
    """Yield hardware of one kind, from small to large: within a node, then more of them."""
    for gpus in (1, 2, 4, 8, 16) if from_one else ():
        if gpus < hardware.gpus_per_node:
            yield replace(hardware, nodes=1, gpus_per_node=gpus, ranks=None, ep=None)
    nodes = [1, 2, 3, *(4 * 2**i for i in range(6))]
    for number in nodes:
        if from_one or number > hardware.nodes:
            yield replace(hardware, nodes=number, ranks=None, ep=None)
