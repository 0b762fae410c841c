"""Agents of ``ftckpt run`` look for each other as often as a restart needs, and as their store can bear."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from ftckpt.runner.rendezvous import look_often


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How long torch's rendezvous wanted to sleep; when the test ends torch is as it was."""
    found: list[Any] = []

    def delay(seconds: Any) -> None:
        found.append(seconds)
        time.sleep(0.01)

    monkeypatch.setattr(dynamic_rendezvous, "_delay", delay)
    return found


def test_an_agent_that_waits_does_not_sleep_for_a_second(delays: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store = HashStore()
    agents = [
        dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
            "job", store, C10dRendezvousBackend(store, "job"), min_nodes=2, max_nodes=2, local_addr="127.0.0.1"
        )
        for _ in range(2)
    ]
    for agent in agents:
        look_often(agent)
        assert agent._state_holder._cache_duration == 0.05
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agents[0].next_rendezvous)
        while 0.05 not in delays:
            assert not first.done()
            time.sleep(0.01)
        ranks = {agents[1].next_rendezvous().rank, first.result(30).rank}
    assert ranks == {0, 1} and 1 not in delays


@pytest.mark.parametrize(("nodes", "secs"), [(1, 0.05), (200, 0.05), (500, 0.25), (1000, 1.0), (9000, 1.0)])
def test_a_store_of_many_agents_is_asked_less_often(nodes: int, secs: float, delays: list[Any]) -> None:
    holder = SimpleNamespace(_cache_duration=1)
    look_often(SimpleNamespace(_settings=SimpleNamespace(max_nodes=nodes), _state_holder=holder))
    dynamic_rendezvous._delay(seconds=1)
    dynamic_rendezvous._delay(seconds=(0, 0.3))
    assert holder._cache_duration == secs and delays == [secs, (0, 0.3)]


def test_another_rendezvous_is_left_as_it_is(delays: list[Any]) -> None:
    before = dynamic_rendezvous._delay
    look_often(SimpleNamespace())
    assert dynamic_rendezvous._delay is before
