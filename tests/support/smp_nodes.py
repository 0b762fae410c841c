"""Nodes with arenas that tests write as trainers do, and the tasks of their SMPs over real TCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ftckpt.errors import CorruptError
from ftckpt.events import Events
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import CheckState
from ftckpt.memory.directory import node_directory
from ftckpt.memory.package import load, mirror_dir
from ftckpt.memory.parity_file import ParityFile, list_parity, parity_path
from ftckpt.model import objects
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.codecs import encode
from ftckpt.parity.groups import ParityGroup, mirrors, node_groups, peer_groups
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import num_blocks, stripes
from ftckpt.smp.channel import Deadlines, Delivery, Trust
from ftckpt.smp.requests import BytesRequest
from ftckpt.smp.server import Server
from ftckpt.smp.task_queue import TaskQueue
from ftckpt.units import rate
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
LINEAGE = b"n" * 16
CHUNK = 1 << 16
SECRET = "5e" * 32
QUICK = Deadlines(connect_secs=3.0, step_secs=3.0, idle_secs=60.0)


class Seen(Events):
    """Events that a test can read; from any thread."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.all: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.all.append((event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in list(self.all) if name == event]


def manifest(rank: int, chunks: int, of: int, chunk_bytes: int = CHUNK) -> Manifest:
    """Ranks hold a little more or less than each other, so that stripes have holes and short chunks."""
    size = chunks * chunk_bytes - 1000 - 5000 * rank
    own = Fragment.whole(f"own{rank}", "U8", (size,), Box((0,), (size,)))
    counter = Fragment.whole(f"counter{rank}", "U8", (70_000,), Box((0,), (70_000,)))
    return Manifest({"dp": rank}, {"dp": of}, (own,), (counter,), 4000, chunk_bytes)


def fill(arena: Arena, slot: int, iteration: int, hashed: bool = False, lineage: bytes = LINEAGE) -> None:
    """A snapshot of ``iteration``, as a trainer writes it."""
    control, image = arena.control, arena.image
    control.begin(slot)
    bits = np.random.default_rng([iteration, xxhash.xxh32_intdigest(arena.manifest.shard.encode())])
    with arena.slot(slot) as view:
        for fragment, offset in zip(arena.manifest.fragments, image.offsets, strict=True):
            view[offset : offset + fragment.nbytes] = bits.bytes(fragment.nbytes)
        encoded = objects.encode({"bytes": bits.bytes(700)})
        view[image.objects.begin : image.objects.begin + len(encoded)] = encoded
    control.set_objects(slot, len(encoded), xxhash.xxh3_64_intdigest(encoded))
    for chunk in range(len(image.chunks)) if hashed else ():
        control.set_chunk_hash(slot, chunk, arena.hash_chunk(slot, chunk))
    control.seal(slot, SnapshotId(lineage, iteration), hashed)


def flip(arena: Arena, slot: int, at: int) -> None:
    """One bit of a slot goes bad."""
    with arena.slot(slot) as view:
        view[at] ^= 4


class Node:
    """One node: the arenas of its ranks, open as the trainers have them."""

    def __init__(
        self, root: Path, name: str, ranks: Sequence[int], of: int, *, chunks: int = 5, slots: int = 3,
        chunk_bytes: int = CHUNK,
    ) -> None:  # fmt: skip
        self.root, self.name = root, name
        self.dir = node_directory(root, "job", name)
        self.arenas = [Arena.create(self.dir, manifest(rank, chunks, of, chunk_bytes), slots) for rank in ranks]

    def snapshot(self, slot: int, iteration: int, hashed: bool = False) -> None:
        for arena in self.arenas:
            fill(arena, slot, iteration, hashed)

    def target(self, iteration: int) -> None:
        for arena in self.arenas:
            arena.control.mark_target(SnapshotId(LINEAGE, iteration) if iteration >= 0 else None)

    def flush(self, iteration: int) -> None:
        for arena in self.arenas:
            arena.control.mark_flush(SnapshotId(LINEAGE, iteration) if iteration >= 0 else None)

    def protected(self, iteration: int) -> None:
        for arena in self.arenas:
            arena.control.mark_protected(SnapshotId(LINEAGE, iteration))

    def states(self, iteration: int) -> list[CheckState]:
        """How far each arena's slot of ``iteration`` has come with the SMP."""
        found = []
        for arena in self.arenas:
            checks = [arena.check(slot) for slot in range(arena.control.slots)]
            found += [check.state for check in checks if check is not None and check.snapshot.iteration == iteration]
        return found

    def encoded(self, iteration: int) -> bool:
        return self.states(iteration) == [CheckState.ENCODED] * len(self.arenas)

    def checked(self, iteration: int) -> bool:
        states = self.states(iteration)
        return len(states) == len(self.arenas) and min(states) >= CheckState.CHECKED

    def packages(self, iteration: int) -> list[str]:
        """Shards of which a sound package of ``iteration`` is kept."""
        shards = []
        for path in sorted(mirror_dir(self.dir).glob(f"*.{iteration}")):
            with suppress(CorruptError):
                shards.append(load(path).shard)
        return shards

    def holdings(self) -> list[ArenaLayout]:
        return [arena.image.holding(self.name, "", arena.path.name) for arena in self.arenas]

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


