"""The one configuration schema behind ``--ftckpt-*`` flags, the JSON section and Python."""

from __future__ import annotations

import argparse
import importlib.util
import socket
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ftckpt.errors import ConfigError, SettingSyntax, settings_are_written
from ftckpt.persist_setting import PERSIST_FORMATS, absolute, check_persist, check_scheme
from ftckpt.setting import check_value, closest, convert, declare, flag_of, kind_of, reader_of
from ftckpt.setting_checks import NAME_RULE, check_layouts, check_protect, is_name
from ftckpt.units import rate, seconds, size

MAX_REST_SECS = 15.0
"""The longest pause of an SMP after its work, however busy the cores are. With it a protected snapshot is at most
30 s old where protection itself takes seconds."""

BUSY_SHARE = 0.1
"""The part of smp_cores that an SMP takes where no core idles: training misses all of that."""

_MAX_PORT = 65535
PAGE_BYTES = 4096
"""What chunks, regions of slots and blocks in files begin on multiples of."""


def node_here(env: Mapping[str, str]) -> tuple[str, str]:
    """What this node is called where nobody has configured a name, and what says so."""
    for variable in ("FTCKPT_NODE", "SLURMD_NODENAME"):
        if env.get(variable):
            return env[variable], variable
    return socket.gethostname(), "the host name (FTCKPT_NODE overrides it)"


