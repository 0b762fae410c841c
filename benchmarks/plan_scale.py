"""The time and memory of agreeing which rank copies which bytes, in jobs of up to 16,384 ranks.

    python benchmarks/plan_scale.py --json FILE

No processes are started: the messages of the ranks of a synthetic job are made up, and its first rank computes its
plan from them with the functions that ``ftckpt.capture.assignment.assign`` calls. Times are without collectives and
hashes of tensors. Memory is what the computation allocates, and its messages.

The exit code is 1 if the largest job takes 1 s or more, or 64 MiB or more, at its peak.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import conclude, environment, parser_of, print_table
from ftckpt.array_types import Array
from ftckpt.capture.chunks import CopyPart
from ftckpt.capture.redundancy import SharePlan, lay_out
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import shard_name
from ftckpt.model.replica_groups import Groups, find_groups, pack
from ftckpt.model.replicas import ReplicaSets, identity, without_small
from tests.support.choosing import replica_sets

LAYOUTS = {8: (2, 2, 2), 64: (4, 4, 4), 512: (8, 8, 8), 4096: (8, 16, 32), 16384: (8, 16, 128)}
"""Ranks: tensor, pipeline, data parallel. Ranks are numbered in this order: tensor, then data, then pipeline."""
OPTIMIZERS = ("non-distributed", "distributed", "expert pairs")
LAYERS_PER_STAGE = 8
HIDDEN = 8192
VOCABULARY = 128_000
KINDS = ("master", "exp_avg", "exp_avg_sq")
LIMIT_SECS, LIMIT_BYTES = 1.0, 64 << 20
MIB = 1 << 20
CHUNK_BYTES = 16 * MIB
OWN = 0
"""The rank that computes its plan."""


@dataclass(frozen=True)
class SyntheticJob:
    """A synthetic job. ``non-distributed``: matrices are replicated over all data-parallel ranks, layer norms over
    these and over tensor-parallel ones. ``distributed``: each data-parallel rank has its own part. ``expert pairs``:
    only two data-parallel ranks have the same matrices, so there are many small groups. Embeddings are tied between
    the first and the last stage."""

    ranks: int
    optimizer: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tensor, pipeline, data parallel."""
        return LAYOUTS[self.ranks]

    @cached_property
    def shards(self) -> list[str]:
        """The shard name of each rank."""
        places = map(self.place, range(self.ranks))
        return [shard_name({"tp": tp, "pp": pp, "dp": dp}) for tp, pp, dp in places]

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp) of a rank."""
        tp, _, dp = self.shape
        return rank % tp, rank // (tp * dp), rank // tp % dp

    def fragments(self, tp: int, pp: int) -> list[Fragment]:
        """The fragments of the first data-parallel rank of a tensor-parallel rank and a stage."""
        tensors: list[tuple[str, int, int, bool]] = []
        for layer in range(pp * LAYERS_PER_STAGE, (pp + 1) * LAYERS_PER_STAGE):
            for name, width in (("qkv", 3), ("proj", 1), ("fc1", 4), ("fc2", 4)):
                tensors.append((f"layers.{layer}.{name}", width * HIDDEN, HIDDEN, True))
            tensors += [(f"layers.{layer}.norm{index}", HIDDEN, 1, False) for index in range(2)]
        if pp in (0, self.shape[1] - 1):
            tensors.append(("embedding", VOCABULARY, HIDDEN, True))
        return [self._fragment(f"{kind}/{name}", *rest, tp) for kind in KINDS for name, *rest in tensors]

    def salts(self, fragments: Sequence[Fragment], dp: int) -> Array:
        """0 for fragments that a data-parallel rank shares with the first one, else another number."""
        if self.optimizer == "distributed":
            return np.full(len(fragments), dp, np.uint64)
        of_pair = dp // 2 if self.optimizer == "expert pairs" else 0
        return np.array([of_pair if f.global_shape[1] > 1 else 0 for f in fragments], np.uint64)

    def _fragment(self, key: str, rows: int, columns: int, split: bool, tp: int) -> Fragment:
        ways = self.shape[0] if split else 1
        box = Box((rows // ways * (tp % ways), 0), (rows // ways, columns))
        parts = self.shape[2] if self.optimizer == "distributed" else 1
        return Fragment(key, "F32", (rows, columns), box, 0, box.numel // parts)


class Exchange:
    """Simulates all other ranks: answers the collectives of ``replica_sets``, and measures the time between them."""

    def __init__(self, job: SyntheticJob) -> None:
        self.job, self.secs, self.gathered_bytes, self._since, self._round = job, 0.0, 0, 0.0, 0
        self._codes: list[bytes] = []
        self._bytes: list[Array] = []
        tp, pp, _ = job.shape
        by_place = {(t, p): job.fragments(t, p) for p in range(pp) for t in range(tp)}
        hashes = {at: np.array([_hash(f) for f in fragments], np.uint64) for at, fragments in by_place.items()}
        low = (1 << (job.ranks - 1).bit_length()) - 1
        for rank in range(job.ranks):
            t, p, d = job.place(rank)
            codes = _mixed(hashes[t, p], job.salts(by_place[t, p], d)) & np.uint64(~low & (1 << 64) - 1)
            self._codes.append((codes | np.uint64(rank)).tobytes())
            self._bytes.append(np.array([f.nbytes for f in by_place[t, p]], np.int64))
        self.own = by_place[job.place(OWN)[:2]]
        self._groups = find_groups(np.frombuffer(bytearray().join(self._codes), np.uint64), job.ranks)

    def start(self) -> None:
        """Starts the clock of a new computation."""
        self.secs, self.gathered_bytes, self._round = 0.0, 0, 0
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stops the clock."""
        self.secs += time.perf_counter() - self._since

    def gather(self, action: Callable[[], bytes]) -> list[bytes]:
        """The messages of all ranks; ``action`` returns that of this one."""
        data = action()
        self.stop()
        if self._round == 0:
            assert data == self._codes[OWN]
            messages = [bytes(bytearray(codes)) for codes in self._codes]
        else:
            messages = list(self._summaries(data, self._groups))
            assert messages[OWN] == data
        self._round += 1
        self.gathered_bytes += sum(map(len, messages))
        self._since = time.perf_counter()
        return messages

    def _summaries(self, own: bytes, groups: Groups) -> list[bytes]:
        """Bytes by rank and group; digests are this rank's, so that all members of its groups agree with it."""
        mine = groups.find(np.frombuffer(self._codes[OWN], np.uint64), self.job.ranks)
        digests = np.ones(len(groups.members), np.uint64)
        digests[np.unique(mine[mine >= 0])] = np.frombuffer(own, np.uint64)[1::2]
        messages = []
        for codes, nbytes in zip(self._codes, self._bytes, strict=True):
            group_of = groups.find(np.frombuffer(codes, np.uint64), self.job.ranks)
            words = [np.array([nbytes[group_of < 0].sum()], np.uint64)]
            for group in np.unique(group_of[group_of >= 0]).tolist():
                words.append(np.array([digests[group], nbytes[group_of == group].sum()], np.uint64))
            messages.append(np.concatenate(words).tobytes())
        return messages


