"""State of modules besides parameters and buffers: the FP8 scales of Transformer Engine, or a script's own state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ftckpt.errors import UnsupportedError

_EMPTY = tuple(b"\x80" + bytes([protocol]) + value for protocol in (4, 5) for value in (b"N.", b"}\x94."))
"""None and {} as pickled by Transformer Engine before 2.4 for modules without state; compared, never unpickled."""
_LOOKS = 2


class ExtraState:
    """A check for module state that only ``get_extra_state`` returns, which snapshots do not contain.

    Some of it is created in the first forward. So the check runs when the state is described, at the start of
    training, and at the first step boundary after it.

    Args:
        model: the model whose modules are checked.
        apart: returns True for modules whose extra state is saved in another way.
    """

    def __init__(
        self, model: torch.nn.Module, apart: Callable[[torch.nn.Module], bool] = lambda _module: False
    ) -> None:
        self._model = model
        self._apart = apart
        self._looks_left = _LOOKS

    def refuse(self) -> None:
        """Raises UnsupportedError, which names a module, if one keeps extra state."""
        for name, module in self._model.named_modules():
            has_some = type(module).get_extra_state is not torch.nn.Module.get_extra_state
            if has_some and not self._apart(module) and (kept := _kept(module)):
                raise UnsupportedError(f"module {name} keeps {kept}, which ftckpt cannot save yet")

    def look_again(self) -> None:
        """Repeats ``refuse`` while new state may still be created. Call it at each boundary."""
        if self._looks_left:
            self.refuse()
            self._looks_left -= 1  # only after success: every snapshot without that state is refused


def has(module: torch.nn.Module, name: str) -> bool:
    """A faster ``hasattr`` if ``name`` is neither a tensor nor a module: torch formats an error for each miss."""
    return name in module.__dict__ or hasattr(type(module), name)


def scaling_states(module: torch.nn.Module) -> dict[str, Any]:
    """The state of Transformer Engine's delayed scaling in a module, by direction: ``scale`` and ``amax_history``.

    Empty before the first forward and for recipes that scale by current values.
    """
    states: dict[str, Any] = {}
    for meta in _metas(module):
        for direction in ("scaling_fwd", "scaling_bwd"):
            if getattr(meta.get(direction), "amax_history", None) is not None:
                states[direction] = meta[direction]
    return states


def _metas(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    whole = getattr(module, "fp8_meta", None)
    # Fusible operations have one per direction, or none.
    metas: Iterable[Any] = (getattr(module, "_fp8_metas", None) or {}).values()
    yield from (meta for meta in (whole, *metas) if isinstance(meta, dict))


def _kept(module: torch.nn.Module) -> str:
    """A description of a module's extra state; empty if it has none."""
    # Not by its payload: that contains the recipe even for recipes without state.
    if has(module, "fp8_meta") or has(module, "_fp8_metas"):
        return "scales of FP8 with delayed scaling" if scaling_states(module) else ""
    extra = module.get_extra_state()
    if extra is None:
        return ""
    if hasattr(extra, "getbuffer"):  # io.BytesIO
        payload = bytes(extra.getbuffer())
    elif isinstance(extra, torch.Tensor):
        payload = extra.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        return f"extra state of type {type(extra).__name__}"
    return f"extra state of {len(payload)} bytes" if payload and payload not in _EMPTY else ""
