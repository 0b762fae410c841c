"""Slots as memfds that another process holds: no tmpfs limits them, and they live while one process has them open."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import smp_nodes
import xxhash
from safetensors import safe_open

from ftckpt.arena import memfd
from ftckpt.arena.directory import remove_job_if_empty, remove_tree
from ftckpt.arena.leftovers import used_bytes
from ftckpt.arena.mapping import create_mapping, open_mapping
from ftckpt.arena.memory import check_budget
from ftckpt.arena.process import Process
from ftckpt.arena.segment import Arena, node_directory, remove_arena
from ftckpt.config import Config
from ftckpt.errors import ArenaError, CorruptError, FtckptError, MemoryBudgetError, SmpError, UnsupportedError
from ftckpt.protect.groups import Modes
from ftckpt.smp import keeper as smp_keeper
from ftckpt.smp import memfd as smp_memfd
from ftckpt.smp.client import SmpClient, Watch, find_or_start
from ftckpt.smp.keeper import Keeper, hold_memory
from ftckpt.smp.memfd import HeldMemory
from ftckpt.state.fragment import Box, Fragment
from ftckpt.state.manifest import Manifest

pytestmark = pytest.mark.multiproc

MIB = 1 << 20
LINEAGE = b"l" * 16
ROOT = Path(__file__).parents[2]
HOLDER = """
import json, sys
from pathlib import Path
from ftckpt.errors import FtckptError
from ftckpt.smp.memfd import HeldMemory
held = HeldMemory(Path(sys.argv[1]))
for line in sys.stdin:
    try:
        reply = {"held_bytes": held.held_bytes} if line == "bytes\\n" else held.answer(json.loads(line))
    except FtckptError as error:
        reply = {"error": str(error)}
    print(json.dumps(reply), flush=True)
"""


class Holder:
    """A process that holds memory and answers over pipes, as an SMP does over its socket."""

    def __init__(self, node_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(node_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pid = self._process.pid
        self._guard = threading.Lock()

    def _exchange(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._guard:
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
                answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            except (BrokenPipeError, ValueError):
                raise ArenaError("the holder does not answer") from None
        return answer

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self._exchange(json.dumps(request))
        if "error" in reply:
            raise ArenaError(reply["error"])
        return reply

    @property
    def held_bytes(self) -> int:
        return int(self._exchange("bytes")["held_bytes"])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Node:
    """A node's directory whose memory is held by another process; ``replace`` starts the next one."""

    def __init__(self, root: Path) -> None:
        self.path = node_directory(root, "job", "node")
        self.holder = Holder(self.path)
        memfd.use_memfds(self.path, lambda request: self.holder.ask(request))  # noqa: PLW0108 - the holder of now

    def replace(self) -> None:
        self.holder.kill()
        self.holder = Holder(self.path)

    def close(self) -> None:
        memfd.stop_memfds(self.path)
        self.holder.kill()


@pytest.fixture
def root() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="ftckpt-test-memfd-", dir="/dev/shm"))
    yield root
    remove_tree(root)


@pytest.fixture
def node(root: Path) -> Iterator[Node]:
    node = Node(root)
    yield node
    node.close()
    assert memfd._kept == {} and memfd._adopted == set(), "descriptors were left open"


def manifest(nbytes: int = 3 * MIB, shard: int = 0) -> Manifest:
    weights = Fragment("w", "U8", (nbytes,), Box((0,), (nbytes,)), 0, nbytes)
    return Manifest({"dp": shard}, {"dp": 2}, (weights,), (), 100, MIB)


def write(arena: Arena, slot: int, iteration: int) -> None:
    arena.control.begin(slot)
    for chunk, span in enumerate(arena.image.chunks):
        with arena.slot(slot) as view:
            view[span.begin : span.end] = np.random.default_rng([iteration, chunk]).bytes(span.nbytes)
        arena.control.set_chunk_hash(slot, chunk, arena.hash_chunk(slot, chunk))
    arena.control.set_objects(slot, 0, xxhash.xxh3_64_intdigest(b""))
    arena.control.seal(slot, LINEAGE, iteration)


def require_whole(path: Path, slot: int = 0) -> None:
    """Every byte of the snapshot in ``slot`` is good."""
    arena = Arena.open(path)
    assert arena.verify(slot) == [] and arena.slot_error(1 - slot) is None
    arena.close()


