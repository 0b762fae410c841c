"""Files of other programs are read without running code in them, and bad ones are refused with a reason."""

from __future__ import annotations

import argparse
import collections
import enum
import os
import pickle
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ftckpt.errors import ConvertError
from ftckpt.model import objects
from ftckpt.universal.catalog import Catalog, Tensor
from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.foreign import pickles
from ftckpt.universal.foreign.distributed import CheckpointDirectory, read_data
from ftckpt.universal.megatron.dist_reader import MegatronDistReader
from ftckpt.universal.megatron.dist_writer import MegatronDistWriter

MARK = "FTCKPT_TEST_RAN"


class Runs:
    """Sets a variable of the environment when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{MARK!r}] = 'yes'",)


@pytest.fixture
def foreign() -> Iterator[types.ModuleType]:
    """A module that is missing when its objects are read again."""
    before = set(sys.modules)
    module = types.ModuleType("megatron.made_up.enums")
    color = enum.Enum("Color", {"red": 1, "green": 2}, module=module.__name__)
    data = type("LossScaler", (), {"__module__": "deepspeed.made_up"})
    other = type("Unknown", (), {"__module__": "somebody.elses"})
    for name, kind in (("Color", color), ("LossScaler", data), ("Unknown", other)):
        home = module
        for number in range(1, kind.__module__.count(".") + 2):
            above = ".".join(kind.__module__.split(".")[:number])
            home = sys.modules.setdefault(above, types.ModuleType(above))
        setattr(home, name, kind)
        setattr(module, name, kind)
    yield module
    for name in set(sys.modules) - before:
        sys.modules.pop(name, None)


def test_what_checkpoints_hold_comes_back(tmp_path: Path, foreign: Any) -> None:
    scaler = foreign.LossScaler()
    scaler.cur_scale = 65536.0
    value = {
        "args": argparse.Namespace(size=3, kind=foreign.Color.green, dtype=torch.bfloat16, where=Path("/x")),
        "numpy": np.random.get_state(),
        "scalar": np.float32(1.5),
        "python": random.getstate(),
        "tensor": torch.arange(6).reshape(2, 3),
        "scaler": scaler,
        "ordered": collections.OrderedDict(a=1),
        "set": {3, 1},
    }
    torch.save(value, tmp_path / "x.pt")
    for name in ("megatron.made_up.enums", "deepspeed.made_up"):
        del sys.modules[name]
    read = pickles.load(tmp_path / "x.pt")
    assert read["args"].size == 3
    assert read["args"].dtype is torch.bfloat16
    assert isinstance(read["args"].kind, pickles.StandIn)
    assert read["scaler"].cur_scale == 65536.0
    assert read["tensor"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["python"] == random.getstate()
    assert (read["numpy"][1] == np.random.get_state()[1]).all()
    plain = pickles.plain(read)
    assert plain["set"] == [1, 3]
    assert plain["args"]["kind"]["class"] == "megatron.made_up.enums.Color"
    assert plain["scaler"]["cur_scale"] == 65536.0
    again = objects.decode(objects.encode(plain))
    assert again["args"] == plain["args"]


@pytest.mark.parametrize("name", ["Path", "PosixPath", "PurePath", "PurePosixPath"])
def test_paths_of_a_newer_python_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 pickles their classes by where it has them."""
    kind = type(name, (), {"__module__": "pathlib._local", "__reduce__": lambda _: (kind, ("a", "b"))})
    module = types.ModuleType("pathlib._local")
    setattr(module, name, kind)
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "d").read_metadata()
    # From here on: a newer Python has its own paths there, which could not be written.
    monkeypatch.setitem(sys.modules, "pathlib._local", module)
    torch.save({"where": kind()}, str(tmp_path / "x.pt"))
    metadata.storage_meta = kind()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    monkeypatch.undo()
    assert pickles.load(tmp_path / "x.pt")["where"] == Path("a/b")
    assert set(CheckpointDirectory(tmp_path / "d").tensors) == {"a"}


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "surprise": Runs()}, tmp_path / "x.pt")
    with pytest.raises(ConvertError, match="exec"):
        pickles.load(tmp_path / "x.pt")
    assert MARK not in os.environ
    assert torch.load(tmp_path / "x.pt", weights_only=False)["surprise"] is None
    assert os.environ.pop(MARK) == "yes", "this file would run code"


