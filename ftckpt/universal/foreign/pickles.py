"""Reading and writing the pickled files of others' checkpoints without running code that lies in them.

All goes through ``torch.load(weights_only=True)``, which makes nothing but what is listed. Classes of Megatron and
DeepSpeed that are only data become a ``StandIn``, so that neither has to be installed.
"""

from __future__ import annotations

import argparse
import enum
import functools
import os
import re
import struct
import threading
import zipfile
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.universal.foreign import archives
from ftckpt.universal.foreign.archives import View
from ftckpt.universal.storage import map_file

DATA_CLASSES = re.compile(
    r"megatron\.(\w+\.)*enums\.\w+"
    r"|megatron\.(\w+\.)*(AttnBackend|AttnMaskType|AttnType|LayerType|ModelType|Fp8Recipe|CudaGraphScope)"
    r"|megatron\.(\w+\.)*(RerunMode|RerunState|RerunDiagnostic|QuickStats|DataIteratorMode|CallerState?)"
    r"|megatron\.core\.(\w+\.)*(MCoreMetadata|MCoreSavePlan)"
    r"|deepspeed\.(\w+\.)*(fragment_address|tensor_fragment)"
    r"|deepspeed\.(\w+\.)*(LossScaler|DynamicLossScaler|LossScalerBase)"
    r"|deepspeed\.(\w+\.)*(ZeroStageEnum|DtypeEnum|OffloadDeviceEnum|PartitionedParamStatus|ZeroParamStatus)"
    r"|signal\.Signals"
)
"""Classes of others that hold data alone, by full name."""

_LOCK = threading.Lock()
"""torch's list of allowed classes is one for the whole process."""


class StandIn:
    """Stands in for a class of others: what it was built from, and its fields as attributes."""

    full_name = ""
    """Module and name of the class that it stands for."""

    def __new__(cls, *arguments: Any) -> StandIn:
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        """Of any signature: ``__new__`` has the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Fields, fields and slots, or whatever else the class makes its state of: that is ``state`` then."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.__dict__.update(part or {})
        else:
            self.__dict__["state"] = state

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{self.full_name or 'StandIn'}({fields})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.full_name, repr(vars(self))))


@functools.cache
def stand_in(full_name: str) -> type[StandIn]:
    """The subclass of ``StandIn`` for a class of others; the same for the same name."""
    return type(full_name.rpartition(".")[2], (StandIn,), {"full_name": full_name})


def member(kind: Any, name: str) -> StandIn:
    """What some versions of Python write for a member of an enumeration: ``getattr(class, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, StandIn)):
        raise ValueError(f"getattr of {kind!r}")
    return kind(name)


def _numpy_globals() -> dict[str, Any]:
    known: dict[str, Any] = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}
    array = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        known |= {f"{module}._reconstruct": array, f"{module}.scalar": scalar}
    for letter in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?":
        kind = type(np.dtype(letter))
        known[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return known


def path_globals(kinds: Mapping[str, type]) -> dict[str, Any]:
    """Paths by the names that they have in files: Python 3.13 has moved their classes, and names them by that."""
    return {f"{module}.{name}": kind for module in ("pathlib", "pathlib._local") for name, kind in kinds.items()}


HARMLESS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "builtins.dict": dict,
    "builtins.frozenset": frozenset,
    "builtins.getattr": member,
    "builtins.int": int,
    "builtins.list": list,
    "builtins.slice": slice,
    "builtins.tuple": tuple,
    "collections.defaultdict": defaultdict,
    "collections.deque": deque,
    "types.SimpleNamespace": argparse.Namespace,
    **_numpy_globals(),
    **path_globals({kind.__name__: kind for kind in (Path, PosixPath, PurePath, PurePosixPath)}),
}
"""What may be made beside what torch itself allows, by the name in the file."""


