"""Storage of checkpoints: named objects, each either complete and durable or absent.

Two implementations: files below a directory (a local disk, NFS, Lustre) and the objects of a store (S3, GCS, Azure,
and a process's own memory for tests) through obstore. ``tests/unit/test_storage.py`` tests both alike.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ftckpt.array_types import Buffer
from ftckpt.errors import StorageError

T = TypeVar("T")

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,119}")
"""Of a name. A file's may have 255 bytes; one that is being written has the host and the process in it, too."""
_MOST_PARTS = 16


class ObjectEntry(NamedTuple):
    """What a listing tells: the name, and the size in bytes."""

    name: str
    nbytes: int


class Storage(ABC):
    """Objects below one place. Names are parts joined by slashes; a part begins with a letter or a digit and has
    letters, digits and ``. _ = -`` behind. Any thread may call any method.

    All methods raise StorageError, whose ``lasting`` says whether trying again is of no use.
    """

    where: str
    """As the user wrote it."""

    def put(self, name: str, data: Buffer) -> None:
        """Write a small object, over the one of this name: at each instant readers find the old one or the new."""
        self.write(name, [data])

    @abstractmethod
    def create(self, name: str, data: Buffer) -> bool:
        """Write a small object if there is none of this name; False: there is one, which stays as it is.

        Of several that do so at the same time one is told True, on stores that know conditions and file systems that
        know hard links. On others, and on some that only say that they do, it can be several: whoever relies on it
        must survive that the last one wins.
        """

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Write an object of any size; returns its bytes. Each chunk is asked for when there is room for it, and is
        not kept. An error that ``chunks`` raises is raised, and nothing is written."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        """``nbytes`` from ``begin`` on, or all. StorageError too where the object has fewer."""

    def read_into(self, name: str, begin: int, memories: Sequence[memoryview]) -> None:
        """Fill ``memories``, of bytes, one after the other from byte ``begin`` on. StorageError too where the object
        has fewer."""
        data = memoryview(self.read(name, begin, sum(map(len, memories))))
        for memory in memories:
            memory[:], data = data[: len(memory)], data[len(memory) :]

    def read_ahead(self, name: str, nbytes: int) -> None:  # noqa: B027 - what gains nothing by it does nothing
        """The first ``nbytes`` will be read soon: have them brought nearer meanwhile, where that is of use. Takes no
        memory that the system could not take back, and raises nothing."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All objects whose name is below ``prefix``, a name without its last parts; in no order."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""

    @abstractmethod
    def unfinished(self, is_active: Callable[[str], bool] = lambda name: False) -> Sequence[str]:
        """What writers that were killed have left and ``list`` does not tell, for ``discard``.

        Args:
            is_active: whether what begins with this name may be being written now: it is not told.
        """

    @abstractmethod
    def discard(self, unfinished: Sequence[str]) -> None:
        """Remove what ``unfinished`` has told."""

    def _check(self, name: str) -> str:
        parts = name.split("/")
        if len(parts) > _MOST_PARTS or not all(map(PART.fullmatch, parts)):
            raise StorageError(f"{self.where}: {name!r} is no name of an object", lasting=True)
        return name


def patiently(action: Callable[[], T], within_secs: float) -> T:
    """``action``, again and again where storage fails in a way that may pass; raises its error after the time."""
    deadline, pause_secs = time.monotonic() + within_secs, 0.5
    while True:
        try:
            return action()
        except StorageError as error:
            if error.lasting or time.monotonic() + pause_secs > deadline:
                raise
        time.sleep(pause_secs)
        pause_secs = min(2 * pause_secs, 30.0)
