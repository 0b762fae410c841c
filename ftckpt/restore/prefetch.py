"""What a restart will read from storage, read while ranks still start: the page cache has it when it is asked for.

A rank knows its settings long before it can speak to others: torch.distributed, the model and the optimizer take tens
of seconds. From then on it reads, by itself, what is likely to be its part of the newest snapshot. It is a hint: what
counts, and whether its bytes are good, the restart finds out anew, and a wrong guess costs reads alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.errors import FtckptError, StorageError
from ftckpt.model.topology import in_rank_order
from ftckpt.persist import retention
from ftckpt.persist.commit import committed, folder_of, manifest_of
from ftckpt.persist.place import Place
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.persist.storage import Storage, open_storage
from ftckpt.store.arena import open_control
from ftckpt.store.directory import job_node_path, list_arenas
from ftckpt.store.memory import available_bytes

_PIECE_BYTES = 4 << 20
"""Read at a time: between two a thread needs the interpreter, which the one that builds the model gives up only each
few milliseconds, and sees whether it is to stop or to wait."""

_PAUSE_SECS = 10.0
"""The longest that is waited for ``go_on``."""

_READERS = 4
"""Pieces of a rank that are on their way at a time, as in a restart: storage answers late, and then much at once."""

_SHARE = 0.5
"""Of the memory that the node has yet. The system takes it back where arenas and the model want it."""


class Prefetched(NamedTuple):
    """What was read before the restart asked for it: bytes of which iteration, and the seconds from the begin to the
    last of them."""

    iteration: int
    bytes: int
    secs: float


class Seat(NamedTuple):
    """One rank's number, and of how many; ``local`` of them are on its node."""

    rank: int
    world_size: int
    local: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Seat | None:
        """As the launcher says; None where it does not, and any rank would read what all of them need."""
        try:
            world_size = int(env["WORLD_SIZE"])
            seat = cls(int(env["RANK"]), world_size, int(env.get("LOCAL_WORLD_SIZE", world_size)))
        except (KeyError, ValueError):
            return None
        return seat if 0 <= seat.rank < world_size and seat.local > 0 else None


class Prefetch:
    """One rank's reading, in threads of its own: no collective, no word to anybody, nothing written, nothing raised.

    They are daemons, and wait in calls of the system alone: a process ends without them.
    """

    def __init__(self, where: str, node_dir: Path, seat: Seat, before: int = 0) -> None:
        self._where, self._node_dir, self._seat, self._before = where, node_dir, seat, before
        self._begun = self._last = time.monotonic()
        self._iteration = -1
        self._pieces: deque[tuple[str, int, int]] = deque()
        self._read: list[int] = []  # bytes of each piece: to append is one step for all threads
        self._ended, self._goes = threading.Event(), threading.Event()
        self._goes.set()
        self._thread = _start(self._run)

    def pause(self) -> None:
        """Begin no further piece for now: what a restart looks at comes behind all that disks have been asked for."""
        self._goes.clear()

    def go_on(self) -> None:
        """End of ``pause``."""
        self._goes.set()

    def end(self) -> Prefetched | None:
        """Begin no further piece; what was read, None for nothing. Waits for nobody."""
        self._ended.set()
        self._goes.set()
        read = sum(self._read)
        return Prefetched(self._iteration, read, self._last - self._begun) if read else None

    def join(self, timeout_secs: float) -> bool:
        """Whether all was read in time."""
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # The restart meets what is wrong with storage or memory, and tells of it. RuntimeError: no more threads.
        with suppress(FtckptError, OSError, RuntimeError):
            storage = open_storage(self._where)
            stored = wanted(storage, newest_whole(self._node_dir), self._before)
            if stored is None:
                return
            self._iteration = stored.snapshot.iteration
            room = int(available_bytes() * _SHARE) // self._seat.local
            self._pieces.extend(_pieces(stored, share_of(stored, self._seat), room))
            others = [_start(lambda: self._bring(storage)) for _ in range(_READERS - 1)]
            self._bring(storage)
            for other in others:
                other.join()

    def _bring(self, storage: Storage) -> None:
        with suppress(FtckptError, IndexError):  # no piece is left
            while self._goes.wait(_PAUSE_SECS) and not self._ended.is_set():
                self._read.append(storage.bring_near(*self._pieces.popleft()))
                self._last = time.monotonic()


def _start(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, name="ftckpt-prefetch", daemon=True)
    thread.start()
    return thread


_running: Prefetch | None = None


def begin(config: Config) -> None:
    """Begin to read, where snapshots lie in a directory; once until ``end``. Returns at once.

    Args:
        config: with the names of the job and the node.

    Raises:
        ArenaError: an unusable name.
    """
    global _running
    where, seat = Place.of(config.persist, config.persist_format).snapshots, Seat.of(os.environ)
    # Nothing of this machine keeps what is read of an object store; of Megatron's place it is not known yet.
    if _running is None and where and "://" not in where and seat is not None:
        node_dir = job_node_path(Path(config.arena), config.job, config.node)
        _running = Prefetch(where, node_dir, seat, config.restore_before)


def pause() -> None:
    """The restart is about to look at storage."""
    if _running is not None:
        _running.pause()


def go_on() -> None:
    """It has seen what is there."""
    if _running is not None:
        _running.go_on()


def end() -> Prefetched | None:
    """The restart has read what it needs: what was read before it, None for nothing."""
    global _running
    running, _running = _running, None
    return running.end() if running is not None else None


def newest_whole(node_dir: Path) -> int:
    """The newest iteration that was whole on all ranks, as far as the memory of this node knows; -1 for none."""
    newest = -1
    for path in list_arenas(node_dir):
        with suppress(FtckptError), open_control(path) as control:
            whole = control.whole()
            newest = max(newest, whole.iteration if whole is not None else -1)
    return newest


def wanted(storage: Storage, in_memory: int, before: int = 0) -> StoredSnapshot | None:
    """The newest snapshot on storage that counts, if it is newer than what memory has.

    ``before`` as ``restore_before``: what an earlier start has begun with that number counts all the same.

    Raises:
        StorageError: storage fails.
    """
    there = [iteration for iteration in committed(storage) if iteration > in_memory]
    void = retention.voided(storage) if there else set()
    for iteration in there:
        name = manifest_of(iteration)
        try:
            stored = StoredSnapshot.decode(storage.read(name), name)
        except StorageError as error:
            if not error.lasting:
                raise
            continue  # damaged: the restart passes it over, too
        is_undone = before and iteration >= before and stored.origin.before != before
        if stored.snapshot not in void and not is_undone:
            return stored
    return None


def share_of(stored: StoredSnapshot, seat: Seat) -> list[StoredShard]:
    """The shards that a rank is likely to bring from storage: with as many ranks as before the one that it had, else
    its part of all, as ``stored.ShardFetch`` and ``straight.StraightFetch`` divide them."""
    if len(stored.shards) == seat.world_size:
        return [stored.shards[in_rank_order(list(stored.shards))[seat.rank]]]
    return [stored.shards[name] for name in sorted(stored.shards)[seat.rank :: seat.world_size]]


def _pieces(stored: StoredSnapshot, shards: Sequence[StoredShard], room_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Name, begin and bytes of what is read, in order, until ``room_bytes`` are full."""
    for shard in shards:
        name = f"{folder_of(stored.snapshot.iteration)}/{shard.file}"
        end = min(shard.needed_bytes, room_bytes)
        yield from ((name, begin, min(_PIECE_BYTES, end - begin)) for begin in range(0, end, _PIECE_BYTES))
        room_bytes -= end
