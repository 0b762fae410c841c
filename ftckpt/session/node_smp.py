"""The SMPs of a job as its trainers have them: each node's leader starts one and configures it."""

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
from typing import Any, NamedTuple

from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError, SmpError, StorageError, in_words, written
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
from ftckpt.smp.client import SmpClient, Watch, find_or_start
from ftckpt.smp.footprint import store_description
from ftckpt.smp.link import NetworkLimit, network_limit
from ftckpt.smp.ports import PortHold
from ftckpt.smp.requests import guard_digest

_CLAIM_AGAIN_SECS, _MOST_CLAIM_AGAIN_SECS = 0.5, 60.0
"""Between attempts to claim a storage that fails, each pause twice the one before it."""
_REASON_SECS = 5.0
"""Longest wait for an SMP that may not have begun with what another node has given up; one that writes, which takes
longer, has nothing to complain of."""
_POLL_SECS = 0.05
_AGAIN_SECS = 10.0
"""After an SMP could not be told what to do: each attempt costs a process start on a node that trains."""
_LAST_SECS = 5.0
"""A job that ends waits so long for an SMP that is starting, which takes one where cores are free."""
SECRET_BYTES = 32
_MOST_SECRET_BYTES = 4096
"""More is not read: somebody may have named a wrong file."""


class SmpReport(NamedTuple):
    """What a rank tells the others; ``address`` and ``port`` are those of its node's SMP if it leads the node, else
    empty and 0."""

    pid: int
    address: str
    port: int


