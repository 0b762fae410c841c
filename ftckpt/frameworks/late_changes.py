"""Detection of state that a script changes after the step boundary, which a restart would lose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import xxhash

from ftckpt.model.objects import encode
from ftckpt.model.text import listed

log = logging.getLogger("ftckpt")

_MAX_LOOKS = 3
"""Number of boundaries after which state is compared: encoding is slow, and iterations of a script are alike."""


class LateChanges:
    """Compares the state at a boundary with that at the start of the next iteration, and warns once.

    An iteration may also change state before it starts, by drawing its batch; a restart repeats that. This happens
    before the first iteration as well, so only state that changes after later boundaries but not then is late.

    Args:
        states: returns the state to compare, by name.
        remedy: what the script must do, for the warning.
        frozen: names of state that must not change before the first iteration either.
    """

    def __init__(self, states: Callable[[], Mapping[str, Any]], remedy: str, frozen: Collection[str] = ()) -> None:
        self._states, self._remedy, self._frozen = states, remedy, frozenset(frozen)
        self._noted: dict[str, int] | None = None
        self._usual: set[str] | None = None
        self._looks_left = _MAX_LOOKS

    def boundary(self) -> None:
        """Records the state at a boundary, or right before training."""
        if self._looks_left:
            self._noted = self._digests()

    def begin(self) -> None:
        """Compares the state at the start of an iteration, after its batch is drawn, or before if RNG is set then."""
        if self._noted is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # reading state would abort it
            return
        noted, self._noted = self._noted, None
        changed = {name for name, digest in self._digests().items() if name in noted and noted[name] != digest}
        if self._usual is None:
            self._usual = changed - self._frozen
            return
        self._looks_left -= 1
        if late := sorted(changed - self._usual):
            self._looks_left = 0
            self.report(listed(late))

    def report(self, names: str) -> None:
        """Logs the names of late changes."""
        text = "ftckpt: %s changed after the step boundary: a restart would lose the change; %s"
        log.warning(text, names, self._remedy)

    def _digests(self) -> dict[str, int]:
        try:
            return {name: xxhash.xxh3_64_intdigest(encode(state)) for name, state in self._states().items()}
        except Exception:  # noqa: BLE001 - promise 4: the boundary, not a forward, reports state that cannot be saved
            return {}
