"""The failures that a job survives in its layout, and the cost: memory per node, network traffic per snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftckpt.model.text import human
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import PARITY_FILES
from ftckpt.parity.stripes import stripes
from ftckpt.parity.survive import Forecast, LossUnits

MAX_SETS = 3
"""Maximum of snapshots of which a node keeps packages: the protected one, an older one, and the target."""
FileBytes = Callable[[ParityGroup, int], int]
"""Returns the size of one member's parity file: ``ftckpt.memory.parity_file.parity_bytes``."""


@dataclass(frozen=True)
class Failure:
    """A kind of loss: the number of cases, how many of them are survived, and an example that is not (or empty)."""

    lost: str
    cases: int
    survived: int
    example: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Memory of one node in bytes: slots (``in_slots`` of them for parity and copies), parity files, packages."""

    slots: int
    in_slots: int
    parity: int
    packages: int

    @property
    def sum(self) -> int:
        return self.slots + self.parity + self.packages


@dataclass(frozen=True)
class ProtectionTable:
    """The failures and the cost of protection. ``network``: bytes that each node receives per protected snapshot."""

    failures: tuple[Failure, ...]
    memory: Mapping[str, Memory]
    network: Mapping[str, int]

    def smp_bytes(self, node: str) -> int:
        """Bytes that the SMP of a node needs in addition to the slots: parity files and packages."""
        return self.memory[node].parity + self.memory[node].packages

    @property
    def fullest(self) -> Memory:
        """The memory of the node that needs the most."""
        return max(self.memory.values(), key=lambda memory: memory.sum)

    def lines(self) -> list[str]:
        most = self.fullest
        width = max(len(failure.lost) for failure in self.failures)
        lines = [f"{'lost':<{width}}  {'cases':>9}  survived"]
        for failure in self.failures:
            survived = "all" if failure.survived == failure.cases else str(failure.survived or "none")
            if failure.example:
                survived += f" (not: {' and '.join(failure.example)})"
            lines.append(f"{failure.lost:<{width}}  {failure.cases:>9}  {survived}")
        lines += [
            f"host RAM per node: {human(most.sum)} = slots {human(most.slots)}"
            + (f" (of these parity and copies {human(most.in_slots)})" if most.in_slots else "")
            + f" + parity {human(most.parity)} + packages {human(most.packages)}",
            f"network per protected snapshot: a node receives up to {human(max(self.network.values()))}, "
            f"all nodes {human(sum(self.network.values()))}",
        ]
        return lines

    def to_json(self) -> dict[str, Any]:
        """A JSON value: every failure, the memory of the fullest node, network bytes of a node and of the job."""
        return {
            "failures": [asdict(failure) for failure in self.failures],
            "memory_per_node": {**asdict(self.fullest), "sum": self.fullest.sum},
            "network_bytes": {"node": max(self.network.values()), "job": sum(self.network.values())},
        }


def memory_table(
    holdings: Sequence[ArenaLayout],
    groups: Sequence[ParityGroup],
    mirrors: Mapping[str, Sequence[str]],
    slots: int,
    parity_bytes: FileBytes,
) -> dict[str, Memory]:
    """Node → its memory; arguments as in ``protection_table``."""
    parity = _parity(groups, parity_bytes)
    on_node: dict[str, list[ArenaLayout]] = {}
    packages: dict[str, int] = {}
    for holding in sorted(holdings, key=lambda h: h.node):
        on_node.setdefault(holding.node, []).append(holding)
        for node in mirrors.get(holding.shard, ()):
            packages[node] = packages.get(node, 0) + holding.package_bytes
    return {
        node: Memory(
            slots=slots * sum(max(h.slot_bytes, sum(h.lengths)) for h in own),
            in_slots=slots * sum(sum(s.lengths) for h in own for s in h.sections if s.kind in ("parity", "copy")),
            parity=PARITY_FILES * parity.get(node, 0),
            packages=MAX_SETS * packages.get(node, 0),
        )
        for node, own in on_node.items()
    }


def protection_table(
    holdings: Sequence[ArenaLayout],
    groups: Sequence[ParityGroup],
    mirrors: Mapping[str, Sequence[str]],
    slots: int,
    parity_bytes: FileBytes,
) -> ProtectionTable:
    """The failures that this job survives, and the cost.

    ``mirrors``: the nodes that keep the package of each shard, its own node first; ``slots``: number per arena;
    ``parity_bytes``: returns the size of a parity file.

    Raises:
        ValueError: no holdings.
    """
    if not holdings:
        raise ValueError("no holdings: nothing to report on")
    return ProtectionTable(
        failure_table(holdings, groups, mirrors),
        memory_table(holdings, groups, mirrors, slots, parity_bytes),
        network_table(holdings, groups, mirrors),
    )


def failure_table(
    holdings: Sequence[ArenaLayout], groups: Sequence[ParityGroup], mirrors: Mapping[str, Sequence[str]]
) -> tuple[Failure, ...]:
    """Evaluate every case of every failure, once per kind. Pairs without a common group or package are survived if
    both losses are."""
    forecast = Forecast(groups, mirrors, holdings)
    nodes = len(forecast.on_node)
    rows = [
        *_one_and_two("one rank's arena", "any two arenas", forecast, nodes=False),
        Failure("the SMP of a node", nodes, nodes),  # its results are in files that outlive it
        *_one_and_two("one node", "any two nodes", forecast, nodes=True),
    ]
    racks: dict[str, list[str]] = {}
    for node, shards_there in sorted(forecast.on_node.items()):
        racks.setdefault(forecast.holdings[shards_there[0]].rack, []).append(node)
    # Nodes without a rack label: it is unknown which of them fail together.
    racks.pop("", None)
    if racks:
        failed = [rack for rack, lost in racks.items() if not forecast.survived(frozenset(), frozenset(lost))]
        rows.append(Failure("one rack", len(racks), len(racks) - len(failed), tuple(failed[:1])))
    return tuple(rows)


def _one_and_two(one: str, two: str, forecast: Forecast, *, nodes: bool) -> list[Failure]:
    units, near = LossUnits(forecast, nodes=nodes), forecast.near(nodes=nodes)
    names = units.names
    failed = {name for name in names if not units.survived(name)}
    good = [name for name in names if name not in failed]
    bad_pairs = [(a, b) for a in good for b in near[a] if a < b and b not in failed and not units.survived(a, b)]
    rows = [Failure(one, len(names), len(good), tuple(sorted(failed)[:1]))]
    if len(names) > 1:
        # A pair without a common group or package is survived if each of its losses is.
        pairs = len(good) * (len(good) - 1) // 2 - len(bad_pairs)
        example: tuple[str, ...] = min(bad_pairs, default=())
        if failed and not bad_pairs:
            one_failed = min(failed)
            example = tuple(sorted([one_failed, next(name for name in names if name != one_failed)]))
        rows.append(Failure(two, len(names) * (len(names) - 1) // 2, pairs, example))
    return rows


def _parity(groups: Iterable[ParityGroup], parity_bytes: FileBytes) -> dict[str, int]:
    """Node → total bytes of one parity file for each of its arenas and modes."""
    known: dict[Any, list[int]] = {}
    total: dict[str, int] = {}
    for group in groups:
        if group.in_slots:
            continue
        names = sum(len(m.shard) + len(m.node) + len(m.arena) for m in group.members)  # part of the files' headers
        # The sizes depend only on this key, and thousands of groups of a large job have few different ones.
        key = (_shape(group), names)
        if key not in known:
            known[key] = [parity_bytes(group, holder) for holder in range(len(group.members))]
        for member, nbytes in zip(group.members, known[key], strict=True):
            total[member.node] = total.get(member.node, 0) + nbytes
    return total


def network_table(
    holdings: Sequence[ArenaLayout], groups: Iterable[ParityGroup], mirrors: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Node → bytes that it receives per protected snapshot: chunks of its peers, packages."""
    received = {holding.node: 0 for holding in holdings}
    for holding in holdings:
        # The first mirror is the shard's own node.
        for node in mirrors.get(holding.shard, ())[1:]:
            received[node] = received.get(node, 0) + holding.package_bytes
    known: dict[Any, list[int]] = {}
    for group in groups:
        if group.mode != "peer":
            continue
        key = _shape(group)
        if key not in known:
            known[key] = _pulled(group)
        for member, nbytes in zip(group.members, known[key], strict=True):
            received[member.node] += nbytes
    return received


def _pulled(group: ParityGroup) -> list[int]:
    """Bytes of other members' chunks that each member reads to compute its blocks."""
    pulled = [0] * len(group.members)
    for stripe in stripes(group):
        nbytes = sum(group.members[member].lengths[chunk] for member, chunk in stripe.data if chunk >= 0)
        for holder, _ in stripe.blocks:
            # All of them are remote: members of a peer group are on different nodes.
            pulled[holder] += nbytes
    return pulled


def _shape(group: ParityGroup) -> Any:
    return group.code, group.losses, group.chunk_bytes, tuple(member.lengths for member in group.members)
