"""Chunk copies: every byte of the state goes to its place in the slot, once, and nowhere else."""

from __future__ import annotations

from random import Random

import numpy as np
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.capture.chunks import CopyPart, Segment, chunk_copies
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


@given(cases())
def test_every_byte_of_a_part_is_copied_once_to_its_offset(case: Case) -> None:
    image, parts, _ = case
    wanted, found = {}, {}
    for part, offset in zip(parts, image.offsets, strict=True):
        item = part.fragment.item_bytes
        wanted.update({offset + i * item: (part.piece, part.start + i) for i in range(part.fragment.numel)})
    for copy in chunk_copies(image, parts):
        for segment in copy.segments:
            item = parts[segment.piece].fragment.item_bytes
            assert segment.nbytes == segment.numel * item
            for i in range(segment.numel):
                assert segment.offset + i * item not in found
                found[segment.offset + i * item] = (segment.piece, segment.start + i)
    assert found == wanted


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


@given(cases())
def test_stepped_and_volatile_state_never_share_a_chunk(case: Case) -> None:
    image, parts, _ = case
    num_stepped = len(image.manifest.stepped)
    copies = chunk_copies(image, parts)
    first, second = copies[: image.num_stepped_chunks], copies[image.num_stepped_chunks :]
    assert all(segment.piece < num_stepped for copy in first for segment in copy.segments)
    assert all(segment.piece >= num_stepped for copy in second for segment in copy.segments)


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


@given(cases())
def test_a_copy_through_a_smaller_buffer_gives_the_same_bytes(case: Case) -> None:
    image, parts, tensors = case
    slot = torch.zeros(image.file_bytes, dtype=torch.uint8)
    for copy in chunk_copies(image, parts):
        span = image.chunks[copy.chunk]
        buffer = torch.zeros(span.nbytes, dtype=torch.uint8)
        copy_chunk(tensors, copy, buffer, at=span.begin)
        copy_chunk(tensors, copy, slot)
        assert torch.equal(buffer, slot[span.begin : span.end])


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
