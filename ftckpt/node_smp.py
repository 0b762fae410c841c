"""The SMPs of a job as its trainers have them: each node's leader starts one and tells it what to guard."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ftckpt.arena.environment import findings
from ftckpt.comm import Group, together
from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.holding import Holding
from ftckpt.smp.address import SECRET_BYTES, listening_address, read_secret
from ftckpt.smp.client import SmpClient, Watch, find_or_start
from ftckpt.smp.keeper import hold_memory
from ftckpt.smp.protocol import guarded


class NodeSmp:
    """One rank's view of its node's SMP. ``enter`` and ``configure`` are collective.

    ``machines[rank]`` tells which ranks reach each other over loopback (``smp.address.machine``).
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
        self._client: SmpClient | None = None
        self._watch: Watch | None = None
        self._let_go: Callable[[], None] = lambda: None

    def enter(self, node_dir: Path, guarded: bool) -> None:
        """The node's directory belongs to this attempt: say what endangers it, and have memfds held where asked for.

        ``guarded``: the node will have an SMP in any case.

        Raises:
            SmpError, UnsupportedError: memfds cannot be had; on all ranks together.
        """
        for finding in findings(Path(self._config.arena)) if self._leads else ():
            self._events.emit("environment", name=finding.name, text=finding.text, remedy=finding.remedy)
            self._events.tell(f"{finding.text}; {finding.remedy}")
        watches = self._leads and not guarded
        hold = partial(hold_memory, self._config, node_dir, watches, self._events.emit)
        self._let_go = together(self._group, hold)

    def configure(
        self,
        node_dir: Path,
        holdings: Sequence[Holding],
        groups: Sequence[ParityGroup],
        packages: Mapping[str, Sequence[str]],
    ) -> int:
        """Each node has an SMP that knows its groups, its trainers and where the others are.

        ``holdings`` by rank; ``packages``: of each other node the shards whose packages this node keeps. Returns the
        digest of what this node's SMP was told to guard, 0 where there is none that took it.

        Raises:
            ConfigError: no address, or a secret that cannot be used; on all ranks together.
        """
        config, node = self._config, self._topology.me.node
        secret = self._share_secret()
        address = together(self._group, lambda: listening_address(config.smp_listen, self._machines, os.environ))
        port = self._listen(node_dir, address, secret) if self._leads else 0
        told = [json.loads(data) for data in self._group.gather(json.dumps([os.getpid(), address, port]).encode())]
        digest = self._tell(told, holdings, groups, packages, secret) if self._client is not None else 0
        digests = [int(data) for data in self._group.gather(str(digest).encode())]
        return digests[self._topology.ranks_on(node)[0]]

    def _tell(
        self,
        told: Sequence[tuple[int, str, int]],
        holdings: Sequence[Holding],
        groups: Sequence[ParityGroup],
        packages: Mapping[str, Sequence[str]],
        secret: bytes,
    ) -> int:
        """Configure this node's SMP; ``told[rank]`` are pid, address and, of leaders, the port of the SMP."""
        config, node = self._config, self._topology.me.node
        peers = {self._topology.members[rank].node: [host, port] for rank, (_, host, port) in enumerate(told) if port}
        places = {
            str(rank): {"shard": holdings[rank].shard, "arena": holdings[rank].arena, "pid": told[rank][0]}
            for rank in self._topology.ranks_on(node)
        }
        description = {
            "job": config.job,
            "node": node,
            "secret": secret.hex(),
            "peers": {other: where for other, where in peers.items() if other != node},
            "places": places,
            "groups": [g.to_json() for g in groups if any(member.node == node for member in g.members)],
            "mirror_from": packages,
            "settings": asdict(config),
        }
        assert self._client is not None
        try:
            self._client.configure(description)
            self._watch = self._watch or Watch(self._client, self._events.emit)
        except (FtckptError, OSError) as error:
            self._fail(error)
            return 0
        return guarded(description)

    def release(self) -> None:
        """This rank trains no more; the SMP stays."""
        if self._watch is not None:
            self._watch.stop()
        self._let_go()

    def end(self) -> None:
        """The job is over: the SMP ends. Called by each node's leader once no rank needs it."""
        if self._client is not None:
            try:
                self._client.end()
            except (FtckptError, OSError) as error:
                self._fail(error)

    def _listen(self, node_dir: Path, address: str, secret: bytes) -> int:
        config = self._config
        try:
            self._client = self._client or find_or_start(
                node_dir, Path(config.arena), config.job, self._topology.me.node, asdict(config)
            )
            return self._client.listen(address, secret)
        except (FtckptError, OSError) as error:
            self._fail(error)
            return 0

    def _share_secret(self) -> bytes:
        """The job's secret: drawn by rank 0, or what each node's file holds, which must be the same."""
        path = self._config.secret_file
        if not path:
            return self._group.broadcast(secrets.token_bytes(SECRET_BYTES))
        mine = together(self._group, lambda: read_secret(Path(path)))
        if len(set(self._group.gather(mine))) > 1:
            raise ConfigError(f"secret_file: {path} does not hold the same on all nodes; copy one to all of them")
        return mine

    def _fail(self, error: Exception) -> None:
        self._events.emit("smp_error", error=str(error))
