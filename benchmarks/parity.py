"""What protection computes: checksums and parity per core against the limits of this machine's memory.

All rates are of one core, over the chunks of a real slot in a tmpfs, in the same process and in turn: every
repeat runs each of them once, in another order. A limit is what numpy does with as many arrays and nothing else.
Rates count the bytes of state that go in (of a copy: the bytes copied; of XOR's limit: both inputs).

At last the tasks of a real SMP check and encode snapshots of a node of four ranks: what protection takes in all.

Times are CPU times of the thread, of the SMP those of the process, system time included: a busy machine takes turns
away, which is no cost of ours.

Exits with 1 where XOR parity or checksums reach less than 80 % of their limit, or where Reed-Solomon parity is made
slower than by ISA-L by way of pyeclib (where that is installed).
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import conclude, environment, parser_of, print_table, scratch
from ftckpt.events import Events
from ftckpt.memory.arena import Arena
from ftckpt.memory.parity_file import ParityFile, parity_path
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.codecs import MISSING, decode, encode
from ftckpt.parity.groups import Member, ParityGroup
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import stripe
from ftckpt.smp.arenas import CheckedSlot, MonitoredArena
from ftckpt.smp.chunk_source import Chunk, LocalChunk
from ftckpt.smp.encode import make_block
from ftckpt.smp.task_queue import TaskQueue
from ftckpt.smp.work import Throttle, Work
from tests.support.smp_nodes import Node, describe

MEMBERS = 8
"""Arenas of a group: seven give, one holds."""
BLOCK = 1 << 20
"""What the limits work on at a time."""
LEAST = 0.8
"""Part of a limit that XOR and checksums must reach."""
SMP_RANKS, SMP_CHUNKS, SMP_SLOTS, SMP_REPEATS = 4, 8, 3, 8

SNAPSHOT = SnapshotId(b"l" * 16, 0)

Array = Any


class Bench:
    """A slot whose chunks are the data of one stripe, and everything that can be timed on it."""

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self.nbytes = chunk_bytes
        key = Fragment.whole("w", "U8", (MEMBERS * chunk_bytes,), Box((0,), (MEMBERS * chunk_bytes,)))
        self.arena = Arena.create(folder, Manifest({"dp": 0}, {}, (key,), (), 0, chunk_bytes), 1)
        span = self.arena.image.stepped
        slot = np.frombuffer(self.arena.slot(0), np.uint8)[span.begin : span.end]
        slot[:] = np.frombuffer(np.random.default_rng(0).bytes(slot.nbytes), np.uint8)
        self.chunks = list(slot.reshape(MEMBERS, chunk_bytes))
        self.out = np.zeros(chunk_bytes, np.uint8)
        members = [Member(f"dp{i}", "n0", f"dp{i}.00000000", 0, (chunk_bytes,)) for i in range(MEMBERS)]
        group = ParityGroup.of("node", "xor", 1, chunk_bytes, members)
        self.file = ParityFile.create(parity_path(self.arena.path, "node", 0), group, 0)
        self.stripe = stripe(group, 0)
        self.arena.control.begin(0)
        self.arena.control.seal(0, SNAPSHOT, False)
        self.guarded = MonitoredArena(self.arena.path)
        hashes = np.array([self.arena.hash_chunk(0, chunk) for chunk in range(MEMBERS)], np.uint64)
        seal_id = self.arena.control.record(0).seal_id
        assert seal_id is not None
        self.guarded.checks.store_checked(0, seal_id, hashes, 0.0)

    def close(self) -> None:
        self.guarded.close()
        self.file.close()
        self.arena.close()

    def limits(self) -> dict[str, tuple[int, Callable[[], Any]]]:
        """What the machine can do: name → bytes, action."""
        first, second = self.chunks[:2]
        # Words of 8 bytes: the sum of single bytes would be bound by the core, not by memory.
        words = first.view(np.uint64)
        return {
            "copy": (self.nbytes, lambda: blocked(lambda at: np.copyto(self.out[at], first[at]), self.nbytes)),
            "read (sum)": (self.nbytes, words.sum),
            "xor of two arrays": (
                2 * self.nbytes,
                lambda: blocked(lambda at: np.bitwise_xor(first[at], second[at], out=self.out[at]), self.nbytes),
            ),
            "xxh3, raw": (self.nbytes, lambda: xxhash.xxh3_64_intdigest(first.data)),
        }

    def ours(self) -> dict[str, tuple[int, Callable[[], Any]]]:
        """What ftckpt does: name → bytes, action."""
        xor, rs = self.chunks[:-1], self.chunks[:-2]
        parity = encode("xor", xor, self.nbytes, 0, 1)
        rows = {row: encode("rs", rs, self.nbytes, row, 2) for row in range(2)}
        for data, code, blocks, losses in ((xor, "xor", {0: parity}, 1), (rs, "rs", rows, 2)):
            decoded = decode(code, [MISSING] * losses + data[losses:], blocks, self.nbytes, losses)
            assert all(np.array_equal(decoded[index], data[index]) for index in range(losses))
        return {
            "checksum of a chunk": (self.nbytes, lambda: self.arena.hash_chunk(0, 0)),
            "xor encode": (len(xor) * self.nbytes, lambda: encode("xor", xor, self.nbytes, 0, 1, self.out)),
            "xor decode": (
                len(xor) * self.nbytes,
                lambda: decode("xor", [MISSING, *xor[1:]], {0: parity}, self.nbytes, 1),
            ),
            "rs row 0": (len(rs) * self.nbytes, lambda: encode("rs", rs, self.nbytes, 0, 2, self.out)),
            "rs row 1": (len(rs) * self.nbytes, lambda: encode("rs", rs, self.nbytes, 1, 2, self.out)),
            "rs encode, m=2": (
                len(rs) * self.nbytes,
                lambda: [encode("rs", rs, self.nbytes, row, 2, self.out) for row in range(2)],
            ),
            "rs row 2": (len(rs) * self.nbytes, lambda: encode("rs", rs, self.nbytes, 2, 3, self.out)),
            "rs decode of one, row 1": (
                len(rs) * self.nbytes,
                lambda: decode("rs", [MISSING, *rs[1:]], {1: rows[1]}, self.nbytes, 2),
            ),
            "rs decode of two": (
                len(rs) * self.nbytes,
                lambda: decode("rs", [MISSING, MISSING, *rs[2:]], rows, self.nbytes, 2),
            ),
            "xor, one pass": (len(xor) * self.nbytes, lambda: self.one_pass("xor", 0, 1)),
            "rs row 0, one pass": (len(rs) * self.nbytes, lambda: self.one_pass("rs", 0, 2)),
            "rs row 1, one pass": (len(rs) * self.nbytes, lambda: self.one_pass("rs", 1, 2)),
        }

    def one_pass(self, code: str, row: int, losses: int) -> None:
        """As an SMP makes a block: data is verified and added up, and the block hashed, into its file."""
        group = ParityGroup.of("node", code, losses, self.nbytes, self.file.group.members)
        checked = self.guarded.find(SNAPSHOT)
        assert checked is not None
        sources: Any = SimpleNamespace(pace=Throttle(bool, bool))
        feed: Any = SimpleNamespace(next=lambda _: given(checked, MEMBERS - losses))
        block = self.file.block(0)
        self.file.begin(SNAPSHOT)
        self.file.put(0, block, run(make_block(sources, feed, group, self.stripe, row=row, out=block)))

    def isa_l(self) -> dict[str, tuple[int, Callable[[], Any]]]:
        """The same two rows and the same two lost arrays by ISA-L; nothing where pyeclib is not installed."""
        try:
            from pyeclib.ec_iface import ECDriver
        except ImportError:
            return {}
        data = self.chunks[:-2]
        driver = ECDriver(k=len(data), m=2, ec_type="isa_l_rs_vand")
        whole = np.concatenate(data).tobytes()
        fragments = driver.encode(whole)
        for row in range(2):
            own = encode("rs", data, self.nbytes, row, 2)
            # The same code and the same points: otherwise two different amounts of work would be compared.
            assert fragments[len(data) + row][-self.nbytes :] == own.tobytes(), "ISA-L computes other rows"
        decoded = driver.reconstruct(fragments[2:], [0, 1])
        assert [bytes(fragment) for fragment in decoded] == fragments[:2]
        return {
            "rs encode, m=2, pyeclib": (len(whole), lambda: driver.encode(whole)),
            "rs decode of two, pyeclib": (len(whole), lambda: driver.reconstruct(fragments[2:], [0, 1])),
        }


def given(checked: CheckedSlot, chunks: int) -> Work[list[Chunk | None]]:
    """The first chunks of a slot, as a feed gives them."""
    return [LocalChunk(checked, chunk) for chunk in range(chunks)]
    yield  # a generator, as all work


def run(work: Work[int]) -> int:
    """Do it all; nothing in it waits."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return int(end.value)


