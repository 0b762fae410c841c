"""The job of ``ftckpt plan``: its layout, and which ranks have which bytes of its state.

``tests/integrations/test_plan.py`` compares this to the state that the frameworks' integrations find.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ftckpt.cli.plan_names import CLUSTERS, MODELS
from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.model.manifest import MAX_CHUNKS, shard_name
from ftckpt.model.replicas import WHOLE_SHARE
from ftckpt.units import counted

# A plan takes memory per rank: a mistyped size must be an error, not an exhausted machine.
_MOST_RANKS = 1 << 20

_MASTERS_BYTES = 12
"""Per parameter: an fp32 weight (a master weight if training is in 16 bits) and two fp32 moments of Adam."""
_PURE_BYTES = 6
"""Per parameter: a 16-bit weight without a master weight, and two 16-bit moments."""
_SIZES = ("tp", "pp", "dp", "cp", "ep", "etp", "nodes", "gpus_per_node", "nodes_per_rack", "fsdp_replicas")
_COUNTS_BYTES = 4096
"""The step counters of torch's Adam, 4 bytes per tensor on every rank, for an assumed 1024 tensors."""


@dataclass(frozen=True)
class StatePartition:
    """The partition of optimizer-updated state over data-parallel ranks.

    ``option``: as users write it. ``copies``: the number of ranks with the same bytes; 1: each rank has its own part;
    0: every rank has all of it; N: N groups of ranks each have all of it, a part per rank. ``counts_bytes``: state
    that all ranks of the job replicate in any case. ``text``: a description of the state.
    """

    option: str
    copies: int
    bytes_per_param: int
    text: str
    counts_bytes: int = 0