class NodeSmp:
    """One rank's view of its node's SMP. What ranks tell each other for it others carry.

    ``machines[rank]`` names which ranks reach each other over loopback (``machine``).
    """

    def __init__(
        self, config: Config, topology: Topology, group: Group, events: Events, machines: Sequence[str]
    ) -> None:
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        self._machines = machines
        self._leads = topology.is_node_leader
        self._port: PortHold | None = None  # of the SMP of the node that this rank leads
        self._claiming: threading.Thread | None = None
        self._setup = SmpSetup(self._tell, self._fail)
        self._node_dir: Path | None = None
        self._client: SmpClient | None = None
        self._watch: Watch | None = None
        self._secret = b""
        self._began = time.time()
        self.lineage = UNKNOWN
        """Of the snapshots of this attempt: what storage records when this run claims it."""
        self.network: NetworkLimit | None = None
        """What this node's SMP may take of the network; None before it was configured, and where it has no peers."""

    def tell_hazards(self, node_dir: Path) -> None:
        """The node's directory belongs to this attempt: say what endangers it."""
        if not self._leads:
            return
        told = bool(list_arenas(node_dir))
        for hazard in hazards(Path(self._config.arena)):
            self._events.emit("environment", name=hazard.name, text=hazard.text, remedy=hazard.remedy)
            # Where an earlier attempt has trained its log has all of it, and this one's is to show what is new.
            self._events.announce(f"{hazard.text}; {'ftckpt check says what to do' if told else hazard.remedy}")

    def offer_secret(self) -> bytes:
        """What this rank gives the others for ``agree_on_secret``: a word that rank 0 has drawn, or what its node's
        file holds.

        Raises:
            ConfigError: the file cannot be used.
        """
        if self._config.secret_file:
            return read_secret(Path(self._config.secret_file))
        return secrets.token_bytes(SECRET_BYTES) if self._topology.rank == 0 else b""

    def agree_on_secret(self, offers: Sequence[bytes]) -> None:
        """The job's secret, by what all ranks offered.

        Raises:
            ConfigError: nodes' files do not hold the same.
        """
        if self._config.secret_file and len(set(offers)) > 1:
            path = self._config.secret_file
            raise ConfigError(
                f"--ftckpt-secret-file: {path} does not hold the same on all nodes; copy one to all of them"
            )
        self._secret = offers[0]

    def report(self) -> SmpReport:
        """What all ranks must be told of this one, and of the SMP of the node that it leads, which may not run yet.

        Raises:
            ConfigError: no address.
        """
        if not self._leads:
            return SmpReport(os.getpid(), "", 0)
        if self._port is None:
            # The SMP of another node has nothing to ask where nothing is protected.
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
        """Start the node's SMP, and have it know its groups, its trainers and where the others are.

        On a thread: a process takes half a second to start, and training does not wait for it. Not before all ranks
        have their state: until then cores belong to them. What it is to do lies there before it starts: a job that is
        killed meanwhile is guarded as any other.
        ``reports`` and ``holdings`` by rank; ``packages``: of each other node the shards whose packages this node
        keeps, and their bytes; ``modes``: of protection; ``received_bytes``: what this node receives for a snapshot.
        Returns the digest of what this node's SMP is to guard, as the SMP tells it in its pulse when it does.
        """
        self._claim_storage()  # behind what may refuse the start
        node = self._topology.me.node
        guarded = {
            "places": {
                str(rank): {"shard": holdings[rank].shard, "arena": holdings[rank].arena, "pid": reports[rank].pid}
                for rank in self._topology.ranks_on(node)
            },
            "groups": [g.to_json() for g in groups if any(member.node == node for member in g.members)],
            "mirror_from": packages,
            # A word of this attempt that all ranks know: an SMP that goes on with what an earlier one has told it
            # does not guard for this one yet.
            "owner": self._group.name,
        }
        if self._leads:
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
        """Have this node's SMP, which may have to be started first, do what ``description`` says."""
        assert self._node_dir is not None and self._port is not None, "behind ``configure`` and ``report``"
        self._client = self._client or self._find_or_start(self._node_dir, self._port, description)
        if self._setup.is_over:
            return
        try:
            problem = self._client.configure(description)
        except FtckptError:  # it may have ended since it was found, a whole layout ago
            self._client = self._find_or_start(self._node_dir, self._port, description)
            problem = self._client.configure(description)
        self._watch = self._watch or Watch(self._client, self._events.emit, tell=self._tell_warning)
        if problem:  # it does the rest, and is asked again
            raise SmpError(problem)
        self._port.close()

    def _claim_storage(self, before: threading.Thread | None = None) -> None:
        """SMPs of an earlier attempt that still live, on nodes that this one does not have, write there no more."""
        if self._config.persist and self._topology.rank == 0 and self._claiming is None:
            # On a thread: storage that is away must not keep training from its begin.
            self._claiming = threading.Thread(target=self._claim, args=(before,), name="ftckpt-claim", daemon=True)
            self._claiming.start()

    def claim_again(self, lineage: Lineage) -> None:
        """Storage records ``lineage``, in the background."""
        self.lineage = lineage
        before, self._claiming = self._claiming, None
        self._claim_storage(before)

    def _claim(self, before: threading.Thread | None) -> None:
        """For as long as this takes: whatever is wrong with storage somebody may put right while the job trains."""
        where = Place.of(self._config.persist, self._config.persist_format).snapshots
        told, pause_secs = "", _CLAIM_AGAIN_SECS
        if before is not None:
            before.join()
        while not self._setup.is_over:
            try:
                storage = open_storage(where, "--ftckpt-persist")
                claim(storage, self._group.name, self._config.job, self._began, self.lineage)
                return
            except StorageError as error:
                if str(error) != told:
                    told = str(error)
                    self._events.emit("storage_fails", error=f"it is not this run's: {error}")
            time.sleep(pause_secs)
            pause_secs = min(2 * pause_secs, _MOST_CLAIM_AGAIN_SECS)

    def release(self) -> None:
        """This rank trains no more; the SMP stays, and knows what to do if it could be started by now or a moment
        later."""
        self._setup.end()
        if self._port is not None:
            self._port.close()
        if self._watch is not None:
            self._watch.stop()

    def end(self) -> None:
        """The job is over: the SMP ends. Called by each node's leader once no rank needs it."""
        if self._client is not None:
            try:
                self._client.end()
            except (FtckptError, OSError) as error:
                self._fail(error)

    def flush_problem(self, goes_on: Callable[[], bool] = bool) -> str:
        """Why the SMP of the node that this rank leads could not bring the last snapshot to storage; "" where it
        could, and where another rank leads the node. For as long as it ``goes_on`` it may come to a reason yet: the
        node that fails first has failed for all."""
        if not self._leads:
            return ""
        deadline = time.monotonic() + _REASON_SECS
        while True:
            # Asked first: an SMP has its reason by the time that it says that it cannot.
            is_over = not goes_on() or time.monotonic() >= deadline
            if problem := self.problem_now():
                return problem
            if is_over and self._client is None:
                why = self._setup.problem or "it takes long"
                return f"node {self._topology.me.node}: its SMP has not started: {why}"
            if is_over:
                return ""
            time.sleep(_POLL_SECS)

    def problem_now(self) -> str:
        """What keeps the SMP of the node that this rank leads from bringing a snapshot to storage, as far as it has
        met anything; "" where another rank leads the node."""
        if self._client is None:
            return ""
        try:
            problem = str(self._client.status()["duties"]["storage"]["problem"])
        except (FtckptError, KeyError, TypeError) as error:
            problem = str(error)
        return problem and f"node {self._topology.me.node}: {problem}"

    def _find_or_start(self, node_dir: Path, port: PortHold, description: Mapping[str, Any]) -> SmpClient:
        """The SMP; one that has to be started finds ``description``, whatever becomes of this process meanwhile."""
        config = self._config
        port.lend()
        if holder_of(node_dir / SMP_LOCK_NAME) is None:
            with suppress(OSError):  # a full tmpfs: it is told when it runs
                store_description(node_dir, description)
        return find_or_start(node_dir, Path(config.arena), config.job, self._topology.me.node)

    def _tell_warning(self, text: str) -> None:
        log.warning("ftckpt: SMP of node %s: %s", self._topology.me.node, written(text))

    def _fail(self, error: Exception) -> None:
        self._events.emit("smp_error", error=in_words(error))


