"""Objects of DeepSpeed's classes in files, written without DeepSpeed.

A loader of DeepSpeed expects a few objects of its own classes. Here they are made from classes of ours that have the
same fields; in the finished file stands the name of DeepSpeed's class.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from ftckpt.universal.foreign import pickles


class LossScaler:
    """A fixed loss scale."""


class DynamicLossScaler:
    """A loss scale that follows overflows."""


class SubparamShape:
    """Sizes of a parameter's parts."""


_NAMES: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": SubparamShape,
}


def restored(value: Any) -> Any:
    """What ``pickles.plain`` made of such an object, anywhere inside ``value``, as an object that ``save`` knows."""
    if isinstance(value, Mapping):
        known = _NAMES.get(str(value.get("class", "")))
        if known is None:
            return {key: restored(item) for key, item in value.items()}
        made = known()
        fields = {key: restored(item) for key, item in value.items() if key not in ("class", "arguments")}
        if str(fields.get("dtype", "")).startswith("torch."):
            fields["dtype"] = getattr(torch, fields["dtype"].removeprefix("torch."))
        vars(made).update(fields)
        return made
    if type(value) in (list, tuple):
        return type(value)(restored(item) for item in value)
    return value


def save(value: Any, path: str) -> None:
    """Write ``value``, with objects that ``restored`` made, as ``pickles.save`` does. Raises ConvertError."""
    pickles.save(value, path)
    names = [(_reference(kind.__module__, kind.__qualname__), name) for name, kind in _NAMES.items()]
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        (structure,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        held = archive.read(structure)
    found = [(ours, _reference(*name.rsplit(".", 1))) for ours, name in names if ours in held]
    if found:
        _replace(path, found)


def _reference(module: str, name: str) -> bytes:
    """How a class is named in such a file."""
    return f"c{module}\n{name}\n".encode()


def _replace(path: str, pairs: list[tuple[bytes, bytes]]) -> None:
    """Give the archive other references in its structure."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("/data.pkl"):
                for ours, theirs in pairs:
                    content = content.replace(ours, theirs)
            new.writestr(entry.filename, content)
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(made.getvalue())
