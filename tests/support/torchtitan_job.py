"""Trains a tiny llama with the Trainer of torchtitan under FSDP2, on CPUs, which torchtitan does not support."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import _utils
from torch.distributed.fsdp import FSDPModule

_utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks
for name, value in {
    "get_device_name": lambda _: "CPU",
    "get_device_properties": lambda _: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda _: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
}.items():
    setattr(torch.cpu, name, value)

from torchtitan.components import dataloader, tokenizer  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

import ftckpt.torchtitan  # noqa: E402
from ftckpt import Config  # noqa: E402


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> tuple[torch.Tensor, SimpleNamespace]:
    """Causal attention; flex attention has no backward on CPUs."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out, SimpleNamespace(lse=out[..., 0])


FlexAttention._compiled_flex_attn = staticmethod(attend)
utils.set_pg_timeouts = lambda **_: None  # has a barrier of devices
NUM_TOKENS, LENGTH, BATCH, NUM_STEPS = 64, 16, 2, 60


class Tokens(torch.utils.data.IterableDataset[Any]):
    """Random tokens, from a generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(0, NUM_TOKENS, (LENGTH + 1,), generator=self._generator)
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class Loader(dataloader.ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(dataloader.ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
        super().__init__(Tokens(dp_rank), dp_rank, dp_world_size, batch_size=BATCH)


class NoTokenizer(tokenizer.BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(tokenizer.BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return NUM_TOKENS


def main(argv: Sequence[str]) -> None:
    config, (out,) = Config.from_flags(argv)
    titan = llama3_debugmodel()
    titan.dump_folder, titan.dataloader, titan.tokenizer = out, Loader.Config(), NoTokenizer.Config()
    titan.optimizer.implementation = "for-loop"
    training = titan.training
    training.local_batch_size, training.seq_len, training.steps = BATCH, LENGTH, NUM_STEPS
    training.global_batch_size, training.disable_cuda_graphs = 8, True
    training.mixed_precision_param = "float32"
    titan.debug.seed, titan.parallelism.spmd_backend = 1, "partial_dtensor"
    trainer = titan.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not scale
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, *given: Any, **named: Any) -> None:
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"step": step, "loss": float(loss), **named["extra_metrics"]}), flush=True)
        log(step, loss, *given, **named)

    trainer.metrics_processor.log = record
    ftckpt.torchtitan.attach(trainer, config)
    trainer.train()
    write_result(trainer, Path(out))
    trainer.close()
    torch.distributed.destroy_process_group()


def write_result(trainer: Any, folder: Path) -> None:
    """What an undisturbed run and one that was restored have alike."""
    tensors = [one.full_tensor() for one in trainer.model_parts[0].parameters()]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in [*map(torch.Tensor.detach, tensors)]))
    if torch.distributed.get_rank() == 0:
        result = {"step": trainer.step, "tokens": trainer.ntokens_seen, "sha256": digest.hexdigest()}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
