"""A writer of checkpoints that DeepSpeed loads with ``"checkpoint": {"load_universal": true}``, under ZeRO 1, 2, 3.

``engine.load_checkpoint(DESTINATION)`` finds it by the file ``latest_universal``. DeepSpeed restores masters,
optimizer state, hyperparameters, counters and the LR scheduler from it, but neither buffers nor frozen parameters,
though the files hold them too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import TORCH_DTYPES, Catalog, Get, Rows, Tensor, Unit, Writer
from ftckpt.universal.consolidation import cast, refuse_remainders
from ftckpt.universal.deepspeed.division import SUB_PARAMETERS_CLASS, Division
from ftckpt.universal.deepspeed.files import LATEST_UNIVERSAL
from ftckpt.universal.deepspeed.universal_reader import MASTER_FILE, OPTIMIZER, PARAM, WEIGHT_DTYPE, ZERO
from ftckpt.universal.foreign import pickles
from ftckpt.universal.safetensors import strip_memory, strips
from ftckpt.universal.storage import Destination

_REBUILT = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    SUB_PARAMETERS_CLASS,
)
"""Classes of DeepSpeed's whose objects it expects in the files."""


def restored(value: Any) -> Any:
    """Rebuilds in ``value``, as stand-ins, objects of these classes that ``pickles.plain`` turned into mappings."""
    if isinstance(value, Mapping):
        name = value.get("class", "")
        if name not in _REBUILT:
            return {key: restored(item) for key, item in value.items()}
        fields = {key: restored(item) for key, item in value.items() if key not in ("class", "arguments")}
        if str(fields.get("dtype", "")).startswith("torch."):
            fields["dtype"] = getattr(torch, fields["dtype"].removeprefix("torch."))
        made = pickles.stand_in(name)()
        vars(made).update(fields)
        return made
    if type(value) in (list, tuple):
        return type(value)(restored(item) for item in value)
    return value


