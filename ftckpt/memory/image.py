"""The byte image of a slot: a safetensors file whose layout is a pure function of the manifest.

``FORMAT.md`` has the byte map and the rules. A reader never trusts the offsets in a file: it computes the image from
the manifest and compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from typing import Any

from ftckpt.array_types import Buffer
from ftckpt.config import PAGE_BYTES
from ftckpt.errors import ConfigError, CorruptError, MismatchError
from ftckpt.model.fragment import Fragment, Shape
from ftckpt.model.manifest import MAX_CHUNKS, Manifest, Section
from ftckpt.parity.holding import ArenaLayout, HoldingSection

WIDE_BYTES = 64
"""Alignment of fragments of a page or more: a cache line. Smaller ones are aligned to their items."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``begin`` to ``end`` (exclusive) of a slot file."""

    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def shifted(self, by: int) -> Span:
        """This span moved by ``by`` bytes."""
        return Span(self.begin + by, self.end + by)

    def cut(self, nbytes: int) -> tuple[Span, ...]:
        """Split into pieces of ``nbytes``, the last one possibly shorter; an empty span has none."""
        return tuple(Span(at, min(at + nbytes, self.end)) for at in range(self.begin, self.end, nbytes))


@dataclass(frozen=True, slots=True)
class SectionSpan:
    """The place of a manifest's section in the slot: its bytes, and its chunks from ``first_chunk``.

    ``kind``, ``group`` and ``of`` are those of ``Section``. ``span`` ends with the last byte of the last fragment.
    """

    kind: str
    group: str
    of: str
    span: Span
    first_chunk: int
    num_chunks: int


def section_layout(fragments: Iterable[Fragment]) -> tuple[tuple[int, ...], int]:
    """Offset of each fragment from the start of its section, and the section's length, in bytes.

    Sections start on pages, so this layout is the same in every slot and at every position.
    """
    offsets, end = [], 0
    for fragment in fragments:
        nbytes = fragment.nbytes
        # Each gap is a header entry: padding small tensors to a cache line would nearly double the entries.
        begin = end + -end % (WIDE_BYTES if nbytes >= PAGE_BYTES else fragment.item_bytes)
        offsets.append(begin)
        end = begin + nbytes
    return tuple(offsets), end


def gaps(spans: Sequence[Span], file_bytes: int) -> tuple[Span, ...]:
    """The gaps between ``spans``, which are sorted, and after the last one."""
    ends = [*(span.begin for span in spans[1:]), file_bytes]
    return tuple(Span(span.end, end) for span, end in zip(spans, ends, strict=True))


MAX_HEADER_BYTES = 100_000_000
"""The safetensors library rejects longer headers."""

FORMAT = "ftckpt-slot"
VERSION = "1"
OBJECTS_NAME = "__objects__"
_BEGIN = b'{"__metadata__":'
"""The start of a header's text."""


