"""The trainers' side of the SMPs: each node's leader starts its node's SMP and configures it."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError, SmpError, in_words, written
from ftckpt.events import Events, log
from ftckpt.group import Group
from ftckpt.memory.directory import SMP_LOCK_NAME, list_arenas
from ftckpt.memory.environment import hazards
from ftckpt.memory.locks import holder_of
from ftckpt.model.lineage import UNKNOWN, Lineage
from ftckpt.model.topology import Topology
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.holding import ArenaLayout
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import claim
from ftckpt.persist.paths import Place
from ftckpt.session.addresses import LOOPBACK, listening_address
from ftckpt.smp.channel import MIN_SECRET_BYTES
from ftckpt.smp.client import SmpClient, find_or_start
from ftckpt.smp.footprint import store_description
from ftckpt.smp.link import NetworkLimit, network_limit
from ftckpt.smp.ports import PortHold
from ftckpt.smp.requests import guard_digest
from ftckpt.smp.watch import Watch

T = TypeVar("T")

_CLAIM_AGAIN_SECS = 0.5, 60.0
"""First and longest pause between attempts to claim storage: it may be repaired while the job trains."""
_REASON_SECS = 5.0
"""Maximum wait for an SMP's reason for a failed flush, as it may not have started the flush that another node has
given up."""
_POLL_SECS = 0.05
_AGAIN_SECS = 10.0
"""Pause after an SMP could not be configured: each attempt costs a process start on a node that trains."""
_END_SECS = 5.0
"""Maximum wait of an ending job for a delivery: an SMP starts within a second on an idle node."""
# The output of SHA-256: a longer key adds nothing to the HMAC of a proof.
SECRET_BYTES = 32
_MOST_SECRET_BYTES = 4096
"""Read limit for the secret's file, in case the setting names a wrong one."""


class SmpReport(NamedTuple):
    """A rank's report to the others; ``address`` and ``port`` of its node's SMP if it leads the node, else empty and
    0."""

    pid: int
    address: str
    port: int


