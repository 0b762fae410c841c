"""The devices of these tests: a fake one, and the real one where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.fake_device import FakeDevice, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeDevice:
    """A fake device whose driver copies many at once, unless the parameter is ``each``."""
    return install(monkeypatch, batches=getattr(request, "param", "batch") == "batch")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
