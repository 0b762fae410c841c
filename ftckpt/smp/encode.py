"""Parity blocks of one holder for one snapshot, written to the file that does not hold the protected one."""

from __future__ import annotations

from pathlib import Path

from ftckpt.arena.control import Snapshot
from ftckpt.errors import ArenaError, MismatchError
from ftckpt.protect.codecs import encode
from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.parity_file import ParityFile, parity_path
from ftckpt.protect.stripes import Stripe, num_blocks, stripes
from ftckpt.smp.held import Held
from ftckpt.smp.sources import Bytes, Feed, Sources
from ftckpt.smp.work import Work, in_thread

FILES = 2
"""Parity files of an arena for each mode: one for the protected snapshot, one to write."""


def open_parity(path: Path, writable: bool = False) -> ParityFile | None:
    """The parity file, or None where there is none that can be read."""
    try:
        return ParityFile.open(path, writable)
    except (ArenaError, MismatchError):
        return None


def sealed_parity(held: Held, group: ParityGroup, holder: int, snapshot: Snapshot) -> Path | None:
    """The file with all blocks that ``holder`` keeps of ``group`` for ``snapshot``, or None."""
    for index in range(FILES):
        path = parity_path(held.path, group.mode, index)
        file = open_parity(path)
        if file is not None:
            fits = _belongs(file, group, holder) and file.snapshot() == snapshot
            file.close()
            if fits:
                return path
    return None


def write_parity(
    sources: Sources, held: Held, group: ParityGroup, holder: int, *, snapshot: Snapshot, keep: Snapshot | None
) -> Work[bool]:
    """Compute and store what ``holder`` keeps of ``group``; returns whether there was anything to do.

    Args:
        keep: the protected snapshot, whose parity is not overwritten.

    Raises:
        MemoryBudgetError: no room for the file.
        CorruptError, ArenaError, CannotError: as ``Sources``.
    """
    if num_blocks(group, holder) == 0 or sealed_parity(held, group, holder, snapshot) is not None:
        return False
    path = parity_path(held.path, group.mode, _index_to_write(held, group, holder, keep))
    file = open_parity(path, writable=True)
    try:
        if file is None or not _belongs(file, group, holder):
            if file is not None:
                file.close()
            file = None
            path.unlink(missing_ok=True)
            file = yield from in_thread(lambda: ParityFile.create(path, group, holder))
        file.begin(*snapshot)
        own = [(stripe, row, block) for stripe in stripes(group) for row, block in _rows(stripe, holder)]
        feed = Feed(sources, group, (stripe for stripe, _, _ in own), snapshot)
        for stripe, row, block in own:
            file.put(block, (yield from make_block(sources, feed, group, stripe, row)))
            yield 0.0
        file.seal()
    finally:
        if file is not None:
            file.close()
    return True


def make_block(sources: Sources, feed: Feed, group: ParityGroup, stripe: Stripe, row: int) -> Work[Bytes]:
    """Block ``row`` of a stripe from its verified data; raises as ``Feed.next``."""
    data = yield from feed.next(stripe)
    yield from sources.pace.memory(stripe.length)
    return encode(group.code, data, stripe.length, row, group.losses)


def _rows(stripe: Stripe, holder: int) -> list[tuple[int, int]]:
    """Parity row and block index of what ``holder`` keeps of a stripe."""
    return [(row, block) for row, (member, block) in enumerate(stripe.blocks) if member == holder]


def _belongs(file: ParityFile, group: ParityGroup, holder: int) -> bool:
    return file.group.name == group.name and file.holder == holder


def _index_to_write(held: Held, group: ParityGroup, holder: int, keep: Snapshot | None) -> int:
    """The file that loses least: never the only one of the protected snapshot."""
    ranks = []
    for index in range(FILES):
        file = open_parity(parity_path(held.path, group.mode, index))
        if file is None:
            ranks.append((0, 0, index))
            continue
        snapshot, fits = file.snapshot(), _belongs(file, group, holder)
        file.close()
        if snapshot is None:
            ranks.append((0, 1, index))
        elif keep is None or snapshot != keep:
            ranks.append((1, snapshot[1], index))
        else:
            ranks.append((3 if fits else 2, 0, index))
    return min(ranks)[2]
