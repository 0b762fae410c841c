"""What is read of a snapshot of another layout: keys that mean the same there, padding, copies that must agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftckpt.arena.image import SlotImage
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.layout.replicas import private_key
from ftckpt.restore.reshape import Held, check_copies, index_of, needs_across, needs_of
from ftckpt.restore.source import Source
from ftckpt.state.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.state.manifest import Manifest
from ftckpt.state.piece import Piece

NONE: frozenset[str] = frozenset()


def fragment(key: str, *shape: int, dtype: str = "F32") -> Fragment:
    return Fragment.whole(key, dtype, shape, Box((0,) * len(shape), shape))


def piece(key: str, *shape: int, derived: bool = False, dtype: str = "F32") -> Piece:
    made = fragment(key, *shape, dtype=dtype)
    tensor = torch.zeros(made.nbytes // DTYPE_BYTES["F32"])
    return Piece(made, tensor, torch.zeros_like(tensor) if derived else None)


def held(dp: int, stepped: list[Fragment], volatile: list[Fragment], padded: tuple[str, ...] = ()) -> Held:
    own = [f.with_key(private_key(f.key, f"dp{dp}")) for f in volatile]
    manifest = Manifest({"dp": dp}, {"dp": 2}, tuple(stepped), tuple(own), 100, 4096, padded=padded)
    return Held(Source("n", f"dp{dp}.0", 0), dp, SlotImage.of(manifest), 0)


def test_private_keys_are_the_models_and_local_ones_nobodys() -> None:
    sources = [
        held(dp, [fragment(f"master/{dp}", 4)], [fragment("buffer/b", 3), fragment("local/s", 3)]) for dp in (0, 1)
    ]
    index = index_of(sources, reshaped=True)
    assert index.shapes("buffer/b", "F32") == {(3,)} and not index.shapes("local/s", "F32")
    assert not index.shapes("buffer/b@dp0", "F32")
    wanted = needs_across([piece("buffer/b", 3), piece("local/s", 3), piece("master/1", 4)], index, NONE)
    assert [need.key for _, need in wanted] == ["buffer/b", "master/1"]
    same = index_of(sources, reshaped=False)
    own = needs_of([piece("buffer/b", 3), piece("local/s", 3), piece("master/1", 4)], same, sources[1])
    assert [need.key for _, need in own] == ["buffer/b@dp1", "local/s@dp1", "master/1"]


def test_a_key_that_ends_like_another_shards_name_is_not_cut() -> None:
    (source,) = [held(1, [fragment("master/x@dp11", 4), fragment("master/y@dp1", 4)], [])]
    index = index_of([source], reshaped=True)
    assert index.shapes("master/x@dp11", "F32") and index.shapes("master/y", "F32")


def test_only_padded_keys_may_have_other_rows() -> None:
    index = index_of([held(0, [fragment("master/w", 16, 4)], [])], reshaped=True)
    need = [piece("master/w", 12, 4)]
    assert needs_across(need, index, frozenset({"master/w"}))
    with pytest.raises(MismatchError, match=r"no master/w of type F32 and shape \[12, 4\] \(\[16, 4\] is there\)"):
        needs_across(need, index, NONE)
    for other in (piece("master/w", 12, 5), piece("master/w", 12), piece("master/w", 16, 4, dtype="BF16")):
        with pytest.raises(MismatchError, match="another model"):
            needs_across([other], index, frozenset({"master/w"}))


def test_what_is_derived_is_read_only_where_it_is_there() -> None:
    index = index_of([held(0, [fragment("weight/raw", 4)], [])], reshaped=True)
    wanted = needs_across([piece("weight/raw", 4, derived=True), piece("weight/cast", 4, derived=True)], index, NONE)
    assert [need.key for _, need in wanted] == ["weight/raw"]


def test_copies_must_agree_where_they_are_needed() -> None:
    sources = [
        held(dp, [], [fragment("buffer/b", 3), fragment("buffer/c", 3), fragment("local/s", 3)]) for dp in (0, 1)
    ]
    assert [copy.key for copy, _ in sources[0].copies] == ["buffer/b", "buffer/c"]
    alike = {"dp0": np.array([7, 8], np.uint64), "dp1": np.array([7, 9], np.uint64)}
    check_copies(sources, alike, [fragment("buffer/b", 3)])
    with pytest.raises(MismatchError, match=r"buffer/c\S+ does not have the same bits in dp0 and dp1"):
        check_copies(sources, alike, [fragment("buffer/c", 3)])


def test_hashes_are_of_the_copies_alone() -> None:
    one = held(0, [fragment("master/w", 4)], [fragment("buffer/b", 3), fragment("local/s", 3)])
    slot = np.zeros(one.image.file_bytes, np.uint8)
    before = one.hashes(slot.data)
    ((_, offset),) = one.copies
    assert len(before) == 1
    outside = [at for f, at in one.places if f.key != "buffer/b@dp0"]
    slot[outside] = 1
    assert one.hashes(slot.data) == before
    slot[offset + 11] = 1
    assert one.hashes(slot.data) != before


def test_a_manifest_tells_padded_keys_only_where_there_are_some() -> None:
    plain, padded = (Manifest({"dp": 0}, {}, (), (), 4096, 4096, padded=keys) for keys in ((), ("master/w",)))
    assert b"padded" not in plain.encode() and Manifest.decode(plain.encode()).padded == ()
    assert Manifest.decode(padded.encode()) == padded and padded.digest != plain.digest
    for wrong in (b'"master/w"', b"[1]", b"null", b"{}"):
        with pytest.raises(CorruptError):
            Manifest.decode(padded.encode().replace(b'["master/w"]', wrong))
