"""The frameworks that the demo trains with: what it says about a job, and what it starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftckpt.config import Config

ROOT = Path(__file__).resolve().parents[1]

Settings = Mapping[str, Any]
"""Fields of ftckpt's ``Config``; empty: train without ftckpt."""

LAYOUT = ("--tp", "2", "--pp", "2")
MODEL = ("--layers", "4", "--hidden", "64", "--seq", "64")

# Small chunks and objects, because so is the model: a slot is to have several chunks, and arenas, parity and packages
# of both nodes are to fit the 64 MB of /dev/shm that containers often have. Between two faults are few iterations.
SMALL: Settings = {"enabled": True, "chunk_mib": 0.125, "objects_mib": 1, "timeline_interval": 4}


@dataclass(frozen=True)
class Framework:
    """A job of eight ranks. ``reshapes``: it can go on with fewer, and its script logs what all ranks together hold.

    ``module`` runs the script ``launch/<script>.py`` with ``arguments`` and with those that ``configure`` makes
    of ftckpt's settings; it may write files into the folder of the run. ``packages`` decide what a run computes.
    """

    title: str
    job: str
    out: Path
    module: str
    script: str
    arguments: Sequence[str]
    configure: Callable[[Path, Settings], list[str]]
    packages: Sequence[str]
    reshapes: bool = False

    def command(self, folder: Path, training: Sequence[str], settings: Settings) -> list[str]:
        """The module for torchrun to start, and its arguments."""
        worker = str(ROOT / "launch" / "demo_worker.py")
        return [self.module, worker, self.script, *self.arguments, *training, *self.configure(folder, settings)]


def _flags(_: Path, settings: Settings) -> list[str]:
    return Config(**settings).flags()


# What is too large for a minute on a small machine, and AdamW as torch has it: DeepSpeed's own would be compiled.
_SCALED_DOWN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"params": {"total_num_steps": 100, "warmup_num_steps": 4}},
}


def _json(folder: Path, settings: Settings) -> list[str]:
    config = json.loads((ROOT / "configs" / "deepspeed_zero1_pp.json").read_text())
    section = config.pop("ftckpt")
    config = _merged(config, _SCALED_DOWN)
    if settings:
        config["ftckpt"] = {**section, **settings}
    path = (folder / "deepspeed.json").resolve()
    path.write_text(json.dumps(config, indent=2) + "\n")
    return ["--deepspeed_config", str(path)]


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**values}
    for name, change in changes.items():
        merged[name] = _merged(merged[name], change) if isinstance(change, Mapping) else change
    return merged


FRAMEWORKS = {
    "megatron": Framework(
        title="Megatron-core",
        job="GPT as tensor 2 x pipeline 2 x data 2, bf16, distributed optimizer, dropout",
        out=Path("runs/demo"),
        module="ftckpt.megatron",
        script="train_gpt",
        arguments=(*LAYOUT, *MODEL, "--global-batch", "16", "--micro-batch", "2"),
        configure=_flags,
        packages=("ftckpt", "torch", "megatron-core", "numpy"),
        reshapes=True,
    ),
    "deepspeed": Framework(
        title="DeepSpeed",
        job="PipelineModule as pipeline 2 x tensor 2 x data 2, bf16, ZeRO-1, tied embeddings, dropout",
        out=Path("runs/demo-deepspeed"),
        module="ftckpt.deepspeed",
        script="train_deepspeed",
        arguments=(*LAYOUT, *MODEL, "--tie"),
        configure=_json,
        packages=("ftckpt", "torch", "deepspeed", "numpy"),
    ),
}
