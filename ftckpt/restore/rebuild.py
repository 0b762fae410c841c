"""What must be rebuilt so that a snapshot is whole, and whether parity can do it: one pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.stripes import num_blocks
from ftckpt.protect.survive import BlockId, Repair, solve
from ftckpt.restore.found import Snapshots
from ftckpt.restore.protection import Kept, Shield
from ftckpt.restore.source import Damage, Source

NEW_SLOT = -1
"""In place of a slot's number: the shard comes into a slot that is chosen when it is rebuilt."""


@dataclass(frozen=True)
class Fix:
    """One shard that is not whole anywhere: it is rebuilt at ``at``, in a new slot or in place.

    ``chunks`` come from parity; all else (objects and volatile chunks, manifest and checksums of a new slot) comes
    from the package ``kept``, which a slot that has only bad chunks can do without. ``parts`` are those of Damage.
    """

    shard: str
    at: Source
    chunks: tuple[int, ...]
    kept: Kept | None = None
    parts: tuple[str, ...] = ()

    @property
    def in_place(self) -> bool:
        """Whether a slot that is there is repaired."""
        return self.at.slot != NEW_SLOT


@dataclass(frozen=True)
class Rebuild:
    """How the shards of ``fixes`` are made whole: by ``repairs``, in an order in which each has what it needs."""

    fixes: Mapping[str, Fix]
    repairs: tuple[Repair, ...]


def assess(
    found: Snapshots, bad: Mapping[Source, Damage], shield: Shield, bad_blocks: Collection[BlockId]
) -> Rebuild | tuple[str, ...]:
    """How to make ``found`` whole with what ``shield`` has of it, or why that cannot be done, a text per shard.

    ``bad`` slots did not verify, nor did ``bad_blocks`` of parity.
    """
    fixes: dict[str, Fix] = {}
    arenas: dict[str, str] = {}
    hopeless: list[str] = []
    for shard in found.homes:
        source = found.nearest(shard, bad)
        if source is None:
            fix = _fix(found, shard, bad, shield)
            if fix is None:
                hopeless.append(f"{shard}: {_state(found, shard, bad)} and no package of it is left")
                continue
            fixes[shard] = fix
            source = fix.at
        arenas[shard] = source.arena
    if hopeless:
        return tuple(hopeless)
    groups = [group for group in shield.groups.values() if _fits(group, arenas)]
    lost = {(shard, chunk) for shard, fix in fixes.items() for chunk in fix.chunks}
    repairs, unsolved = solve(groups, lost, _lost_blocks(groups, shield) | set(bad_blocks))
    if unsolved:
        shards = sorted({shard for shard, _ in unsolved})
        return tuple(
            f"{shard}: {_state(found, shard, bad)} and {_reason(shard, groups, fixes, shield)}" for shard in shards
        )
    return Rebuild(fixes, tuple(repairs))


def _fix(found: Snapshots, shard: str, bad: Mapping[Source, Damage], shield: Shield) -> Fix | None:
    home = found.homes[shard]
    packages = sorted(shield.kept.get(shard, ()), key=lambda kept: (kept.node != home, kept.node, kept.file))
    kept = packages[0] if packages else None
    damaged = [s for s in found.slots.get(shard, ()) if not bad[s].useless]
    for source in sorted(damaged, key=lambda s: (len(bad[s].chunks), s.node != home, s)):
        damage = bad[source]
        if kept is not None and kept.holding.arena == source.arena:
            chunks = tuple(c for c in damage.chunks if c < kept.holding.volatile[0])
            return Fix(shard, source, chunks, kept, damage.parts)
        if "objects" not in damage.parts:
            return Fix(shard, source, damage.chunks, None, damage.parts)
    if kept is None:
        return None
    chunks = tuple(range(kept.holding.volatile[0]))
    return Fix(shard, Source(home, kept.holding.arena, NEW_SLOT), chunks, kept)


def _fits(group: ParityGroup, arenas: Mapping[str, str]) -> bool:
    """Whether the group was made for the arenas that hold the snapshot."""
    return all(arenas.get(member.shard) == member.arena for member in group.members)


def _lost_blocks(groups: Sequence[ParityGroup], shield: Shield) -> set[BlockId]:
    """Blocks of parity files that are not there; blocks in slots go with their chunks."""
    return {
        (group.name, holder, block)
        for group in groups
        if group.mode in ("node", "peer")
        for holder in range(len(group.members))
        if (group.name, holder) not in shield.parity
        for block in range(num_blocks(group, holder))
    }


def _state(found: Snapshots, shard: str, bad: Mapping[Source, Damage]) -> str:
    damaged = [bad[source] for source in found.slots.get(shard, ())]
    if damaged:
        some = min(damaged, key=lambda d: (d.useless, len(d.chunks)))
        parts = [f"{len(some.chunks)} of its chunks"] if some.chunks else []
        return f"{', '.join([*parts, *some.parts]) or 'its slot'} are corrupt"
    if found.homes[shard] not in found.nodes:
        return "its node's arenas are gone"
    if found.foreign and shard not in found.arenas:
        return "its arena is gone"
    return "its arena does not hold it"


def _reason(shard: str, groups: Sequence[ParityGroup], fixes: Mapping[str, Fix], shield: Shield) -> str:
    texts = []
    for group in groups:
        names = [member.shard for member in group.members]
        if shard not in names:
            continue
        files = group.mode in ("node", "peer")
        lost = [
            name
            for holder, name in enumerate(names)
            if (name in fixes and fixes[name].chunks) or (files and (group.name, holder) not in shield.parity)
        ]
        texts.append(f"group {group.mode}-{group.name[:4]} has lost {len(lost)} of {len(names)} members")
    return ", ".join(texts) or "no parity covers it"
