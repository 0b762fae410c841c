"""Whether what was written is what was read: every tensor's bytes, and all else, from both ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import Get, Part, Source, Tensor
from ftckpt.universal.convert import Conversion
from ftckpt.universal.derived import getting_derived
from ftckpt.universal.fill import Filler
from ftckpt.universal.verify_objects import differing
from ftckpt.universal.writer import strips

_MOST_NAMED = 5


def verify(
    conversion: Conversion, written: Source, workers: int, on_bytes: Callable[[int], object] = lambda nbytes: None
) -> int:
    """Compare the checksum of every tensor that the conversion has written, read again from its source, with that of
    the same tensor in ``written``, and what is no tensor with what is no tensor there; and see that nothing else is
    there. Returns the number of tensors.

    Raises:
        ConvertError: names the tensors and objects that differ, are missing or are too many.
    """
    expected = {part.tensor.key: part.tensor for unit in conversion.units for part in unit.parts}
    filler = Filler(written)
    plain = written.catalog.origin == "safetensors"  # there a buffer is a weight like others
    found = {tensor.key: tensor for tensor in filler.tensors}
    get = getting_derived(conversion.catalog, conversion.tensors, conversion.get)
    pairs = [(tensor, found.pop(_weight(key) if plain else key, None)) for key, tensor in expected.items()]
    problems = [f"{one.key} is missing" for one, other in pairs if other is None]
    problems += [f"{key} is there, though the source has none" for key in found]
    said, found_iteration = conversion.catalog.iteration, written.catalog.iteration
    if said != found_iteration and not plain:
        problems.append(f"it is of iteration {found_iteration}, it was {said}")
    problems += differing(conversion.catalog, written.catalog)
    guard = threading.Lock()

    def compared(pair: tuple[Tensor, Tensor | None]) -> str:
        one, other = pair
        if other is None:
            return ""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            told = f"{other.dtype} {list(other.shape)}, it was {one.dtype} {list(one.shape)}"
            return f"{one.key} is {told}"
        if _checksum(one, get) != _checksum(other, filler.get):
            return f"{one.key} has other bytes"
        with guard:
            on_bytes(one.nbytes)
        return ""

    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="ftckpt-verify") as pool:
        problems += filter(None, pool.map(compared, pairs))
    conversion.source.confirm()
    if problems:
        raise ConvertError(f"the destination is not what the source is: {_listed(problems)}")
    return len(pairs)


def _checksum(tensor: Tensor, get: Get) -> str:
    checksum = xxhash.xxh3_64()
    for first, last in strips(Part.whole(tensor)):
        checksum.update(get(tensor, first, last).data)
    return checksum.hexdigest()


def _weight(key: str) -> str:
    return f"weight/{key.partition('/')[2]}"


def _listed(problems: Sequence[str]) -> str:
    more = f", and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    return ", ".join(problems[:_MOST_NAMED]) + more
