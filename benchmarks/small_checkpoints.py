"""Size and effect of small checkpoints: the loss after resuming from one, against the exact checkpoint.

    python benchmarks/small_checkpoints.py --json FILE

A byte-level GPT of 0.9M and of 10M parameters trains with AdamW on this Python's own sources. A checkpoint every
``--interval`` steps; the last one, ten intervals after the complete one, is written in each way, restored, and
trained on with the same batches. The loss is of text that is not trained on. ``zstd``: ``--ftckpt-persist-compress``.
``excp``: section 3 of https://arxiv.org/abs/2406.11257 (alpha 5e-5, beta 2, 4 bits, against the checkpoint before).

Goal: at least 10 times smaller, at each of the steps a loss at most 0.5 % higher than from the exact one.
"""

from __future__ import annotations

import lzma
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import conclude, environment, parser_of, print_table
from benchmarks.lossy import restore_chunk, shrink_chunk
from ftckpt.persist.compression import ElementRun, compress

STEPS = (0, 5, 20, 60, 200)
SIZES = {"0.9M": (128, 4), "10M": (320, 8)}
ROLES = ("weight", "exp_avg", "exp_avg_sq")
CONTEXT = 128
MAX_LOSS, MIN_TIMES = 1.005, 10.0
ALPHA, BETA, CENTERS = 5e-5, 2.0, 15

State = dict[tuple[str, int], np.ndarray]  # weights and moments, by role and number of the parameter


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = width // 32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(layers))), nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        logits = self.norm(self.blocks(x)) @ self.embedding.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Job:
    """A model that trains. Batches depend on the seed and the step alone."""

    def __init__(self, size: str, seed: int, text: torch.Tensor, batch: int) -> None:
        torch.manual_seed(seed)
        self.model, self.seed, self.batch = Gpt(*SIZES[size]), seed, batch
        self.text, self.held_out = text[: -(1 << 17)], text[-(1 << 17) :]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, weight_decay=0.1)
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            rate = 1e-3 * min(1.0, (self.step + 1) / 50)
            self.optimizer.param_groups[0]["lr"] = rate
            self.optimizer.zero_grad()
            self.model.loss(self._drawn(self.text, self.batch, self.step)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1

    @torch.no_grad()
    def evaluate(self) -> float:
        return self.model.loss(self._drawn(self.held_out, 48, -1)).item()

    def _drawn(self, text: torch.Tensor, count: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000003 * self.seed + step if step >= 0 else 7)
        begins = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
        return torch.stack([text[at : at + CONTEXT + 1] for at in begins.tolist()]).long()

    def state(self) -> State:
        found: State = {}
        for number, parameter in enumerate(self.model.parameters()):
            moments = self.optimizer.state[parameter]
            for role, tensor in zip(
                ROLES, (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]), strict=True
            ):
                found[role, number] = tensor.numpy().reshape(-1).copy()
        return found

    @torch.no_grad()
    def load(self, state: State, step: int) -> None:
        for number, (parameter, moments) in enumerate(self.optimizer.state.items()):
            tensors = (parameter, moments["exp_avg"], moments["exp_avg_sq"])
            for role, tensor in zip(ROLES, tensors, strict=True):
                tensor.copy_(torch.from_numpy(state[role, number].copy()).view_as(tensor))
            moments["step"].fill_(step)
        self.step = step


def runs(state: State) -> tuple[list[ElementRun], bytes]:
    """A chunk with all tensors, as a shard's image has them."""
    keys = sorted(state, key=lambda key: (ROLES.index(key[0]), key[1]))
    found = [ElementRun(state[key].nbytes, 4, "F32", key[0]) for key in keys]
    return found, b"".join(state[key].tobytes() for key in keys)


def small(state: State, reference: State) -> tuple[int, State]:
    """Bytes of the small checkpoint, and the state that it restores."""
    (described, data), (_, before) = runs(state), runs(reference)
    frame = shrink_chunk(data, before, described)
    restored, found, begin = np.frombuffer(restore_chunk(frame, before, described), np.float32), State(), 0
    for key in sorted(state, key=lambda key: (ROLES.index(key[0]), key[1])):
        found[key] = restored[begin : begin + state[key].size]
        begin += state[key].size
    return len(frame), found


