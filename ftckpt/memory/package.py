"""Packages: the part of a shard that is mirrored to other nodes, so that reconstructed bytes can be verified.

A package has the small data that parity does not protect: manifest, snapshot, sequence, the checksum of every chunk,
the objects, and the mutable state itself. It is a record file (``record``) with a copy of the slot's record. Its text
is the manifest, its body the objects and the mutable state, covered by checksums in that record: ``FORMAT.md``.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.errors import ArenaError, ConfigError, CorruptError
from ftckpt.memory.atomic_files import fresh_name, remove_unfinished
from ftckpt.memory.directory import MIRROR_NAME, SHARD_PATTERN, arena_path
from ftckpt.memory.image import SlotImage
from ftckpt.memory.mapping import reserve
from ftckpt.memory.record import Format, Header, Records, Stores
from ftckpt.model.manifest import MAX_CHUNKS, Manifest
from ftckpt.model.snapshot import SnapshotId

if TYPE_CHECKING:
    from ftckpt.memory.arena import Arena

FORMAT = Format("package", b"FTCKPTPK", 1)
MAX_PACKAGE_BYTES = 1 << 30
"""Maximum size of a package, checked by readers of sockets and files."""

_FIELDS = struct.Struct("<QQQ")  # sequence, bytes of objects, their hash: as in a control block
_FILE_NAME = re.compile(rf"({SHARD_PATTERN})\.([0-9a-f]+\.[0-9]+)")


@dataclass(frozen=True)
class Package:
    """The contents of one package. ``chunk_hashes`` has one uint64 per chunk of the slot, mutable state last."""

    manifest: Manifest
    snapshot: SnapshotId
    sequence: int
    chunk_hashes: npt.NDArray[np.uint64]
    objects: bytes
    volatile: bytes

    @property
    def shard(self) -> str:
        """The name of the shard."""
        return self.manifest.shard

    def encode(self) -> bytearray:
        """Serialize for ``unpack``.

        Raises:
            ArenaError: more than ``MAX_PACKAGE_BYTES``.
        """
        text, words = self.manifest.encode(), len(self.chunk_hashes)
        begin = FORMAT.text_offset(1, words) + len(text)
        behind = begin + len(self.objects)
        nbytes = behind + len(self.volatile)
        if nbytes > MAX_PACKAGE_BYTES:
            raise ArenaError(
                f"{self.shard}: a package of {nbytes} bytes, at most {MAX_PACKAGE_BYTES} are allowed; "
                "reduce objects and mutable state"
            )
        data = bytearray(nbytes)
        with memoryview(data) as view:
            FORMAT.write(view, Header(1, words, nbytes, text))
            record = Records(Stores(view), FORMAT.records_offset, 1, words)
            objects_hash = xxhash.xxh3_64_intdigest(self.objects)
            record.put_fields(0, _FIELDS.pack(self.sequence, len(self.objects), objects_hash))
            record.put_words(0, self.chunk_hashes.astype("<u8").tobytes())
            record.seal(0, self.snapshot)
            view[begin:behind], view[behind:] = self.objects, self.volatile
        return data


@dataclass(frozen=True, order=True)
class PackageName:
    """The parsed name of a package file."""

    shard: str
    snapshot: SnapshotId
    path: Path


def pack(arena: Arena, slot: int) -> bytearray:
    """Create the package of the snapshot in ``slot`` and verify its contents.

    Raises:
        ArenaError: no snapshot, one without checksums yet, or one that was dropped during the copy.
        CorruptError: objects or mutable state do not match their checksums.
    """
    record, hashes = arena.control.record(slot), arena.hashes(slot)
    if record.snapshot is None or hashes is None:
        raise ArenaError(f"{arena.path}: slot {slot} has no snapshot with checksums")
    image = arena.image
    with arena.slot(slot) as data:
        volatile = bytes(data[image.volatile.begin : image.volatile.end])
    with arena.read_objects(slot) as view:
        objects = bytes(view)
    # Checked after the copy, which may have read bytes of a later snapshot.
    if arena.control.record(slot).seal_id != record.seal_id:
        raise ArenaError(f"{arena.path}: slot {slot} was overwritten during the read")
    if xxhash.xxh3_64_intdigest(objects) != record.objects_hash:
        raise CorruptError(f"{arena.path}: slot {slot}: objects do not match their checksum")
    _check_volatile(image, hashes, volatile)
    package = Package(image.manifest, record.snapshot, record.sequence, hashes, objects, volatile)
    return package.encode()


def unpack(data: bytes | bytearray | memoryview) -> Package:
    """Inverse of ``Package.encode``; every length is checked against the length of ``data`` before it is used.

    Raises:
        CorruptError: not a package, corrupt, or inconsistent with its manifest.
        MismatchError: a package of another format version.
    """
    with memoryview(data) as view, view.cast("B") as raw:
        if len(raw) > MAX_PACKAGE_BYTES:
            raise CorruptError(f"package: more than {MAX_PACKAGE_BYTES} bytes")
        header = FORMAT.read(raw)
        if header.records != 1 or header.words > MAX_CHUNKS:
            raise CorruptError(f"package: {header.records} records of {header.words} words")
        record = Records(Stores(raw), FORMAT.records_offset, 1, header.words).read(0)
        if record.snapshot is None or record.flags:
            raise CorruptError("package: its record is not sealed")
        sequence, used, objects_hash = _FIELDS.unpack(record.fields)
        body = FORMAT.body_offset(header)
        # If ``used`` exceeds the body, the check of the length of ``objects`` fails below. Each byte is copied once:
        # a package may be large for the process's memory limit.
        objects, volatile = bytes(raw[body : body + used]), bytes(raw[body + used :])
    manifest = Manifest.decode(header.text)
    try:
        arena_path(Path(), manifest)  # rejects a shard name that is not a valid file name
        image = SlotImage.of(manifest)
    except (ArenaError, ConfigError, ValueError, TypeError, ArithmeticError) as error:
        raise CorruptError(f"package: bad manifest: {str(error)[:200]}") from None
    if header.words != len(image.chunks) or len(volatile) != image.volatile.nbytes:
        raise CorruptError(
            f"package of {manifest.shard}: {header.words} checksums, {len(volatile)} bytes of mutable state"
        )
    if len(objects) != used or used > manifest.objects_bytes:
        raise CorruptError(f"package of {manifest.shard}: {used} bytes of objects")
    if xxhash.xxh3_64_intdigest(objects) != objects_hash:
        raise CorruptError(f"package of {manifest.shard}: objects do not match their checksum")
    _check_volatile(image, record.words, volatile)
    return Package(manifest, record.snapshot, sequence, record.words, objects, volatile)


def mirror_dir(node_dir: Path) -> Path:
    """The directory of a node's packages."""
    return node_dir / MIRROR_NAME


