"""Reads Megatron's ``torch`` checkpoints: ``iter_0000005/mp_rank_00_001/model_optim_rng.pt`` and so on.

They hold each rank's part of every tensor and do not say where it lies: a specification does. State of the
distributed optimizer lies beside them, in ``distrib_optim.pt``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Box, Fragment
from ftckpt.universal.catalog import Bytes, Catalog, Source, fingerprint_of
from ftckpt.universal.foreign import pickles, records
from ftckpt.universal.language.placing import Placement, Stored, place
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron import names
from ftckpt.universal.megatron.common import layout_of
from ftckpt.universal.megatron.dcp import DTYPES
from ftckpt.universal.megatron.dist import TRACKER, iteration_directory
from ftckpt.universal.megatron.moments import Held, read_optimizer

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(\d*)")
_LEFT_OUT = ("rng_state", "rerun_state_machine", "random_rng_state", "np_rng_state", "torch_rng_state")
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def recognises(path: Path) -> bool:
    """Whether ``path`` is such a checkpoint, or a directory of several whose newest is one."""
    try:
        return any(_directories(_find(path, None)))
    except (ConvertError, OSError):
        return False


class MegatronLegacySource(Source):
    """The checkpoint in ``path``, or that of ``iteration`` (default: the newest) among those in ``path``.

    ``spec`` says where each rank's parts lie. ``roles`` leaves out all others.

    Raises:
        ConvertError: a rank's file is missing, ranks disagree, optimizer state whose parameters cannot be told, or
            something that cannot be read without running code.
        SpecError: the specification does not fit the names or shapes.
    """

    def __init__(
        self,
        path: Path,
        spec: Spec | None,
        iteration: int | None = None,
        roles: Iterable[str] | None = None,
    ) -> None:
        self.path = _find(path, iteration)
        if spec is None:
            raise ConvertError(
                f"{self.path}: holds no geometry: name a specification with --spec, such as gpt or llama"
            )
        wanted = None if roles is None else set(roles)
        states = {coords: (file, pickles.load(file)) for coords, file in _files(self.path)}
        first = next(iter(states.values()))[1]
        _check_alike(list(states.values()), wanted is None or bool(wanted - {"weight", "buffer"}))
        args = _arguments(first)
        self._tensors: list[tuple[torch.Tensor, Box | None]] = []
        self._files: list[Path] = []
        held = [
            each
            for coords, (file, state) in states.items()
            for each in _held(_coords(coords, args), file, state, wanted)
        ]
        placed = _places(spec, held, args)
        fragments = [found for each in held for found in self._fragments(each, placed[each.name, each.coords])]
        fragments = [each for each in fragments if wanted is None or each.key.partition("/")[0] in wanted]
        keys = {fragment.key for fragment in fragments}
        vocabularies = {placement.name for placement in placed.values() if placement and placement.padded}
        averages = {placement.name for placement in placed.values() if placement and placement.average}
        self._catalog = Catalog(
            origin="megatron-legacy",
            iteration=int(first.get("iteration") or 0),
            layout=layout_of(args),
            fragments=tuple(fragments),
            objects={"megatron": _objects(first)},
            padded=frozenset(key for key in keys if _split(key)[1] in vocabularies and _split(key)[0] != "step"),
            average=frozenset(key for key in keys if _split(key)[1] in averages),
        )

    @property
    def catalog(self) -> Catalog:
        """See Source. ``objects["megatron"]`` is all that is no tensor of the first rank's file."""
        return self._catalog

    def read(self, index: int) -> Bytes:
        """See Source."""
        if not self._tensors:
            raise ConvertError(f"{self.path}: was closed")
        tensor, box = self._tensors[index]
        records.check(tensor, self._catalog.fragments[index].key)
        if box is not None:
            for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
                tensor = tensor.narrow(dim, offset, size)
        data: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return data

    def where(self, index: int) -> Path:
        """The file that a fragment lies in."""
        return self._files[index]

    def fingerprint(self) -> str:
        """See Source."""
        return fingerprint_of(self.path.glob("mp_rank_*/*.pt"))

    def close(self) -> None:
        """See Source."""
        self._tensors = []

    def _fragments(self, held: Held, placement: Placement | None) -> Iterator[Fragment]:
        if placement is None:
            return
        role = "buffer" if held.role == "weight" and names.BUFFER.fullmatch(placement.name) else held.role
        dtype = DTYPES.get(held.tensor.dtype)
        if dtype is None:
            raise ConvertError(f"{held.file}: {held.name} is of {held.tensor.dtype}, which has no name here")
        for span in placement.spans[: 1 if role == "step" else None]:
            key = f"{role}/{placement.name}"
            self._files.append(held.file)
            if role == "step":
                outer = len(placement.shape) - len(held.shape)
                counts, at = placement.shape[:outer] or (1,), span.box.offset[:outer] or (0,)
                self._tensors.append((held.tensor, None))
                yield Fragment.whole(key, dtype, counts, Box(at, (1,) * len(counts)))
            else:
                self._tensors.append((held.tensor, span.local))
                yield Fragment.whole(key, dtype, placement.shape, span.box)


def _find(path: Path, iteration: int | None) -> Path:
    if iteration is None and any(_directories(path)):
        return path
    return iteration_directory(path, iteration) if iteration is not None or (path / TRACKER).exists() else path


def _directories(path: Path) -> Iterator[tuple[re.Match[str], Path]]:
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        match = _RANK.fullmatch(entry.name)
        if match and (entry / FILE).exists():
            yield match, entry / FILE


