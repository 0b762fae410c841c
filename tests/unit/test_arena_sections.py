"""Sections: each on its own pages and in its own chunks, alike in whichever slot; any other table is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import safetensors
from hypothesis import assume, given
from hypothesis import strategies as st
from test_arena_image import slot_bytes, vector

from ftckpt.config import PAGE_BYTES
from ftckpt.errors import ConfigError, CorruptError
from ftckpt.memory.image import SectionSpan, SlotImage, Span, parse_image, section_layout
from ftckpt.model import codec
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import MAX_CHUNKS, Manifest, Section, parity_fragment
from tests.support.errors import raises

KINDS = ("private", "shared", "copy", "parity")
GROUP = "0123456789abcdef"


PLAIN = Manifest({"tp": 0}, {"tp": 2}, (vector("a", 3000), vector("b", 5)), (vector("rng", 3, "U8"),), 100, 8192)
STEPPED = (
    vector("a", 10), vector("b", 5, "BF16"), vector("c", 5000), vector("d", 1), vector("e", 3000),
    parity_fragment(GROUP, 9000),
)  # fmt: skip
SECTIONS = (
    Section("private", 2), Section("shared", 2, GROUP), Section("copy", 1, GROUP, "tp1"), Section("parity", 1, GROUP)
)  # fmt: skip
SECTIONED = replace(PLAIN, stepped=STEPPED, sections=SECTIONS)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    stepped: list[Fragment] = []
    sections: list[Section] = []
    for kind in sorted(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)), key=KINDS.index):
        if kind == "private" and sections:
            continue
        group = "" if kind == "private" else f"{len(sections):016x}"
        if kind == "parity":
            found = [parity_fragment(group, draw(st.integers(0, 30000)))]
        else:
            sizes = draw(st.lists(st.integers(0, 6000), min_size=1, max_size=4))
            types = st.sampled_from(["U8", "BF16", "F32", "F64"])
            found = [vector(f"{len(stepped) + i}", size, draw(types)) for i, size in enumerate(sizes)]
        sections.append(Section(kind, len(found), group, "tp1" if kind == "copy" else ""))
        stepped += found
    assume(sections)
    chunk_bytes = draw(st.integers(1, 20000))
    return Manifest({"tp": 0}, {}, tuple(stepped), PLAIN.volatile, 100, chunk_bytes, 0, tuple(sections))


def test_documented_places() -> None:
    image = SlotImage.of(SECTIONED)
    assert image.sections == (
        SectionSpan("private", "", "", Span(4096, 4146), 0, 1),
        SectionSpan("shared", GROUP, "", Span(8192, 28196), 1, 3),
        SectionSpan("copy", GROUP, "tp1", Span(28672, 40672), 4, 2),
        SectionSpan("parity", GROUP, "", Span(40960, 49960), 6, 2),
    )
    assert (image.stepped, image.num_stepped_chunks, len(image.chunks)) == (Span(4096, 49960), 8, 9)
    assert image.chunks[3] == Span(24576, 28196) and image.chunks[4] == Span(28672, 36864)
    assert image.pads[:4] == (Span(4146, 8192), Span(28196, 28672), Span(40672, 40960), Span(49960, 53248))
    text = json.loads(SECTIONED.encode())
    assert text["sections"] == [
        ["private", 2, "", ""],
        ["shared", 2, GROUP, ""],
        ["copy", 1, GROUP, "tp1"],
        ["parity", 1, GROUP, ""],
    ]


def test_without_sections_all_is_private_and_as_it_always_was() -> None:
    image = SlotImage.of(PLAIN)
    assert image.sections == (SectionSpan("private", "", "", image.stepped, 0, image.num_stepped_chunks),)
    assert b"sections" not in image.header
    empty = SlotImage.of(replace(PLAIN, stepped=()))
    assert empty.sections == (SectionSpan("private", "", "", empty.stepped, 0, 0),)
    one = SlotImage.of(replace(PLAIN, sections=(Section("private", 2),)))
    assert (one.offsets, one.chunks, one.sections) == (image.offsets, image.chunks, image.sections)


@given(manifests())
def test_sections_begin_on_pages_and_share_no_chunk(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    first, done = 0, 0
    for section, found in zip(manifest.sections, image.sections, strict=True):
        span, chunks = found.span, image.chunks[found.first_chunk : found.first_chunk + found.num_chunks]
        assert (found.kind, found.group, found.of) == (section.kind, section.group, section.of)
        assert span.begin % PAGE_BYTES == 0 and found.first_chunk == done
        edges = [span.begin, *(chunk.end for chunk in chunks)]
        assert edges[-1] == span.end and [chunk.begin for chunk in chunks] == edges[:-1]
        assert all(chunk.nbytes == manifest.chunk_bytes for chunk in chunks[:-1])
        fragments = manifest.stepped[first : first + section.fragments]
        offsets, nbytes = section_layout(fragments)
        assert nbytes == span.nbytes
        assert image.offsets[first : first + section.fragments] == tuple(span.begin + offset for offset in offsets)
        first, done = first + section.fragments, done + found.num_chunks
    assert done == image.num_stepped_chunks
    assert image.stepped == Span(image.sections[0].span.begin, image.sections[-1].span.end)


@given(manifests())
def test_each_byte_behind_the_header_is_in_one_section_region_or_pad(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    spans = [*(section.span for section in image.sections), image.volatile, image.objects, *image.pads]
    at = len(image.header)
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        assert span.begin == at
        at = span.end
    assert at == image.file_bytes


@given(manifests())
def test_a_slot_with_sections_is_a_safetensors_file_that_tells_them(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    entries = dict(safetensors.deserialize(image.header + bytes(image.file_bytes - len(image.header))))
    assert {fragment.name for fragment in manifest.fragments} <= set(entries)
    assert parse_image(image.header) == image
    assert Manifest.decode(manifest.encode()) == manifest


SIZES = st.lists(st.integers(0, 6000), min_size=1, max_size=5)


@given(SIZES, st.integers(0, 30000), st.integers(0, 30000), st.integers(1, 300).map(lambda n: 8 * n))
def test_a_copy_has_the_chunks_of_its_original(sizes: list[int], here: int, there: int, chunk_bytes: int) -> None:
    dtypes = ("F32", "U8", "F64", "BF16", "F32")
    share = tuple(vector(f"s{i}", size, dtypes[i]) for i, size in enumerate(sizes))
    both = []
    for before, kind, of in ((here, "shared", ""), (there, "copy", "tp0")):
        sections = (Section("private", 1), Section(kind, len(share), GROUP, of))
        stepped = (vector("more", before, "U8"), *share)
        image = SlotImage.of(replace(PLAIN, stepped=stepped, sections=sections, chunk_bytes=chunk_bytes))
        section = image.sections[1]
        chunks = image.chunks[section.first_chunk : section.first_chunk + section.num_chunks]
        begin = section.span.begin
        offsets = [at - begin for at in image.offsets[1 : 1 + len(share)]]
        both.append((offsets, [(chunk.begin - begin, chunk.nbytes) for chunk in chunks]))
    assert both[0] == both[1]


def test_blocks_of_parity_are_chunks() -> None:
    image = SlotImage.of(SECTIONED)
    section = image.sections[-1]
    at = image.offsets[5]
    for block in range(section.num_chunks):
        assert image.chunks[section.first_chunk + block].begin == at + block * SECTIONED.chunk_bytes
    assert image.chunks[section.first_chunk + section.num_chunks - 1].end == at + 9000


def test_chunks_are_counted_section_by_section() -> None:
    half = MAX_CHUNKS // 2
    stepped = (vector("a", half + 1, "U8"), vector("b", half, "U8"))
    sections = (Section("private", 1), Section("shared", 1, GROUP))
    with raises(ConfigError, str(MAX_CHUNKS)):
        SlotImage.of(replace(PLAIN, stepped=stepped, sections=sections, chunk_bytes=1, volatile=()))


LONG = Fragment(f"__parity__/{GROUP}", "U8", (9000,), Box((0,), (9000,)), 0, 8000)
WRONG: dict[str, tuple[Any, str]] = {
    "too few fragments": (SECTIONS[1:], "4 fragments, the manifest has 6"),
    "too many fragments": ((Section("private", 3), *SECTIONS[1:]), "7 fragments, the manifest has 6"),
    "no fragments": ((Section("private", 0), *SECTIONS[1:]), "of 0 fragments"),
    "a negative number": ((Section("private", -1), Section("shared", 7, GROUP)), "of -1 fragments"),
    "an unknown kind": ((Section("other", 6),), "of kind 'other'"),
    "copy before shared": ((SECTIONS[0], SECTIONS[2], SECTIONS[1], SECTIONS[3]), "order"),
    "private at the end": ((*SECTIONS[1:], SECTIONS[0]), "order"),
    "two private ones": ((Section("private", 1), Section("private", 1), *SECTIONS[1:]), "twice"),
    "shared twice": ((SECTIONS[0], *[Section("shared", 1, GROUP)] * 2, *SECTIONS[2:]), "twice"),
    "private with a group": ((Section("private", 2, GROUP), *SECTIONS[1:]), "has group"),
    "shared without a group": ((SECTIONS[0], Section("shared", 2), *SECTIONS[2:]), "has group ''"),
    "shared of a shard": ((SECTIONS[0], Section("shared", 2, GROUP, "tp1"), *SECTIONS[2:]), "of shard"),
    "copy of nobody": ((*SECTIONS[:2], Section("copy", 1, GROUP), SECTIONS[3]), "of shard ''"),
    "parity of two": ((SECTIONS[0], SECTIONS[1], Section("parity", 2, GROUP)), "of 2 fragments"),
    "parity of another group": ((*SECTIONS[:3], Section("parity", 1, "other")), "not one fragment of bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_inconsistent_table_is_refused(case: str) -> None:
    sections, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        replace(SECTIONED, sections=sections)
    value = json.loads(SECTIONED.encode())
    value["sections"] = codec.to_json(sections)
    with pytest.raises(CorruptError, match=text):
        Manifest.decode(json.dumps(value).encode())


@pytest.mark.parametrize("fragment", [vector(f"__parity__/{GROUP}", 2250), vector("x", 9000, "U8"), LONG])
def test_parity_is_one_whole_fragment_of_bytes(fragment: Fragment) -> None:
    with pytest.raises(ValueError, match="fragment"):
        replace(SECTIONED, stepped=(*STEPPED[:5], fragment))


FOREIGN: list[Any] = [
    "x", {"a": 1}, 7, [1], ["private"], [["private", 2]], [["private", "2", "", ""]], [["private", True, "", ""]],
    [[["private"], 6, "", ""]], [["private", 6.0, "", ""]], [["private", 6, None, ""]], [["private", 6, "", "", ""]],
]  # fmt: skip


@pytest.mark.parametrize("value", FOREIGN, ids=repr)
def test_sections_of_another_kind_are_corrupt(value: Any) -> None:
    text = json.dumps({**json.loads(SECTIONED.encode()), "sections": value}).encode()
    with pytest.raises(CorruptError):
        Manifest.decode(text)


def rebuilt(edit: Callable[[dict[str, Any]], object], manifest: Manifest = SECTIONED) -> bytes:
    """The header of a manifest that was edited in it, entries as they were."""
    value = json.loads(SlotImage.of(manifest).header[8:])
    inner = json.loads(value["__metadata__"]["manifest"])
    edit(inner)
    value["__metadata__"]["manifest"] = json.dumps(inner, separators=(",", ":"), sort_keys=True)
    return slot_bytes(json.dumps(value, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.pop("sections"),
        lambda m: m.update(sections=[]),
        lambda m: m["sections"].reverse(),
        lambda m: m["sections"][0].__setitem__(1, 3),
        lambda m: m["sections"].__setitem__(slice(0, 2), [["private", 4, "", ""]]),
    ],
)
def test_a_header_that_contradicts_its_sections_is_corrupt(edit: Callable[[dict[str, Any]], object]) -> None:
    assert rebuilt(lambda manifest: None) == SlotImage.of(SECTIONED).header
    with pytest.raises(CorruptError):
        parse_image(rebuilt(edit))


def test_an_empty_list_of_sections_is_not_canonical() -> None:
    with raises(CorruptError, "canonical"):
        parse_image(rebuilt(lambda manifest: manifest.update(sections=[]), PLAIN))
