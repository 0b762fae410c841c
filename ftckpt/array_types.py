"""Shared type aliases for arrays and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Hashes = Words
Integers = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview
