"""Nodes of a job that trains no more meet through its storage: who is left, and where they reach each other.

The first of them, by name, calls, the others answer, and it says at which address. Nothing else of a
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

LOOPBACK = "127.0.0.1"
_FOLDER = "meeting"
_CALL, _PLACE = f"{_FOLDER}/call", f"{_FOLDER}/place"
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
class MeetingPlace:
    """Who meets, by name, and the address and port of the first of them."""

    nodes: tuple[str, ...]
    address: str
    port: int


def meet(
    storage: Storage, me: Survivor, expected: Collection[str], receive: Callable[[str], int], within_secs: float
) -> MeetingPlace:
    """Where the ``expected`` nodes meet. ``receive`` is called on the first of them: it listens at an address, and
    gives the port.

    The first calls, the others answer this very call, then it says where: what earlier meetings have left means
    nothing.

    Raises:
        StorageError: they did not all come within the time, or storage fails.
    """
    deadline = time.monotonic() + within_secs
    if me.node != min(expected):
        return _answer(storage, me, deadline)
    storage.put(_CALL, me.token.encode())
    guests = _gather(storage, me, [node for node in expected if node != me.node], deadline)
    one_machine = len({me.machine, *(guest.machine for guest in guests)}) == 1
    address = LOOPBACK if one_machine else me.address
    port = receive(address)
    tokens = {survivor.node: survivor.token for survivor in (me, *guests)}
    place = {"tokens": tokens, "address": address, "port": port}
    storage.put(_PLACE, json.dumps(place).encode())
    return MeetingPlace(tuple(sorted(tokens)), address, port)


def _answer(storage: Storage, me: Survivor, deadline: float) -> MeetingPlace:
    call = ""
    while True:
        now = _read(storage, _CALL).decode()
        if now != call:
            call = now
            answer = json.dumps({"call": call, "survivor": asdict(me)})
            storage.put(f"{_FOLDER}/{me.node}.json", answer.encode())
        place = json.loads(_read(storage, _PLACE) or b"null")
        if place and place["tokens"].get(me.node) == me.token:
            return MeetingPlace(tuple(sorted(place["tokens"])), str(place["address"]), int(place["port"]))
        _wait(deadline, "the first of the nodes did not call")


def _gather(storage: Storage, me: Survivor, nodes: Collection[str], deadline: float) -> list[Survivor]:
    while True:
        answers = {node: json.loads(_read(storage, f"{_FOLDER}/{node}.json") or b"null") for node in nodes}
        there = {node: one["survivor"] for node, one in answers.items() if one and one["call"] == me.token}
        if len(there) == len(nodes):
            return [Survivor(**there[node]) for node in nodes]
        _wait(deadline, f"{', '.join(sorted(set(nodes) - there.keys()))} did not come")


def _read(storage: Storage, name: str) -> bytes:
    """What is there now; nothing where there is none, or storage fails for a moment."""
    try:
        return storage.read(name) if storage.size(name) is not None else b""
    except StorageError as error:
        if error.lasting:
            raise
        return b""


def part(storage: Storage) -> None:
    """Forget a meeting, once all have come."""
    storage.remove([entry.name for entry in storage.list(_FOLDER)])


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() >= deadline:
        raise StorageError(f"the nodes that are left do not meet: {problem}", lasting=True)
    time.sleep(_POLL_SECS)
