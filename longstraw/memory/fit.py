"""Whether a run fits its devices, and what would: predicted bytes against what the hardware has. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from longstraw.config import ConfigError, HardwareConfig, RunConfig
from longstraw.memory.estimate import Prediction, is_predicted, layout_of, predict
from longstraw.memory.estimate.ranks import Layout
from longstraw.parallel.parallel_dims import resolve_dims
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
    """Return why a run cannot fit its devices, with the parts and what would fit; None where it may, or who knows.

    A prediction that is only a little too high is no reason: see ``MARGIN``.
    """
    limit = limit_bytes(config.hardware)
    if limit is None or not is_predicted(config):
        return None
    said = predicted(config)
    return None if said.peak <= limit * MARGIN else explain(config, "predicted", said.peak, said.verb, said.by_kind)


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
    parts = sorted(by_kind.items(), key=lambda part: -part[1])[:SHOWN]
    text = (
        f"a rank holds {format_bytes(peak)} at its peak ({how}, in {verb}: "
        f"{', '.join(f'{kind} {format_bytes(size)}' for kind, size in parts)}); "
        f"hardware.memory_gb={hardware.memory_gb:g}{reserve} leaves {format_bytes(limit)}"
    )
    if not is_predicted(config):
        return text
    longest, larger = largest_context(config), smallest_hardware(config)
    shorter = longest is not None and longest.context < config.context  # a count may exceed its prediction
    would = [f"context={longest.context}"] if longest is not None and shorter else []
    would += [] if larger is None else [f"hardware.nodes={larger.nodes} ({ranks_text(larger)})"]
    return f"{text}; {'would fit: ' + ' or '.join(would) if would else 'no context and no number of nodes would fit'}"


def ranks_text(hardware: HardwareConfig) -> str:
    """Return the devices of ``hardware`` in words."""
    kind = (hardware.gpu or hardware.backend).upper()
    return f"{hardware.nodes} x {max(hardware.gpus_per_node, 1)} {kind}"


def predicted(config: RunConfig, context: int | None = None, layout: Layout | None = None) -> Prediction:
    """Return what the largest step of a run holds, at another ``context`` if one is given.

    Where the drift of a shared prompt is measured, a freshly evaluated one stands beside it for that time.
    """
    prompt = (context or config.context) - config.response_length
    said = predict(config, prompt_positions=prompt, response_positions=config.response_length, layout=layout)
    if config.refresh_every == 1 or not config.measure_drift:
        return said
    more = said.by_kind["retained"]
    return replace(said, peak=said.peak + more, verb="drift", by_kind=said.by_kind | {"retained": 2 * more})


def largest_context(config: RunConfig) -> Fitting | None:
    """Return the largest context that fits, to a thousandth and in multiples of 64; None where none does.

    Memory grows with the context almost as a straight line, on which the next guess lies.
    """
    layout, least = layout_of(config), config.response_length + STEP

    def at(context: int) -> Fitting:
        context = context // STEP * STEP
        prediction = predicted(config, context, layout)
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

    ``from_one`` asks for fewer devices than a node has, too.
    """
    for hardware in _larger(config.hardware, from_one):
        bigger = replace(config, hardware=hardware, simulation=replace(config.simulation, rank=0))
        try:
            resolve_dims(config.model, hardware)
        except ConfigError:  # not every number of ranks can share a model
            continue
        if is_predicted(bigger) and _load(hardware, predicted(bigger)) <= 1:
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