class SmpSetup:
    """What an SMP is to be told: the last word counts, and is said again until it was heard.

    Args:
        tell: starts the SMP where none runs and tells it; raises where it could not.
        fail: is told what it raised.
    """

    def __init__(self, tell: Callable[[Mapping[str, Any]], None], fail: Callable[[Exception], None]) -> None:
        self._tell, self._fail = tell, fail
        self._guard = threading.Lock()
        self._wanted: Mapping[str, Any] | None = None
        self._thread: threading.Thread | None = None  # None: nothing is left to be told
        self._settled = threading.Event()  # it was told, or could not be
        self._over = threading.Event()
        self._wake = threading.Event()  # it is over, or something else is wanted: no time to rest
        self.problem = ""
        """Why it could not be told what was wanted last."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended meanwhile: nothing more is to be said."""
        return self._over.is_set()

    def want(self, description: Mapping[str, Any]) -> None:
        """Have the SMP do what ``description`` says, as soon as it can be told."""
        with self._guard:
            self._wanted, self.problem = description, ""
            self._settled.clear()
            self._wake.set()
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="ftckpt-smp-setup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self.problem = in_words(error)
                self._fail(error)
            else:
                self._thread = thread

    def end(self) -> None:
        """Say nothing more, but what is being said: an SMP that is starting is waited for, for a moment."""
        thread = self._thread
        if thread is not None:
            self._settled.wait(_LAST_SECS)
        self._over.set()
        self._wake.set()
        if thread is not None:
            thread.join(_LAST_SECS if self._settled.is_set() else 0.0)

    def _run(self) -> None:
        while not self.is_over:
            self._wake.clear()  # before it is read: what comes behind that wakes
            wanted = self._wanted
            assert wanted is not None, "set before the thread starts"
            try:
                self._tell(wanted)
            except Exception as error:  # noqa: BLE001 - promise 4: without an SMP training goes on
                self.problem = in_words(error)
                self._fail(error)
                self._settled.set()
                self._wake.wait(_AGAIN_SECS)
                continue
            with self._guard:
                if self._wanted is wanted:
                    self._thread, self.problem = None, ""
                    self._settled.set()
                    return


def read_secret(path: Path) -> bytes:
    """32 bytes made of what is in ``path``, which only its owner may read.

    Raises:
        ConfigError: missing, readable by others, or too short; the text says how to make one.
    """
    how = f"make one with: (umask 077; head -c 32 /dev/urandom > {path})"
    try:
        with open(path, "rb") as file:
            # Of what is read, whatever has its name a moment later.
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"--ftckpt-secret-file: {path} cannot be read: {error.strerror}; {how}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"--ftckpt-secret-file: {path} is open to others (mode {stat.S_IMODE(mode):o}); chmod 600 it"
        )
    # White space at the ends of a file is no secret.
    if len(text.strip()) < MIN_SECRET_BYTES:
        raise ConfigError(f"--ftckpt-secret-file: {path} holds less than {MIN_SECRET_BYTES} bytes; {how}")
    # Any length, 32 bytes; the word keeps it apart from what else may be made of the same file.
    return hashlib.sha256(b"ftckpt secret" + text).digest()
