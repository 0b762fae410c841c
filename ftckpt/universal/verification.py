"""Verifies a conversion: compares every tensor's bytes, and the objects, of source and destination.

A universal checkpoint holds all objects unchanged: schedulers, hyperparameters, counters, arguments. Other formats
hold those that their program knows, so only objects that both sides have are compared. Between checkpoints of one
program none may be missing or added, except those that belong to a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from ftckpt.errors import ConvertError
from ftckpt.model import objects
from ftckpt.model.text import listed
from ftckpt.universal.catalog import WEIGHTS_ALONE, Catalog, Get, Reader, Rows, Tensor
from ftckpt.universal.consolidation import Consolidator
from ftckpt.universal.conversion import Conversion, one_at_a_time
from ftckpt.universal.foreign.pickles import plain
from ftckpt.universal.megatron.common import hyperparameters, identity_of, shards_of
from ftckpt.universal.safetensors import strips

_MOST_NAMED = 5
_MOST_SHOWN = 60
_GROUPS, _SCHEDULER, _SCALER = "groups of parameters", "scheduler", "loss scaler"
_OF_LAYOUT = {
    "megatron": frozenset({"optimizer", "rerun_state_machine", "rng_state", "content_metadata", "iteration"}),
    "deepspeed": frozenset(
        {"global_steps", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "shared_params"}
    ),
}
"""Objects that writers replace: they are compared as tensors, or belong to a layout."""
_DEFAULTS = {
    "megatron": frozenset({"checkpoint_version", "args.no_save_rng"}),
    "deepspeed": frozenset({"skipped_steps", "ds_version", "ds_config", _SCHEDULER}),
}
"""Objects that writers add if the source has none."""


def verify(
    conversion: Conversion, written: Reader, workers: int, on_bytes: Callable[[int], object] = lambda nbytes: None
) -> int:
    """Read source and destination again, compare all tensors and objects, and return the number of tensors.

    ``written``: a reader of the destination. One thread at a time calls ``on_bytes`` with progress.

    Raises:
        ConvertError: names the tensors and objects that differ, are missing or are extra.
    """
    expected = {part.tensor.key: part.tensor for unit in conversion.units for part in unit.parts}
    consolidator = Consolidator(written)
    weights_alone = written.catalog.origin == "safetensors"  # which reads buffers as weights
    there = {tensor.key: tensor for tensor in consolidator.tensors}
    pairs = [
        (tensor, there.pop(f"weight/{tensor.name}" if weights_alone else key, None))
        for key, tensor in expected.items()
    ]
    problems = [f"{one.key} is missing" for one, other in pairs if other is None]
    problems += [f"{key} is there, though the source has none" for key in there]
    right, iteration = conversion.catalog.iteration, written.catalog.iteration
    if right != iteration and not weights_alone:
        problems.append(f"it is of iteration {iteration}, the source of {right}")
    problems += differing(conversion.catalog, written.catalog)
    report = one_at_a_time(on_bytes)

    def compared(pair: tuple[Tensor, Tensor | None]) -> str:
        one, other = pair
        problem = "" if other is None else _difference(one, conversion.get, other, consolidator.get)
        report(one.nbytes if other is not None and not problem else 0)
        return problem

    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="ftckpt-verify") as pool:
        problems += filter(None, pool.map(compared, pairs))
    # First: if a live job has overwritten the source, the destination is not at fault.
    conversion.reader.confirm()
    if problems:
        raise ConvertError(f"the destination differs from the source: {listed(problems, _MOST_NAMED)}")
    return len(pairs)


def _difference(one: Tensor, get: Get, other: Tensor, get_other: Get) -> str:
    """A message if the two tensors differ, else ""."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.key} is {other.dtype} {list(other.shape)}, it was {one.dtype} {list(one.shape)}"
    # Strip by strip: neither tensor is in memory completely.
    return "" if _checksum(one, get) == _checksum(other, get_other) else f"{one.key} has other bytes"


def _checksum(tensor: Tensor, get: Get) -> str:
    checksum = xxhash.xxh3_64()
    for first, last in strips(Rows.whole(tensor)):
        checksum.update(get(tensor, first, last).data)
    return checksum.hexdigest()