def in_trainer(action: Callable[[], None]) -> None:
    """Run ``action`` in a forked process, which is killed by SIGKILL when it has returned."""
    child = os.fork()
    if not child:
        try:
            action()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def blocks(directory: Path) -> int:
    """Bytes of the tmpfs that are in use below ``directory``."""
    return sum(os.lstat(path).st_blocks * 512 for path in directory.rglob("*"))


def test_slots_take_no_room_of_the_tmpfs(root: Path, node: Node) -> None:
    arena = Arena.create(node.path, manifest(), 2)
    write(arena, 0, 7)
    assert blocks(root) < MIB // 4 and node.holder.held_bytes == 2 * arena.image.file_bytes
    assert used_bytes(arena.path) >= 6 * MIB
    for slot in (0, 1):
        path = arena.path / f"slot{slot}.safetensors"
        assert os.readlink(path).startswith(f"/proc/{node.holder.pid}/fd/")
        assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_blocks * 512 >= arena.image.file_bytes
    assert not (arena.path / "control").is_symlink()
    with safe_open(arena.path / "slot0.safetensors", "pt") as reader:
        names = [name for name in reader.keys() if not name.startswith("__")]  # noqa: SIM118 - not a mapping
        assert bytes(reader.get_tensor(names[0])[:4].tolist()) == np.random.default_rng([7, 0]).bytes(4)
    arena.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
