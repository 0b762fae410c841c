"""One Megatron rank's training state, for ``ftckpt.Checkpointer``, and the generators that it draws from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from ftckpt.errors import MismatchError
from ftckpt.frameworks import schedulers
from ftckpt.frameworks import torch_state as generators
from ftckpt.frameworks.extra_state import ExtraState
from ftckpt.frameworks.flags import TrainingFlags
from ftckpt.frameworks.generators import as_object, generators_in
from ftckpt.frameworks.late_changes import LateChanges
from ftckpt.frameworks.live_tensors import Holders, LiveTensors
from ftckpt.frameworks.optimizers import save_groups, state_tensors
from ftckpt.frameworks.tensors import flat, fragments, frozen_pieces, unwrapped, whole_piece
from ftckpt.frameworks.torch_state import Stateful, load_all, load_all_reshaped, save_all
from ftckpt.megatron import optimizers
from ftckpt.megatron.fp8 import ScalingState
from ftckpt.megatron.geometry import Geometry, place_tensors
from ftckpt.model.training_state import Description, Piece

_FLAGS = "ftckpt.flags"


class MegatronState:
    """Implements ``ftckpt.model.training_state.TrainingState``.

    Stepped: what the optimizers hold and step, and parameters that nothing steps (frozen). Volatile: module
    buffers: those that Megatron puts into checkpoints (router bias) are part of the model, all others (token counts)
    belong to their rank and are not carried into another layout. Objects: RNG, the scheduler, hyperparameters, the
    loss scaler, FP8 scales and ``objects``.

    Raises:
        UnsupportedError: an optimizer, or a form of FP8, that ftckpt does not know.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Stateful, objects: Mapping[str, Stateful]
    ) -> None:
        self._wrapped: list[Any] = list(model)
        self._chunks: list[Any] = [unwrap_model(chunk) for chunk in model]
        self._leaves = optimizers.leaf_optimizers(optimizer)
        self._scaling = ScalingState(self._chunks)
        self._extra = [ExtraState(chunk, apart=self._scaling.has) for chunk in self._chunks]
        self._scheduler = scheduler
        self._objects = {name: as_object(value) for name, value in objects.items()}
        self._objects |= generators_in(self._named_modules())
        self._live = LiveTensors(self._live_tensors, self._holders)
        self.late_changes = LateChanges(self._changing, "call step() last in each iteration")
        self._rng: Mapping[str, Any] | None = None
        self._built: Mapping[str, Any] | None = None

    def describe(self) -> Description:
        if self._built is None:
            # As the job's own set-up seeded them, before a restore: ``derive_rng`` starts from these.
            self._built = save_rng()
        for extra in self._extra:
            extra.refuse()
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            if hasattr(module, "_maintain_float32_expert_bias"):
                # A router turns its bias into fp32 in its first forward: into another buffer, after it was described.
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
        if _FLAGS not in self._objects:
            parameters = ((places[0].key, parameter) for parameter, places in geometry.parameters.items())
            self._objects[_FLAGS] = TrainingFlags(parameters, self._named_modules())
        # Last: what was created above must be among the addresses that ``check`` compares with.
        self._live.note()
        return Description(tuple(stepped), volatile, padded, self._scaling.room_bytes)

    def save_objects(self) -> dict[str, Any]:
        """See TrainingState.

        Raises:
            CaptureError: a tensor was replaced since ``describe``.
            UnsupportedError: a module keeps extra state now, and none was described.
        """
        for extra in self._extra:
            extra.look_again()
        self._live.check("attach ftckpt after the last load, and write into tensors instead of replacing them")
        self.late_changes.boundary()
        return {
            "rng": save_rng(),
            "optimizers": [optimizers.save_hyperparameters(leaf) for leaf in self._leaves],
            "scheduler": schedulers.save(self._scheduler),
            "fp8": self._scaling.save(),
            "objects": save_all(self._objects),
        }

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        schedulers.load(self._scheduler, objects["scheduler"])  # first: it writes learning rates
        if len(objects["optimizers"]) != len(self._leaves):
            raise MismatchError(
                f"the snapshot has {len(objects['optimizers'])} optimizers, and this job {len(self._leaves)}: start "
                "with the optimizer settings of the job that took it, or remove it with 'ftckpt clean JOB'"
            )
        for leaf, saved in zip(self._leaves, objects["optimizers"], strict=True):
            optimizers.load_hyperparameters(leaf, saved)
        self._scaling.load([objects["fp8"]])
        load_all(self._objects, objects["objects"])
        self._rng = objects["rng"]

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        assert self._built is not None, "describe comes first"
        schedulers.load(self._scheduler, objects[0]["scheduler"])
        optimizers.load_reshaped(self._leaves, [optimizer for saved in objects for optimizer in saved["optimizers"]])
        self._scaling.load([saved["fp8"] for saved in objects])
        load_all_reshaped(self._objects, [saved["objects"] for saved in objects])
        self._rng = derive_rng(self._built, iteration)

    def finish_load(self) -> None:
        """Gather what other data-parallel ranks own of each parameter, then set RNG."""
        # The distributed optimizer restored the owned range alone: forward reads all of each parameter.
        for chunk in self._wrapped:
            ddp_config = getattr(chunk, "ddp_config", None)
            if ddp_config is not None and ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        self.set_rng()

    def set_rng(self) -> None:
        """Set RNG to what was loaded; again after anything that draws numbers before training begins."""
        if self._rng is not None:
            load_rng(self._rng)
        self.late_changes.boundary()

    def _changing(self) -> dict[str, Any]:
        return {
            "random numbers": save_rng(),
            "the scheduler": schedulers.save(self._scheduler),
            "parameter groups": [save_groups(leaf.optimizer) for leaf in self._leaves],
            **{name: one.state_dict() for name, one in self._objects.items() if not name.startswith("ftckpt.")},
        }

    def _buffers(self, geometry: Geometry) -> Iterator[Piece]:
        """What Megatron puts into checkpoints belongs to the model, all else (counts within a batch) to a rank."""
        for index, chunk in enumerate(self._chunks):
            for name, buffer in unwrapped(chunk.named_buffers()):
                if buffer in geometry.buffers:
                    for fragment, view in fragments(geometry.buffers[buffer], "buffer", flat(buffer), 0):
                        yield Piece(fragment, view)
                else:
                    yield whole_piece(f"local/{index}.{name}", buffer)

    def _named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for index, chunk in enumerate(self._chunks):
            yield from ((f"{index}.{name}", module) for name, module in unwrapped(chunk.named_modules()))

    def _holders(self) -> Holders:
        return Holders(self._chunks, [leaf.optimizer for leaf in self._leaves])

    def _live_tensors(self) -> Iterator[tuple[str, object, torch.Tensor]]:
        for index, leaf in enumerate(self._leaves):
            yield from state_tensors(leaf.optimizer, index)
        for index, chunk in enumerate(self._chunks):
            yield from (("parameter", (index, name), tensor) for name, tensor in chunk.named_parameters())
            yield from (("buffer", (index, name), tensor) for name, tensor in chunk.named_buffers())


