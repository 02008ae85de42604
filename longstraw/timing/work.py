"""The seconds of a step from the work of its parts: what overlaps, and what is between the parts that were evaluated.

A step is evaluated in **pieces**, a chunk of the prompt or a response each, and a piece in blocks. Where pieces and
blocks repeat, a simulation evaluates some of them; the others' work is that of their like. No torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields

RESOURCES = ("products", "attention", "memory", "links", "launches")


@dataclass(frozen=True)
class Work:
    """The seconds that some operations keep each resource busy, one after the other, and their FLOPs.

    An operation counts for the resource that binds it: arithmetic, or memory. ``hidden`` are collectives that run
    beside computation, ``links`` those that computation waits for, ``launches`` the time of the host.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    hidden: float = 0.0
    launches: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> Work:
        return Work(*(factor * x for x in astuple(self)))


NO_WORK = Work()
NAMES = tuple(f.name for f in fields(Work))


@dataclass
class Piece:
    """The work of one piece: of evaluated blocks by their number, of their parameters, and of all else."""

    evaluated: bool = True
    blocks: dict[int, Work] = field(default_factory=dict)
    parameters: Work = NO_WORK  # gathered for blocks and their gradients sent back, by FSDP
    rest: Work = NO_WORK


@dataclass(frozen=True)
class BlockKind:
    """What a block has in common with others whose work is the same, and the bytes of its parameters."""

    key: Hashable
    size: int


Parts = list[Work]  # of all blocks in order, then of all else


def all_blocks(piece: Piece, kinds: Sequence[BlockKind]) -> Parts:
    """Return the work of every block and of the rest; a block that was not evaluated has the mean of its kind.

    What parameters cause is shared out by their bytes, because it happens before or after their block's own turn.
    """
    if not piece.blocks:
        return [piece.rest + piece.parameters]
    alike: dict[Hashable, list[Work]] = {}
    for i, work in piece.blocks.items():
        alike.setdefault(kinds[i].key, []).append(work)
    means = {key: sum(works, NO_WORK).times(1 / len(works)) for key, works in alike.items()}
    size = sum(kinds[i].size for i in piece.blocks)
    parts = [piece.blocks.get(i) or means[kind.key] for i, kind in enumerate(kinds)]
    shares = [piece.parameters.times(kind.size / size) for kind in kinds]
    return [*(part + share for part, share in zip(parts, shares, strict=True)), piece.rest]


def all_pieces(pieces: Sequence[Piece], kinds: Sequence[BlockKind]) -> list[Parts]:
    """Return the parts of every piece; one that was not evaluated lies on the line between those around it."""
    known = {i: all_blocks(piece, kinds) for i, piece in enumerate(pieces) if piece.evaluated}
    found, before = [], 0
    for i in range(len(pieces)):
        if i in known:
            before = i
            found.append(known[i])
        else:
            after = next(j for j in known if j > i)
            found.append(between(known[before], known[after], (i - before) / (after - before)))
    return found


def between(first: Parts, last: Parts, share: float) -> Parts:
    """Return what lies on the line from ``first`` to ``last``, at ``share`` of the way, which may be beyond 1."""
    return [a.times(1 - share) + b.times(share) for a, b in zip(first, last, strict=True)]


def seconds(parts: Iterable[Work], *, overlap: bool) -> dict[str, float]:
    """Return the seconds of ``parts``, one after the other, by what binds each of them.

    With ``overlap``, as on a GPU, the host is ahead and hidden collectives run beside computation within a part: a part
    takes as long as the longest of them. Without, as on a processor, all happens in turn.
    """
    total = dict.fromkeys(RESOURCES, 0.0)
    for part in parts:
        device = part.products + part.attention + part.memory
        if not overlap:
            bound = {name: getattr(part, name) for name in RESOURCES} | {"links": part.links + part.hidden}
        elif part.launches > part.links + max(device, part.hidden):
            bound = {"launches": part.launches}
        elif part.hidden > device:
            bound = {"links": part.links + part.hidden}
        else:
            bound = {name: getattr(part, name) for name in ("products", "attention", "memory", "links")}
        for name, value in bound.items():
            total[name] += value
    return total


def step_seconds(
    verbs: Mapping[str, Sequence[Piece]], kinds: Sequence[BlockKind], *, overlap: bool
) -> dict[str, dict[str, float]]:
    """Return the seconds of each verb by what binds its parts."""
    return {
        verb: seconds((part for parts in all_pieces(pieces, kinds) for part in parts), overlap=overlap)
        for verb, pieces in verbs.items()
    }


def step_flops(verbs: Mapping[str, Sequence[Piece]], kinds: Sequence[BlockKind]) -> dict[str, float]:
    """Return the FLOPs of each verb on this rank."""
    return {
        verb: sum(part.flops for parts in all_pieces(pieces, kinds) for part in parts) for verb, pieces in verbs.items()
    }
