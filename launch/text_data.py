"""Data and helpers of the example scripts: the Python standard library's sources, byte by byte."""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

END_OF_FILE = 256
NUM_TOKENS = 257


class TextData:
    """Byte-level samples in a shuffled order that depends on the seed alone, and a position in it."""

    def __init__(self, seq: int, seed: int, limit_bytes: int = 2**20) -> None:
        self._tokens = _standard_library_tokens(limit_bytes)
        self._seq = seq
        self._seed = seed
        self._num_samples = (len(self._tokens) - 1) // seq
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self.consumed_samples = 0

    def next_batch(self, num_micro: int, micro_batch: int, dp_rank: int, dp_size: int) -> list[torch.Tensor]:
        """This replica's micro-batches, (micro_batch, seq + 1) each; the position moves for all."""
        first = self.consumed_samples + dp_rank * micro_batch
        starts = [first + micro * micro_batch * dp_size for micro in range(num_micro)]
        batches = [torch.stack([self.sample(start + i) for i in range(micro_batch)]) for start in starts]
        self.consumed_samples += num_micro * micro_batch * dp_size
        return batches

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed_samples = state["consumed_samples"]

    def sample(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the shuffled order, (seq + 1,)."""
        epoch, place = divmod(index, self._num_samples)
        if epoch != self._epoch:
            self._epoch = epoch
            # From seed and epoch alone: the position is one number, and a restart finds the same order without any
            # saved state.
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self._num_samples)
        start = int(self._order[place]) * self._seq
        # One token more: inputs are all but the last, labels all but the first.
        return torch.from_numpy(self._tokens[start : start + self._seq + 1].astype(np.int64))


def _standard_library_tokens(limit_bytes: int) -> np.ndarray:
    parts, size_bytes = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int16)
        parts += [content, np.array([END_OF_FILE], np.int16)]
        size_bytes += len(content)
        if size_bytes >= limit_bytes:
            break
    return np.concatenate(parts)[:limit_bytes]


@dataclass
class Progress:
    iteration: int = 0
    consumed_samples: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self.iteration, "consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.iteration = state["iteration"]
        self.consumed_samples = state["consumed_samples"]


def write_line(log: Path | None, metrics: Mapping[str, Any]) -> None:
    """One iteration as a line of JSON, to a file or to the screen; the hexadecimal loss shows every bit."""
    line = json.dumps({**metrics, "loss_hex": metrics["loss"].hex()})
    if log is None:
        print(line, flush=True)
        return
    with log.open("a") as file:
        file.write(line + "\n")


def add_outputs(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Options of what a script writes."""
    output = parser.add_argument_group("output")
    output.add_argument("--log-file", dest="log", type=Path, help="JSON lines, one per iteration")
    output.add_argument("--dump-final", type=Path, help="folder for the hashes of each rank's final state")
    return output


def dump(hashes: Mapping[str, str], folder: Path, rank: str) -> None:
    """Writes a rank's hashes as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{rank}.json").write_text(json.dumps(hashes, indent=1))


def hashed(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The SHA-256 of each tensor."""
    return {name: sha256(tensor) for name, tensor in tensors.items()}


def sha256(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
