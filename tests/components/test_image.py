"""The slot image: any manifest gives a valid safetensors file, and a hostile header is refused by name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftckpt.config import PAGE_BYTES
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.memory.image import SectionSpan, SlotImage, Span, parse_image
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.model.manifest import MAX_CHUNKS, Manifest, Section, parity_fragment


def manifest_of(
    stepped: tuple[Fragment, ...] = (),
    volatile: tuple[Fragment, ...] = (),
    objects_bytes: int = 1000,
    chunk_bytes: int = 8192,
) -> Manifest:
    return Manifest({"tp": 0, "pp": 1}, {"tp": 2, "zero": True}, stepped, volatile, objects_bytes, chunk_bytes)


def vector(key: str, numel: int, dtype: str = "F32") -> Fragment:
    return Fragment.whole(key, dtype, (numel,), Box((0,), (numel,)))


PLAIN = manifest_of((vector("a", 3000), vector("b", 5, "BF16")), (vector("rng", 16, "U8"),))


@st.composite
def fragments(draw: st.DrawFn, key: str) -> Fragment:
    if draw(st.booleans()):
        shape: tuple[int, ...] = (draw(st.integers(0, 6000)),)
    else:
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    before = [draw(st.integers(0, 3)) for _ in shape]
    after = [draw(st.integers(0, 3)) for _ in shape]
    box = Box(tuple(before), shape)
    whole = tuple(a + b + c for a, b, c in zip(before, shape, after, strict=True))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    name = draw(st.text(max_size=8)) + key
    if draw(st.booleans()):
        return Fragment.whole(name, dtype, whole, box)
    start = draw(st.integers(0, box.numel))
    return Fragment(name, dtype, whole, box, start, draw(st.integers(start, box.numel)))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    stepped = tuple(draw(fragments(f".s{index}")) for index in range(draw(st.integers(0, 6))))
    volatile = tuple(draw(fragments(f".v{index}")) for index in range(draw(st.integers(0, 4))))
    return manifest_of(stepped, volatile, draw(st.integers(0, 9000)), draw(st.integers(1, 20000)))


def filled(image: SlotImage) -> bytes:
    body = np.random.default_rng(7).integers(0, 256, image.file_bytes - len(image.header), dtype=np.uint8)
    return image.header + body.tobytes()


@given(manifests())
@example(manifest_of())
@example(manifest_of(objects_bytes=0))
@example(manifest_of((vector("zero", 0),), (vector("none", 0, "U8"),), 0, 1))
def test_any_manifest_is_a_safetensors_file(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    file = filled(image)
    entries = dict(safetensors.deserialize(file))
    for fragment, offset in zip(manifest.fragments, image.offsets, strict=True):
        entry = entries.pop(fragment.name)
        whole = fragment.numel == fragment.box.numel
        assert entry["dtype"] == fragment.dtype
        assert tuple(entry["shape"]) == (fragment.box.shape if whole else (fragment.numel,))
        assert bytes(entry["data"]) == file[offset : offset + fragment.nbytes]
    assert len(entries.pop("__objects__")["data"]) == manifest.objects_bytes
    assert all(name.startswith("__pad.") and entry["dtype"] == "U8" for name, entry in entries.items())


@settings(max_examples=60)
@given(manifests())
def test_parse_gives_the_image_back(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    assert parse_image(image.header) == image
    assert parse_image(memoryview(bytearray(image.header) + b"anything")) == image


def slot_bytes(text: bytes) -> bytes:
    """A header with right length and padding around any text."""
    text += b" " * (-(len(text) + 8) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(SlotImage.of(PLAIN).header[8:])
    edit(value)
    return slot_bytes(json.dumps(value, separators=(",", ":")).encode())


def with_manifest(edit: Callable[[dict[str, Any]], object]) -> bytes:
    def change(value: dict[str, Any]) -> None:
        inner = json.loads(value["__metadata__"]["manifest"])
        edit(inner)
        value["__metadata__"]["manifest"] = json.dumps(inner)

    return edited(change)


GOOD = SlotImage.of(PLAIN).header
A, B = PLAIN.stepped[0].name, PLAIN.stepped[1].name

HOSTILE = {
    "empty": (b"", "too few for a length"),
    "huge length": (b"\xff" * 8 + GOOD[8:], "length 18446744073709551615 is more than"),
    "length off a page": ((len(GOOD) - 9).to_bytes(8, "little") + GOOD[8:], "page boundary"),
    "truncated": (GOOD[:-1], "truncated"),
    "not JSON": (slot_bytes(b'{"__metadata__":'), "not JSON"),
    "nested": (slot_bytes(b'{"__metadata__":' + b"[" * 200_000), "not JSON"),
    "no metadata": (edited(lambda v: v.pop("__metadata__")), "metadata"),
    "other format": (edited(lambda v: v["__metadata__"].update(format="pt")), "does not name the format"),
    "no manifest": (edited(lambda v: v["__metadata__"].pop("manifest")), "no manifest"),
    "manifest is no JSON": (edited(lambda v: v["__metadata__"].update(manifest="{")), "bad manifest"),
    "too many chunks": (
        with_manifest(
            lambda m: m.update(
                chunk_bytes=1, stepped=[["a", "U8", [MAX_CHUNKS + 1], [0], [MAX_CHUNKS + 1], 0, MAX_CHUNKS + 1]]
            )
        ),
        f"at most {MAX_CHUNKS}",
    ),
    "unknown dtype": (with_manifest(lambda m: m["stepped"][0].__setitem__(1, "F7")), "unknown dtype"),
    "range leaves box": (with_manifest(lambda m: m["stepped"][0].__setitem__(6, 3001)), "leaves box"),
    "names twice": (with_manifest(lambda m: m["stepped"].append(m["stepped"][0])), "two entries"),
    "entry missing": (edited(lambda v: v.pop(A)), "manifest"),
    "entry moved": (edited(lambda v: v[A].update(data_offsets=[4, 12004])), "manifest"),
    "entry out of range": (edited(lambda v: v[A].update(data_offsets=[0, 1 << 62])), "manifest"),
    "entry added": (edited(lambda v: v.update(more=v[A])), "manifest"),
    "metadata last": (edited(lambda v: v.update(__metadata__=v.pop("__metadata__"))), "metadata"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(case: str) -> None:
    data, text = HOSTILE[case]
    tracemalloc.start()
    with pytest.raises(CorruptError, match=text) as caught:
        parse_image(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (8 << 20) + 20 * len(data)
    assert len(str(caught.value)) < 1000


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(GOOD)))
def test_a_damaged_header_never_passes_for_another(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    try:
        image = parse_image(data[:length] if length % 3 == 0 else data)
    except (CorruptError, MismatchError):
        return
    assert image.header == data


GROUP = "0123456789abcdef"


VOLATILE = (vector("rng", 3, "U8"),)
SECTIONLESS = Manifest({"tp": 0}, {"tp": 2}, (vector("a", 3000), vector("b", 5)), VOLATILE, 100, 8192)
STEPPED = (
    vector("a", 10), vector("b", 5, "BF16"), vector("c", 5000), vector("d", 1), vector("e", 3000),
    parity_fragment(GROUP, 9000),
)  # fmt: skip
SECTIONS = (
    Section("private", 2), Section("shared", 2, GROUP), Section("copy", 1, GROUP, "tp1"), Section("parity", 1, GROUP)
)  # fmt: skip
SECTIONED = replace(SECTIONLESS, stepped=STEPPED, sections=SECTIONS)


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


WRONG: dict[str, tuple[Any, str]] = {
    "too few fragments": (SECTIONS[1:], "4 fragments, the manifest has 6"),
    "no fragments": ((Section("private", 0), *SECTIONS[1:]), "of 0 fragments"),
    "an unknown kind": ((Section("other", 6),), "of kind 'other'"),
    "copy before shared": ((SECTIONS[0], SECTIONS[2], SECTIONS[1], SECTIONS[3]), "order"),
    "shared twice": ((SECTIONS[0], *[Section("shared", 1, GROUP)] * 2, *SECTIONS[2:]), "twice"),
    "private with a group": ((Section("private", 2, GROUP), *SECTIONS[1:]), "has group"),
    "shared of a shard": ((SECTIONS[0], Section("shared", 2, GROUP, "tp1"), *SECTIONS[2:]), "of shard"),
    "parity of two": ((SECTIONS[0], SECTIONS[1], Section("parity", 2, GROUP)), "of 2 fragments"),
    "parity of another group": ((*SECTIONS[:3], Section("parity", 1, "other")), "not one fragment of bytes"),
}
