"""Converts a checkpoint to another format: files in parallel, in bounded memory, resumable after a kill.

``convert`` does it; ``prepare`` and ``run`` are its two halves, for callers that show the plan first.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model import objects
from ftckpt.universal.catalog import Catalog, Get, Reader, Tensor, Unit, Writer
from ftckpt.universal.consolidation import Consolidator, deriving, with_derived
from ftckpt.universal.storage import Journal, explained

MAX_MEMORY_BYTES = 4 << 30
_SPARE_BYTES = 64 << 20
"""Disk space reserved for manifests and objects."""

OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class Options:
    """``workers``: threads, each of which writes a file. ``max_memory``: limit in bytes for all of them together;
    memory mapped from files does not count. ``roles``: roles to convert, None: all. ``identity``: names and values
    that, besides the source's catalog, determine the output; a conversion resumes only if they are equal."""

    workers: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))
    max_memory: int = MAX_MEMORY_BYTES
    roles: frozenset[str] | None = None
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionReport:
    """Result of a conversion; an earlier attempt had written ``resumed`` of the ``files``."""

    tensors: int
    files: int
    resumed: int
    nbytes: int
    secs: float


@dataclass(frozen=True)
class Conversion:
    """Plan of a conversion: ``units`` are the files to write, ``get`` returns rows, also of derived weights.
    ``left_out``: keys of the source that the destination's format cannot hold."""

    reader: Reader
    writer: Writer
    catalog: Catalog
    tensors: tuple[Tensor, ...]
    units: tuple[Unit, ...]
    get: Get
    left_out: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Estimated bytes of all files."""
        return sum(unit.nbytes for unit in self.units)

    def memory(self) -> int:
        """Estimated maximum memory of one worker in bytes."""
        return max(map(self.writer.memory, self.units), default=0)


def convert(
    reader: Reader, writer: Writer, options: Options, on_bytes: OnBytes = lambda nbytes: None
) -> ConversionReport:
    """Write everything that ``reader`` has with ``writer``; one thread at a time calls ``on_bytes`` with progress.

    After an error or a kill the partial destination and its journal remain, from which the same call resumes.

    Raises:
        ConvertError: the source is incomplete or inconsistent, the destination exists or cannot be written, or
            another conversion started the partial one; the text names the tensor or the file.
    """
    return run(prepare(reader, writer, options), options, on_bytes)


def prepare(reader: Reader, writer: Writer, options: Options) -> Conversion:
    """Plan a conversion without writing anything. Raises ConvertError, see ``convert``."""
    consolidator = Consolidator(reader)
    get = deriving(reader.catalog, consolidator.tensors, consolidator.get)
    catalog, tensors = _selected(reader.catalog, consolidator.tensors, options.roles)
    tensors, get = writer.rename(catalog, tensors, get)
    units = tuple(writer.plan(catalog, tensors))
    if len({unit.name for unit in units}) != len(units):
        raise ConvertError("two files of the destination would have the same name")
    written = {part.tensor.key for unit in units for part in unit.parts}
    left_out = tuple(tensor.key for tensor in tensors if tensor.key not in written)
    return Conversion(reader, writer, catalog, tuple(tensors), units, get, left_out)


def run(conversion: Conversion, options: Options, on_bytes: OnBytes = lambda nbytes: None) -> ConversionReport:
    """Execute a planned conversion. Raises ConvertError, see ``convert``."""
    began = time.monotonic()
    writer, destination = conversion.writer, conversion.writer.destination
    journal = Journal(destination, _identity(conversion, options))
    report = partial(ConversionReport, len(conversion.tensors), len(conversion.units))
    # An earlier attempt was killed between the rename and the removal of the journal.
    if journal.already_done(unit.name for unit in conversion.units):
        journal.end()
        return report(len(conversion.units), 0, time.monotonic() - began)
    _check_memory(conversion, options)
    try:
        # Takes the lock, which the journal requires.
        destination.begin()
        done = journal.begin()
        left = [unit for unit in conversion.units if unit.name not in done]
        nbytes = sum(unit.nbytes for unit in left)
        # Only for the remaining files: the others are on the disk already.
        _check_space(destination.partial, nbytes)
        on_bytes(conversion.nbytes - nbytes)
        _write_all(conversion, left, options, journal, on_bytes)
        writer.finish(conversion.catalog, conversion.units)
    finally:
        destination.release()
    # After the rename: if a kill comes in between, ``already_done`` recognizes the destination by the journal.
    journal.end()
    return report(len(done), nbytes, time.monotonic() - began)


def _selected(
    catalog: Catalog, stored: Sequence[Tensor], roles: frozenset[str] | None
) -> tuple[Catalog, Sequence[Tensor]]:
    """Selects the tensors of ``roles``. Weights whose masters are not selected are written, not derived."""
    if roles is None:
        return catalog, stored
    every = with_derived(catalog, stored)
    known = {tensor.role for tensor in every}
    # ``weight,buffer`` must work for models without buffers too.
    tolerated = {"buffer"} if "weight" in roles else set()
    if not roles - tolerated <= known:
        unknown = ", ".join(sorted(roles - known))
        raise ConvertError(f"--roles: the source has no {unknown}; it has {', '.join(sorted(known)) or 'others'}")
    wanted = [tensor for tensor in every if tensor.role in roles]
    narrowed = replace(catalog, padded=catalog.padded & {tensor.key for tensor in wanted})
    # The masters are selected too: writers derive the weights that are not stored.
    if {"weight", "master"} <= roles:
        return narrowed, [tensor for tensor in stored if tensor.role in roles]
    return replace(narrowed, derived={}), wanted


def _identity(conversion: Conversion, options: Options) -> dict[str, str]:
    catalog = conversion.catalog
    digest = xxhash.xxh3_128()
    for fragment in catalog.fragments:
        # Order matters: ``read`` takes an index into the fragments.
        digest.update(repr(fragment.to_json()).encode())
    digest.update(repr((sorted(catalog.padded), sorted(catalog.average), sorted(catalog.derived.items()))).encode())
    digest.update(objects.encode(dict(catalog.objects)))
    return {
        **options.identity,
        "iteration": str(catalog.iteration),
        "origin": catalog.origin,
        "contents of the source": digest.hexdigest(),
        "state of the source's files": conversion.reader.fingerprint(),
        "roles": ",".join(sorted(options.roles)) if options.roles is not None else "all",
        "files": xxhash.xxh3_64_hexdigest(repr(conversion.units).encode()),
    }


def _check_memory(conversion: Conversion, options: Options) -> None:
    for unit in conversion.units:
        needed = conversion.writer.memory(unit)
        if needed > options.max_memory:
            largest = max(unit.parts, key=lambda part: part.nbytes).tensor.key if unit.parts else unit.name
            raise ConvertError(
                f"{unit.name}, for {largest}, needs {needed} bytes of memory, --max-memory allows "
                f"{options.max_memory}: raise --max-memory"
            )


def _check_space(directory: Path, nbytes: int) -> None:
    with explained(directory):
        free = shutil.disk_usage(directory).free
    if free < nbytes + _SPARE_BYTES:
        raise ConvertError(
            f"{directory}: no room: {nbytes + _SPARE_BYTES} bytes are needed, {free} are free; free some, then start "
            "the same command again, which keeps finished files"
        )


class _Cancel(Exception):
    """Raised in a worker after another one failed or the user interrupted the conversion."""


class _MemoryBudget:
    """``nbytes`` of memory that several threads share."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait for ``nbytes``, at most the whole budget, and reserve them inside.

        A thread that holds some never waits for more: no deadlock.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._left += nbytes
                # Not one thread: a small request may fit where the longest waiting one does not.
                self._changed.notify_all()


