"""On which NUMA node the pages of a slot lie, as the kernel of this machine says."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from ftckpt.capture import registration
from ftckpt.capture.registration import nodes_of, touch
from tests.support.device_states import shared_slot
from tests.support.fake_device import PAGE

known = pytest.mark.skipif(
    platform.machine() not in registration._MOVE_PAGES, reason="the number of the call is not known"
)


@known
def test_the_nodes_of_pages_are_nodes_of_this_machine() -> None:
    slot = shared_slot(100 * PAGE)
    touch(slot, bool)
    nodes = nodes_of(slot)
    there = {int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")} or {0}
    assert nodes.total() == 100 and set(nodes) <= there


@known
def test_pages_that_are_not_there_are_on_no_node() -> None:
    slot = shared_slot(100 * PAGE)
    touch(slot[: 30 * PAGE], bool)
    assert nodes_of(slot).total() == 30


@known
def test_a_sample_is_enough() -> None:
    slot = shared_slot(10_000 * PAGE)
    touch(slot, bool)
    assert registration._SAMPLED <= nodes_of(slot).total() < 2 * registration._SAMPLED


def test_of_another_machine_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not nodes_of(shared_slot(PAGE)) and not nodes_of(shared_slot(PAGE)[:0])
