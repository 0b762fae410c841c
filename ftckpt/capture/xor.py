"""The XOR of live state, byte by byte: what parity of other ranks' shares is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ftckpt.capture.plan import ChunkCopy, Segment, split

_WORD = torch.int64


def combine(  # noqa: PLR0917 - the last one is optional
    tensors: Sequence[torch.Tensor],
    segments: Iterable[Segment],
    target: torch.Tensor,
    begin: int,
    end: int,
    onto: bool = False,
) -> None:
    """Make ``target``, uint8, the XOR of ``segments``: its first byte is file offset ``begin``, its last ``end - 1``.

    Zero where no segment lies, unless it goes ``onto`` what is there. On a device all of it is enqueued on the
    current stream.
    """
    target = target[: end - begin]
    if not onto:
        target.zero_()
    xor_onto(tensors, segments, target, begin)


def xor_onto(tensors: Sequence[torch.Tensor], segments: Iterable[Segment], target: torch.Tensor, at: int = 0) -> None:
    """XOR ``segments`` into ``target``, uint8, whose first byte is file offset ``at``."""
    for segment in segments:
        live = tensors[segment.piece].detach()[segment.start : segment.start + segment.numel].view(torch.uint8)
        place = target[segment.offset - at : segment.offset - at + segment.nbytes]
        if _in_words(live) and _in_words(place):
            live, place = live.view(_WORD), place.view(_WORD)
        place.bitwise_xor_(live)


def pieces(copy: ChunkCopy, nbytes: int) -> Iterator[ChunkCopy]:
    """The same XOR in copies that end where ``nbytes``, a multiple of any element's bytes, divides file offsets."""
    waiting = sorted(copy.segments, key=lambda segment: segment.offset)
    begin = copy.begin
    while waiting:
        end = (begin // nbytes + 1) * nbytes
        first = next((i for i, segment in enumerate(waiting) if segment.offset >= end), len(waiting))
        found, later = [], []
        for segment in waiting[:first]:
            head, *tail = split(segment, end)
            found.append(head)
            later += tail
        if found:
            yield ChunkCopy(copy.chunk, tuple(found), copy.xor)
        waiting = later + waiting[first:]
        begin = end


def _in_words(data: torch.Tensor) -> bool:
    """Whether bytes can be read as words: a device must not read across its words."""
    size = _WORD.itemsize
    return data.numel() % size == data.storage_offset() % size == data.data_ptr() % size == 0