def one_at_a_time(on_bytes: OnBytes) -> OnBytes:
    """``on_bytes`` behind a lock, for concurrent threads."""
    guard = threading.Lock()

    def report(nbytes: int) -> None:
        with guard:
            on_bytes(nbytes)

    return report


def _write_all(
    conversion: Conversion, units: Sequence[Unit], options: Options, journal: Journal, on_bytes: OnBytes
) -> None:
    stop, memory, report = threading.Event(), _MemoryBudget(options.max_memory), one_at_a_time(on_bytes)

    def write(unit: Unit) -> None:
        left = unit.nbytes

        def get(tensor: Tensor, first: int, last: int) -> Bytes:
            nonlocal left
            if stop.is_set():
                raise _Cancel
            data = conversion.get(tensor, first, last)
            # A unit's size is an estimate, and some writers read twice: progress never exceeds it.
            reported = min(len(data), left)
            left -= reported
            report(reported)
            return data

        with memory.taken(conversion.writer.memory(unit)):
            # Another worker may have failed during the wait for memory.
            if stop.is_set():
                raise _Cancel
            conversion.writer.write(unit, get)
        # Before the journal has the file: a live job may have overwritten what is in it.
        conversion.reader.confirm()
        journal.add(unit.name)
        report(left)

    with ThreadPoolExecutor(max(1, options.workers), thread_name_prefix="ftckpt-convert") as pool:
        futures = [pool.submit(write, unit) for unit in units]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Before the wait for the pool: a worker in the middle of a file stops at its next rows.
            stop.set()
            pool.shutdown(cancel_futures=True)
    _raise_cause(futures)


def _raise_cause(futures: Sequence[Future[None]]) -> None:
    """Raise the error of a worker, if one failed."""
    errors = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    # Errors come before cancellations, which they caused.
    for error in sorted(errors, key=lambda error: isinstance(error, _Cancel)):
        raise error
