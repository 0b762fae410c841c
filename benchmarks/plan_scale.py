"""How long it takes, and how much memory, to agree which rank copies which bytes, in jobs of up to 16,384 ranks.

No processes are started: what the ranks of a synthetic job would send each other is made up, and one rank, the
first, computes its plan from it with the functions that ``ftckpt.capture.assignment.assign`` calls. Time is that of
this computation, without the collectives and without hashing tensors. Memory is what the computation allocates,
together with the messages that it was given.

Exits with 1 where the largest job takes 1 s or more, or 64 MiB or more, at its peak.
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
from ftckpt.capture.redundancy import NO_REDUNDANCY, SharePlan, burden, lay_out
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import shard_name
from ftckpt.model.replica_groups import Groups, find_groups, pack
from ftckpt.model.replicas import ReplicaSets, identity, without_small
from ftckpt.model.shares import Shares, bounded_capacities, choose, loads
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
    these and over tensor-parallel ones. ``distributed``: each data-parallel rank has a part of its own.
    ``expert pairs``: only two data-parallel ranks hold the same matrices, so there are many small groups.
    Embeddings are tied across the first and the last stage."""

    ranks: int
    optimizer: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tensor, pipeline, data parallel."""
        return LAYOUTS[self.ranks]

    @property
    def name(self) -> str:
        """Such as ``tp8 pp16 dp128``."""
        return " ".join(f"{axis}{size}" for axis, size in zip(("tp", "pp", "dp"), self.shape, strict=True))

    @cached_property
    def shards(self) -> list[str]:
        """The name of each rank's shard."""
        places = map(self.place, range(self.ranks))
        return [shard_name({"tp": tp, "pp": pp, "dp": dp}) for tp, pp, dp in places]

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp) of a rank."""
        tp, _, dp = self.shape
        return rank % tp, rank // (tp * dp), rank // tp % dp

    def fragments(self, tp: int, pp: int) -> list[Fragment]:
        """What the first data-parallel rank of a tensor-parallel place and a stage holds."""
        tensors: list[tuple[str, int, int, bool]] = []
        for layer in range(pp * LAYERS_PER_STAGE, (pp + 1) * LAYERS_PER_STAGE):
            for name, width in (("qkv", 3), ("proj", 1), ("fc1", 4), ("fc2", 4)):
                tensors.append((f"layers.{layer}.{name}", width * HIDDEN, HIDDEN, True))
            tensors += [(f"layers.{layer}.norm{index}", HIDDEN, 1, False) for index in range(2)]
        if pp in (0, self.shape[1] - 1):
            tensors.append(("embedding", VOCABULARY, HIDDEN, True))
        return [self._fragment(f"{kind}/{name}", *rest, tp) for kind in KINDS for name, *rest in tensors]

    def salts(self, fragments: Sequence[Fragment], dp: int) -> Array:
        """0 where another data-parallel rank holds the same fragment as the first one, else what tells it apart."""
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
    """Plays all other ranks: answers the collectives of ``replica_sets``, and keeps time while it does not."""

    def __init__(self, job: SyntheticJob) -> None:
        self.job = job
        self.secs, self._since = 0.0, 0.0
        self.gathered_bytes = 0
        self._codes: list[bytes] = []
        self._bytes: list[Array] = []
        tp, pp, _ = job.shape
        by_place = {(t, p): job.fragments(t, p) for p in range(pp) for t in range(tp)}
        hashes = {at: np.array([_hash(f) for f in fragments], np.uint64) for at, fragments in by_place.items()}
        low = (1 << (job.ranks - 1).bit_length()) - 1
        for rank in range(job.ranks):
            t, p, d = job.place(rank)
            codes = _mixed(hashes[t, p], job.salts(by_place[t, p], d)) & np.uint64(~low & (1 << 64) - 1) | np.uint64(
                rank
            )
            self._codes.append(codes.tobytes())
            self._bytes.append(np.array([f.nbytes for f in by_place[t, p]], np.int64))
        self.own = by_place[job.place(OWN)[:2]]
        self._groups = find_groups(np.frombuffer(bytearray().join(self._codes), np.uint64), job.ranks)
        self._round = 0

    def start(self) -> None:
        """A new computation begins; its time runs."""
        self.secs, self.gathered_bytes, self._round = 0.0, 0, 0
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Time does not run."""
        self.secs += time.perf_counter() - self._since

    def gather(self, action: Callable[[], bytes]) -> list[bytes]:
        """The messages of all ranks; that of this one is what ``action`` returns."""
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
    """Other hashes for other salts, the same ones for salt 0."""
    salted = hashes ^ salts * np.uint64(0x9E3779B97F4A7C15)
    turned = (salted ^ (salted >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.where(salts == 0, hashes, turned)


def compute(exchange: Exchange, capacities: Sequence[int]) -> tuple[ReplicaSets, Shares, Sequence[CopyPart]]:
    """What ``assign`` does between the description of the state and the manifest, nothing protected in slots."""
    job = exchange.job
    exchange.start()
    sets = replica_sets(exchange.gather, OWN, job.ranks, exchange.own, lambda indices: [7] * len(indices))
    sets = without_small(sets)
    shares = choose(*burden(sets, NO_REDUNDANCY), bounded_capacities(capacities))
    layout = lay_out(exchange.own, sets, OWN, SharePlan(shares.cuts, job.shards, CHUNK_BYTES, NO_REDUNDANCY))
    exchange.stop()
    return sets, shares, layout.parts


def uneven(job: SyntheticJob, mean_bytes: float) -> list[int]:
    """Capacities that make weighted shares worth while: ranks differ, and early stages have less of it."""
    random = np.random.default_rng(1)
    stages = np.array([job.place(rank)[1] for rank in range(job.ranks)]) / max(1, job.shape[1] - 1)
    return (mean_bytes * (0.5 + 0.5 * stages) * random.uniform(0.2, 1.8, job.ranks)).astype(int).tolist()


def run_case(job: SyntheticJob, repeats: int) -> dict[str, Any]:
    """Time and memory of one job."""
    exchange = Exchange(job)
    sets, shares, _ = compute(exchange, [1 << 40] * job.ranks)
    load = loads(sets.runs, shares.cuts, sets.private)
    capacities = uneven(job, float(load.mean()))
    secs = []
    for _ in range(repeats):
        compute(exchange, capacities)
        secs.append(exchange.secs)
    del sets, shares
    gc.collect()
    tracemalloc.start()
    result = compute(exchange, capacities)
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sets, shares, parts = result
    assert shares.spill is not None
    return {
        "ranks": job.ranks,
        "layout": job.name,
        "optimizer": job.optimizer,
        "fragments": len(exchange.own),
        "groups": len(sets.runs),
        "gathered_bytes": exchange.gathered_bytes,
        "secs_median": statistics.median(secs),
        "secs_max": max(secs),
        "kept_bytes": kept_bytes,
        "peak_bytes": peak_bytes,
        "weighted": shares.weighted,
        "share_bytes": sum(part.fragment.nbytes for part in parts),
        "equal_share_bytes": int(load[OWN]),
        "capacity_bytes": capacities[OWN],
        "spill_bytes": {"equal": shares.spill[0], "chosen": shares.spill[1]},
    }


def show(cases: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    heads = [
        "optimizer",
        "ranks",
        "layout",
        "fragments",
        "groups",
        "ms",
        "most ms",
        "kept MiB",
        "peak MiB",
        "share MB",
        "equal",
    ]
    rows = []
    for case in cases:
        numbers = [f"{case[name] * 1e3:.1f}" for name in ("secs_median", "secs_max")]
        numbers += [f"{case[name] / MIB:.2f}" for name in ("kept_bytes", "peak_bytes")]
        numbers += [f"{case[name] / 1e6:.1f}" for name in ("share_bytes", "equal_share_bytes")]
        names = [str(case[name]) for name in ("optimizer", "ranks", "layout", "fragments", "groups")]
        rows.append(names + numbers)
    print_table(heads, rows)


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which jobs of the largest size take too long or too much; empty where all is well."""
    problems = []
    for case in cases:
        if case["ranks"] < max(LAYOUTS):
            continue
        where = f"{case['ranks']} ranks, {case['optimizer']}"
        if case["secs_median"] >= LIMIT_SECS:
            problems.append(f"{where}: {case['secs_median']:.2f} s")
        for name in ("kept_bytes", "peak_bytes"):
            if case[name] >= LIMIT_BYTES:
                problems.append(f"{where}: {case[name] / MIB:.1f} MiB ({name})")
    return problems


def main(argv: Sequence[str]) -> int:
    """Run all cases; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    where = environment(argv, "benchmarks/plan_scale.py")
    cases = [run_case(SyntheticJob(ranks, kind), args.repeats) for kind in OPTIMIZERS for ranks in args.ranks]
    show(cases)
    return conclude(args.json, {"benchmark": "plan_scale", "environment": where, "cases": cases}, verdict(cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