def excp(state: State, before: State) -> tuple[int, State]:
    """As ``small``, by the published method; ``before`` is what it restored of the checkpoint before."""
    packed, found = list[bytes](), State()
    for number in range(len(state) // len(ROLES)):
        weight, first, second = (state[role, number] for role in ROLES)
        residual = weight - before["weight", number]
        limit = min(2.5, ALPHA / np.sqrt(max(second.mean(), 1e-20))) * np.median(np.abs(residual))
        residual = np.where(np.abs(residual) > limit, residual, 0)
        stays = (np.abs(first) > BETA * np.abs(first).mean()) & (residual != 0)
        parts = [residual, np.where(stays, first, 0), np.where(stays, second, 0)]
        for role, part in zip(ROLES, parts, strict=True):
            codes, centers = clustered(part)
            packed += [codes.tobytes(), centers.tobytes()]
            found[role, number] = centers[codes].astype(np.float32)
        found["weight", number] += before["weight", number]
    codes = np.frombuffer(b"".join(packed[::2]), np.uint8)
    nibbles = codes[: len(codes) // 2 * 2].reshape(-1, 2)  # the last of an odd number is left out
    return len(lzma.compress((nibbles[:, 0] << 4 | nibbles[:, 1]).tobytes() + b"".join(packed[1::2]))), found


def clustered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and centers: 0, and at most 15 of k-means in one dimension."""
    there = np.sort(values[values != 0].astype(np.float64))
    centers = np.unique(np.quantile(there, np.linspace(0, 1, CENTERS))) if len(there) else np.zeros(0)
    sums = np.concatenate([[0.0], np.cumsum(there)])
    for _ in range(20):
        ends = np.concatenate([[0], np.searchsorted(there, (centers[1:] + centers[:-1]) / 2), [len(there)]])
        counts = np.diff(ends)
        centers = (
            np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1), centers) if len(there) else centers
        )
    codes = np.searchsorted((centers[1:] + centers[:-1]) / 2, values) + 1 if len(there) else np.zeros(len(values))
    return np.where(values == 0, 0, codes).astype(np.uint8), np.concatenate([[0.0], centers]).astype(np.float32)


def ways(job: Job, interval: int) -> Iterator[tuple[str, int, State]]:
    """Trains to the last checkpoint; gives each way's bytes and restored state."""
    job.train(10 * interval)
    reference = chained = job.state()
    for number in range(11, 21):
        job.train(number * interval)
        _, chained = excp_result = excp(job.state(), chained)
    state = job.state()
    described, data = runs(state)
    yield "exact", len(data), state
    yield "zstd", len(compress(data, described)), state
    yield "excp", *excp_result
    yield "small", *small(state, reference)


def measured(size: str, seed: int, text: torch.Tensor, interval: int, batch: int) -> list[dict[str, Any]]:
    job, rows, losses_of = Job(size, seed, text, batch), list[dict[str, Any]](), dict[str, list[float]]()
    for way, nbytes, state in ways(job, interval):
        begin = 20 * interval
        if way != "zstd":
            job.load(state, begin)
            losses_of[way] = []
            for step in STEPS:
                job.train(begin + step)
                losses_of[way].append(job.evaluate())
        losses = losses_of["exact" if way == "zstd" else way]
        ratios = [one / exact for one, exact in zip(losses, losses_of["exact"], strict=True)]
        rows.append({"size": size, "seed": seed, "way": way, "bytes": nbytes, "losses": losses, "ratios": ratios})
        print(f"{time.strftime('%H:%M:%S')} {size}, seed {seed}, {way}: {nbytes} bytes, {ratios}", file=sys.stderr)
    return rows


def summary(rows: list[dict[str, Any]]) -> Mapping[tuple[str, str], tuple[float, list[float]]]:
    """By size and way: times smaller than exact, the smallest of all seeds, and the mean of ratios at each step."""
    found = {}
    for key in dict.fromkeys((row["size"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["size"], row["way"]) == key]
        exact = next(row["bytes"] for row in rows if (row["size"], row["way"]) == (key[0], "exact"))
        means = [statistics.mean(row["ratios"][at] for row in mine) for at in range(len(STEPS))]
        found[key] = min(exact / row["bytes"] for row in mine), means
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--interval", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.seeds, options.interval, options.batch = ["0.9M"], 1, 1, 1
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    rows = [
        row for size in options.sizes for seed in range(options.seeds)
        for row in measured(size, seed, text, options.interval, options.batch)
    ]  # fmt: skip
    found = summary(rows)
    cells = [[*key, f"{times:.1f}", *(f"{one - 1:+.2%}" for one in means)] for key, (times, means) in found.items()]
    print_table(["size", "way", "times smaller", *(f"loss after {step}" for step in STEPS)], cells)
    missed = [
        f"{size}: {times:.1f} times, loss at most {max(means) - 1:+.2%}"
        for (size, way), (times, means) in found.items()
        if way == "small" and (times < MIN_TIMES or max(means) > MAX_LOSS)
    ]
    about = environment(sys.argv[1:], "benchmarks/small_checkpoints.py", ["zstandard"])
    return conclude(options.json, {"environment": about, "rows": rows}, missed, options.quick)


if __name__ == "__main__":
    sys.exit(main())
