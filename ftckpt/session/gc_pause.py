"""Pauses of Python's garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause the collector. A restart creates some hundred small objects per tensor; repeated collections over the
    whole heap would take longer than the restart itself."""
    if not gc.isenabled():  # the script has disabled it
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """Pause the collector during imports, then freeze all objects. torch and Megatron create half a million permanent
    objects; a dozen scans of them take a fifth of the start, and every full collection would scan them again.

    ``gc.get_objects`` does not show frozen objects until ``gc.unfreeze``.
    """
    with no_collections():
        yield
        gc.freeze()
