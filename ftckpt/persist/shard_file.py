"""The file of a shard on storage, compressed or not: any part of it, proven when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import xxhash

from ftckpt.array_types import Buffer
from ftckpt.errors import CorruptError, DamagedError, MismatchError, StorageError
from ftckpt.memory.destinations import LoadTarget, cover, scratch
from ftckpt.memory.image import Span, header_bytes, parse_image
from ftckpt.persist.compression import decompress, runs_of
from ftckpt.persist.shards import StoredShard

_TRIES = 3
"""Of reading a part whose bytes are not right: what came over a network may be right the next time."""


class ShardFile:
    """A file of which ``entry``, in the manifest, says what each part must be. Any thread may read.

    Args:
        where: names it in errors.
        shard: whose it must be.
        read: so many bytes of the file, from an offset on.
        read_into: fills memory, one after the other, from an offset on; by ``read`` where it is not given.

    Raises:
        DamagedError: its header is not that of the shard in the manifest.
        StorageError: it is of another version, or ``read`` fails.
    """

    def __init__(
        self, where: str, shard: str, entry: StoredShard, read: Callable[[int, int], Buffer],
        read_into: Callable[[int, Sequence[memoryview]], None] | None = None,
    ) -> None:  # fmt: skip
        self.entry = entry
        self._where = where
        self._read, self._read_into = read, read_into
        try:
            # Of a length that is damaged nothing is read: it may be that of the whole file, for each rank.
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
            # Behind the header, one behind the other.
            self._spans = [Span(*ends) for ends in pairwise(accumulate(entry.frames.tolist()))]
            self._runs = runs_of(image, entry.objects_used)

    def chunk(self, number: int) -> Buffer:
        """A chunk of the image.

        Raises:
            DamagedError: it is not what it was when its checksum was taken.
            StorageError: it cannot be read.
            ConfigError: nothing that unpacks it is installed.
        """
        return self._proven(number)

    def scatter(self, number: int, landings: Sequence[LoadTarget]) -> None:
        """Fill ``landings``, ascending and apart from each other, from a chunk; raises as ``chunk`` does.

        What is not packed is proven where it has landed: where this raises, the landings have what it is.
        """
        span, read_into = self.image.chunks[number], self._read_into
        if read_into is None or self._runs is not None:
            data = memoryview(self.chunk(number))
            for begin, memory in landings:
                memory[:] = data[begin - span.begin :][: len(memory)]
            return

        def gap(begin: int, end: int) -> memoryview:
            return scratch(span.nbytes)[begin - span.begin : end - span.begin]

        def bring() -> Sequence[memoryview]:
            memories = [*cover(span, landings, gap)]
            read_into(span.begin, memories)
            return memories

        self._prove(number, bring)

    def stored_bytes(self, number: int) -> int:
        """What of the file a chunk takes."""
        return self._spans[number].nbytes

    def objects(self) -> Buffer:
        """The objects in use; raises as ``chunk`` does."""
        return self._proven(-1)

    def _proven(self, part: int) -> Buffer:
        return self._prove(part, lambda: [self._unpacked(part)])[0]

    def _unpacked(self, part: int) -> Buffer:
        data = self._read(self._spans[part].begin, self._spans[part].nbytes)
        return data if self._runs is None else decompress(data, self._runs[part])

    def _prove(self, part: int, bring: Callable[[], Sequence[Buffer]]) -> Sequence[Buffer]:
        """What ``bring`` gives, which one after the other must be the part; it is tried again where it is not."""
        span, problem = self._spans[part], "do not match their checksum"
        for _ in range(_TRIES):
            try:
                found = bring()
            except CorruptError as error:
                problem = str(error)
                continue
            digest = xxhash.xxh3_64()
            for data in found:
                digest.update(data)
            if digest.intdigest() == self._hashes[part]:
                return found
        raise DamagedError(f"{self._where}: {span.nbytes} bytes at {span.begin} {problem}")