def blocked(action: Callable[[slice], Any], nbytes: int) -> None:
    """Run an action on each block."""
    for begin in range(0, nbytes, BLOCK):
        action(slice(begin, begin + BLOCK))


def measure(actions: Mapping[str, tuple[int, Callable[[], Any]]], repeats: int) -> dict[str, dict[str, float]]:
    """GB/s of each action: median, least, most."""
    rates: dict[str, list[float]] = {name: [] for name in actions}
    order = list(actions)
    shuffled = random.Random(0)
    for repeat in range(repeats + 1):
        shuffled.shuffle(order)
        for name in order:
            nbytes, action = actions[name]
            begin = time.thread_time()
            action()
            secs = time.thread_time() - begin
            if repeat:  # the first one warms up
                rates[name].append(nbytes / secs / 1e9)
    return {name: {"median": statistics.median(r), "least": min(r), "most": max(r)} for name, r in rates.items()}


def smp_cases(folder: Path, mib: int, repeats: int) -> dict[str, dict[str, float]]:
    """Core seconds per GiB that the tasks of an SMP take for one snapshot: of the check, and of all that follows.

    A snapshot is checked before it is a target, so that both are told apart. The first two write new parity files,
    whose pages the kernel clears; the next ones use these again.
    """
    secs: dict[str, list[float]] = {"check": [], "cover": [], "cover, new parity files": []}
    ranks = range(SMP_RANKS)
    with ExitStack() as stack:
        node = Node(folder, "n0", ranks, SMP_RANKS, chunks=SMP_CHUNKS, slots=SMP_SLOTS, chunk_bytes=mib << 20)
        stack.callback(node.close)
        tasks = stack.enter_context(closing(TaskQueue(node.dir, Events(None, -1))))
        tasks.configure(describe(node, [node], Modes(node=True), {}))
        tasks.trains = False  # so that the check comes before the snapshot is a target
        state_gib = sum(span.nbytes for arena in node.arenas for span in arena.image.chunks) / (1 << 30)

        def core_secs(done: Callable[[], bool]) -> float:
            begin = time.process_time()
            while not done():
                if not tasks.step(time.monotonic() + 0.05):
                    time.sleep(0.005)  # as the daemon, which looks at its socket meanwhile
            return (time.process_time() - begin) / state_gib

        for iteration in range(SMP_SLOTS + repeats):
            node.snapshot(iteration % SMP_SLOTS, iteration)
            check = core_secs(lambda: node.checked(iteration))  # noqa: B023
            node.target(iteration)
            cover = core_secs(lambda: node.encoded(iteration))  # noqa: B023
            node.protected(iteration)
            if iteration < 2:
                secs["cover, new parity files"].append(cover)
            elif iteration >= SMP_SLOTS:  # every slot is mapped
                secs["check"].append(check)
                secs["cover"].append(cover)
    return {name: {"median": statistics.median(s), "least": min(s), "most": max(s)} for name, s in secs.items()}


