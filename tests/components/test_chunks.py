"""Chunk copies: every byte of the state goes to its place in the slot, once; and the XOR of live state."""

from __future__ import annotations

from random import Random

import numpy as np
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.capture import copier as copier_module
from ftckpt.capture.chunks import ChunkCopy, CopyPart, Segment, chunk_copies, combine, xor_onto, xor_parts
from ftckpt.capture.copier import copy_chunk
from ftckpt.memory.image import SlotImage
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest, Section, parity_fragment

TYPES = {"U8": torch.uint8, "BOOL": torch.bool, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
PAGE = 4096
SECTIONS = (Section("shared", 1, "0" * 16), Section("parity", 1, "0" * 16))

Case = tuple[SlotImage, list[CopyPart], list[torch.Tensor]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A slot image, the parts it holds, and the live tensors (larger than the parts) they are cut from."""
    parts: list[CopyPart] = []
    tensors: list[torch.Tensor] = []
    for index in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(sorted(TYPES)))
        numel = draw(st.integers(0, 50) | st.integers(0, 6000))
        start, stop = sorted(draw(st.tuples(*[st.integers(0, numel)] * 2)))
        whole = Fragment.whole(f"w{index}", dtype, (numel,), Box((0,), (numel,)))
        parts.append(CopyPart(index, start, whole.part(start, stop)))
        tensors.append(torch.empty(numel, dtype=TYPES[dtype]))
        tensors[-1].view(torch.uint8).random_(0, 2)
    cut = draw(st.integers(0, len(parts)))
    fragments = tuple(part.fragment for part in parts)
    chunk = PAGE * draw(st.integers(1, 4))
    manifest = Manifest({"dp": 0}, {"dp": 1}, fragments[:cut], fragments[cut:], 100, chunk)
    return SlotImage.of(manifest), parts, tensors


@settings(max_examples=60)
@given(cases(), st.randoms(use_true_random=False))
def test_a_slot_filled_in_any_order_is_a_safetensors_file_of_the_live_bytes(case: Case, random: Random) -> None:
    image, parts, tensors = case
    slot = torch.full((image.file_bytes,), 0xEE, dtype=torch.uint8)
    slot[: len(image.header)] = torch.from_numpy(np.frombuffer(image.header, dtype=np.uint8).copy())
    copies = chunk_copies(image, parts)
    random.shuffle(copies)
    for copy in copies:
        copy_chunk(tensors, copy, slot)
    entries = dict(safetensors.deserialize(slot.numpy().tobytes()))
    for part in parts:
        live = tensors[part.piece][part.start : part.start + part.fragment.numel]
        assert bytes(entries[part.fragment.name]["data"]) == live.view(torch.uint8).numpy().tobytes()
    covered = sum(part.fragment.nbytes for part in parts) + len(image.header)
    written = int((slot != 0xEE).sum())
    assert written <= covered


def test_parity_takes_its_strips_to_their_chunks_and_says_where_they_overlap() -> None:
    state = Fragment.whole("w", "F32", (3000,), Box((0,), (3000,)))
    parity = parity_fragment("0" * 16, 2 * PAGE)
    strips = (Segment(0, 0, 1000, 0, 4000), Segment(0, 1500, 500, 0, 2000), Segment(0, 2000, 100, PAGE, 400))
    parts = [CopyPart(0, 0, state), CopyPart(-1, 0, parity, strips)]
    image = SlotImage.of(Manifest({}, {}, (state, parity), (), 100, PAGE, sections=SECTIONS))
    begin, first = image.offsets[1], image.sections[1].first_chunk
    copies = chunk_copies(image, parts)
    assert begin % PAGE == 0 and first == 3
    assert [(copy.xor, copy.nbytes) for copy in copies[first:]] == [(True, 4000), (False, 400)]
    assert copies[first].segments == (Segment(0, 0, 1000, begin, 4000), Segment(0, 1500, 500, begin, 2000))
    assert copies[first + 1].segments == (Segment(0, 2000, 100, begin + PAGE, 400),)
    assert not any(copy.xor for copy in copies[:first])


XOR_TYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn]
BEGIN, SIZE = 4096, 3000

XorCase = tuple[list[torch.Tensor], ChunkCopy]


@st.composite
def xor_cases(draw: st.DrawFn, least: int = 1) -> XorCase:
    """Overlapping segments of tensors of several types, each at a multiple of its elements from ``BEGIN`` on."""
    tensors, segments = [], []
    for piece in range(draw(st.integers(least, 6))):
        dtype = draw(st.sampled_from(XOR_TYPES))
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
    """Byte by byte; bytes outside of the copy stay."""
    found = before.clone()
    found[copy.begin : copy.end] = 0
    for segment in copy.segments:
        data = tensors[segment.piece].contiguous().view(torch.uint8).tolist()
        item = segment.nbytes // segment.numel
        for index in range(segment.nbytes):
            found[segment.offset + index] ^= data[segment.start * item + index]
    return found


@given(xor_cases(), st.sampled_from([64, 256, 4096, 1 << 20]))
def test_the_xor_is_that_of_all_bytes_whatever_was_there(case: XorCase, part_bytes: int) -> None:
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


@given(cases())
def test_there_is_one_copy_per_chunk_and_none_leaves_its_chunk(case: Case) -> None:
    image, parts, _ = case
    copies = chunk_copies(image, parts)
    assert [copy.chunk for copy in copies] == list(range(len(image.chunks)))
    for copy in copies:
        span = image.chunks[copy.chunk]
        assert copy.nbytes <= span.nbytes
        offsets = [segment.offset for segment in copy.segments]
        assert offsets == sorted(offsets)
        for segment in copy.segments:
            assert span.begin <= segment.offset and segment.offset + segment.nbytes <= span.end
            assert segment.numel > 0
    total = sum(part.fragment.nbytes for part in parts)
    assert sum(copy.nbytes for copy in copies) == total