def load(path: str | os.PathLike[str], known: Mapping[str, Any] | None = None) -> Any:
    """What ``torch.save`` wrote to ``path``; tensors on the CPU, mapped from the file where its format allows.

    ``known`` adds classes by full name, or replaces ours. Other classes that are known to be data alone become a
    ``StandIn``; dataclasses and enumerations do not come back as what they were.

    What it says and its small tensors are what was written; of large ones ``archives.check`` tells, see there.

    Raises:
        ConvertError: no such file, not a file of ``torch.save``, truncated, damaged, or it holds a class that is not
            known.
    """
    where = os.fspath(path)
    try:
        with Path(where).open("rb") as file:
            zipped = file.read(len(archives.ARCHIVE)) == archives.ARCHIVE
    except OSError as error:
        raise ConvertError(f"{where} cannot be read: {error.strerror}") from None
    if not zipped:
        return _load(where, where, known or {})
    data = map_file(Path(where)).data
    listed = archives.check_all(data, where, storages=False)
    mapped: list[torch.UntypedStorage] = []
    value = _load(where, where, known or {}, mapped=mapped)
    archives.mark(mapped, listed, data, where)
    archives.check_small(mapped, value)
    return value


def loads(data: bytes | memoryview, name: str, known: Mapping[str, Any] | None = None) -> Any:
    """``load`` of bytes that lie inside another file, all compared; ``name`` says in errors what they are."""
    if bytes(data[: len(archives.ARCHIVE)]) == archives.ARCHIVE:
        archives.check_all(memoryview(data), name)
    return _load(View(data), name, known or {})


def shapes(data: bytes | memoryview, name: str) -> Any:
    """``loads`` of tensors without elements, on the device ``meta``; nothing is compared.

    Their storages have an attribute ``_checkpoint_offset``, which says where in ``data`` the elements begin.
    """
    return _load(View(data), name, {}, "meta")


