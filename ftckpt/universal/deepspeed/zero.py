"""Reads checkpoints that ``save_checkpoint`` of a DeepSpeed engine wrote: ZeRO 1, 2 and 3, none, and pipelines.

Masters and optimizer state come out of partitions (``deepspeed_partitions``), weights and buffers out of modules and
layers (``deepspeed_pipeline``). Where tensor-parallel ranks' parts lie is said by a specification, or else by the
``universal_checkpoint_info`` of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Box, Fragment, Shape
from ftckpt.universal.catalog import Bytes, Catalog, Source, fingerprint_of
from ftckpt.universal.deepspeed.files import Files, find_files, is_deepspeed
from ftckpt.universal.deepspeed.partitions import Held, read_partitions
from ftckpt.universal.deepspeed.patterns import place_by_info, whole
from ftckpt.universal.deepspeed.pipeline import read_weights
from ftckpt.universal.deepspeed.plain import read_plain
from ftckpt.universal.deepspeed.values import dtype_name, objects_of, precision
from ftckpt.universal.fill import take
from ftckpt.universal.foreign import records
from ftckpt.universal.language.placing import Placement, Span, Stored, place
from ftckpt.universal.language.spec import Spec

recognises = is_deepspeed
INFO = "universal_checkpoint_info"


@dataclass(frozen=True)
class _Read:
    """Elements of a file's tensor: ``values`` one after another, or those of ``box`` among a part of ``shape``."""

    values: torch.Tensor
    positions: tuple[Shape, Box, int] | None
    """Where they do not lie one after another: shape, box in it, and the flat position of ``values[0]``."""


class DeepSpeedSource(Source):
    """The checkpoint in ``path``, a directory with the file ``latest`` or that of one tag.

    ``spec`` says where tensor-parallel ranks' parts lie; without one the checkpoint must. ``roles`` are those that
    are wanted: an optimizer whose state has numbers for names is only read where it is.

    Raises:
        ConvertError: files are missing, contradict each other, or hold what cannot be placed; the text names file and
            tensor.
    """

    def __init__(self, path: Path, spec: Spec | None = None, roles: Iterable[str] | None = None) -> None:
        self._files = files = find_files(path)
        wanted = None if roles is None else set(roles)
        held = _all_held(files, wanted)
        places = _places(files, held, spec)
        fragments: list[Fragment] = []
        self._reads: list[_Read] = []
        self._paths: list[Path] = []
        averaged: set[str] = set()
        padded: set[str] = set()
        for each in held:
            placed = places.get(_place_key(each))
            if placed is None:
                continue
            for fragment, read in _fragments(each, placed):
                fragments.append(fragment)
                self._reads.append(read)
                self._paths.append(each.path)
                if not each.is_number:
                    averaged |= {fragment.key} if placed.average else set()
                    padded |= {fragment.key} if placed.padded else set()
        self._catalog = Catalog(
            origin="deepspeed",
            iteration=_iteration(files),
            layout=_layout(files),
            fragments=tuple(fragments),
            objects={"deepspeed": _objects(files), "precision": _precision(files)},
            padded=frozenset(padded),
            average=frozenset(averaged),
            derived=_derived(files, fragments),
        )

    @property
    def catalog(self) -> Catalog:
        """See Source. ``objects["deepspeed"]`` is what is no tensor: counters, schedulers, parameter groups."""
        return self._catalog

    def read(self, index: int) -> Bytes:
        """See Source."""
        if not self._files.loaded:
            raise ConvertError(f"{self._files.path}: was closed")
        records.check(self._reads[index].values, self._catalog.fragments[index].key)
        data: Bytes = self._reads[index].values.contiguous().view(torch.uint8).numpy()
        positions = self._reads[index].positions
        if positions is None:
            return data
        shape, box, first = positions
        return take(data, shape, box, first, first + len(self._reads[index].values))

    def where(self, index: int) -> Path:
        """The file that a fragment lies in."""
        return self._paths[index]

    def fingerprint(self) -> str:
        """See Source."""
        return fingerprint_of(path for kind in self._files.kinds for _, path in self._files.of(kind))

    def close(self) -> None:
        """See Source."""
        self._files.loaded.clear()
        self._reads.clear()


def _all_held(files: Files, roles: set[str] | None) -> list[Held]:
    _refuse_unknown(files)
    held = list(read_weights(files))
    if files.of("zero"):
        held += list(read_partitions(files))
    elif roles is None or roles - {"weight", "buffer"}:
        held += list(read_plain(files, held))
    _check_layers(files, held)
    return held


def _check_layers(files: Files, held: Sequence[Held]) -> None:
    """A layer without parameters has no file, so that a file that is missing shows only by its weights."""
    if files.of("layer"):
        weights = {(each.name, each.tp) for each in held if each.role == "weight"}
        for each in held:
            if each.role == "master" and (each.name, each.tp) not in weights:
                raise ConvertError(f"{files.path}: no layer_… file of tp {each.tp} holds the weight {each.name}")


