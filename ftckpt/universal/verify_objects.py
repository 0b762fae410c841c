"""Whether what is no tensor was written as it was read: schedulers, hyperparameters, counters, arguments.

A universal checkpoint holds all of it as it was. Other formats have a place for what their programs know: compared is
what both sides have, and between checkpoints of one program that nothing of it is missing and nothing was added, but
for what belongs to a layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ftckpt.errors import ConvertError
from ftckpt.state import objects
from ftckpt.universal.catalog import Catalog
from ftckpt.universal.foreign.pickles import plain
from ftckpt.universal.megatron.common import IDENTIFIERS, hyperparameters

_GROUPS, _SCHEDULER, _SCALER = "groups of parameters", "scheduler", "loss scaler"
_OF_LAYOUT = {
    "megatron": frozenset({"optimizer", "rerun_state_machine", "rng_state", "content_metadata", "iteration"}),
    "deepspeed": frozenset(
        {"global_steps", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "shared_params"}
    ),
}
"""What writers replace: compared as tensors, or of one layout."""
_DEFAULTS = {
    "megatron": frozenset({"checkpoint_version", "args.no_save_rng"}),
    "deepspeed": frozenset({"skipped_steps", "ds_version", "ds_config", _SCHEDULER}),
}
"""What writers add where the source has none."""
_WEIGHTS = ("weight/", "buffer/")
_MOST_SHOWN = 60


def differing(source: Catalog, written: Catalog) -> list[str]:
    """What is not the same in both, in words; none where a format has no place for anything but weights."""
    if written.origin == "safetensors":
        return []
    if written.origin == "universal":
        found = list(_between(dict(source.objects), dict(written.objects), "objects"))
        same = found or objects.encode(dict(source.objects)) == objects.encode(dict(written.objects))
        return found if same else ["objects are in another order or of other types"]
    kind, said = _said(source)
    other_kind, found_said = _said(written)
    problems: list[str] = []
    for name in [*said, *(name for name in found_said if name not in said)]:
        if name in said and name in found_said:
            problems += _between(said[name], found_said[name], name)
        elif kind == other_kind and not _may_lack(kind, name, name in said, written):
            problems.append(_lacking(name, name in said))
    return problems


def _may_lack(kind: str, name: str, is_in_source: bool, written: Catalog) -> bool:
    if is_in_source:  # weights alone have no optimizer
        trained = any(not fragment.key.startswith(_WEIGHTS) for fragment in written.fragments)
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


def _said(catalog: Catalog) -> tuple[str, dict[str, Any]]:
    """Whose checkpoint it is, and what it says, by names that do not depend on that."""
    for kind, read in (("megatron", _of_megatron), ("deepspeed", _of_deepspeed), ("shards", _of_shards)):
        said = catalog.objects.get(kind)
        if isinstance(said, Mapping):
            found = read(catalog.objects)
            return kind, {name: plain(value) for name, value in found.items() if value is not None}
    return "", {}


def _of_megatron(said: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in said["megatron"].items() if key not in _OF_LAYOUT["megatron"]}
    args = found.pop("args", None)
    if isinstance(args, Mapping):
        found |= {f"args.{key}": value for key, value in args.items() if key != "no_save_rng"}
    return {**found, _SCHEDULER: found.pop("opt_param_scheduler", None), **_hyperparameters(said)}


def _of_deepspeed(said: Mapping[str, Any]) -> dict[str, Any]:
    inner = said["deepspeed"]
    state, optimizer = dict(inner.get("state") or {}), dict(inner.get("optimizer") or {})
    found = {key: value for key, value in state.items() if key not in _OF_LAYOUT["deepspeed"]}
    groups = [group for group in optimizer.pop("param_groups", None) or () if group]  # empty ones fill up
    return {
        **found,
        _SCHEDULER: found.pop("lr_scheduler", None),
        _GROUPS: groups or None,
        _SCALER: optimizer.pop("loss_scaler", None),
        **{f"optimizer.{key}": value for key, value in optimizer.items() if key != "ds_version"},
        "precision": said.get("precision"),
    }


def _of_shards(said: Mapping[str, Any]) -> dict[str, Any]:
    """Of a snapshot: what the first rank says."""
    shards = [shard for shard in said["shards"].values() if isinstance(shard, Mapping)]
    first: Mapping[str, Any] = next(iter(shards), {})
    schedulers = (shard["scheduler"] for shard in shards if isinstance(shard.get("scheduler"), Mapping))
    found = {_SCHEDULER: next(schedulers, None), **_hyperparameters(said)}
    inner, counters = first.get("optimizer"), first.get("counters")
    if isinstance(inner, Mapping) and isinstance(counters, Mapping):  # of DeepSpeed
        found[_GROUPS] = list(inner.get("groups") or ()) or None
        found |= {key: counters[key] for key in ("global_samples", "skipped_steps") if key in counters}
    return found


def _hyperparameters(said: Mapping[str, Any]) -> dict[str, Any]:
    """Groups by what Megatron finds them by; their steps are tensors of their own."""
    found = hyperparameters(said)
    groups = {
        str([group.get(name, group.get(f"pre_{name}")) for name in IDENTIFIERS]): {
            key: value for key, value in group.items() if key != "step"
        }
        for group in found.groups
    }
    return {_GROUPS: groups or None, _SCALER: found.scaler}
