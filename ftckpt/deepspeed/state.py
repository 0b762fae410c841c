"""One DeepSpeed rank's training state, for ``ftckpt.Checkpointer``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from ftckpt.deepspeed import inner_optimizers, optimizers, support
from ftckpt.deepspeed.geometry import place_parameters
from ftckpt.frameworks import schedulers
from ftckpt.frameworks.extra_state import ExtraState
from ftckpt.frameworks.flags import TrainingFlags
from ftckpt.frameworks.generators import generators_in
from ftckpt.frameworks.late_changes import LateChanges
from ftckpt.frameworks.launcher import log_once
from ftckpt.frameworks.live_tensors import Holders, LiveTensors
from ftckpt.frameworks.optimizers import save_groups, state_tensors
from ftckpt.frameworks.tensors import frozen_pieces, unwrapped, whole_piece
from ftckpt.frameworks.torch_state import (
    Stateful,
    derive_generators,
    derive_tracker,
    load_all,
    load_all_reshaped,
    load_generators,
    save_all,
    save_generators,
)
from ftckpt.model.training_state import Description

_FLAGS = "ftckpt.flags"
_RANDOM = "random numbers"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# Fields that change during training with a dynamic scale; everything else of a scaler comes from the JSON.
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedState:
    """Implements ``ftckpt.model.training_state.TrainingState``.

    Optimizer-updated: everything that the optimizer steps on this rank (of weights only the owned part), and frozen
    parameters. Mutable: module buffers. Objects: RNG, the engine's counters, the LR scheduler, hyperparameters, the
    loss scaler and ``objects``.

    Raises:
        UnsupportedError: the configuration is not supported; names the JSON field.
    """

    def __init__(self, engine: Any, objects: Mapping[str, Stateful]) -> None:
        support.check(engine)
        optimizers.check(engine.optimizer)
        self._engine = engine
        self._own = {name: value for name, value in objects.items() if not name.startswith("ftckpt.")}
        self._objects = {**objects, **generators_in(unwrapped(engine.module.named_modules()))}
        self._live = LiveTensors(self._live_tensors, self._holders, "ds_tensor")
        self._extra = ExtraState(engine.module)
        remedy = "call ftckpt.deepspeed.begin_iteration() first in each iteration, before anything is drawn"
        self.late_changes = LateChanges(self._changing, remedy, {_RANDOM})
        self._rng: Mapping[str, Any] | None = None
        self._built: Mapping[str, Any] | None = None

    def describe(self) -> Description:
        if self._built is None:
            # The states from the job's own setup, before a restore: ``derive_rng`` derives from these.
            self._built = save_rng()
        self._extra.refuse()
        boxes, optimizer = place_parameters(self._engine), self._engine.optimizer
        optimizers.materialise(optimizer)
        trained = optimizers.stepped_parameters(optimizer)
        stepped = [*optimizers.pieces(optimizer, boxes), *frozen_pieces(boxes, trained, optimizers.owned)]
        buffers = unwrapped(self._engine.module.named_buffers())
        volatile = tuple(whole_piece(f"buffer/{name}", buffer) for name, buffer in buffers if buffer.numel())
        self._live.note()
        if _FLAGS not in self._objects:
            parameters = ((places[0].key, parameter) for parameter, places in boxes.items())
            self._objects[_FLAGS] = TrainingFlags(parameters, unwrapped(self._engine.module.named_modules()))
        return Description(tuple(stepped), volatile)

    def save_objects(self) -> dict[str, Any]:
        """See TrainingState.

        Raises:
            CaptureError: a tensor was replaced since ``describe`` (load_checkpoint, offload_states).
            UnsupportedError: a module has extra state that was not described.
        """
        self._extra.look_again()
        self._live.check("load before the first batch, and leave states where they are")
        self.late_changes.boundary()
        optimizer = self._engine.optimizer
        return {
            "rng": save_rng(),
            "optimizer": inner_optimizers.save(optimizers.inner(optimizer), optimizers.owners(optimizer)),
            "scaler": save_scaler(optimizer),
            "scheduler": schedulers.save(self._engine.lr_scheduler),
            "counters": counters(self._engine),
            "micro_offset": getattr(self._engine.module, "micro_offset", None),
            "objects": save_all(self._objects),
        }

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        engine = self._engine
        schedulers.load(engine.lr_scheduler, objects["scheduler"])  # first: it may write learning rates
        inner_optimizers.load(
            optimizers.inner(engine.optimizer), optimizers.owners(engine.optimizer), objects["optimizer"]
        )
        load_scaler(engine.optimizer, objects["scaler"])
        set_counters(engine, objects["counters"])
        if objects["micro_offset"] is not None:
            engine.module.micro_offset = objects["micro_offset"]  # layers are seeded by it
        load_all(self._objects, objects["objects"])
        self._rng = objects["rng"]

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        assert self._built is not None, "describe comes first"
        engine, first = self._engine, objects[0]
        schedulers.load_reshaped(engine.lr_scheduler, [saved["scheduler"] for saved in objects])
        inner_optimizers.load_reshaped(
            optimizers.inner(engine.optimizer),
            optimizers.owners(engine.optimizer),
            [saved["optimizer"] for saved in objects],
        )
        load_scaler(engine.optimizer, first["scaler"])
        set_counters(engine, first["counters"])
        # Another layout may have another number of micro-batches per step; at a boundary, all of them are done.
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        if first["micro_offset"] is not None:
            engine.module.micro_offset = first["micro_offset"]
        load_all_reshaped(self._objects, [saved["objects"] for saved in objects])
        self._rng = derive_rng(self._built, iteration)

    def finish_load(self) -> None:
        """Gathers the parts of parameters that other ranks own. Does not set RNG: see ``set_rng``."""
        # RNG is set before the first batch: until then the script builds loaders, which draw random numbers.
        with torch.no_grad():
            optimizers.spread(self._engine.optimizer)
        if self._engine.pipeline_parallelism:
            self._engine.reset_activation_shape()
        self.late_changes.boundary()

    def set_rng(self) -> None:
        """Sets RNG to the loaded state; called right before the first batch is used, which draws from it."""
        if self._rng is not None:
            load_rng(self._rng)

    def _changing(self) -> dict[str, Any]:
        optimizer = optimizers.inner(self._engine.optimizer)
        return {
            _RANDOM: save_rng(),
            "the scheduler": schedulers.save(self._engine.lr_scheduler),
            "parameter groups": save_groups(optimizer),
            **save_all(self._own),
        }

    def _holders(self) -> Holders:
        optimizer = self._engine.optimizer
        return Holders((self._engine.module,), (optimizers.inner(optimizer),), optimizers.owners(optimizer))

    def _live_tensors(self) -> Iterator[tuple[str, object, torch.Tensor]]:
        optimizer = self._engine.optimizer
        yield from state_tensors(optimizers.inner(optimizer))
        yield from (("optimizer's tensor", n, owner) for n, owner in enumerate(optimizers.owners(optimizer)))
        for name, parameter in self._engine.module.named_parameters():
            # Under ZeRO 3 a parameter's own memory is allocated and freed; its partition stays.
            yield "parameter", name, getattr(parameter, "ds_tensor", parameter)
        yield from (("buffer", name, buffer) for name, buffer in self._engine.module.named_buffers())


def counters(engine: Any) -> dict[str, int]:
    """The engine's counters, by attribute."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def set_counters(engine: Any, values: Mapping[str, int]) -> None:
    """Inverse of ``counters``."""
    for name, value in values.items():
        setattr(engine, name, value)


