"""The state of FP8 delayed scaling in Transformer Engine's modules, as an object of a snapshot.

Each FP8 module has a scale for each tensor that it casts, and a history of maxima (amax) from which the next scale is
computed. TE creates these tensors in the first forward and may recreate them, so their addresses cannot be described.
Instead, all are packed into one tensor at each boundary; its space is reserved from the start.
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
"""Assumed for a module without ``num_gemms``: attention."""
_FUSED = "TEFusedMLP"
_TABLE_BYTES = 256
"""Reserved bytes for a module's row in the table of packed tensors."""

Scales = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A module's scales [tensors] and their history [length, tensors], by direction."""


class ScalingState:
    """The scales of one rank's model chunks.

    Raises:
        UnsupportedError: an FP8 setting whose state cannot be saved.
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
        """Whether ``save`` covers the module."""
        return has(module, "init_fp8_metadata")

    @property
    def room_bytes(self) -> int:
        """The maximum size of the saved state, known before the first forward; 0 if the model does not use FP8."""
        return sum(
            _TABLE_BYTES + 4 * _TENSORS_PER_GEMM * getattr(module, "num_gemms", _MOST_GEMMS) * (1 + _history(config))
            for module, config in self._modules.values()
            if _has_fp8(config)
        )

    def save(self) -> dict[str, Any]:
        """The packed scales and histories, and each module's number of GEMMs and history shapes, in packed order.

        Waits for the device.

        Raises:
            UnsupportedError: a module has scales, but the model's configuration has no FP8.
        """
        table: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []
        for name, (module, config) in self._modules.items():
            states = scaling_states(module)
            if states and not _has_fp8(config):
                raise UnsupportedError(
                    f"module {name} has FP8 scales, which could not be restored: the model was built without fp8 in "
                    "its TransformerConfig; set --fp8-format"
                )
            for state in states.values():
                tensors += [state.scale.view(-1), state.amax_history.reshape(-1)]
            if states:
                shapes = {direction: list(state.amax_history.shape) for direction, state in states.items()}
                table[name] = [module.fp8_meta["num_gemms"], shapes]
        return {"modules": table, "packed": torch.cat(tensors) if tensors else torch.empty(0)}

    def load(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Restores the results of ``save``, of this rank or of the first rank of each stage of another layout.

        TE's reductions keep scales equal on all ranks of a stage; its own checkpoints rely on that, too.
        """
        found = {name: (gemms, scales) for of_rank in saved for name, gemms, scales in _unpacked(of_rank)}
        here = [name for name in found if name in self._modules]
        taken = [name for name in here if self._put(name, *found[name])]
        if len(taken) < len(here) or (found and not taken):
            log_once("FP8 scales of %d modules of the snapshot do not fit here", len(here or found) - len(taken))
        if not taken and any(_is_delayed(config) for _, config in self._modules.values()):
            log_once("the snapshot has no FP8 scales for this model: starting with initial ones")

    def _put(self, name: str, gemms: int, scales: Scales) -> bool:
        """Restores a module's scales; returns whether they fit."""
        module, config = self._modules[name]
        # ``num_gemms`` differs, for example, with another number of experts per rank.
        if not _has_fp8(config) or getattr(module, "num_gemms", gemms) != gemms:
            return False
        # Creates the tensors as the first forward would, which then uses them. Under no_grad, because leaving the
        # context otherwise reduces the scales of other modules.
        with torch.no_grad(), get_fp8_context(config):
            module.init_fp8_metadata(num_gemms=gemms)
        states = scaling_states(module)
        if any(direction not in states for direction in scales):
            return False
        for direction, (scale, history) in scales.items():
            state = states[direction]
            state.scale.copy_(scale)
            # As TE does if --fp8-amax-history-len has changed.
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
    """Modules by names that do not depend on the layout: layers are numbered across all stages."""
    names = {"": ""}
    for name, module in unwrapped(chunk.named_modules()):
        parent, _, last = name.rpartition(".")
        number = getattr(module, "layer_number", None)
        # Attention also has its layer's number, but a name that is not a number.
        last = str(number - 1) if last.isdecimal() and isinstance(number, int) else last
        names[name] = f"{names[parent]}.{last}".strip(".")
        yield names[name], module


def _check(chunk: Any) -> None:
    config = chunk.config
    if not _has_fp8(config):
        return
    if config.fp8_param:
        raise UnsupportedError("FP8 parameters (fp8_param, --fp8-param-gather) are not supported; switch them off")
    # The fuser's operations are created in the first forward and are not modules of the model. Releases before 0.19
    # have no setting for it in the model's configuration.
    fuses = getattr(config, "use_transformer_engine_op_fuser", False)
    if _is_delayed(config) and (fuses or any(type(module).__name__ == _FUSED for module in chunk.modules())):
        raise UnsupportedError(
            "the FP8 scales of Transformer Engine's operation fuser cannot be saved; remove "
            "--use-transformer-engine-op-fuser, or use another --fp8-recipe than delayed"
        )


def _has_fp8(config: Any) -> bool:
    return bool(getattr(config, "fp8", None))


def _is_delayed(config: Any) -> bool:
    return _has_fp8(config) and str(getattr(config.fp8_recipe, "value", config.fp8_recipe)) == "delayed"


def _history(config: Any) -> int:
    """The maximum history length of a module; attention under other recipes has its own length."""
    return max(int(config.fp8_amax_history_len), int(os.environ.get("NVTE_DPA_FP8DS_AMAX_HISTLEN", "1")))
