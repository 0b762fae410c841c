"""The files of a DeepSpeed checkpoint: finding, checking for completeness, and loading them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.errors import ConvertError
from ftckpt.model.text import listed, with_article
from ftckpt.universal.foreign import pickles

_TENSORS = {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names"}
_OPTIMIZER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version")
_SECTIONS = (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16"))


def precision(config: Any) -> str:
    """The type of weights under a DeepSpeed configuration."""
    for name, dtype in _SECTIONS:
        section = config.get(name) if isinstance(config, Mapping) else None
        if isinstance(section, Mapping) and section.get("enabled"):
            return dtype
    return "F32"


def iteration_of(steps: Any, path: Path) -> int:
    """Checks that ``global_steps`` in ``path`` is a number of iterations, and returns it. Raises ConvertError."""
    if type(steps) is not int or steps < 0:
        raise ConvertError(f"{path}: global_steps is {steps!r}, not a number of iterations")
    return steps


def objects_of(state: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The catalog's objects: ``state`` has counters, schedulers, the configuration and users' state, ``optimizer``
    has hyperparameters and the loss scale."""
    # The inner optimizer's state has the first name under ZeRO 1 and 2, the second under ZeRO 3.
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    groups = (
        optimizer.get("param_groups") or (inner.get("param_groups") if isinstance(inner, Mapping) else None) or []
    )
    objects: dict[str, Any] = pickles.plain(
        {
            "state": {key: value for key, value in state.items() if key not in _TENSORS},
            "optimizer": {
                **{key: optimizer[key] for key in _OPTIMIZER if key in optimizer},
                "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            },
        }
    )
    return objects


LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_MOST_NAMED = 6
# File names of DeepSpeed 0.19.8; only optimizer files of its BF16_Optimizer start with ``bf16_``.
_KINDS = {
    "zero": re.compile(r"(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
    "model": re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "partition": re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "layer": re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt"),
    "expert": re.compile(r"layer_(?P<layer>\d+)_expert_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "experts": re.compile(r"expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
}


@dataclass(frozen=True, order=True)
class FileNumbers:
    """Numbers in a file's name: ``mp`` (tensor-parallel ranks within stages), ``dp`` (replicas or experts), layer."""

    layer: int
    mp: int
    dp: int


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint, by kind; ``pp``, ``tp`` and ``dp`` are the sizes of the job that wrote it.

    ``zero``: optimizer partitions; ``model``: engine state, one per pipeline stage and tensor-parallel rank;
    ``partition``: the same under ZeRO 3, one per rank; ``layer``: layers of a PipelineModule; ``expert``: weights of
    an expert; ``experts``: optimizers of a job with experts and without ZeRO.
    """

    path: Path
    kinds: Mapping[str, Mapping[FileNumbers, Path]]
    pp: int = 1
    tp: int = 1
    dp: int = 1
    loaded: dict[Path, Any] = field(default_factory=dict)

    def of(self, kind: str) -> list[tuple[FileNumbers, Path]]:
        """The files of a kind, sorted."""
        return sorted(self.kinds.get(kind, {}).items())

    def load(self, path: Path) -> dict[str, Any]:
        """The content of a file, its tensors mapped; the same object at each call. Raises ConvertError."""
        if path not in self.loaded:
            value = load_mapping(path)
            self.loaded[path] = value
        content: dict[str, Any] = self.loaded[path]
        return content

    def models(self) -> list[tuple[FileNumbers, Path]]:
        """The files with the engine's state."""
        return self.of("model") or self.of("partition")

    def coords(self, place: FileNumbers) -> tuple[tuple[str, int]]:
        """The tensor-parallel rank of a file."""
        return (("tp", place.mp % self.tp),)


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a DeepSpeed file, its tensors mapped. Raises ConvertError, also for another value."""
    value = pickles.load(path)
    if not isinstance(value, dict):
        raise ConvertError(
            f"{path} holds {with_article(type(value).__name__)}, not the mapping that DeepSpeed writes"
        )
    return value


def tag_directory(path: Path, marker: str) -> Path:
    """The directory of the newest checkpoint: the one that ``path / marker`` names; without a marker ``path`` itself.

    Raises:
        ConvertError: the marker is unreadable or names no directory in ``path``.
    """
    try:
        tag = (path / marker).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, UnicodeDecodeError) as error:
        raise ConvertError(f"{path / marker} cannot be read: {error}") from None
    if not tag or "/" in tag or not (path / tag).is_dir():
        raise ConvertError(f"{path / marker} names {tag!r}, which is no directory next to it; give the one to read")
    return path / tag


def recognises(path: Path) -> bool:
    """Whether ``path`` holds a checkpoint that ``save_checkpoint`` of an engine wrote."""
    try:
        directory = tag_directory(path, LATEST)
        if (directory / "zero").is_dir():  # a universal checkpoint, which has model states too
            return False
        return any(_kind(entry.name) in ("model", "partition") for entry in directory.iterdir())
    except (OSError, ConvertError):
        return False


def find_files(path: Path) -> Files:
    """The files in ``path``, the directory of a checkpoint or of several with a file ``latest``.

    Raises:
        ConvertError: files are missing, which the text names, or belong to different runs.
    """
    path = tag_directory(path, LATEST)
    kinds: dict[str, dict[FileNumbers, Path]] = {}
    prefixes: set[str] = set()
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise ConvertError(f"{path} cannot be read: {error.strerror}") from None
    for entry in entries:
        kind = _kind(entry.name)
        match = _KINDS[kind].fullmatch(entry.name) if kind else None
        if match:
            numbers = {key: int(value or 0) for key, value in match.groupdict().items() if key != "prefix"}
            kinds.setdefault(kind, {})[FileNumbers(**{"layer": 0, "mp": 0, "dp": 0, **numbers})] = entry
            prefixes |= {match["prefix"]} if kind == "zero" else set()
    if len(prefixes) > 1:
        raise ConvertError(f"{path} holds optimizer files of two runs, with different prefixes: remove the old ones")
    files = _with_sizes(Files(path, kinds))
    _check_complete(files, next(iter(prefixes), ""))
    return files


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), "")


def _with_sizes(files: Files) -> Files:
    models = files.models()
    if not models:
        raise ConvertError(f"{files.path} holds no mp_rank_…_model_states.pt: it is no checkpoint of DeepSpeed")
    first = files.load(models[0][1])
    # Older versions do not store the sizes: the numbers in file names give them.
    degrees = first.get("checkpoint_parallel_dimensions") or {}
    ranks = max(place.mp for place, _ in models) + 1
    layer_ranks = max((place.mp for place, _ in files.of("layer")), default=-1) + 1
    tp = degrees.get("tp_degree") or layer_ranks or ranks
    pp = degrees.get("pp_degree") or max(1, ranks // tp)
    dp = first.get("dp_world_size") or max((place.dp for place, _ in files.of("zero")), default=0) + 1
    if not all(type(size) is int and size > 0 for size in (tp, pp, dp)):
        raise ConvertError(f"{models[0][1]}: sizes of the layout are {tp!r}, {pp!r}, {dp!r}, not integers above 0")
    return Files(files.path, files.kinds, pp, tp, dp, files.loaded)


def _check_complete(files: Files, prefix: str) -> None:
    """Raises ConvertError that names missing and extra files."""
    ranks = range(files.pp * files.tp)
    if files.of("model"):
        _check_there(files, "model", (f"mp_rank_{mp:02d}_model_states.pt" for mp in ranks))
    else:
        names = (f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for mp in ranks for dp in range(files.dp))
        _check_there(files, "partition", names)
    first = files.load(files.models()[0][1])
    if files.of("zero") or first.get("param_shapes") is not None:
        names = (
            f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for mp in ranks for dp in range(files.dp)
        )
        _check_there(files, "zero", names)
    if files.of("layer"):
        layers = {place.layer for place, _ in files.of("layer")}
        absent = [
            f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"
            for layer in sorted(layers)
            for tp in range(files.tp)
            if FileNumbers(layer, tp, 0) not in files.kinds["layer"]
        ]
        _refuse_absent(files.path, absent)


def _check_there(files: Files, kind: str, names: Iterable[str]) -> None:
    there = {path.name for _, path in files.of(kind)}
    wanted = list(names)
    _refuse_absent(files.path, [name for name in wanted if name not in there])
    more = sorted(there - set(wanted))
    if more:
        raise ConvertError(
            f"{files.path / more[0]} is of a rank that pp {files.pp}, tp {files.tp}, dp {files.dp} does not have: it "
            "is of another run; remove it"
        )


def _refuse_absent(path: Path, absent: list[str]) -> None:
    if absent:
        raise ConvertError(f"{path}: files of some ranks are missing: {listed(absent, _MOST_NAMED)}")
