"""Decide how many ranks share a prompt and the experts, and check it before anything is built. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from longstraw.config import ConfigError, HardwareConfig, ModelConfig


@dataclass(frozen=True)
class ParallelDims:
    """``dp`` data-parallel prompts, each over ``cp`` ranks; experts over ``ep`` of all ranks."""

    dp: int
    cp: int
    ep: int

    @property
    def world(self) -> int:
        return self.dp * self.cp


def resolve_dims(model: ModelConfig, hardware: HardwareConfig) -> ParallelDims:
    """Return how the ranks of ``hardware`` share ``model``; raise ``ConfigError`` naming the choices that work."""
    world = hardware.world_size
    if hardware.gpus_per_node and world != hardware.nodes * hardware.gpus_per_node:
        raise ConfigError(
            f"hardware.ranks={world} is not hardware.nodes={hardware.nodes} times "
            f"hardware.gpus_per_node={hardware.gpus_per_node}: there is one rank a GPU; leave hardware.ranks out"
        )
    if world % hardware.nodes:
        raise ConfigError(f"hardware.ranks={world} does not divide over hardware.nodes={hardware.nodes}")
    if world % hardware.dp:
        raise ConfigError(f"hardware.dp={hardware.dp} does not divide the {world} ranks; {_choices('dp', world)}")
    cp = world // hardware.dp
    heads, which = model.whole_heads or (0, "")
    if heads % cp:
        works = [f"hardware.dp={dp}" for dp in _divisors(world) if heads % (world // dp) == 0]
        raise ConfigError(
            f"{cp} ranks cannot share a prompt: the {heads} {which} of {model.name} cannot be split, "
            f"so the number of ranks of a prompt must divide {heads}; with {world} ranks: {', '.join(works) or 'none'}"
        )
    if not _all_hold_rows(model.vocab_size, cp):
        works = [f"hardware.dp={dp}" for dp in _divisors(world) if _all_hold_rows(model.vocab_size, world // dp)]
        raise ConfigError(
            f"{cp} ranks cannot share the {model.vocab_size} rows of {model.name}'s vocabulary: some would hold none; "
            f"with {world} ranks: {', '.join(works)}"
        )
    experts = model.experts
    ep = hardware.ep
    if ep is None:
        ep = max(n for n in _divisors(world) if experts % n == 0)
    if world % ep or experts % ep:
        divide = ", ".join(str(n) for n in _divisors(world) if experts % n == 0)
        raise ConfigError(
            f"hardware.ep={ep}: an expert cannot be split, so it must divide the {world} ranks and the {experts} "
            f"experts of {model.name}; one of {divide}"
        )
    return ParallelDims(hardware.dp, cp, ep)


def _all_hold_rows(rows: int, ranks: int) -> bool:
    """Return whether each of ``ranks`` holds a row, cut as ``torch.chunk`` cuts them."""
    return -(-rows // ranks) * (ranks - 1) < rows


def _choices(key: str, number: int) -> str:
    return f"one of hardware.{key}={', '.join(map(str, _divisors(number)))}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
