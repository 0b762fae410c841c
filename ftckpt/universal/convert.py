"""From a checkpoint in one format to one in another: files in parallel, in bounded memory, resumable after a kill."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import xxhash

from ftckpt.errors import ConvertError
from ftckpt.state import objects
from ftckpt.universal.atomic import explained
from ftckpt.universal.catalog import Bytes, Catalog, Get, Sink, Source, Tensor, Unit
from ftckpt.universal.derived import getting_derived, with_derived
from ftckpt.universal.fill import Filler
from ftckpt.universal.journal import Journal
from ftckpt.universal.room import Room
from ftckpt.universal.writer import STRIP_BYTES, SafetensorsSink, UniversalSink

MAX_MEMORY_BYTES = 4 << 30
_SPARE_BYTES = 64 << 20
"""Room on the disk for manifests and objects."""
_STRIPS = 3
"""A strip of rows, a cast of it, and what the source needs to put it together."""

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
class Report:
    """What a conversion did; ``resumed`` files were there from before."""

    tensors: int
    files: int
    resumed: int
    nbytes: int
    secs: float


@dataclass(frozen=True)
class Conversion:
    """What would be done: ``units`` are the files, ``get`` gives them rows. ``left_out`` are keys of the source that
    the destination's format has no place for."""

    source: Source
    sink: Sink
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
        return max((memory_of(self.sink, unit) for unit in self.units), default=0)


def convert(source: Source, sink: Sink, options: Options, on_bytes: OnBytes = lambda nbytes: None) -> Report:
    """Write all that ``source`` holds with ``sink``; ``on_bytes`` is told of progress, by one thread at a time.

    Broken off, by an error or a kill, it leaves the partial destination and its journal, with which the same call
    goes on.

    Raises:
        ConvertError: the source is not whole or disagrees with itself, the destination exists or cannot be written,
            or the partial one was begun with something else; the text names the tensor or the file.
    """
    return run(prepare(source, sink, options), options, on_bytes)


def prepare(source: Source, sink: Sink, options: Options) -> Conversion:
    """Decide everything and write nothing. Raises ConvertError, see ``convert``."""
    filler = Filler(source)
    catalog, tensors, get = _selected(source.catalog, filler, options.roles)
    units = tuple(sink.plan(catalog, tensors))
    names = {unit.name for unit in units}
    if len(names) != len(units):
        raise ConvertError("two files of the destination would have the same name")
    written = {part.tensor.key for unit in units for part in unit.parts}
    left_out = tuple(tensor.key for tensor in tensors if tensor.key not in written)
    return Conversion(source, sink, catalog, tuple(tensors), units, get, left_out)


def run(conversion: Conversion, options: Options, on_bytes: OnBytes = lambda nbytes: None) -> Report:
    """Do it. Raises ConvertError, see ``convert``."""
    began = time.monotonic()
    sink = conversion.sink
    journal = Journal(sink.destination, _identity(conversion, options))
    report = partial(Report, len(conversion.tensors), len(conversion.units))
    if journal.already_done(unit.name for unit in conversion.units):
        journal.end()
        return report(len(conversion.units), 0, time.monotonic() - began)
    _check_memory(conversion, options)
    try:
        sink.destination.begin()
        done = journal.begin()
        left = [unit for unit in conversion.units if unit.name not in done]
        nbytes = sum(unit.nbytes for unit in left)
        _check_space(sink.destination.partial, nbytes)
        on_bytes(conversion.nbytes - nbytes)
        _write_all(conversion, left, options, journal, on_bytes)
        sink.finish(conversion.catalog, conversion.units)
    finally:
        sink.destination.release()
    journal.end()
    return report(len(done), nbytes, time.monotonic() - began)


def memory_of(sink: Sink, unit: Unit) -> int:
    """Bytes that writing ``unit`` takes at most: what the sink says of itself with ``memory(unit)``, else all of the
    unit once more than it has, for sinks that put it together before they write it."""
    if isinstance(sink, (UniversalSink, SafetensorsSink)):
        rows = max((part.tensor.row_bytes for part in unit.parts), default=0)
        return min(_STRIPS * max(STRIP_BYTES, rows), _STRIPS * unit.nbytes)
    memory: Callable[[Unit], int] | None = getattr(sink, "memory", None)
    return memory(unit) if memory is not None else 2 * unit.nbytes