def _files(path: Path) -> list[tuple[tuple[int, int, int], Path]]:
    """Coordinates (tp, pp, ep) and file of each model-parallel rank.

    Raises:
        ConvertError: some are missing.
    """
    found = list(_directories(path))
    if not found:
        raise ConvertError(f"{path}: has no mp_rank_NN/{FILE}")
    args = _arguments(pickles.load(found[0][1]))
    sizes = {axis: int(args.get(name) or 1) for axis, name in _SIZES.items()}
    files: dict[tuple[int, int, int], Path] = {}
    for match, file in found:
        numbers = [int(group) for group in match.groups() if group is not None]
        both = len(numbers) == 3
        stages = both or (len(numbers) == 2 and (sizes["pp"] > 1 or sizes["ep"] == 1))
        experts = both or (len(numbers) == 2 and not stages)
        files[numbers[0], numbers[1] if stages else 0, numbers[-1] if experts else 0] = file
    for at, axis in enumerate(_SIZES):
        sizes[axis] = max(sizes[axis], 1 + max(coords[at] for coords in files))
    every = product(*(range(sizes[axis]) for axis in _SIZES))
    etp = _expert_tp(args, sizes["tp"], path)
    missing = [
        f"tp {tp} pp {pp} ep {ep}"
        for tp, pp, ep in every
        if (tp, pp, ep) not in files and _is_rank(tp, ep, sizes, etp)
    ]
    if missing:
        raise ConvertError(f"{path}: the files of {len(missing)} ranks are missing: {', '.join(missing[:5])}")
    return sorted(files.items())


def _expert_tp(args: Mapping[str, Any], tp: int, path: Path) -> int:
    """Over how many ranks experts' tensors are cut. Raises ConvertError where names of files cannot tell which."""
    etp = int(args.get("expert_tensor_parallel_size") or tp)
    if etp < 1 or tp % etp:
        raise ConvertError(
            f"{path}: expert_tensor_parallel_size {etp} does not divide tensor_model_parallel_size {tp}: files are "
            "named by the latter, so that some ranks' experts are in none"
        )
    return etp


def _is_rank(tp: int, ep: int, sizes: Mapping[str, int], etp: int) -> bool:
    """Whether some rank has both: where experts are cut over fewer ranks the others go through expert ranks."""
    return any((tp + sizes["tp"] * rest) // etp % sizes["ep"] == ep for rest in range(sizes["ep"]))


def _coords(file: tuple[int, int, int], args: Mapping[str, Any]) -> dict[str, int]:
    """What a file's rank is in each axis; ``etp`` only where it is not the same as ``tp``."""
    coords = dict(zip(_SIZES, file, strict=True))
    tp, etp = (int(args.get(name) or 0) for name in (_SIZES["tp"], "expert_tensor_parallel_size"))
    return {**coords, "etp": coords["tp"] % etp} if etp and etp != tp else coords


def _check_alike(states: Sequence[tuple[Path, Mapping[str, Any]]], optimizers: bool) -> None:
    """Files of one save have the same iteration, and, where ``optimizers`` count, all or none has one."""
    first, one = states[0]
    for file, state in states[1:]:
        if state.get("iteration") != one.get("iteration"):
            raise ConvertError(
                f"{file}: is of iteration {state.get('iteration')}, {first} of {one.get('iteration')}: they are of "
                "different saves"
            )
        if optimizers and (state.get("optimizer") is None) is not (one.get("optimizer") is None):
            lacking = file if state.get("optimizer") is None else first
            raise ConvertError(f"{lacking}: holds no optimizer, files of other ranks do")


def _held(coords: Mapping[str, int], file: Path, state: Any, roles: set[str] | None) -> Iterator[Held]:
    chunks: list[list[Held]] = []
    models = sorted((int(match[1] or 0), key) for key in state if (match := _MODEL.fullmatch(str(key))))
    if not models:
        raise ConvertError(f"{file}: has no model")
    for chunk, key in models:
        where = {**coords, "vpp": chunk} if len(models) > 1 else dict(coords)
        tensors = dict(_tensors(state[key]))
        chunks.append([
            Held("weight", name, tuple(sorted(where.items())), tensor, tuple(tensor.shape), file)
            for name, tensor in tensors.items()
        ])  # fmt: skip
    yield from (each for chunk in chunks for each in chunk)
    if roles is None or roles - {"weight", "buffer"}:
        yield from read_optimizer(file, state.get("optimizer"), chunks)


def _tensors(model: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Older ones nest: ``language_model`` → ``encoder`` → names."""
    for name, value in model.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")


def _places(
    spec: Spec, held: Iterable[Held], args: Mapping[str, Any]
) -> dict[tuple[str, tuple[tuple[str, int], ...]], Placement | None]:
    weights = [each for each in held if each.role == "weight"]
    stored = [Stored(each.name, each.shape, dict(each.coords)) for each in weights]
    placed = place(spec, stored, args)
    return {(each.name, each.coords): found for each, found in zip(weights, placed, strict=True)}


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    args = pickles.plain(state.get("args"))
    return args if isinstance(args, dict) else {}


def _objects(state: Mapping[str, Any]) -> Any:
    """All but tensors of the model and the optimizer, and generators, which belong to their rank."""
    kept = {
        key: value
        for key, value in state.items()
        if not _MODEL.fullmatch(str(key)) and key not in (*_LEFT_OUT, "optimizer")
    }
    return pickles.plain({**kept, "optimizer": _groups_alone(state.get("optimizer"))})


def _groups_alone(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return dict(enumerate(map(_groups_alone, value)))
    if not isinstance(value, Mapping):
        return {}
    inner = value.get("optimizer", value)
    groups = inner.get("param_groups") or ()
    found = [{name: item for name, item in group.items() if name != "params"} for group in groups]
    return {"optimizer": {"param_groups": found}, "grad_scaler": value.get("grad_scaler")}


def _split(key: str) -> tuple[str, str]:
    role, _, name = key.partition("/")
    return role, name
