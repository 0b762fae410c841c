"""The codecs of protection: checksums and parity per core, compared to the limits of this machine's memory.

    python benchmarks/parity.py --json FILE

All rates are of one core, over the chunks of a real slot in a tmpfs, in one process and in turn: every repeat runs
each of them once, in another order. A limit is numpy's rate for as many arrays. Rates count the bytes of state that
are read (of a copy: the bytes copied; of XOR's limit: both inputs). Times are CPU times of the thread, system time
included: other processes on the machine are no cost of ours.

The exit code is 1 if XOR parity or checksums reach less than 80 % of their limit, or if Reed-Solomon encodes slower
than ISA-L through pyeclib (if that is installed).
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import conclude, environment, parser_of, print_table, scratch
from ftckpt.memory.arena import Arena
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.parity.codecs import MISSING, decode, encode

MEMBERS = 8
"""Arenas of a group: seven have data, one parity."""
BLOCK = 1 << 20
"""The bytes that the limits process at a time."""
MIN_SHARE = 0.8
"""The share of their limit that XOR and checksums must reach."""

Actions = dict[str, tuple[int, Callable[[], Any]]]
"""By name: bytes, and the action to time."""


class Bench:
    """A slot whose chunks are the data of one stripe, and the actions to time on it."""

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self.nbytes = chunk_bytes
        key = Fragment.whole("w", "U8", (MEMBERS * chunk_bytes,), Box((0,), (MEMBERS * chunk_bytes,)))
        self.arena = Arena.create(folder, Manifest({"dp": 0}, {}, (key,), (), 0, chunk_bytes), 1)
        span = self.arena.image.stepped
        slot = np.frombuffer(self.arena.slot(0), np.uint8)[span.begin : span.end]
        slot[:] = np.frombuffer(np.random.default_rng(0).bytes(slot.nbytes), np.uint8)
        self.chunks = list(slot.reshape(MEMBERS, chunk_bytes))
        self.out = np.zeros(chunk_bytes, np.uint8)

    def close(self) -> None:
        self.arena.close()

    def limits(self) -> Actions:
        """The limits of the machine."""
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

    def ours(self) -> Actions:
        """ftckpt's codecs, verified before."""
        xor, rs = self.chunks[:-1], self.chunks[:-2]
        parity = encode(xor, self.nbytes, 0, 1)
        rows = {row: encode(rs, self.nbytes, row, 2) for row in range(2)}
        for data, blocks, losses in ((xor, {0: parity}, 1), (rs, rows, 2)):
            decoded = decode([MISSING] * losses + data[losses:], blocks, self.nbytes, losses)
            assert all(np.array_equal(decoded[index], data[index]) for index in range(losses))

        def encodes(data: Sequence[Any], row: int, losses: int) -> tuple[int, Callable[[], Any]]:
            return len(data) * self.nbytes, lambda: encode(data, self.nbytes, row, losses, self.out)

        def decodes(data: Sequence[Any], blocks: Mapping[int, Any], losses: int, lost: int = 1) -> Any:
            known = [MISSING] * lost + list(data[lost:])
            return len(data) * self.nbytes, lambda: decode(known, blocks, self.nbytes, losses)

        row_actions = [encodes(rs, row, 2)[1] for row in range(2)]
        return {
            "checksum of a chunk": (self.nbytes, lambda: self.arena.hash_chunk(0, 0)),
            "xor encode": encodes(xor, 0, 1),
            "xor decode": decodes(xor, {0: parity}, 1),
            "rs row 0": encodes(rs, 0, 2),
            "rs row 1": encodes(rs, 1, 2),
            "rs encode, m=2": (len(rs) * self.nbytes, lambda: [action() for action in row_actions]),
            "rs row 2": encodes(rs, 2, 3),
            "rs decode of one, row 1": decodes(rs, {1: rows[1]}, 2),
            "rs decode of two": decodes(rs, rows, 2, lost=2),
        }

    def isa_l(self) -> Actions:
        """The same two rows and the same two lost arrays by ISA-L; nothing if pyeclib is not installed."""
        try:
            from pyeclib.ec_iface import ECDriver
        except ImportError:
            return {}
        data = self.chunks[:-2]
        driver = ECDriver(k=len(data), m=2, ec_type="isa_l_rs_vand")
        whole = np.concatenate(data).tobytes()
        fragments = driver.encode(whole)
        for row in range(2):
            own = encode(data, self.nbytes, row, 2)
            # The same code and the same points: otherwise two different amounts of work would be compared.
            assert fragments[len(data) + row][-self.nbytes :] == own.tobytes(), "ISA-L computes other rows"
        decoded = driver.reconstruct(fragments[2:], [0, 1])
        assert [bytes(fragment) for fragment in decoded] == fragments[:2]
        return {
            "rs encode, m=2, pyeclib": (len(whole), lambda: driver.encode(whole)),
            "rs decode of two, pyeclib": (len(whole), lambda: driver.reconstruct(fragments[2:], [0, 1])),
        }


