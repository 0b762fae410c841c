"""Reads and verifies parts of a shard's file on storage, compressed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import xxhash

from ftckpt.array_types import Buffer
from ftckpt.errors import CorruptError, DamagedError, MismatchError, StorageError
from ftckpt.memory.destinations import TargetParts, cover, scratch
from ftckpt.memory.image import Span, header_bytes, parse_image
from ftckpt.persist.compression import decompress, runs_of
from ftckpt.persist.shards import StoredShard

_TRIES = 3
"""Reads of a part whose checksum does not match: corruption in transit may not repeat."""


class ShardFile:
    """A shard's file, verified against its ``entry`` in the manifest. Any thread may read.

    Args:
        where: the file's name in errors.
        shard: the expected shard.
        read: reads from an offset, given a size.
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
        if entry.frames is None:
            objects = Span(image.objects.begin, image.objects.begin + entry.objects_used)
            self._spans, self._runs = [*image.chunks, objects], None
        else:
            # Frames follow the header without gaps.
            self._spans = [Span(*ends) for ends in pairwise(accumulate(entry.frames.tolist()))]
            self._runs = runs_of(image, entry.objects_used)

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
        if read_into is None or self._runs is not None:
            data, first = memoryview(self.chunk(number)), self.image.chunks[number].begin
            for part in parts():
                for begin, memory in part.targets:
                    memory[:] = data[begin - first :][: len(memory)]
            return

        def bring() -> Iterator[memoryview]:
            for span, targets in parts():
                # Gaps are disjoint: all buffers are hashed after the read.
                memories = [*cover(span, targets, partial(_gap_of, span))]
                read_into(span.begin, memories)
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
        return data if self._runs is None else decompress(data, self._runs[part])

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
        raise DamagedError(f"{self._where}: {span.nbytes} bytes at {span.begin} {problem}")


def _gap_of(span: Span, begin: int, end: int) -> memoryview:
    return scratch(span.nbytes)[begin - span.begin : end - span.begin]