def test_a_tmpfs_far_too_small(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", tmp_path], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        node_dir = node_directory(tmp_path, "job", "node")
        with pytest.raises(MemoryBudgetError, match="--ftckpt-memory memfd"):
            check_budget(node_dir, 8 * MIB)
        with pytest.raises(MemoryBudgetError, match="--ftckpt-memory memfd"):
            Arena.create(node_dir, manifest(8 * MIB), 2)
        node = Node(tmp_path)
        try:
            check_budget(node_dir, 8 * MIB)
            arena = Arena.create(node_dir, manifest(8 * MIB), 2)
            write(arena, 1, 3)
            arena.close()
            require_whole(arena.path, 1)
            remove_arena(arena.path)
        finally:
            node.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_snapshots_outlive_killed_trainers(node: Node) -> None:
    path = node.path / f"{manifest().shard}.{manifest().digest.hex()[:8]}"

    def train() -> None:
        arena = Arena.create(node.path, manifest(), 2)
        arena.lock(0)
        write(arena, 0, 7)

    in_trainer(train)
    require_whole(path)
    arena = Arena.open(path, writable=True)  # the next attempt goes on in the same memory
    write(arena, 1, 8)
    arena.close()
    require_whole(path, 1)


def test_a_killed_holder_is_replaced_from_the_trainer(node: Node) -> None:
    arena = Arena.create(node.path, manifest(), 2)
    write(arena, 0, 7)
    assert memfd.keep(arena.path.parent) == 0
    node.replace()
    with pytest.raises(CorruptError, match="no slot has a usable header"):
        Arena.open(arena.path)
    assert memfd.keep(arena.path.parent) == 2
    assert memfd.keep(arena.path.parent) == 0
    assert node.holder.held_bytes == 2 * arena.image.file_bytes
    write(arena, 1, 8)
    arena.close()
    require_whole(arena.path, 0)
    require_whole(arena.path, 1)


def test_no_holder_yet_is_an_error_and_the_next_call_tries_again(node: Node) -> None:
    arena = Arena.create(node.path, manifest(), 2)
    write(arena, 1, 7)
    node.holder.kill()
    with pytest.raises(ArenaError, match="does not answer"):
        memfd.keep(arena.path.parent)
    node.holder = Holder(node.path)
    assert memfd.keep(arena.path.parent) == 2
    arena.close()
    require_whole(arena.path, 1)


def test_what_nobody_holds_is_lost_by_name(node: Node) -> None:
    arena = Arena.create(node.path, manifest(), 2)
    write(arena, 0, 7)
    arena.close()
    pid = node.holder.pid
    node.replace()
    with pytest.raises(
        CorruptError, match=rf"slot0.safetensors: lost: process {pid}, which held its memory, has ended"
    ):
        Arena.open(arena.path)
    assert memfd.keep(arena.path.parent) == used_bytes(arena.path) == 0
    remove_arena(arena.path)  # and it is cleaned as any other
    assert list(node.path.iterdir()) == []


def test_parity_outlives_the_holder_too(node: Node) -> None:
    """Parity is made by the SMP itself; the trainer keeps it open without having mapped it."""
    arena = Arena.create(node.path, manifest(), 2)
    parity = create_mapping(arena.path / ".parity.node.0.new", MIB)
    (arena.path / ".parity.node.0.new").rename(arena.path / "parity.node.0")
    parity.data[:4] = b"good"
    parity.close()
    assert memfd.keep(arena.path.parent) == 0
    node.replace()
    assert memfd.keep(arena.path.parent) == 3
    again = open_mapping(arena.path / "parity.node.0", MIB, writable=False)
    assert bytes(again.data[:4]) == b"good"
    again.close()
    held = node.holder.held_bytes
    (arena.path / "parity.node.0").unlink()
    memfd.give_back_unlinked(node.path)
    assert memfd.keep(arena.path.parent) == 0 and memfd._adopted == set(), "the trainer keeps memory that has no name"
    assert node.holder.held_bytes == held - MIB
    arena.remove()


def test_parity_is_handed_over_before_slots(node: Node) -> None:
    """An SMP that finds the slots of all ranks, and not their parity, would make it anew over that of others."""
    arena = Arena.create(node.path, manifest(), 2)
    for name in ("parity.peer.1", "parity.node.0"):
        create_mapping(arena.path / name, MIB).close()
    assert memfd.keep(node.path) == 0
    node.replace()
    asked = []

    def ask(request: dict[str, Any]) -> object:
        asked.append(request["link"].rpartition("/")[2].partition(".")[0])
        return node.holder.ask(request)

    memfd.use_memfds(node.path, ask)
    assert memfd.keep(node.path) == 4
    assert asked == ["parity", "parity", "slot0", "slot1"]
    memfd.stop_memfds(node.path)
    assert memfd._adopted == set() and len(memfd._kept) == 2
    arena.remove()


def test_what_is_half_made_is_handed_over_when_it_is_whole(node: Node) -> None:
    arena = Arena.create(node.path, manifest(), 2)
    fresh = arena.path / ".slot2.safetensors.new"
    mapping = create_mapping(fresh, MIB)
    node.replace()
    assert memfd.keep(node.path) == 2
    fresh.rename(arena.path / "slot2.safetensors")
    assert memfd.keep(node.path) == 1
    mapping.close()
    arena.remove()


def test_memory_comes_back_when_the_link_goes(node: Node) -> None:
    arena = Arena.create(node.path, manifest(), 3)
    slot_bytes = arena.image.file_bytes
    arena.free(1)
    memfd.give_back_unlinked(node.path)
    assert node.holder.held_bytes == 2 * slot_bytes
    arena.free(2)
    arena.allocate(1)  # asks for what was freed before it allocates
    assert node.holder.held_bytes == 2 * slot_bytes
    write(arena, 1, 9)
    arena.renew(0)
    arena.close()
    remove_arena(arena.path)
    check_budget(node.path, 1)
    assert node.holder.held_bytes == 0
    assert len(os.listdir(f"/proc/{node.holder.pid}/fd")) <= 5


def test_a_sweep_never_takes_what_is_being_made(node: Node) -> None:
    """Arenas and their files are renamed while they are looked for."""
    stop, swept = threading.Event(), [0]

    def sweep() -> None:
        while not stop.is_set():
            memfd.give_back_unlinked(node.path)
            swept[0] += 1

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        for attempt in range(60):
            arena = Arena.create(node.path, manifest(MIB, attempt % 2), 2)
            write(arena, 0, attempt)
            arena.close()
            require_whole(arena.path)
            remove_arena(arena.path)
    finally:
        stop.set()
        thread.join(30)
    assert swept[0] > 0


def test_a_sweep_looks_as_often_as_files_are_renamed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new arena and a slot in it get their final names just behind the eyes of whoever looks for them."""
    node_dir = node_directory(root, "job", "node")
    held = HeldMemory(node_dir)
    memfd.use_memfds(node_dir, held.answer)
    arena, final = node_dir / ".dp0.00000000.new-1", node_dir / "dp0.00000000"
    arena.mkdir()
    create_mapping(arena / ".slot0.safetensors.new", MIB).close()
    renames = [(arena / ".slot0.safetensors.new", arena / "slot0.safetensors"), (arena, final)]
    really = smp_memfd._entries

    def moving(directory: Path) -> list[os.DirEntry[str]]:
        entries = really(directory)
        if renames and directory == renames[0][0].parent:
            begin, end = renames.pop(0)
            begin.rename(end)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(smp_memfd, "_entries", moving)
        assert held.sweep() == 0
    assert renames == [] and held.held_bytes == MIB
    held.close()
    memfd.stop_memfds(node_dir)


def test_sizes_never_change(node: Node) -> None:
    mapping = create_mapping(node_file(node), MIB)
    fd = memfd.open_memfd(node_file(node), writable=True)
    for size in (0, MIB - 1, MIB + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    mapping.close()


def node_file(node: Node, name: str = "slot0.safetensors", arena: str = "dp0.00000000") -> Path:
    (node.path / arena).mkdir(exist_ok=True)
    return node.path / arena / name


def test_a_link_leads_to_its_own_memory_alone(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors and pids repeat: what a stale link finds is not opened unless it was made for that slot."""
    mappings = [create_mapping(node_file(node, f"slot{slot}.safetensors"), MIB) for slot in (0, 1)]
    mappings.append(create_mapping(node_file(node, "slot0.safetensors", "dp1.00000000"), MIB))
    target = os.readlink(node_file(node, "slot1.safetensors"))
    other = os.readlink(node_file(node, "slot0.safetensors", "dp1.00000000"))
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(MIB))
    named = os.memfd_create(memfd.label(node_file(node)))  # the right name, but its size can change
    os.ftruncate(named, MIB)
    reading, writing = os.pipe()
    with plain.open() as file:
        opened, really = [], os.open
        monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(str(path)) or really(path, *rest))
        descriptors = [f"/proc/{os.getpid()}/fd/{fd}" for fd in (file.fileno(), named, reading, writing, 99999)]
        link = node_file(node)
        for wrong in (target, other, *descriptors, str(plain), "slot1.safetensors", "/proc/4194304/fd/1"):
            link.unlink()
            link.symlink_to(wrong)
            for writable in (False, True):
                with pytest.raises(ArenaError, match="slot0"):
                    open_mapping(link, None, writable)
        assert set(opened) == {descriptors[1]}, "what has another name is not even opened"
    for fd in (named, reading, writing):
        os.close(fd)
    for mapping in mappings:
        mapping.close()


