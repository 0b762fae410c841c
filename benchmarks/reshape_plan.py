"""The time and memory for one rank to find where to read its state after a change of the layout, in jobs of up to
16,384 ranks.

    python benchmarks/reshape_plan.py --json FILE

No processes are started and no bytes are read: the slot contents that the ranks of a synthetic job would exchange
(``ftckpt.restore.tensor_index``) are made up, and single ranks of the new layout compute their plans from them with
the functions of ``ftckpt.restore``. Time is that of unpacking, indexing and planning on one core, the best of the
repeats, of the slowest measured rank. Memory is its peak, and the messages. Each rank of a job does this at the same
time. The exit code is 1 if a rank of the largest job takes 10 s or more, or 1 GiB or more.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import conclude, environment, parser_of, print_table
from ftckpt.model.fragment import Box, Fragment
from ftckpt.restore.plan import ReadItem, plan
from ftckpt.restore.tensor_index import Index, encode_table

LAYERS = 128
HIDDEN = 8192
VOCABULARY = 128_000
KINDS = ("master", "exp_avg", "exp_avg_sq")
RANKS_PER_NODE = 8
LIMIT_SECS, LIMIT_BYTES = 10.0, 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Layout:
    """Tensor, pipeline, data parallel; ranks are numbered in the order tensor, data, pipeline.

    ``optimizer``: ``flat`` concatenates a stage's tensors and divides them among data-parallel ranks (Megatron's
    distributed optimizer); ``each`` divides every tensor (ZeRO); ``whole`` divides none.
    """

    tp: int
    pp: int
    dp: int
    optimizer: str

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """Such as ``tp8 pp16 dp128 flat``."""
        return f"tp{self.tp} pp{self.pp} dp{self.dp} {self.optimizer}"

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp) of a rank."""
        return rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp


Jobs = dict[int, tuple[Layout, tuple[Layout, ...]]]
JOBS: Jobs = {
    64: (Layout(4, 4, 4, ""), (Layout(2, 4, 4, ""),)),
    512: (Layout(8, 8, 8, ""), (Layout(4, 4, 16, ""),)),
    4096: (Layout(8, 16, 32, ""), (Layout(4, 8, 64, ""),)),
    16384: (Layout(8, 16, 128, ""), (Layout(4, 8, 256, ""), Layout(8, 8, 128, ""))),
}
"""Ranks before: the layout then, and layouts of half as many."""
CHANGES = (("flat", "flat"), ("flat", "whole"), ("each", "each"), ("each", "whole"))


