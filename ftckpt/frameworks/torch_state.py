"""A rank's training state under torch that is not tensors: generators, and objects of a script."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from ftckpt.errors import MismatchError
from ftckpt.model.objects import encode


class Stateful(Protocol):
    """A user's own object, a data loader for example: state as numbers, texts, lists, dicts, tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


def save_all(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of each object, under its name."""
    return {name: value.state_dict() for name, value in objects.items()}


def load_all(objects: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Give each object the state that was saved under its name.

    Raises:
        MismatchError: the snapshot has no such object.
    """
    for name, value in objects.items():
        if name not in saved:
            raise MismatchError(
                f"the snapshot has no object {name!r}, it has {', '.join(sorted(saved)) or 'none'}: register the "
                "same objects as the job that took it, or remove it with 'ftckpt clean JOB'"
            )
        value.load_state_dict(saved[name])


def load_all_reshaped(objects: Mapping[str, Stateful], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each object what was saved under its name on ranks of another layout, the firsts of its stages in order.

    An object with a method ``load_reshaped`` gets the list of its states, any other the first of them.

    Raises:
        MismatchError: the snapshot has no such object.
    """
    for name, value in objects.items():
        states = [of_rank[name] for of_rank in saved if name in of_rank]
        if not states:
            # This raises, and names what there is.
            load_all({name: value}, saved[0])
        elif hasattr(value, "load_reshaped"):
            value.load_reshaped(states)
        else:
            value.load_state_dict(states[0])


def save_generators() -> dict[str, Any]:
    """State of every generator; ``device`` is None on a machine without one."""
    return {
        "python": _python_state(random),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def load_generators(saved: Mapping[str, Any]) -> None:
    """Set every generator to what ``save_generators`` gave.

    Call it after all else is loaded: what loads may draw numbers.
    """
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["device"] is not None:
        torch.cuda.set_rng_state(saved["device"])


def derive_generators(built: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """What ``save_generators`` would give had each generator been seeded with ``derived_seed``; sets nothing."""
    seeds = {name: derived_seed(name, state, iteration) for name, state in built.items()}
    # NumPy's generator is seeded with words of 32 bits.
    words = [seeds["numpy"] & 0xFFFFFFFF, seeds["numpy"] >> 32]
    return {
        "python": _python_state(random.Random(seeds["python"])),
        "numpy": np.random.RandomState(np.array(words, np.uint32)).get_state(),
        "torch": torch.Generator().manual_seed(seeds["torch"]).get_state(),
        "device": device_state(seeds["device"]) if built["device"] is not None else None,
    }


def derive_tracker(name: str, built: Mapping[str, Any], iteration: int) -> dict[str, torch.Tensor]:
    """States of the generators that a tracker keeps by name, seeded with ``derived_seed``."""
    return {key: device_state(derived_seed(f"{name}/{key}", state, iteration)) for key, state in built.items()}


def derived_seed(name: str, built: Any, iteration: Any) -> int:
    """64 bits that follow from a generator's name, the state that it was built with, and the iteration to go on from.

    Generators that were seeded alike get the same, others get others, and each iteration gives other ones.
    """
    return xxhash.xxh3_64_intdigest(encode({"name": name, "built": built, "iteration": iteration}))


def device_state(seed: int) -> torch.Tensor:
    """The state of the device's generator after ``seed``, with the generator left as it is.

    Where nothing but the CPU computes its generators are the device's.
    """
    if not torch.cuda.is_available():
        return torch.Generator().manual_seed(seed).get_state()
    before = torch.cuda.get_rng_state()
    try:
        torch.cuda.manual_seed(seed)
        return torch.cuda.get_rng_state()
    finally:
        torch.cuda.set_rng_state(before)


def _python_state(generator: Any) -> dict[str, Any]:
    # 625 words: as an array they are one blob, not as many numbers of JSON. Packed first: NumPy looks at each number.
    version, words, gauss = generator.getstate()
    packed = np.frombuffer(struct.pack(f"={len(words)}I", *words), dtype=np.uint32)
    return {"version": version, "words": packed, "gauss": gauss}
