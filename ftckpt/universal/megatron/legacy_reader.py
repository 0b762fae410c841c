"""A reader of Megatron's ``torch`` checkpoints: ``iter_0000005/mp_rank_00_001/model_optim_rng.pt`` and so on.

They hold each rank's part of every tensor; a specification describes the sharding. State of the distributed optimizer
is in ``distrib_optim.pt`` next to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import FileReader, FragmentPlace, needs_optimizer
from ftckpt.universal.foreign import archives, pickles
from ftckpt.universal.foreign.slices import ParameterSlice, stored_in
from ftckpt.universal.language.placing import LocalTensor, Placement, place
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron import names
from ftckpt.universal.megatron.common import layout_of
from ftckpt.universal.megatron.dist_reader import TRACKER, iteration_directory

DISTRIBUTED_FILE = "distrib_optim.pt"
_ALIGNMENT = 64
"""Alignment of parameters in the distributed optimizer's buffers, in elements: 128 bytes of a 2-byte type."""
_REMEDY = "convert the weights alone with --roles weight,buffer, or save in Megatron's torch_dist format"


def read_optimizer(file: Path, state: Any, chunks: Sequence[Sequence[ParameterSlice]]) -> Iterator[ParameterSlice]:
    """Optimizer state of the parameters of a rank's model ``chunks``, which are in the model's order.

    Raises:
        ConvertError: the state does not fit the parameters, or its parameters cannot be identified.
    """
    if state is None:
        return
    chain = list(state) if isinstance(state, (list, tuple)) else [state]
    parameters = [[each for each in chunk if _is_parameter(each.name)] for chunk in chunks]
    split = _by_optimizer(parameters, len(chain))
    beside = file.with_name(DISTRIBUTED_FILE)
    flat = pickles.load(beside) if beside.exists() else None
    # A single optimizer is saved as a mapping, a chain as a list.
    flats = list(flat) if isinstance(flat, list) else [flat] * len(chain)
    if not len(chain) == len(split) == len(flats):
        raise ConvertError(f"{file}: {len(chain)} optimizers, {len(flats)} of them in {DISTRIBUTED_FILE}; {_REMEDY}")
    for part, mine, buffers in zip(chain, split, flats, strict=True):
        inner = part.get("optimizer", part) if isinstance(part, Mapping) else {}
        if "state" in inner:
            yield from _numbered(file, part, inner, [each for chunk in mine for each in chunk])
        elif isinstance(buffers, Mapping):
            yield from _buffered(beside, inner, buffers, mine)
        elif any(mine) and not any(flats):  # in a chain another expert rank may hold an optimizer's state
            raise ConvertError(f"{beside}: is missing or empty: it should hold the optimizer's state; {_REMEDY}")


def _is_parameter(name: str) -> bool:
    return not name.endswith("_extra_state") and names.BUFFER.fullmatch(name) is None


def _by_optimizer(chunks: Sequence[Sequence[ParameterSlice]], count: int) -> list[list[list[ParameterSlice]]]:
    """The parameters of each optimizer, by chunk: the second of two is that of experts."""
    if count == 1:
        return [[list(chunk) for chunk in chunks]]
    return [
        [[each for each in chunk if (".experts." in each.name) is experts] for chunk in chunks]
        for experts in (False, True)
    ]


