"""The running values of a training epoch, such as those of ``self.log("loss", loss, on_epoch=True)``."""

from __future__ import annotations

import builtins
import dataclasses
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

from ftckpt.errors import UnsupportedError

_VALUES = ("value", "cumulated_batch_size", "_forward_cache", "_update_count")


def check_monitors(trainer: Any) -> None:
    """Raises UnsupportedError if a scheduler or a callback monitors a value that ``save_running`` leaves out."""
    monitors = monitors_of(trainer)
    for entry in trainer.fit_loop.epoch_loop._results.values():
        meta = entry.meta
        if not _is_saved(entry) and meta.on_epoch and {meta.name, meta.forked_name(on_step=False)} & monitors:
            raise UnsupportedError(
                f"monitor {meta.name!r}: a torchmetrics object or sync_dist_group in training, whose values ftckpt "
                "does not restore; log a tensor without sync_dist_group, or monitor a value of the validation"
            )


def monitors_of(trainer: Any) -> set[str | None]:
    """Names of the values that schedulers and callbacks read."""
    return {getattr(one, "monitor", None) for one in (*trainer.lr_scheduler_configs, *trainer.callbacks)}


def save_running(trainer: Any) -> dict[str, Any]:
    """What was logged in the training epoch until now, and where lightning starts it anew."""
    entries, connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
    return {
        "entries": {key: _save(one) for key, one in entries.items() if _is_saved(one) and not one.has_reset},
        "position": [connector._first_loop_iter, connector._current_fx],
    }


def load_running(trainer: Any, saved: dict[str, Any]) -> None:
    """Have the training epoch continue from what ``save_running`` returned."""
    entries, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    entries.reset()
    for key, one in saved["entries"].items():
        entries[key] = _load(one, trainer.strategy.reduce).to(device)
    connector = trainer._logger_connector
    connector._first_loop_iter, connector._current_fx = saved["position"]


def _is_saved(entry: Any) -> bool:
    return entry.is_tensor and entry.meta.sync.group is None


def _save(entry: Any) -> dict[str, Any]:
    """An entry's values, and what tells lightning that the next value belongs to it."""
    meta = {field.name: getattr(entry.meta, field.name) for field in dataclasses.fields(entry.meta)}
    reduce, sync = meta.pop("reduce_fx"), meta.pop("_sync")
    return {
        "meta": meta,
        "reduce": [reduce.__name__, getattr(builtins, reduce.__name__, None) is reduce],
        "sync": [sync.should, sync.rank_zero_only],
        "values": {name: getattr(entry, name) for name in _VALUES if hasattr(entry, name)},
    }


def _load(saved: dict[str, Any], reduce: Any) -> Any:
    name, is_builtin = saved["reduce"]
    meta = _Metadata(**saved["meta"], reduce_fx=getattr(builtins if is_builtin else torch, name))
    should, rank_zero_only = saved["sync"]
    meta.sync = _Sync(_should=should, fn=reduce, rank_zero_only=rank_zero_only)
    entry = _ResultMetric(meta, is_tensor=True)
    for key, value in saved["values"].items():
        setattr(entry, key, value)
    return entry
