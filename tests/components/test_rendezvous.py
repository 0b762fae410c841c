"""Agents that meet, and connections of ranks."""

from __future__ import annotations

import io
import logging
import resource
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from ftckpt import connections
from ftckpt.errors import LaunchError
from ftckpt.group import look_secs
from ftckpt.runner import rendezvous
from ftckpt.runner.agent_ring import AgentRing
from ftckpt.runner.rendezvous import drop_ended, poll_often
from tests.support.errors import lacks
from tests.support.pool import run_ranks
from tests.support.processes import free_ports
from tests.support.waiting import until

# --- agents that meet ---


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How long torch's rendezvous wanted to sleep; when the test ends torch is as it was."""
    found: list[Any] = []

    def delay(seconds: Any) -> None:
        found.append(seconds)
        time.sleep(0.01)

    monkeypatch.setattr(dynamic_rendezvous, "_delay", delay)
    monkeypatch.setattr(dynamic_rendezvous, "_RendezvousJoinOp", dynamic_rendezvous._RendezvousJoinOp)
    return found


class Agents:
    """Three of them for two places, each in a thread of its own while it waits."""

    def __init__(self, pool: ThreadPoolExecutor, keep_alive_secs: int) -> None:
        store, self._pool, self.looks = HashStore(), pool, [0, 0, 0]
        self._handlers: list[Any] = [
            dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
                "job", store, C10dRendezvousBackend(store, "job"), min_nodes=2, max_nodes=2, local_addr="127.0.0.1",
                timeout=dynamic_rendezvous.RendezvousTimeout(), keep_alive_interval=keep_alive_secs,
                keep_alive_max_attempt=3,
            )
            for _ in self.looks
        ]  # fmt: skip
        for at, handler in enumerate(self._handlers):
            poll_often(handler, lambda at=at: self._look(at))
            drop_ended(handler, store)

    def _look(self, at: int) -> None:
        self.looks[at] += 1

    def join(self, at: int) -> Future[int]:
        """The rank that an agent gets."""
        return self._pool.submit(lambda: int(self._handlers[at].next_rendezvous().rank))

    def waiting(self, at: int) -> int:
        """Agents for which this one is to start again."""
        return int(self._handlers[at].num_nodes_waiting())

    def stands_by(self, at: int) -> bool:
        holder = self._handlers[0]._state_holder
        holder.sync()
        return self._handlers[at]._this_node in holder.state.redundancy_list

    def leave(self, at: int) -> None:
        rendezvous.leave(self._handlers[at])

    def lose(self, at: int) -> None:
        """No more heartbeats of an agent."""
        self._handlers[at]._stop_heartbeats()

    def close(self) -> None:
        for handler in self._handlers:
            handler._stop_heartbeats()
        self._handlers[0].set_closed()


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> list[AgentRing]:
    """The rings of the agents, in their order."""
    found: list[AgentRing] = []

    def make(store: Any, me: Any) -> AgentRing:
        found.append(AgentRing(store, me))
        return found[-1]

    monkeypatch.setattr(rendezvous, "AgentRing", make)
    return found


@pytest.fixture
def agents(
    delays: list[Any], rings: list[AgentRing], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Agents]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with ThreadPoolExecutor(3) as pool:
        found = Agents(pool, keep_alive_secs=getattr(request, "param", 1))
        yield found
        found.close()


def test_an_agent_that_waits_does_not_sleep_for_a_second(agents: Agents, delays: list[Any]) -> None:
    first = agents.join(0)
    until(lambda: 0.05 in delays and agents.looks[0], "a look", 15)
    assert not first.done()
    assert {agents.join(1).result(30), first.result(30)} == {0, 1}
    assert 1 not in delays


def test_a_standby_takes_the_place_of_a_lost_node_and_no_other(agents: Agents) -> None:
    """With torch's own each of three in turn makes the other two start again."""
    for future in [agents.join(0), agents.join(1)]:
        future.result(30)
    standby = agents.join(2)
    until(lambda: agents.stands_by(2), "the standby", 15)
    for _ in range(2):
        again = agents.join(0)  # one that starts again, and one that follows it
        until(lambda: agents.waiting(1) == 1, "the other one is told", 15)
        assert {agents.join(1).result(30), again.result(30)} == {0, 1}
        assert not standby.done() and agents.waiting(0) == agents.waiting(1) == 0
    agents.lose(1)
    assert {agents.join(0).result(30), standby.result(30)} == {0, 1}


