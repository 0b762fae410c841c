"""A reader of DeepSpeed's universal checkpoints: ``zero/NAME/fp32.pt``, and optimizer state next to it."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Box, Fragment, Shape
from ftckpt.universal.catalog import TORCH_DTYPES, Catalog, Reader, dtype_name
from ftckpt.universal.deepspeed.files import (
    LATEST_UNIVERSAL,
    iteration_of,
    load_mapping,
    load_value,
    objects_of,
    precision,
    tag_directory,
)
from ftckpt.universal.deepspeed.reader import flat_module
from ftckpt.universal.foreign import archives, pickles
from ftckpt.universal.storage import PARTIAL, fingerprint_of

ZERO = "zero"
OPTIMIZER = "optimizer_state.pt"
MASTER_FILE = "fp32"
PARAM = "param"
WEIGHT_DTYPE = "weight_dtype"
"""Key of the original type of a weight without a master, which DeepSpeed requires in 32 bits."""
_MOST_OPEN = 64
"""Maximum of mapped files; a large model has tens of thousands."""


@dataclass(frozen=True)
class _TensorPlace:
    """A tensor in the file ``path``, under ``name`` in a file of several; cast to ``dtype`` on reading, if given."""

    path: Path
    name: str
    is_number: bool = False
    dtype: torch.dtype | None = None


def recognises(path: Path) -> bool:
    """Whether ``path`` is a DeepSpeed universal checkpoint, or holds one that ``latest_universal`` names."""
    try:
        return (tag_directory(path, LATEST_UNIVERSAL) / ZERO / OPTIMIZER).is_file()
    except (OSError, ConvertError):
        return False


class DeepSpeedUniversalReader(Reader):
    """Reads the checkpoint in ``path``, the directory of a tag or of several with a file ``latest_universal``.

    Trained parameters are ``master/`` and their optimizer state, frozen ones ``weight/``, buffers ``buffer/``.

    Raises:
        ConvertError: a file is missing or invalid; the text names it.
    """

    def __init__(self, path: Path) -> None:
        if path.name.endswith(PARTIAL):
            raise ConvertError(f"{path}: was never completed; repeat the command that writes it, or remove it")
        self._path = path = tag_directory(path, LATEST_UNIVERSAL)
        self._open: OrderedDict[Path, Any] | None = OrderedDict()
        self._guard = threading.Lock()
        self._state, self._state_path = _model_state(path)
        self._optimizer = load_mapping(path / ZERO / OPTIMIZER)
        self._shapes = _parameter_shapes(self._state)
        fragments: list[Fragment] = []
        self._stored: list[_TensorPlace] = []
        self._parameters: dict[str, dict[str, Any]] = {}
        for fragment, stored in self._all():
            fragments.append(fragment)
            self._stored.append(stored)
        keys = {fragment.key for fragment in fragments}
        masters = [key.removeprefix("master/") for key in keys if key.startswith("master/")]
        cast = precision(self._state.get("ds_config"))
        padded = {name for name, more in self._parameters.items() if more.get("vocab_tensor")}
        self.catalog = Catalog(
            origin="deepspeed-universal",
            iteration=iteration_of(self._state.get("global_steps"), self._state_path),
            layout={},
            fragments=tuple(fragments),
            objects={
                "deepspeed": {
                    **objects_of(self._state, self._optimizer),
                    "parameters": pickles.plain(self._parameters),
                },
                "precision": cast,
            },
            padded=frozenset(
                fragment.key
                for fragment, stored in zip(fragments, self._stored, strict=True)
                if fragment.key.partition("/")[2] in padded and not stored.is_number
            ),
            derived={f"weight/{name}": cast for name in sorted(masters)},
        )

    def read(self, index: int) -> Bytes:
        stored, fragment = self._stored[index], self.catalog.fragments[index]
        tensor = self._tensor(stored, fragment.key)
        if tensor.numel() != fragment.numel or dtype_name(tensor, stored.path) != fragment.dtype:
            raise ConvertError(f"{stored.path}: {fragment.key} was replaced while it was read")
        data: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return data

    def where(self, index: int) -> Path:
        """The file that holds a fragment."""
        return self._stored[index].path

    def fingerprint(self) -> str:
        return fingerprint_of([self._state_path, *(self._path / ZERO).glob("**/*.pt")])

    def close(self) -> None:
        with self._guard:
            self._open = None

    def _all(self) -> Iterator[tuple[Fragment, _TensorPlace]]:
        buffers = set(self._state.get("buffer_names") or ())
        module = dict(flat_module(self._state_path, self._state.get("module") or {}))
        for name in sorted(buffers & module.keys()):
            yield _fragment("buffer", name, module[name], None), _TensorPlace(self._state_path, name)
        folders = [folder for folder in sorted((self._path / ZERO).iterdir()) if folder.is_dir()]
        absent = sorted(self._shapes.keys() - {folder.name for folder in folders})
        if absent:
            raise ConvertError(f"{self._path / ZERO / absent[0]}: is missing; {len(absent)} such directories are")
        for folder in folders:
            if folder.name not in buffers:
                yield from self._of_parameter(folder, module.get(folder.name))

    def _of_parameter(self, folder: Path, weight: torch.Tensor | None) -> Iterator[tuple[Fragment, _TensorPlace]]:
        files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix == ".pt"}
        if MASTER_FILE not in files:
            raise ConvertError(f"{folder / MASTER_FILE}.pt is missing")
        name, master = folder.name, self._tensor(_TensorPlace(files[MASTER_FILE], ""))
        value = self._value(files[MASTER_FILE])
        if isinstance(value, Mapping):
            self._parameters[name] = {key: item for key, item in value.items() if key != PARAM}
        shape = self._shapes.get(name, ())
        # ZeRO 3 flattens: the stored shape applies if sizes agree, else it is that of a tensor-parallel part.
        shape = shape if master.dim() == 1 and math.prod(shape) == master.numel() else tuple(master.shape)
        weight_dtype = self._parameters.get(name, {}).pop(WEIGHT_DTYPE, "")
        # Frozen: no optimizer state, and not among the shapes of trained parameters.
        is_frozen = not (files.keys() - {MASTER_FILE}) and bool(self._shapes) and name not in self._shapes
        if is_frozen and weight is not None and tuple(weight.shape) == tuple(master.shape):
            yield _fragment("weight", name, weight, None), _TensorPlace(self._state_path, name)
            return
        stored = _TensorPlace(files[MASTER_FILE], "", dtype=TORCH_DTYPES.get(weight_dtype))
        role = "weight" if weight_dtype or is_frozen else "master"
        yield _fragment(role, name, self._tensor(stored), shape), stored
        for role in sorted(files.keys() - {MASTER_FILE, "step"}):
            tensor = self._tensor(_TensorPlace(files[role], ""))
            if tensor.numel() != master.numel():
                raise ConvertError(
                    f"{files[role]} has {tensor.numel()} elements, {files[MASTER_FILE]} {master.numel()}"
                )
            yield _fragment(role, name, tensor, shape), _TensorPlace(files[role], "")
        step = _TensorPlace(files.get("step", self._path / ZERO / OPTIMIZER), "step", True)
        if "step" in files or (files.keys() - {MASTER_FILE} and _common_step(self._optimizer) is not None):
            yield _fragment("step", name, self._tensor(step), (1,)), step

    def _tensor(self, stored: _TensorPlace, key: str | None = None) -> torch.Tensor:
        """The tensor; with ``key``, its name in errors, its bytes are verified."""
        value = self._value(stored.path)
        if stored.is_number:
            value = _common_step(value) if isinstance(value, Mapping) else value
            return value.reshape(1) if isinstance(value, torch.Tensor) else torch.tensor([float(value)])
        if stored.path == self._state_path:
            value = dict(flat_module(stored.path, value.get("module") or {})).get(stored.name)
        elif isinstance(value, Mapping):
            value = value.get(PARAM)
        if not isinstance(value, torch.Tensor):
            raise ConvertError(f"{stored.path}: holds no tensor {stored.name or PARAM}")
        if key is not None:
            archives.check(value, key)
        return value.detach() if stored.dtype is None else value.detach().to(stored.dtype)

    def _value(self, path: Path) -> Any:
        with self._guard:
            if self._open is None:
                raise ConvertError(f"{self._path}: was closed")
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
        # Without the lock: others can read open files meanwhile. Two threads may open one file; either mapping works.
        value = load_value(path)
        with self._guard:
            if self._open is not None:
                self._open[path] = value
                # The system limits mappings. Tensors in use keep theirs alive.
                while len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)
        return value


def _fragment(role: str, name: str, tensor: torch.Tensor, shape: Shape | None) -> Fragment:
    shape = tuple(tensor.shape) if shape is None else shape
    box = Box((0,) * len(shape), shape)
    try:
        return Fragment(f"{role}/{name}", dtype_name(tensor, name), shape, box, 0, tensor.numel())
    except ValueError as error:
        raise ConvertError(
            f"{role}/{name}: {error}; it contradicts the shapes of parameters in model_states.pt"
        ) from None


def _model_state(path: Path) -> tuple[dict[str, Any], Path]:
    files = sorted(path.glob("mp_rank_*_model_states.pt")) or sorted(path.glob("zero_pp_rank_*_model_states.pt"))
    if not files:
        raise ConvertError(f"{path}: mp_rank_00_model_states.pt, with counters and learning rates, is missing")
    return load_mapping(files[0]), files[0]


def _parameter_shapes(state: Mapping[str, Any]) -> dict[str, Shape]:
    """The shapes of trained parameters on the rank that wrote the file, of its parts if tensor-parallel."""
    groups = state.get("param_shapes") or []
    listed = groups if isinstance(groups, (list, tuple)) else [groups]
    return {name: tuple(map(int, shape)) for group in listed for name, shape in group.items()}


def _common_step(optimizer: Mapping[str, Any]) -> Any:
    """The step that ZeRO 3 stores once for all parameters, None if there is none."""
    states = (optimizer.get("optimizer_state_dict") or {}).get("state") or {}
    state = states.get(0) or {}
    return state.get("step")
