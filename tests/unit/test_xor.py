"""The XOR of live state: any types, any alignment, any pieces; zero where nothing lies, nothing left of before."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture import copier as copier_module
from ftckpt.capture.chunks import ChunkCopy, Segment, combine, divided, split, xor_onto, xor_parts
from ftckpt.capture.copier import Flight, HostCopier, copy_chunk
from ftckpt.schedule.bubbles import Always

TYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn]
BEGIN, SIZE = 4096, 3000
LONG_SECS = 20.0

Case = tuple[list[torch.Tensor], ChunkCopy]


@st.composite
def cases(draw: st.DrawFn, least: int = 1) -> Case:
    """Overlapping segments of tensors of several types, each at a multiple of its elements from ``BEGIN`` on."""
    tensors, segments = [], []
    for piece in range(draw(st.integers(least, 6))):
        dtype = draw(st.sampled_from(TYPES))
        item = dtype.itemsize
        numel = draw(st.integers(1, SIZE // item))
        # What a tensor lies in may begin anywhere: a view into a flat buffer of an optimizer.
        lead = draw(st.integers(0, 9))
        buffer = torch.empty(numel + lead, dtype=dtype)
        buffer.view(torch.uint8).random_(0, 2 if dtype is torch.bool else 256)
        tensors.append(buffer[lead:])
        start, stop = draw(st.tuples(*[st.integers(0, numel)] * 2).map(sorted).filter(lambda pair: pair[0] < pair[1]))
        offset = BEGIN + draw(st.integers(0, (SIZE // item) - (stop - start))) * item
        segments.append(Segment(piece, start, stop - start, offset, (stop - start) * item))
    segments.sort(key=lambda segment: segment.offset)
    return tensors, ChunkCopy(3, tuple(segments), xor=True)


def expected(tensors: list[torch.Tensor], copy: ChunkCopy, before: torch.Tensor) -> torch.Tensor:
    """Byte by byte; what lies outside of the copy's bytes stays."""
    found = before.clone()
    found[copy.begin : copy.end] = 0
    for segment in copy.segments:
        data = tensors[segment.piece].contiguous().view(torch.uint8).tolist()
        item = segment.nbytes // segment.numel
        for index in range(segment.nbytes):
            found[segment.offset + index] ^= data[segment.start * item + index]
    return found


@given(cases(), st.sampled_from([64, 256, 4096, 1 << 20]))
def test_the_xor_is_that_of_all_bytes_whatever_was_there(case: Case, part_bytes: int) -> None:
    tensors, copy = case
    slot = torch.randint(0, 256, (BEGIN + SIZE,), dtype=torch.uint8)
    wanted = expected(tensors, copy, slot)
    before, copier_module._XOR_BYTES = copier_module._XOR_BYTES, part_bytes
    try:
        copy_chunk(tensors, copy, slot)
    finally:
        copier_module._XOR_BYTES = before
    held = torch.zeros(BEGIN + SIZE, dtype=torch.bool)
    for part in xor_parts(copy, part_bytes):
        held[part.begin : part.end] = True
    assert torch.equal(slot[held], wanted[held])
    for segment in copy.segments:
        assert held[segment.offset : segment.offset + segment.nbytes].all()


@given(cases(), st.sampled_from([64, 256, 4096]))
def test_parts_are_the_same_bytes_and_cut_no_element(case: Case, part_bytes: int) -> None:
    tensors, copy = case
    found = list(xor_parts(copy, part_bytes))
    assert all(part.chunk == copy.chunk and part.xor for part in found)
    assert [part.begin for part in found] == sorted(part.begin for part in found)
    for part in found:
        assert part.begin // part_bytes == (part.end - 1) // part_bytes
    assert elements(tensors, [s for part in found for s in part.segments]) == elements(tensors, copy.segments)


@given(cases(), st.sampled_from([64, 256, 4096]))
def test_divided_segments_are_the_same_elements_and_cross_no_boundary(case: Case, nbytes: int) -> None:
    tensors, copy = case
    found = divided(copy, nbytes)
    assert (found.chunk, found.xor) == (copy.chunk, copy.xor)
    assert elements(tensors, found.segments) == elements(tensors, copy.segments)
    for segment in found.segments:
        assert segment.offset // nbytes == (segment.offset + segment.nbytes - 1) // nbytes


