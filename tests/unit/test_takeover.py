"""Which saves of a framework are left to SMPs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ftckpt.job.takeover import Takeover


def test_a_save_is_left_where_the_snapshot_is_taken_and_the_smp_knows_of_it_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An SMP starts beside training: the first saves may come before it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told: list[Any] = []
    checkpointer: Any = SimpleNamespace(
        off=False, begun=7, persisting=None, events=SimpleNamespace(emit=lambda _, **fields: told.append(fields))
    )
    takeover = Takeover("cpu", lambda _: True)
    try:
        for has_smp in (True, False):
            checkpointer.has_smp = lambda secs, has_smp=has_smp: has_smp and secs > 0
            assert takeover.leaves(checkpointer, 7) == has_smp
        checkpointer.begun = 6
        assert not takeover.leaves(checkpointer, 7)
    finally:
        dist.destroy_process_group()
    assert [one["reason"] for one in told] == [
        "an SMP does not know yet what to do",
        "a rank takes no snapshot of it",
    ]