@dataclass(frozen=True)
class Config:
    """Everything a user can set. Flags are ``--ftckpt-<name with dashes>``; ``enabled`` is ``--ftckpt``.

    Raises:
        ConfigError: an impossible value; the text names the field and what is accepted.
    """

    enabled: bool = declare(False, "switch ftckpt on")
    interval: int | Literal["auto"] = declare(
        "auto", "iterations between snapshots; auto: as few as overhead_budget allows", minimum=1, auto=True
    )
    slots: int = declare(
        0,
        "slots per arena; 0: two, three with protection, and one more where snapshots go to storage",
        minimum=0,
        maximum=64,  # that an arena can have
    )
    memory_limit: str = declare(
        "0",
        "most memory of a node that slots, parity and packages may take, such as 400GiB: with protect auto modes are "
        "fewer where they fit so, and else the job does not start; 0: what there is",
        quantity=size,
    )
    job: str = declare("", "name of the job; default: FTCKPT_JOB, or the torchrun or Slurm job id")
    node: str = declare("", "stable name of this machine; default: the host name")
    arena: str = declare("/dev/shm", "directory on a tmpfs that holds the arenas")
    chunk_size: str = declare(
        "16MiB", "size of a copy and of a checksum", quantity=size, minimum="64KiB", maximum="1TiB"
    )
    protect: str = declare(
        "auto", "what guards snapshots: auto, none, or a list of node, replica or copy, peer, such as node,peer"
    )
    protect_interval: int | Literal["auto"] = declare(
        "auto",
        "snapshots between two that are protected; auto: as few as smp_cores allows, and one in 15 s at least",
        minimum=1,
        auto=True,
    )
    protect_timeout_secs: float = declare(
        60.0,
        "wait for the protection of a snapshot before it is given up; longer where the network needs longer",
        minimum=0.1,
    )
    peer_group: int = declare(0, "nodes per group of peer parity; 0: up to eight", minimum=0)
    peer_losses: int = declare(
        1, "nodes of a group that may be lost together: by XOR, or by Reed-Solomon where they are several", minimum=1
    )
    network_rate: str = declare(
        "auto",
        "what a node receives, and as much that it sends, for protection, such as 2GB/s or 16Gbit/s; auto: a quarter "
        "of its link; 0: no limit",
        auto=True,
        quantity=rate,
    )
    smp_cores: float = declare(
        0.1,
        "share of a node's idle cores that its SMP may take with protect_interval auto, and a tenth of it where none "
        "idles: it protects snapshots so seldom; 0: any",
        minimum=0,
    )
    smp_rate: str = declare("0", "what the SMP reads of the node's memory, such as 5GB/s; 0: no limit", quantity=rate)
    persist: str = declare(
        "",
        "where snapshots go in the background: a directory that all nodes share, or s3://, gs:// or az:// with "
        "bucket and folder; default: nowhere",
    )
    persist_format: str = declare(
        "snapshot",
        "what lies there: snapshots as ftckpt restores them, or, with these in its folder ftckpt, what others load",
        choices=PERSIST_FORMATS,
    )
    persist_interval: int | Literal["auto"] = declare(
        500,
        "iterations between two snapshots that go to storage; auto: as many as lose least, by what a flush costs and "
        "by mtbf (Young/Daly)",
        minimum=1,
        auto=True,
    )
    persist_keep: int = declare(3, "snapshots that stay on storage, the newest; 0: all", minimum=0)
    persist_at_end: str = declare(
        "on",
        "whether a job that ends, or whose allocation does, brings its last snapshot to storage",
        choices=("on", "off"),
    )
    persist_compress: str = declare(
        "none",
        "what makes files on storage smaller, at the cost of a core of the node while one is written: none, or zstd",
        choices=("none", "zstd"),
    )
    rollback_before: int = declare(
        0,
        "roll back once to the newest snapshot older than this iteration; newer ones are abandoned, not deleted, and "
        "later starts with the same number resume; 0: resume from the newest",
        minimum=0,
    )
    restore_from: str = declare(
        "",
        "start once from this checkpoint on storage or in memory, by the name that 'ftckpt list' prints, also from "
        "an abandoned or doubtful one; "
        "later starts with the same name resume",
    )
    persist_rate: str = declare("0", "what a node writes to storage, such as 2GB/s; 0: no limit", quantity=rate)
    smp_listen: str = declare(
        "",
        "address at which a node's SMP answers others, or interfaces, such as hsn0,hsn1: the first that has one, and "
        "those like it; default: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, or the way to MASTER_ADDR",
    )
    encrypt: bool = declare(False, "seal what SMPs of different nodes send each other, not only authenticate it")
    secret_file: str = declare("", "file with the secret that SMPs share; default: drawn anew at each start")
    rack: str = declare("", "label of this machine's rack, or other failure domain of several nodes; default: none")
    schedule: str = declare(
        "bubble",
        "when state is copied: in the pipeline's idle windows, at once in the background on a side stream or by "
        "a plain thread, or all of it at the boundary while training waits",
        choices=("bubble", "stream", "thread", "sync"),
    )
    overhead_budget: float = declare(
        0.01,
        "share of training that snapshots may cost before they become rarer: all that they cost with interval auto, "
        "with a number what training waits for copies; 0: any",
        minimum=0,
    )
    mtbf: str = declare(
        "auto",
        "mean time between failures of the job that lose its snapshots in memory, such as 40h, for persist_interval "
        "auto, and the most that protection may take; auto: 308 days over the number of nodes, a week at most",
        auto=True,
        quantity=seconds,
        minimum="1s",
    )
    pin: str = declare(
        "on",
        "whether slots are registered with the device's driver, beside training; else copies go through a pinned "
        "buffer, slower: for drivers to which much registered memory does harm, as AMD says of ROCm",
        choices=("on", "off"),
    )
    versions: str = declare(
        "warn",
        "a release of Megatron or DeepSpeed that ftckpt was not tested with, and that has all hooks and fields that "
        "ftckpt needs: it trains with a warning, or, with tested, it is refused",
        choices=("warn", "tested"),
    )
    layouts: str = declare(
        "",
        "layouts to restart in, the most wanted first, such as tp2pp2,tp2pp1: the first that fits the ranks there "
        "are is taken; or a function of their number, module:function; default: the job's own",
    )
    objects_size: str = declare(
        "4MiB",
        "room for RNG, counters, schedulers and user objects in a slot",
        quantity=size,
        minimum="4KiB",
        maximum="64GiB",
    )
    start_timeout_secs: float = declare(
        300.0, "longest wait for the other ranks at start, restore and close", minimum=1
    )
    replica_check_interval: int = declare(
        1000,
        "most snapshots until all bytes of replicas are compared, a sample with each; 0: compare at start only",
        minimum=0,
    )
    on_corruption: str = declare(
        "report",
        "what it leads to that ranks which held the same bits come to differ: it is told, and with abort the job "
        "ends and is not started again, since nothing newer than the last proof is known to be good",
        choices=("report", "abort"),
    )
    on_error: str = declare(
        "continue",
        "what a failed snapshot, or one that does not come to storage, does to training",
        choices=("continue", "raise"),
    )
    on_lost: str = declare(
        "storage",
        "what a restart does when snapshots were lost: go on from the checkpoint that the script has loaded from "
        "storage, and fail if it has loaded none; fail; or go on without them, from the beginning if none was loaded",
        choices=("storage", "fail", "fresh"),
    )
    events: str = declare("", "directory for event logs (JSON lines); default: none")
    metrics_port: int | Literal["auto"] = declare(
        0,
        "port of the loopback interface at which each SMP serves metrics to Prometheus; auto: one that is free, "
        "which ftckpt status tells; 0: none",
        minimum=0,
        auto=True,
    )
    metrics_dir: str = declare(
        "", "local directory of each node to which its SMP writes metrics, for a node exporter's textfile collector"
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.metadata["quantity"] is not None:  # a 0 needs no unit
                object.__setattr__(self, setting.name, str(value))
            check_value(setting, getattr(self, setting.name))
        check_scheme(self.persist)
        # A script may go to another directory, and an SMP has one of its own.
        for name in ("arena", "events", "metrics_dir", "secret_file", "persist"):
            object.__setattr__(self, name, absolute(getattr(self, name)))
        _check(self)

    @property
    def least_interval(self) -> int:
        """Iterations between snapshots where nothing makes them rarer."""
        return 1 if self.interval == "auto" else self.interval

    def num_slots(self, protects: bool) -> int:
        """Slots of an arena: ``slots``, or as many as the job needs, which ``protects`` its snapshots or does not."""
        return self.slots or self.least_slots(protects)

    def least_slots(self, protects: bool) -> int:
        """The fewest with which a job can start; no snapshot is skipped where each is protected before the one after
        the next is due.

        One is written and one is whole, which is the target; one more holds the protected snapshot, and one more what
        is on its way to storage.
        """
        return (3 if protects else 2) + bool(self.persist)

    @property
    def chunk_bytes(self) -> int:
        """Size of a copy and of a checksum in bytes, a multiple of a page."""
        # Whole pages: a chunk cuts no element, as pages are multiples of any element's size.
        return size(self.chunk_size) // PAGE_BYTES * PAGE_BYTES

    @property
    def memory_limit_bytes(self) -> int:
        """What snapshots may take of a node; 0: what there is."""
        return size(self.memory_limit)

    @property
    def objects_bytes(self) -> int:
        """Room for objects in a slot."""
        return size(self.objects_size)

    @property
    def events_dir(self) -> Path | None:
        """Directory for event logs, or None."""
        return Path(self.events) if self.events else None

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> Config:
        """Build from a JSON section, where ``layouts`` may be a list, and ``persist_at_end`` and ``pin``
        a truth value; unknown names are errors that name the closest valid one."""
        if not isinstance(section, Mapping):
            raise ConfigError(f"settings of ftckpt: expected a mapping, got {type(section).__name__}")
        known = [setting.name for setting in fields(cls)]
        for name in section:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r} of ftckpt; {closest(str(name), known)}")
        layouts = section.get("layouts")
        if isinstance(layouts, (list, tuple)) and all(isinstance(name, str) for name in layouts):
            section = {**section, "layouts": ",".join(layouts)}
        switches = [one.name for one in fields(cls) if one.metadata["choices"] == ("on", "off")]
        given = {name: "on" if section[name] else "off" for name in switches if isinstance(section.get(name), bool)}
        section = {**section, **given}
        return cls(**section)

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> tuple[Config, list[str]]:
        """Split ``argv`` into the configuration of its ``--ftckpt*`` flags and all the other arguments.

        Accepts ``--ftckpt-name value`` and ``--ftckpt-name=value``. Raises ConfigError for an unknown or
        repeated flag, a missing or a wrong value.
        """
        settings_are_written(SettingSyntax.FLAG)
        settings: dict[str, Any] = {}
        rest: list[str] = []
        has_flags = any(argument.startswith("--ftckpt") for argument in argv)
        arguments = iter(argv if has_flags else [*taken, *argv])
        for argument in arguments:
            flag, has_value, value = argument.partition("=")
            if not flag.startswith("--ftckpt"):
                rest.append(argument)
                continue
            setting = _flag_target(flag)
            if setting.name in settings:
                raise ConfigError(f"{flag}: given twice")
            if kind_of(setting) is bool:
                if has_value:
                    raise ConfigError(f"{flag}: takes no value")
                settings[setting.name] = True
                continue
            text = value if has_value else next(arguments, None)
            # A flag in the place of the value: the value was forgotten. ``--flag=--value`` says that it is meant.
            if text is None or (text.startswith("--") and not has_value):
                raise ConfigError(f"{flag}: needs a value")
            if not text and not setting.default:  # of a variable that a script has not set, mostly
                raise ConfigError(f"{flag}: the value is empty; leave it out where none is meant")
            settings[setting.name] = convert(flag, text, setting)
        if settings and not settings.get("enabled"):
            raise ConfigError("--ftckpt is missing: the other --ftckpt-* flags mean nothing without it")
        return cls.of_flags(settings), rest

    @classmethod
    def of_flags(cls, settings: Mapping[str, Any]) -> Config:
        """Of settings that were given as flags, which texts name from here on."""
        settings_are_written(SettingSyntax.FLAG, ("", *settings))
        return cls(**settings)

    def flags(self) -> list[str]:
        """The flags that build this configuration; ``from_flags`` of them gives an equal one."""
        words: list[str] = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value == setting.default:
                continue
            flag = flag_of(setting.name)
            words.append(flag if value is True else f"{flag}={value}")
        return words


