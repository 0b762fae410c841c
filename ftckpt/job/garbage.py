"""Python's collector of garbage rests while much is made that stays."""

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