def ratios_of(rates: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Ours over its limit, or over another way of doing the same; medians of one run."""
    pairs = {
        "checksum of a chunk / xxh3, raw": ("checksum of a chunk", "xxh3, raw"),
        "xor encode / xor of two arrays": ("xor encode", "xor of two arrays"),
        "xor decode / xor of two arrays": ("xor decode", "xor of two arrays"),
        "rs row 0 / xor of two arrays": ("rs row 0", "xor of two arrays"),
        "xor, one pass / read (sum)": ("xor, one pass", "read (sum)"),
        "rs encode, m=2 / pyeclib": ("rs encode, m=2", "rs encode, m=2, pyeclib"),
        "rs decode of two / pyeclib": ("rs decode of two", "rs decode of two, pyeclib"),
    }
    return {
        name: rates[own]["median"] / rates[other]["median"] for name, (own, other) in pairs.items() if other in rates
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the tables."""
    print_table(
        ["one core", "GB/s", "least", "most"],
        [
            [name, *(f"{rate[key]:.2f}" for key in ("median", "least", "most"))]
            for name, rate in result["rates"].items()
        ],
    )
    print()
    print_table(["ratio of medians", ""], [[name, f"{value:.2f}"] for name, value in result["ratios"].items()])
    print()
    print_table(
        ["an SMP, per snapshot", "core s/GiB", "least", "most"],
        [
            [name, *(f"{case[key]:.3f}" for key in ("median", "least", "most"))]
            for name, case in result["smp"].items()
        ],
    )


def verdict(ratios: Mapping[str, float]) -> list[str]:
    """Which claims do not hold; empty where all is well."""
    least = {"checksum of a chunk / xxh3, raw": LEAST, "xor encode / xor of two arrays": LEAST}
    least |= {"rs encode, m=2 / pyeclib": 1.0}
    return [
        f"{name}: {ratios[name]:.2f} is below {bound:.2f}"
        for name, bound in least.items()
        if ratios.get(name, bound) < bound
    ]


def main(argv: Sequence[str]) -> int:
    """Run everything; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=16, help="size of a chunk; a slot has eight of them")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--quick", action="store_true", help="no claims: for tests of this program")
    args = parser.parse_args(argv)
    where = environment(argv, "benchmarks/parity.py")
    for package in ("xxhash", "pyeclib"):
        try:
            where["versions"][package] = version(package)
        except PackageNotFoundError:
            where["versions"][package] = "not installed"
    with scratch(args.arena) as [folder], closing(Bench(folder, args.mib << 20)) as bench:
        rates = measure(bench.limits() | bench.ours() | bench.isa_l(), args.repeats)
        smp = smp_cases(folder, args.mib, min(args.repeats, SMP_REPEATS))
    result = {
        "benchmark": "parity", "environment": where, "chunk_mib": args.mib, "members": MEMBERS,
        "repeats": args.repeats, "rates": rates, "ratios": ratios_of(rates), "smp": smp,
    }  # fmt: skip
    show(result)
    return conclude(args.json, result, verdict(result["ratios"]), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