def groups_of(nodes: Sequence[Node], modes: Modes) -> list[ParityGroup]:
    holdings = [holding for node in nodes for holding in node.holdings()]
    return (node_groups(holdings) if modes.node else []) + peer_groups(holdings, modes)


def describe(
    node: Node, nodes: Sequence[Node], modes: Modes, ports: dict[str, int], secret: str = SECRET, **settings: Any
) -> dict[str, Any]:
    """What a trainer tells the SMP of ``node``."""
    holdings = [holding for other in nodes for holding in other.holdings()]
    kept: dict[str, dict[str, int]] = {}
    most_bytes = {holding.shard: holding.package_bytes for holding in holdings}
    for shard, places in mirrors(holdings, modes).items():
        if node.name in places[1:]:
            kept.setdefault(places[0], {})[shard] = most_bytes[shard]
    groups = [
        group.to_json() for group in groups_of(nodes, modes) if node.name in {member.node for member in group.members}
    ]
    return {
        "job": "job",
        "node": node.name,
        "secret": secret,
        "peers": {name: ["127.0.0.1", port] for name, port in ports.items()},
        "places": {
            str(index): {"shard": arena.manifest.shard, "arena": arena.path.name, "pid": os.getpid()}
            for index, arena in enumerate(node.arenas)
        },
        "groups": json.loads(json.dumps(groups)),
        "mirror_from": kept,
        "nodes": sorted(other.name for other in nodes),
        "network": {"bytes_per_sec": rate(settings.pop("network_rate", "0")), "source": "the test"},
        "scrub_secs": settings.pop("scrub_secs", 0.0),
        "flush_secs": settings.pop("flush_secs", 7200.0),
        "settings": {"protect_timeout_secs": 10.0, **settings},
    }


