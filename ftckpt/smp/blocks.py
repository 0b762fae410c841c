"""Parity blocks in one pass over memory: what is read is verified, added up and hashed while it is in cache."""

from __future__ import annotations

import xxhash

from ftckpt.parity.codecs import encoder
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.stripes import Stripe
from ftckpt.smp.sources import Bytes, Feed, LocalChunk, Sources
from ftckpt.smp.work import Work

PIECE_BYTES = 512 << 10
"""What is used at a time: with the sum it stays in a core's own cache, and calls of Python cost little beside it."""
STEP_BYTES = 16 << 20
"""What is read at most between two looks at the limit and at ranks that copy; a piece of each chunk at least."""


def make_block(
    sources: Sources, feed: Feed, group: ParityGroup, stripe: Stripe, *, row: int, out: Bytes
) -> Work[int]:
    """Make block ``row`` of a stripe in ``out``, of its length; returns the block's checksum, xxh3-64.

    Only when it returns was all of the data verified: before, and where it raises, ``out`` means nothing.

    Raises:
        CorruptError: data in a slot of this node does not match its checksum.
        ArenaError, CannotError: as ``Feed.next``.
    """
    chunks = yield from feed.next(stripe)
    local = [chunk for chunk in chunks if isinstance(chunk, LocalChunk)]
    fold, made = encoder(group.code, len(chunks), row, group.losses), xxhash.xxh3_64()
    step = max(1, STEP_BYTES // PIECE_BYTES // (len(chunks) + 1)) * PIECE_BYTES
    for begin in range(0, stripe.length, step):
        end = min(begin + step, stripe.length)
        yield from sources.pace.memory(sum(len(chunk.data[begin:end]) for chunk in local) + end - begin)
        for chunk in local:
            chunk.renew()
        for at in range(begin, end, PIECE_BYTES):
            piece = out[at : min(at + PIECE_BYTES, end)]
            fold((chunk.read(at, at + len(piece)) if chunk is not None else None for chunk in chunks), piece)
            made.update(piece.data)
    for chunk in local:
        chunk.verify()
    return made.intdigest()