def _dynamic_scalers(optimizer: Any) -> Iterator[Any]:
    # ZeRO's wrappers have a loss scaler; fp16's have the same fields in a configuration object or, up to DeepSpeed
    # 0.17, in themselves.
    kept = [getattr(optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")]
    for scaler in (*kept, optimizer if hasattr(optimizer, "cur_iter") else None):
        if getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)):
            yield scaler


def save_scaler(optimizer: Any) -> dict[str, Any]:
    saved = {}
    for scaler in _dynamic_scalers(optimizer):
        saved.update({name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)})
    return saved


def load_scaler(optimizer: Any, saved: Mapping[str, Any]) -> None:
    scalers = list(_dynamic_scalers(optimizer))
    if scalers and not saved:
        log_once("the snapshot has no dynamic loss scale: starting with the configured one")
    if saved and not scalers:
        log_once("the loss scale of the snapshot, %g, is not used: this job's is static", saved["cur_scale"])
    for scaler in scalers:
        for name, value in saved.items():
            setattr(scaler, name, value)


def _trackers() -> dict[str, Any]:
    """RNG trackers by name: DeepSpeed's, and megatron-core's if the model uses its layers."""
    trackers = {"deepspeed": checkpointing.get_cuda_rng_tracker()}
    # Not imported here: a model that uses the layers has imported the module.
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None:
        trackers["megatron"] = megatron.get_cuda_rng_tracker()
    return trackers


def save_rng() -> dict[str, Any]:
    """States of all generators that training uses, including those of trackers."""
    return {**save_generators(), "trackers": {name: dict(one.get_states()) for name, one in _trackers().items()}}


def load_rng(saved: Mapping[str, Any]) -> None:
    """Restores the result of ``save_rng``."""
    load_generators(saved)
    for name, tracker in _trackers().items():
        if name in saved["trackers"]:
            tracker.set_states(dict(saved["trackers"][name]))


def derive_rng(built: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Generator states for a rank of another layout; ``built`` is the result of ``save_rng`` before any batch."""
    plain = {name: state for name, state in built.items() if name != "trackers"}
    trackers = {
        name: derive_tracker(f"tracker/{name}", states, iteration) for name, states in built["trackers"].items()
    }
    return {**derive_generators(plain, iteration), "trackers": trackers}