@dataclass(frozen=True)
class SlotImage:
    """The layout of a slot; every offset counts from the start of the file.

    ``offsets`` is in the order of ``manifest.fragments``. ``stepped`` (optimizer-updated state) and ``volatile``
    (mutable state) end with the last byte of their last fragment; ``objects`` is the capacity, not the length in use.
    ``chunks`` cuts each section of the stepped region, then the volatile region into pieces of
    ``manifest.chunk_bytes``; the last of each may be shorter. ``sections`` is in the order of ``manifest.sections``,
    or one private section if there are none.
    """

    manifest: Manifest
    header: bytes
    file_bytes: int
    offsets: tuple[int, ...]
    stepped: Span
    volatile: Span
    objects: Span
    chunks: tuple[Span, ...]
    num_stepped_chunks: int
    sections: tuple[SectionSpan, ...]

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, manifest: Manifest) -> SlotImage:
        """Compute the image of ``manifest``.

        Raises:
            ConfigError: a duplicate name, a negative size, or an image beyond the format's bounds.
        """
        if manifest.chunk_bytes < 1 or manifest.objects_bytes < 0:
            raise ConfigError(
                f"manifest of {manifest.shard}: chunk_bytes {manifest.chunk_bytes} must be at least 1 "
                f"and objects_bytes {manifest.objects_bytes} at least 0"
            )
        entries = _Entries()
        placed = [(section, *entries.add_region(fragments)) for section, fragments in _divided(manifest)]
        volatile, volatile_offsets = entries.add_region(manifest.volatile)
        entries.align(PAGE_BYTES)
        objects_begin = entries.add(OBJECTS_NAME, "U8", f"[{manifest.objects_bytes}]", manifest.objects_bytes)
        entries.align(PAGE_BYTES)
        spans = [span for _, span, _ in placed]
        # Checked before spans are cut: a hostile manifest must not make an endless list.
        _check_chunk_count(manifest, *(span.nbytes for span in spans), volatile.nbytes)
        header = _header(manifest, entries.texts)
        # Offsets so far count from the end of the header, whose length depends on all entries.
        base = len(header)
        offsets = [*(offset for _, _, own in placed for offset in own), *volatile_offsets]
        sections, chunks = _cut(placed, base, manifest.chunk_bytes)
        volatile = volatile.shifted(base)
        return cls(
            manifest=manifest,
            header=header,
            file_bytes=base + entries.end,
            offsets=tuple(base + offset for offset in offsets),
            stepped=Span(base + spans[0].begin, base + spans[-1].end),
            volatile=volatile,
            objects=Span(base + objects_begin, base + objects_begin + manifest.objects_bytes),
            chunks=chunks + volatile.cut(manifest.chunk_bytes),
            num_stepped_chunks=len(chunks),
            sections=sections,
        )

    @property
    def pads(self) -> tuple[Span, ...]:
        """Gaps after each section and region; they contain zeros and belong to no chunk."""
        regions = [*(section.span for section in self.sections), self.volatile, self.objects]
        return gaps(regions, self.file_bytes)

    def holding(self, node: str, rack: str, arena: str) -> ArenaLayout:
        """The layout, for protection, of an arena whose slots have this image."""
        lengths, behind = tuple(chunk.nbytes for chunk in self.chunks), self.num_stepped_chunks
        sections = []
        for s in self.sections:
            own = lengths[s.first_chunk : s.first_chunk + s.num_chunks]
            sections.append(HoldingSection(s.kind, s.group, s.of, s.first_chunk, own))
        return ArenaLayout(
            shard=self.manifest.shard,
            node=node,
            rack=rack,
            arena=arena,
            digest=self.manifest.digest.hex(),
            chunk_bytes=self.manifest.chunk_bytes,
            sections=tuple(sections),
            volatile=(behind, lengths[behind:]),
            slot_bytes=self.file_bytes,
            # The header contains the manifest, so its size is an upper bound.
            package_bytes=len(self.header) + 8 * len(lengths) + self.objects.nbytes + sum(lengths[behind:]),
        )


def header_bytes(first: Buffer) -> int:
    """Size of a slot's header, length field included, from its ``first`` bytes; CorruptError if impossible."""
    if len(first) < 8:
        raise CorruptError(f"slot header: truncated, {len(first)} bytes are too few for a length")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptError(f"slot header: length {length} is more than {MAX_HEADER_BYTES}")
    if (8 + length) % PAGE_BYTES:
        raise CorruptError(f"slot header: length {length} does not end on a page boundary")
    return 8 + length


def parse_image(buffer: bytes | bytearray | memoryview) -> SlotImage:
    """The image of an existing slot, from its first bytes (at least its entire header).

    Raises:
        CorruptError: not a slot, or a header that differs from the one that its manifest implies.
        MismatchError: a slot of another format version.
    """
    with memoryview(buffer) as view, view.cast("B") as data:
        text = _header_text(data)
    return _image_of_text(text)


@lru_cache(maxsize=16)  # about the ranks of a node: a restart opens each of their arenas several times
def _image_of_text(text: bytes) -> SlotImage:
    image = _image_of_metadata(_metadata(text))
    # The tensor table is not parsed: the text must equal the computed one, so offsets need not be trusted.
    if text != image.header[8:]:
        raise CorruptError("slot header: it is not the one that its manifest implies")
    return image


def _metadata(text: bytes) -> Any:
    """The metadata, which is the first entry."""
    if not text.startswith(_BEGIN):
        raise CorruptError("slot header: it does not start with its metadata")
    try:
        return json.JSONDecoder().raw_decode(text.decode(), len(_BEGIN))[0]
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"slot header: not JSON: {str(error)[:200]}") from None