taken: list[str] = []
"""Flags that ``ftckpt run`` has taken off the command line of a script."""


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every ``--ftckpt*`` flag to a parser, so that its ``--help`` and its checks know them."""
    group = parser.add_argument_group("ftckpt")
    for setting in fields(Config):
        # argparse formats help with %.
        text = setting.metadata["help"].replace("%", "%%")
        choices = setting.metadata["choices"] or None
        if kind_of(setting) is bool:
            group.add_argument(flag_of(setting.name), action="store_true", help=text)
            continue
        group.add_argument(
            flag_of(setting.name), type=reader_of(setting), default=setting.default, choices=choices, help=text
        )
    given = Config.from_flags(())[0] if taken else Config()
    parser.set_defaults(**{flag_of(s.name)[2:].replace("-", "_"): getattr(given, s.name) for s in fields(given)})
    return parser


def _flag_target(flag: str) -> Field[Any]:
    flags = {flag_of(setting.name): setting for setting in fields(Config)}
    if flag not in flags:
        raise ConfigError(f"unknown flag {flag}; {closest(flag, list(flags))}")
    return flags[flag]


def _check(config: Config) -> None:
    """Refuse (ConfigError) what cannot be meant; ``setting.check_value`` has seen each value alone."""
    # One slot would lose the whole snapshot with the first byte of the next one.
    if config.slots == 1:
        raise ConfigError("--ftckpt-slots: 1 is too small; the least is 2, or 0 for as many as protection needs")
    if config.smp_cores > 1:
        raise ConfigError(
            f"--ftckpt-smp-cores: {config.smp_cores:g} is more than all cores; give a share such as 0.1"
        )
    check_protect(config.protect)
    check_layouts(config.layouts)
    if config.rollback_before >= 1 << 63:
        raise ConfigError(f"--ftckpt-rollback-before: {config.rollback_before} is too large for an iteration")
    if config.restore_from and config.rollback_before:
        raise ConfigError("--ftckpt-restore-from, --ftckpt-rollback-before: give one of them")
    for name in ("job", "node", "rack"):
        value = getattr(config, name)
        if value and not is_name(value):
            raise ConfigError(f"{flag_of(name)}: {value!r} is not a name; {NAME_RULE}")
    if not config.arena:
        raise ConfigError("--ftckpt-arena: no directory is named; name one on a tmpfs")
    _check_storage(config)
    _check_metrics(config)


def _check_storage(config: Config) -> None:
    check_persist(config.persist, config.persist_format)
    # From the class: a value that was not given.
    if not config.persist and config.persist_interval != type(config).persist_interval:
        raise ConfigError(
            "--ftckpt-persist-interval: nothing comes to storage without --ftckpt-persist, which names it"
        )
    if config.persist_compress == "zstd":
        _require_installed("zstandard", "--ftckpt-persist-compress: zstd", "storage")


def _check_metrics(config: Config) -> None:
    if config.metrics_port or config.metrics_dir:
        flag = "--ftckpt-metrics-port" if config.metrics_port else "--ftckpt-metrics-dir"
        _require_installed("prometheus_client", f"{flag}: this", "metrics")
    if config.metrics_port != "auto" and config.metrics_port > _MAX_PORT:
        raise ConfigError(f"--ftckpt-metrics-port: {config.metrics_port} is too large; the most is {_MAX_PORT}")


def _require_installed(package: str, who: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{who} needs {package}, which is not installed: pip install 'ftckpt[{extra}]'")