def differing(source: Catalog, written: Catalog) -> list[str]:
    """Messages about objects that differ; none for a format that holds weights alone."""
    if written.origin == "safetensors":
        return []
    if written.origin == "universal":
        problems = list(_between(dict(source.objects), dict(written.objects), "objects"))
        # Equal items leave two differences: the order of keys and the types of mappings.
        same = problems or objects.encode(dict(source.objects)) == objects.encode(dict(written.objects))
        return problems if same else ["objects are in another order or of other types"]
    kind, right = _settings(source)
    other_kind, there = _settings(written)
    problems = []
    for name in [*right, *(name for name in there if name not in right)]:
        if name in right and name in there:
            problems += _between(right[name], there[name], name)
        elif kind == other_kind and not _may_lack(kind, name, name in right, written):
            problems.append(_lacking(name, name in right))
    return problems


def _may_lack(kind: str, name: str, is_in_source: bool, written: Catalog) -> bool:
    if is_in_source:  # weights alone have no optimizer
        trained = any(Tensor.of(fragment).role not in WEIGHTS_ALONE for fragment in written.fragments)
        return name in (_GROUPS, _SCALER) and not trained
    return name in _DEFAULTS.get(kind, ())


def _lacking(name: str, is_in_source: bool) -> str:
    return f"{name} is missing" if is_in_source else f"{name} is there, though the source has none"


def _between(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            if key in one and key in other:
                yield from _between(one[key], other[key], f"{where}.{key}")
            else:
                yield _lacking(f"{where}.{key}", key in one)
    elif isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _between(mine, theirs, f"{where}.{index}")
    elif not _same(one, other):
        yield f"{where} is {_shown(other)}, it was {_shown(one)}"


def _same(one: Any, other: Any) -> bool:
    try:
        return objects.encode({"": one}) == objects.encode({"": other})
    except (TypeError, ValueError) as error:
        raise ConvertError(f"objects of the checkpoint cannot be compared: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _settings(catalog: Catalog) -> tuple[str, dict[str, Any]]:
    """The program that wrote the checkpoint, and its settings under names common to all programs."""
    for kind, read in (("megatron", _of_megatron), ("deepspeed", _of_deepspeed), ("shards", _of_shards)):
        if isinstance(catalog.objects.get(kind), Mapping):
            settings = read(catalog.objects)
            return kind, {name: plain(value) for name, value in settings.items() if value is not None}
    return "", {}


def _of_megatron(objects: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in objects["megatron"].items() if key not in _OF_LAYOUT["megatron"]}
    args = settings.pop("args", None)
    if isinstance(args, Mapping):
        settings |= {f"args.{key}": value for key, value in args.items() if key != "no_save_rng"}
    return {**settings, _SCHEDULER: settings.pop("opt_param_scheduler", None), **_hyperparameters(objects)}


def _of_deepspeed(objects: Mapping[str, Any]) -> dict[str, Any]:
    inner = objects["deepspeed"]
    state, optimizer = dict(inner.get("state") or {}), dict(inner.get("optimizer") or {})
    settings = {key: value for key, value in state.items() if key not in _OF_LAYOUT["deepspeed"]}
    groups = [group for group in optimizer.pop("param_groups", None) or () if group]  # empty ones fill up
    return {
        **settings,
        _SCHEDULER: settings.pop("lr_scheduler", None),
        _GROUPS: groups or None,
        _SCALER: optimizer.pop("loss_scaler", None),
        **{f"optimizer.{key}": value for key, value in optimizer.items() if key != "ds_version"},
        "precision": objects.get("precision"),
    }


def _of_shards(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a snapshot's first rank."""
    shards = shards_of(objects)
    first: Mapping[str, Any] = next(iter(shards), {})
    schedulers = (shard["scheduler"] for shard in shards if isinstance(shard.get("scheduler"), Mapping))
    settings = {_SCHEDULER: next(schedulers, None), **_hyperparameters(objects)}
    inner, counters = first.get("optimizer"), first.get("counters")
    if isinstance(inner, Mapping) and isinstance(counters, Mapping):  # of DeepSpeed
        settings[_GROUPS] = list(inner.get("groups") or ()) or None
        settings |= {key: counters[key] for key in ("global_samples", "skipped_steps") if key in counters}
    return settings


def _hyperparameters(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter groups by Megatron's identity of a group, without steps, which are tensors; and the loss scaler."""
    hyper = hyperparameters(objects)
    groups = {
        str(list(identity_of(group))): {key: value for key, value in group.items() if key != "step"}
        for group in hyper.groups
    }
    return {_GROUPS: groups or None, _SCALER: hyper.scaler}
