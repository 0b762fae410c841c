"""Without trainers: what lost nodes held of the newest snapshot is rebuilt from parity on the nodes that are left.

A process on each of them, started by ``ftckpt save`` where memory is not whole. The search is that of a restart, by
ranks that continue no shard: what is rebuilt lies in slots of its own afterwards, where SMPs take it from.

    python -m ftckpt.restore.rescue REQUEST

``REQUEST`` is a ``persist.meeting.RescueRequest`` as JSON; the last line of the output a ``RescueReport``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ftckpt.errors import FtckptError, LostError
from ftckpt.events import Events
from ftckpt.group import Group, gather_all, together
from ftckpt.model.loaded import Checkpoint, newest_of
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.persist import meeting
from ftckpt.persist.meeting import RescueReport, RescueRequest, Survivor
from ftckpt.persist.storage import open_storage
from ftckpt.restore.locations import OpenArenas, origin_of
from ftckpt.restore.search import Search
from ftckpt.store.locks import JobLock

_LOCK_SECS = 5.0
_SLOTS = 2
"""Of an arena that is made: as few as there can be."""


def rescue(group: Group, topology: Topology, node_dir: Path, events: Events) -> RescueReport:
    """Make the newest snapshot whole that all memory and parity give. Collective, one rank for each node.

    Raises:
        LostError: there is none; says what is missing.
        MemoryBudgetError, ArenaError: lost shards cannot be rebuilt here.
    """
    with closing(OpenArenas(node_dir)) as arenas:
        # What SMPs bring to storage is to be of the past that it comes from, rebuilt or not.
        arenas.origin = newest_of(gather_all(group, lambda: origin_of(node_dir), Checkpoint))
        search = Search(group, topology, events, arenas, reshapes=True, slots=_SLOTS)
        decision = search.run()
    if decision is None:
        raise LostError("memory has no snapshot")
    nodes = tuple(sorted({slot.node for slot in decision.sources.values()}))
    mine = tuple(sorted(slot.arena for slot in decision.sources.values() if slot.node == topology.me.node))
    return RescueReport(decision.snapshot.iteration, nodes, mine, tuple(sorted(search.usage)))


def _join(request: RescueRequest) -> tuple[Group, Topology]:
    """Meet the processes of the other nodes."""
    storage = open_storage(request.where, "--ftckpt-persist")
    me = Survivor.new(request.node, request.machine, request.address)
    limit, hosted = timedelta(seconds=request.within_secs), list[TCPStore]()

    def receive(address: str) -> int:
        hosted.append(TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit))
        return int(hosted[0].port)

    place = meeting.meet(storage, me, request.nodes, receive, request.within_secs)
    store = hosted[0] if hosted else TCPStore(place.address, place.port, is_master=False, timeout=limit)
    if interface := "lo" if place.address == meeting.LOOPBACK else request.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rank = place.nodes.index(request.node)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(place.nodes), timeout=limit)
    group = Group(request.within_secs)
    together(group, lambda: meeting.part(storage) if rank == 0 else None)
    # No shard has such coordinates: nobody continues one.
    members = tuple(RankPlace({"survivor": index}, node) for index, node in enumerate(place.nodes))
    return group, Topology(rank, members, {"survivor": len(members)})


def main(words: list[str]) -> int:
    """Rescue as the request says; returns the exit status."""
    request = RescueRequest.from_json(json.loads(words[0]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        # No start of the job may come between: it would count memory, and search in arenas, that are taken here.
        lock = JobLock(Path(request.node_dir), _LOCK_SECS)
        group, topology = _join(request)
        found = rescue(group, topology, Path(request.node_dir), Events(None, topology.rank))
    except (FtckptError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(found)), flush=True)
    # Together: the first one hosts the store that the others look into while they wait.
    group.gather(b"")
    lock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
