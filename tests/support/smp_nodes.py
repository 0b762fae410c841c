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

from ftckpt.errors import CorruptError
from ftckpt.events import Events
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import CheckState
from ftckpt.memory.directory import node_directory
from ftckpt.memory.package import load, mirror_dir
from ftckpt.memory.parity_file import ParityFile, list_parity, parity_path
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import ParityGroup, mirrors
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import Modes
from ftckpt.smp.channel import Deadlines, Delivery, Trust
from ftckpt.smp.requests import BytesRequest
from ftckpt.smp.server import Server
from ftckpt.smp.task_queue import TaskQueue
from ftckpt.units import rate
from tests.support.snapshots import LINEAGE, fill, holding_groups, parity_blocks, slot_of
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
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
        """Shards with a verified package of ``iteration``."""
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
    return holding_groups([holding for node in nodes for holding in node.holdings()], modes)


def describe(
    node: Node, nodes: Sequence[Node], modes: Modes, ports: dict[str, int], secret: str = SECRET, **settings: Any
) -> dict[str, Any]:
    """The description that a trainer sends to the SMP of ``node``."""
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

    def __init__(self, node: Node) -> None:
        self.node, self.events = node, Seen()
        self.tasks = TaskQueue(node.dir, self.events, QUICK)
        self.tasks.trains = False  # checksums of all that is sealed, where no mark says what is whole
        self.find = self.tasks.service.find  # a test may put its own in front
        self.asked: list[BytesRequest] = []
        self.server = Server({}, find=self._find, events=self.events, deadlines=QUICK)
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
        """Applies a description as the daemon does."""
        self.tasks.configure(description)
        if self.server.port:
            self.server.listen("127.0.0.1", self.tasks.trust)

    def start(self) -> Smp:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def pause(self) -> None:
        """Stops its loop until ``start``."""
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
        """Waits for so many scans that find nothing to do: what is not done then will not be."""
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
    """Compute all parity of ``iteration`` again and compare it; returns the number of blocks."""
    arenas = {arena.manifest.shard: arena for node in nodes for arena in node.arenas}
    slots = {shard: (arena, slot_of(arena, iteration)) for shard, arena in arenas.items()}
    blocks = 0
    for group in groups_of(nodes, modes):
        for holder, block, expected in parity_blocks(group, slots):
            path = arenas[group.members[holder].shard].path
            with closing(parity_of(path, group.mode, iteration, group.name)) as file:
                assert file.holder == holder and file.verify(block) and np.array_equal(file.block(block), expected)
            blocks += 1
    return blocks


def parity_of(path: Path, mode: str, iteration: int, group: str = "") -> ParityFile:
    """The file of an arena that holds the parity of ``iteration``."""
    for index in range(2):
        if parity_path(path, mode, index).exists():
            file = ParityFile.open(parity_path(path, mode, index))
            if file.snapshot() == SnapshotId(LINEAGE, iteration) and group in ("", file.group.name):
                return file
            file.close()
    raise AssertionError(f"{path.name}: no {mode} parity of {iteration}: {list_parity(path.parent)}")