@dataclass(frozen=True)
class JobShape:
    """The size of a job. Ranks are ordered as in Megatron: tp varies fastest, then cp, dp, pp.

    ``etp``: the tensor-parallel size of experts. Within a stage, experts are ordered with etp fastest, then ep.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    gpus_per_node: int
    params: int
    expert_params: int
    holders: StatePartition
    nodes_per_rack: int
    chunk_bytes: int
    objects_bytes: int

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def nodes(self) -> int:
        return self.ranks // self.gpus_per_node

    @cached_property
    def shards(self) -> Sequence[str]:
        """The shard name of each rank."""
        return [
            shard_name({"tp": tp, "pp": pp, "cp": cp, "dp": dp})
            for pp in range(self.pp)
            for dp in range(self.dp)
            for cp in range(self.cp)
            for tp in range(self.tp)
        ]

    @cached_property
    def _node_names(self) -> Sequence[str]:
        digits = len(str(self.nodes - 1))
        return [f"node{number:0{digits}d}" for number in range(self.nodes)]

    def node(self, rank: int) -> str:
        """The node of a rank."""
        return self._node_names[rank // self.gpus_per_node]

    def rack(self, rank: int) -> str:
        """The rack of a rank, or "" if the job has no racks."""
        return f"rack{rank // self.gpus_per_node // self.nodes_per_rack}" if self.nodes_per_rack else ""

    @property
    def state_bytes(self) -> int:
        """The state of all ranks, replicas counted once."""
        return self.holders.bytes_per_param * self.params

    @property
    def private_bytes(self) -> int:
        """The state of a rank without replicas."""
        return self.state_bytes // self.ranks if self.holders.copies == 1 else 0

    @cached_property
    def replica_sets(self) -> Mapping[tuple[int, ...], int]:
        """Bytes of replicated state, by the ranks that have it."""
        sets: dict[tuple[int, ...], int] = {}
        size, copies = self.tp * self.cp * self.dp, self.holders.copies
        if copies == 1:  # step counters, replicated on all ranks, are negligible
            return sets
        if self.holders.counts_bytes:
            sets[tuple(range(self.ranks))] = self.holders.counts_bytes
        dense, experts = self.params - self.expert_params, self.expert_params
        for stage in (range(size * pp, size * (pp + 1)) for pp in range(self.pp)):
            if copies:
                parts = size // copies
                held = [(stage[part::parts], self.params // (self.pp * parts)) for part in range(parts)]
            else:
                held = [(stage[tp :: self.tp], dense // (self.pp * self.tp)) for tp in range(self.tp)]
                # Ranks at a distance of etp * ep have the same experts.
                apart = self.etp * self.ep
                held += [(stage[place::apart], experts // (self.pp * apart)) for place in range(apart)]
            for members, params in held:
                if params:
                    ranks = tuple(members)
                    sets[ranks] = sets.get(ranks, 0) + self.holders.bytes_per_param * params
        return sets

    @cached_property
    def small_sets(self) -> frozenset[tuple[int, ...]]:
        """Replica sets too small to divide: each rank copies all of their state (see ``WHOLE_SHARE``)."""
        alone = [self.private_bytes] * self.ranks
        shared: dict[tuple[int, ...], int] = {}
        for ranks, nbytes in self.replica_sets.items():
            if len(ranks) == 1:
                alone[ranks[0]] += nbytes
            else:
                shared[ranks] = nbytes
        return frozenset(
            ranks for ranks, nbytes in shared.items() if nbytes <= min(map(alone.__getitem__, ranks)) // WHOLE_SHARE
        )

    def assumptions(self) -> list[str]:
        """Assumptions about the job's state, as texts."""
        return [
            f"{self.holders.bytes_per_param} bytes per parameter: {self.holders.text}",
            "all parameters are trained and divided evenly: layernorms, embeddings, padding, frozen parameters and "
            "mutable state are not counted separately",
        ]


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``job_of`` reads to the parser of a command."""
    for name in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{name.upper()} size (default: 1)")
    parser.add_argument("--dp", type=int, help="DP size (default: fills --nodes, else 1)")
    parser.add_argument("--etp", type=int, help="TP size of experts (default: that of --tp)")
    parser.add_argument("--cluster", choices=CLUSTERS, help="nodes by name: GPUs, host memory, network")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks per node (default: that of --cluster)")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes (default: tp*pp*dp*cp / --gpus-per-node)")
    parser.add_argument("--model", choices=MODELS, help="a model by name: parameters, layers, hidden size")
    text = "parameters of the model, such as 34b or 34e9 (default: those of --model)"
    parser.add_argument("--params", type=partial(_count, "--params"), help=text)
    count, text = partial(_count, "--expert-params"), "how many of them are in experts"
    parser.add_argument("--expert-params", type=count, metavar="P", help=text)
    parser.add_argument(
        "--optimizer", choices=("distributed", "replicated"), help="Megatron's, or DDP's (default: distributed)"
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="DeepSpeed with this stage of ZeRO")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2: all state is divided over data-parallel ranks")
    parser.add_argument(
        "--fsdp-replicas", type=int, metavar="N", help="HSDP: N groups of ranks each have the complete model"
    )
    text = "type of the weights in training (default: bf16; with FSDP: fp32, cast to bf16)"
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help=text)
    parser.add_argument("--nodes-per-rack", type=int, metavar="N", help="nodes that share a rack (default: no racks)")


def _count(flag: str, text: str) -> float:
    try:
        return counted(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is no count; give one such as 34b, 750m, 1.5t or 34e9") from None


def job_of(arguments: argparse.Namespace, config: Config) -> JobShape:
    """The job described by a command line.

    Raises:
        ConfigError: an impossible job; the message names the option and the remedy.
    """
    arguments = argparse.Namespace(**_with_names(arguments))
    for name in _SIZES:
        size = getattr(arguments, name)
        _require(size is None or size >= 1, name, f"{size} is too small; the least is 1")
    arguments.dp = _data_parallel(arguments)
    stage, per_node = arguments.tp * arguments.cp * arguments.dp, arguments.gpus_per_node
    ranks, etp = stage * arguments.pp, arguments.etp or arguments.tp
    _check_layout(arguments, stage, etp)
    _check_framework(arguments)
    _require(ranks <= _MOST_RANKS, "tp*pp*dp*cp", f"{ranks} ranks are too many; the most is {_MOST_RANKS}")
    text = f"{per_node} is more than the job's {ranks} ranks (tp*pp*dp*cp); name --nodes, --tp, --pp or a larger --dp"
    _require(per_node <= ranks, "gpus_per_node", text)
    text = f"{ranks} ranks (tp*pp*dp*cp) do not fill nodes of {per_node}; change --dp or it"
    _require(ranks % per_node == 0, "gpus_per_node", text)
    _check_parameters(arguments, ranks, etp)
    job = JobShape(
        **{name: getattr(arguments, name) for name in ("tp", "cp", "dp", "pp", "ep")},
        etp=etp,
        gpus_per_node=per_node,
        params=int(arguments.params),
        expert_params=int(arguments.expert_params),
        holders=_holders(arguments),
        nodes_per_rack=arguments.nodes_per_rack or 0,
        chunk_bytes=config.chunk_bytes,
        objects_bytes=config.objects_bytes,
    )
    # A start refuses it, too. Checked before tuples of that many chunks are built; 4: parity adds chunks later.
    chunks, most = job.state_bytes // job.ranks // job.chunk_bytes, MAX_CHUNKS // 4
    text = f"{chunks} chunks of {config.chunk_size} on each rank; the most is {most}: more ranks, or a larger "
    _require(chunks <= most, "params", f"{text}--ftckpt-chunk-size")
    return job


def _require(is_met: bool, option: str, text: str) -> None:
    """Raises ConfigError about an option, if a condition is not met."""
    if not is_met:
        name = option if "*" in option else f"--{option.replace('_', '-')}"
        raise ConfigError(f"{name}: {text}")


def _with_names(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options, with what ``--model`` and ``--cluster`` stand for where it is not given."""
    known: dict[str, Any] = {"expert_params": 0.0}
    if (model := MODELS.get(arguments.model)) is not None:
        known |= {"params": model.params, "expert_params": model.expert_params if arguments.params is None else 0.0}
        pp, tp, name = arguments.pp, max(1, arguments.tp), arguments.model
        _require(pp <= model.layers, "pp", f"{pp} is more than the {model.layers} layers of {name}")
        _require(model.hidden % tp == 0, "tp", f"{tp} does not divide {model.hidden}, the hidden size of {name}")
    if (cluster := CLUSTERS.get(arguments.cluster)) is not None:
        known["gpus_per_node"] = cluster.gpus
    known |= {name: value for name, value in vars(arguments).items() if value is not None}
    for name, by_name in (("params", "--model"), ("gpus_per_node", "--cluster")):
        _require(name in known, name, f"is missing; give it, or a name with {by_name}")
    return {**vars(arguments), **known}


