"""Parity blocks of one holder for one snapshot, written to the file that does not hold the protected one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ftckpt.arena.control import Snapshot
from ftckpt.protect.codecs import encode
from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.parity_file import ParityFile, parity_path
from ftckpt.protect.stripes import Stripe, num_blocks, stripe, stripe_of_block
from ftckpt.smp.held import Held
from ftckpt.smp.parity_files import FILES
from ftckpt.smp.sources import Bytes, Feed, Sources
from ftckpt.smp.work import Work, in_thread


def sealed_parity(
    sources: Sources, held: Held, group: ParityGroup, holder: int, *, snapshot: Snapshot
) -> Path | None:
    """The file with all blocks that ``holder`` keeps of ``group`` for ``snapshot``, or None."""
    for index in range(FILES):
        path = parity_path(held.path, group.mode, index)
        file = sources.held.parity.get(path)
        if file is not None and _belongs(file, group, holder) and file.snapshot() == snapshot:
            return path
    return None


def write_parity(
    sources: Sources, held: Held, group: ParityGroup, holder: int, *, snapshot: Snapshot, keep: Snapshot | None
) -> Work[None]:
    """Compute and store what ``holder`` keeps of ``group``, if it is not there already.

    Args:
        keep: the protected snapshot, whose parity is not overwritten.

    Raises:
        MemoryBudgetError: no room for the file.
        CorruptError, ArenaError, CannotError: as ``Sources``.
    """
    blocks = num_blocks(group, holder)
    if blocks == 0 or sealed_parity(sources, held, group, holder, snapshot=snapshot) is not None:
        return
    files = sources.held.parity
    path = parity_path(held.path, group.mode, _index_to_write(sources, held, group, holder, keep=keep))
    file = files.get(path)
    if file is None or not _belongs(file, group, holder):
        files.drop(path)
        path.unlink(missing_ok=True)
        file = files.add((yield from in_thread(lambda: ParityFile.create(path, group, holder))))
    file.begin(*snapshot)
    own = [stripe(group, stripe_of_block(group, holder, block)) for block in range(blocks)]
    with closing(Feed(sources, group, own, snapshot)) as feed:
        for block, one in enumerate(own):
            row = one.blocks.index((holder, block))
            file.put(block, (yield from make_block(sources, feed, group, one, row=row)))
            yield 0.0
    file.seal()


def make_block(sources: Sources, feed: Feed, group: ParityGroup, stripe: Stripe, *, row: int) -> Work[Bytes]:
    """Block ``row`` of a stripe from its verified data; raises as ``Feed.next``."""
    data = yield from feed.next(stripe)
    yield from sources.pace.memory(stripe.length)
    return encode(group.code, data, stripe.length, row, group.losses)


def _belongs(file: ParityFile, group: ParityGroup, holder: int) -> bool:
    return file.group.name == group.name and file.holder == holder


def _index_to_write(sources: Sources, held: Held, group: ParityGroup, holder: int, *, keep: Snapshot | None) -> int:
    """The file that loses least: never the only one of the protected snapshot."""
    ranks = []
    for index in range(FILES):
        file = sources.held.parity.get(parity_path(held.path, group.mode, index))
        snapshot = None if file is None else file.snapshot()
        if file is None or snapshot is None:
            ranks.append((0, 0 if file is None else 1, index))
        elif keep is None or snapshot != keep:
            ranks.append((1, snapshot[1], index))
        else:
            ranks.append((3 if _belongs(file, group, holder) else 2, 0, index))
    return min(ranks)[2]
