"""The universal format: complete or absent, and corrupt data is never returned."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import DTYPE_BYTES
from ftckpt.universal.catalog import Catalog, Get, Tensor, Unit, Writer
from ftckpt.universal.consolidation import cast, deriving
from ftckpt.universal.safetensors import WeightsWriter, parse_header
from ftckpt.universal.storage import Destination
from ftckpt.universal.universal_format import MANIFEST_NAME, OBJECTS_NAME, UniversalReader, UniversalWriter
from tests.support.errors import raises
from tests.support.flips import flip
from tests.support.killing import fails_with

TENSORS = [
    Tensor("weight/embed", "BF16", (10, 6)),
    Tensor("master/embed", "F32", (10, 6)),
    Tensor("exp_avg/embed", "F32", (10, 6)),
    Tensor("master/layer.0", "F32", (300,)),
    Tensor("exp_avg/layer.0", "F32", (300,)),
    Tensor("step/embed", "F32", (1,)),
    Tensor("buffer/bias", "F64", ()),
    Tensor("buffer/none", "U8", (0, 3)),
    Tensor("buffer/flags", "U8", (7,)),
]
OBJECTS = {"scheduler": {"num_steps": 3}, "rng": np.arange(5), "name": "x", "pair": (1, 2.5)}


def value(tensor: Tensor) -> Bytes:
    """Bytes that the tensor's name alone determines; floats that stay finite in a cast."""
    rng = np.random.default_rng(sum(tensor.key.encode()))
    numel = tensor.nbytes // DTYPE_BYTES[tensor.dtype]
    if tensor.dtype in ("F32", "F64"):
        return rng.standard_normal(numel).astype(f"<f{DTYPE_BYTES[tensor.dtype]}").view(np.uint8)
    return np.frombuffer(rng.bytes(tensor.nbytes), np.uint8)


def stored(tensor: Tensor, first: int, last: int) -> Bytes:
    return value(tensor)[first * tensor.row_bytes : last * tensor.row_bytes]


def catalog(**changes: Any) -> Catalog:
    plain = Catalog(
        "ftckpt", 12, {"tp": 2, "pp": 1, "distributed_optimizer": True}, (), OBJECTS, frozenset({"weight/embed"}),
        derived={"weight/layer.0": "BF16"},
    )  # fmt: skip
    return replace(plain, **changes)


def get(tensor: Tensor, first: int, last: int) -> Bytes:
    return deriving(catalog(), TENSORS, stored)(tensor, first, last)


def begun(writer: Writer, tensors: Sequence[Tensor] = TENSORS) -> list[Unit]:
    """The files that it is going to write."""
    writer.destination.begin()
    return writer.plan(catalog(), tensors)


def put(writer: Writer, read: Get = get) -> list[Unit]:
    """Everything but the end."""
    units = begun(writer)
    for unit in units:
        writer.write(unit, read)
    return units


def write(path: Path, read: Get = get, max_file_bytes: int = 700) -> Path:
    writer = UniversalWriter(path, max_file_bytes)
    writer.finish(catalog(), put(writer, read))
    return path


def everything(path: Path) -> dict[str, bytes]:
    source = UniversalReader(path)
    found = {f.key: source.read(i).tobytes() for i, f in enumerate(source.catalog.fragments)}
    source.close()
    return found


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "out")
    source = UniversalReader(path)
    found = source.catalog
    assert (found.origin, found.iteration, found.layout) == ("universal", 12, catalog().layout)
    assert found.padded == {"weight/embed"} and found.derived == {}
    assert source.manifest.origin == "ftckpt"
    np.testing.assert_array_equal(found.objects["rng"], OBJECTS["rng"])
    assert found.objects["pair"] == (1, 2.5) and found.objects["scheduler"] == {"num_steps": 3}
    made = {t.key: value(t).tobytes() for t in TENSORS}
    master = torch.frombuffer(bytearray(made["master/layer.0"]), dtype=torch.float32)
    made["weight/layer.0"] = master.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert everything(path) == made
    shapes = {f.key: (f.dtype, f.global_shape) for f in found.fragments}
    assert shapes == {t.key: (t.dtype, t.shape) for t in TENSORS} | {"weight/layer.0": ("BF16", (300,))}


def test_the_safetensors_library_alone_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path / "out")
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"tensors-00001-of-{len(files):05}.safetensors"
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 700 or len(tensors) == 1
        loaded.update(tensors)
    for tensor in TENSORS:
        assert tuple(loaded[tensor.key].shape) == tensor.shape
        assert loaded[tensor.key].reshape(-1).view(torch.uint8).numpy().tobytes() == value(tensor).tobytes()
    described = json.loads((path / MANIFEST_NAME).read_text())
    assert described["tensors"]["master/embed"]["shape"] == [10, 6]
    assert all((path / entry["file"]).exists() for entry in described["tensors"].values())


