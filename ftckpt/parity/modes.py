"""Which kinds of protection a job uses: what ``protect`` says, or what the layout allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.setting_checks import check_protect

CODES = ("xor", "rs", "mirror")
"""How parity is made: of peers by the first two, in slots by the first and the last."""

MOST_MEMBERS = 8
"""Members of a group where nothing else is asked for: more save memory, fewer survive more losses."""

MOST_ARENAS = 16
"""Members of a group inside a node: one of so many may be lost."""

MIRROR_COPIES = 2
"""Other nodes that keep the packages of a node, at the least."""


@dataclass(frozen=True)
class ModeTraits:
    """What all groups of a mode have in common.

    ``in_slots``: their blocks lie in slots, not in parity files. ``cost``: of a repair, to be compared. ``source``:
    what events say a shard that it rebuilt came from.
    """

    in_slots: bool
    cost: int
    source: str


# What stays inside a node costs least, then what was computed from replicas: smaller groups than those of peers.
TRAITS = {
    "node": ModeTraits(in_slots=False, cost=0, source="node_parity"),
    "replica": ModeTraits(in_slots=True, cost=1, source="replica_parity"),
    "copy": ModeTraits(in_slots=True, cost=1, source="copy"),
    "peer": ModeTraits(in_slots=False, cost=2, source="peer_parity"),
}
"""The traits of each mode in ``setting_checks.MODES``."""

PARITY_FILES = 2
"""Parity files of an arena for each mode: one of the protected snapshot, one of the target."""


LEAST_SLOTS = 3
"""One is protected, one is being protected, one is written."""


@dataclass(frozen=True)
class Modes:
    """The kinds of protection in use. ``replica`` is "", "replica" or "copy".

    ``peer_losses`` nodes of a group may be lost together. ``peer_group`` is the nodes per group; 0: up to
    ``MOST_MEMBERS``.
    """

    node: bool = False
    replica: str = ""
    peer: bool = False
    peer_losses: int = 1
    peer_group: int = 0

    @property
    def mirror_copies(self) -> int:
        """How many other nodes keep each package: none where no lost node could be rebuilt anyway."""
        return max(MIRROR_COPIES, self.peer_losses if self.peer else 0) if self.replica or self.peer else 0

    @property
    def names(self) -> tuple[str, ...]:
        """The modes in use, in the words of ``protect``."""
        peer = ("peer",) if self.peer else ()
        return (("node",) if self.node else ()) + ((self.replica,) if self.replica else ()) + peer


def lessened(modes: Modes) -> Modes | None:
    """Without parity inside nodes, for nodes whose memory has no room for all; None where nothing can go.

    It guards the arenas of single ranks, which a dead process leaves whole anyway, and so does parity of peers. That
    stays, as nothing else guards a node whole: replicas are of some of the state, and what lies in slots is no file.
    """
    return replace(modes, node=False) if modes.node and modes.peer else None


def ways_to_need_less(config: Config, slots: int, protects: bool) -> tuple[str, ...]:
    """What lessens the memory of a job that has ``slots`` per arena, as errors tell it; none where nothing can go."""
    ways = ("take fewer slots (--ftckpt-slots)",) if slots > config.least_slots(protects) else ()
    return (*ways, "protect less (--ftckpt-protect)") if protects else ways


def require_slots(config: Config, modes: Modes) -> None:
    """Make sure that the slots which a user has set suffice for what is protected.

    Raises:
        ConfigError: they do not; the text names how many do.
    """
    slots = config.num_slots(bool(modes.names))
    if modes.names and slots < LEAST_SLOTS:
        raise ConfigError(
            f"--ftckpt-slots: {slots} are too few with protection ({', '.join(modes.names)}): one is protected, "
            f"one is being protected, one is written; use {LEAST_SLOTS} or more, or 0"
        )
    if config.persist and slots < (least := (LEAST_SLOTS if modes.names else 2) + 1):
        raise ConfigError(
            f"--ftckpt-slots: {slots} are too few with --ftckpt-persist: one more is kept until it is on "
            f"storage; use {least} or more, or 0"
        )


def resolve_modes(
    protect: str, nodes: Sequence[str], spans_nodes: bool, *, peer_losses: int = 1, peer_group: int = 0
) -> Modes:
    """The modes that ``protect`` means on this job.

    ``nodes`` has the node of every rank; ``spans_nodes``: any replica set has members on
    two nodes. "auto" is ``node`` where every node has three ranks or more, ``replica`` where replica sets span
    nodes, ``peer`` where there are two nodes or more. The order of ``nodes`` does not matter.

    Raises:
        ConfigError: an unknown mode, one that would protect nothing on this layout, or settings of ``peer`` that
            cannot work; the text names the field.
    """
    wanted = check_protect(protect)
    ranks_of = Counter(nodes)
    if wanted == ("auto",):
        # With two arenas XOR is a copy: parity as large as a slot, twice.
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
    """As ``resolve_modes`` for a job that may have lost nodes for good: what ``protect`` and ``peer_losses`` ask for
    and these ``nodes`` cannot have is left out. The modes, and a text for each thing that was left out.

    Raises:
        ConfigError: an unknown mode, or settings of ``peer`` that can work nowhere; the text names the field.
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
    # Fewer nodes than there were: as many losses as the rest can survive. Settings that could work on no number of
    # nodes stay as they are, for ``resolve_modes`` to refuse.
    if 1 < members <= peer_losses < (peer_group or MOST_MEMBERS):
        losses = members - 1
        if possible == ["auto"] or "peer" in possible:
            left_out.append(
                f"--ftckpt-peer-losses: of {len(ranks_of)} nodes {losses} can be lost together, not {peer_losses}"
            )
        peer_losses = losses
    wanted = ",".join(possible) or "none"
    return resolve_modes(wanted, nodes, spans_nodes, peer_losses=peer_losses, peer_group=peer_group), tuple(left_out)


def _check_useful(node: bool, replica: str, peer: bool, ranks_of: Counter[str], spans_nodes: bool) -> None:
    if node and max(ranks_of.values(), default=0) < 2:
        raise ConfigError(
            "--ftckpt-protect: node needs two ranks or more on a node, here each has one; use replica or peer"
        )
    if replica and not spans_nodes:
        raise ConfigError(
            f"--ftckpt-protect: {replica} needs state that ranks on different nodes hold alike, here there is none, "
            "or next to nothing; use peer, which guards what one node alone holds"
        )
    if peer and len(ranks_of) < 2:
        raise ConfigError("--ftckpt-protect: peer needs two nodes or more, here all ranks are on one; use node")


def _check_peer(losses: int, group: int, num_nodes: int) -> None:
    if losses < 1:
        raise ConfigError(f"--ftckpt-peer-losses: {losses} is too small; the least is 1")
    if group < 0 or group == 1:
        raise ConfigError(
            f"--ftckpt-peer-group: a group of {group} cannot guard anything; use 2 or more, or 0 for up to eight"
        )
    members = min(group or MOST_MEMBERS, num_nodes)
    if losses >= members:
        raise ConfigError(
            f"--ftckpt-peer-losses: {losses} lost of a group of {members} nodes cannot be survived; use at most "
            f"{members - 1}" + (", or a larger --ftckpt-peer-group" if members < num_nodes else "")
        )
