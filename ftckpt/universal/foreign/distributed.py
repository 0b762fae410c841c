"""A reader of torch.distributed.checkpoint directories that runs no code from them."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError, _Unpickler
from typing import Any

import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Shape
from ftckpt.universal.catalog import DTYPE_NAMES
from ftckpt.universal.foreign import archives, pickles
from ftckpt.universal.storage import CheckedOnce, explained, map_file

METADATA = ".metadata"
_DATA = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
_STAND_INS = (
    *pickles.path_globals(dict.fromkeys(("PosixPath", "Path", "PurePosixPath", "PurePath"), object)),
    "builtins.getattr",
)
_DAMAGES = (
    UnpicklingError, struct.error, EOFError, ArithmeticError, AttributeError, LookupError, TypeError,
    ValueError,
)  # fmt: skip
_TYPES: dict[str, Any] = {
    "torch.Size": tuple,
    "torch.serialization._get_layout": str,
    "builtins.set": set,
    "builtins.slice": slice,
    "collections.OrderedDict": dict,
    **{f"torch.{str(dtype).removeprefix('torch.')}": dtype for dtype in DTYPE_NAMES},
}


@dataclass(frozen=True)
class Blob:
    """Bytes ``offset`` to ``offset + length`` of ``file``: the ``torch.save`` archive of a chunk or object."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpChunk:
    """A box of a tensor, and its location."""

    offset: Shape
    shape: Shape
    blob: Blob


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in ``.metadata``. Megatron-core before 0.14 may have flattened it: then ``flattened_from`` is its
    shape in the model, and ``shape`` the number of parts along each dimension, then the elements of a part."""

    dtype: str
    shape: Shape
    chunks: tuple[DcpChunk, ...]
    flattened_from: Shape | None = None


class CheckpointDirectory:
    """An open torch.distributed.checkpoint directory. Any thread may read.

    Raises:
        ConvertError: ``.metadata`` is missing, corrupt or inconsistent; a file is missing or too short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        where = path / METADATA
        with explained(where):
            data = where.read_bytes()
        value = read_data(data, str(where))
        try:
            self.tensors, self.objects = _contents(value)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ConvertError(f"{where}: is not what torch.distributed.checkpoint writes: {error}") from None
        self._maps: dict[str, Bytes] = {}
        self._checked = CheckedOnce[Blob]()
        for name, blobs in self._blobs():
            self._maps[name] = map_file(path / name)
            needed = max(blob.offset + blob.length for blob in blobs)
            if len(self._maps[name]) < needed:
                raise ConvertError(
                    f"{path / name}: is truncated: {len(self._maps[name])} of {needed} bytes are there"
                )

    def object(self, name: str) -> Any:
        """An object, read without running code. Raises ConvertError if it needs code, or is corrupt."""
        blob = self.objects[name]
        return pickles.loads(self._bytes(blob), f"{self.path / blob.file}: {name}")

    def chunk(self, name: str, chunk: DcpChunk) -> Bytes:
        """The elements of a chunk, row-major, mapped if stored so; verified when first read.

        Raises:
            ConvertError: corrupt; the text names file and tensor.
        """
        raw, blob = self._maps[chunk.blob.file], chunk.blob
        where = f"{self.path / blob.file}: {name}"
        self._checked.check(blob, lambda: self._compare(blob, where))
        # On the meta device: type, shape and offset of the elements, without a copy of them.
        shape = pickles.shapes(self._bytes(blob), where)
        if not isinstance(shape, torch.Tensor) or (tuple(shape.shape), DTYPE_NAMES.get(shape.dtype)) != (
            chunk.shape,
            self.tensors[name].dtype,
        ):
            raise ConvertError(f"{where}: is not the tensor that {METADATA} describes")
        begin = getattr(shape.untyped_storage(), "_checkpoint_offset", None)
        nbytes = shape.numel() * shape.element_size()
        if begin is None or not shape.is_contiguous():
            value = pickles.loads(self._bytes(blob), where)
            data: Bytes = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            return data
        # torch counts from the start of the blob, not of the file.
        begin += blob.offset + shape.storage_offset() * shape.element_size()
        if begin + nbytes > blob.offset + blob.length:
            raise ConvertError(f"{where}: is truncated or damaged")
        return raw[begin : begin + nbytes]

    def _compare(self, blob: Blob, where: str) -> None:
        data = self._bytes(blob)
        if bytes(data[: len(archives.ARCHIVE)]) == archives.ARCHIVE:
            archives.check_all(data, where)

    def _bytes(self, blob: Blob) -> memoryview:
        return self._maps[blob.file][blob.offset : blob.offset + blob.length].data

    def _blobs(self) -> list[tuple[str, list[Blob]]]:
        by_file: dict[str, list[Blob]] = {}
        blobs = [chunk.blob for tensor in self.tensors.values() for chunk in tensor.chunks]
        for blob in [*blobs, *self.objects.values()]:
            by_file.setdefault(blob.file, []).append(blob)
        for name in by_file:
            # Names from a file must not lead outside the directory.
            if "/" in name or name.startswith(".."):
                raise ConvertError(f"{self.path / METADATA}: names the file {name}, outside the checkpoint")
        return sorted(by_file.items())


class _DataUnpickler(_Unpickler):
    """Unpickles data alone; ``torch.load`` cannot: it refuses opcodes of these files.

    It imports nothing and calls only the listed types and stand-ins. Based on pickle's Python implementation: that in
    C allocates whatever size a corrupt file states.
    """

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in _TYPES:
            return _TYPES[full_name]
        if full_name in _STAND_INS or full_name.startswith(_DATA):
            return pickles.stand_in(full_name)
        raise ConvertError(f"holds {full_name}, which is not loaded, as it could run code")


def read_data(data: bytes, name: str) -> Any:
    """The value of a pickle; ``name`` is the file's, for errors.

    Raises:
        ConvertError: truncated, corrupt, or it needs more than data.
    """
    try:
        return _DataUnpickler(io.BytesIO(data)).load()
    except ConvertError as error:
        raise ConvertError(f"{name} {error}") from None
    except _DAMAGES as error:
        raise ConvertError(f"{name} is truncated or damaged: {error}") from None


def _contents(value: Any) -> tuple[dict[str, StoredTensor], dict[str, Blob]]:
    places: dict[tuple[str, Shape | None], Blob] = {}
    for index, info in value.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} is transformed by {info.transform_descriptors}")
        offset = getattr(index, "offset", None)
        # Keys of tensors have the offset of a chunk; those of objects have None.
        places[index.fqn, offset] = Blob(str(info.relative_path), int(info.offset), int(info.length))
    original: Mapping[str, Any] = getattr(value, "mcore_data", None) or {}
    tensors, objects = {}, {}
    for name, stored in value.state_dict_metadata.items():
        if not hasattr(stored, "chunks"):
            objects[name] = places[name, None]
            continue
        chunks = tuple(
            DcpChunk(tuple(chunk.offsets), tuple(chunk.sizes), places[name, chunk.offsets]) for chunk in stored.chunks
        )
        # Megatron-core before 0.14 adds this to torch's metadata for tensors that it saved flattened.
        shape = original.get(name, {}).get("nd_reformulated_orig_global_shape")
        dtype = DTYPE_NAMES[stored.properties.state[0]]
        flattened = tuple(shape) if shape is not None else None
        tensors[name] = StoredTensor(dtype, tuple(stored.size), chunks, flattened)
    return tensors, objects
