"""What a snapshot's copy and a restart take for each GiB, beside what this machine's memory allows.

    python benchmarks/limits.py --json FILE

One rank, a state of large tensors in two sizes. **copy**: the copies of a snapshot into a slot, against one copy of
the same bytes into memory that was touched before. **restore**: ``restore()`` from memory, every byte verified; what
the larger size takes more is that of its bytes, the rest is fixed. Against one verified copy by as many threads: each
4 MiB hashed, then copied, from memory that is mapped already. Sides take turns; times are of the clock, so that
nothing else may run.

The exit code is 1 where a copy takes more than 1.1 times its limit, or a restored GiB more than 1.3 times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.boundary import settings_of
from benchmarks.common import conclude, environment, parser_of, print_table, synchronous
from ftckpt.restore.threads import in_order, threads_of
from tests.support.pool import run_ranks

TIMEOUT_SECS = 120.0
CHUNK_BYTES = 16 << 20
MOST = {"copy": 1.1, "restore": 1.3}
"""Times the limit."""
GIB = 1 << 30


class Sizes(NamedTuple):
    """MiB of the two states; snapshots; restarts of each."""

    mib: tuple[int, int]
    snapshots: int
    restarts: int


FULL = Sizes((256, 1024), 10, 7)
QUICK = Sizes((8, 32), 3, 1)


class Layers(torch.nn.Module):
    """``mib`` MiB of weights in 32 bit, in matrices of 4 MiB."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(1024, 1024) for _ in range(max(1, mib // 4)))


def train(
    rank: int, world_size: int, mib: int, settings: Mapping[str, Any], snapshots: int
) -> dict[str, list[float]]:
    """Snapshots in turn with plain copies and verified ones: seconds of each; the last snapshot stays."""
    model, checkpointer = _attached(mib, settings)
    tensors = [parameter.detach() for parameter in model.parameters()]
    copy, target = synchronous(tensors), [torch.zeros_like(tensor) for tensor in tensors]
    spent = dict[str, list[float]](copy=[], plain=[], verified=[])
    flights: list[Any] = []
    checkpointer.restore()
    threads = threads_of(checkpointer.topology)
    for iteration in range(snapshots + 2):
        checkpointer.fence()
        checkpointer.step(iteration)
        flights.append(checkpointer.capture.flight)
        checkpointer.fence()
        assert flights[-1].wait(TIMEOUT_SECS)
        spent["plain"].append(copy())
        spent["verified"].append(_secs(lambda: _copy_verified(tensors, target, threads)))
    for flight in flights[2:]:  # the first ones find slots whose pages are not mapped yet
        spent["copy"].append(sum(end - begin for begin, end, _ in flight.timed))
    checkpointer.step(snapshots + 2)  # so that all know that the last one is whole
    checkpointer.fence()
    checkpointer.close(remove=False)
    return {name: secs[-snapshots:] for name, secs in spent.items()}


def restart(rank: int, world_size: int, mib: int, settings: Mapping[str, Any]) -> float:
    """Seconds of ``restore()``."""
    _, checkpointer = _attached(mib, settings)
    secs = _secs(checkpointer.restore)
    assert checkpointer.whole is not None, "there was nothing to restore"
    checkpointer.close(remove=False)
    return secs


def _attached(mib: int, settings: Mapping[str, Any]) -> tuple[Layers, Any]:
    import ftckpt.torch
    from ftckpt.config import Config

    model = Layers(mib)
    checkpointer = ftckpt.torch.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), None, {}, Config(**settings)
    )
    assert checkpointer is not None
    return model, checkpointer


def _secs(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _copy_verified(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], threads: int) -> None:
    def copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        source, target = pair
        xxhash.xxh3_64_intdigest(source.numpy().data)
        target.copy_(source)

    for _ in in_order(copy, zip(sources, targets, strict=True), threads):
        pass


def measure(sizes: Sizes, arena: Path) -> list[dict[str, Any]]:
    """A row for each size: seconds of each side, all of them."""
    rows: list[dict[str, Any]] = []
    for mib in sizes.mib:
        with settings_of(arena, {"chunk_size": f"{CHUNK_BYTES}B"}) as settings:
            options = {"stand_in": False, "timeout_secs": TIMEOUT_SECS}
            (spent,) = run_ranks(train, 1, mib, settings, sizes.snapshots, **options)
            restarts = [run_ranks(restart, 1, mib, settings, **options)[0].value for _ in range(sizes.restarts)]
        rows.append({"mib": mib, **spent.value, "restore": restarts})
    return rows


def found(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians per GiB and their limits, and the fixed part of a restart."""
    small, large = rows
    more_gib = (large["mib"] - small["mib"]) / 1024
    restore = [statistics.median(row["restore"]) for row in rows]
    per_gib = {name: statistics.median(large[name]) / (large["mib"] / 1024) for name in ("copy", "plain", "verified")}
    slope = (restore[1] - restore[0]) / more_gib
    return {
        "copy_secs": per_gib["copy"], "copy_limit_secs": per_gib["plain"], "restore_secs": slope,
        "restore_limit_secs": per_gib["verified"], "restore_fixed_secs": restore[0] - slope * small["mib"] / 1024,
    }  # fmt: skip


def missed(result: Mapping[str, Any]) -> list[str]:
    """A line for each goal that does not hold."""
    ratios = {name: result[f"{name}_secs"] / result[f"{name}_limit_secs"] for name in MOST}
    return [f"{name}: {ratio:.2f} times its limit" for name, ratio in ratios.items() if not ratio <= MOST[name]]


def main(argv: Sequence[str]) -> int:
    """Run, print the table, write the file; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes without goals")
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    args = parser.parse_args(argv)
    about, sizes = environment(argv, "benchmarks/limits.py"), QUICK if args.quick else FULL
    rows = measure(sizes, args.arena)
    result = found(rows)
    print_table(
        ["", "limit, s/GiB", "reached, s/GiB", "fixed, s"],
        [
            ["copy", f"{result['copy_limit_secs']:.3f}", f"{result['copy_secs']:.3f}", ""],
            ["restore", f"{result['restore_limit_secs']:.3f}", f"{result['restore_secs']:.3f}",
             f"{result['restore_fixed_secs']:.3f}"],
        ],
    )  # fmt: skip
    return conclude(args.json, {"environment": about, "rows": rows, "found": result}, missed(result), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