def _hash(fragment: Fragment) -> int:
    return int(pack(np.frombuffer(identity(fragment), np.uint64)[:1], 0, 1)[0])


def _mixed(hashes: Array, salts: Array) -> Array:
    """Other hashes for other salts, the same for salt 0."""
    salted = hashes ^ salts * np.uint64(0x9E3779B97F4A7C15)
    turned = (salted ^ (salted >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.where(salts == 0, hashes, turned)


def compute(exchange: Exchange) -> tuple[ReplicaSets, Sequence[CopyPart]]:
    """The part of ``assign`` between the description of the state and the manifest, without protection in slots."""
    job = exchange.job
    exchange.start()
    sets = replica_sets(exchange.gather, OWN, job.ranks, exchange.own, lambda indices: [7] * len(indices))
    sets = without_small(sets)
    layout = lay_out(exchange.own, sets, OWN, SharePlan(job.shards, CHUNK_BYTES))
    exchange.stop()
    return sets, layout.parts


def run_case(job: SyntheticJob, repeats: int) -> dict[str, Any]:
    """Time and memory of one job."""
    exchange = Exchange(job)
    compute(exchange)
    secs = []
    for _ in range(repeats):
        compute(exchange)
        secs.append(exchange.secs)
    gc.collect()
    tracemalloc.start()
    sets, parts = compute(exchange)
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "ranks": job.ranks,
        "layout": " ".join(f"{axis}{size}" for axis, size in zip(("tp", "pp", "dp"), job.shape, strict=True)),
        "optimizer": job.optimizer,
        "fragments": len(exchange.own),
        "groups": len(sets.runs),
        "gathered_bytes": exchange.gathered_bytes,
        "secs_median": statistics.median(secs),
        "secs_max": max(secs),
        "kept_bytes": kept_bytes,
        "peak_bytes": peak_bytes,
        "share_bytes": sum(part.fragment.nbytes for part in parts),
    }


HEADS = ["optimizer", "ranks", "layout", "fragments", "groups", "ms"]
HEADS += ["most ms", "kept MiB", "peak MiB", "share MB"]


def cells(case: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    names = [str(case[name]) for name in ("optimizer", "ranks", "layout", "fragments", "groups")]
    times = [f"{case[name] * 1e3:.1f}" for name in ("secs_median", "secs_max")]
    memory = [f"{case[name] / MIB:.2f}" for name in ("kept_bytes", "peak_bytes")]
    return [*names, *times, *memory, f"{case['share_bytes'] / 1e6:.1f}"]


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The jobs of the largest size that take too long, or too much memory."""
    problems = []
    for case in (case for case in cases if case["ranks"] == max(LAYOUTS)):
        where = f"{case['ranks']} ranks, {case['optimizer']}"
        if case["secs_median"] >= LIMIT_SECS:
            problems.append(f"{where}: {case['secs_median']:.2f} s")
        for name in ("kept_bytes", "peak_bytes"):
            if case[name] >= LIMIT_BYTES:
                problems.append(f"{where}: {case[name] / MIB:.1f} MiB ({name})")
    return problems


def main(argv: Sequence[str]) -> int:
    """Runs all cases; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/plan_scale.py")
    cases = [run_case(SyntheticJob(ranks, kind), args.repeats) for kind in OPTIMIZERS for ranks in args.ranks]
    print_table(HEADS, [cells(case) for case in cases])
    result = {"benchmark": "plan_scale", "environment": about, "cases": cases}
    return conclude(args.json, result, verdict(cases), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