def _load(
    source: str | View,
    name: str,
    known: Mapping[str, Any],
    device: str = "cpu",
    mapped: list[torch.UntypedStorage] | None = None,
) -> Any:
    """``mapped`` gets the storages, which are then mapped from the file ``source``."""
    allowed = {**HARMLESS, **known}

    def located(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if mapped is not None:
            mapped.append(storage)
        return storage

    with _LOCK:
        try:
            file = cast("str | IO[bytes]", source)
            # What is refused below is everything that is neither torch's own nor listed here: no file adds to it.
            data_classes = _data_classes(file) if device == "cpu" else []
            allowed = {**{data_class: stand_in(data_class) for data_class in data_classes}, **allowed}
            where: Any = device if mapped is None else located
            with torch.serialization.safe_globals([(value, key) for key, value in allowed.items()]):
                return torch.load(file, map_location=where, weights_only=True, mmap=mapped is not None)
        except Exception as error:  # noqa: BLE001 - a foreign file can provoke whatever there is
            raise ConvertError(_explain(name, error)) from None


def _data_classes(file: str | IO[bytes]) -> list[str]:
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001 - not the zip format: no list, so that such classes are refused below
        unsafe = []
    finally:
        if not isinstance(file, str):
            # torch.load reads from where the file stands.
            file.seek(0)
    return [name for name in unsafe if DATA_CLASSES.fullmatch(name)]


def _explain(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    refused = re.search(r"GLOBAL ([\w.]+)|unrecognized function (.+?) which|allowlisted .* but got (<.+?>)", text)
    if refused:
        what = next(group for group in refused.groups() if group)
        return (
            f"{name} holds {what}, which is not made from files, as it could run code; load the checkpoint with the "
            "program that wrote it and save it again without that object"
        )
    if "central directory" in text or isinstance(error, EOFError):
        return f"{name} is truncated or was not written by torch.save"
    return f"{name} cannot be read: {text[:300]}"


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write with ``torch.save`` and bring it to the disk. Not atomic: give a temporary name and rename it.

    Raises:
        ConvertError: it cannot be written.
    """
    where = os.fspath(path)
    try:
        with Path(where).open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConvertError(f"{where} cannot be written: {error.strerror or error}") from None


def dump(value: Any, file: BinaryIO) -> int:
    """What ``torch.save`` writes, at the end of an open file; how many bytes that is."""
    before = file.tell()
    torch.save(value, file)
    return file.tell() - before


def plain(value: Any, name: str = "") -> Any:
    """``value`` in types that ``ftckpt.model.objects`` encodes; ``name`` says in errors what it is.

    A ``Namespace`` becomes a dict, a ``StandIn`` a dict with its class under ``class``; sets are sorted lists, types,
    devices and paths texts. Whatever else is not known becomes its ``repr``.

    Raises:
        ConvertError: the bytes of a tensor are not what was written.
    """
    if value is None or type(value) in (bool, int, float, str, bytes, bytearray, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        archives.check(value, name)
        return value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, argparse.Namespace):
        return _plain_items(vars(value), name)
    if isinstance(value, StandIn):
        fields = {key: item for key, item in vars(value).items() if key != "arguments"}
        arguments = plain(list(value.__dict__["arguments"]), name)
        return {"class": value.full_name, "arguments": arguments, **_plain_items(fields, name)}
    if isinstance(value, enum.Enum):
        kind = type(value)
        return {"class": f"{kind.__module__}.{kind.__qualname__}", "arguments": [value.name]}
    if isinstance(value, Mapping):
        return _plain_items(value, name)
    if isinstance(value, tuple):
        made = [plain(item, f"{name}.{index}") for index, item in enumerate(value)]
        return tuple(made) if type(value) is tuple else made
    if isinstance(value, (list, deque)):
        return [plain(item, f"{name}.{index}") for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, name) for item in value), key=repr)
    return str(value) if isinstance(value, (torch.dtype, torch.device, PurePath)) else repr(value)


def _plain_items(items: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    return {
        key if isinstance(key, (str, int)) else repr(key): plain(item, f"{name}.{key}" if name else str(key))
        for key, item in items.items()
    }


_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x08
_LOCAL_CRC = 14
"""Where in an entry's own header its CRC-32 stands."""


def save_streamed(
    file: BinaryIO, build: Callable[[torch.Tensor], Any], like: torch.Tensor, data: Iterable[Bytes]
) -> None:
    """Write ``build(tensor)``, where ``tensor`` has type and shape of ``like`` and the bytes that ``data`` yields.

    ``file`` is open for writing, has a name, and is written from its beginning. ``like``: never read or written, so
    that ``torch.empty`` costs no memory.

    Raises:
        ConvertError: the file cannot be written, or ``data`` has more or fewer bytes than the tensor.
    """
    # The archive has its final length from the start, with holes where the elements belong.
    with torch.serialization.skip_data():
        save(build(like), file.name)
    records = archives.records_of(map_file(Path(file.name)).data, file.name)
    begin = next(record.begin for record in records if record.key == "data/0")
    crc = done = 0
    for part in data:
        view = part.data
        if done + len(view) > like.nbytes:
            break
        crc = zlib.crc32(view, crc)
        while view:
            # At a place, past the buffer of ``file``; the system may take fewer bytes than it is given.
            written = os.pwrite(file.fileno(), view, begin + done)
            done, view = done + written, view[written:]
    else:
        if done == like.nbytes:
            _set_crc(file.name, begin + done, crc)
            return
    raise ConvertError(f"{file.name}: other than {like.nbytes} bytes came for its tensor")


def _set_crc(name: str, end: int, crc: int) -> None:
    """Keep the CRC-32 of the only storage of an archive, whose bytes end at ``end``."""
    # torch does not look at it, other readers of archives do.
    with zipfile.ZipFile(name, "a") as archive:
        (entry,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
        entry.CRC = crc
        archive.comment = b""  # anything: the list of entries at the end is written again
    with open(name, "r+b") as file:
        if not entry.flag_bits & _HAS_DESCRIPTOR:
            file.seek(entry.header_offset + _LOCAL_CRC)
        elif os.pread(file.fileno(), 4, end) == _DESCRIPTOR_SIGNATURE:
            file.seek(end + 4)
        else:
            return
        file.write(struct.pack("<I", crc))