def elements(tensors: list[torch.Tensor], segments: object) -> list[tuple[int, int, int]]:
    """Piece, element and file offset of all that is copied."""
    found = []
    for segment in segments:  # type: ignore[attr-defined]
        item = tensors[segment.piece].element_size()
        assert segment.nbytes == segment.numel * item and segment.numel > 0
        found += [(segment.piece, segment.start + i, segment.offset + i * item) for i in range(segment.numel)]
    return sorted(found)


def test_what_ends_before_the_cut_is_not_split() -> None:
    segment = Segment(0, 5, 10, 64, 40)
    assert split(segment, 104) == [segment]
    assert split(segment, 100) == [Segment(0, 5, 9, 64, 36), Segment(0, 14, 1, 100, 4)]


def test_a_target_begins_anywhere_and_goes_onto_what_is_there_if_told_to() -> None:
    tensors = [torch.arange(9, dtype=torch.uint8), torch.full((5,), 0x0F, dtype=torch.uint8)]
    segments = [Segment(0, 1, 8, 101, 8), Segment(1, 0, 5, 103, 5)]
    target = torch.full((20,), 0xF0, dtype=torch.uint8)
    combine(tensors, segments, target, 100, 110)
    fresh = [0, 1, 2, 3 ^ 15, 4 ^ 15, 5 ^ 15, 6 ^ 15, 7 ^ 15, 8, 0]
    assert target.tolist() == fresh + [0xF0] * 10
    combine(tensors, segments, target, 100, 110, onto=True)
    assert target.tolist() == [0] * 10 + [0xF0] * 10
    xor_onto(tensors, segments, target, at=100)
    assert target.tolist() == fresh + [0xF0] * 10


def test_parameters_that_require_gradients_take_part_and_learn_nothing_of_it() -> None:
    weight = torch.nn.Parameter(torch.arange(4, dtype=torch.float32))
    slot = torch.zeros(16, dtype=torch.uint8)
    copy_chunk([weight], ChunkCopy(0, (Segment(0, 0, 4, 0, 16), Segment(0, 0, 2, 0, 8)), xor=True), slot)
    assert slot.view(torch.float32).tolist() == [0.0, 0.0, 2.0, 3.0]
    assert not slot.requires_grad and weight.grad is None and weight._version == 0


@pytest.mark.parametrize("xor", [False, True])
def test_a_chunk_counts_as_the_bytes_that_go_to_the_slot(xor: bool) -> None:
    segments = (Segment(0, 0, 8, 64, 8), Segment(0, 0, 4, 68 if xor else 72, 4), Segment(1, 0, 8, 80, 8))
    copy = ChunkCopy(0, segments, xor)
    assert (copy.begin, copy.end, copy.nbytes) == (64, 88, 24 if xor else 20)
    assert ChunkCopy(0, (), xor).nbytes == 0


def test_the_fence_waits_until_parity_has_read_live_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer writes after the fence is in no block."""
    reached, opened = threading.Event(), threading.Event()
    combined = copier_module.combine

    def slow(*args: object, **options: object) -> None:
        reached.set()
        assert opened.wait(LONG_SECS)
        combined(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(copier_module, "combine", slow)
    live = [torch.full((64,), 3, dtype=torch.uint8), torch.full((64,), 5, dtype=torch.uint8)]
    slot = torch.zeros(64, dtype=torch.uint8)
    copies = [ChunkCopy(0, (Segment(0, 0, 64, 0, 64), Segment(1, 0, 64, 0, 64)), xor=True)]
    told: list[object] = []
    with closing(HostCopier()) as copier:
        flight = Flight(copies, slot, lambda: told.append("arrived"))
        copier.start(live, flight, Always())
        assert reached.wait(LONG_SECS)
        assert not copier.fence(flight, 0.05), "the fence let go while parity was being made"
        opened.set()
        assert copier.fence(flight, LONG_SECS)
        live[0].zero_()
        assert flight.wait(LONG_SECS)
    assert told == ["arrived"]
    assert (slot == 6).all()