def save_rng() -> dict[str, Any]:
    """State of every generator that training draws from, Megatron's tracker among them."""
    return {**generators.save_generators(), "tracker": _tracker_states()}


def load_rng(saved: Mapping[str, Any]) -> None:
    """Set every generator as ``save_rng`` found it: bit for bit, on the layout that the snapshot was taken in."""
    generators.load_generators(saved)
    tracker = get_cuda_rng_tracker()
    live = tracker.get_states()
    tracker.set_states({name: _graph_safe(state, live) for name, state in saved["tracker"].items()})


def _tracker_states() -> dict[str, torch.Tensor]:
    """A tracker for CUDA graphs, Megatron's or Transformer Engine's, has generators in the place of their states."""
    states = get_cuda_rng_tracker().get_states()
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state for name, state in states.items()
    }


def _graph_safe(state: torch.Tensor, live: Mapping[str, Any]) -> Any:
    """``state`` as the tracker that has ``live`` wants it."""
    for generator in live.values():
        if isinstance(generator, torch.Generator):
            # A new one, as Megatron's own checkpoints make: others may hold the old one's state.
            fresh = generator.clone_state()
            fresh.set_state(state)
            return fresh
    return state


def derive_rng(built: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """What ``load_rng`` takes on a rank of another layout; ``built`` is what ``save_rng`` gave before any batch.

    There no rank of the snapshot is this one: its dropout masks would be those of another part of the model. So each
    generator is seeded with 64 bits that follow from its name, the state in which the job's own set-up left it, and
    the iteration. What the job seeded alike (default generators of tensor-parallel ranks) stays alike, what it seeded
    differently (tensor-parallel regions, experts, stages) stays different, and the same restart draws the same.
    """
    plain = {name: state for name, state in built.items() if name != "tracker"}
    tracker = generators.derive_tracker("tracker", built["tracker"], iteration)
    return {**generators.derive_generators(plain, iteration), "tracker": tracker}
