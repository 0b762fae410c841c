"""A reader of DeepSpeed's universal checkpoints: ``zero/NAME/fp32.pt``, and optimizer state next to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Box, Fragment, Shape
from ftckpt.universal.catalog import TORCH_DTYPES, FileReader, FragmentPlace, dtype_name, whole_fragment
from ftckpt.universal.consolidation import derived_weights
from ftckpt.universal.deepspeed.files import (
    LATEST_UNIVERSAL,
    iteration_of,
    load_mapping,
    objects_of,
    precision,
    tag_directory,
)
from ftckpt.universal.deepspeed.reader import flat_module
from ftckpt.universal.foreign import archives, pickles
from ftckpt.universal.storage import PARTIAL

ZERO = "zero"
OPTIMIZER = "optimizer_state.pt"
MASTER_FILE = "fp32"
PARAM = "param"
WEIGHT_DTYPE = "weight_dtype"
"""Key of the original type of a weight without a master, which DeepSpeed requires in 32 bits."""
_MOST_OPEN = 64
"""Maximum of mapped files; a large model has tens of thousands."""


def recognises(path: Path) -> bool:
    """Whether ``path`` is a DeepSpeed universal checkpoint, or holds one that ``latest_universal`` names."""
    try:
        return (tag_directory(path, LATEST_UNIVERSAL) / ZERO / OPTIMIZER).is_file()
    except (OSError, ConvertError):
        return False


class DeepSpeedUniversalReader(FileReader):
    """Reads the checkpoint in ``path``, the directory of a tag or of several with a file ``latest_universal``.

    Trained parameters are ``master/`` and their optimizer state, frozen ones ``weight/``, buffers ``buffer/``.
    """

    def __init__(self, path: Path) -> None:
        if path.name.endswith(PARTIAL):
            raise ConvertError(f"{path}: was never completed; repeat the command that writes it, or remove it")
        path = tag_directory(path, LATEST_UNIVERSAL)
        files = _Files(path)
        stored = list(files.stored())
        cast = precision(files.state.get("ds_config"))
        fields = {"parameters": pickles.plain(files.fields)}
        super().__init__(
            path,
            stored,
            [files.state_path, *(path / ZERO).glob("**/*.pt")],
            origin="deepspeed-universal",
            iteration=iteration_of(files.state.get("global_steps"), files.state_path),
            layout={},
            objects={"deepspeed": {**objects_of(files.state, files.optimizer), **fields}, "precision": cast},
            derived=derived_weights({each.fragment.key for each in stored}, cast),
        )


class _Files:
    """The files of a checkpoint. ``fields``: the values next to the tensor of each parameter, by name."""

    def __init__(self, path: Path) -> None:
        self._folder = path / ZERO
        self.state, self.state_path = _model_state(path)
        self.optimizer = load_mapping(self._folder / OPTIMIZER)
        self.fields: dict[str, dict[str, Any]] = {}
        self._shapes = _parameter_shapes(self.state)
        self._module = dict(flat_module(self.state_path, self.state.get("module") or {}))
        # The system limits mappings. Tensors in use keep theirs alive.
        self._load = lru_cache(_MOST_OPEN)(pickles.load)

    def stored(self) -> Iterator[FragmentPlace]:
        """All tensors."""
        buffers = set(self.state.get("buffer_names") or ())
        for name in sorted(buffers & self._module.keys()):
            yield self._of_module(f"buffer/{name}", self._module[name])
        folders = [folder for folder in sorted(self._folder.iterdir()) if folder.is_dir()]
        absent = sorted(self._shapes.keys() - {folder.name for folder in folders})
        if absent:
            raise ConvertError(f"{self._folder / absent[0]}: is missing; {len(absent)} such directories are")
        for folder in folders:
            if folder.name not in buffers:
                yield from self._of_parameter(folder, self._module.get(folder.name))

    def _of_module(self, key: str, tensor: torch.Tensor) -> FragmentPlace:
        fragment = _fragment(key, tensor, tuple(tensor.shape))
        return FragmentPlace(fragment, self.state_path, partial(archives.bytes_of, tensor, key))

    def _of_parameter(self, folder: Path, weight: torch.Tensor | None) -> Iterator[FragmentPlace]:
        files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix == ".pt"}
        if MASTER_FILE not in files:
            raise ConvertError(f"{folder / MASTER_FILE}.pt is missing")
        name, path = folder.name, files.pop(MASTER_FILE)
        master, value = self._tensor(path), self._load(path)
        fields = {key: item for key, item in value.items() if key != PARAM} if isinstance(value, Mapping) else {}
        weight_dtype, is_padded = fields.pop(WEIGHT_DTYPE, ""), bool(fields.get("vocab_tensor"))
        if isinstance(value, Mapping):
            self.fields[name] = fields
        # Frozen: no optimizer state, and not among the shapes of trained parameters.
        is_frozen = not files and bool(self._shapes) and name not in self._shapes
        if is_frozen and weight is not None and weight.shape == master.shape:
            yield self._of_module(f"weight/{name}", weight)
            return
        # ZeRO 3 flattens: the stored shape applies if sizes agree, else it is that of a tensor-parallel part.
        shape = self._shapes.get(name, ())
        shape = shape if master.dim() == 1 and math.prod(shape) == master.numel() else tuple(master.shape)
        step = files.pop("step", None)
        yield from self._steps(name, step, has_state=bool(files))
        weight_or_master = "weight" if weight_dtype or is_frozen else "master"
        for role, file in {weight_or_master: path, **files}.items():
            dtype = TORCH_DTYPES.get(weight_dtype) if file == path else None
            tensor = self._tensor(file, dtype)
            if tensor.numel() != master.numel():
                raise ConvertError(f"{file} has {tensor.numel()} elements, {path} {master.numel()}")
            fragment = _fragment(f"{role}/{name}", tensor, shape)
            yield FragmentPlace(fragment, file, partial(self._read, file, fragment, dtype), is_padded)

    def _steps(self, name: str, file: Path | None, has_state: bool) -> Iterator[FragmentPlace]:
        value = self._load(file) if file is not None else self.optimizer if has_state else {}
        value = _common_step(value) if isinstance(value, Mapping) else value
        if value is None:
            return
        number = value.reshape(1) if isinstance(value, torch.Tensor) else torch.tensor([float(value)])
        data = np.array(archives.bytes_of(number, f"step/{name}"))
        fragment = whole_fragment(f"step/{name}", dtype_name(number, file), (1,))
        yield FragmentPlace(fragment, file or self._folder / OPTIMIZER, partial(np.asarray, data))

    def _tensor(self, path: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
        value = self._load(path)
        tensor = value.get(PARAM) if isinstance(value, Mapping) else value
        if not isinstance(tensor, torch.Tensor):
            raise ConvertError(f"{path}: holds no tensor {PARAM}")
        return tensor.detach() if dtype is None else tensor.detach().to(dtype)

    def _read(self, path: Path, fragment: Fragment, dtype: torch.dtype | None) -> Bytes:
        archives.check(self._tensor(path), fragment.key)
        tensor = self._tensor(path, dtype)
        if tensor.numel() != fragment.numel or dtype_name(tensor, path) != fragment.dtype:
            raise ConvertError(f"{path}: {fragment.key} was replaced while it was read")
        return archives.bytes_of(tensor, fragment.key)


def _fragment(key: str, tensor: torch.Tensor, shape: Shape) -> Fragment:
    box = Box((0,) * len(shape), shape)
    try:
        return Fragment(key, dtype_name(tensor, key), shape, box, 0, tensor.numel())
    except ValueError as error:
        raise ConvertError(f"{key}: {error}; it contradicts the shapes of parameters in model_states.pt") from None


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
