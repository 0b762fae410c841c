"""The slot image: any manifest gives a valid safetensors file, and a hostile header is refused by name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftckpt.config import PAGE_BYTES
from ftckpt.errors import ConfigError, CorruptError, MismatchError
from ftckpt.memory.image import SlotImage, Span, parse_image
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.model.manifest import MAX_CHUNKS, Manifest
from tests.support.errors import raises


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


@given(manifests())
def test_geometry(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    for begin in (len(image.header), *(s.begin for s in (image.stepped, image.volatile, image.objects))):
        assert begin % PAGE_BYTES == 0
    assert image.file_bytes % PAGE_BYTES == 0
    for fragment, offset in zip(manifest.fragments, image.offsets, strict=True):
        assert offset % (64 if fragment.nbytes >= 4096 else fragment.item_bytes) == 0
    spans = [Span(o, o + f.nbytes) for f, o in zip(manifest.fragments, image.offsets, strict=True)]
    inside = sorted((s for s in spans if s.nbytes), key=lambda s: s.begin)
    assert all(a.end <= b.begin for a, b in pairwise(inside))
    regions = [Span(0, len(image.header)), image.stepped, image.volatile, image.objects]
    assert all(a.end <= b.begin for a, b in pairwise(regions))
    assert image.objects.nbytes == manifest.objects_bytes
    count = len(manifest.stepped)
    assert all(image.stepped.begin <= s.begin and s.end <= image.stepped.end for s in spans[:count])
    assert all(image.volatile.begin <= s.begin and s.end <= image.volatile.end for s in spans[count:])


@settings(max_examples=50)
@given(manifests())
def test_chunks_cover_each_region_and_never_span_two(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    cut = image.num_stepped_chunks
    for region, chunks in ((image.stepped, image.chunks[:cut]), (image.volatile, image.chunks[cut:])):
        edges = [region.begin, *(chunk.end for chunk in chunks)]
        assert edges[-1] == region.end
        assert [chunk.begin for chunk in chunks] == edges[:-1]
        assert all(chunk.nbytes == manifest.chunk_bytes for chunk in chunks[:-1])
        assert all(0 < chunk.nbytes <= manifest.chunk_bytes for chunk in chunks)


@settings(max_examples=60)
@given(manifests())
def test_parse_gives_the_image_back(manifest: Manifest) -> None:
    image = SlotImage.of(manifest)
    assert parse_image(image.header) == image
    assert parse_image(memoryview(bytearray(image.header) + b"anything")) == image


def test_names_must_be_unique() -> None:
    with raises(ConfigError, "'a"):
        SlotImage.of(manifest_of((vector("a", 3),), (vector("a", 3),)))


@pytest.mark.parametrize(("objects_bytes", "chunk_bytes"), [(-1, 1), (0, 0), (0, -5)])
def test_sizes_must_be_possible(objects_bytes: int, chunk_bytes: int) -> None:
    with pytest.raises(ConfigError):
        SlotImage.of(manifest_of((), (), objects_bytes, chunk_bytes))


def test_a_header_too_long_for_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.memory.image.MAX_HEADER_BYTES", 3000)
    with pytest.raises(ConfigError):
        SlotImage.of(PLAIN)


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
    "no length": (GOOD[:7], "too few for a length"),
    "huge length": (b"\xff" * 8 + GOOD[8:], "length 18446744073709551615 is more than"),
    "length off a page": ((len(GOOD) - 9).to_bytes(8, "little") + GOOD[8:], "page boundary"),
    "truncated": (GOOD[:-1], "truncated"),
    "truncated by a page": ((len(GOOD) - 8 + PAGE_BYTES).to_bytes(8, "little") + GOOD[8:], "truncated"),
    "not JSON": (slot_bytes(b"{"), "not JSON"),
    "not UTF-8": (slot_bytes(b'{"\xff": 1}'), "not JSON"),
    "nested": (slot_bytes(b"[" * 200_000), "not JSON"),
    "not an object": (slot_bytes(b"[1]"), "expected a JSON object, found list"),
    "no metadata": (edited(lambda v: v.pop("__metadata__")), "does not name the format"),
    "metadata is a text": (edited(lambda v: v.update(__metadata__="x")), "does not name the format"),
    "other format": (edited(lambda v: v["__metadata__"].update(format="pt")), "does not name the format"),
    "no manifest": (edited(lambda v: v["__metadata__"].pop("manifest")), "no manifest"),
    "manifest is no text": (edited(lambda v: v["__metadata__"].update(manifest=[])), "no manifest"),
    "manifest is no JSON": (edited(lambda v: v["__metadata__"].update(manifest="{")), "bad manifest"),
    "manifest is a surrogate": (edited(lambda v: v["__metadata__"].update(manifest="\ud800")), "bad manifest"),
    "manifest is a list": (edited(lambda v: v["__metadata__"].update(manifest="[]")), "bad manifest"),
    "endless number": (with_manifest(lambda m: m.update(chunk_bytes=float("inf"))), "bad manifest"),
    "negative objects": (with_manifest(lambda m: m.update(objects_bytes=-1)), "bad manifest"),
    "no chunks": (with_manifest(lambda m: m.update(chunk_bytes=0)), "bad manifest"),
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
    "layout is a number": (with_manifest(lambda m: m.update(layout=3)), "bad manifest"),
    "names twice": (with_manifest(lambda m: m["stepped"].append(m["stepped"][0])), "two entries"),
    "entry missing": (edited(lambda v: v.pop(A)), "is missing"),
    "entry moved": (edited(lambda v: v[A].update(data_offsets=[4, 12004])), "the manifest gives"),
    "entries overlap": (edited(lambda v: v[B].update(data_offsets=[0, 10])), "the manifest gives"),
    "entry out of range": (edited(lambda v: v[A].update(data_offsets=[0, 1 << 62])), "the manifest gives"),
    "other shape": (edited(lambda v: v[A].update(shape=[1])), "the manifest gives"),
    "entry added": (edited(lambda v: v.update(more=v[A])), "is not in the manifest"),
    "not canonical": (edited(lambda v: v.update(__metadata__=v.pop("__metadata__"))), "not the canonical form"),
    "bytes in the padding": (GOOD[:-1] + b"\n", "not the canonical form"),
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


@pytest.mark.parametrize(
    "data",
    [
        edited(lambda v: v["__metadata__"].update(version="2")),
        edited(lambda v: v["__metadata__"].update(version=None)),
        with_manifest(lambda m: m.update(version=99)),
    ],
)
def test_other_version_is_a_mismatch(data: bytes) -> None:
    with pytest.raises(MismatchError, match="version"):
        parse_image(data)


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