class Smp:
    """Tasks of one node in a thread of this process."""

    def __init__(self, node: Node, deadlines: Deadlines = QUICK) -> None:
        self.node, self.events = node, Seen()
        self.tasks = TaskQueue(node.dir, self.events, deadlines)
        self.tasks.trains = False  # checksums of all that is sealed, where no mark says what is whole
        self.find = self.tasks.service.find  # a test may put its own in front
        self.asked: list[BytesRequest] = []
        self.server = Server({}, find=self._find, events=self.events, deadlines=deadlines)
        self.port = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures: list[BaseException] = []
        self.looks = self._idle_looks = 0
        self._scan = self.tasks.scan
        self.tasks.scan = self._counted_scan  # type: ignore[method-assign]

    def listen(self, secret: str = SECRET) -> int:
        self.port = self.server.listen("127.0.0.1", Trust(bytes.fromhex(secret)))
        return self.port

    def configure(self, description: dict[str, Any]) -> None:
        """As the daemon takes a description over."""
        self.tasks.configure(description)
        if self.server.port:
            self.server.listen("127.0.0.1", self.tasks.trust)

    def start(self) -> Smp:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def pause(self) -> None:
        """Its loop stands still; it goes on with ``start``."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)
        self._stop.clear()
        self._thread = None

    def encode(self, slot: int, iteration: int) -> None:
        """A snapshot of its node becomes the target, and is encoded; its loop runs from then on."""
        self.node.snapshot(slot, iteration)
        self.node.target(iteration)
        if self._thread is None:
            self.start()
        until(lambda: self.node.encoded(iteration), "encoded")

    def settle(self, looks: int = 4) -> None:
        """Until it has looked so many times more, and found nothing to do: what it has not done it will not do."""
        enough = self._idle_looks + looks
        until(lambda: self._idle_looks >= enough or self.failures, "nothing to do")

    def close(self) -> None:
        self.pause()
        self.end()
        assert not self.failures, self.failures

    def end(self) -> None:
        """It answers nobody any more, and does nothing."""
        self.server.close()
        self.tasks.close()

    def _counted_scan(self) -> None:
        self._scan()
        self.looks += 1

    def _find(self, request: BytesRequest) -> AbstractContextManager[Delivery | None]:
        self.asked.append(request)
        return self.find(request)

    def _run(self) -> None:
        while not self._stop.is_set():
            before = self.looks
            try:
                if not self.tasks.step(time.monotonic() + 0.05):
                    self._idle_looks += self.looks - before
                    time.sleep(0.005)  # as the daemon, which looks at its socket meanwhile
            except BaseException as error:  # noqa: BLE001 - told by close
                self.failures.append(error)
                return


class SmpProcess:
    """Tasks of one node in a process of its own, which a test kills or stops."""

    def __init__(self, node: Node, port: int = 0) -> None:
        code = "import sys; from tests.support import smp_nodes; smp_nodes.child(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(node.dir), str(port)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.port = int(self._read())

    def configure(self, description: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(description) + "\n")
        self.process.stdin.flush()
        assert self._read() == "configured"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def child(node_dir: str, port: str) -> None:
    """The process of ``SmpProcess``: one description per line."""
    tasks = TaskQueue(Path(node_dir), Seen(), QUICK)
    tasks.trains = False
    server = Server({}, find=tasks.service.find, events=Seen(), deadlines=QUICK)
    print(server.listen("127.0.0.1", Trust(bytes.fromhex(SECRET)), int(port)), flush=True)
    given: list[dict[str, Any]] = []
    threading.Thread(target=_read_descriptions, args=(given,), daemon=True).start()
    while True:
        if given:
            tasks.configure(given.pop(0))
            print("configured", flush=True)
        if not tasks.step(time.monotonic() + 0.05):
            time.sleep(0.005)  # as the daemon, which looks at its socket meanwhile


def _read_descriptions(given: list[dict[str, Any]]) -> None:
    for line in sys.stdin:
        given.append(json.loads(line))
    os._exit(0)


def check_parity(nodes: Sequence[Node], modes: Modes, iteration: int) -> int:
    """Compute all parity of ``iteration`` anew and compare it; returns the number of blocks."""
    arenas = {arena.manifest.shard: arena for node in nodes for arena in node.arenas}
    blocks = 0
    for group in groups_of(nodes, modes):
        for holder, member in enumerate(group.members):
            if num_blocks(group, holder):
                blocks += _check_holder(arenas, group, holder, arenas[member.shard].path, iteration)
    return blocks


def _check_holder(arenas: dict[str, Arena], group: ParityGroup, holder: int, path: Path, iteration: int) -> int:
    with closing(parity_of(path, group.mode, iteration, group.name)) as file:
        assert file.holder == holder
        for stripe in stripes(group):
            data = [_chunk(arenas, group, index, chunk, iteration) for index, chunk in stripe.data]
            for row, (index, block) in enumerate(stripe.blocks):
                if index == holder:
                    expected = encode(data, stripe.length, row, group.losses)
                    assert file.verify(block) and np.array_equal(file.block(block), expected)
        return file.num_blocks


def parity_of(path: Path, mode: str, iteration: int, group: str = "") -> ParityFile:
    """The file of an arena that holds the parity of ``iteration``."""
    for index in range(2):
        if parity_path(path, mode, index).exists():
            file = ParityFile.open(parity_path(path, mode, index))
            if file.snapshot() == SnapshotId(LINEAGE, iteration) and group in ("", file.group.name):
                return file
            file.close()
    raise AssertionError(f"{path.name}: no {mode} parity of {iteration}: {list_parity(path.parent)}")


def _chunk(
    arenas: dict[str, Arena], group: ParityGroup, index: int, chunk: int, iteration: int
) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    if chunk < 0:
        return None
    arena = arenas[group.members[index].shard]
    slots = [slot for snapshot, slot in arena.snapshots().items() if snapshot.iteration == iteration]
    span = arena.image.chunks[group.members[index].first + chunk]
    return np.frombuffer(arena.slot(slots[0]), np.uint8, span.nbytes, span.begin)