@pytest.mark.parametrize("agents", [100], indirect=True)
def test_a_standby_leaves_the_place_of_an_agent_whose_workers_take_long_to_end(agents: Agents) -> None:
    """Also for the last one, whose departure ends the round."""
    for future in [agents.join(0), agents.join(1)]:
        future.result(30)
    standby = agents.join(2)
    until(lambda: agents.stands_by(2), "the standby", 15)
    agents.leave(0)
    agents.leave(1)
    again = agents.join(0)
    time.sleep(4 * rendezvous._STANDBY_SECS)
    assert not standby.done() and not again.done()
    assert {agents.join(1).result(30), again.result(30)} == {0, 1}
    assert not standby.done()


@pytest.mark.parametrize("agents", [100], indirect=True)
def test_a_standby_takes_the_place_of_an_agent_that_has_ended_at_once(
    agents: Agents, rings: list[AgentRing]
) -> None:  # fmt: skip
    for future in [agents.join(0), agents.join(1)]:
        future.result(30)
    standby = agents.join(2)
    until(lambda: agents.stands_by(2) and agents.waiting(0) == 0 and rings[0]._has_accepted, "the standby", 15)
    rings[1]._listener.close()
    until(lambda: agents.waiting(0) == 1, "the other one is told", 15)
    assert {agents.join(0).result(30), standby.result(30)} == {0, 1}


class Ring:
    """Agents in one process, in the order of their names."""

    def __init__(self, num: int) -> None:
        self._store = HashStore()
        self.nodes = [dynamic_rendezvous._NodeDesc("127.0.0.1", at, 0) for at in range(num)]
        self._agents = [AgentRing(self._store, node) for node in self.nodes]

    def look(self, times: int = 20) -> None:
        for _ in range(times):
            for agent in self._agents:
                agent.poll(self.nodes)
            time.sleep(0.002)

    def end(self, at: int) -> None:
        self._agents[at]._listener.close()

    def move(self, at: int, port: int) -> None:
        self._store.set(f"ftckpt.port/{self.nodes[at]}", str(port))

    def ended_for(self, at: int) -> list[int]:
        return sorted(self.nodes.index(node) for node in self._agents[at].ended)


def test_an_agent_sees_that_the_next_one_has_ended_and_follows_the_one_after_it() -> None:
    ring = Ring(4)
    ring.look()
    assert not any(ring.ended_for(at) for at in range(4))
    ring.end(1)
    ring.look()
    assert ring.ended_for(0) == [1] and not ring.ended_for(2) and not ring.ended_for(3)
    ring.end(2)
    ring.look()
    assert ring.ended_for(0) == [1, 2]


def test_an_agent_that_has_never_accepted_a_connection_is_left_to_its_heartbeats() -> None:
    ring = Ring(2)
    ring.move(1, free_ports(1))
    ring.look()
    assert not ring.ended_for(0)


# --- the cost of connections between many ranks ---


def ask_for_room(rank: int, size: int, limits: tuple[int, int], least: int, wanted: int) -> list[Any]:
    said = io.StringIO()
    log = logging.getLogger("ftckpt")
    log.addHandler(logging.StreamHandler(said))
    log.setLevel(logging.INFO)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    refusal = ""
    try:
        connections.make_room(least, wanted)
    except LaunchError as error:
        refusal = str(error)
    return [refusal, resource.getrlimit(resource.RLIMIT_NOFILE), said.getvalue()]


def make_room(soft: int, hard: int, least: int, wanted: int) -> list[Any]:
    """The result of a process that raises its limits: its refusal, its limits then, and its messages."""
    result: list[Any] = run_ranks(ask_for_room, 1, (soft, hard), least, wanted, stand_in=False)[0].value
    return result


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="a low hard limit")
def test_the_soft_limit_is_raised_to_what_is_wanted_and_the_hard_one_gives_and_that_is_said() -> None:
    said = "ftckpt: open files of each rank: limit raised from"
    assert make_room(1024, 4096, 10, 500) == ["", (1024, 4096), ""]
    refusal, (raised, hard), told = make_room(1024, 4096, 10, 2000)
    assert not refusal and 2000 < raised < 2200 and hard == 4096
    assert told == f"{said} 1024 to {raised} (ulimit -n)\n"
    assert make_room(64, 128, 10, 2000) == ["", (128, 128), f"{said} 64 to 128 (ulimit -n)\n"]
    refusal, limits, told = make_room(64, 128, 2000, 2000)
    assert not lacks(refusal, "-n", "128") and limits == (64, 128) and not told


@pytest.mark.parametrize("size", [2, 200, 1000, 8000])
def test_a_store_is_asked_no_more_often_by_many_ranks_that_wait_than_by_a_few_hundred(size: int) -> None:
    first, longest = look_secs(size)
    assert size / first <= 400 and size / longest <= 20
    assert size > 200 or (first, longest) == (0.5, 10.0)
