"""Storage in an object store: S3, GCS, Azure, a process's own memory. Nothing is renamed: what is put is there."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from ftckpt.errors import StorageError
from ftckpt.persist.storage import Bytes, ObjectEntry, Storage

_PART_BYTES = 32 << 20
"""Of a multipart upload: S3 takes 10,000 parts, so an object may have 320 GB."""
_UPLOADS = 4
"""Parts of one object on their way at a time; each is held in memory until it has arrived."""
_RETRY_SECS = 20.0
_STATUS = re.compile(r"status code: (\d{3})")
_NOT_IMPLEMENTED = 501
_SKEWED = "RequestTimeTooSkewed"
"""What S3 says where a request was signed a quarter of an hour ago, or will be."""
_CONNECT_SECS = 10.0


class ObjectStorage(Storage):
    """Objects below ``where``, a URL with the bucket and a folder in it; credentials as the store's own tools take
    them from the environment (``AWS_ACCESS_KEY_ID`` and its like).

    Raises:
        StorageError: a URL of no known store, obstore is not installed, the bucket is not there or refuses.
    """

    def __init__(self, where: str, **options: Any) -> None:
        require_obstore(where)
        import obstore
        from obstore import store

        self.where = where.rstrip("/")
        self._obstore = obstore
        self._errors = obstore.exceptions
        self._knows_conditions = True
        if not where.startswith("memory://"):
            options.setdefault("retry_config", {"max_retries": 5, "retry_timeout": timedelta(seconds=_RETRY_SECS)})
            client = {"connect_timeout": timedelta(seconds=_CONNECT_SECS), "allow_http": True}
            options["client_options"] = {**client, **options.get("client_options", {})}
        try:
            self._store = store.from_url(where, **options)
        except (self._errors.BaseError, ValueError, TypeError) as error:
            raise StorageError(f"{where}: {_first_line(error)}", lasting=True) from None
        # The first word with the server: a wrong bucket or key is an error at start.
        next(self.list(), None)

    def create(self, name: str, data: Bytes) -> bool:
        with self._explained(name):
            try:
                if self._knows_conditions:
                    self._obstore.put(self._store, self._check(name), _one(data), mode="create")
                    return True
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            except self._errors.BaseError as error:
                if _status(error) != _NOT_IMPLEMENTED:  # as Swift answers
                    raise
                self._knows_conditions = False
        if self.size(name) is not None:
            return False
        self.put(name, data)
        return True

    def write(self, name: str, chunks: Iterable[Bytes]) -> int:
        counted = _ChunkCounter(chunks)
        with self._explained(name, counted):
            self._obstore.put(
                self._store, self._check(name), counted, use_multipart=True, chunk_size=_PART_BYTES,
                max_concurrency=_UPLOADS,
            )  # fmt: skip
        return counted.nbytes

    def put(self, name: str, data: Bytes) -> None:
        with self._explained(name):
            self._obstore.put(self._store, self._check(name), _one(data), use_multipart=False)

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        self._check(name)
        if nbytes == 0 or begin < 0:
            nbytes_there = self.size(name)
            if nbytes_there is None or not 0 <= begin <= nbytes_there:
                raise StorageError(f"{self.where}/{name}: has nothing at {begin}", lasting=True)
            return b""
        with self._explained(name):
            if nbytes is None:
                return bytes(self._obstore.get(self._store, name).bytes())[begin:]
            data = bytes(self._obstore.get_range(self._store, name, start=begin, length=nbytes))
        if len(data) != nbytes:
            raise StorageError(f"{self.where}/{name}: has no {nbytes} bytes at {begin}", lasting=True)
        return data

    def size(self, name: str) -> int | None:
        with self._explained(name):
            try:
                return int(self._obstore.head(self._store, self._check(name))["size"])
            except (self._errors.NotFoundError, FileNotFoundError):
                return None

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        with self._explained(prefix):
            for batch in self._obstore.list(self._store, self._check(prefix) if prefix else None):
                for entry in batch:
                    yield ObjectEntry(entry["path"], int(entry["size"]))

    def remove(self, names: Sequence[str]) -> None:
        there = [self._check(name) for name in names]
        with self._explained(there[0] if there else ""), contextlib.suppress(self._errors.NotFoundError):
            self._obstore.delete(self._store, there)

    def unfinished(self, is_active: Callable[[str], bool] = lambda name: False) -> Sequence[str]:
        return []  # parts of uploads that were broken off are the bucket's own to remove: by a lifecycle rule

    def discard(self, unfinished: Sequence[str]) -> None:
        pass

    @contextlib.contextmanager
    def _explained(self, name: str, chunks: _ChunkCounter | None = None) -> Iterator[None]:
        """Errors of obstore as StorageErrors that name the object and the remedy; that of ``chunks`` as it is."""
        try:
            yield
        except (self._errors.BaseError, OSError, ValueError) as error:
            if chunks is not None and chunks.error is not None:
                raise chunks.error from None
            if isinstance(error, StorageError):
                raise
            where = f"{self.where}/{name}" if name else self.where
            text, lasting = self._meaning(error)
            raise StorageError(f"{where}: {text}", lasting=lasting) from None

    def _meaning(self, error: Exception) -> tuple[str, bool]:
        """What an error means to the user, and whether trying again is of no use."""
        status = _status(error)
        if _SKEWED in str(error):  # by the store's status, access is denied
            return "the clock of this machine is not that of the store: set it, as by NTP", False
        refused = (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)
        if status in (401, 403) or isinstance(error, refused):
            return f"access is denied: check the credentials in the environment ({_first_line(error)})", True
        if status == 404 or isinstance(error, self._errors.NotFoundError | FileNotFoundError):
            return f"is not there ({_first_line(error)})", True
        return _first_line(error), False


def require_obstore(where: str) -> None:
    """Raises StorageError where what reaches ``where`` is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise StorageError(f"{where}: needs obstore: pip install 'ftckpt[storage]'", lasting=True)


class _ChunkCounter:
    """Chunks as obstore takes them, how many bytes they had, and the error that they raised."""

    def __init__(self, chunks: Iterable[Bytes]) -> None:
        self._chunks = iter(chunks)
        self.nbytes = 0
        self.error: BaseException | None = None

    def __iter__(self) -> _ChunkCounter:
        return self

    def __next__(self) -> memoryview:
        try:
            view = _one(next(self._chunks))
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise
        self.nbytes += len(view)
        return view


def _one(data: Bytes) -> memoryview:
    return memoryview(data).cast("B")


def _status(error: Exception) -> int | None:
    """The server's answer, which obstore tells in its text alone for most calls."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("<?xml")[0].rstrip(" :") or type(error).__name__
    return text.splitlines()[0][:300]
