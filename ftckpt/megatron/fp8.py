"""FP8 with delayed scaling: what Transformer Engine keeps in its modules, as an object of a snapshot.

Each module that multiplies in FP8 has a scale for each tensor that it casts, and a history of largest values (amax)
from which the next scale follows. TE makes these tensors in the first forward and may make them anew, so no address
of theirs can be described: at each boundary all are packed into one tensor, for which a snapshot has room from the
start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_context

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.extra_state import has, scaling_states
from ftckpt.frameworks.launcher import log_once
from ftckpt.frameworks.tensors import unwrapped

_TENSORS_PER_GEMM = 5
"""Casts in forward (input, weight, output) and in backward (gradients of output and of input)."""
_MOST_GEMMS = 3
"""Assumed for a module without its own number: attention."""
_FUSED = "TEFusedMLP"
_TABLE_BYTES = 256
"""Room for a module's line in the table of what is packed."""

Scales = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A module's scales [tensors] and their history [length, tensors], by direction."""


class ScalingState:
    """The scales of one rank's model chunks.

    Raises:
        UnsupportedError: FP8 in a form whose state is not known, by its setting.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._modules = {
            name: (module, chunk.config)
            for chunk in chunks
            for name, module in _named_modules(chunk)
            if self.has(module)
        }
        for chunk in chunks:
            _check(chunk)

    def has(self, module: torch.nn.Module) -> bool:
        """Whether ``save`` looks at it."""
        return has(module, "init_fp8_metadata")

    @property
    def room_bytes(self) -> int:
        """The most that ``save`` needs, whenever the first forward comes: 0 where the model has no FP8."""
        return sum(
            _TABLE_BYTES + 4 * _TENSORS_PER_GEMM * getattr(module, "num_gemms", _MOST_GEMMS) * (1 + _history(config))
            for module, config in self._modules.values()
            if _has_fp8(config)
        )

    def save(self) -> dict[str, Any]:
        """``modules``: of each that has scales its number of multiplications and the shapes of its histories, in the
        order in which scales and histories lie in ``packed``. Waits for the device.

        Raises:
            UnsupportedError: a module has scales, and the model's configuration says nothing of FP8.
        """
        table: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []
        for name, (module, config) in self._modules.items():
            states = scaling_states(module)
            if states and not _has_fp8(config):
                raise UnsupportedError(
                    f"module {name} has FP8 scales, which could not be loaded again: the model was built without "
                    "fp8 in its TransformerConfig (--fp8-format)"
                )
            for state in states.values():
                tensors += [state.scale.view(-1), state.amax_history.reshape(-1)]
            if states:
                shapes = {direction: list(state.amax_history.shape) for direction, state in states.items()}
                table[name] = [module.fp8_meta["num_gemms"], shapes]
        return {"modules": table, "packed": torch.cat(tensors) if tensors else torch.empty(0)}

    def load(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Take what ``save`` gave, here or on the first rank of each stage of another layout.

        TE's own reductions keep scales alike on all ranks of a stage, so that its checkpoints go that way, too.
        """
        found = {name: (gemms, scales) for of_rank in saved for name, gemms, scales in _unpacked(of_rank)}
        here = [name for name in found if name in self._modules]
        taken = [name for name in here if self._put(name, *found[name])]
        if len(taken) < len(here) or (found and not taken):
            log_once("FP8 scales of %d modules in the snapshot have no place here", len(here or found) - len(taken))
        if not taken and any(_is_delayed(config) for _, config in self._modules.values()):
            log_once("the snapshot has no FP8 scales for this model: they begin anew")

    def _put(self, name: str, gemms: int, scales: Scales) -> bool:
        """Whether the module took them."""
        module, config = self._modules[name]
        # Another number of experts on each rank, for one.
        if not _has_fp8(config) or getattr(module, "num_gemms", gemms) != gemms:
            return False
        # As in its first forward, which then finds them. Without gradients: leaving the context would else reduce
        # what other modules have.
        with torch.no_grad(), get_fp8_context(config):
            module.init_fp8_metadata(num_gemms=gemms)
        states = scaling_states(module)
        if any(direction not in states for direction in scales):
            return False
        for direction, (scale, history) in scales.items():
            state = states[direction]
            state.scale.copy_(scale)
            # As TE itself does where --fp8-amax-history-len has changed.
            rows = min(len(history), len(state.amax_history))
            state.amax_history[:rows].copy_(history[:rows])
        return True


def _unpacked(saved: Mapping[str, Any]) -> Iterator[tuple[str, int, Scales]]:
    packed, position = saved["packed"], 0
    for name, (gemms, shapes) in saved["modules"].items():
        scales: Scales = {}
        for direction, (length, tensors) in shapes.items():
            middle, end = position + tensors, position + tensors + length * tensors
            scales[direction] = packed[position:middle], packed[middle:end].view(length, tensors)
            position = end
        yield name, gemms, scales


def _named_modules(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Under names that no layout changes: layers are numbered through all stages."""
    names = {"": ""}
    for name, module in unwrapped(chunk.named_modules()):
        parent, _, last = name.rpartition(".")
        number = getattr(module, "layer_number", None)
        # Attention has its layer's number too, and a name of its own.
        last = str(number - 1) if last.isdecimal() and isinstance(number, int) else last
        names[name] = f"{names[parent]}.{last}".strip(".")
        yield names[name], module


def _check(chunk: Any) -> None:
    config = chunk.config
    if not _has_fp8(config):
        return
    if config.fp8_param:
        raise UnsupportedError("FP8 parameters (fp8_param, --fp8-param-gather) are not known yet; switch them off")
    # Its operations are made in the first forward, and are no modules of the model; releases before 0.19 have no
    # setting for it in the model's configuration.
    fuses = getattr(config, "use_transformer_engine_op_fuser", False)
    if _is_delayed(config) and (fuses or any(type(module).__name__ == _FUSED for module in chunk.modules())):
        raise UnsupportedError(
            "the FP8 scales of Transformer Engine's operation fuser are not known yet; leave out "
            "--use-transformer-engine-op-fuser, or take another --fp8-recipe than delayed"
        )


def _has_fp8(config: Any) -> bool:
    return bool(getattr(config, "fp8", None))


def _is_delayed(config: Any) -> bool:
    return _has_fp8(config) and str(getattr(config.fp8_recipe, "value", config.fp8_recipe)) == "delayed"


def _history(config: Any) -> int:
    """The longest that TE keeps; attention under other recipes has a length of its own."""
    return max(int(config.fp8_amax_history_len), int(os.environ.get("NVTE_DPA_FP8DS_AMAX_HISTLEN", "1")))
