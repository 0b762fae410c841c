"""Storage in an object store: S3, GCS, Azure, or a process's own memory. A put object is complete at once."""

from __future__ import annotations

import contextlib
import importlib.util
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Any

from ftckpt.array_types import Buffer
from ftckpt.errors import StorageError
from ftckpt.persist.storage import ObjectEntry, Storage

_PART_BYTES = 32 << 20
"""Part size of a multipart upload: S3 allows 10,000 parts, so an object may have 320 GB."""
_UPLOADS = 4
"""Concurrent part uploads of one object; each part stays in memory until it is uploaded."""
_RETRY_SECS = 20.0
_CONNECT_SECS = 10.0
_SIGNED_FOR = timedelta(minutes=1)


class ObjectStorage(Storage):
    """Objects below ``where``, a URL of a bucket and a folder in it. Credentials come from the environment variables
    of the store's own tools (such as ``AWS_ACCESS_KEY_ID``).

    Raises:
        StorageError: an unknown kind of URL, obstore is not installed, or the bucket is missing or denies access.
    """

    def __init__(self, where: str, **options: Any) -> None:
        require_obstore(where)
        import obstore
        from obstore import store

        self.where = where.rstrip("/")
        self._obstore: Any = obstore
        self._errors = obstore.exceptions
        self._knows_conditions = True
        if not where.startswith("memory://"):
            options.setdefault("retry_config", {"max_retries": 5, "retry_timeout": timedelta(seconds=_RETRY_SECS)})
            client = {"connect_timeout": timedelta(seconds=_CONNECT_SECS), "allow_http": True}
            options["client_options"] = {**client, **options.get("client_options", {})}
        try:
            self._store: Any = store.from_url(where, **options)
        except (self._errors.BaseError, ValueError, TypeError) as error:
            raise StorageError(f"{where}: {_first_line(error)}", lasting=True) from None
        # A first request, so that a wrong bucket or key is an error at start.
        next(self.list(), None)

    def create(self, name: str, data: Buffer) -> bool:
        with self._explained(name):
            try:
                if self._knows_conditions:
                    self._obstore.put(self._store, self._check(name), _one(data), mode="create")
                    return True
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            except self._errors.GenericError:
                status = self._put_signed(name, data)
                if status == HTTPStatus.OK:  # the failure has passed
                    return True
                if status != HTTPStatus.NOT_IMPLEMENTED:  # the answer of stores without conditional writes
                    raise
                self._knows_conditions = False
        if self.size(name) is not None:
            return False
        self.put(name, data)
        return True

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        counted = _ChunkCounter(chunks)
        with self._explained(name, counted):
            self._obstore.put(
                self._store, self._check(name), counted, use_multipart=True, chunk_size=_PART_BYTES,
                max_concurrency=_UPLOADS,
            )  # fmt: skip
        return counted.nbytes

    def put(self, name: str, data: Buffer) -> None:
        with self._explained(name):
            self._obstore.put(self._store, self._check(name), _one(data), use_multipart=False)

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        self._check(name)
        if nbytes == 0 or begin < 0:
            nbytes_there = self.size(name)
            if nbytes_there is None or not 0 <= begin <= nbytes_there:
                raise StorageError(f"{self.where}/{name}: has no byte at {begin}", lasting=True)
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
            try:
                for batch in self._obstore.list(self._store, self._check(prefix) if prefix else None):
                    for entry in batch:
                        yield ObjectEntry(entry["path"], int(entry["size"]))
            except self._errors.GenericError:  # the only type of error of a listing
                self._require_bucket()
                raise

    def remove(self, names: Sequence[str]) -> None:
        there = [self._check(name) for name in names]
        with self._explained(there[0] if there else ""), contextlib.suppress(self._errors.NotFoundError):
            self._obstore.delete(self._store, there)

    @contextlib.contextmanager
    def _explained(self, name: str, chunks: _ChunkCounter | None = None) -> Iterator[None]:
        """Converts errors of obstore to StorageErrors that name the object and the remedy; an error of ``chunks`` is
        raised as it is."""
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
        """The meaning of an error for the user, and whether a retry is useless."""
        if isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError):
            # Stores also deny signatures that differ by more than 15 minutes from their clock.
            remedy = "check the credentials in the environment, and this machine's clock"
            return f"access is denied: {remedy} ({_first_line(error)})", True
        if isinstance(error, self._errors.NotFoundError | FileNotFoundError):
            return f"does not exist ({_first_line(error)})", True
        return _first_line(error), False

    def _require_bucket(self) -> None:
        """Raises obstore's error if the bucket is missing or denies access."""
        kind = type(self._store)
        if kind not in (self._obstore.store.S3Store, self._obstore.store.GCSStore):
            return  # other stores have no such request
        store = self._store
        bucket = kind(config=store.config, client_options=store.client_options, retry_config=store.retry_config)
        with contextlib.suppress(self._errors.GenericError):  # not an answer about the bucket
            self._obstore.head(bucket, "")

    def _put_signed(self, name: str, data: Buffer) -> int | None:
        """Writes a small object unless it exists; the status of the answer, which obstore's errors have only in their
        text. None without an answer, and for a store that is not of S3's kind: all others know conditions."""
        if not isinstance(self._store, self._obstore.store.S3Store):
            return None
        try:
            url = self._obstore.sign(self._store, "PUT", name, _SIGNED_FOR)
            request = urllib.request.Request(url, bytes(data), {"If-None-Match": "*"}, method="PUT")
            with urllib.request.urlopen(request, timeout=_CONNECT_SECS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code
        except (self._errors.BaseError, OSError, ValueError):
            return None


def require_obstore(where: str) -> None:
    """Raises StorageError if obstore, which ``where`` needs, is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise StorageError(f"{where}: needs obstore: pip install 'ftckpt[storage]'", lasting=True)


class _ChunkCounter:
    """An iterator of chunks for obstore, which counts their bytes and stores the error that they raise."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
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
        except BaseException as error:  # obstore may raise another error instead
            self.error = error
            raise
        self.nbytes += len(view)
        return view


def _one(data: Buffer) -> memoryview:
    return memoryview(data).cast("B")


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("<?xml")[0].rstrip(" :") or type(error).__name__
    return text.splitlines()[0][:300]
