"""Storage in an object store: S3, GCS, Azure, a process's own memory. Nothing is renamed: what is put is there."""

from __future__ import annotations

import contextlib
import importlib.util
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from email.message import Message
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NamedTuple

from ftckpt.array_types import Buffer
from ftckpt.errors import StorageError
from ftckpt.persist.storage import ObjectEntry, Storage

_PART_BYTES = 32 << 20
"""Of a multipart upload: S3 takes 10,000 parts, so an object may have 320 GB."""
_UPLOADS = 4
"""Parts of one object on their way at a time; each is held in memory until it has arrived."""
_RETRY_SECS = 20.0
_MAX_SKEW_SECS = 15 * 60.0
"""Stores deny requests that were signed so long ago, or will be."""
_CONNECT_SECS = 10.0
_SIGNED_FOR = timedelta(minutes=1)


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
        # The first word with the server: a wrong bucket or key is an error at start.
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
                answer = self._ask("PUT", name, data, {"If-None-Match": "*"})
                if answer is not None and answer.status == HTTPStatus.OK:  # it is made: the failure has passed
                    return True
                if answer is None or answer.status != HTTPStatus.NOT_IMPLEMENTED:  # as Swift answers
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
            try:
                for batch in self._obstore.list(self._store, self._check(prefix) if prefix else None):
                    for entry in batch:
                        yield ObjectEntry(entry["path"], int(entry["size"]))
            except self._errors.GenericError:  # the only type of error that a listing has
                self._require_bucket()
                raise

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
        if isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError):
            answer = self._ask("HEAD", "")
            if answer is not None and abs(answer.skew_secs) >= _MAX_SKEW_SECS:
                return "the clock of this machine is not that of the store: set it, as by NTP", False
            return f"access is denied: check the credentials in the environment ({_first_line(error)})", True
        if isinstance(error, self._errors.NotFoundError | FileNotFoundError):
            return f"is not there ({_first_line(error)})", True
        return _first_line(error), False

    def _require_bucket(self) -> None:
        """Raises what keeps the bucket itself from being read, in obstore's types, if anything does."""
        kind = type(self._store)
        if kind not in (self._obstore.store.S3Store, self._obstore.store.GCSStore):
            return  # others have no such request
        store = self._store
        bucket = kind(config=store.config, client_options=store.client_options, retry_config=store.retry_config)
        with contextlib.suppress(self._errors.GenericError):  # one that answers so is no bucket that refuses
            self._obstore.head(bucket, "")

    def _ask(
        self, method: str, name: str, data: Buffer = b"", headers: Mapping[str, str] | None = None
    ) -> _Answer | None:
        """The store's answer to one request, of which obstore's errors have the text alone; None: there is none."""
        try:
            url = self._obstore.sign(self._store, method, name, _SIGNED_FOR)
            request = urllib.request.Request(url, bytes(data) or None, dict(headers or {}), method=method)
            with urllib.request.urlopen(request, timeout=_CONNECT_SECS) as answer:
                return _Answer.of(answer.status, answer.headers)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return _Answer.of(refusal.code, refusal.headers)
        except (self._errors.BaseError, OSError, ValueError, TypeError):  # no network; a store that signs nothing
            return None


class _Answer(NamedTuple):
    """``skew_secs`` is by how much this machine's clock is ahead of the store's, 0 where that is not known."""

    status: int
    skew_secs: float

    @classmethod
    def of(cls, status: int, headers: Message) -> _Answer:
        """An answer with this status and these headers."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return cls(status, time.time() - parsedate_to_datetime(headers["Date"]).timestamp())
        return cls(status, 0.0)


def require_obstore(where: str) -> None:
    """Raises StorageError where what reaches ``where`` is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise StorageError(f"{where}: needs obstore: pip install 'ftckpt[storage]'", lasting=True)


class _ChunkCounter:
    """Chunks as obstore takes them, how many bytes they had, and the error that they raised."""

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
        except BaseException as error:  # the library that reads it may raise another error in its place
            self.error = error
            raise
        self.nbytes += len(view)
        return view


def _one(data: Buffer) -> memoryview:
    return memoryview(data).cast("B")


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("<?xml")[0].rstrip(" :") or type(error).__name__
    return text.splitlines()[0][:300]
