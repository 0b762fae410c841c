"""The state of a job's nodes: this machine's from shared memory, with or without ranks or an SMP; other nodes' from
their SMPs, whose addresses and secret an SMP on this machine has stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ftckpt.cli.targets import job_directory, jobs_in, node_names, unknown_job
from ftckpt.errors import ArenaError, FtckptError, SmpError
from ftckpt.memory.directory import PULSE_NAME, SMP_LOCK_NAME, user_name
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.inventory import Inventory, NodeProtection, read_protection, take_inventory
from ftckpt.memory.locations import OpenArenas
from ftckpt.memory.locks import holder_of
from ftckpt.memory.memory_limits import used_bytes
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.restore.decide import Query
from ftckpt.smp.client import SmpClient, ask_node
from ftckpt.smp.footprint import load_description
from ftckpt.smp.liveness import Liveness
from ftckpt.smp.reports import rank_report, unpacked
from ftckpt.smp.requests import ProtectionRequest, ReportRequest

_MOST_AT_ONCE = 32
"""Nodes queried at the same time; a node answers within milliseconds or blocks a thread until its timeout."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class NodeState:
    """The state of one node.

    ``was_read``: its memory was read; ``inventory`` and ``trainers`` (see ``smp.reports.rank_report``) are known.
    ``whole``, ``protected``: iterations of its newest committed and newest protected snapshot, -1: none. ``smp``: the
    SMP's status; None if no SMP answers, because of ``problem``. ``is_here``: the node is this machine; only then
    ``nbytes``, its memory, is known.
    """

    node: str
    was_read: bool = False
    inventory: Inventory = field(default_factory=Inventory)
    trainers: tuple[dict[str, Any], ...] = ()
    whole: int = -1
    protected: int = -1
    nbytes: int = 0
    smp: dict[str, Any] | None = None
    problem: str = ""
    is_here: bool = False


@dataclass(frozen=True)
class JobNodes:
    """The nodes of one job. ``description``: the job's configuration, stored by an SMP on this machine, or empty."""

    root: Path
    job: str
    nodes: tuple[NodeState, ...]
    description: dict[str, Any]
    timeout_secs: float

    @property
    def protects(self) -> bool:
        """Whether protection is on; true if this machine does not know."""
        return bool(self.description.get("modes", True))

    @property
    def inventory(self) -> Inventory:
        """The inventory of all nodes whose memory was read."""
        return Inventory.join(node.inventory for node in self.nodes)

    def protection(self, query: Query) -> list[NodeProtection]:
        """Parity and packages of those nodes for a snapshot with missing shards; empty for a node that fails now."""
        shards, job_dir = tuple(sorted(query.lacking(self.inventory, ()))), job_directory(self.root, self.job)

        def query_node(node: NodeState) -> NodeProtection:
            if node.is_here:
                with closing(OpenArenas(job_dir / node.node)) as arenas:
                    return read_protection(arenas, node.node, query.snapshot, shards, query.layout)
            request = ProtectionRequest(query.snapshot, shards, dict(query.layout))
            with suppress(FtckptError):
                reply = ask_node(self.description, node.node, request, self.timeout_secs)
                return unpacked(str(reply.fields.get("protection")))
            return NodeProtection()

        return _each(query_node, [node for node in self.nodes if node.was_read])

    def with_others(self) -> JobNodes:
        """Adds the nodes of other machines."""
        here = {node.node for node in self.nodes}
        others = [name for name in self.description.get("nodes", ()) if name not in here]
        return replace(self, nodes=(*self.nodes, *_each(self._other, others)))

    def _other(self, name: str) -> NodeState:
        try:
            fields = dict(ask_node(self.description, name, ReportRequest(), self.timeout_secs).fields)
            inventory = codec.from_json(fields.pop("inventory", None), Inventory)
        except (FtckptError, ValueError) as error:
            return NodeState(name, problem=str(error))
        whole, protected = (int((fields.get(mark) or {}).get("iteration", -1)) for mark in ("whole", "protected"))
        return NodeState(name, True, inventory, tuple(fields.get("trainers", ())), whole, protected, smp=fields)


def nodes_here(root: Path, job: str, timeout_secs: float) -> JobNodes:
    """The nodes of ``job`` on this machine.

    Raises:
        ArenaError: there is none; names the jobs that exist.
    """
    job_dir = job_directory(root, job)
    found = next((one for one in jobs_in(root) if one.job == job), None)
    if found is None:
        raise unknown_job(root, job)
    if not found.is_open:
        raise ArenaError(f"job {job!r} belongs to {user_name(found.uid)}: only that user may read it")
    names = node_names(job_dir)
    description = next(filter(None, (_described(job_dir / name) for name in names)), {})
    states = _each(lambda name: _read_node(root, job, name, timeout_secs), names)
    return JobNodes(root, job, tuple(states), description, timeout_secs)


def _described(node_dir: Path) -> dict[str, Any]:
    """The job's configuration as stored for the SMP of that node, or empty."""
    with suppress(SmpError):  # of another version, which its SMP reports
        return load_description(node_dir) or {}
    return {}


def _read_node(root: Path, job: str, name: str, timeout_secs: float) -> NodeState:
    node_dir = job_directory(root, job) / name
    state = NodeState(name, is_here=True)
    try:
        with closing(OpenArenas(node_dir)) as arenas:
            inventory = take_inventory(arenas, name)
            controls = [arenas.get(report.name).control for report in inventory.arenas if report.layout]
            whole = _newest(control.whole() for control in controls)
            protected = _newest(control.protected() for control in controls)
        state = replace(state, was_read=True, inventory=inventory, whole=whole, protected=protected)
        state = replace(state, nbytes=used_bytes(node_dir))
    except FtckptError as error:
        state = replace(state, problem=str(error))
    if (node_dir / PULSE_NAME).exists():  # open() would create it
        ranks = Liveness(node_dir).judge(Heartbeat.open(node_dir, None).ranks())
        state = replace(state, trainers=tuple(rank_report(pulse) for pulse in ranks))
    if holder_of(node_dir / SMP_LOCK_NAME) is None:
        return replace(state, problem=state.problem or "no SMP runs")
    try:
        return replace(state, smp=SmpClient(node_dir, root, job, name).status(timeout_secs))
    except FtckptError as error:
        return replace(state, problem=state.problem or str(error))


def _newest(marks: Iterable[SnapshotId | None]) -> int:
    """The newest iteration, -1: none."""
    return max((snapshot.iteration for snapshot in marks if snapshot is not None), default=-1)


def _each(query: Callable[[T], R], of: Iterable[T]) -> list[R]:
    """The results of ``query`` in order, computed in parallel threads."""
    every: Sequence[T] = list(of)
    if not every:
        return []
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(every))) as threads:
        return list(threads.map(query, every))
