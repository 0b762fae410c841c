"""What this node holds and other nodes may ask for: chunks of checked slots, and packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import xxhash

from ftckpt.arena.package import MAX_PACKAGE_BYTES, package_path
from ftckpt.errors import ArenaError
from ftckpt.smp.answers import Answer
from ftckpt.smp.held import HeldArenas
from ftckpt.smp.pace import Bucket
from ftckpt.smp.wire import Kind, Request


class Service:
    """Finds what is asked for; called from many threads. ``read`` is charged with what is sent."""

    def __init__(self, held: HeldArenas, read: Bucket) -> None:
        self.held = held
        self.read = read

    @contextmanager
    def find(self, request: Request) -> Iterator[Answer | None]:
        """What is asked for, held while the block runs; None: not here, or not yet."""
        with ExitStack() as stack:
            try:
                if request.kind == Kind.CHUNK:
                    answer = self._chunk(request, stack)
                else:
                    answer = _package(self.held.node_dir, request, stack)
            # The arena, or its file, may be closed, replaced or deleted by another thread or process meanwhile.
            except (ArenaError, ValueError, OSError):
                answer = None
            yield answer

    def _chunk(self, request: Request, stack: ExitStack) -> Answer | None:
        held = self.held.by_shard.get(request.shard)
        found = held.found((request.lineage, request.iteration)) if held is not None else None
        if held is None or found is None or request.chunk >= len(held.arena.image.chunks):
            return None
        # The lease first, then the record once more: who takes the slot over in between is seen.
        stack.enter_context(held.lease(found.slot))
        if not held.same(found.slot, found.record):
            return None
        span = held.arena.image.chunks[request.chunk]
        self.read.charge(span.nbytes)
        whole = stack.enter_context(held.arena.slot(found.slot))
        view = stack.enter_context(whole[span.begin : span.end])

        def valid() -> bool:
            try:
                return held.same(found.slot, found.record)
            except (ArenaError, ValueError):
                return False

        return Answer(view, int(found.hashes[request.chunk]), valid)


def _package(node_dir: Path, request: Request, stack: ExitStack) -> Answer | None:
    path = package_path(node_dir, request.shard, request.lineage, request.iteration)
    try:
        if not 0 < path.stat().st_size <= MAX_PACKAGE_BYTES:
            return None
        data = path.read_bytes()  # replaced whole, never changed: it has the size that was seen, or another is there
    except FileNotFoundError:
        return None
    return Answer(stack.enter_context(memoryview(data)), xxhash.xxh3_64_intdigest(data), lambda: True)