def test_what_a_holder_refuses(node: Node, tmp_path: Path) -> None:
    path = node_file(node)
    node_file(node, arena="dp1.00000000")
    (node.path / "linked").symlink_to(path.parent)
    mine = os.memfd_create(memfd.label(path), os.MFD_ALLOW_SEALING)
    os.ftruncate(mine, MIB)
    loose = {"request": "memfd", "link": "dp0.00000000/slot0.safetensors", "pid": os.getpid(), "fd": mine}
    with pytest.raises(ArenaError, match="not a memfd of fixed size"):
        node.holder.ask(loose)
    fcntl.fcntl(mine, fcntl.F_ADD_SEALS, memfd._SEALS)
    for wrong in (
        {"link": "dp0.00000000/slot1.safetensors"},
        {"link": "dp1.00000000/slot0.safetensors"},
        {"link": "dp2.00000000/slot0.safetensors"},
        {"link": "dp0.00000000/control"},
        {"link": "linked/slot0.safetensors"},
        {"link": "../node/slot0.safetensors"},
        {"link": "dp0.00000000/../dp0.00000000/slot0.safetensors"},
        {"link": ""},
        {"link": None},
        {"pid": "1"},
        {"pid": -1},
        {"pid": 4194304},
        {"fd": "3"},
        {"fd": 99999},
    ):
        with pytest.raises(ArenaError):
            node.holder.ask(loose | wrong)
    assert node.holder.held_bytes == 0 and not os.path.lexists(path)
    node.holder.ask(loose)
    assert node.holder.held_bytes == MIB
    os.close(mine)


def test_a_name_that_is_taken(node: Node) -> None:
    path = node_file(node)
    path.write_bytes(b"x")
    with pytest.raises(ArenaError, match="exists"):
        create_mapping(path, MIB)
    assert path.read_bytes() == b"x" and node.holder.held_bytes == 0


def test_a_refusal_leaves_nothing_behind(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, begin: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MemoryBudgetError, match="free host memory"):
            Arena.create(node.path, manifest(), 2)
    assert list(node.path.iterdir()) == [] and node.holder.held_bytes == 0
    node.holder.kill()
    with pytest.raises(FtckptError, match="does not answer"):
        Arena.create(node.path, manifest(), 2)
    assert list(node.path.iterdir()) == []


def test_a_host_without_proc_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedError, match="set memory to tmpfs"):
        memfd.use_memfds(root, lambda request: None)
    assert not memfd.uses_memfds(root)