def _numbered(
    file: Path, part: Mapping[str, Any], inner: Mapping[str, Any], parameters: Sequence[ParameterSlice]
) -> Iterator[ParameterSlice]:
    masters = part.get("fp32_from_fp16_params") or [()] * len(inner["param_groups"])
    pairs = [(group, stored) for group, stored in zip(inner["param_groups"], masters, strict=True) if group["params"]]
    dealt = _deal(file, [group for group, _ in pairs], parameters)
    half = (torch.float16, torch.bfloat16)
    for (group, stored), mine in zip(pairs, dealt, strict=True):
        copies = [each for each in mine if each.values.dtype in half]
        if len(copies) != len(stored):
            raise ConvertError(f"{file}: {len(stored)} masters for {len(copies)} parameters; {_REMEDY}")
        for each, master in zip(copies, stored, strict=False):
            yield _checked(each, "master", master)
        for index, each in zip(group["params"], mine, strict=True):
            for role, value in inner["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):
                    yield _checked(each, role, value)


def _deal(
    file: Path, groups: Sequence[Mapping[str, Any]], parameters: Sequence[ParameterSlice]
) -> list[list[ParameterSlice]]:
    """The parameters of each group: a group without weight decay has biases and one-dimensional parameters."""
    dealt: list[list[ParameterSlice]] = [[] for _ in groups]
    plain = [float(group.get("wd_mult", group.get("pre_wd_mult", 1.0))) == 0.0 for group in groups]
    for each in parameters:
        flat = len(each.shape) == 1 or each.name.endswith(".bias")
        fitting = [index for index, without_decay in enumerate(plain) if without_decay is flat]
        if len(groups) == 1:
            fitting = [0]
        if len(fitting) != 1:
            raise ConvertError(f"{file}: {each.name} fits none or several of {len(groups)} groups; {_REMEDY}")
        dealt[fitting[0]].append(each)
    for group, mine in zip(groups, dealt, strict=True):
        if len(group["params"]) != len(mine):
            counts = f"{len(group['params'])} parameters in a group of the optimizer, {len(mine)} in the model"
            raise ConvertError(f"{file}: {counts}; {_REMEDY}")
    return dealt


def _checked(each: ParameterSlice, role: str, value: torch.Tensor) -> ParameterSlice:
    if role == "step":
        return replace(each, role=role, values=value.reshape(1), is_number=True)
    if tuple(value.shape) != each.shape:
        shapes = f"{tuple(value.shape)} and {each.shape}"
        raise ConvertError(f"{each.file}: {role} of {each.name} and the weight differ in shape: {shapes}; {_REMEDY}")
    return replace(each, role=role, values=archives.flat(value, f"{role} of {each.name}"))


def _buffered(
    file: Path, inner: Mapping[str, Any], state: Mapping[Any, Any], chunks: Sequence[Sequence[ParameterSlice]]
) -> Iterator[ParameterSlice]:
    """State of the distributed optimizer: flat buffers, one per model chunk and type, parameters in reverse order."""
    steps = _steps_of(inner["param_groups"])
    expected = [(chunk, dtype) for chunk in chunks for dtype in dict.fromkeys(each.values.dtype for each in chunk)]
    buffers = [
        (types, value)
        for index in sorted(k for k in state if isinstance(k, int))
        for types, value in state[index].items()
    ]
    if len(buffers) != len(expected) or any(
        types[0] != dtype for (types, _), (_, dtype) in zip(buffers, expected, strict=False)
    ):
        raise ConvertError(f"{file}: {len(buffers)} buffers, the model should have {len(expected)}; {_REMEDY}")
    for (_, value), (chunk, dtype) in zip(buffers, expected, strict=True):
        # Reversed, as Megatron fills its buffers roughly in the order of the backward pass.
        mine = [each for each in chunk if each.values.dtype == dtype][::-1]
        # Assumes a single bucket; with several the sizes below disagree, which is an error.
        places = _aligned(mine)
        end = places[-1] + math.prod(mine[-1].shape) if mine else 0
        tensors = {role: flat for role, flat in value.items() if isinstance(flat, torch.Tensor)}
        for role, flat in tensors.items():
            if flat.numel() != end:
                raise ConvertError(
                    f"{file}: {role} has {flat.numel()} elements, {end} were expected: the distributed optimizer had "
                    f"several buckets, whose sizes the file does not record; {_REMEDY}"
                )
        for each, begin in zip(mine, places, strict=True):
            # The optimizer updates a 32-bit weight itself: its ``param`` is the weight, not a master.
            named = {"param": "weight" if dtype == torch.float32 else "master"}
            for role, flat in tensors.items():
                values = flat[begin : begin + math.prod(each.shape)]
                yield replace(each, role=named.get(role, role), values=values)
            if len(steps) == 1:
                step = torch.tensor(list(steps), dtype=torch.float32)
                yield replace(each, role="step", values=step, is_number=True)


def _steps_of(groups: Iterable[Mapping[str, Any]]) -> set[float]:
    return {float(group["step"]) for group in groups if isinstance(group.get("step"), (float, torch.Tensor))}


def _aligned(parameters: Sequence[ParameterSlice]) -> list[int]:
    places, at = [], 0
    for each in parameters:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        places.append(at)
        at += math.prod(each.shape)
    return places


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
    """Whether ``path`` is a checkpoint in the format torch, or a directory of several whose newest is one."""
    try:
        return any(_directories(find(path, None)))
    except (ConvertError, OSError):
        return False


class MegatronLegacyReader(FileReader):
    """Reads the checkpoint in ``path``, or that of ``iteration`` (default: the newest) among those in ``path``.

    ``spec`` describes the sharding. ``roles``: the roles to read, None for all.
    """

    def __init__(
        self, path: Path, spec: Spec | None, iteration: int | None = None, roles: Collection[str] | None = None
    ) -> None:
        path = find(path, iteration)
        if spec is None:
            raise ConvertError(
                f"{path}: does not record its sharding: give a specification with --spec, such as gpt or llama"
            )
        states = {coords: (file, pickles.load(file)) for coords, file in _files(path)}
        first = next(iter(states.values()))[1]
        _check_alike(list(states.values()), needs_optimizer(roles))
        args = _arguments(first)
        tensors = [
            each
            for coords, (file, state) in states.items()
            for each in _rank_tensors(_coords(coords, args), file, state, roles)
        ]
        placed = _places(spec, tensors, args)
        stored = (one for each in tensors for one in _stored(each, placed[each.name, each.coords]))
        super().__init__(
            path,
            (one for one in stored if roles is None or one.fragment.key.partition("/")[0] in roles),
            path.glob("mp_rank_*/*.pt"),
            origin="megatron-legacy",
            iteration=int(first.get("iteration") or 0),
            layout=layout_of(args),
            objects={"megatron": _objects(first)},
        )


def _stored(part: ParameterSlice, placement: Placement | None) -> Iterator[FragmentPlace]:
    if placement is not None:
        is_buffer = part.role == "weight" and names.BUFFER.fullmatch(placement.name)
        yield from stored_in(part, placement, "buffer" if is_buffer else part.role)


def find(path: Path, iteration: int | None) -> Path:
    """The directory of ``iteration`` in ``path``; if that is None ``path`` itself, or the newest checkpoint in it.

    Raises:
        ConvertError: there is none.
    """
    if iteration is None and any(_directories(path)):
        return path
    return iteration_directory(path, iteration) if iteration is not None or (path / TRACKER).exists() else path


def _directories(path: Path) -> Iterator[tuple[re.Match[str], Path]]:
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        match = _RANK.fullmatch(entry.name)
        if match and (entry / FILE).exists():
            yield match, entry / FILE


def _files(path: Path) -> list[tuple[tuple[int, int, int], Path]]:
    """The coordinates (tp, pp, ep) and file of each model-parallel rank.

    Raises:
        ConvertError: files are missing.
    """
    directories = list(_directories(path))
    if not directories:
        raise ConvertError(f"{path}: has no mp_rank_NN/{FILE}")
    args = _arguments(pickles.load(directories[0][1]))
    sizes = {axis: int(args.get(name) or 1) for axis, name in _SIZES.items()}
    files: dict[tuple[int, int, int], Path] = {}
    for match, file in directories:
        numbers = [int(group) for group in match.groups() if group is not None]
        both = len(numbers) == 3
        # ``mp_rank_TT``, then ``_PPP`` with pipeline stages, then ``_EEE`` with expert ranks. If only one of the two
        # is there, the arguments decide which.
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
    """The number of expert tensor-parallel ranks. Raises ConvertError if file names are ambiguous for it."""
    etp = int(args.get("expert_tensor_parallel_size") or tp)
    if etp < 1 or tp % etp:
        raise ConvertError(
            f"{path}: expert_tensor_parallel_size {etp} does not divide tensor_model_parallel_size {tp}: files are "
            "named by the latter, and hold no experts of some ranks"
        )
    return etp


def _is_rank(tp: int, ep: int, sizes: Mapping[str, int], etp: int) -> bool:
    """Whether a rank with coordinates ``tp`` and ``ep`` exists: with ``etp`` below tp not all pairs do."""
    return any((tp + sizes["tp"] * rest) // etp % sizes["ep"] == ep for rest in range(sizes["ep"]))


def _coords(file: tuple[int, int, int], args: Mapping[str, Any]) -> dict[str, int]:
    """The coordinates of a file's rank; with ``etp`` only if its size differs from that of ``tp``."""
    coords = dict(zip(_SIZES, file, strict=True))
    tp, etp = (int(args.get(name) or 0) for name in (_SIZES["tp"], "expert_tensor_parallel_size"))
    return {**coords, "etp": coords["tp"] % etp} if etp and etp != tp else coords


def _check_alike(states: Sequence[tuple[Path, Mapping[str, Any]]], optimizers: bool) -> None:
    """Raises ConvertError if files differ in iteration or, with ``optimizers``, only some have an optimizer."""
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


def _rank_tensors(
    coords: Mapping[str, int], file: Path, state: Any, roles: Collection[str] | None
) -> Iterator[ParameterSlice]:
    chunks: list[list[ParameterSlice]] = []
    models = sorted((int(match[1] or 0), key) for key in state if (match := _MODEL.fullmatch(str(key))))
    if not models:
        raise ConvertError(f"{file}: has no model")
    for chunk, key in models:
        where = {**coords, "vpp": chunk} if len(models) > 1 else dict(coords)
        tensors = dict(_tensors(state[key]))
        chunks.append([
            ParameterSlice.whole("weight", name, tuple(sorted(where.items())), tensor, file)
            for name, tensor in tensors.items()
        ])  # fmt: skip
    yield from (each for chunk in chunks for each in chunk)
    if needs_optimizer(roles):
        yield from read_optimizer(file, state.get("optimizer"), chunks)


def _tensors(model: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors of a model; older versions nest them: ``language_model`` → ``encoder`` → names."""
    for name, value in model.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")


def _places(
    spec: Spec, tensors: Iterable[ParameterSlice], args: Mapping[str, Any]
) -> dict[tuple[str, tuple[tuple[str, int], ...]], Placement | None]:
    weights = [each for each in tensors if each.role == "weight"]
    stored = [LocalTensor(each.name, each.shape, dict(each.coords)) for each in weights]
    placed = place(spec, stored, args)
    return {(each.name, each.coords): placement for each, placement in zip(weights, placed, strict=True)}


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    args = pickles.plain(state.get("args"))
    return args if isinstance(args, dict) else {}


def _objects(state: Mapping[str, Any]) -> Any:
    """Everything but tensors of model and optimizer, and RNG state, which belongs to a rank."""
    objects = {
        key: value
        for key, value in state.items()
        if not _MODEL.fullmatch(str(key)) and key not in (*_LEFT_OUT, "optimizer")
    }
    return pickles.plain({**objects, "optimizer": _groups_alone(state.get("optimizer"))})


def _groups_alone(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return dict(enumerate(map(_groups_alone, value)))
    if not isinstance(value, Mapping):
        return {}
    inner = value.get("optimizer", value)
    groups = inner.get("param_groups") or ()
    stripped = [{name: item for name, item in group.items() if name != "params"} for group in groups]
    return {"optimizer": {"param_groups": stripped}, "grad_scaler": value.get("grad_scaler")}
