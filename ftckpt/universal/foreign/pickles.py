"""Reads and writes pickled files of other programs' checkpoints without running code from them.

``torch.load(weights_only=True)`` reads them and creates only allowlisted types. Data classes of Megatron and
DeepSpeed become a ``StandIn``, so that neither has to be installed.
"""

from __future__ import annotations

import argparse
import enum
import functools
import os
import re
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from pickle import GLOBAL, _Pickler
from types import SimpleNamespace
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.foreign import archives
from ftckpt.universal.foreign.archives import View
from ftckpt.universal.storage import map_file

DATA_CLASSES = re.compile(
    r"megatron\.(\w+\.)*enums\.\w+"
    r"|megatron\.(\w+\.)*(AttnBackend|AttnMaskType|AttnType|LayerType|ModelType|Fp8Recipe|CudaGraphScope)"
    r"|megatron\.(\w+\.)*(RerunMode|RerunState|RerunDiagnostic|QuickStats|DataIteratorMode|CallerState?)"
    r"|megatron\.core\.(\w+\.)*(MCoreMetadata|MCoreSavePlan)"
    r"|deepspeed\.(\w+\.)*(fragment_address|tensor_fragment|SubparamShape)"
    r"|deepspeed\.(\w+\.)*(LossScaler|DynamicLossScaler|LossScalerBase)"
    r"|deepspeed\.(\w+\.)*(ZeroStageEnum|DtypeEnum|OffloadDeviceEnum|PartitionedParamStatus|ZeroParamStatus)"
    r"|signal\.Signals"
)
"""Full names of other programs' classes that hold data alone."""

_LOCK = threading.Lock()
"""Guards torch's list of allowed classes, which is global to the process."""


class StandIn:
    """An object of another program's class: ``arguments`` of its constructor, and its fields as attributes."""

    full_name = ""
    """Module and name of the class."""

    def __new__(cls, *arguments: Any) -> StandIn:
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        """Accepts any signature; ``__new__`` stores the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Sets attributes from fields, or from fields and slots; any other state becomes the attribute ``state``."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.__dict__.update(part or {})
        else:
            self.__dict__["state"] = state

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self.__dict__["arguments"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "arguments"}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{self.full_name or 'StandIn'}({fields})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.full_name, repr(vars(self))))


@functools.cache
def stand_in(full_name: str) -> type[StandIn]:
    """The subclass of ``StandIn`` for a full name; the same one on each call."""
    return type(full_name.rpartition(".")[2], (StandIn,), {"full_name": full_name})


def member(kind: Any, name: str) -> StandIn:
    """A stand-in for ``getattr(class, name)``, as some Python versions pickle a member of an enumeration."""
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
    """Path classes by their full names in files; since Python 3.13 they are in another module."""
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
"""Allowed types in addition to torch's own, by their full names in files."""


def load(path: str | os.PathLike[str]) -> Any:
    """Loads a file of ``torch.save``; tensors are on the CPU, mapped from the file if its format allows.

    Classes in ``DATA_CLASSES`` become a ``StandIn``, dataclasses and enumerations among them. Large tensors are not
    verified here, but by ``archives.check`` before their first use. Any thread may call this.

    Raises:
        ConvertError: the file is missing, truncated, corrupt, not of ``torch.save``, or holds an unknown class.
    """
    where = os.fspath(path)
    try:
        with Path(where).open("rb") as file:
            zipped = file.read(len(archives.ARCHIVE)) == archives.ARCHIVE
    except OSError as error:
        raise ConvertError(f"{where} cannot be read: {error.strerror}") from None
    if not zipped:
        return _load(where, where)
    data = map_file(Path(where)).data
    listed = archives.check_all(data, where, large=False)
    mapped: list[torch.UntypedStorage] = []
    value = _load(where, where, mapped=mapped)
    archives.mark(mapped, listed, data, where)
    return value


def loads(data: bytes | memoryview, name: str) -> Any:
    """``load`` of bytes from inside another file, all of them verified; ``name`` is for errors."""
    if bytes(data[: len(archives.ARCHIVE)]) == archives.ARCHIVE:
        archives.check_all(memoryview(data), name)
    return _load(View(data), name)


def shapes(data: bytes | memoryview, name: str) -> Any:
    """``loads`` of tensors on the device ``meta``, without elements; nothing is verified.

    The attribute ``_checkpoint_offset`` of their storages is the offset of the elements in ``data``.
    """
    return _load(View(data), name, "meta")


def _load(
    source: str | View, name: str, device: str = "cpu", mapped: list[torch.UntypedStorage] | None = None
) -> Any:
    """Loads with the allowlist; with ``mapped`` storages are mapped from the file ``source`` and appended to it."""

    def located(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if mapped is not None:
            mapped.append(storage)
        return storage

    with _LOCK:
        try:
            file = cast("str | IO[bytes]", source)
            # torch.load refuses every type that is neither torch's own nor in ``allowed``.
            data_classes = _data_classes(file) if device == "cpu" else []
            allowed = {**{data_class: stand_in(data_class) for data_class in data_classes}, **HARMLESS}
            where: Any = device if mapped is None else located
            with torch.serialization.safe_globals([(value, key) for key, value in allowed.items()]):
                return torch.load(file, map_location=where, weights_only=True, mmap=mapped is not None)
        except Exception as error:  # noqa: BLE001 - a corrupt file can raise anything
            raise ConvertError(_explain(name, error)) from None


def _data_classes(file: str | IO[bytes]) -> list[str]:
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001 - not the zip format: without a list torch.load refuses such classes
        unsafe = []
    finally:
        if not isinstance(file, str):
            # torch.load reads from the current position.
            file.seek(0)
    return [name for name in unsafe if DATA_CLASSES.fullmatch(name)]


def _explain(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    refused = re.search(r"GLOBAL ([\w.]+)|unrecognized function (.+?) which|allowlisted .* but got (<.+?>)", text)
    if refused:
        what = next(group for group in refused.groups() if group)
        return (
            f"{name} holds {what}, which is not loaded, as it could run code; load the checkpoint with the program "
            "that wrote it and save it again without that object"
        )
    if "central directory" in text or isinstance(error, EOFError):
        return f"{name} is truncated or was not written by torch.save"
    return f"{name} cannot be read: {text[:300]}"


class _NamePickler(_Pickler):
    """Writes stand-ins under the names of the classes that they stand for, which need not be installed."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """See pickle's Python implementation; that in C requires that the class can be imported."""
        if isinstance(obj, type) and issubclass(obj, StandIn):
            module, _, kind = obj.full_name.rpartition(".")
            self.write(GLOBAL + f"{module}\n{kind}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


def dump(value: Any, file: BinaryIO) -> int:
    """Writes with ``torch.save`` at the end of an open file; returns the number of bytes."""
    before = file.tell()
    torch.save(value, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_NamePickler))
    return file.tell() - before


def plain(value: Any, name: str = "") -> Any:
    """``value`` in types that ``ftckpt.model.objects`` encodes; ``name`` is for errors.

    A ``Namespace`` becomes a dict, a ``StandIn`` or enumeration member a dict with its class under ``class``, a set a
    sorted list, types, devices and paths texts. Any other object becomes its ``repr``.

    Raises:
        ConvertError: a tensor is corrupt.
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
