"""One Megatron rank's training state, for ``ftckpt.Checkpointer``, including RNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from ftckpt.errors import MismatchError
from ftckpt.frameworks import torch_state as generators
from ftckpt.frameworks.live_state import LiveState
from ftckpt.frameworks.tensors import flat, fragments, frozen_pieces, unwrapped, whole_piece
from ftckpt.frameworks.torch_state import Stateful
from ftckpt.megatron import optimizers
from ftckpt.megatron.fp8 import ScalingState
from ftckpt.megatron.geometry import Geometry, place_tensors
from ftckpt.megatron.model_arguments import model_arguments
from ftckpt.model.training_state import Description, Piece


def save_rng() -> dict[str, Any]:
    """States of all generators that training uses, including Megatron's tracker."""
    return {**generators.save_generators(), "tracker": _tracker_states()}


def load_rng(saved: Mapping[str, Any]) -> None:
    """Restores the result of ``save_rng``, bit-exact, on the layout of the snapshot."""
    generators.load_generators(saved)
    tracker = get_cuda_rng_tracker()
    live = tracker.get_states()
    tracker.set_states({name: _graph_safe(state, live) for name, state in saved["tracker"].items()})


def _tracker_states() -> dict[str, torch.Tensor]:
    """The tracker's states; trackers for CUDA graphs (Megatron's, Transformer Engine's) have generators instead."""
    states = get_cuda_rng_tracker().get_states()
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state for name, state in states.items()
    }


def _graph_safe(state: torch.Tensor, live: Mapping[str, Any]) -> Any:
    """Converts ``state`` to the representation in ``live``: a tensor or a generator."""
    for generator in live.values():
        if isinstance(generator, torch.Generator):
            # A new generator, as in Megatron's own checkpoints: the old one's state may be shared.
            fresh = generator.clone_state()
            fresh.set_state(state)
            return fresh
    return state


def derive_rng(built: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Generator states for a rank of another layout; ``built`` is the result of ``save_rng`` before any batch.

    No rank of the snapshot corresponds to this one: its dropout masks would belong to another part of the model. So
    each generator gets a 64-bit seed from its name, its state after the job's own setup, and the iteration.
    Generators that the job seeded equally (default generators of tensor-parallel ranks) stay equal, others
    (tensor-parallel regions, experts, stages) stay different, and a repeated restart draws the same numbers.
    """
    plain = {name: state for name, state in built.items() if name != "tracker"}
    tracker = generators.derive_tracker("tracker", built["tracker"], iteration)
    return {**generators.derive_generators(plain, iteration), "tracker": tracker}


class MegatronState(LiveState):
    """Implements ``ftckpt.model.training_state.TrainingState``.

    Optimizer-updated: the optimizers' state and parameters, and frozen parameters. Mutable: module buffers: those in
    Megatron's checkpoints (router bias) are part of the model, all others (token counts) belong to their rank and are
    not restored in another layout. Objects: RNG, the scheduler, hyperparameters, the loss scaler, FP8 scales and
    ``objects``.

    Raises:
        UnsupportedError: an optimizer or an FP8 setting is not supported.
    """

    replaced_remedy = "attach ftckpt after the last load, and write into tensors instead of replacing them"
    save_rng, load_rng, derive_rng = staticmethod(save_rng), staticmethod(load_rng), staticmethod(derive_rng)

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Stateful, objects: Mapping[str, Stateful]
    ) -> None:
        self._wrapped: list[Any] = list(model)
        self._chunks: list[Any] = [unwrap_model(chunk) for chunk in model]
        self._leaves = optimizers.leaf_optimizers(optimizer)
        self._scaling = ScalingState(self._chunks)
        roots = {f"{index}.": chunk for index, chunk in enumerate(self._chunks)}
        self._lr_scheduler = scheduler
        super().__init__(roots, objects)

    def _scheduler(self) -> Stateful:
        return self._lr_scheduler

    def _describe_model(self) -> str:
        return model_arguments(self._chunks[0])

    def _optimizers(self) -> Sequence[Any]:
        return [leaf.optimizer for leaf in self._leaves]

    def _saves_extra_state(self, module: torch.nn.Module) -> bool:
        return self._scaling.has(module)

    def _describe(self) -> tuple[Description, Iterator[tuple[str, torch.nn.Parameter]]]:
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            if hasattr(module, "_maintain_float32_expert_bias"):
                # In its first forward a router replaces its bias by an fp32 buffer; do it before the description.
                module._maintain_float32_expert_bias()
        geometry = place_tensors(self._chunks)
        stepped: list[Piece] = []
        for leaf in self._leaves:
            stepped += optimizers.pieces(leaf, geometry.parameters)
        trained = set().union(*(optimizers.stepped_parameters(leaf) for leaf in self._leaves))
        stepped += frozen_pieces(geometry.parameters, trained, lambda parameter: (0, parameter))
        volatile = tuple(self._buffers(geometry))
        keys = {p.fragment.key for p in stepped if p.fragment.global_shape[0] > 1}  # a step is one number
        padded = frozenset(key for key in keys if key.partition("/")[2] in geometry.padded)
        parameters = ((places[0].key, parameter) for parameter, places in geometry.parameters.items())
        return Description(tuple(stepped), volatile, padded, self._scaling.room_bytes), parameters

    def _save(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizers.save_hyperparameters(leaf) for leaf in self._leaves],
            "fp8": self._scaling.save(),
        }

    def _load(self, objects: Mapping[str, Any]) -> None:
        if len(objects["optimizers"]) != len(self._leaves):
            raise MismatchError(
                f"the snapshot has {len(objects['optimizers'])} optimizers but this job has {len(self._leaves)}: use "
                "the optimizer settings of the job that took it, or remove it with 'ftckpt clean JOB'"
            )
        for leaf, saved in zip(self._leaves, objects["optimizers"], strict=True):
            optimizers.load_hyperparameters(leaf, saved)
        self._scaling.load([objects["fp8"]])

    def _load_reshaped(self, objects: Sequence[Mapping[str, Any]]) -> None:
        optimizers.load_reshaped(self._leaves, [optimizer for saved in objects for optimizer in saved["optimizers"]])
        self._scaling.load([saved["fp8"] for saved in objects])

    def finish_load(self) -> None:
        """Gathers the parts of parameters that other data-parallel ranks own, then sets RNG."""
        # The distributed optimizer restored only the owned range; forward reads the entire parameter.
        for chunk in self._wrapped:
            ddp_config = getattr(chunk, "ddp_config", None)
            if ddp_config is not None and ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        self.set_rng()

    def set_rng(self) -> None:
        super().set_rng()
        self.late_changes.boundary()

    def _buffers(self, geometry: Geometry) -> Iterator[Piece]:
        """Pieces of buffers; those in Megatron's checkpoints are the model's, others (token counts) the rank's."""
        for index, chunk in enumerate(self._chunks):
            for name, buffer in unwrapped(chunk.named_buffers()):
                if buffer in geometry.buffers:
                    for fragment, view in fragments(geometry.buffers[buffer], "buffer", flat(buffer), 0):
                        yield Piece(fragment, view)
                else:
                    yield whole_piece(f"local/{index}.{name}", buffer)
