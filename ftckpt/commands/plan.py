"""``ftckpt plan``: what protection would survive, and what it costs, for a job that need not run yet.

The job's arenas are made up from its size; groups, table and sums are those of a real start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ftckpt.commands.plan_intervals import Costs, IntervalForecast, forecast
from ftckpt.config import Config, reader_of
from ftckpt.errors import ConfigError, MemoryBudgetError, Writing, settings_are_written
from ftckpt.model.failures import FailureRecord
from ftckpt.model.manifest import shard_name
from ftckpt.model.shares import equal_cuts
from ftckpt.parity.groups import (
    Member,
    ParityGroup,
    mirrors,
    node_groups,
    peer_groups,
    replica_partition,
    slot_group,
    slot_group_name,
    slot_groups,
)
from ftckpt.parity.holding import Holding, HoldingSection
from ftckpt.parity.modes import Modes, lessened, resolve_modes
from ftckpt.parity.stripes import blocks_bytes
from ftckpt.parity.table import ProtectionTable, protection_table
from ftckpt.persist.failures import last_attempt
from ftckpt.persist.place import snapshots_at
from ftckpt.persist.storage import open_storage
from ftckpt.smp.link import unknown_limit
from ftckpt.store.ledger import require_limit
from ftckpt.store.parity_file import parity_bytes
from ftckpt.units import counted

BYTES_PER_PARAM = 12
"""fp32 weights (masters where training is in 16 bits) and two fp32 moments of Adam."""

_HEADER_BYTES = 64 << 10
"""Assumed for the header of a slot, which its package repeats."""

# A holding per rank is made up in memory: a mistyped size is to be an error, not a machine without memory.
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class JobShape:
    """The size of a job; rank order as in Megatron: tp, cp, dp, pp, from the fastest to the slowest."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    gpus_per_node: int
    params: int
    expert_params: int
    distributed: bool
    nodes_per_rack: int
    chunk_bytes: int
    objects_bytes: int

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def shard(self, rank: int) -> str:
        """The coordinates of a rank as a name."""
        # Megatron's default order: tp varies fastest, then cp, dp and pp.
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        return shard_name({"tp": tp, "pp": rest // self.dp, "cp": cp, "dp": rest % self.dp})

    def node(self, rank: int) -> str:
        """The node of a rank."""
        return f"node{rank // self.gpus_per_node:0{len(str((self.ranks - 1) // self.gpus_per_node))}d}"

    def rack(self, rank: int) -> str:
        """The rack of a rank, "" where none are named."""
        return f"rack{rank // self.gpus_per_node // self.nodes_per_rack}" if self.nodes_per_rack else ""

    def replica_sets(self) -> dict[tuple[int, ...], int]:
        """Ranks → bytes of state that all of them hold alike."""
        sets: dict[tuple[int, ...], int] = {}
        if self.distributed:
            return sets
        replicas = self.cp * self.dp
        for pp in range(self.pp):
            for tp in range(self.tp):
                ranks = [tp + self.tp * (at + replicas * pp) for at in range(replicas)]
                for members, params in [(ranks, (self.params - self.expert_params) // (self.tp * self.pp))] + [
                    (ranks[ep :: self.ep], self.expert_params // (self.tp * self.pp * self.ep))
                    for ep in range(self.ep)
                ]:
                    sets[tuple(members)] = sets.get(tuple(members), 0) + BYTES_PER_PARAM * params
        return {members: nbytes for members, nbytes in sets.items() if nbytes}


@dataclass
class _Parts:
    """What one rank's slot holds: private bytes, shares under groups, then copies and parity."""

    private: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    protecting: list[tuple[str, str, str, tuple[int, ...]]] = field(default_factory=list)


def build(job: JobShape, modes: Modes) -> list[Holding]:
    """The holdings of a job under these modes, rank by rank."""
    own = BYTES_PER_PARAM * job.params // job.ranks if job.distributed else 0
    parts = [_Parts(own) for _ in range(job.ranks)]
    groups: list[tuple[tuple[int, ...], str]] = []
    for ranks, nbytes in job.replica_sets().items():
        cuts = equal_cuts(nbytes, len(ranks))
        share = {rank: int(cuts[place + 1] - cuts[place]) for place, rank in enumerate(ranks)}
        for group in replica_partition(ranks, job.node, job.rack):
            if not modes.replica or len(group) < 2:
                for rank in group:
                    parts[rank].private += share[rank]
                continue
            name = slot_group_name(modes.replica, map(job.shard, group), map(job.shard, ranks))
            groups.append((group, name))
            for rank in group:
                parts[rank].shared[name] = share[rank]
    for ranks, name in groups:
        _keep_blocks(job, modes.replica, name, {job.shard(rank): parts[rank] for rank in ranks})
    return [_holding(job, rank, parts[rank]) for rank in range(job.ranks)]


def _keep_blocks(job: JobShape, mode: str, name: str, parts: Mapping[str, _Parts]) -> None:
    members = [Member(s, "", "", 0, _cut(part.shared[name], job.chunk_bytes)) for s, part in parts.items()]
    group: ParityGroup = slot_group(name, mode, job.chunk_bytes, members)
    for holder, member in enumerate(group.members):
        # Holder 0 keeps that of the last: members copy each other in a ring.
        kind, of = ("parity", "") if mode == "replica" else ("copy", group.members[holder - 1].shard)
        lengths = _cut(blocks_bytes(group, holder), job.chunk_bytes)
        parts[member.shard].protecting.append((kind, name, of, lengths))


def _holding(job: JobShape, rank: int, parts: _Parts) -> Holding:
    wanted = [("private", "", "", _cut(parts.private, job.chunk_bytes))]
    wanted += [("shared", name, "", _cut(nbytes, job.chunk_bytes)) for name, nbytes in parts.shared.items()]
    sections, first = [], 0
    for kind, group, of, lengths in wanted + sorted(parts.protecting):
        sections.append(HoldingSection(kind, group, of, first, lengths))
        first += len(lengths)
    data = sum(sum(section.lengths) for section in sections)
    return Holding(
        shard=job.shard(rank),
        node=job.node(rank),
        rack=job.rack(rank),
        # Any name that differs between ranks will do: nothing of it exists.
        arena=job.shard(rank),
        digest="",
        chunk_bytes=job.chunk_bytes,
        sections=tuple(sections),
        volatile=(first, ()),
        slot_bytes=data + job.objects_bytes + _HEADER_BYTES,
        # 8 bytes for the checksum of each chunk.
        package_bytes=job.objects_bytes + _HEADER_BYTES + 8 * first,
    )


def _cut(nbytes: int, chunk_bytes: int) -> tuple[int, ...]:
    whole, rest = divmod(nbytes, chunk_bytes)
    return (chunk_bytes,) * whole + ((rest,) if rest else ())


def plan(job: JobShape, config: Config) -> tuple[Modes, int, ProtectionTable]:
    """The modes that ``config`` means for a job, its slots per arena, and what protects it.

    Raises:
        MemoryBudgetError: more than ``memory_limit`` with as few slots and modes as can be.
    """
    places = [(job.shard(rank), job.node(rank), job.rack(rank)) for rank in range(job.ranks)]
    spans = any(job.node(ranks[0]) != job.node(rank) for ranks in job.replica_sets() for rank in ranks)
    modes = resolve_modes(
        config.protect,
        places,
        spans,
        peer_code=config.peer_code,
        peer_losses=config.peer_losses,
        peer_group=config.peer_group,
    )
    holdings = build(job, modes)
    slots, least = (config.num_slots(bool(modes.names), short) for short in (False, True))
    while True:
        groups = [
            *(node_groups(holdings) if modes.node else []),
            *peer_groups(holdings, modes),
            *slot_groups(holdings),
        ]
        table = protection_table(holdings, groups, mirrors(holdings, modes), slots, parity_bytes)
        node, memory = max(table.memory.items(), key=lambda one: one[1].sum)
        try:
            require_limit(config.memory_limit, node, memory.slots, memory.parity, memory.packages)
            return modes, slots, table
        except MemoryBudgetError:
            # As a start does: a slot first, then a mode that nobody has named.
            fewer = lessened(modes) if config.protect == "auto" else None
            if slots != least:
                slots = least
            elif fewer is not None:
                modes = fewer
            else:
                raise


def add_plan(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser("plan", help="show what protection would survive and cost for a job of a given size")
    for name in ("tp", "pp", "dp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{name.upper()} size (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, required=True, metavar="N", help="ranks on a node")
    parser.add_argument("--params", type=counted, required=True, help="parameters of the model, such as 34b or 34e9")
    parser.add_argument(
        "--expert-params", type=counted, default=0, metavar="P", help="how many of them are in experts"
    )
    parser.add_argument("--optimizer", choices=("distributed", "replicated"), default="distributed")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the weights in training"
    )
    parser.add_argument("--racks", type=int, default=0, metavar="N", help="spread the nodes evenly over N racks")
    parser.add_argument("--nodes-per-rack", type=int, default=0, metavar="N", help="nodes that share a rack")
    defaults = Config()
    for name in ("protect", "peer_code"):
        parser.add_argument(_flag(name), default=getattr(defaults, name), help=_help(name))
    for name in ("interval", "protect_interval", "persist_interval"):
        parser.add_argument(_flag(name), type=_interval, default=getattr(defaults, name), help=_help(name))
    settings = {setting.name: setting for setting in fields(Config)}
    for name in (
        "slots", "peer_group", "peer_losses", "objects_mib", "chunk_mib", "memory_limit", "smp_cores", "persist_gbps",
        "overhead_budget",
    ):  # fmt: skip
        reads = reader_of(settings[name])
        parser.add_argument(_flag(name), type=reads, default=getattr(defaults, name), metavar="N", help=_help(name))
    for name in ("network_gbps", "persist", "mtbf"):
        parser.add_argument(_flag(name), default=getattr(defaults, name), help=_help(name))
    parser.add_argument(
        "--iteration-secs",
        type=float,
        metavar="SECS",
        help="length of an iteration: what intervals waste is predicted",
    )
    parser.add_argument(
        "--snapshot-cost-secs",
        type=float,
        metavar="SECS",
        help="of training, that a snapshot takes; default: a guess",
    )
    parser.add_argument(
        "--seen", metavar="STORAGE", help="failures count that the job has seen which writes there, as persist has it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return the exit status.

    Raises:
        ConfigError: a job that cannot be, or nothing at ``--seen``.
        StorageError: what is there cannot be read.
    """
    settings_are_written(Writing.OPTION)
    config = Config(**{s.name: getattr(arguments, s.name) for s in fields(Config) if hasattr(arguments, s.name)})
    job = _job(arguments, config)
    modes, slots, table = plan(job, config)
    names = ",".join(modes.names) or "none"
    limit, received = unknown_limit(config.network_gbps), max(table.network.values())
    predicted = _predicted(arguments, config, job, modes, limit.secs(received))
    least = 1 if config.protect_interval == "auto" else config.protect_interval
    every = predicted.protected if predicted else config.least_interval * least
    assumed = _assumptions(arguments, job) + (list(predicted.assumed) if predicted else [])
    if predicted is None and "auto" in (
        config.interval, config.persist_interval, config.protect_interval if modes.names else 0
    ):  # fmt: skip
        assumed.append("what auto comes to is not known without the length of an iteration (--iteration-secs)")
    if arguments.json:
        head = {"ranks": job.ranks, "nodes": len(table.memory), "protect": names, "slots": slots, "assumed": assumed}
        network = {"network_limit": {**asdict(limit), "secs": limit.secs(received)}}
        cadence = {"cadence": predicted.to_json()} if predicted else {}
        print(json.dumps({**head, "protected_every": every, **network, **table.to_json(), **cadence}))
        return 0
    print(f"{job.ranks} ranks on {len(table.memory)} nodes, protect {names}, {slots} slots per arena")
    for line in table.lines():
        print(line)
    if modes.names:
        if received:
            print(f"network limit: {limit}: {limit.secs(received):.1f} s or more per protected snapshot")
        age = f"; the newest is at most {predicted.protected_age_secs:.3g} s old" if predicted else ""
        often = f"one iteration of {every}" if every > 1 else "every iteration"
        if config.protect_interval == "auto" and not predicted:
            often += " at most"
        print(f"protected is {often}{age}")
    for line in predicted.lines() if predicted else ():
        print(line)
    for text in assumed:
        print(f"assumed: {text}")
    return 0


def _predicted(
    arguments: argparse.Namespace, config: Config, job: JobShape, modes: Modes, protect_secs: float
) -> IntervalForecast | None:
    """What intervals waste; None where the length of an iteration is not known."""
    if arguments.iteration_secs is None:
        if arguments.seen is not None:
            raise ConfigError("--seen: give --iteration-secs, too: of intervals alone it changes what is predicted")
        return None
    rank_bytes = BYTES_PER_PARAM * job.params / job.ranks
    costs = Costs.guess(
        config, arguments.iteration_secs, arguments.snapshot_cost_secs, rank_bytes=rank_bytes,
        ranks=job.gpus_per_node, protect=protect_secs,
    )  # fmt: skip
    nodes = job.ranks // job.gpus_per_node
    return forecast(config, costs, nodes, nodes > 1 and bool(modes.replica or modes.peer), _seen(arguments))


def _seen(arguments: argparse.Namespace) -> FailureRecord | None:
    """What the job at ``--seen`` knows of failures. Raises ConfigError where nothing is there."""
    if arguments.seen is None:
        return None
    last = last_attempt(open_storage(snapshots_at(arguments.seen), "seen"))
    if last is None:
        raise ConfigError(f"--seen: {arguments.seen}: no job has told there what failures it has seen")
    return last.counted()


def _job(arguments: argparse.Namespace, config: Config) -> JobShape:
    for name in ("tp", "pp", "dp", "cp", "ep", "gpus_per_node"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"{_flag(name)}: {getattr(arguments, name)} is too small; the least is 1")
    replicas, ranks = arguments.dp * arguments.cp, arguments.dp * arguments.cp * arguments.tp * arguments.pp
    per_node = arguments.gpus_per_node
    if ranks > _MOST_RANKS:
        raise ConfigError(f"tp*pp*dp*cp: {ranks} ranks are too many; the most is {_MOST_RANKS}")
    if ranks % per_node:
        raise ConfigError(f"--gpus-per-node: {ranks} ranks (tp*pp*dp*cp) do not fill nodes of {per_node}")
    if replicas % arguments.ep:
        raise ConfigError(f"--ep: {arguments.ep} does not divide dp*cp = {replicas}")
    params, experts = arguments.params, arguments.expert_params
    if not ranks <= params <= 1e18:
        raise ConfigError(f"--params: {params:g} is not a size of a model; name at least one parameter per rank")
    if not 0 <= experts <= params:
        raise ConfigError(f"--expert-params: {experts:g} is not between 0 and the {params:g} of --params")
    if arguments.ep > 1 and not experts:
        raise ConfigError("--ep: experts need --expert-params, the number of parameters that are in experts")
    return JobShape(
        tp=arguments.tp,
        cp=arguments.cp,
        dp=arguments.dp,
        pp=arguments.pp,
        ep=arguments.ep,
        gpus_per_node=per_node,
        params=int(params),
        expert_params=int(experts),
        distributed=arguments.optimizer == "distributed",
        nodes_per_rack=_nodes_per_rack(arguments.racks, arguments.nodes_per_rack, ranks // per_node),
        chunk_bytes=config.chunk_bytes,
        objects_bytes=config.objects_mib << 20,
    )


def _nodes_per_rack(racks: int, per_rack: int, nodes: int) -> int:
    if racks < 0 or per_rack < 0 or (racks and per_rack):
        raise ConfigError("--racks, --nodes-per-rack: give one of them, 1 or more")
    if racks and nodes % racks:
        raise ConfigError(f"--racks: {nodes} nodes do not spread evenly over {racks} racks; use --nodes-per-rack")
    return nodes // racks if racks else per_rack


def _assumptions(arguments: argparse.Namespace, job: JobShape) -> list[str]:
    weights = (
        "fp32 weights" if arguments.dtype == "fp32" else f"fp32 masters ({arguments.dtype} weights follow from them)"
    )
    holders = "each rank holds its own part" if job.distributed else f"{job.dp * job.cp} ranks hold the same"
    return [
        f"{BYTES_PER_PARAM} bytes per parameter: {weights}, two fp32 moments; {holders}",
        "parameters lie evenly over tp and pp: layernorms, embeddings and volatile state are not counted apart",
        f"objects take all of their room, {job.objects_bytes >> 20} MiB per rank; headers {_HEADER_BYTES >> 10} KiB",
    ]


def _interval(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(name: str) -> str:
    return f"as --ftckpt-{name.replace('_', '-')}"
