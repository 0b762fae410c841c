"""Nodes of a job that trains no more meet through its storage: who is left, and where they reach each other.

Each says that it is there; the first of them, by name, says who takes part and at which address. Nothing else of a
job without ranks knows where its nodes are: those that started it may be lost.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ftckpt.errors import StorageError
from ftckpt.persist.storage import Storage

_FOLDER = "meeting"
_PLACE = "place"
_POLL_SECS = 0.3


@dataclass(frozen=True)
class Survivor:
    """A node that is left: ``machine`` names its network, ``address`` is where other machines reach it. ``token`` is
    drawn anew each time, so that nobody takes an earlier meeting for this one."""

    node: str
    machine: str
    address: str
    token: str

    @classmethod
    def new(cls, node: str, machine: str, address: str) -> Survivor:
        return cls(node, machine, address, secrets.token_hex(8))


@dataclass(frozen=True)
class RescueRequest:
    """What ``ftckpt.restore.rescue`` does: ``node_dir`` has the arenas of ``node``; ``nodes`` are all that are left;
    ``where`` is the storage at which they meet, ``interface`` the one whose address is ``address``."""

    node_dir: str
    node: str
    nodes: tuple[str, ...]
    where: str
    machine: str
    address: str
    interface: str
    within_secs: float

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RescueRequest:
        return cls(**{**value, "nodes": tuple(value["nodes"])})


@dataclass(frozen=True)
class RescueReport:
    """``iteration`` is whole again; ``nodes`` hold shards of it, this one in ``arenas``, names of directories.
    ``rebuilt``: from what."""

    iteration: int
    nodes: tuple[str, ...]
    arenas: tuple[str, ...]
    rebuilt: tuple[str, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RescueReport:
        return cls(int(value["iteration"]), *(tuple(value[name]) for name in ("nodes", "arenas", "rebuilt")))


@dataclass(frozen=True)
class Place:
    """Who meets, by name, and the address and port of the first of them."""

    nodes: tuple[str, ...]
    address: str
    port: int


def meet(
    storage: Storage, me: Survivor, expected: Collection[str], receive: Callable[[str], int], within_secs: float
) -> Place:
    """Where the ``expected`` nodes meet. ``receive`` is called on the first of them: it listens at an address, and
    gives the port.

    Raises:
        StorageError: they did not all come within the time, or storage fails.
    """
    deadline = time.monotonic() + within_secs
    storage.put(f"{_FOLDER}/{me.node}.json", json.dumps(asdict(me)).encode())
    if me.node != min(expected):
        return _find(storage, me, deadline)
    survivors = _gather(storage, expected, deadline)
    one_machine = len({survivor.machine for survivor in survivors}) == 1
    address = "127.0.0.1" if one_machine else me.address
    tokens = {survivor.node: survivor.token for survivor in survivors}
    port = receive(address)
    place = {"tokens": tokens, "address": address, "port": port}
    storage.put(f"{_FOLDER}/{_PLACE}", json.dumps(place).encode())
    return Place(tuple(sorted(tokens)), address, port)


def part(storage: Storage) -> None:
    """Forget a meeting, once all have come."""
    storage.remove([entry.name for entry in storage.list(_FOLDER)])


def _gather(storage: Storage, expected: Collection[str], deadline: float) -> list[Survivor]:
    while True:
        there = {entry.name for entry in storage.list(_FOLDER)}
        missing = [node for node in expected if f"{_FOLDER}/{node}.json" not in there]
        if not missing:
            return [_survivor(storage, f"{_FOLDER}/{node}.json") for node in expected]
        _wait(deadline, f"{', '.join(sorted(missing))} did not come")


def _find(storage: Storage, me: Survivor, deadline: float) -> Place:
    name = f"{_FOLDER}/{_PLACE}"
    while True:
        if storage.size(name) is not None:
            place = json.loads(storage.read(name))
            if place["tokens"].get(me.node) == me.token:
                return Place(tuple(sorted(place["tokens"])), str(place["address"]), int(place["port"]))
        _wait(deadline, "the first of the nodes did not call")


def _survivor(storage: Storage, name: str) -> Survivor:
    try:
        return Survivor(**json.loads(storage.read(name)))
    except (TypeError, ValueError):
        raise StorageError(f"{storage.where}/{name}: is damaged; remove it", lasting=True) from None


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() >= deadline:
        raise StorageError(f"the nodes that are left do not meet: {problem}", lasting=True)
    time.sleep(_POLL_SECS)
