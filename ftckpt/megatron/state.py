"""One Megatron rank's training state, for ``ftckpt.Checkpointer``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from ftckpt.errors import CaptureError, UnsupportedError
from ftckpt.live.extra_state import refuse_extra_state
from ftckpt.live.stateful import Stateful, load_all, load_all_reshaped
from ftckpt.live.tensors import fragments, whole_piece
from ftckpt.megatron import optimizers
from ftckpt.megatron.geometry import Geometry, place_tensors
from ftckpt.megatron.rng import derive_rng, load_rng, save_rng
from ftckpt.state.piece import Description, Piece


class MegatronState:
    """Implements ``ftckpt.state.piece.TrainingState``.

    Stepped: what the optimizers hold and step, and parameters that nothing steps (frozen). Volatile: module
    buffers: those that Megatron puts into checkpoints (router bias) are part of the model, all others (token counts)
    belong to their rank and are not carried into another layout. Objects: RNG, the scheduler, hyperparameters, the
    loss scaler and ``objects``.
    """

    reshapes = True

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Stateful, objects: Mapping[str, Stateful]
    ) -> None:
        self._wrapped: list[Any] = list(model)
        self._chunks: list[Any] = [unwrap_model(chunk) for chunk in model]
        self._leaves = optimizers.leaf_optimizers(optimizer)
        self._scheduler = scheduler
        self._objects = dict(objects)
        self._addresses: tuple[int, ...] = ()
        self._rng: Mapping[str, Any] | None = None
        self._built: Mapping[str, Any] | None = None

    def describe(self) -> Description:
        """See TrainingState."""
        if self._built is None:
            self._built = save_rng()
        for chunk in self._chunks:
            refuse_extra_state(chunk)
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()  # else its first forward would move the buffer
        geometry = place_tensors(self._chunks)
        stepped: list[Piece] = []
        for leaf in self._leaves:
            stepped += optimizers.pieces(leaf, geometry.parameters)
        stepped += self._frozen(geometry.parameters)
        volatile = tuple(self._buffers(geometry))
        keys = {p.fragment.key for p in stepped if p.fragment.global_shape[0] > 1}  # a step is one number
        padded = frozenset(key for key in keys if key.partition("/")[2] in geometry.padded)
        self._addresses = tuple(self._live_addresses())
        return Description(tuple(stepped), volatile, padded)

    def save_objects(self) -> dict[str, Any]:
        """See TrainingState.

        Raises:
            CaptureError: a tensor was replaced since ``describe``, so that copies would read dead memory.
        """
        if tuple(self._live_addresses()) != self._addresses:
            raise CaptureError(
                "optimizer state or buffers were replaced after training began (load_state_dict?); "
                "attach ftckpt after the last load"
            )
        return {
            "rng": save_rng(),
            "optimizers": [optimizers.save_hyperparameters(leaf) for leaf in self._leaves],
            "scheduler": self._scheduler.state_dict(),
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
        }

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See TrainingState."""
        for leaf, saved in zip(self._leaves, objects["optimizers"], strict=True):
            optimizers.load_hyperparameters(leaf, saved)
        self._load_scheduler(objects["scheduler"])
        load_all(self._objects, objects["objects"])
        self._rng = objects["rng"]

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        """See TrainingState."""
        assert self._built is not None, "describe comes first"
        optimizers.load_reshaped(self._leaves, [optimizer for saved in objects for optimizer in saved["optimizers"]])
        self._load_scheduler(objects[0]["scheduler"])
        load_all_reshaped(self._objects, [saved["objects"] for saved in objects])
        self._rng = derive_rng(self._built, iteration)

    def finish_load(self) -> None:
        """Gather what other data-parallel ranks own of each parameter, then set RNG."""
        for chunk in self._wrapped:
            ddp_config = getattr(chunk, "ddp_config", None)
            if ddp_config is not None and ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        self.set_rng()

    def set_rng(self) -> None:
        """Set RNG to what was loaded; again after anything that draws numbers before training begins."""
        if self._rng is not None:
            load_rng(self._rng)

    def _load_scheduler(self, saved: Mapping[str, Any]) -> None:
        if hasattr(self._scheduler, "num_steps"):
            self._scheduler.num_steps = 0  # Megatron's load_state_dict adds to what is there
        self._scheduler.load_state_dict(saved)

    def _frozen(self, places: optimizers.Places) -> Iterator[Piece]:
        stepped: set[torch.nn.Parameter] = set()
        for leaf in self._leaves:
            stepped |= optimizers.stepped_parameters(leaf)
        for parameter, placed in places.items():
            if parameter in stepped:
                continue
            if parameter.requires_grad:
                raise UnsupportedError(f"parameter {placed[0].key} needs gradients and no optimizer steps it")
            for fragment, view in fragments(placed, "weight", parameter, 0):
                yield Piece(fragment, view)

    def _buffers(self, geometry: Geometry) -> Iterator[Piece]:
        """What Megatron puts into checkpoints belongs to the model, all else (counts within a batch) to a rank."""
        for index, chunk in enumerate(self._chunks):
            for name, buffer in chunk.named_buffers():
                if buffer in geometry.buffers:
                    for fragment, view in fragments(geometry.buffers[buffer], "buffer", buffer, 0):
                        yield Piece(fragment, view)
                else:
                    yield whole_piece(f"local/{index}.{name}", buffer)

    def _live_addresses(self) -> Iterator[int]:
        for leaf in self._leaves:
            yield from optimizers.addresses(leaf)
        for chunk in self._chunks:
            yield from (tensor.data_ptr() for tensor in chunk.parameters())
            yield from (tensor.data_ptr() for tensor in chunk.buffers())