class _Entries:
    """The tensor table of a slot under construction; offsets count from the end of the header."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        """Name → the JSON of the entry."""
        self.end = 0
        self._num_pads = 0

    def add(self, name: str, dtype: str, shape: str, nbytes: int) -> int:
        if name in self.texts:
            raise ConfigError(f"slot image: two entries are named {name!r}")
        begin, self.end = self.end, self.end + nbytes
        self.texts[name] = f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{self.end}]}}'
        return begin

    def align(self, multiple: int) -> None:
        self.pad_to(self.end + -self.end % multiple)

    def pad_to(self, offset: int) -> None:
        gap = offset - self.end
        if gap:
            self.add(f"__pad.{self._num_pads}", "U8", f"[{gap}]", gap)
            self._num_pads += 1

    def add_region(self, fragments: tuple[Fragment, ...]) -> tuple[Span, tuple[int, ...]]:
        """Add entries for ``fragments`` from the next page; returns their span and the offset of each."""
        self.align(PAGE_BYTES)
        begin = self.end
        relative, nbytes = section_layout(fragments)
        offsets = tuple(begin + offset for offset in relative)
        for fragment, offset in zip(fragments, offsets, strict=True):
            if offset > self.end:
                self.pad_to(offset)
            shape = _shape(fragment.box.shape, fragment.numel)
            self.add(fragment.name, fragment.dtype, shape, fragment.nbytes)
        return Span(begin, begin + nbytes), offsets


def _divided(manifest: Manifest) -> list[tuple[Section, tuple[Fragment, ...]]]:
    """The sections of a manifest and the fragments of each."""
    sections = manifest.sections or (Section("private", len(manifest.stepped)),)
    ends = list(accumulate(section.fragments for section in sections))
    return [(s, manifest.stepped[end - s.fragments : end]) for s, end in zip(sections, ends, strict=True)]


def _cut(
    placed: list[tuple[Section, Span, tuple[int, ...]]], base: int, chunk_bytes: int
) -> tuple[tuple[SectionSpan, ...], tuple[Span, ...]]:
    """The place of each section in the file, after its header of ``base`` bytes, and all chunks."""
    sections: list[SectionSpan] = []
    chunks: list[Span] = []
    for section, place, _ in placed:
        span = place.shifted(base)
        cut = span.cut(chunk_bytes)
        sections.append(SectionSpan(section.kind, section.group, section.of, span, len(chunks), len(cut)))
        chunks.extend(cut)
    return tuple(sections), tuple(chunks)


@lru_cache(maxsize=1 << 14)  # many tensors have few different shapes
def _shape(box: Shape, numel: int) -> str:
    """The shape of ``numel`` elements of a box, in JSON."""
    # A flat range of a box has one dimension.
    return json.dumps(box if numel == math.prod(box) else [numel], separators=(",", ":"))


def _header(manifest: Manifest, entries: Mapping[str, str]) -> bytes:
    metadata = {"format": FORMAT, "version": VERSION, "manifest": manifest.encode().decode()}
    own = json.dumps(metadata, separators=(",", ":"))
    table = (f"{encode_basestring_ascii(name)}:{entry}" for name, entry in entries.items())
    text = _BEGIN + ",".join([own, *table]).encode() + b"}"
    # An 8-byte length precedes the text. safetensors allows trailing spaces; data starts on a page.
    text += b" " * (-(len(text) + 8) % PAGE_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError(
            f"slot image: {len(entries)} entries need a header of {len(text)} bytes, "
            f"safetensors allows {MAX_HEADER_BYTES}; use fewer fragments"
        )
    return len(text).to_bytes(8, "little") + text


def _check_chunk_count(manifest: Manifest, *region_bytes: int) -> None:
    count = sum(-(-nbytes // manifest.chunk_bytes) for nbytes in region_bytes)
    if count > MAX_CHUNKS:
        raise ConfigError(
            f"slot image: {count} chunks of {manifest.chunk_bytes} bytes, at most {MAX_CHUNKS} are allowed; "
            "raise --ftckpt-chunk-size"
        )


def _header_text(data: memoryview) -> bytes:
    """The JSON of a header; its length is checked before the copy."""
    end = header_bytes(data)
    if end > len(data):
        raise CorruptError(f"slot header: truncated, {len(data)} of {end} bytes")
    return bytes(data[8:end])


def _image_of_metadata(metadata: Any) -> SlotImage:
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise CorruptError(f"slot header: __metadata__ does not name the format {FORMAT!r}")
    version = metadata.get("version")
    if version != VERSION:
        raise MismatchError(f"slot has format version {str(version)[:20]!r}, this ftckpt reads {VERSION!r}")
    manifest = metadata.get("manifest")
    if not isinstance(manifest, str):
        raise CorruptError("slot header: __metadata__ has no manifest")
    try:
        return SlotImage.of(Manifest.decode(manifest.encode()))
    # Errors that a hostile manifest can cause: infinite or endless numbers, deep nesting, wrong types.
    except (CorruptError, ConfigError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise CorruptError(f"slot header: bad manifest: {str(error)[:200]}") from None
