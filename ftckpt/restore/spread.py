"""Ranks that lack the same bytes fetch a part each and hand it to the others: what crosses to them does so once.

Pure: every rank computes the same from the same gathered inputs. A rank tells of each of its reads from other nodes
a name of 16 bytes, which names the bytes that are read and their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.restore.blocks import Block

NAME_BYTES = 16
GRAIN_BYTES = 4096
"""Parts are multiples of this, but for the last one."""

Name = bytes
Ranks = tuple[int, ...]


def name_of(place: bytes, blocks: Iterable[Block]) -> Name:
    """Names the bytes that ``blocks`` read, in their order, of what ``place`` (canonical text) names."""
    digest = xxhash.xxh3_128(place)
    for block in blocks:
        loops = (block.source, len(block.shape), *block.shape, *block.source_strides)
        digest.update(np.array(loops, np.int64).tobytes())
    return digest.digest()


def sharers(told: Sequence[bytes], rank: int) -> dict[Name, Ranks]:
    """By name, the ranks that lack the same bytes as ``rank``, itself among them, ascending; at least two.

    ``told`` has the names of each rank, joined, none of them twice.
    """
    counts = [len(names) // NAME_BYTES for names in told]
    heard = _words(b"".join(told))
    mine = _words(told[rank])
    if len(mine) == 0:
        return {}
    holder = np.repeat(np.arange(len(told)), counts)
    common = np.flatnonzero(np.isin(heard[:, 0], mine[:, 0]))
    own = {told[rank][at : at + NAME_BYTES] for at in range(0, len(told[rank]), NAME_BYTES)}
    found: dict[Name, list[int]] = {}
    for index in common.tolist():
        name = heard[index].tobytes()
        if name in own:
            found.setdefault(name, []).append(int(holder[index]))
    return {name: tuple(ranks) for name, ranks in found.items() if len(ranks) > 1}


def part_of(name: Name, nbytes: int, ranks: Ranks, rank: int) -> tuple[int, int]:
    """Bytes from … to that ``rank``, one of ``ranks``, fetches of ``nbytes``; they may be none.

    The parts of all ranks fill the whole. What is too small for all of them goes to a few, others for other names.
    """
    place = (ranks.index(rank) + name[0]) % len(ranks)
    grains = -(-nbytes // GRAIN_BYTES)
    begin, end = (grains * edge // len(ranks) * GRAIN_BYTES for edge in (place, place + 1))
    return min(begin, nbytes), min(end, nbytes)


def _words(names: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(names, np.uint64).reshape(-1, 2)
