"""Checkpoints of real DeepSpeed engines, read and written without DeepSpeed: every element, both ways."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ds_jobs import BF16, SHAPES, Shape, fp16, zero

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Fragment
from ftckpt.testing.pool import run_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiproc

TINY = ["--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "16", "--iterations", "99"]
STEPS = 3
INFO = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r".*\.output\.weight", r".*\.down\.weight"],
    "tp_replicated_parameter_patterns": [r".*positions", r".*norm.*", r"tied_modules\..*", r"[0-9]+\.(weight|bias)"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\..*"],
}
"""What the example model would say of itself."""

FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
SAVED = {
    "fp32": SHAPES["fp32"],
    "bf16": SHAPES["bf16"],
    "fp16": SHAPES["fp16"],
    "zero1-fp16": Shape(2, config=fp16(8) | zero(1)),
    "zero1-freeze": Shape(2, ["--freeze"], BF16 | zero(1)),
    "zero1-three": Shape(3, config=BF16 | zero(1)),
    "zero2-tied": SHAPES["zero2"],
    "zero2-round-robin": Shape(2, config=BF16 | zero(2, round_robin_gradients=True)),
    "zero2-aligned": Shape(3, config=BF16 | zero(2, parameter_alignment=True)),
    "zero3-three": Shape(3, config=BF16 | zero(3, sub_group_size=500)),
    "zero3-fp32": SHAPES["zero3-fp32"],
    "bf16-optimizer": SHAPES["bf16-optimizer"],
    "pp2-dp2-tied": Shape(4, ["--pp", "2", "--tie"], BF16 | zero(1) | FP32_ACCUMULATION),
    "pp2-tp2-dp2": SHAPES["pp2-tp2-dp2"],
    "pp2-fp16": Shape(2, ["--pp", "2"], fp16(8)),
    "moe-ep2-zero2": SHAPES["moe-ep2-zero2"],
}

Elements = tuple[Fragment, bytes]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk and what the ranks held when it was written."""

    path: Path
    live: list[list[Elements]]
    losses: list[float] = field(default_factory=list)


def build(shape: Shape, more: Mapping[str, Any] | None = None) -> Any:
    from ftckpt.testing import cpu_deepspeed

    cpu_deepspeed.install()
    import train_deepspeed

    args = train_deepspeed.parse_args([*TINY, *shape.argv])
    return train_deepspeed.build(args, {**shape.json(), **(more or {})})


def held(job: Any) -> list[Elements]:
    """What this rank has, as ftckpt describes it, with bytes."""
    from ftckpt.capture.prepare import as_bytes
    from ftckpt.deepspeed.state import DeepSpeedState

    described = DeepSpeedState(job.engine, {}).describe()
    pieces = (*described.stepped, *described.volatile)
    return [(piece.fragment, as_bytes(piece.tensor).numpy().tobytes()) for piece in pieces]


def save(rank: int, world_size: int, shape: Shape, folder: str) -> tuple[list[Elements], list[float]]:
    """Train some steps, save, train one more."""
    import train_deepspeed

    job = build(shape)
    for _ in range(STEPS):
        train_deepspeed.train_step(job)
    job.engine.module.universal_checkpoint_info = INFO
    job.engine.save_checkpoint(folder)
    elements = held(job)
    return elements, [train_deepspeed.train_step(job)["loss"]]


@functools.cache
def _root() -> Path:
    import atexit

    root = Path(tempfile.mkdtemp(prefix="ftckpt-ds-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def saved(name: str) -> Checkpoint:
    path, shape = _root() / name, SAVED[name]
    results = run_ranks(save, shape.ranks, shape, str(path), stand_in=False)
    return Checkpoint(path, [result.value[0] for result in results], results[0].value[1])


Tensors = dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]]


