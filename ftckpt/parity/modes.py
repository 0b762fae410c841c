"""Protection modes of a job: those that ``protect`` names, or those that the layout allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.setting_checks import check_protect

MOST_MEMBERS = 8
"""Default maximum of members of a group: more save memory, fewer survive more losses."""

MOST_ARENAS = 16
"""Maximum of members of a group inside a node, of which one may be lost."""

MIRROR_COPIES = 2
"""Minimum number of other nodes that mirror the packages of a node."""


@dataclass(frozen=True)
class ModeTraits:
    """The common properties of all groups of a mode.

    ``in_slots``: blocks are stored in slots, not in parity files. ``cost``: rank of a repair, cheapest first.
    ``source``: the name in events of the source of a shard that the mode reconstructed.
    """

    in_slots: bool
    cost: int
    source: str


# Repairs inside a node are cheapest, then those from replicas, whose groups are smaller than peers'.
TRAITS = {
    "node": ModeTraits(in_slots=False, cost=0, source="node_parity"),
    "replica": ModeTraits(in_slots=True, cost=1, source="replica_parity"),
    "copy": ModeTraits(in_slots=True, cost=1, source="copy"),
    "peer": ModeTraits(in_slots=False, cost=2, source="peer_parity"),
}
"""The traits of each mode in ``setting_checks.MODES``."""

PARITY_FILES = 2
"""Parity files per arena and mode: one of the protected snapshot, one of the target."""


LEAST_SLOTS = 3
"""One slot is protected, one is being protected, one is being written."""


@dataclass(frozen=True)
class Modes:
    """The modes in use. ``replica`` is "", "replica" or "copy".

    ``peer_losses``: nodes of a group that may be lost together. ``peer_group``: nodes per group; 0: up to
    ``MOST_MEMBERS``.
    """

    node: bool = False
    replica: str = ""
    peer: bool = False
    peer_losses: int = 1
    peer_group: int = 0

    @property
    def mirror_copies(self) -> int:
        """Number of other nodes that keep each package; 0 if no mode can reconstruct a lost node."""
        return max(MIRROR_COPIES, self.peer_losses if self.peer else 0) if self.replica or self.peer else 0

    @property
    def names(self) -> tuple[str, ...]:
        """The modes in use, named as in ``protect``."""
        peer = ("peer",) if self.peer else ()
        return (("node",) if self.node else ()) + ((self.replica,) if self.replica else ()) + peer


def ways_to_need_less(config: Config, slots: int, protects: bool) -> tuple[str, ...]:
    """Remedies in error texts that reduce the memory of a job with ``slots`` per arena; empty if there are none."""
    ways = ("take fewer slots (--ftckpt-slots)",) if slots > config.least_slots(protects) else ()
    return (*ways, "protect less (--ftckpt-protect)") if protects else ways


def require_slots(config: Config, modes: Modes) -> None:
    """Check that the number of slots suffices for protection and flush.

    Raises:
        ConfigError: it does not; the text names the minimum.
    """
    slots = config.num_slots(bool(modes.names))
    if modes.names and slots < LEAST_SLOTS:
        raise ConfigError(
            f"--ftckpt-slots: {slots} are too few with protection ({', '.join(modes.names)}): one is protected, "
            f"one is being protected, one is being written; use {LEAST_SLOTS} or more, or 0"
        )
    if config.persist and slots < (least := (LEAST_SLOTS if modes.names else 2) + 1):
        raise ConfigError(
            f"--ftckpt-slots: {slots} are too few with --ftckpt-persist: one more is pinned until it is "
            f"flushed; use {least} or more, or 0"
        )


def resolve_modes(
    protect: str, nodes: Sequence[str], spans_nodes: bool, *, peer_losses: int = 1, peer_group: int = 0
) -> Modes:
    """Resolve ``protect`` for this job's layout.

    ``nodes`` is the node of every rank, in any order; ``spans_nodes``: some replica set has members on two nodes.
    "auto" selects ``node`` if every node has at least three ranks, ``replica`` if replica sets span nodes, ``peer``
    if there are at least two nodes.

    Raises:
        ConfigError: an unknown mode, one that would protect nothing on this layout, or impossible settings of
            ``peer``; the text names the setting.
    """
    wanted = check_protect(protect)
    ranks_of = Counter(nodes)
    if wanted == ("auto",):
        # Two arenas would need as much parity as a copy: a slot's size, twice.
        node = min(ranks_of.values(), default=0) >= 3
        replica, peer = "replica" if spans_nodes else "", len(ranks_of) >= 2
    else:
        node, peer = "node" in wanted, "peer" in wanted
        replica = next((mode for mode in ("replica", "copy") if mode in wanted), "")
        _check_useful(node, replica, peer, ranks_of, spans_nodes)
    if peer:
        _check_peer(peer_losses, peer_group, len(ranks_of))
    return Modes(node, replica, peer, peer_losses, peer_group)


def possible_modes(
    protect: str, nodes: Sequence[str], spans_nodes: bool, *, peer_losses: int = 1, peer_group: int = 0
) -> tuple[Modes, tuple[str, ...]]:
    """Resolve ``protect`` for a job that may have lost nodes for good, omitting what these ``nodes`` cannot provide.
    Returns the modes and a text for each omission.

    Raises:
        ConfigError: an unknown mode, or settings of ``peer`` that no layout allows; the text names the setting.
    """
    ranks_of = Counter(nodes)
    left_out: list[str] = []
    possible: list[str] = []
    for mode in check_protect(protect):
        replica = mode if mode in ("replica", "copy") else ""
        try:
            _check_useful(mode == "node", replica, mode == "peer", ranks_of, spans_nodes)
        except ConfigError as error:
            left_out.append(str(error))
        else:
            possible.append(mode)
    members = min(peer_group or MOST_MEMBERS, len(ranks_of))
    # With fewer nodes, tolerate as many losses as they can survive. Settings that no number of nodes allows are left
    # unchanged and rejected by ``resolve_modes``.
    if 1 < members <= peer_losses < (peer_group or MOST_MEMBERS):
        losses = members - 1
        if possible == ["auto"] or "peer" in possible:
            left_out.append(
                f"--ftckpt-peer-losses: {len(ranks_of)} nodes survive {losses} simultaneous losses, not {peer_losses}"
            )
        peer_losses = losses
    wanted = ",".join(possible) or "none"
    return resolve_modes(wanted, nodes, spans_nodes, peer_losses=peer_losses, peer_group=peer_group), tuple(left_out)


def _check_useful(node: bool, replica: str, peer: bool, ranks_of: Counter[str], spans_nodes: bool) -> None:
    if node and max(ranks_of.values(), default=0) < 2:
        raise ConfigError(
            "--ftckpt-protect: node needs two ranks or more on a node, but each has one; use replica or peer"
        )
    if replica and not spans_nodes:
        raise ConfigError(
            f"--ftckpt-protect: {replica} needs state that is replicated on different nodes, and there is (almost) "
            "none; use peer, which protects state that only one node has"
        )
    if peer and len(ranks_of) < 2:
        raise ConfigError("--ftckpt-protect: peer needs two nodes or more, but all ranks are on one; use node")


def _check_peer(losses: int, group: int, num_nodes: int) -> None:
    if losses < 1:
        raise ConfigError(f"--ftckpt-peer-losses: {losses} is too small; the least is 1")
    if group < 0 or group == 1:
        raise ConfigError(
            f"--ftckpt-peer-group: a group of {group} cannot protect anything; use 2 or more, or 0 for up to eight"
        )
    members = min(group or MOST_MEMBERS, num_nodes)
    if losses >= members:
        raise ConfigError(
            f"--ftckpt-peer-losses: {losses} lost of a group of {members} nodes cannot be survived; use at most "
            f"{members - 1}" + (", or a larger --ftckpt-peer-group" if members < num_nodes else "")
        )
