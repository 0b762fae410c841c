"""``ftckpt check`` on a real device."""

from __future__ import annotations

from pathlib import Path

from ftckpt.commands.check_device import look_at_device
from ftckpt.commands.findings import FAILED, SKIPPED
from tests.support.real_device import needs_device

pytestmark = needs_device


def test_a_device_that_is_right_passes(arena_root: Path) -> None:
    """All but what two ranks do together."""
    found = list(look_at_device(arena_root, 256))
    assert [one.name for one in found if one.state in (FAILED, SKIPPED)] == ["collectives beside copies"], found
