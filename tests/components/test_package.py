"""Packages: a mirrored package is complete, and of the snapshot that it names, or refused."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ftckpt.errors import ArenaError, CorruptError, MemoryBudgetError
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import list_arenas, node_directory
from ftckpt.memory.package import Package, list_packages, load, mirror_dir, pack, package_path, prune, store, unpack
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from tests.support import snapshots
from tests.support.errors import raises
from tests.support.killing import fails_with

WEIGHTS = Fragment.whole("w", "F32", (64, 100), Box((0, 0), (64, 100)))
RNG = Fragment.whole("rng", "U8", (9000,), Box((0,), (9000,)))
MANIFEST = Manifest({"tp": 0, "pp": 1}, {"tp": 1}, (WEIGHTS,), (RNG,), 5000, 8192)
LINEAGE = b"l" * 16


@pytest.fixture
def node_dir(arena_root: Path) -> Path:
    return node_directory(arena_root, "job", "node")


@pytest.fixture
def arena(node_dir: Path) -> Iterator[Arena]:
    made = Arena.create(node_dir, MANIFEST, 2)
    yield made
    made.close()


def write(arena: Arena, slot: int, iteration: int, hashed: bool = True, objects: bytes = b"objects") -> None:
    random = np.random.default_rng(iteration)
    snapshots.store(arena, slot, (random.bytes(one.nbytes) for one in arena.manifest.fragments), objects)
    snapshots.seal(arena, slot, iteration, hashed, LINEAGE)


def hand_made(iteration: int = 3, coords: dict[str, int] | None = None) -> Package:
    manifest = Manifest(coords or {"dp": 0}, {}, (), (Fragment.whole("r", "U8", (4,), Box((0,), (4,))),), 10, 4096)
    hashes = np.array([xxhash.xxh3_64_intdigest(b"rngs")], np.uint64)
    return Package(manifest, SnapshotId(LINEAGE, iteration), 9, hashes, b"objects", b"rngs")


def assert_is_of(found: Package, arena: Arena, slot: int) -> None:
    record = arena.control.record(slot)
    assert found.manifest == arena.manifest and found.shard == "tp0-pp1"
    assert (found.snapshot, found.sequence) == record.seal_id
    assert found.chunk_hashes.tolist() == [arena.hash_chunk(slot, c) for c in range(len(arena.image.chunks))]
    assert found.objects == b"objects"
    with arena.slot(slot) as data:
        assert found.volatile == bytes(data[arena.image.volatile.begin : arena.image.volatile.end])


def test_a_package_holds_what_parity_cannot_prove(arena: Arena) -> None:
    write(arena, 1, 7)
    assert_is_of(unpack(pack(arena, 1)), arena, 1)
    assert_is_of(unpack(memoryview(bytearray(pack(arena, 1)))), arena, 1)


def test_bad_bytes_are_not_packed(arena: Arena) -> None:
    image = arena.image
    for at, text in (
        (image.volatile.begin, f"chunk {image.num_stepped_chunks}"),
        (image.volatile.end - 1, f"chunk {len(image.chunks) - 1}"),
        (image.objects.begin, "objects do not match"),
    ):
        write(arena, 0, 3)
        with arena.slot(0) as data:
            data[at] ^= 1
        with pytest.raises(CorruptError, match=text):
            pack(arena, 0)


def changed(**fields: object) -> bytes:
    good = hand_made()
    values = {name: getattr(good, name) for name in good.__dataclass_fields__} | fields
    return Package(**values).encode()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"volatile": b"rng"}, "3"),
        ({"volatile": b"rngS"}, "0"),
        ({"chunk_hashes": np.zeros(2, np.uint64)}, "2"),
        ({"objects": b"more than ten"}, "13"),
        ({"manifest": Manifest({"../dp": 0}, {}, (), (), 10, 4096)}, ""),
        ({"manifest": Manifest({"dp": 0}, {}, (), (), 10, 0)}, ""),
    ],
)
def test_what_contradicts_its_manifest_is_refused(fields: dict[str, object], text: str) -> None:
    with raises(CorruptError, *text.split()):
        unpack(changed(**fields))


def test_store_list_load_prune(node_dir: Path) -> None:
    assert list_packages(node_dir) == [] and prune(node_dir, set()) == []
    for iteration in (3, 20, 100):
        for dp in (0, 1):
            path = store(node_dir, hand_made(iteration, {"dp": dp}).encode())
            assert path == package_path(node_dir, f"dp{dp}", SnapshotId(LINEAGE, iteration))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(mirror_dir(node_dir).stat().st_mode) == 0o700
    names = list_packages(node_dir)
    assert [(n.shard, n.snapshot) for n in names] == [
        (f"dp{dp}", SnapshotId(LINEAGE, iteration)) for dp in (0, 1) for iteration in (3, 20, 100)
    ]
    assert load(names[1].path).snapshot.iteration == 20 and load(names[1].path).volatile == b"rngs"
    assert list_arenas(node_dir) == []
    stranger_lineage = "0123456789abcdef" * 2
    strangers = [f"dp0.{stranger_lineage}.x", f"dp0.{stranger_lineage[:-1]}.3", f"dp0.{stranger_lineage[:-1]}G.3"]
    for stranger in ("notes", f".dp0.{stranger_lineage}.3.0123abcd.new", *strangers):
        (mirror_dir(node_dir) / stranger).write_bytes(b"")
    assert list_packages(node_dir) == names
    gone = prune(node_dir, {SnapshotId(LINEAGE, 20), SnapshotId(b"x" * 16, 100)})
    assert len(gone) == 5 and [n.snapshot.iteration for n in list_packages(node_dir)] == [20, 20]
    assert not (mirror_dir(node_dir) / f".dp0.{stranger_lineage}.3.0123abcd.new").exists()
    assert (mirror_dir(node_dir) / "notes").exists()


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, MemoryBudgetError), (errno.EIO, ArenaError)])
def test_no_room_leaves_the_old_one(
    node_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    path = store(node_dir, hand_made().encode())
    monkeypatch.setattr(os, "posix_fallocate", fails_with(code))
    with pytest.raises(kind):
        store(node_dir, changed(objects=b"later"))
    assert load(path).objects == b"objects" and list(path.parent.iterdir()) == [path]


STORE = """
import sys
from pathlib import Path
from ftckpt.memory.package import store
data = Path(sys.argv[2]).read_bytes()
print("up", flush=True)
while True:
    store(Path(sys.argv[1]), data)
"""


def test_a_slot_given_up_while_it_is_read_is_no_package(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    write(arena, 0, 3)
    read_objects = arena.read_objects

    def late(slot: int) -> memoryview:
        write(arena, slot, 4)
        return read_objects(slot)

    monkeypatch.setattr(arena, "read_objects", late)
    with raises(ArenaError):
        pack(arena, 0)
