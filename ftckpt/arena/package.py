"""Packages: what other nodes keep of one shard at one snapshot, so that what parity rebuilds can be verified.

A package holds all that is small and that parity cannot prove: manifest, lineage, iteration, sequence, the
checksum of every chunk, the objects, and the volatile region itself. Byte map: ``FORMAT.md``.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.directory import arena_path
from ftckpt.arena.fresh import fresh_name, remove_half_made
from ftckpt.arena.image import SlotImage
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MemoryBudgetError, MismatchError
from ftckpt.state.manifest import Manifest

if TYPE_CHECKING:
    from ftckpt.arena.segment import Arena

MIRROR_NAME = ".mirror"
MAGIC = b"FTCKPTPK"
VERSION = 1
MAX_PACKAGE_BYTES = 1 << 30
"""Bound on a package, for whoever reads one from a socket or a file."""
MAX_SETS = 3
"""Most snapshots of which a node keeps packages: one protected, one older, and the one to be protected."""

_HEADER = struct.Struct("<8sI4x16sqQQQQQ")  # magic, version, lineage, iteration, sequence, four lengths
_TRAILER_BYTES = 16
_FILE_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\.([0-9a-f]{8})\.([0-9]{1,19})")


@dataclass(frozen=True)
class Package:
    """The contents of one package; ``chunk_hashes`` has one uint64 per chunk of the slot, volatile ones last."""

    manifest: Manifest
    lineage: bytes
    iteration: int
    sequence: int
    chunk_hashes: npt.NDArray[np.uint64]
    objects: bytes
    volatile: bytes

    @property
    def shard(self) -> str:
        """The shard it was made of."""
        return self.manifest.shard

    def encode(self) -> bytes:
        """The bytes that ``unpack`` reads.

        Raises:
            ArenaError: more than ``MAX_PACKAGE_BYTES``.
        """
        table = self.chunk_hashes.astype("<u8").tobytes()
        parts = (self.manifest.encode(), table, self.objects, self.volatile)
        lengths = [len(part) for part in parts]
        if _HEADER.size + sum(lengths) + _TRAILER_BYTES > MAX_PACKAGE_BYTES:
            raise ArenaError(
                f"{self.shard}: a package of {sum(lengths)} bytes, at most {MAX_PACKAGE_BYTES} are allowed; "
                "hold less in objects and volatile state"
            )
        header = _HEADER.pack(MAGIC, VERSION, self.lineage, self.iteration, self.sequence, *lengths)
        body = b"".join((header, *parts))
        return body + xxhash.xxh3_128_digest(body)


@dataclass(frozen=True, order=True)
class PackageName:
    """A package file: of which shard and snapshot its name says it is; ``lineage8`` are 8 hex digits."""

    shard: str
    lineage8: str
    iteration: int
    path: Path


def pack(arena: Arena, slot: int) -> bytes:
    """The package of the snapshot in ``slot``.

    What it holds is compared with the checksums while it is copied; the caller has a lease on the slot.

    Raises:
        ArenaError: no snapshot, one without checksums yet, or one that was given up meanwhile.
        CorruptError: objects or volatile state do not match their checksums.
    """
    record, hashes = arena.control.record(slot), arena.hashes(slot)
    if not record.sealed or hashes is None:
        raise ArenaError(f"{arena.path}: slot {slot} holds no snapshot with checksums")
    image = arena.image
    with arena.slot(slot) as data:
        volatile = bytes(data[image.volatile.begin : image.volatile.end])
    with arena.read_objects(slot) as view:
        objects = bytes(view)
    again = arena.control.record(slot)
    if (again.sealed, again.lineage, again.iteration, again.sequence) != (
        True, record.lineage, record.iteration, record.sequence,
    ):  # fmt: skip
        raise ArenaError(f"{arena.path}: slot {slot} was given up while it was read")
    if xxhash.xxh3_64_intdigest(objects) != record.objects_hash:
        raise CorruptError(f"{arena.path}: slot {slot}: objects do not match their checksum")
    _check_volatile(image, hashes, volatile)
    package = Package(image.manifest, record.lineage, record.iteration, record.sequence, hashes, objects, volatile)
    return package.encode()


def unpack(data: bytes | bytearray | memoryview) -> Package:
    """Inverse of ``Package.encode``; every length is compared with the bytes at hand before it is used.

    Raises:
        CorruptError: not a package, damaged, or one that contradicts its own manifest.
        MismatchError: a package of another format version.
    """
    with memoryview(data) as view, view.cast("B") as raw:
        lengths, fields = _read_header(raw)
        at, parts = _HEADER.size, []
        for length in lengths:
            parts.append(bytes(raw[at : at + length]))
            at += length
    text, table, objects, volatile = parts
    manifest = Manifest.decode(text)
    try:
        arena_path(Path(), manifest)  # a shard that is no file name is refused
        image = SlotImage.of(manifest)
    except (ArenaError, ConfigError, ValueError, TypeError, ArithmeticError) as error:
        raise CorruptError(f"package: bad manifest: {str(error)[:200]}") from None
    if len(table) != 8 * len(image.chunks) or len(volatile) != image.volatile.nbytes:
        raise CorruptError(
            f"package of {manifest.shard}: {len(table) // 8} checksums, {len(volatile)} bytes volatile"
        )
    if len(objects) > manifest.objects_bytes:
        raise CorruptError(f"package of {manifest.shard}: {len(objects)} bytes of objects")
    hashes = np.frombuffer(table, "<u8").astype(np.uint64, copy=False)
    _check_volatile(image, hashes, volatile)
    return Package(manifest, *fields, hashes, objects, volatile)


def mirror_dir(node_dir: Path) -> Path:
    """Where a node keeps packages."""
    return node_dir / MIRROR_NAME


def package_path(node_dir: Path, shard: str, lineage: bytes, iteration: int) -> Path:
    """Where the package of ``shard`` at a snapshot lies in a node's directory."""
    return mirror_dir(node_dir) / f"{shard}.{lineage.hex()[:8]}.{iteration}"


