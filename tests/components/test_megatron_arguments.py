"""The arguments of a Megatron-LM job in its snapshots, and in what ``ftckpt convert`` makes of them."""

from __future__ import annotations

from argparse import Namespace
from enum import Enum
from typing import Any

import pytest

from ftckpt.megatron.counters import Counters
from ftckpt.model import objects
from ftckpt.universal.megatron.common import make_common


@pytest.mark.parametrize(
    ("iteration", "ckpt_step", "kind", "told"),
    [
        pytest.param(0, None, None, (0, False, True), id="nothing loaded"),
        pytest.param(200, None, None, (200, False, True), id="the newest"),
        pytest.param(200, None, "local", (200, False, False), id="perhaps a node's own"),
        pytest.param(100, 100, "local", (100, True, True), id="--ckpt-step"),
        pytest.param(0, 100, None, (0, False, True), id="--ckpt-step --finetune"),
    ],
)
def test_a_step_that_was_named_is_a_rollback(
    iteration: int,
    ckpt_step: int | None,
    kind: str | None,
    told: tuple[int, bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    class Restored:
        def restore(self, newer_than: int, rollback: bool, lasting: bool) -> None:
            calls.append((newer_than, rollback, lasting))

    pytest.importorskip("megatron.core")
    from ftckpt.megatron import train_loop

    monkeypatch.setattr("ftckpt.megatron.attach", lambda *args: Restored())
    monkeypatch.setattr(train_loop, "_counters", None)
    given = Namespace(iteration=iteration, ckpt_step=ckpt_step, non_persistent_ckpt_type=kind)
    train_loop.restore(given, [], object(), None)
    assert calls == [told]


class Backend(Enum):
    """A type like those of some of Megatron-LM's arguments."""

    AUTO = 1


def arguments(**more: Any) -> Namespace:
    return Namespace(
        num_layers=4, hidden_size=64, num_attention_heads=4, lr=1e-3, bf16=True, load=None, split=[9, 1],
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, iteration=0, consumed_train_samples=0,
        consumed_valid_samples=0, skipped_train_samples=0, num_floating_point_operations_so_far=0,
        rank=3, local_rank=3, ftckpt=True, ftckpt_job="name", attention_backend=Backend.AUTO, dtype=object(), **more,
    )  # fmt: skip


def snapshot(**more: Any) -> dict[str, Any]:
    """The objects of a snapshot of iteration 5, as ``ftckpt convert`` reads them."""
    args = arguments(**more)
    counters = Counters(args)
    args.consumed_train_samples, args.consumed_valid_samples = 80, 16
    counters.current = {"iteration": 5, "num_floating_point_operations_so_far": 1.5e9}
    saved = {"scheduler": {"num_steps": 80}, "objects": {"counters": counters.state_dict()}, "optimizers": []}
    return {"shards": {"tp0-pp0-dp0": objects.decode(objects.encode(saved))}}


def test_megatron_finds_its_position_among_the_arguments() -> None:
    made = make_common(snapshot(), 5, None, False, {})
    assert made["iteration"] == 5
    assert made["num_floating_point_operations_so_far"] == 1.5e9
    args = made["args"]
    assert isinstance(args, Namespace)
    assert (args.consumed_train_samples, args.consumed_valid_samples, args.skipped_train_samples) == (80, 16, 0)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (4, 64, 4)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.no_save_rng is True
    assert (args.lr, args.bf16, args.load, args.split) == (1e-3, True, None, [9, 1])
