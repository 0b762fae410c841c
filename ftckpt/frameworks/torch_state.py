"""The part of a rank's training state that is not tensors: generators, and objects of a script."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from ftckpt.errors import MismatchError
from ftckpt.model.objects import encode


class Stateful(Protocol):
    """A user's object, such as a data loader; its state is made of numbers, texts, lists, dicts and tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


def save_all(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of each object, by name."""
    return {name: value.state_dict() for name, value in objects.items()}


def load_all(objects: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Restores each object's state by name.

    Raises:
        MismatchError: the snapshot has no such object.
    """
    for name, value in objects.items():
        if name not in saved:
            raise MismatchError(
                f"the snapshot has no object {name!r}, only {', '.join(sorted(saved)) or 'none'}: register the same "
                "objects as the job that took it, or remove it with 'ftckpt clean JOB'"
            )
        value.load_state_dict(saved[name])


def load_all_reshaped(objects: Mapping[str, Stateful], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restores each object from its states on ranks of another layout: the first rank of each stage, in order.

    An object with a method ``load_reshaped`` gets the list of its states, any other object the first one.

    Raises:
        MismatchError: the snapshot has no such object.
    """
    for name, value in objects.items():
        states = [of_rank[name] for of_rank in saved if name in of_rank]
        if not states:
            # Raises, with the names in the snapshot.
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
    """Sets every generator to the result of ``save_generators``.

    Must be called last, because other loading code may draw random numbers.
    """
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["device"] is not None:
        torch.cuda.set_rng_state(saved["device"])


def derive_generators(built: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Generator states, as from ``save_generators``, after seeding with ``derived_seed``; does not set them."""
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
    """States of a tracker's named generators after seeding with ``derived_seed``."""
    return {key: device_state(derived_seed(f"{name}/{key}", state, iteration)) for key, state in built.items()}


def derived_seed(name: str, built: Any, iteration: Any) -> int:
    """A 64-bit seed from a generator's name, its initial state, and the iteration from which training resumes.

    Generators with equal initial states get equal seeds, others different ones, and different ones per iteration.
    """
    return xxhash.xxh3_64_intdigest(encode({"name": name, "built": built, "iteration": iteration}))


def device_state(seed: int) -> torch.Tensor:
    """The state of the device's generator seeded with ``seed``; does not change the generator.

    Without a device, the state of a CPU generator.
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
    # 625 words: as an array they are one blob, not 625 JSON numbers. Packed first: NumPy converts numbers one by one.
    version, words, gauss = generator.getstate()
    packed = np.frombuffer(struct.pack(f"={len(words)}I", *words), dtype=np.uint32)
    return {"version": version, "words": packed, "gauss": gauss}


_KINDS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random


class OwnGenerator:
    """A generator as an object of a snapshot."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._built = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        one = self._generator
        if isinstance(one, np.random.Generator):
            return {"state": one.bit_generator.state}
        return {"state": one.getstate() if isinstance(one, random.Random) else one.get_state()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        one = self._generator
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = saved["state"]
        else:
            (one.setstate if isinstance(one, random.Random) else one.set_state)(saved["state"])

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Seeds the generator from its initial state and the snapshot's: ranks of other layouts do not correspond."""
        one, seed = self._generator, derived_seed("own", self._built, states[0])
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = type(one.bit_generator)(seed).state
        elif isinstance(one, torch.Generator):
            one.manual_seed(seed)
        else:
            one.seed(seed & 0xFFFFFFFF)  # NumPy's maximum


def as_object(value: Any) -> Any:
    """Wraps a generator in an object with ``state_dict`` and ``load_state_dict``; returns other values unchanged."""
    return OwnGenerator(value) if isinstance(value, _KINDS) else value


def generators_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, OwnGenerator]:
    """Generators in attributes of modules, each once, by name."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if isinstance(value, _KINDS):
                found.setdefault(id(value), (f"ftckpt.generator {name}.{attribute}", value))
    return {name: OwnGenerator(value) for name, value in found.values()}
