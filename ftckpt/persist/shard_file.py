"""Reads and verifies parts of a shard's file on storage, compressed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import xxhash

from ftckpt.array_types import Buffer, Hashes
from ftckpt.errors import CorruptError, DamagedError, MismatchError, StorageError
from ftckpt.memory.destinations import TargetParts, cover, scratch
from ftckpt.memory.image import SlotImage, Span, header_bytes, parse_image
from ftckpt.persist.compression import decompress, runs_of
from ftckpt.persist.shards import StoredShard
from ftckpt.persist.storage import Storage

_TRIES = 3
"""Reads of a part whose checksum does not match: corruption in transit may not repeat."""


class ShardFile:
    """A shard's file, verified against its ``entry`` in the manifest. Any thread may read.

    Args:
        where: the file's name in errors.
        shard: the expected shard.
        read: reads from an offset, given a size. The file's base, if it has one, follows its last byte.
        read_into: reads from an offset into buffers, one after the other; None: ``read`` is used.

    Raises:
        DamagedError: the header is not that of the shard in the manifest.
        StorageError: the file is of another version, or ``read`` fails.
    """

    def __init__(
        self, where: str, shard: str, entry: StoredShard, read: Callable[[int, int], Buffer],
        read_into: Callable[[int, Sequence[memoryview]], None] | None = None,
    ) -> None:  # fmt: skip
        self.entry = entry
        self._where = where
        self._read, self._read_into = read, read_into
        try:
            # ``header_bytes`` refuses a damaged length: each rank might read the entire file otherwise.
            self.image = image = parse_image(read(0, min(header_bytes(read(0, 8)), entry.nbytes)))
        except CorruptError as error:
            raise DamagedError(f"{where}: {error}") from None
        except MismatchError as error:
            raise StorageError(f"{where}: {error}", lasting=True) from None
        if image.manifest.shard != shard or not entry.is_of(image):
            raise DamagedError(f"{where}: is not what the manifest names")
        self._hashes = [*entry.chunk_hashes.tolist(), entry.objects_hash]
        self._spans, self._packed = _spans(image, entry, entry.frames), [entry.is_compressed] * len(self._hashes)
        if entry.base is not None:
            there = _spans(image, entry, entry.base.frames)
            for number in entry.shared:
                self._spans[number] = there[number].shifted(entry.nbytes)
                self._packed[number] = entry.base.frames is not None
        self._runs = runs_of(image, entry.objects_used) if any(self._packed) else []

    @property
    def objects_used(self) -> int:
        """The bytes of the encoded objects."""
        return self.entry.objects_used

    def chunk(self, number: int) -> Buffer:
        """Reads and verifies a chunk of the image.

        Raises:
            DamagedError: its checksum does not match.
            StorageError: it cannot be read.
            ConfigError: zstandard is not installed.
        """
        return self._proven(number)

    def scatter(self, number: int, parts: TargetParts) -> None:
        """Fills the targets of ``parts`` from a chunk; raises as ``chunk`` does.

        An uncompressed chunk is verified after it is read into the targets: after an error they have corrupt bytes.
        """
        read_into = self._read_into
        if read_into is None or self._packed[number]:
            data, first = memoryview(self.chunk(number)), self.image.chunks[number].begin
            for part in parts():
                for begin, memory in part.targets:
                    memory[:] = data[begin - first :][: len(memory)]
            return

        shift = self._spans[number].begin - self.image.chunks[number].begin

        def bring() -> Iterator[memoryview]:
            for span, targets in parts():
                # Gaps are disjoint: all buffers are hashed after the read.
                memories = [*cover(span, targets, partial(_gap_of, span))]
                read_into(span.begin + shift, memories)
                yield from memories

        self._prove(number, bring)

    def stored_bytes(self, number: int) -> int:
        """The size of a chunk in the file."""
        return self._spans[number].nbytes

    def objects(self) -> Buffer:
        """Reads and verifies the objects in use; raises as ``chunk`` does."""
        return self._proven(-1)

    def _proven(self, part: int) -> Buffer:
        data: Buffer = b""

        def bring() -> Iterator[Buffer]:
            nonlocal data
            data = self._unpacked(part)
            yield data

        self._prove(part, bring)
        return data

    def _unpacked(self, part: int) -> Buffer:
        data = self._read(self._spans[part].begin, self._spans[part].nbytes)
        return decompress(data, self._runs[part]) if self._packed[part] else data

    def _prove(self, part: int, bring: Callable[[], Iterable[Buffer]]) -> None:
        """Calls ``bring`` until its buffers together have the part's checksum, at most ``_TRIES`` times."""
        span, problem = self._spans[part], "do not match their checksum"
        for _ in range(_TRIES):
            digest = xxhash.xxh3_64()
            try:
                for data in bring():
                    digest.update(data)
            except CorruptError as error:
                problem = str(error)
                continue
            if digest.intdigest() == self._hashes[part]:
                return
        where, begin = self._where, span.begin
        if self.entry.base is not None and begin >= self.entry.nbytes:
            where, begin = f"{where}: {self.entry.base.file}", begin - self.entry.nbytes
        raise DamagedError(f"{where}: {span.nbytes} bytes at {begin} {problem}")


def open_shard(
    storage: Storage, folder: str, shard: str, entry: StoredShard,
    ask: Callable[[Callable[[], Any]], Any] = lambda action: action(),
) -> ShardFile:  # fmt: skip
    """Opens a shard's file in ``folder``. ``ask`` performs each request to storage.

    Raises:
        DamagedError: it, or a file of another checkpoint that holds some of its chunks, is missing or damaged.
        StorageError: storage fails.
    """
    file, base = f"{folder}/{entry.file}", entry.base
    where = f"{storage.where}/{file}"
    if ask(lambda: storage.size(file)) != entry.nbytes:
        raise DamagedError(f"{where}: is missing, or does not have its {entry.nbytes} bytes")
    if base is not None and ask(lambda: storage.size(base.file)) != base.nbytes:
        text = f"{base.file}, which has chunks of it, is missing, or does not have its {base.nbytes} bytes"
        raise DamagedError(f"{where}: {text}")

    def place(begin: int) -> tuple[str, int]:
        return (file, begin) if base is None or begin < entry.nbytes else (base.file, begin - entry.nbytes)

    def read(begin: int, nbytes: int) -> Buffer:
        name, at = place(begin)
        data: Buffer = ask(lambda: storage.read(name, at, nbytes))
        return data

    def read_into(begin: int, memories: Sequence[memoryview]) -> None:
        name, at = place(begin)
        ask(lambda: storage.read_into(name, at, memories))

    return ShardFile(where, shard, entry, read, read_into)


def _spans(image: SlotImage, entry: StoredShard, frames: Hashes | None) -> list[Span]:
    """The places of the chunks and the objects in a file with these ``frames``."""
    if frames is None:
        return [*image.chunks, Span(image.objects.begin, image.objects.begin + entry.objects_used)]
    # Frames follow the header without gaps.
    return [Span(*ends) for ends in pairwise(accumulate(frames.tolist()))]


def _gap_of(span: Span, begin: int, end: int) -> memoryview:
    return scratch(span.nbytes)[begin - span.begin : end - span.begin]