def test_other_directories_keep_plain_files(root: Path, node: Node) -> None:
    other = node_directory(root, "other", "node")
    arena = Arena.create(other, manifest(), 2)
    assert not any(path.is_symlink() for path in arena.path.iterdir()) and node.holder.held_bytes == 0
    assert memfd.keep(arena.path.parent) == 0
    arena.remove()


def test_the_cost_of_a_look_that_finds_nothing(node: Node) -> None:
    arena = Arena.create(node.path, manifest(), 3)
    secs = []
    for _ in range(100):
        begin = time.perf_counter()
        assert memfd.keep(arena.path.parent) == 0
        secs.append(time.perf_counter() - begin)
    assert statistics.median(secs) < 0.01
    arena.remove()


@pytest.fixture
def smp(root: Path) -> Iterator[SmpClient]:
    """The SMP of a node whose trainer is this process, which has it hold memory."""
    node_dir = node_directory(root, "job", "node")
    client = find_or_start(node_dir, root, "job", "node", {})
    memfd.use_memfds(node_dir, lambda request: client.call(request, 30.0))
    yield client
    memfd.stop_memfds(node_dir)
    client.end(30.0)


def kill(client: SmpClient) -> int:
    pid = int(client.hello()["pid"])
    process = Process.open(pid)
    assert process is not None
    os.kill(pid, signal.SIGKILL)
    assert process.gone(30.0)
    process.close()
    return pid


def test_the_smp_holds_memory(smp: SmpClient) -> None:
    path = smp.node_dir / f"{manifest().shard}.{manifest().digest.hex()[:8]}"

    def train() -> None:
        arena = Arena.create(smp.node_dir, manifest(), 2)
        arena.lock(0)
        write(arena, 0, 7)

    in_trainer(train)
    assert smp.status()["held_bytes"] >= 6 * MIB
    require_whole(path)
    remove_arena(path)
    deadline = time.monotonic() + 30
    while smp.status()["held_bytes"]:  # it looks by itself
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_smp_gets_the_memory_back_from_the_trainer(smp: SmpClient) -> None:
    arena = Arena.create(smp.node_dir, manifest(), 2)
    write(arena, 0, 7)
    old = kill(smp)
    with pytest.raises(SmpError):
        memfd.keep(arena.path.parent)
    find_or_start(smp.node_dir, smp.root, "job", "node", {})
    assert memfd.keep(arena.path.parent) == 2
    arena.close()
    assert smp.hello()["pid"] != old
    require_whole(arena.path)
    assert smp.status()["held_bytes"] == 2 * arena.image.file_bytes
    remove_arena(arena.path)


def test_a_keeper_hands_memory_to_the_next_smp(root: Path) -> None:
    """All that a trainer starts: nothing on the training thread, and a killed SMP costs no snapshot."""
    node_dir = node_directory(root, "job", "node")
    client = find_or_start(node_dir, root, "job", "node", {})
    told: list[str] = []

    def tell(event: str, **fields: Any) -> None:
        told.append(event)

    keeper = Keeper(client, tell, 0.05)
    watch = Watch(client, tell, 0.05)
    try:
        arena = Arena.create(node_dir, manifest(), 2)
        write(arena, 0, 7)
        for _ in range(2):
            kill(client)
            deadline = time.monotonic() + 60
            while "memory_handed_over" not in told:
                assert time.monotonic() < deadline, told
                time.sleep(0.02)
            told.clear()
            assert client.status()["held_bytes"] == 2 * arena.image.file_bytes
            require_whole(arena.path)
        arena.close()
        keeper.stop()
        keeper.stop()
        require_whole(arena.path)
        assert not memfd.uses_memfds(node_dir)
    finally:
        watch.stop()
        keeper.stop()
        client.end(30.0)


def test_a_configuration_decides_what_arenas_are(root: Path) -> None:
    node_dir = node_directory(root, "job", "n0")
    told: list[str] = []

    def tell(event: str, **fields: Any) -> None:
        told.append(event)

    config = Config(enabled=True, job="job", node="n0", arena=str(root))
    hold_memory(config, node_dir, True, tell)()
    assert not memfd.uses_memfds(node_dir) and list(node_dir.iterdir()) == []
    end = hold_memory(replace(config, memory="memfd"), node_dir, True, tell)
    try:
        arena = Arena.create(node_dir, manifest(), 2)
        assert (arena.path / "slot1.safetensors").is_symlink()
        client = find_or_start(node_dir, root, "job", "n0", {})
        kill(client)
        smp_nodes.until(lambda: len(told) == 2, "restarted, and handed over")
        assert sorted(told) == ["memory_handed_over", "smp_restarted"], "each by a thread of its own"
        arena.remove()
    finally:
        end()
    assert not memfd.uses_memfds(node_dir)
    remove_job_if_empty(root, "job", "n0")
    assert list(root.iterdir()) == [], "the SMP has ended, and nothing is left of it"