def test_an_unknown_class_is_refused_by_name(tmp_path: Path, foreign: Any) -> None:
    torch.save({"a": foreign.Unknown()}, tmp_path / "x.pt")
    with pytest.raises(ConvertError, match=r"x\.pt holds somebody\.elses\.Unknown"):
        pickles.load(tmp_path / "x.pt")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(protocol: int) -> None:
    shared = [1, 2]
    value = {
        "numbers": [0, 255, 65535, -1, 2**40, -(2**70), 1.5, True, False, None],
        "long": list(range(2000)),
        "text": ["a", "ä" * 300, ""],
        "bytes": [b"x", b"y" * 300] if protocol > 2 else [],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "sets": [{1, 2}, frozenset({3})] if protocol > 3 else [],
        "shared": [shared, shared],
        "nested": {"a": {"b": {}}},
    }
    read = read_data(pickle.dumps(value, protocol), "x")
    assert read == value
    assert read["shared"][0] is read["shared"][1]


def test_a_pickle_of_data_runs_nothing() -> None:
    for protocol in (2, 4):
        with pytest.raises(ConvertError):
            read_data(pickle.dumps(Runs(), protocol), "x")
    data = pickle.dumps({"a": list(range(100))})
    for keep in range(len(data)):
        with pytest.raises(ConvertError):
            read_data(data[:keep], "x")
    assert MARK not in os.environ


def write(path: Path) -> Path:
    """A small torch_dist checkpoint; its directory."""
    writer, catalog = MegatronDistWriter(path), Catalog("universal", 5, {}, (), {})
    writer.destination.begin()
    units = writer.plan(catalog, [Tensor("weight/decoder.final_layernorm.weight", "F32", (3,))])
    for unit in units:
        writer.write(unit, lambda *_: np.zeros(12, np.uint8))
    writer.finish(catalog, units)
    return path / "iter_0000005"


def test_parameters_flattened_by_older_versions(tmp_path: Path) -> None:
    """Megatron-core before 0.14 cut a rank's part of a parameter, flattened, among its data-parallel ranks."""
    directory = write(tmp_path / "x")
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    # [3 layers, 4, 2], cut over two tensor-parallel ranks along dimension 2 and over two others in flat ranges.
    whole = torch.arange(24.0).reshape(3, 4, 2)
    name, chunks, results, at = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight", [], [], 0
    with (directory / "flat.distcp").open("wb") as file:
        for layer in range(3):
            for part in range(2):
                flat = whole[layer, :, part].reshape(-1)
                for first, last in ((0, 3), (3, 4)):
                    offset = torch.Size((layer, 0, part, first))
                    length = pickles.dump(flat[first:last].clone().reshape(1, 1, 1, -1), file)
                    chunks.append(ChunkStorageMetadata(offset, torch.Size((1, 1, 1, last - first))))
                    info = _StorageInfo("flat.distcp", at, length)
                    results.append(WriteResult(MetadataIndex(name, offset), length, info))
                    at += length
    stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((3, 1, 2, 4)), chunks)
    metadata = Metadata({name: stored})
    metadata.mcore_data = {name: {"nd_reformulated_orig_global_shape": torch.Size((3, 4, 2))}}  # type: ignore[attr-defined]
    FileSystemWriter(directory).finish(metadata, [results])
    source = MegatronDistReader(tmp_path / "x")
    from ftckpt.universal.universal_format import UniversalReader, UniversalWriter

    convert(source, UniversalWriter(tmp_path / "u"), Options())
    read = UniversalReader(tmp_path / "u")
    assert [fragment.key for fragment in read.catalog.fragments] == [
        f"exp_avg/decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(3)
    ]
    for layer in range(3):
        values = torch.from_numpy(read.read(layer).copy()).view(torch.float32).reshape(4, 2)
        assert torch.equal(values, whole[layer])


@pytest.mark.parametrize("name", ["pathlib.PurePosixPath", "collections.OrderedDict", "builtins.getattr"])
def test_a_pickle_of_data_changes_nothing(name: str) -> None:
    """It may set attributes of what it names, in place of what it makes of that."""
    module, _, attribute = name.rpartition(".")
    state = b"(N(dVchanged\nI1\nst"  # (None, {"changed": 1})
    data = f"c{module}\n{attribute}\n".encode() + state + b"b."
    with pytest.raises(ConvertError):
        read_data(data, "x")
    assert not hasattr(getattr(sys.modules[module], attribute), "changed")
