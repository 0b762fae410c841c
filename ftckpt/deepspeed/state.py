"""One DeepSpeed rank's training state, for ``ftckpt.Checkpointer``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from ftckpt.deepspeed import inner_optimizers, optimizers, support
from ftckpt.deepspeed.geometry import place_parameters
from ftckpt.errors import CaptureError, UnsupportedError
from ftckpt.live import rng
from ftckpt.live.extra_state import refuse_extra_state
from ftckpt.live.optimizers import addresses
from ftckpt.live.stateful import Stateful, load_all
from ftckpt.live.tensors import fragments, whole_piece
from ftckpt.state.piece import Description, Piece

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedState:
    """Implements ``ftckpt.state.piece.TrainingState``.

    Stepped: what the optimizer steps on this rank (of weights only the part that this rank owns), and parameters
    that nothing steps (frozen). Volatile: module buffers. Objects: RNG, the engine's counters, the LR scheduler,
    hyperparameters, the loss scaler and ``objects``.

    Raises:
        UnsupportedError: a configuration whose state is not known, with the JSON field.
    """

    reshapes = False

    def __init__(self, engine: Any, objects: Mapping[str, Stateful]) -> None:
        support.check(engine)
        optimizers.check(engine.optimizer)
        self._engine = engine
        self._objects = dict(objects)
        self._addresses: tuple[int, ...] = ()
        self._rng: Mapping[str, Any] | None = None

    def describe(self) -> Description:
        """See TrainingState."""
        refuse_extra_state(self._engine.module)
        places = place_parameters(self._engine)
        optimizers.materialise(self._engine.optimizer)
        stepped = [*optimizers.pieces(self._engine.optimizer, places), *self._frozen(places)]
        buffers = self._engine.module.named_buffers()
        volatile = tuple(whole_piece(f"buffer/{name}", buffer) for name, buffer in buffers if buffer.numel())
        self._addresses = tuple(self._live_addresses())
        return Description(tuple(stepped), volatile)

    def save_objects(self) -> dict[str, Any]:
        """See TrainingState.

        Raises:
            CaptureError: a tensor was replaced since ``describe``, so that copies would read dead memory.
        """
        if tuple(self._live_addresses()) != self._addresses:
            raise CaptureError(
                "optimizer state, weights or buffers were replaced after training began (load_checkpoint, "
                "offload_states?); load before the first batch, and leave states where they are"
            )
        optimizer, scheduler = self._engine.optimizer, self._engine.lr_scheduler
        return {
            "rng": {**rng.save_generators(), "trackers": _save_trackers()},
            "optimizer": inner_optimizers.save(optimizers.inner(optimizer), optimizers.owners(optimizer)),
            "scaler": _save_scaler(optimizer),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "counters": {name: int(getattr(self._engine, name)) for name in _COUNTERS},
            "micro_offset": getattr(self._engine.module, "micro_offset", None),
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
        }

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See TrainingState."""
        engine = self._engine
        inner_optimizers.load(
            optimizers.inner(engine.optimizer), optimizers.owners(engine.optimizer), objects["optimizer"]
        )
        _load_scaler(engine.optimizer, objects["scaler"])
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(objects["scheduler"])
        for name, value in objects["counters"].items():
            setattr(engine, name, value)
        if objects["micro_offset"] is not None:
            engine.module.micro_offset = objects["micro_offset"]  # layers are seeded by it
        load_all(self._objects, objects["objects"])
        self._rng = objects["rng"]

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        """See TrainingState; raises UnsupportedError."""
        raise UnsupportedError("DeepSpeed state cannot be loaded into another layout yet; start on the old one")

    def finish_load(self) -> None:
        """Gather what other ranks own of each parameter. RNG is left alone: see ``set_rng``."""
        with torch.no_grad():
            optimizers.spread(self._engine.optimizer)
        if self._engine.pipeline_parallelism:
            self._engine.reset_activation_shape()

    def set_rng(self) -> None:
        """Set RNG to what was loaded, right before the first batch is used: loaders and models draw from it."""
        if self._rng is not None:
            rng.load_generators(self._rng)
            _load_trackers(self._rng["trackers"])

    def _frozen(self, places: optimizers.Places) -> Iterator[Piece]:
        stepped = optimizers.stepped_parameters(self._engine.optimizer)
        parameter: Any
        for parameter, placed in places.items():
            is_partitioned = hasattr(parameter, "ds_tensor")
            numel = parameter.ds_numel if is_partitioned else parameter.numel()
            if parameter in stepped or not numel:
                continue
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"parameter {placed[0].key} needs gradients and no optimizer steps it; give it to the "
                    "optimizer, or freeze it with requires_grad_(False)"
                )
            first, weight = optimizers.partition(parameter) if is_partitioned else (0, parameter)
            for fragment, view in fragments(placed, "weight", weight, first):
                yield Piece(fragment, view)

    def _live_addresses(self) -> Iterator[int]:
        optimizer = self._engine.optimizer
        yield from addresses(optimizers.inner(optimizer))
        yield from (owner.data_ptr() for owner in optimizers.owners(optimizer))
        for parameter in self._engine.module.parameters():
            yield getattr(parameter, "ds_tensor", parameter).data_ptr()
        yield from (buffer.data_ptr() for buffer in self._engine.module.buffers())


def _scalers(optimizer: Any) -> Iterator[Any]:
    """Where the wrappers of DeepSpeed keep what scales losses."""
    for name in ("loss_scaler", "loss_scale_config"):
        if hasattr(optimizer, name):
            yield getattr(optimizer, name)


def _save_scaler(optimizer: Any) -> dict[str, Any]:
    saved = {}
    for scaler in _scalers(optimizer):
        saved.update({name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)})
    return saved


def _load_scaler(optimizer: Any, saved: Mapping[str, Any]) -> None:
    for scaler in _scalers(optimizer):
        for name, value in saved.items():
            setattr(scaler, name, value)


def _trackers() -> dict[str, Any]:
    """RNG states by name: DeepSpeed's, and megatron-core's where the model uses its layers."""
    found = {"deepspeed": checkpointing.get_cuda_rng_tracker()}
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None:
        found["megatron"] = megatron.get_cuda_rng_tracker()
    return found


def _save_trackers() -> dict[str, Any]:
    return {name: dict(tracker.get_states()) for name, tracker in _trackers().items()}


def _load_trackers(saved: Mapping[str, Any]) -> None:
    for name, tracker in _trackers().items():
        if name in saved:
            tracker.set_states(dict(saved[name]))