def package_path(node_dir: Path, shard: str, snapshot: SnapshotId) -> Path:
    """Path of the package of ``shard`` at a snapshot in a node's directory."""
    return mirror_dir(node_dir) / f"{shard}.{snapshot}"


def store(node_dir: Path, data: bytes | bytearray) -> Path:
    """Write a package atomically, replacing an older one of that name; returns its path.

    One process stores and prunes in a node's directory, from any thread; the last store wins.

    Raises:
        CorruptError, MismatchError: as ``unpack``; nothing is written.
        MemoryBudgetError: the file system is full; no file is left.
        ArenaError: it cannot be written.
    """
    # Verified before it replaces a good one: it may come from another node.
    package = unpack(data)
    path = package_path(node_dir, package.shard, package.snapshot)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with fresh_name(path) as fresh:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                # Allocated first: a full tmpfs is detected before the first write.
                reserve(fd, path, 0, len(data))
                file.write(data)
            fresh.rename(path)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def load(path: Path) -> Package:
    """Read a package file.

    Raises:
        CorruptError: missing, unreadable, too long, corrupt, or not the package that its name says.
        MismatchError: of another format version.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            nbytes = os.fstat(fd).st_size
            if nbytes > MAX_PACKAGE_BYTES:
                raise CorruptError(f"{path}: more than {MAX_PACKAGE_BYTES} bytes")
            data = file.read(nbytes + 1)  # not MAX_PACKAGE_BYTES: ``read`` allocates the requested size
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror}") from None
    package = unpack(data)
    if package_path(path.parent.parent, package.shard, package.snapshot).name != path.name:
        raise CorruptError(f"{path}: contains {package.shard} at iteration {package.snapshot.iteration}")
    return package


@contextmanager
def mapped_package(node_dir: Path, shard: str, snapshot: SnapshotId) -> Iterator[memoryview]:
    """Map a package file, unverified, for the duration of the block. A shared mapping takes no additional memory.

    Raises:
        OSError: missing or unreadable.
        ValueError: empty, or too long for a package.
    """
    path = package_path(node_dir, shard, snapshot)
    # Package files are replaced by rename, never modified or truncated: a mapping does not change.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_PACKAGE_BYTES:
            raise ValueError(f"{path}: more than {MAX_PACKAGE_BYTES} bytes")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with mapping, memoryview(mapping) as data:
        yield data


def list_packages(node_dir: Path) -> list[PackageName]:
    """The packages on a node, sorted; only their names are read."""
    try:
        entries = sorted(mirror_dir(node_dir).iterdir())
    except OSError:
        return []
    names = []
    for path in entries:
        match = _FILE_NAME.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink():
            with suppress(ValueError):
                names.append(PackageName(match[1], SnapshotId.parse(match[2]), path))
    return sorted(names)


def prune(node_dir: Path, keep: Collection[SnapshotId]) -> list[Path]:
    """Delete packages of snapshots not in ``keep``, and unfinished files; returns the deleted paths."""
    doomed = [name.path for name in list_packages(node_dir) if name.snapshot not in keep]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed + remove_unfinished(mirror_dir(node_dir))


def _check_volatile(image: SlotImage, hashes: npt.NDArray[np.uint64], volatile: bytes) -> None:
    view = memoryview(volatile)
    for chunk in range(image.num_stepped_chunks, len(image.chunks)):
        begin, end = (at - image.volatile.begin for at in (image.chunks[chunk].begin, image.chunks[chunk].end))
        if xxhash.xxh3_64_intdigest(view[begin:end]) != int(hashes[chunk]):
            raise CorruptError(f"{image.manifest.shard}: volatile state does not match the checksum of chunk {chunk}")
