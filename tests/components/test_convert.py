"""Conversions: every element arrives, from any fragments, in bounded memory, and an interrupted one is resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Box, Fragment
from ftckpt.universal.catalog import Catalog, Reader
from ftckpt.universal.consolidation import Consolidator, cast
from ftckpt.universal.conversion import Options, convert, prepare
from ftckpt.universal.deepspeed.universal_writer import DeepSpeedUniversalWriter
from ftckpt.universal.megatron.dist_writer import MegatronDistWriter
from ftckpt.universal.safetensors import WeightsWriter
from ftckpt.universal.storage import CheckedOnce, Destination, Journal
from ftckpt.universal.universal_format import UniversalReader, UniversalWriter
from tests.support.errors import raises

NUMPY = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64, "U8": np.uint8}


class Memory(Reader):
    """A source of arrays: the elements of fragments are those in ``whole``, unless ``changed`` has others."""

    def __init__(self, whole: Mapping[str, np.ndarray], fragments: Sequence[Fragment], **more: object) -> None:
        self.whole = whole
        self.described = Catalog("ftckpt", 7, {"tp": 2}, tuple(fragments), {"step": 7}, **more)  # type: ignore[arg-type]
        self.changed: dict[int, np.ndarray] = {}
        self.reads = 0
        self.on_read: Callable[[int], None] = lambda index: None
        self.confirmed = 0

    @property
    def catalog(self) -> Catalog:
        return self.described

    def read(self, index: int) -> Bytes:
        self.reads += 1
        self.on_read(index)
        if index in self.changed:
            return self.changed[index].view(np.uint8)
        return elements(self.whole, self.described.fragments[index]).view(np.uint8)

    def confirm(self) -> None:
        self.confirmed += 1

    def close(self) -> None:
        pass


def elements(whole: Mapping[str, np.ndarray], fragment: Fragment) -> np.ndarray:
    box = tuple(slice(o, o + s) for o, s in zip(fragment.box.offset, fragment.box.shape, strict=True))
    return np.ascontiguousarray(whole[fragment.key][box].reshape(-1)[fragment.start : fragment.stop])


def array(shape: tuple[int, ...], dtype: str = "F32", seed: int = 0) -> np.ndarray:
    random = np.random.default_rng([seed, *shape])
    if dtype == "F32":
        return random.standard_normal(shape, dtype=np.float32)
    return random.integers(0, 100, shape).astype(NUMPY[dtype])


def wholes(tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> list[Fragment]:
    return [Fragment.whole(k, dtype, v.shape, Box((0,) * v.ndim, v.shape)) for k, v in tensors.items()]


def halves(tensors: Mapping[str, np.ndarray]) -> list[Fragment]:
    """Each tensor in two parts along its first dimension."""
    found = []
    for key, value in tensors.items():
        middle = value.shape[0] // 2
        for first, last in ((0, middle), (middle, value.shape[0])):
            box = Box((first, *(0,) * (value.ndim - 1)), (last - first, *value.shape[1:]))
            found.append(Fragment.whole(key, "F32", value.shape, box))
    return found


def model(num: int = 6) -> dict[str, np.ndarray]:
    tensors = {}
    for n in range(num):
        tensors[f"master/layers.{n}.weight"] = array((8, 5), seed=n)
        tensors[f"exp_avg/layers.{n}.weight"] = array((8, 5), seed=100 + n)
    return tensors


def read_all(path: Path) -> dict[str, bytes]:
    source = UniversalReader(path)
    found = {f.key: source.read(i).tobytes() for i, f in enumerate(source.catalog.fragments)}
    source.close()
    return found


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Fragment]:
    """A tensor cut into a grid of boxes, each cut into flat ranges."""

    def spans(size: int) -> list[tuple[int, int]]:
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set()
        return list(pairwise([0, *sorted(cuts), size]))

    boxes = [Box((), ())]
    for size in shape:
        boxes = [Box((*b.offset, lo), (*b.shape, hi - lo)) for lo, hi in spans(size) for b in boxes]
    return [Fragment("w/x", "F32", shape, box, lo, hi) for box in boxes for lo, hi in spans(box.numel)]


@given(st.data())
def test_rows_are_filled_from_any_fragments(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    whole = {"w/x": array(shape)}
    fragments = data.draw(grids(shape)) + (data.draw(grids(shape)) if data.draw(st.booleans()) else [])
    filler = Consolidator(Memory(whole, fragments))
    (tensor,) = filler.tensors
    first = data.draw(st.integers(0, tensor.rows - 1))
    last = data.draw(st.integers(first, tensor.rows))
    rows = whole["w/x"].reshape(tensor.rows, -1)[first:last]
    if shape or last > first:
        assert filler.get(tensor, first, last if shape else 1).tobytes() == rows.tobytes()


@pytest.mark.parametrize("workers", [1, 4])
def test_everything_arrives_in_a_universal_checkpoint(tmp_path: Path, workers: int) -> None:
    tensors = model()
    told: list[int] = []
    source = Memory(tensors, halves(tensors), padded=frozenset({"master/layers.0.weight"}))
    writer = UniversalWriter(tmp_path / "out", max_file_bytes=400)
    report = convert(source, writer, Options(workers=workers), told.append)
    assert read_all(tmp_path / "out") == {key: value.tobytes() for key, value in tensors.items()}
    read = UniversalReader(tmp_path / "out").catalog
    assert (read.iteration, read.objects, read.padded) == (7, {"step": 7}, {"master/layers.0.weight"})
    assert report.files > 2 and report.tensors == 12 and sum(told) == report.nbytes
    assert source.confirmed == report.files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_weights_that_derive_are_cast_whatever_roles_are_asked_for(tmp_path: Path) -> None:
    masters = {"master/a": array((3, 4)), "exp_avg/a": array((3, 4), seed=1)}
    weight = cast(masters["master/a"].reshape(-1).view(np.uint8), "F32", "BF16").tobytes()
    for roles, expected in (
        (None, {"weight/a", "master/a", "exp_avg/a"}),
        ("weight", {"weight/a"}),
        ("weight,buffer", {"weight/a"}),
        ("master", {"master/a"}),
        ("weight,master", {"weight/a", "master/a"}),
        ("weight,exp_avg", {"weight/a", "exp_avg/a"}),
    ):
        source = Memory(masters, wholes(masters), derived={"weight/a": "BF16"})
        options = Options(roles=frozenset(roles.split(",")) if roles else None)
        convert(source, UniversalWriter(tmp_path / f"out-{roles}"), options)
        found = read_all(tmp_path / f"out-{roles}")
        assert set(found) == expected
        assert found.get("weight/a", weight) == weight
    convert(source, WeightsWriter(tmp_path / "weights"), Options())
    with raises(ConvertError, "nonsense", "exp_avg"):
        prepare(source, UniversalWriter(tmp_path / "x"), Options(roles=frozenset({"nonsense"})))


@pytest.mark.parametrize("kind", [MegatronDistWriter, DeepSpeedUniversalWriter], ids=["megatron", "deepspeed"])
def test_half_of_a_master_is_not_taken_for_one(kind: Any, tmp_path: Path) -> None:
    """Where the optimizer has the other half a bf16 weight would else be written as the master."""
    half = np.ones((3, 4), np.int16)
    tensors = {"weight/a": half, "master_param/a": half, "exp_avg/a": array((3, 4))}
    types = {"weight/a": "BF16", "master_param/a": "I16", "exp_avg/a": "F32"}
    fragments = [wholes({key: value}, types[key])[0] for key, value in tensors.items()]
    source = Memory(tensors, fragments)
    with raises(ConvertError, "master_param/a", "--use-precision-aware-optimizer", "--roles"):
        prepare(source, kind(tmp_path / "out"), Options())
    prepare(source, UniversalWriter(tmp_path / "out"), Options())  # which keeps what there is


def test_copies_that_differ_are_an_error_that_names_them(tmp_path: Path) -> None:
    tensors = {"weight/norm": array((6,)), "weight/b": array((6,))}
    source = Memory(tensors, [*wholes(tensors), *wholes(tensors)])
    convert(source, UniversalWriter(tmp_path / "same"), Options())
    for index in (0, 2):
        source.changed = {index: tensors["weight/norm"] + np.float32([0, 0, 0, 0, 0, 1e-6])}
        with raises(ConvertError, "weight/norm", "copies"):
            convert(source, UniversalWriter(tmp_path / "differ"), Options())
        assert not (tmp_path / "differ").exists()


def test_a_source_that_is_not_whole_or_contradicts_itself_is_refused(tmp_path: Path) -> None:
    tensors = model(1)
    fragments = halves(tensors)
    with raises(ConvertError, "master/layers.0.weight"):
        prepare(Memory(tensors, fragments[1:]), UniversalWriter(tmp_path / "x"), Options())
    other = Fragment.whole("master/layers.0.weight", "F32", (9, 5), Box((0, 0), (9, 5)))
    with raises(ConvertError, "F32 [8, 5]", "F32 [9, 5]"):
        prepare(Memory(tensors, [*fragments, other]), UniversalWriter(tmp_path / "x"), Options())
    assert list(tmp_path.iterdir()) == []


class Broken(Exception):
    pass


def break_off(tmp_path: Path, tensors: Mapping[str, np.ndarray], after: int, **options: object) -> None:
    """A conversion that an error ends once ``after`` fragments were read."""
    source = Memory(tensors, wholes(tensors))

    def fail(index: int) -> None:
        if source.reads > after:
            raise Broken

    source.on_read = fail
    with pytest.raises(Broken):
        convert(source, UniversalWriter(tmp_path / "out", 400), Options(workers=1, **options))  # type: ignore[arg-type]


def test_a_broken_off_conversion_goes_on(tmp_path: Path) -> None:
    tensors = model()
    break_off(tmp_path, tensors, 7)
    assert not (tmp_path / "out").exists()
    written = sorted(path.name for path in (tmp_path / "out.partial").glob("*.safetensors"))
    assert len(written) == 3
    source = Memory(tensors, wholes(tensors))
    told: list[int] = []
    report = convert(source, UniversalWriter(tmp_path / "out", 400), Options(workers=2), told.append)
    assert report.resumed == 3 and source.reads == 12 - 6
    assert sum(told) == 12 * 160
    assert read_all(tmp_path / "out") == {key: value.tobytes() for key, value in tensors.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_finished_file_that_was_changed_is_written_again(tmp_path: Path) -> None:
    tensors = model()
    break_off(tmp_path, tensors, 7)
    one, two, _ = sorted((tmp_path / "out.partial").glob("*.safetensors"))
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)
    two.write_bytes(two.read_bytes()[:-1])
    journal = tmp_path / "out.partial.jsonl"
    journal.write_text(journal.read_text() + '{"file": "tensors-0000')  # a kill in the middle of a line
    report = convert(Memory(tensors, wholes(tensors)), UniversalWriter(tmp_path / "out", 400), Options())
    assert report.resumed == 1
    assert read_all(tmp_path / "out") == {key: value.tobytes() for key, value in tensors.items()}


@pytest.mark.parametrize("change", ["iteration", "fragments", "identity", "files"])
def test_a_partial_one_of_something_else_is_refused(tmp_path: Path, change: str) -> None:
    tensors = model()
    break_off(tmp_path, tensors, 7, identity={"specification": "gpt"})
    source = Memory(tensors, halves(tensors) if change == "fragments" else wholes(tensors))
    if change == "iteration":
        source.described = Catalog("ftckpt", 8, {}, source.catalog.fragments, {"step": 7})
    options = Options(identity={"specification": "llama" if change == "identity" else "gpt"})
    writer = UniversalWriter(tmp_path / "out", 800 if change == "files" else 400)
    with raises(ConvertError):
        convert(source, writer, options)
    (tmp_path / "out.partial.jsonl").unlink()
    with raises(ConvertError):
        convert(source, UniversalWriter(tmp_path / "out", 400), options)


def test_what_is_good_is_compared_once_and_what_is_damaged_each_time() -> None:
    checked, compared = CheckedOnce[str](), []

    def compare(part: str) -> None:
        compared.append(part)
        if part == "damaged":
            raise ConvertError(part)

    for part in ("good", "damaged") * 2:
        with pytest.raises(ConvertError) if part == "damaged" else nullcontext():
            checked.check(part, lambda part=part: compare(part))  # type: ignore[misc]
    assert compared == ["good", "damaged", "damaged"]


def test_a_full_disk_is_an_error_also_where_part_of_a_line_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(Destination(tmp_path / "out"), {})
    (tmp_path / "out.partial").mkdir()
    journal.begin()
    (tmp_path / "out.partial" / "a").write_text("a")
    write = os.write
    monkeypatch.setattr("ftckpt.universal.storage.os.write", lambda file, data: write(file, data[:5]))
    with raises(ConvertError, "out.partial.jsonl"):
        journal.add("a")


def test_too_little_memory_for_one_file_is_said_before_anything_is_written(tmp_path: Path) -> None:
    tensors = {"weight/large": array((1000, 10))}
    with raises(ConvertError, "weight/large", "120000 bytes", "--max-memory"):
        convert(Memory(tensors, wholes(tensors)), UniversalWriter(tmp_path / "out"), Options(max_memory=100_000))
    assert list(tmp_path.iterdir()) == []


def test_workers_together_stay_in_their_memory(tmp_path: Path) -> None:
    import threading

    tensors = {f"weight/{n}": array((100, 10), seed=n) for n in range(12)}
    source = Memory(tensors, wholes(tensors))
    guard, at_once, most = threading.Lock(), [0], [0]
    writer = UniversalWriter(tmp_path / "out", 4000)
    real = writer.write

    def write(unit: object, get: object) -> None:
        with guard:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        real(unit, get)  # type: ignore[arg-type]
        with guard:
            at_once[0] -= 1

    writer.write = write  # type: ignore[method-assign, assignment]
    convert(source, writer, Options(workers=8, max_memory=24_000))
    assert most[0] <= 2


def test_what_a_live_job_wrote_over_does_not_count(tmp_path: Path) -> None:
    tensors = model()
    source = Memory(tensors, wholes(tensors))

    def moved_on() -> None:
        raise ConvertError("moved on, again")

    source.confirm = moved_on  # type: ignore[method-assign]
    with pytest.raises(ConvertError):
        convert(source, UniversalWriter(tmp_path / "out", 400), Options(workers=1))
    assert len((tmp_path / "out.partial.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "out.partial.jsonl").read_text())["identity"]["iteration"] == "7"
