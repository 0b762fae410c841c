"""One DeepSpeed rank's training state, for ``ftckpt.Checkpointer``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from ftckpt.deepspeed import inner_optimizers, optimizers, support
from ftckpt.deepspeed.active_engine import steps_of
from ftckpt.deepspeed.geometry import place_parameters
from ftckpt.frameworks.launcher import log_once
from ftckpt.frameworks.live_state import RANDOM, LiveState
from ftckpt.frameworks.tensors import frozen_pieces, unwrapped, whole_piece
from ftckpt.frameworks.torch_state import (
    Stateful,
    derive_generators,
    derive_tracker,
    load_generators,
    save_generators,
)
from ftckpt.model.training_state import Description

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# Fields that change during training with a dynamic scale; everything else of a scaler comes from the JSON.
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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


class DeepSpeedState(LiveState):
    """Implements ``ftckpt.model.training_state.TrainingState``.

    Optimizer-updated: everything that the optimizer steps on this rank (of weights only the owned part), and frozen
    parameters. Mutable: module buffers. Objects: RNG, the engine's counters, the LR scheduler, hyperparameters, the
    loss scaler and ``objects``.

    Raises:
        UnsupportedError: the configuration is not supported; names the JSON field.
    """

    inside = "ds_tensor"
    replaced_remedy = "load before the first batch, and leave states where they are"
    late_remedy = "call ftckpt.deepspeed.begin_iteration() first in each iteration, before anything is drawn"
    frozen = frozenset({RANDOM})
    save_rng, load_rng, derive_rng = staticmethod(save_rng), staticmethod(load_rng), staticmethod(derive_rng)

    def __init__(self, engine: Any, objects: Mapping[str, Stateful]) -> None:
        support.check(engine)
        optimizers.check(engine.optimizer)
        self._engine = engine
        super().__init__({"": engine.module}, objects)

    def _scheduler(self) -> Any:
        return self._engine.lr_scheduler

    def _optimizers(self) -> Sequence[Any]:
        return [self._inner]

    def _owners(self) -> Sequence[torch.Tensor]:
        return optimizers.owners(self._engine.optimizer)

    @property
    def _inner(self) -> Any:
        """The optimizer that DeepSpeed's own wraps."""
        return optimizers.inner(self._engine.optimizer)

    def _describe(self) -> tuple[Description, Iterator[tuple[str, torch.nn.Parameter]]]:
        boxes, optimizer = place_parameters(self._engine), self._engine.optimizer
        optimizers.materialise(optimizer)
        trained = optimizers.stepped_parameters(optimizer)
        stepped = [*optimizers.pieces(optimizer, boxes), *frozen_pieces(boxes, trained, optimizers.owned)]
        buffers = unwrapped(self._engine.module.named_buffers())
        volatile = tuple(whole_piece(f"buffer/{name}", buffer) for name, buffer in buffers if buffer.numel())
        parameters = ((places[0].key, parameter) for parameter, places in boxes.items())
        return Description(tuple(stepped), volatile), parameters

    def _save(self) -> dict[str, Any]:
        return {
            "optimizer": inner_optimizers.save(self._inner, self._owners()),
            "scaler": save_scaler(self._engine.optimizer),
            "counters": counters(self._engine),
            "micro_offset": getattr(self._engine.module, "micro_offset", None),
        }

    def _load(self, objects: Mapping[str, Any]) -> None:
        inner_optimizers.load(self._inner, self._owners(), objects["optimizer"])
        self._load_shared(objects)

    def _load_reshaped(self, objects: Sequence[Mapping[str, Any]]) -> None:
        inner_optimizers.load_reshaped(self._inner, self._owners(), [saved["optimizer"] for saved in objects])
        self._load_shared(objects[0])
        # Another layout may have another number of micro-batches per step; at a boundary, all of them are done.
        engine = self._engine
        engine.micro_steps = steps_of(engine) * engine.gradient_accumulation_steps()

    def _load_shared(self, saved: Mapping[str, Any]) -> None:
        load_scaler(self._engine.optimizer, saved["scaler"])
        set_counters(self._engine, saved["counters"])
        if saved["micro_offset"] is not None:
            self._engine.module.micro_offset = saved["micro_offset"]  # layers are seeded by it

    def finish_load(self) -> None:
        """Gathers the parts of parameters that other ranks own. Does not set RNG: see ``set_rng``."""
        # RNG is set before the first batch: until then the script builds loaders, which draw random numbers.
        with torch.no_grad():
            optimizers.spread(self._engine.optimizer)
        if self._engine.pipeline_parallelism:
            self._engine.reset_activation_shape()
        self.late_changes.boundary()


def counters(engine: Any) -> dict[str, int]:
    """The engine's counters, by attribute."""
    return {name: int(vars(engine)[name]) for name in _COUNTERS}


def set_counters(engine: Any, values: Mapping[str, int]) -> None:
    """Inverse of ``counters``."""
    for name, value in values.items():
        setattr(engine, name, value)


def _dynamic_scalers(optimizer: Any) -> Iterator[Any]:
    # ZeRO's wrappers have a loss scaler; fp16's have the same fields in a configuration object.
    for scaler in (getattr(optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")):
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
