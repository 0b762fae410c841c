"""From a checkpoint in one format to one in another: files in parallel, in bounded memory, resumable after a kill."""

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
"""Room on the disk for manifests and objects."""

OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class Options:
    """``workers`` files are written at once, in at most ``max_memory`` bytes together; what is mapped from files and
    can be dropped at any time does not count. ``roles``: tensors of these alone, None: all. ``identity``: names and
    values that decide what is written, beside the source's own catalog; a conversion goes on only where they are the
    same."""

    workers: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))
    max_memory: int = MAX_MEMORY_BYTES
    roles: frozenset[str] | None = None
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did; ``resumed`` files were there from before."""

    tensors: int
    files: int
    resumed: int
    nbytes: int
    secs: float


@dataclass(frozen=True)
class Conversion:
    """What would be done: ``units`` are the files, ``get`` gives them rows, also of weights that are casts of their
    masters. ``left_out`` are keys of the source that the destination's format has no place for."""

    reader: Reader
    writer: Writer
    catalog: Catalog
    tensors: tuple[Tensor, ...]
    units: tuple[Unit, ...]
    get: Get
    left_out: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files, estimated."""
        return sum(unit.nbytes for unit in self.units)

    def memory(self) -> int:
        """The most bytes that one worker needs, estimated."""
        return max(map(self.writer.memory, self.units), default=0)


def convert(
    reader: Reader, writer: Writer, options: Options, on_bytes: OnBytes = lambda nbytes: None
) -> ConversionReport:
    """Write all that ``reader`` has with ``writer``; ``on_bytes`` is called with progress, by one thread at a time.

    Broken off, by an error or a kill, it leaves the partial destination and its journal, with which the same call
    goes on.

    Raises:
        ConvertError: the source is not whole or disagrees with itself, the destination exists or cannot be written,
            or the partial one was begun with something else; the text names the tensor or the file.
    """
    return run(prepare(reader, writer, options), options, on_bytes)


def prepare(reader: Reader, writer: Writer, options: Options) -> Conversion:
    """Decide everything and write nothing. Raises ConvertError, see ``convert``."""
    consolidator = Consolidator(reader)
    get = deriving(reader.catalog, consolidator.tensors, consolidator.get)
    catalog, tensors = _selected(reader.catalog, consolidator.tensors, options.roles)
    units = tuple(writer.plan(catalog, tensors))
    if len({unit.name for unit in units}) != len(units):
        raise ConvertError("two files of the destination would have the same name")
    written = {part.tensor.key for unit in units for part in unit.parts}
    left_out = tuple(tensor.key for tensor in tensors if tensor.key not in written)
    return Conversion(reader, writer, catalog, tuple(tensors), units, get, left_out)


def run(conversion: Conversion, options: Options, on_bytes: OnBytes = lambda nbytes: None) -> ConversionReport:
    """Do it. Raises ConvertError, see ``convert``."""
    began = time.monotonic()
    writer, destination = conversion.writer, conversion.writer.destination
    journal = Journal(destination, _identity(conversion, options))
    report = partial(ConversionReport, len(conversion.tensors), len(conversion.units))
    # Killed after the rename and before the journal was gone: there is nothing left to do but that.
    if journal.already_done(unit.name for unit in conversion.units):
        journal.end()
        return report(len(conversion.units), 0, time.monotonic() - began)
    _check_memory(conversion, options)
    try:
        # The lock first: the journal is read and written by whoever has it.
        destination.begin()
        done = journal.begin()
        left = [unit for unit in conversion.units if unit.name not in done]
        nbytes = sum(unit.nbytes for unit in left)
        # Only what is left to write: an attempt that goes on has the rest on the disk already.
        _check_space(destination.partial, nbytes)
        on_bytes(conversion.nbytes - nbytes)
        _write_all(conversion, left, options, journal, on_bytes)
        writer.finish(conversion.catalog, conversion.units)
    finally:
        destination.release()
    # After the rename: a kill in between leaves a journal, by which ``already_done`` knows the destination.
    journal.end()
    return report(len(done), nbytes, time.monotonic() - began)


def _selected(
    catalog: Catalog, stored: Sequence[Tensor], roles: frozenset[str] | None
) -> tuple[Catalog, Sequence[Tensor]]:
    """The tensors of some roles. Weights that derive from masters that are not wanted are tensors like others."""
    if roles is None:
        return catalog, stored
    every = with_derived(catalog, stored)
    known = {tensor.role for tensor in every}
    # Whoever wants the weights alone names buffers, too, and need not know whether a model has any.
    tolerated = {"buffer"} if "weight" in roles else set()
    if not roles - tolerated <= known:
        unknown = ", ".join(sorted(roles - known))
        raise ConvertError(f"--roles: the source has no {unknown}; it has {', '.join(sorted(known)) or 'others'}")
    wanted = [tensor for tensor in every if tensor.role in roles]
    narrowed = replace(catalog, padded=catalog.padded & {tensor.key for tensor in wanted})
    # Masters are there too: what is not stored of the weights writers derive from them.
    if {"weight", "master"} <= roles:
        return narrowed, [tensor for tensor in stored if tensor.role in roles]
    return replace(narrowed, derived={}), wanted


def _identity(conversion: Conversion, options: Options) -> dict[str, str]:
    catalog = conversion.catalog
    digest = xxhash.xxh3_128()
    for fragment in catalog.fragments:
        # Order counts: ``read`` takes an index into the fragments.
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
                f"{unit.name}, for {largest}, takes {needed} bytes of memory, more than the {options.max_memory} of "
                f"--max-memory: raise it"
            )


def _check_space(directory: Path, nbytes: int) -> None:
    with explained(directory):
        free = shutil.disk_usage(directory).free
    if free < nbytes + _SPARE_BYTES:
        raise ConvertError(
            f"{directory}: no room: {nbytes + _SPARE_BYTES} bytes are needed, {free} are free; free some, then start "
            "the same command again; what is finished stays"
        )


class _Cancel(Exception):
    """Another worker failed, or the user ended it."""


class _MemoryBudget:
    """``nbytes`` that several threads divide among them."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes``, no more than there are in all, are left, and have them inside.

        Whoever has some waits for nobody, so that this ends.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._left += nbytes
                # All of them: one that wants little can go on where the longest waiting cannot.
                self._changed.notify_all()


def one_at_a_time(on_bytes: OnBytes) -> OnBytes:
    """``on_bytes`` for threads that report at the same time."""
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
            # A unit's bytes are an estimate, and some writers ask twice: never more than its own are reported.
            reported = min(len(data), left)
            left -= reported
            report(reported)
            return data

        with memory.taken(conversion.writer.memory(unit)):
            # Again: another worker may have failed while this one waited for memory.
            if stop.is_set():
                raise _Cancel
            conversion.writer.write(unit, get)
        # Before the file counts: what a live job has written over meanwhile may be in it.
        conversion.reader.confirm()
        journal.add(unit.name)
        report(left)

    with ThreadPoolExecutor(max(1, options.workers), thread_name_prefix="ftckpt-convert") as pool:
        futures = [pool.submit(write, unit) for unit in units]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Before the pool is waited for: a worker in the middle of a file sees it at its next rows.
            stop.set()
            pool.shutdown(cancel_futures=True)
    _raise_cause(futures)


def _raise_cause(futures: Sequence[Future[None]]) -> None:
    """Raise what made the first worker fail, if one did."""
    errors = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    # The first error is the cause; those that it cancelled have nothing to add.
    for error in sorted(errors, key=lambda error: isinstance(error, _Cancel)):
        raise error