def _selected(
    catalog: Catalog, filler: Filler, roles: frozenset[str] | None
) -> tuple[Catalog, Sequence[Tensor], Get]:
    """The tensors of some roles. Weights that derive from masters that are not wanted are tensors like others."""
    if roles is None:
        return catalog, filler.tensors, filler.get
    every = with_derived(catalog, filler.tensors)
    known = {_role(tensor.key) for tensor in every}
    if not roles <= known:
        told = ", ".join(sorted(roles - known))
        raise ConvertError(f"--roles: the source has no {told}; it has {', '.join(sorted(known)) or 'others'}")
    wanted = {tensor.key: tensor for tensor in every if _role(tensor.key) in roles}
    if {"weight", "master"} <= roles:
        stored = [tensor for tensor in filler.tensors if tensor.key in wanted]
        return replace(catalog, padded=catalog.padded & wanted.keys()), stored, filler.get
    narrowed = replace(catalog, derived={}, padded=catalog.padded & wanted.keys())
    return narrowed, list(wanted.values()), getting_derived(catalog, filler.tensors, filler.get)


def _role(key: str) -> str:
    return key.partition("/")[0]


def _identity(conversion: Conversion, options: Options) -> dict[str, str]:
    catalog = conversion.catalog
    digest = xxhash.xxh3_128()
    for fragment in catalog.fragments:
        digest.update(repr(fragment.to_json()).encode())
    digest.update(repr((sorted(catalog.padded), sorted(catalog.average), sorted(catalog.derived.items()))).encode())
    digest.update(objects.encode(dict(catalog.objects)))
    return {
        **options.identity,
        "iteration": str(catalog.iteration),
        "origin": catalog.origin,
        "contents of the source": digest.hexdigest(),
        "state of the source's files": conversion.source.fingerprint(),
        "roles": ",".join(sorted(options.roles)) if options.roles is not None else "all",
        "files": xxhash.xxh3_64_hexdigest(repr(conversion.units).encode()),
    }


def _check_memory(conversion: Conversion, options: Options) -> None:
    for unit in conversion.units:
        needed = memory_of(conversion.sink, unit)
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


class _Stopped(Exception):
    """Another worker failed, or the user ended it."""


class _Counted:
    """Bytes of one unit that were asked for, told on; never more than the unit's own."""

    def __init__(self, unit: Unit, on_bytes: OnBytes) -> None:
        self._left = unit.nbytes
        self._on_bytes = on_bytes

    def add(self, nbytes: int) -> None:
        told = min(nbytes, self._left)
        self._left -= told
        self._on_bytes(told)

    def end(self) -> None:
        self.add(self._left)


def _write_all(
    conversion: Conversion, units: Sequence[Unit], options: Options, journal: Journal, on_bytes: OnBytes
) -> None:
    stop, guard, room = threading.Event(), threading.Lock(), Room(options.max_memory)

    def told(nbytes: int) -> None:
        with guard:
            on_bytes(nbytes)

    def write(unit: Unit) -> None:
        counted = _Counted(unit, told)

        def get(tensor: Tensor, first: int, last: int) -> Bytes:
            if stop.is_set():
                raise _Stopped
            data = conversion.get(tensor, first, last)
            counted.add(len(data))
            return data

        with room.taken(memory_of(conversion.sink, unit)):
            if stop.is_set():
                raise _Stopped
            conversion.sink.write(unit, get)
        conversion.source.confirm()  # what a live job has written over meanwhile does not count
        journal.add(unit.name)
        counted.end()

    with ThreadPoolExecutor(max(1, options.workers), thread_name_prefix="ftckpt-convert") as pool:
        futures = [pool.submit(write, unit) for unit in units]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    errors = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, _Stopped)):
        raise error