def store(node_dir: Path, data: bytes) -> Path:
    """Write a package, whole or not at all, in place of an older one of that name; returns its path.

    One process stores and prunes in a node's directory, from any thread: the last one stays.

    Raises:
        CorruptError, MismatchError: as ``unpack``; nothing is written.
        MemoryBudgetError: the file system has no room; nothing is left behind.
        ArenaError: it cannot be written.
    """
    package = unpack(data)
    path = package_path(node_dir, package.shard, package.lineage, package.iteration)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with fresh_name(path) as fresh:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                os.posix_fallocate(fd, 0, len(data))
                file.write(data)
            fresh.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise MemoryBudgetError(
                f"{path}: no room for {len(data)} bytes; enlarge the tmpfs (mount -o remount,size=…) "
                "or name another with --ftckpt-arena"
            ) from None
        raise ArenaError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def load(path: Path) -> Package:
    """Read a package file.

    Raises:
        CorruptError: missing, unreadable, too long, damaged, or not the package that its name announces.
        MismatchError: of another format version.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            nbytes = os.fstat(fd).st_size
            if nbytes > MAX_PACKAGE_BYTES:
                raise CorruptError(f"{path}: more than {MAX_PACKAGE_BYTES} bytes")
            data = file.read(nbytes + 1)  # a larger number would be allocated
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror}") from None
    package = unpack(data)
    if package_path(path.parent.parent, package.shard, package.lineage, package.iteration).name != path.name:
        raise CorruptError(f"{path}: holds {package.shard} at iteration {package.iteration}")
    return package


def list_packages(node_dir: Path) -> list[PackageName]:
    """The packages a node keeps, sorted, by their names alone; ``load`` tells whether they are sound."""
    try:
        entries = sorted(mirror_dir(node_dir).iterdir())
    except OSError:
        return []
    names = []
    for path in entries:
        match = _FILE_NAME.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink():
            names.append(PackageName(match[1], match[2], int(match[3]), path))
    return sorted(names)


def prune(node_dir: Path, keep: Collection[tuple[str, int]]) -> list[Path]:
    """Delete packages of other snapshots than those to ``keep`` (lineage8, iteration), and half-written ones.

    Returns:
        what was deleted.
    """
    doomed = [name.path for name in list_packages(node_dir) if (name.lineage8, name.iteration) not in keep]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed + remove_half_made(mirror_dir(node_dir))


def _read_header(raw: memoryview) -> tuple[list[int], tuple[bytes, int, int]]:
    """Lengths of the four parts; lineage, iteration, sequence. The checksum over all is verified."""
    nbytes = len(raw)
    if nbytes < _HEADER.size + _TRAILER_BYTES or nbytes > MAX_PACKAGE_BYTES or bytes(raw[:8]) != MAGIC:
        raise CorruptError(f"package: {nbytes} bytes that are no package")
    body, trailer = raw[:-_TRAILER_BYTES], bytes(raw[-_TRAILER_BYTES:])
    if xxhash.xxh3_128_digest(body) != trailer:
        raise CorruptError("package: checksum does not match")
    _, version, lineage, iteration, sequence, *lengths = _HEADER.unpack_from(body)
    if version != VERSION:
        raise MismatchError(f"package has format version {version}, this ftckpt reads {VERSION}")
    if _HEADER.size + sum(lengths) != len(body) or iteration < 0:
        raise CorruptError(f"package: parts of {lengths} bytes in {nbytes}")
    return lengths, (lineage, iteration, sequence)


def _check_volatile(image: SlotImage, hashes: npt.NDArray[np.uint64], volatile: bytes) -> None:
    view = memoryview(volatile)
    for chunk in range(image.num_stepped_chunks, len(image.chunks)):
        begin, end = (at - image.volatile.begin for at in (image.chunks[chunk].begin, image.chunks[chunk].end))
        if xxhash.xxh3_64_intdigest(view[begin:end]) != int(hashes[chunk]):
            raise CorruptError(f"{image.manifest.shard}: volatile state does not match the checksum of chunk {chunk}")
