"""Forecast of the node memory that a rank's arena needs, next to old arenas and after their removal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ftckpt.memory.arena import Arena
from ftckpt.memory.image import SlotImage
from ftckpt.memory.ledger import Ledger, for_slots, slots_to_allocate
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId


class MemoryForecast(NamedTuple):
    """``needs`` of a rank's arena; ``freed_bytes`` before it allocates; ``most`` slots while old arenas exist; the
    ``image`` of a slot; the ``existing`` arena, if any; snapshots ``needed`` from old arenas; their protected ones
    (``marks``; None if irrelevant)."""

    needs: Ledger
    freed_bytes: int
    most: int
    image: SlotImage
    existing: Arena | None
    needed: frozenset[SnapshotId]
    marks: tuple[SnapshotId, ...] | None


def foresee_arena(
    there: Ledger, old: Sequence[Path], existing: Arena | None, *, slots: int, keep: SnapshotId | None,
    manifest: Manifest,
) -> MemoryForecast:  # fmt: skip
    """Forecast for ``manifest``'s arena, of ``slots`` unless it is ``existing``, and for the memory that the ``old``
    arenas free before. ``there``: the content of all arenas; ``keep``: the snapshot that a restart would use."""
    spare = there.spare(there.needed(keep)) if keep is not None else Ledger()
    num_old = num_slots(old) - spare.free_slots if keep is not None else 0
    have, new, lacks = count_slots(slots, existing, keep, num_old)
    image = existing.image if existing is not None else SlotImage.of(manifest)
    needs = for_slots(new, lacks, image.file_bytes, old)
    kept = old and keep is not None
    return MemoryForecast(
        needs, spare.given_back_bytes if keep is not None else needs.free_bytes, have + new,
        image, existing, needed=there.needed(keep) if keep is not None else frozenset(),
        marks=tuple(sorted(there.protected)) if kept else None,
    )  # fmt: skip


def count_slots(most: int, existing: Arena | None, keep: SnapshotId | None, num_old: int) -> tuple[int, int, int]:
    """The numbers of allocated slots, of slots to allocate while ``num_old`` are in old arenas, and of all missing
    slots."""
    slots = most if existing is None else existing.control.slots
    there = 0 if existing is None else slots - len(absent_slots(existing))
    lacks = max(0, min(slots, most) - there)
    if not num_old:
        return there, lacks, lacks
    needed = 0 if existing is None or existing.find(keep) is None else 1
    return there, slots_to_allocate(there, slots, needed, most - num_old), lacks


def absent_slots(arena: Arena) -> list[int]:
    """The slots of ``arena`` that are not allocated yet."""
    return [slot for slot in range(arena.control.slots) if not arena.allocated(slot)]


def num_slots(paths: Sequence[Path]) -> int:
    """The number of slots in the arenas at ``paths``, readable or not."""
    return sum(len(list(path.glob("slot*"))) for path in paths)
