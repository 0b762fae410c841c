"""Snapshots in arenas as a source: only complete ones, only good bytes, and never two snapshots mixed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftckpt.errors import ConvertError
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import list_arenas
from ftckpt.model import objects
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest, Section
from ftckpt.model.snapshot import SnapshotId
from ftckpt.universal.arenas import ArenaReader, ShardFragment, recognises, without_doubles
from ftckpt.universal.formats import ReadOptions, open_reader
from tests.support import snapshots
from tests.support.errors import lacks, raises

LINEAGE = b"l" * 16
LAYOUT = {"tp": 2, "dp": 2}
SHARDS = [{"tp": tp, "dp": dp} for tp in range(2) for dp in range(2)]
SHAPES = {"master/rows": (6, 5), "master/columns": (4, 6), "weight/frozen": (3,), "buffer/bias": (4,)}


def whole(key: str, iteration: int) -> np.ndarray[Any, Any]:
    """A tensor that its key and the iteration decide."""
    shape = SHAPES[key]
    return (np.arange(math.prod(shape), dtype=np.float32) + 100 * iteration + len(key)).reshape(shape)


def fragments(tp: int, dp: int) -> tuple[list[Fragment], list[Fragment]]:
    rows, columns = Box((3 * tp, 0), (3, 5)), Box((0, 3 * tp), (4, 3))
    shard = f"tp{tp}-dp{dp}"
    stepped = [
        Fragment("master/rows", "F32", (6, 5), rows, *((0, 7) if dp == 0 else (7, 15))),
        Fragment("master/columns", "F32", (4, 6), columns, *((0, 4) if dp == 0 else (4, 12))),
        Fragment("weight/frozen", "F32", (3,), Box((0,), (3,)), *((0, 1), (1, 2), (2, 3), (3, 3))[2 * tp + dp]),
    ]
    volatile = [
        Fragment.whole(f"buffer/bias@{shard}", "F32", (4,), Box((0,), (4,))),
        Fragment.whole(f"local/0.scratch@{shard}", "F32", (2,), Box((0,), (2,))),
    ]
    return stepped, volatile


def content(fragment: Fragment, iteration: int) -> bytes:
    key = fragment.key.partition("@")[0]
    if key not in SHAPES:
        return b"\x7f" * fragment.nbytes
    box = tuple(slice(o, o + n) for o, n in zip(fragment.box.offset, fragment.box.shape, strict=True))
    return whole(key, iteration)[box].reshape(-1)[fragment.start : fragment.stop].tobytes()


def seal(arena: Arena, slot: int, iteration: int, hashed: bool = True, lineage: bytes = LINEAGE) -> None:
    encoded = objects.encode({"iteration": iteration, "shard": arena.manifest.shard})
    snapshots.store(arena, slot, (content(one, iteration) for one in arena.manifest.fragments), encoded)
    snapshots.seal(arena, slot, iteration, hashed, lineage)


def job(root: Path, layout: Mapping[str, Any] = LAYOUT, derived: tuple[str, ...] = ()) -> Path:
    """Two nodes, each with both shards of one tp, whose slots hold iterations 4 and 5."""
    for coords in SHARDS:
        node = root / "ftckpt-job" / f"node{coords['tp']}"
        node.mkdir(parents=True, exist_ok=True)
        stepped, volatile = fragments(coords["tp"], coords["dp"])
        sections: tuple[Section, ...] = ()
        if coords == {"tp": 1, "dp": 1}:  # it has a copy of another's share, and parity
            other = fragments(0, 1)[0]
            parity = Fragment.whole("__parity__/g", "U8", (8,), Box((0,), (8,)))
            sections = (
                Section("shared", len(stepped), "g"), Section("copy", len(other), "g", "tp0-dp1"),
                Section("parity", 1, "g"),
            )  # fmt: skip
            stepped = [*stepped, *other, parity]
        manifest = Manifest(
            coords, layout, tuple(stepped), tuple(volatile), 4096, 48, sections=sections, padded=("master/rows",),
            derived=derived if coords["tp"] else (),
        )  # fmt: skip
        arena = Arena.create(node, manifest, 2)
        for slot, iteration in enumerate((4, 5)):
            seal(arena, slot, iteration)
        arena.close()
    return root / "ftckpt-job"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return job(tmp_path)


def consolidated(source: ArenaReader) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor from its fragments; each element must be there once."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    times: dict[str, np.ndarray[Any, Any]] = {}
    for index, fragment in enumerate(source.catalog.fragments):
        tensor = found.setdefault(fragment.key, np.zeros(fragment.global_shape, np.float32))
        count = times.setdefault(fragment.key, np.zeros(fragment.global_shape, int))
        box = tuple(slice(o, o + n) for o, n in zip(fragment.box.offset, fragment.box.shape, strict=True))
        flat, here = tensor[box].reshape(-1), count[box].reshape(-1)
        flat[fragment.start : fragment.stop] = source.read(index).view(np.float32)
        here[fragment.start : fragment.stop] += 1
        tensor[box], count[box] = flat.reshape(fragment.box.shape), here.reshape(fragment.box.shape)
    source.confirm()
    assert all((count == 1).all() for count in times.values())
    return found


def check(source: ArenaReader, iteration: int) -> None:
    found = consolidated(source)
    assert found.keys() == SHAPES.keys() and source.catalog.iteration == iteration
    for key, tensor in found.items():
        np.testing.assert_array_equal(tensor, whole(key, iteration))


def arena_of(path: Path, shard: str) -> Arena:
    return next(
        Arena.open(arena, writable=True)
        for node in path.iterdir()
        for arena in list_arenas(node)
        if arena.name.startswith(f"{shard}.")
    )


def test_the_newest_snapshot_is_read_as_one_model(path: Path) -> None:
    source = ArenaReader([path])
    check(source, 5)
    catalog = source.catalog
    assert (catalog.origin, catalog.layout) == ("ftckpt", LAYOUT)
    assert catalog.objects == {"shards": {"tp0-dp0": {"iteration": 5, "shard": "tp0-dp0"}}}
    assert catalog.derived == {}
    assert {fragment.key.partition("/")[0] for fragment in catalog.fragments} == {"master", "weight", "buffer"}
    assert all("@" not in fragment.key for fragment in catalog.fragments)
    source.close()


def test_an_older_one_by_its_number_and_other_ways_to_name_where(path: Path, tmp_path: Path) -> None:
    check(ArenaReader([path], iteration=4), 4)
    check(ArenaReader([path / "node0", path / "node1"]), 5)
    check(ArenaReader([*list_arenas(path / "node0"), path / "node1", path]), 5)
    check(ArenaReader([shutil.copytree(path, tmp_path / "copy")]), 5)
    assert recognises(path) and recognises(path / "node0") and recognises(list_arenas(path / "node0")[0])
    assert not recognises(tmp_path / "nothing") and not recognises(tmp_path)


def test_types_of_weights_that_are_casts(tmp_path: Path) -> None:
    path, casts = job(tmp_path, derived=("F16",)), {"weight/rows": "F16", "weight/columns": "F16"}
    catalog = ArenaReader([path]).catalog
    assert catalog.derived == casts and catalog.padded == {"master/rows", "weight/rows"}
    only = ArenaReader([path], roles={"master"}).catalog
    assert only.derived == {} and {f.key.partition("/")[0] for f in only.fragments} == {"master"}
    weights = open_reader([path], ReadOptions(roles=frozenset({"weight"}))).catalog
    assert weights.derived == casts and not any(f.key.startswith("buffer/") for f in weights.fragments)


def remove(path: Path) -> None:
    arena_of(path, "tp1-dp0").remove()


def void_newest(path: Path) -> None:
    arena_of(path, "tp1-dp0").control.void(1)


def test_only_what_all_shards_have(path: Path, tmp_path: Path) -> None:
    void_newest(path)
    check(ArenaReader([path]), 4)
    with raises(ConvertError, "iteration 5", "tp1-dp0", "4 shards", "parity"):
        ArenaReader([path], iteration=5)
    with raises(ConvertError, "iteration 9", "4, 5"):
        ArenaReader([path], iteration=9)
    with raises(ConvertError, "tp1-dp0, tp1-dp1", "4 shards"):
        ArenaReader([path / "node0"])
    remove(path)
    with raises(ConvertError, "5", "tp1-dp0", "4", "tp1-dp0"):
        ArenaReader([path])
    with raises(ConvertError, "arena"):
        ArenaReader([tmp_path / "nothing"])


def spoil(path: Path, shard: str, at: Callable[[Arena], int]) -> None:
    arena = arena_of(path, shard)
    with arena.slot(1) as view:
        view[at(arena)] ^= 1
    arena.close()


def test_damage_is_named_and_never_given_out(path: Path) -> None:
    spoil(path, "tp1-dp0", lambda arena: arena.image.offsets[1])
    source = ArenaReader([path])
    bad = [f for i, f in enumerate(source.catalog.fragments) if not readable(source, i)]
    # A chunk of 48 bytes holds parts of two fragments.
    assert Fragment("master/columns", "F32", (4, 6), Box((0, 3), (4, 3)), 0, 4) in bad
    assert all(fragment.box.offset in ((3, 0), (0, 3), (0,)) for fragment in bad)
    check(ArenaReader([path], iteration=4), 4)


def readable(source: ArenaReader, index: int) -> bool:
    try:
        source.read(index)
    except ConvertError as error:
        assert "tp1-dp0" in str(error) and str(error) and "chunk" in str(error)
        return False
    return True


def test_ranks_that_disagree_are_named(path: Path) -> None:
    arena = arena_of(path, "tp1-dp1")
    begin = arena.image.volatile.begin
    with arena.slot(1) as view:
        view[begin] ^= 1
    record = arena.control.record(1)
    arena.control.begin(1)
    for chunk in range(len(arena.image.chunks)):
        arena.control.set_chunk_hash(1, chunk, arena.hash_chunk(1, chunk))
    arena.control.set_objects(1, record.objects_used, record.objects_hash)
    arena.control.seal(1, SnapshotId(LINEAGE, 5))
    with raises(ConvertError, "buffer/bias", "tp0-dp0", "tp1-dp1"):
        ArenaReader([path])
    assert "buffer/bias" not in {f.key for f in ArenaReader([path], roles={"master", "weight"}).catalog.fragments}


def test_a_job_that_moves_on_is_never_mixed_in(path: Path) -> None:
    source = ArenaReader([path])
    index = next(i for i, f in enumerate(source.catalog.fragments) if f.key == "master/rows")
    before = source.read(index).copy()
    source.confirm()
    arena = arena_of(path, "tp0-dp0")
    # The same iteration written anew is another one.
    for move_on in (lambda: arena.control.begin(1), lambda: seal(arena, 1, 6), lambda: seal(arena, 1, 5)):
        move_on()
        for look in (source.confirm, lambda: source.read(index)):
            with raises(ConvertError, "iteration 5"):
                look()
    assert before.view(np.float32)[0] == whole("master/rows", 5).flat[0]


def test_what_has_no_checksums_yet_is_read_and_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seal(arena_of(path, "tp0-dp1"), 1, 5, hashed=False)
    check(ArenaReader([path]), 5)
    assert not lacks(caplog.text, "tp0-dp1")


def test_what_several_shards_have_is_compared_as_it_lies() -> None:
    """A chunk that had to be unpacked is at hand for the next one, however many shards there are."""
    fragments = [Fragment.whole(key, "F32", (1,), Box((0,), (1,))) for key in ("a", "b")]
    entries = [ShardFragment(f"dp{n}", index, one) for index, one in enumerate(fragments) for n in range(3)]
    read: list[tuple[str, int]] = []

    def content(entry: ShardFragment) -> int:
        read.append((entry.shard, entry.index))
        return entry.index

    assert [one.shard for one in without_doubles(entries, content)] == ["dp0", "dp0"]
    assert read == sorted(read) and len(read) == 6


def test_snapshots_of_two_lineages_are_never_one(path: Path) -> None:
    seal(arena_of(path, "tp0-dp1"), 1, 5, lineage=b"m" * 16)
    check(ArenaReader([path]), 4)
