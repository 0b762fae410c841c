"""Python's collector of garbage rests while much is made that stays, and leaves alone what imports have made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """A restart makes some hundred small objects for each tensor. For these the collector would look at all that the
    process has, again and again, and take more time than the restart itself."""
    if not gc.isenabled():  # by the script, whose matter it stays
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """torch and Megatron make half a million objects that live as long as the process. The collector would look at
    them a dozen times while they are imported, a fifth of the start, and again at each full collection of training.

    What there is at the end is frozen: ``gc.get_objects`` does not show it until ``gc.unfreeze``.
    """
    with no_collections():
        yield
        gc.freeze()