def test_a_keeper_tells_once_that_no_smp_comes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_dir = node_directory(root, "job", "node")
    client = find_or_start(node_dir, root, "job", "node", {})
    told: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(smp_keeper, "_PATIENCE_SECS", 0.2)
    keeper = Keeper(client, lambda event, **fields: told.append((event, fields)), 0.02)
    arena = Arena.create(node_dir, manifest(), 2)
    kill(client)
    smp_nodes.until(lambda: told, "told")
    time.sleep(0.5)
    keeper.stop()
    arena.close()
    assert [event for event, _ in told] == ["smp_error"]
    assert "no SMP holds the snapshots" in told[0][1]["error"]


def test_parity_is_memory_too_and_outlives_a_killed_smp(arena_root: Path) -> None:
    """Three ranks of a node with node parity: what was protected still is when the SMP was killed."""
    node_dir = node_directory(arena_root, "job", "n0")
    client = find_or_start(node_dir, arena_root, "job", "n0", {})
    told: list[str] = []

    def tell(event: str, **fields: Any) -> None:
        told.append(event)

    keeper, watch = Keeper(client, tell, 0.1), Watch(client, tell, 0.1)
    ranks = smp_nodes.Node(arena_root, "n0", [0, 1, 2], 3)
    modes = Modes(node=True)
    try:
        client.configure(smp_nodes.describe(ranks, [ranks], modes, {}, memory="memfd"))
        for slot, iteration in enumerate((7, 8)):
            ranks.snapshot(slot, iteration)
            ranks.target(iteration)
            smp_nodes.until(lambda: ranks.covered(iteration), "covered")  # noqa: B023
            ranks.protected(iteration)
        files = list(node_dir.glob("*/parity.node.?"))
        assert len(files) == 6 and all(path.is_symlink() for path in files)
        assert client.status()["held_bytes"] == sum(path.stat().st_size for path in node_dir.glob("*/[ps]*.*"))
        before = {path: path.stat().st_ino for path in files}
        smp_nodes.until(lambda: len(memfd._adopted) == 6, "the keeper has it open, too")
        kill(client)
        smp_nodes.until(lambda: "memory_handed_over" in told, "handed over")
        smp_nodes.until(lambda: ranks.covered(8), "covered")
        assert {path: path.stat().st_ino for path in files if path.exists()} == before
        assert smp_nodes.check_parity([ranks], modes, 7) > 5
        assert smp_nodes.check_parity([ranks], modes, 8) > 5
        ranks.snapshot(2, 9)
        ranks.target(9)
        smp_nodes.until(lambda: ranks.covered(9), "covered")
        assert smp_nodes.check_parity([ranks], modes, 9) > 5
        assert all(path.is_symlink() for path in node_dir.glob("*/parity.node.?")), "the new one knows, too"
    finally:
        watch.stop()
        ranks.close()
        keeper.stop()
        client.end(30.0)


def test_an_smp_that_holds_memory_does_not_end_for_want_of_trainers(root: Path) -> None:
    node_dir = node_directory(root, "job", "node")
    client = find_or_start(node_dir, root, "job", "node", {"smp_idle_secs": 3.0})
    memfd.use_memfds(node_dir, lambda request: client.call(request, 30.0))
    arena = Arena.create(node_dir, manifest(), 2)
    write(arena, 0, 7)
    arena.close()
    begun = time.monotonic()
    while time.monotonic() < begun + 5:
        assert client.status()["held_bytes"]
        time.sleep(0.1)
    require_whole(arena.path)
    memfd.stop_memfds(node_dir)
    client.end(30.0)


def test_a_holder_in_this_process(root: Path) -> None:
    """The SMP holds what it makes itself, without asking over its socket."""
    node_dir = node_directory(root, "job", "node")
    held = HeldMemory(node_dir)
    memfd.use_memfds(node_dir, held.answer)
    arena = Arena.create(node_dir, manifest(), 2)
    write(arena, 0, 4)
    arena.close()
    require_whole(arena.path)
    assert held.held_bytes == 2 * arena.image.file_bytes
    held.close()
    with pytest.raises(CorruptError, match="does not hold it any more"):
        Arena.open(arena.path)
    memfd.stop_memfds(node_dir)
