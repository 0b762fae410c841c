"""The part of a lightning trainer's state that ``ftckpt.torch`` does not know."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ftckpt.frameworks.torch_state import generators_in, load_all, load_generators, save_all, save_generators
from ftckpt.lightning.running import load_running, monitors_of, save_running


class FitProgress:
    """The counters of a trainer's loops, its position in the data, what the epoch logged until then, and the state of
    callbacks and data module.

    A restart draws the epoch's batches up to the restored step again, from the generators of the epoch's start, and
    drops them. Generators are recorded where lightning creates the loaders' iterators, and where it draws the first
    batch: in the first epoch, hooks of the script run in between. From loaders without a length lightning draws one
    batch ahead, so generators are also recorded before the last draw.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._fit = trainer, trainer.fit_loop
        self.is_midway = False
        """Whether the restored step is inside an epoch, which has not been resumed yet."""
        self._created: Mapping[str, Any] = {}
        self._first: Mapping[str, Any] = {}
        self._last: Mapping[str, Any] = {}
        self._num_undrawn = 0  # batches before a checkpoint that lightning loaded: it does not draw them

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        metrics = trainer._logger_connector._callback_metrics
        monitors = monitors_of(trainer)
        return {
            "loops": {**self._fit.state_dict(), "state_dict": {}},
            "is_epoch_over": self._fit.epoch_loop._num_ready_batches_reached(),
            "epoch_start": [self._created, self._first, self._last, self._num_undrawn],
            "generators": save_all(self._loader_generators()),
            "should_stop": trainer.should_stop,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            # Schedulers and callbacks may read them before they are logged again.
            "metrics": {name: value for name, value in metrics.items() if name in monitors},
            "running": save_running(trainer),
            "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, saved = self._trainer, copy.deepcopy(saved)
        self._load_loops(saved["loops"], saved["is_epoch_over"])
        self._created, self._first, self._last, self._num_undrawn = saved["epoch_start"]
        load_all(self._loader_generators(), saved["generators"])
        trainer.should_stop = saved["should_stop"]
        trainer.accumulate_grad_batches = saved["accumulate_grad_batches"]
        metrics = {name: value.to(trainer.strategy.root_device) for name, value in saved["metrics"].items()}
        trainer._logger_connector._callback_metrics.update(metrics)
        load_running(trainer, saved["running"])
        for callback in trainer.callbacks:
            if state := saved["callbacks"].get(callback.state_key):
                callback.load_state_dict(state)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(saved["datamodule"])

    def _load_loops(self, saved: dict[str, Any], is_epoch_over: bool) -> None:
        fit = self._fit
        fit.load_state_dict(saved)
        # Lightning restarts from before a validation or a scheduler's step, and catches up on it.
        fit.epoch_loop.restarting = False
        self.is_midway = not is_epoch_over
        if is_epoch_over:
            fit.on_iteration_done()
            return
        # Higher if max_steps ended the epoch early, and this start has more of them.
        for part in (fit.epoch_progress.total, fit.epoch_progress.current):
            part.processed = part.completed = part.ready - 1
        fit._restarting = True
        fit.update_restart_stage()

    def before_iterators(self, load: Callable[[], None]) -> None:
        """Record the generators from which lightning creates iterators after it has called ``load``."""
        load()
        self._created = self._generators()

    def start_epoch(self, start: Callable[..., None], fetcher: Any) -> None:
        """Have lightning ``start`` an epoch, or resume the restored one."""
        loaders, num_batches = self._fit._combined_loader, self._fit.epoch_loop.batch_progress.current.ready
        if self.is_midway:
            self._replay(fetcher, num_batches - self._num_undrawn)
            start(fetcher)
            self._fit.on_iteration_done()  # the end of a restarted epoch would omit schedulers
            self.is_midway = False
            return
        iterator, now = loaders._iterator, self._generators()
        start(fetcher)
        self._created = self._created if loaders._iterator is iterator else now
        self._first = self._last = self._generators()
        self._num_undrawn = num_batches

    def before_draw(self) -> None:
        """Record the generators from which lightning draws the next batch, if it draws that ahead."""
        if self._fit._data_fetcher.length is None:
            self._last = self._generators()

    def _replay(self, fetcher: Any, num_batches: int) -> None:
        now = self._generators()
        self._set_generators(self._created)
        iter(fetcher)
        self._set_generators(self._first)
        for left in reversed(range(num_batches)):
            if fetcher.length is None and not left:
                self._set_generators(self._last)
            next(fetcher)
        fetcher.fetched -= num_batches  # lightning adds them
        self._set_generators(now)

    def _generators(self) -> dict[str, Any]:
        return {"shared": save_generators(), "loaders": save_all(self._loader_generators())}

    def _set_generators(self, saved: Mapping[str, Any]) -> None:
        load_generators(saved["shared"])
        load_all(self._loader_generators(), saved["loaders"])

    def _loader_generators(self) -> dict[str, Any]:
        """Generators of loaders, samplers and datasets."""
        loaders = self._fit._combined_loader.flattened
        owners = [*loaders, *(getattr(one, name, None) for one in loaders for name in ("sampler", "dataset"))]
        return dict(generators_in((str(n), one) for n, one in enumerate(owners) if hasattr(one, "__dict__")))