def _data_parallel(arguments: argparse.Namespace) -> int:
    """``--dp``, or the size that fills ``--nodes``, or 1."""
    dp: int | None = arguments.dp
    if arguments.nodes is None:
        return 1 if dp is None else dp
    ranks, others = arguments.nodes * arguments.gpus_per_node, arguments.tp * arguments.pp * arguments.cp
    text = f"{arguments.nodes} nodes of {arguments.gpus_per_node} have {ranks} ranks"
    fault = f"{text}, which tp*pp*cp = {others} does not divide; change one of these sizes"
    _require(ranks % others == 0, "nodes", fault)
    if dp is not None and dp * others != ranks:
        remedy = f"give --dp {ranks // others}, or leave --dp or --nodes out"
        raise ConfigError(f"--nodes: {text}, but tp*pp*dp*cp is {dp * others}; {remedy}")
    return int(ranks // others)


def _check_layout(arguments: argparse.Namespace, stage: int, etp: int) -> None:
    ep = arguments.ep
    if etp == arguments.tp:
        text = f"{ep} does not divide dp*cp = {stage // etp}; use sizes that do"
    else:
        text = f"ep*etp = {ep * etp} does not divide tp*dp*cp = {stage}; use sizes that do"
    _require(stage % (ep * etp) == 0, "ep", text)


def _check_framework(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for layouts that DeepSpeed or FSDP2 does not have, or that ftckpt does not support there."""
    ways = [name for name in ("optimizer", "zero") if getattr(arguments, name) is not None]
    ways += ["fsdp"] if arguments.fsdp else []
    if len(ways) > 1:
        raise ConfigError(f"--{ways[1]}: it excludes --{ways[0]}, as both define the partition; give one of them")
    _require(arguments.fsdp_replicas is None or arguments.fsdp, "fsdp_replicas", "needs --fsdp")
    cannot: dict[str, str] = {}
    if arguments.zero is not None:
        cannot = {
            "cp": "ftckpt does not support DeepSpeed's sequence_parallel_size",
            "etp": "DeepSpeed does not divide experts",
        }
        if arguments.zero >= 2:
            cannot["pp"] = "DeepSpeed's pipelines support only ZeRO 0 and 1"
        if arguments.zero == 3 or arguments.pp > 1 or arguments.tp > 1:
            cannot["ep"] = "ftckpt supports DeepSpeed's experts without tp and pp, with ZeRO 0 to 2"
    elif arguments.fsdp:
        cannot = dict.fromkeys(("pp", "cp", "ep", "etp"), "--fsdp supports only --dp and --tp")
    for name, why in cannot.items():
        size = getattr(arguments, name) or 1
        _require(size == 1, name, f"{size} is impossible: {why}; leave it out")
    dp, copies = arguments.dp, arguments.fsdp_replicas or 1
    text = f"{copies} groups do not divide dp = {dp} into groups of two ranks or more"
    _require(dp % copies == 0 and (copies == 1 or copies < dp), "fsdp_replicas", text)


def _check_parameters(arguments: argparse.Namespace, ranks: int, etp: int) -> None:
    params, experts, parts = arguments.params, arguments.expert_params, arguments.pp * arguments.ep * etp
    text = f"{params:g} is out of range; give one parameter per rank or more, at most 1e18"
    _require(ranks <= params <= 1e18, "params", text)
    text = f"{experts:g} is not between 0 and the {params:g} of --params"
    _require(0 <= experts <= params, "expert_params", text)
    for name in ("ep", "etp"):
        has_experts = experts > 0 or (getattr(arguments, name) or 1) == 1
        _require(has_experts, name, "experts need --expert-params, the number of parameters in experts")
    text = f"{experts:g} is less than one for each of pp*ep*etp = {parts} ranks; count all experts"
    _require(experts == 0 or experts >= parts, "expert_params", text)


def _holders(arguments: argparse.Namespace) -> StatePartition:
    dtype, replicas = arguments.dtype or "bf16", arguments.dp * arguments.cp
    masters = "fp32 weights" if dtype == "fp32" else f"fp32 masters ({dtype} weights are casts of them)"
    own, alike = "each rank has its own part", f"{replicas} ranks have the same"
    if arguments.fsdp:
        copies = arguments.fsdp_replicas or 1
        held = own if copies == 1 else f"{copies} ranks have the same part"
        if arguments.dtype in ("bf16", "fp16"):
            text = f"{dtype} weights without masters, two {dtype} moments; {held}"
            return StatePartition("--fsdp", copies, _PURE_BYTES, text, _COUNTS_BYTES)
        text = f"fp32 weights (casts of a mixed precision policy are not saved), two fp32 moments; {held}"
        return StatePartition("--fsdp", copies, _MASTERS_BYTES, text, _COUNTS_BYTES)
    if arguments.zero is None:
        kind = arguments.optimizer or "distributed"
        option, divided = f"--optimizer {kind}", kind == "distributed"
    else:
        option = f"--zero {arguments.zero}"
        # Without ZeRO, a pipeline in bf16 uses DeepSpeed's BF16_Optimizer, which also divides masters.
        divided = arguments.zero > 0 or (arguments.pp > 1 and dtype == "bf16")
    text = f"{masters}, two fp32 moments; {own if divided or replicas == 1 else alike}"
    if arguments.zero in (1, 2):
        text += f" of these, and all weights (ZeRO {arguments.zero})"
    elif arguments.zero is not None:
        text += ", also of weights (ZeRO 3)" if arguments.zero else " (DeepSpeed without ZeRO)"
    return StatePartition(option, 1 if divided else 0, _MASTERS_BYTES, text)