@functools.cache
def boxes(tp: int, of: int, stage: int, stages: int) -> list[tuple[str, tuple[int, ...], Box]]:
    """Name, global shape and box of each tensor of a tensor-parallel rank of a stage, in the order of the buffer."""
    tensors: list[tuple[str, tuple[int, ...], int | None]] = []
    if stage == 0:
        tensors.append(("embedding", (VOCABULARY, HIDDEN), 0))
    for layer in range(LAYERS // stages * stage, LAYERS // stages * (stage + 1)):
        tensors += [
            (f"layers.{layer}.norm1", (HIDDEN,), None),
            (f"layers.{layer}.qkv", (3 * HIDDEN, HIDDEN), 0),
            (f"layers.{layer}.proj", (HIDDEN, HIDDEN), 1),
            (f"layers.{layer}.norm2", (HIDDEN,), None),
            (f"layers.{layer}.fc1", (4 * HIDDEN, HIDDEN), 0),
            (f"layers.{layer}.fc2", (HIDDEN, 4 * HIDDEN), 1),
        ]
    if stage == stages - 1:
        tensors.append(("output", (VOCABULARY, HIDDEN), 0))
    pieces = []
    for name, shape, axis in tensors:
        size = tuple(n // of if a == axis else n for a, n in enumerate(shape))
        offset = tuple(n // of * tp if a == axis else 0 for a, n in enumerate(shape))
        pieces.append((name, shape, Box(offset, size)))
    return pieces


def fragments(layout: Layout, rank: int) -> list[Fragment]:
    """The fragments of a rank."""
    tp, pp, dp = layout.place(rank)
    local = boxes(tp, layout.tp, pp, layout.pp)
    total = sum(box.numel for _, _, box in local)
    begin, end = (total * edge // layout.dp for edge in (dp, dp + 1))
    pieces: list[tuple[str, tuple[int, ...], Box, int, int]] = []
    position = 0
    for name, shape, box in local:
        start, stop = 0, box.numel
        if layout.optimizer == "flat":
            start, stop = max(0, begin - position), min(box.numel, end - position)
        elif layout.optimizer == "each":
            start, stop = (box.numel * edge // layout.dp for edge in (dp, dp + 1))
        if start < stop:
            pieces.append((name, shape, box, start, stop))
        position += box.numel
    return [Fragment(f"{kind}/{name}", "F32", *rest) for kind in KINDS for name, *rest in pieces]  # type: ignore[arg-type]


def messages_of(layout: Layout) -> list[tuple[int, bytes]]:
    """The messages of all ranks about the contents of their slots."""
    messages = []
    for rank in range(layout.ranks):
        local = fragments(layout, rank)
        offsets = itertools.accumulate((fragment.nbytes for fragment in local), initial=4096)
        messages.append((rank, encode_table(local, list(offsets)[:-1])))
    return messages


def compute(messages: Sequence[tuple[int, bytes]], needs: Sequence[Fragment], rank: int) -> list[ReadItem]:
    """One rank's plan."""
    wanted = {need.key for need in needs}
    index = Index()
    index.add_tables(messages, lambda key: key if key in wanted else None)
    node = rank // RANKS_PER_NODE
    return plan(index, needs, lambda source: int(source // RANKS_PER_NODE != node), turn=rank)


def run_case(
    old: Layout, new: Layout, messages: Sequence[tuple[int, bytes]], repeats: int, ranks: Sequence[int] = ()
) -> dict[str, Any]:
    """Time and memory of some ranks of ``new``; by default the first, the last and one in the middle."""
    chosen = ranks or (0, new.ranks // 2 + 1, new.ranks - 1)
    secs: dict[int, float] = {}
    blocks = reads = 0
    for rank in chosen:
        needs = fragments(new, rank)
        for _ in range(repeats):
            begin = time.process_time()
            reads_of_rank = compute(messages, needs, rank)
            secs[rank] = min(secs.get(rank, float("inf")), time.process_time() - begin)
        assert sum(read.nbytes for read in reads_of_rank) == sum(need.nbytes for need in needs)
        reads, blocks = max(reads, len(reads_of_rank)), max(blocks, sum(len(read.copies) for read in reads_of_rank))
    tracemalloc.start()
    compute(messages, fragments(new, chosen[0]), chosen[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message_bytes = sum(len(data) for _, data in messages)
    return {
        "ranks": old.ranks,
        "from": old.name,
        "to": new.name,
        "needs": len(fragments(new, chosen[0])),
        "reads": reads,
        "blocks": blocks,
        "message_bytes": message_bytes,
        "secs_max": max(secs.values()),
        "peak_bytes": peak + message_bytes,
    }


HEADS = ["from", "to", "needs", "reads", "blocks", "messages MiB", "rank s", "peak MiB"]


def cells(case: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    names = [str(case[name]) for name in ("from", "to", "needs", "reads", "blocks")]
    messages, peak = (f"{case[name] / MIB:.1f}" for name in ("message_bytes", "peak_bytes"))
    return [*names, messages, f"{case['secs_max']:.3f}", peak]


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The plans of the largest job that take too long, or too much memory."""
    problems = []
    for case in (case for case in cases if case["ranks"] == max(JOBS)):
        where = f"{case['from']} → {case['to']}"
        if case["secs_max"] >= LIMIT_SECS:
            problems.append(f"{where}: {case['secs_max']:.2f} s")
        if case["peak_bytes"] >= LIMIT_BYTES:
            problems.append(f"{where}: {case['peak_bytes'] / MIB:.0f} MiB")
    return problems


def main(argv: Sequence[str]) -> int:
    """Runs all cases; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/reshape_plan.py")
    cases = []
    for before, after in (JOBS[ranks] for ranks in args.ranks):
        for kind, group in itertools.groupby(CHANGES, key=lambda change: change[0]):
            old = replace(before, optimizer=kind)
            messages = messages_of(old)
            for (_, wanted), new in itertools.product(list(group), after):
                cases.append(run_case(old, replace(new, optimizer=wanted), messages, args.repeats))
    print_table(HEADS, [cells(case) for case in cases])
    result = {"benchmark": "reshape_plan", "environment": about, "cases": cases}
    return conclude(args.json, result, verdict(cases), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