class NodeSmp:
    """One rank's access to its node's SMP. Nothing is collective: callers gather ``offer_secret`` and ``report``.

    Ranks with the same ``machines[rank]`` (see ``machine``) reach each other over loopback.
    """

    def __init__(
        self, config: Config, topology: Topology, group: Group, events: Events, machines: Sequence[str]
    ) -> None:
        self._config, self._topology = config, topology
        self._group, self._events = group, events
        self._machines = machines
        self._port: PortHold | None = None  # reserved for the SMP if this rank leads its node
        self._setup = RepeatedDelivery("ftckpt-smp-setup", self._tell, self._fail, (_AGAIN_SECS, _AGAIN_SECS))
        self._claim = RepeatedDelivery("ftckpt-claim", self._record, self._report_claim, _CLAIM_AGAIN_SECS)
        self._node_dir: Path | None = None
        self._client: SmpClient | None = None
        self._watch: Watch | None = None
        self._secret = b""
        self._began = time.time()
        self.lineage = UNKNOWN
        """The lineage of this attempt's snapshots, which storage records when this run claims it."""
        self.network: NetworkLimit | None = None
        """The network limit of this node's SMP; None before ``configure``, and without peers."""

    def report_hazards(self, node_dir: Path) -> None:
        """Report hazards of the environment, once the node's directory is locked for this attempt."""
        if not self._topology.is_node_leader:
            return
        told = bool(list_arenas(node_dir))
        for hazard in hazards(Path(self._config.arena)):
            self._events.emit("environment", name=hazard.name, text=hazard.text, remedy=hazard.remedy)
            # The log of an earlier attempt has the remedies, if there was one; this log stays short.
            self._events.announce(f"{hazard.text}; {'ftckpt check says what to do' if told else hazard.remedy}")

    def offer_secret(self) -> bytes:
        """This rank's input to ``agree_on_secret``: a random secret of rank 0, or the content of its node's file.

        Raises:
            ConfigError: the file cannot be used.
        """
        if self._config.secret_file:
            return read_secret(Path(self._config.secret_file))
        return secrets.token_bytes(SECRET_BYTES) if self._topology.rank == 0 else b""

    def agree_on_secret(self, offers: Sequence[bytes]) -> None:
        """Set the job's secret from the offers of all ranks.

        Raises:
            ConfigError: the files of the nodes differ.
        """
        if self._config.secret_file and len(set(offers)) > 1:
            path = self._config.secret_file
            raise ConfigError(f"--ftckpt-secret-file: {path} differs between nodes; copy one to all of them")
        self._secret = offers[0]

    def report(self) -> SmpReport:
        """Report this rank, and the address of its node's SMP if it leads the node; the SMP may not run yet.

        Raises:
            ConfigError: no address was found.
        """
        if not self._topology.is_node_leader:
            return SmpReport(os.getpid(), "", 0)
        if self._port is None:
            # Without protection and storage, SMPs do not connect to each other: loopback suffices.
            has_peers = self._config.protect != "none" or self._config.persist
            machines = self._machines if has_peers else (LOOPBACK,)
            self._port = PortHold(listening_address(self._config.smp_listen, machines, os.environ))
        return SmpReport(os.getpid(), self._port.host, self._port.number)

    def configure(
        self,
        node_dir: Path,
        reports: Sequence[SmpReport],
        holdings: Sequence[ArenaLayout],
        groups: Sequence[ParityGroup],
        packages: Mapping[str, Mapping[str, int]],
        *,
        modes: Sequence[str] = (),
        received_bytes: int = 0,
    ) -> int:
        """Start the node's SMP, and configure its groups, its trainers and its peers.

        On a thread: a process start takes half a second, for which training does not wait. Call it after all ranks
        have loaded their state, for which they need the cores. The description is stored before the SMP starts, so
        that snapshots are protected even if the job is killed meanwhile.
        ``reports`` and ``holdings`` by rank; ``packages``: by other node, the shards whose packages this node keeps,
        and their bytes; ``modes``: of protection; ``received_bytes``: network traffic to this node per snapshot.
        Returns the digest of this node's part, which the SMP publishes in its heartbeat once it is configured.
        """
        if self._claim.wanted is None:
            self.claim_storage(self.lineage)  # after all that may refuse the start
        node = self._topology.me.node
        guarded = {
            "places": {
                str(rank): {"shard": holdings[rank].shard, "arena": holdings[rank].arena, "pid": reports[rank].pid}
                for rank in self._topology.ranks_on(node)
            },
            "groups": [g.to_json() for g in groups if any(member.node == node for member in g.members)],
            "mirror_from": packages,
            # Unique to this attempt, and known to all ranks: it makes the digest differ from that of an SMP which
            # still has the configuration of an earlier attempt.
            "owner": self._group.name,
        }
        if self._topology.is_node_leader:
            self._node_dir = node_dir
            description = self._describe(guarded, reports)
            self._setup.want({**description, "modes": list(modes), "received_bytes": received_bytes})
        return guard_digest(guarded)

    def _describe(self, guarded: Mapping[str, Any], reports: Sequence[SmpReport]) -> Mapping[str, Any]:
        config, node = self._config, self._topology.me.node
        members = zip(self._topology.members, reports, strict=True)
        peers = {member.node: [report.address, report.port] for member, report in members if report.port}
        _, address, port = reports[self._topology.rank]
        self.network = network_limit(config.network_rate, address) if len(peers) > 1 else None
        return {
            "job": config.job,
            "node": node,
            "secret": self._secret.hex(),
            "peers": {other: where for other, where in peers.items() if other != node},
            "address": address,
            "port": port,
            "began": self._began,
            "nodes": sorted({member.node for member in self._topology.members}),
            "network": asdict(self.network) if self.network else {"bytes_per_sec": 0.0, "source": "no other nodes"},
            "settings": asdict(config),
            **guarded,
        }

    def _tell(self, description: Mapping[str, Any]) -> None:
        """Configure this node's SMP with ``description``; starts it first if none runs."""
        assert self._node_dir is not None and self._port is not None, "call ``configure`` and ``report`` first"
        self._client = self._client or self._find_or_start(self._node_dir, self._port, description)
        if self._setup.is_over:
            return
        try:
            problem = self._client.configure(description)
        except FtckptError:  # it may have ended since an earlier call
            self._client = self._find_or_start(self._node_dir, self._port, description)
            problem = self._client.configure(description)
        self._watch = self._watch or Watch(self._client, self._events.emit, tell=self._tell_warning)
        if problem:  # it does the rest; ``RepeatedDelivery`` retries
            raise SmpError(problem)
        self._port.close()

    def claim_storage(self, lineage: Lineage) -> None:
        """Record ``lineage`` on storage, in the background. This fences off SMPs of earlier attempts on nodes that
        this one lacks."""
        if self._config.persist and self._topology.rank == 0:
            self._claim.want(lineage)

    def _record(self, lineage: Lineage) -> None:
        where = Place.of(self._config.persist, self._config.persist_format).snapshots
        storage = open_storage(where, "--ftckpt-persist")
        claim(storage, self._group.name, self._config.job, self._began, lineage)

    def _report_claim(self, error: Exception, is_new: bool) -> None:
        if is_new:
            self._events.emit("storage_fails", error=f"this run could not claim it: {error}")

    def release(self) -> None:
        """End this rank's part. The SMP keeps running; one that is starting is configured, within a few seconds."""
        self._claim.end()
        self._setup.end(waits=True)
        if self._port is not None:
            self._port.close()
        if self._watch is not None:
            self._watch.stop()

    def end(self) -> None:
        """End the SMP with the job. Each node's leader calls this once no rank needs the SMP."""
        if self._client is not None:
            try:
                self._client.end()
            except (FtckptError, OSError) as error:
                self._fail(error)

    def flush_problem(self, goes_on: Callable[[], bool] = bool) -> str:
        """Why this node's SMP failed to flush the last snapshot; "" if it did not, or another rank leads the node.
        While its flush ``goes_on``, this waits for a reason: the first node to fail ends the flush on all."""
        if not self._topology.is_node_leader:
            return ""
        deadline = time.monotonic() + _REASON_SECS
        while True:
            # In this order: an SMP has its reason before it reports CANNOT.
            is_over = not goes_on() or time.monotonic() >= deadline
            if problem := self.problem_now():
                return problem
            if is_over and self._client is None:
                why = self._setup.problem or "it is still starting"
                return f"node {self._topology.me.node}: its SMP has not started: {why}"
            if is_over:
                return ""
            time.sleep(_POLL_SECS)

    def problem_now(self) -> str:
        """The current storage problem of this node's SMP; "" if there is none, or another rank leads the node."""
        if self._client is None:
            return ""
        try:
            problem = str(self._client.status()["tasks"]["storage"]["problem"])
        except (FtckptError, KeyError, TypeError) as error:
            problem = str(error)
        return problem and f"node {self._topology.me.node}: {problem}"

    def _find_or_start(self, node_dir: Path, port: PortHold, description: Mapping[str, Any]) -> SmpClient:
        """Find or start the SMP; a new one reads the stored ``description``, even if this process dies meanwhile."""
        config = self._config
        port.lend()
        if holder_of(node_dir / SMP_LOCK_NAME) is None:
            with suppress(OSError):  # a full tmpfs: ``configure`` sends it again
                store_description(node_dir, description)
        return find_or_start(node_dir, Path(config.arena), config.job, self._topology.me.node)

    def _tell_warning(self, text: str) -> None:
        log.warning("ftckpt: SMP of node %s: %s", self._topology.me.node, written(text))

    def _fail(self, error: Exception, is_new: bool = True) -> None:
        self._events.emit("smp_error", error=in_words(error))