_FLOATS = ("F32", "F16", "BF16", "F64")
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The names that engines under ZeRO up to 2 and under ZeRO 3 load, with the same content."""
_VERSION = "0.19.8"
"""The DeepSpeed version whose format is written."""
_GROUPS = 64
"""Parameter groups in the file: DeepSpeed loads at most as many as it has, and empty ones change nothing."""
_FILE_BYTES = 4096


class DeepSpeedUniversalWriter(Writer):
    """Writes a DeepSpeed universal checkpoint into ``path``: ``latest_universal`` and the directory it names."""

    def __init__(self, path: Path) -> None:
        self.destination = Destination(path)
        self._catalog: Catalog | None = None
        self._division: Division | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._frozen: tuple[str, ...] = ()
        self._weights = ""

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        refuse_remainders(tensors)
        self._catalog, self._division = catalog, Division(catalog)
        by_name: dict[str, dict[str, Tensor]] = {}
        for tensor in tensors:
            role, _, name = tensor.key.partition("/")
            by_name.setdefault(name, {})[role] = tensor
        tag, units, steps, buffers = _tag(catalog), [], [], []
        for name, roles in sorted(by_name.items()):
            buffers += [roles.pop("buffer")] if "buffer" in roles else []
            files = _files(name, roles)
            units += [_unit(f"{tag}/{ZERO}/{name}/{stem}.pt", [tensor]) for stem, tensor in files.items()]
            steps += [files["step"]] if "step" in files else []
            if files:
                self._shapes[name] = files[MASTER_FILE].shape
        if not self._shapes:
            raise ConvertError("the source has no weights and no masters: DeepSpeed could load nothing")
        trained = {name for name, roles in by_name.items() if set(roles) - {"weight"}}
        self._frozen = tuple(name for name in sorted(self._shapes) if trained and name not in trained)
        weights = [by_name[name]["weight"] for name in sorted(trained) if "weight" in by_name[name]]
        self._weights = weights[0].dtype if weights else ""
        units.append(_unit(f"{tag}/{ZERO}/{OPTIMIZER}", steps[:1]))
        return units + [_unit(f"{tag}/{name}", buffers) for name in _MODEL_FILES]

    def memory(self, unit: Unit) -> int:
        if _is_tensor(unit):
            return strip_memory(unit)
        # In memory as rows, tensors, and archive.
        return 5 * unit.nbytes

    def write(self, unit: Unit, get: Get) -> None:
        if self._catalog is None:
            raise ValueError("write before plan")
        with self.destination.file(unit.name) as file:
            if _is_tensor(unit):
                self._write_tensor(unit, get, file)
            elif unit.name.endswith(f"{ZERO}/{OPTIMIZER}"):
                pickles.dump(_optimizer_state(self._catalog, _step(unit, get)), file)
            elif unit.name.rpartition("/")[2] in _MODEL_FILES:
                pickles.dump(self._model_state(self._catalog, unit, get), file)
            else:
                pickles.dump(self._step_value(unit, get), file)

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        for unit in units:
            if not (self.destination.partial / unit.name).is_file():
                raise ConvertError(f"{self.destination.partial / unit.name} is missing; start the same command again")
        with self.destination.file(LATEST_UNIVERSAL) as file:
            file.write(_tag(catalog).encode())
        self.destination.commit()

    def _write_tensor(self, unit: Unit, get: Get, file: BinaryIO) -> None:
        (part,) = unit.parts
        dtype = "F32" if Path(unit.name).stem == MASTER_FILE else part.tensor.dtype
        # Rows go to a file that is mapped then: it may be larger than the memory.
        with self.destination.scratch(unit.name) as rows:
            for first, last in strips(part):
                rows.write(cast(get(part.tensor, first, last), part.tensor.dtype, dtype).data)
            rows.flush()
            data = np.memmap(rows, np.uint8, "r+") if rows.tell() else np.empty(0, np.uint8)
            tensor = torch.from_numpy(data).view(TORCH_DTYPES[dtype]).reshape(part.tensor.shape)
            pickles.dump({**self._fields(part.tensor), PARAM: tensor}, file)

    def _fields(self, tensor: Tensor) -> dict[str, Any]:
        """The fields next to a parameter's tensor, by which DeepSpeed shards it."""
        if self._division is None:
            raise ValueError("write before plan")
        fields: dict[str, Any] = restored(self._division.of(tensor.name))
        return {**fields, WEIGHT_DTYPE: tensor.dtype} if tensor.role == "weight" else fields

    def _step_value(self, unit: Unit, get: Get) -> Any:
        """The step: a number if the optimizer uses numbers (compiled ones accept no tensor), else a tensor."""
        step = _step(unit, get)
        is_number = self._division is not None and self._division.steps_are_numbers
        return int(step) if is_number and step is not None else step

    def _model_state(self, catalog: Catalog, unit: Unit, get: Get) -> dict[str, Any]:
        module = OrderedDict(
            (part.tensor.key.partition("/")[2], _tensor(_rows(part, get), part.tensor.dtype, part.tensor.shape))
            for part in unit.parts
        )
        settings = _settings(catalog)
        precision = catalog.objects.get("precision") or next(iter(catalog.derived.values()), self._weights)
        dtype = str(precision or "F32")
        section = {"BF16": {"bf16": {"enabled": True}}, "F16": {"fp16": {"enabled": True}}}.get(dtype, {})
        shapes = {name: torch.Size(shape) for name, shape in self._shapes.items() if name not in self._frozen}
        return {
            "lr_scheduler": None,
            "skipped_steps": 0,
            "ds_version": _VERSION,
            "ds_config": section,
            **restored(settings["state"]),
            "global_steps": catalog.iteration,
            "module": module,
            "buffer_names": list(module),
            "param_shapes": [OrderedDict(shapes)],
            "shared_params": {},
            # One rank of each kind: tensors are complete, and the loading job shards them.
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        }