def together(found: Sequence[Elements]) -> Tensors:
    """Whole tensors from fragments: complete, and holders of the same elements agree."""
    tensors: Tensors = {}
    holes: dict[str, np.ndarray[Any, Any]] = {}
    for fragment, data in found:
        size = fragment.item_bytes
        new = (fragment.dtype, fragment.global_shape, np.zeros((int(np.prod(fragment.global_shape)), size), np.uint8))
        dtype, shape, tensor = tensors.setdefault(fragment.key, new)
        hole = holes.setdefault(fragment.key, np.ones(len(tensor), bool))
        assert (dtype, shape) == (fragment.dtype, fragment.global_shape), fragment.name
        box = fragment.box
        inside = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
        at = np.arange(len(tensor)).reshape(shape)[inside].reshape(-1)[fragment.start : fragment.stop]
        values = np.frombuffer(data, np.uint8).reshape(-1, size)
        there = ~hole[at]
        assert np.array_equal(tensor[at][there], values[there]), fragment.name
        tensor[at] = values
        hole[at] = False
    for key, hole in holes.items():
        assert not hole.any(), f"{key}: {hole.sum()} of {hole.size} elements are nowhere"
    return tensors


def read_all(source: Any) -> Tensors:
    catalog = source.catalog
    return together([(f, source.read(index).tobytes()) for index, f in enumerate(catalog.fragments)])


def differing(mine: Tensors, theirs: Tensors) -> list[str]:
    keys = mine.keys() & theirs.keys()
    return [k for k in sorted(keys) if mine[k][:2] != theirs[k][:2] or not np.array_equal(mine[k][2], theirs[k][2])]


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_holds_what_the_ranks_held(name: str) -> None:
    from ftckpt.universal.deepspeed_zero import DeepSpeedSource, recognises

    checkpoint = saved(name)
    assert recognises(checkpoint.path)
    source = DeepSpeedSource(checkpoint.path)
    live = together([pair for rank in checkpoint.live for pair in rank])
    found = read_all(source)
    assert not differing(found, live)
    derived = source.catalog.derived
    assert set(found) | set(derived) == set(live)
    assert all(live[key][0] == dtype for key, dtype in derived.items())
    assert source.catalog.iteration == STEPS
    source.close()
    with pytest.raises(ConvertError, match="closed"):
        source.read(0)


def convert_to_deepspeed(source: Any, destination: Path) -> None:
    from ftckpt.universal.convert import Options, convert
    from ftckpt.universal.deepspeed_universal_sink import DeepSpeedUniversalSink

    convert(source, DeepSpeedUniversalSink(destination), Options(workers=2))


@functools.cache
def converted(name: str) -> Path:
    from ftckpt.universal.deepspeed_zero import DeepSpeedSource

    path = _root() / f"{name}-universal"
    source = DeepSpeedSource(saved(name).path)
    convert_to_deepspeed(source, path)
    source.close()
    return path


def load(rank: int, world_size: int, shape: Shape, folder: str) -> tuple[list[Elements], float, int]:
    """Load a universal checkpoint with DeepSpeed's own code; what this rank then has, and the next loss."""
    import train_deepspeed

    job = build(shape, {"checkpoint": {"load_universal": True}})
    job.engine.load_checkpoint(folder)
    steps = job.engine.global_steps
    elements = held(job)
    for _ in range(STEPS * 2):  # the data go on where they were
        next(job.batches)
    return elements, train_deepspeed.train_step(job)["loss"], steps


LOADS = {
    "zero1-three": Shape(2, config=BF16 | zero(2)),
    "zero2-aligned": Shape(2, config=BF16 | zero(3)),
    "zero2-round-robin": Shape(3, config=BF16 | zero(1)),
    "zero3-three": Shape(2, config=BF16 | zero(1)),
    "pp2-tp2-dp2": Shape(2, ["--pp", "2", "--tp", "1", "--tie"], BF16 | zero(1)),
    "pp2-dp2-tied": Shape(4, ["--pp", "2", "--tp", "2", "--tie"], BF16 | zero(1)),
    "zero1-fp16": Shape(3, config=fp16(8) | zero(2)),
}
"""What is loaded into which other layout."""


@pytest.mark.parametrize("name", LOADS)
def test_deepspeed_loads_what_was_converted_into_another_layout(name: str) -> None:
    results = run_ranks(load, LOADS[name].ranks, LOADS[name], str(converted(name)), stand_in=False)
    live = together([pair for rank in saved(name).live for pair in rank])
    loaded = together([pair for result in results for pair in result.value[0]])
    assert set(loaded) == set(live)
    assert not differing(loaded, live)
    assert all(result.value[2] == STEPS for result in results)