def blocked(action: Callable[[slice], Any], nbytes: int) -> None:
    """Runs an action on each block."""
    for begin in range(0, nbytes, BLOCK):
        action(slice(begin, begin + BLOCK))


def measure(actions: Actions, repeats: int) -> dict[str, dict[str, float]]:
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


def ratios_of(rates: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """ftckpt / its limit, or / pyeclib; medians of one run."""
    pairs = {
        "checksum of a chunk / xxh3, raw": ("checksum of a chunk", "xxh3, raw"),
        "xor encode / xor of two arrays": ("xor encode", "xor of two arrays"),
        "xor decode / xor of two arrays": ("xor decode", "xor of two arrays"),
        "rs row 0 / xor of two arrays": ("rs row 0", "xor of two arrays"),
        "rs encode, m=2 / pyeclib": ("rs encode, m=2", "rs encode, m=2, pyeclib"),
        "rs decode of two / pyeclib": ("rs decode of two", "rs decode of two, pyeclib"),
    }
    return {
        name: rates[own]["median"] / rates[other]["median"] for name, (own, other) in pairs.items() if other in rates
    }


def show(rates: Mapping[str, Mapping[str, float]], ratios: Mapping[str, float]) -> None:
    """Prints the tables."""
    names = ("median", "least", "most")
    print_table(
        ["one core", "GB/s", "least", "most"],
        [[name, *(f"{rate[key]:.2f}" for key in names)] for name, rate in rates.items()],
    )
    print()
    print_table(["ratio of medians", ""], [[name, f"{value:.2f}"] for name, value in ratios.items()])


def verdict(ratios: Mapping[str, float]) -> list[str]:
    """A line per missed goal."""
    least = {"checksum of a chunk / xxh3, raw": MIN_SHARE, "xor encode / xor of two arrays": MIN_SHARE}
    least |= {"rs encode, m=2 / pyeclib": 1.0}
    return [
        f"{name}: {ratios[name]:.2f} is below {bound:.2f}"
        for name, bound in least.items()
        if ratios.get(name, bound) < bound
    ]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables and writes the file; returns the exit code."""
    parser = parser_of(__doc__, arena=True)
    parser.add_argument("--mib", type=int, default=16, help="size of a chunk; a slot has eight of them")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/parity.py", ("xxhash", "pyeclib"))
    with scratch(args.arena) as [folder], closing(Bench(folder, args.mib << 20)) as bench:
        rates = measure(bench.limits() | bench.ours() | bench.isa_l(), args.repeats)
    ratios = ratios_of(rates)
    show(rates, ratios)
    sizes = {"chunk_mib": args.mib, "members": MEMBERS, "repeats": args.repeats}
    result = {"benchmark": "parity", "environment": about, **sizes, "rates": rates, "ratios": ratios}
    return conclude(args.json, result, verdict(ratios), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
