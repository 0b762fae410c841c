"""State that a script changes after the step boundary and that a restart would not change again, seen without one."""

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
"""Boundaries after which it is compared: encoding state takes time, and scripts do the same in each iteration."""


class LateChanges:
    """Compares state at a boundary with that at the beginning of the next iteration, and warns once.

    An iteration begins by changing state, too: it draws its batch. This a restart repeats. It happens before the
    first iteration as well, so that only what changes after later boundaries alone is late.

    Args:
        states: gives what may change, by name.
        remedy: what the script is to do.
        frozen: names of what no iteration may change before it begins.
    """

    def __init__(self, states: Callable[[], Mapping[str, Any]], remedy: str, frozen: Collection[str] = ()) -> None:
        self._states, self._remedy, self._frozen = states, remedy, frozenset(frozen)
        self._noted: dict[str, int] | None = None
        self._usual: set[str] | None = None
        self._looks_left = _MAX_LOOKS

    def boundary(self) -> None:
        """A boundary whose state is saved, or training is about to begin."""
        if self._looks_left:
            self._noted = self._digests()

    def begin(self) -> None:
        """An iteration begins: its batch is there, or is about to be drawn where a restart sets RNG only then."""
        if self._noted is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # which reading state would end
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
        """Log what is late."""
        text = "ftckpt: %s changed after the step boundary: a restart would not have the change; %s"
        log.warning(text, names, self._remedy)

    def _digests(self) -> dict[str, int]:
        try:
            return {name: xxhash.xxh3_64_intdigest(encode(state)) for name, state in self._states().items()}
        except Exception:  # noqa: BLE001 - promise 4: what cannot be saved the boundary reports, and not a forward
            return {}
