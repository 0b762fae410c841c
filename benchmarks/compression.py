"""What compression of snapshots saves and costs, by kind of tensor, on a model that was really trained.

Trains the small GPT of ``launch/train_gpt.py`` on the sources of Python's standard library, in one process and in 32
bits, which a CPU does ten times as fast as in 16, and takes what it holds then: masters, moments, and as weights the
casts of the masters. Each tensor is cut into chunks and packed as a flush does, once as it is and once with its bytes
grouped. A ratio is packed bytes through bytes. Rates are of one core, in MB of state per second of the thread's CPU
time, medians of the repeats. Every frame is unpacked and compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))

from benchmarks.common import environment, parser_of, print_table, write_json
from ftckpt.model.fragment import DTYPE_BYTES
from ftckpt.persist.compression import Stretch, compress, decompress

CHUNK_BYTES = 16 << 20
ROLES = {"weight": "masters", "exp_avg": "first moments", "exp_avg_sq": "second moments"}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def trained(args: argparse.Namespace) -> tuple[dict[tuple[str, str], list[Any]], list[float]]:
    """Bytes of all pieces by role and type after training, and the losses."""
    from tests.support import standin

    standin.install()
    import torch
    import torch.distributed as dist
    import train_gpt

    from ftckpt.megatron.state import MegatronState

    torch.manual_seed(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    words = f"--hidden {args.hidden} --layers 4 --seq 128 --dropout 0 --lr-decay {args.iterations} --precision fp32"
    words += " --micro-batch 8 --global-batch 8"
    job = train_gpt.build(train_gpt.parse_args([*words.split(), "--iterations", str(args.iterations)]))
    losses = []
    for number in range(args.iterations):
        losses.append(float(train_gpt.train_step(job)["loss"]))
        if number % 50 == 0:
            print(f"iteration {number}: loss {losses[-1]:.3f}", flush=True)
    described = MegatronState(job.model, job.optimizer, job.scheduler, {}).describe()
    found = defaultdict(list)
    for piece in described.stepped:
        role = ROLES.get(piece.fragment.key.partition("/")[0])
        if role is not None:
            found[role, piece.fragment.dtype].append(_bytes(piece.tensor))
        if role == "masters":
            found["weights", "BF16"].append(_bytes(piece.tensor.to(torch.bfloat16)))
    return found, losses


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().view(torch.uint8).numpy()


def measured(role: str, dtype: str, data: memoryview, repeats: int) -> Iterator[dict[str, Any]]:
    """A row as it is and one with bytes grouped."""
    for item_bytes in (1, DTYPE_BYTES[dtype]):
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        runs = [[Stretch(len(chunk), item_bytes)] for chunk in chunks]
        pack, unpack = [], []
        for _ in range(repeats):
            frames, secs = each(compress, chunks, runs)
            pack.append(secs)
            back, secs = each(decompress, frames, runs)
            unpack.append(secs)
            if b"".join(back) != bytes(data):
                raise SystemExit(f"{role}: what was packed is not what comes back")
        yield {
            "tensors": role,
            "dtype": dtype,
            "grouped": item_bytes > 1,
            "bytes": len(data),
            "ratio": sum(map(len, frames)) / len(data),
            "pack_mb_per_s": len(data) / 1e6 / statistics.median(pack),
            "unpack_mb_per_s": len(data) / 1e6 / statistics.median(unpack),
            "pack_secs": pack,
            "unpack_secs": unpack,
        }


def each(action: Callable[..., bytes], parts: Sequence[Any], runs: Sequence[Any]) -> tuple[list[bytes], float]:
    """What ``action`` makes of each part, and the seconds of the core that all of it took."""
    begin = time.thread_time()
    made = [action(part, run) for part, run in zip(parts, runs, strict=True)]
    return made, time.thread_time() - begin


def joined(arrays: Iterable[Any]) -> memoryview:
    return memoryview(b"".join(array.tobytes() for array in arrays))


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    pieces, losses = trained(args)
    rows = [
        row
        for (role, dtype), arrays in sorted(pieces.items())
        for row in measured(role, dtype, joined(arrays), args.repeats)
    ]
    for grouped in (False, True):
        some = [row for row in rows if row["grouped"] == grouped]
        packed = sum(row["ratio"] * row["bytes"] for row in some)
        print(
            f"{'grouped' if grouped else 'as it is'}: {packed / sum(row['bytes'] for row in some):.3f} of all bytes"
        )
    print_table(
        ["tensors", "dtype", "bytes grouped", "MB", "ratio", "pack MB/s", "unpack MB/s"],
        [
            [
                row["tensors"], row["dtype"], "yes" if row["grouped"] else "no", f"{row['bytes'] / 1e6:.1f}",
                f"{row['ratio']:.3f}", f"{row['pack_mb_per_s']:.0f}", f"{row['unpack_mb_per_s']:.0f}",
            ]
            for row in rows
        ],
    )  # fmt: skip
    found = {"losses": [losses[0], losses[-1]], "iterations": args.iterations, "rows": rows}
    write_json(args.json, {"environment": environment(argv, "benchmarks/compression.py"), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