def _files(name: str, roles: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a parameter by the stems of their files."""
    if not roles:
        return {}
    if "/" in name or name in ("", ".", ".."):
        raise ConvertError(f"{name!r} cannot be the name of a directory, which DeepSpeed requires")
    states = {role: tensor for role, tensor in roles.items() if role not in ("master", "weight")}
    master = roles.get("master", roles.get("weight"))
    if master is None:
        raise ConvertError(f"{name}: the source has {', '.join(states)} of it, and neither weight nor master")
    if master.dtype not in _FLOATS:
        raise ConvertError(f"{master.key}: is {master.dtype}; DeepSpeed's universal checkpoints hold floating types")
    for role, tensor in states.items():
        if tensor.shape != ((1,) if role == "step" else master.shape):
            raise ConvertError(f"{tensor.key}: has shape {tensor.shape}, its parameter {master.shape}")
    return {MASTER_FILE: master, **states}


def _unit(name: str, tensors: Sequence[Tensor]) -> Unit:
    size = sum(max(tensor.nbytes, tensor.rows * 4) for tensor in tensors)
    if name.endswith(f"/{MASTER_FILE}.pt"):
        size = sum(int(np.prod(tensor.shape)) * 4 for tensor in tensors)
    return Unit(name, tuple(map(Rows.whole, tensors)), size + _FILE_BYTES)


def _is_tensor(unit: Unit) -> bool:
    """Whether the unit is the file of a parameter's master, weight or optimizer state."""
    return f"/{ZERO}/" in unit.name and unit.name.count("/") == 3 and Path(unit.name).stem != "step"


def _tag(catalog: Catalog) -> str:
    return f"global_step{catalog.iteration}"


def _rows(part: Rows, get: Get) -> Bytes:
    return get(part.tensor, part.first, part.last)


def _tensor(data: Bytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    copied = torch.from_numpy(np.array(data)) if len(data) else torch.empty(0, dtype=torch.uint8)
    return copied.view(TORCH_DTYPES[dtype]).reshape(tuple(shape))


def _step(unit: Unit, get: Get) -> torch.Tensor | None:
    """The step as a scalar tensor, as in torch's optimizers; None if the unit has none."""
    for part in unit.parts:
        return _tensor(_rows(part, get), part.tensor.dtype, part.tensor.shape).reshape(())
    return None


def _optimizer_state(catalog: Catalog, step: torch.Tensor | None) -> dict[str, Any]:
    optimizer = restored(_settings(catalog)["optimizer"])
    groups = [*optimizer.pop("param_groups", []), *({} for _ in range(_GROUPS))][:_GROUPS]
    # One placeholder parameter each: DeepSpeed reads only hyperparameters from them, parameters from ``zero/``.
    listed = [{**group, "params": [number]} for number, group in enumerate(groups)]
    state = {0: {"step": step}} if step is not None else {}
    return {
        "ds_version": _VERSION,
        **optimizer,
        "param_groups": listed,
        "optimizer_state_dict": {"state": state, "param_groups": listed},
    }


def _settings(catalog: Catalog) -> dict[str, dict[str, Any]]:
    """The objects of a source that a DeepSpeed job wrote, as DeepSpeed stores them; empty for another source."""
    deepspeed = catalog.objects.get("deepspeed")
    if isinstance(deepspeed, Mapping):
        return {"state": dict(deepspeed.get("state") or {}), "optimizer": dict(deepspeed.get("optimizer") or {})}
    shards = catalog.objects.get("shards")
    first: Mapping[str, Any] = next(iter(shards.values()), {}) if isinstance(shards, Mapping) else {}
    counters, inner = first.get("counters"), first.get("optimizer")
    if not isinstance(counters, Mapping) or not isinstance(inner, Mapping) or "global_samples" not in counters:
        return {"state": {}, "optimizer": {}}  # of another framework
    counts = {key: counters[key] for key in ("global_samples", "skipped_steps") if key in counters}
    state = {**counts, "lr_scheduler": first.get("scheduler")}
    return {"state": state, "optimizer": {"param_groups": list(inner.get("groups") or [])}}