class RepeatedDelivery(Generic[T]):
    """Delivers the latest value that is wanted, and retries until it is delivered.

    Args:
        deliver: raises if that fails.
        fail: receives each error, and whether it differs from the one before.
        pauses: the first and the longest pause between attempts in seconds; each is twice the one before.
    """

    def __init__(
        self, name: str, deliver: Callable[[T], None], fail: Callable[[Exception, bool], None],
        pauses: tuple[float, float],
    ) -> None:  # fmt: skip
        self._name, self._deliver, self._fail, self._pauses = name, deliver, fail, pauses
        self._guard = threading.Lock()
        self.wanted: T | None = None
        """The latest value; None: none yet."""
        self._thread: threading.Thread | None = None  # None: nothing is left to deliver
        self._settled = threading.Event()  # the latest value was delivered, or failed once
        self._over = threading.Event()
        self._wake = threading.Event()  # set by ``end`` and by a new value: do not pause
        self.problem = ""
        """Why the latest value could not be delivered."""

    @property
    def is_over(self) -> bool:
        """Whether ``end`` was called: nothing more is delivered."""
        return self._over.is_set()

    def want(self, value: T) -> None:
        """Deliver ``value`` as soon as possible; does not wait."""
        with self._guard:
            self.wanted, self.problem = value, ""
            self._settled.clear()
            self._wake.set()
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self._note(error)
            else:
                self._thread = thread

    def end(self, waits: bool = False) -> None:
        """Stop deliveries; with ``waits`` this waits up to a few seconds for the one in progress."""
        thread = self._thread if waits else None
        if thread is not None:
            self._settled.wait(_END_SECS)
        self._over.set()
        self._wake.set()
        if thread is not None:
            thread.join(_END_SECS if self._settled.is_set() else 0.0)

    def _run(self) -> None:
        pause_secs, longest_secs = self._pauses
        while not self.is_over:
            self._wake.clear()  # before the read: a later value must end the pause below
            value = self.wanted
            assert value is not None, "set before the thread starts"
            try:
                self._deliver(value)
            except Exception as error:  # noqa: BLE001 - promise 4: training continues without it
                self._note(error)
                self._settled.set()
                self._wake.wait(pause_secs)
                pause_secs = min(2 * pause_secs, longest_secs)
                continue
            with self._guard:
                if self.wanted is value:
                    self._thread, self.problem = None, ""
                    self._settled.set()
                    return

    def _note(self, error: Exception) -> None:
        before, self.problem = self.problem, in_words(error)
        self._fail(error, self.problem != before)


def read_secret(path: Path) -> bytes:
    """Derive a 32-byte secret from the content of ``path``, which only its owner may read.

    Raises:
        ConfigError: missing, readable by others, or too short; the text says how to make one.
    """
    how = f"make one with: (umask 077; head -c 32 /dev/urandom > {path})"
    try:
        with open(path, "rb") as file:
            # The mode of the opened file: its path may be replaced at any time.
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"--ftckpt-secret-file: {path} cannot be read: {error.strerror}; {how}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"--ftckpt-secret-file: {path} is open to others (mode {stat.S_IMODE(mode):o}); chmod 600 it"
        )
    # Leading and trailing white space adds no entropy.
    if len(text.strip()) < MIN_SECRET_BYTES:
        raise ConfigError(f"--ftckpt-secret-file: {path} has fewer than {MIN_SECRET_BYTES} bytes; {how}")
    # Maps any length to 32 bytes; the prefix separates this use from other hashes of the same file.
    return hashlib.sha256(b"ftckpt secret" + text).digest()