def _refuse_unknown(files: Files) -> None:
    for _, path in files.models():
        state = files.load(path)
        if state.get("ds_autoep_layers") is not None or state.get("autoep_layers") is not None:
            raise ConvertError(f"{path}: was written with AutoEP, whose experts this program does not know")


def _place_key(held: Held) -> tuple[str, int, bool]:
    return held.name, held.tp, held.role == "buffer"


def _places(files: Files, held: Sequence[Held], spec: Spec | None) -> dict[tuple[str, int, bool], Placement]:
    shapes: dict[tuple[str, int, bool], tuple[Shape, Path]] = {}
    for each in held:
        shape, path = shapes.setdefault(_place_key(each), (each.shape, each.path))
        if shape != each.shape:
            raise ConvertError(f"{each.name} is {each.shape} in {each.path} and {shape} in {path}")
    places = {key: whole(key[0], shape) for key, (shape, _) in shapes.items() if key[2]}
    names = sorted({(name, tp) for name, tp, is_buffer in shapes if not is_buffer})
    first = files.load(files.models()[0][1])
    if spec is not None:
        stored = [Stored(name, shapes[name, tp, False][0], {"tp": tp}) for name, tp in names]
        for (name, tp), placed in zip(names, place(spec, stored, _arguments(first)), strict=True):
            if placed is not None:
                places[name, tp, False] = placed
        return places
    info = first.get(INFO) or {}
    if files.tp > 1 and not info:
        raise ConvertError(
            f"{files.path} is of {files.tp} tensor-parallel ranks and has no {INFO} that says how they divide "
            "parameters: name a specification with --spec"
        )
    for name in sorted({name for name, _ in names}):
        ranks = [tp for tp in range(files.tp) if (name, tp, False) in shapes]
        if len(ranks) != files.tp:
            raise ConvertError(f"{name}: only tensor-parallel ranks {ranks} of {files.tp} hold it")
        for tp, placed in zip(
            ranks, place_by_info(info, name, [shapes[name, t, False][0] for t in ranks]), strict=True
        ):
            places[name, tp, False] = placed
    return places


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the script put into the checkpoint of its command line."""
    said = state.get("args") or {}
    return dict(said) if isinstance(said, Mapping) else dict(vars(said))


def _fragments(held: Held, placed: Placement) -> Iterable[tuple[Fragment, _Read]]:
    key, dtype = f"{held.role}/{placed.name}", dtype_name(held.values, held.path)
    if held.is_number:
        span = placed.spans[0]
        outer = len(placed.shape) - len(held.shape)
        shape = placed.shape[:outer] or (1,)
        box = Box(span.box.offset[:outer] or (0,), (1,) * len(shape))
        yield Fragment.whole(key, dtype, shape, box), _Read(held.values, None)
        return
    for span in placed.spans:
        start, stop = span.within(held.shape, held.first, held.first + held.values.numel())
        if start < stop:
            yield Fragment(key, dtype, placed.shape, span.box, start, stop), _reading(held, span, start, stop)


def _reading(held: Held, span: Span, start: int, stop: int) -> _Read:
    local = span.local
    if local.shape[1:] != held.shape[1:]:
        return _Read(held.values, (held.shape, local, held.first))
    begin = (local.offset[0] * math.prod(held.shape[1:]) if held.shape else 0) - held.first
    return _Read(held.values[begin + start : begin + stop], None)


def _derived(files: Files, fragments: Sequence[Fragment]) -> dict[str, str]:
    """Weights that were not stored, as under ZeRO 3."""
    keys = {fragment.key for fragment in fragments}
    names = {key.removeprefix("master/") for key in keys if key.startswith("master/")}
    return {f"weight/{name}": _precision(files) for name in sorted(names) if f"weight/{name}" not in keys}


def _precision(files: Files) -> str:
    return precision(files.load(files.models()[0][1]).get("ds_config"))


def _iteration(files: Files) -> int:
    path = files.models()[0][1]
    steps = files.load(path).get("global_steps", files.load(path).get("iteration"))
    if type(steps) is not int or steps < 0:
        raise ConvertError(f"{path}: global_steps is {steps!r}, not a number of iterations")
    return steps


def _layout(files: Files) -> dict[str, int | str | bool]:
    stage = 0
    for _, path in files.of("zero")[:1]:
        state = files.load(path).get("optimizer_state_dict") or {}
        said = state.get("zero_stage", 1)
        stage = int(said if isinstance(said, int) else said.arguments[0])
    return {"tp": files.tp, "pp": files.pp, "dp": files.dp, "zero": stage}


def _objects(files: Files) -> dict[str, Any]:
    optimizer = next((files.load(path)["optimizer_state_dict"] for _, path in files.of("zero")), None)
    first = files.load(files.models()[0][1])
    return objects_of(first, optimizer if optimizer is not None else first.get("optimizer") or {})