@pytest.mark.parametrize("max_file_bytes", [1 << 20, 300])
def test_weights_alone_for_others(tmp_path: Path, max_file_bytes: int) -> None:
    writer = WeightsWriter(tmp_path / "hf", max_file_bytes)
    writer.finish(catalog(), put(writer))
    loaded: dict[str, torch.Tensor] = {}
    if max_file_bytes == 300:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        for name in set(index["weight_map"].values()):
            loaded.update(load_file(tmp_path / "hf" / name))
        assert set(index["weight_map"]) == set(loaded)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in loaded.values())
    else:
        assert [p.name for p in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
        loaded = load_file(tmp_path / "hf" / "model.safetensors")
        with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert set(loaded) == {"embed", "layer.0", "bias", "none", "flags"}
    assert loaded["layer.0"].dtype == torch.bfloat16
    assert torch.equal(loaded["embed"].view(torch.uint8).reshape(-1), torch.tensor(value(TENSORS[0]).copy()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_are_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20000, np.uint32)
    special = np.array([0x7F800001, 0x7FC00000, 0xFF800000, 0x80000000, 1, 0x3F808000, 0x3F818000], np.uint32)
    source = np.concatenate([bits, special]).view(np.uint8)
    name = "BF16" if dtype == torch.bfloat16 else "F16"
    wanted = torch.from_numpy(source.copy()).view(torch.float32).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(cast(source, "F32", name), wanted)


# What is damaged


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Edit the manifest and make its checksum right again, as nobody but a test would."""

    def edit(path: Path) -> None:
        from ftckpt.universal import universal_format as module

        described = json.loads((path / MANIFEST_NAME).read_text())
        described.pop("checksum")
        change(described)
        described["checksum"] = module._checksum(described)
        (path / MANIFEST_NAME).write_text(json.dumps(described, indent=2))

    return edit


def first(path: Path) -> Path:
    return min(path.glob("tensors-*.safetensors"))


def edit_text(path: Path) -> None:
    text = (path / MANIFEST_NAME).read_text()
    (path / MANIFEST_NAME).write_text(text.replace('"iteration": 12', '"iteration": 13'))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated file": (lambda p: os.truncate(first(p), first(p).stat().st_size - 1), r"tensors-00001.*bytes"),
    "missing file": (lambda p: first(p).unlink(), r"tensors-00001.*No such file"),
    "missing manifest": (lambda p: (p / MANIFEST_NAME).unlink(), r"manifest\.json: is missing"),
    "flipped objects": (lambda p: flip(p / OBJECTS_NAME, 30), r"objects\.ftobj: corrupt"),
    "half a manifest": (lambda p: os.truncate(p / MANIFEST_NAME, 400), r"manifest\.json"),
    "edited manifest": (edit_text, r"checksum"),
    "other version": (rewritten(lambda d: d.update(version=2)), r"version 2, this ftckpt reads 1"),
    "file elsewhere": (rewritten(lambda d: d["files"].update({"../x": {"bytes": 1}})), r"x' is no name of a"),
    "tensor elsewhere": (rewritten(lambda d: d["tensors"]["weight/embed"].update(file="y")), r"embed is in y"),
    "other shape": (rewritten(lambda d: d["tensors"]["weight/embed"].update(shape=[6, 10])), r"weight/embed is BF16"),
    "flipped header": (lambda p: flip(first(p), 12), r"tensors-00001"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_when_it_is_opened(tmp_path: Path, name: str) -> None:
    action, text = DAMAGE[name]
    path = write(tmp_path / "out")
    action(path)
    with pytest.raises(ConvertError, match=text):
        UniversalReader(path)


def test_a_flipped_bit_is_named_when_the_tensor_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "out")
    flip(first(path), first(path).stat().st_size - 1)
    source = UniversalReader(path)
    refused = []
    for index, fragment in enumerate(source.catalog.fragments):
        try:
            source.read(index)
        except ConvertError as error:
            refused.append(fragment.key)
            assert fragment.key in str(error) and "tensors-00001" in str(error)
    assert len(refused) == 1


# Whole or not there


def test_a_destination_that_exists_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "out")
    before = everything(path)
    with raises(ConvertError, "out", "exists", "remove"):
        UniversalWriter(path).destination.begin()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConvertError, match="exists"):
        Destination(tmp_path / "empty").begin()
    assert everything(path) == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_the_end_is_no_success(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", fails_with(code))
    with pytest.raises(ConvertError, match=os.strerror(code)):
        write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").glob("*.safetensors"))


# Pure parts


def table(*entries: tuple[str, list[int], list[int]], data: int = 8) -> Bytes:
    """A safetensors file of ``data`` bytes of tensors; entries are name, shape and offsets, of U8."""
    found = {name: {"dtype": "U8", "shape": shape, "data_offsets": at} for name, shape, at in entries}
    text = json.dumps(found).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + bytes(data), np.uint8)


def test_files_with_holes_or_overlaps_are_refused() -> None:
    whole = ("a", [5], [0, 5]), ("b", [3], [5, 8])
    assert set(parse_header(table(*whole), "x")[0]) == {"a", "b"}
    for wrong in (
        table(whole[0], ("b", [2], [6, 8])),  # a hole
        table(whole[0], ("b", [4], [4, 8])),  # an overlap
        table(whole[0], ("b", [2], [5, 8])),  # a size that is not the shape's
        table(whole[0], ("b", [3, -1], [5, 2]), data=5),
        table(whole[0]),  # bytes that belong to nothing
        table(*whole, data=7),
        np.frombuffer((1 << 40).to_bytes(8, "little") + bytes(8), np.uint8),
        np.frombuffer((4).to_bytes(8, "little") + b"null", np.uint8),
        np.empty(3, np.uint8),
    ):
        with raises(ConvertError, "x", "safetensors"):
            parse_header(wrong, "x")


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    destination = Destination(tmp_path / "out")
    destination.begin()
    (tmp_path / "out").mkdir()
    with pytest.raises(ConvertError):
        destination.commit()
    assert (tmp_path / "out.partial").exists()
