"""The one configuration schema behind ``--ftckpt-*`` flags, the JSON section and Python."""

from __future__ import annotations

import argparse
import importlib.util
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ftckpt.errors import ConfigError, SettingSyntax, settings_are_written
from ftckpt.persist_setting import PERSIST_FORMATS, absolute, check_persist, check_scheme
from ftckpt.setting import check_value, closest, convert, declare, flag_of, kind_of, reader_of
from ftckpt.setting_checks import NAME_RULE, check_layouts, check_protect, is_name
from ftckpt.units import rate, seconds, size

MAX_REST_SECS = 15.0
"""Maximum pause of an SMP after its work, however busy the cores are. It limits the age of a protected snapshot to
30 s if protection itself takes seconds."""

BUSY_SHARE = 0.1
"""Fraction of smp_cores that an SMP takes while no core is idle, because training then loses all of it."""

_MAX_PORT = 65535
PAGE_BYTES = 4096
"""Alignment of chunks, slot regions and blocks in files."""


def node_here(env: Mapping[str, str]) -> tuple[str, str]:
    """The default name of this node, and its source."""
    for variable in ("FTCKPT_NODE", "SLURMD_NODENAME"):
        if env.get(variable):
            return env[variable], variable
    return socket.gethostname(), "the host name (FTCKPT_NODE overrides it)"


before_error: list[Callable[[], object]] = []
"""Called before an invalid configuration is reported, to make the error end the script as one line."""


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        for prepare in before_error:
            prepare()
        raise


@dataclass(frozen=True)
class Config:
    """All user settings. Flags are ``--ftckpt-<name with dashes>``; ``enabled`` is ``--ftckpt``.

    Raises:
        ConfigError: an invalid value; the message names the field and the accepted values.
    """

    enabled: bool = declare(False, "switch ftckpt on")
    interval: int | Literal["auto"] = declare(
        "auto", "iterations between snapshots; auto: as few as overhead_budget allows", minimum=1, auto=True
    )
    slots: int = declare(
        0,
        "slots per arena; 0: two, three with protection, one more with persist",
        minimum=0,
        maximum=64,  # the limit of an arena
    )
    memory_limit: str = declare(
        "0",
        "memory limit per node for slots, parity and packages, such as 400GiB; the job does not start if it needs "
        "more; 0: available memory",
        quantity=size,
    )
    job: str = declare("", "name of the job; default: FTCKPT_JOB, or the torchrun or Slurm job id")
    node: str = declare("", "stable name of this machine; default: the host name")
    arena: str = declare("/dev/shm", "directory on a tmpfs that holds the arenas")
    chunk_size: str = declare("16MiB", "unit of copies and checksums", quantity=size, minimum="64KiB", maximum="1TiB")
    protect: str = declare(
        "auto", "protection modes: auto, none, or a list of node, replica or copy, peer, such as node,peer"
    )
    protect_interval: int | Literal["auto"] = declare(
        "auto",
        "protect every Nth snapshot; auto: as often as smp_cores allows, at least every 15 s",
        minimum=1,
        auto=True,
    )
    protect_timeout_secs: float = declare(
        60.0,
        "timeout for protecting a snapshot; extended when the network needs longer",
        minimum=0.1,
    )
    peer_group: int = declare(0, "nodes per group of peer parity; 0: up to eight", minimum=0)
    peer_losses: int = declare(
        1, "simultaneous node losses that a peer group survives: XOR for one, Reed-Solomon for more", minimum=1
    )
    network_rate: str = declare(
        "auto",
        "protection traffic limit per node and direction, such as 2GB/s or 16Gbit/s; auto: a quarter of the link; "
        "0: no limit",
        auto=True,
        quantity=rate,
    )
    smp_cores: float = declare(
        0.1,
        "fraction of a node's idle cores that its SMP may use with protect_interval auto, a tenth of that while no "
        "core is idle; 0: no limit",
        minimum=0,
    )
    smp_rate: str = declare("0", "memory read limit of the SMP, such as 5GB/s; 0: no limit", quantity=rate)
    persist: str = declare(
        "",
        "flush snapshots in the background to a directory that all nodes share, or to s3://, gs:// or az:// with "
        "bucket and folder; default: no flush",
    )
    persist_format: str = declare(
        "snapshot",
        "format on storage: ftckpt's own snapshots, or a format that other tools load, with ftckpt's snapshots in "
        "its subfolder ftckpt",
        choices=PERSIST_FORMATS,
    )
    persist_interval: int | Literal["auto"] = declare(
        500,
        "iterations between flushes to storage; auto: minimizes expected lost time from flush cost and mtbf "
        "(Young/Daly)",
        minimum=1,
        auto=True,
    )
    persist_keep: int = declare(3, "newest checkpoints to keep on storage; 0: all", minimum=0)
    persist_at_end: str = declare(
        "on",
        "flush the last snapshot when the job or its allocation ends",
        choices=("on", "off"),
    )
    persist_compress: str = declare(
        "none",
        "compression of files on storage; zstd uses one core of the node during a flush",
        choices=("none", "zstd"),
    )
    rollback_before: int = declare(
        0,
        "roll back once to the newest snapshot older than this iteration; newer ones are abandoned, not deleted; "
        "later starts with the same number resume; 0: no rollback",
        minimum=0,
    )
    restore_from: str = declare(
        "",
        "start once from this checkpoint, by the name that 'ftckpt list' prints, even if it is abandoned or "
        "doubtful; later starts with the same name resume",
    )
    persist_rate: str = declare("0", "write limit per node to storage, such as 2GB/s; 0: no limit", quantity=rate)
    smp_listen: str = declare(
        "",
        "listen address of a node's SMP, or interfaces, such as hsn0,hsn1: the first with an address, and its "
        "equals; default: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, or the route to MASTER_ADDR",
    )
    encrypt: bool = declare(False, "encrypt traffic between SMPs, which is always authenticated")
    secret_file: str = declare("", "file with the shared secret of the SMPs; default: random at each start")
    rack: str = declare("", "label of this machine's rack or other shared failure domain; default: none")
    schedule: str = declare(
        "bubble",
        "when state is copied: in pipeline bubbles, immediately in the background on a side stream or by a thread, "
        "or at the boundary while training waits",
        choices=("bubble", "stream", "thread", "sync"),
    )
    overhead_budget: float = declare(
        0.01,
        "maximum fraction of training time for snapshots; above it they become rarer. interval auto counts their "
        "whole cost, a fixed interval only the wait for copies; 0: no limit",
        minimum=0,
    )
    mtbf: str = declare(
        "auto",
        "mean time between failures that lose the snapshots in memory, such as 40h; used by persist_interval auto "
        "and as the longest time that protection may take; auto: 308 days / number of nodes, at most a week",
        auto=True,
        quantity=seconds,
        minimum="1s",
    )
    pin: str = declare(
        "on",
        "register slots with the device driver, in the background; off copies through a pinned buffer, slower: for "
        "drivers that slow down with large registered memory, as AMD says of ROCm",
        choices=("on", "off"),
    )
    versions: str = declare(
        "warn",
        "untested releases of Megatron or DeepSpeed that have all required hooks: warn and train, or refuse (tested)",
        choices=("warn", "tested"),
    )
    layouts: str = declare(
        "",
        "layouts to restart in, by preference, such as tp2pp2,tp2pp1: the first that fits the available ranks; or "
        "module:function, from the number of ranks to a layout; default: the job's own",
    )
    objects_size: str = declare(
        "4MiB",
        "space in a slot for RNG, counters, schedulers and user objects",
        quantity=size,
        minimum="4KiB",
        maximum="64GiB",
    )
    start_timeout_secs: float = declare(300.0, "timeout for other ranks at start, restore and close", minimum=1)
    replica_check_interval: int = declare(
        1000,
        "maximum snapshots until all replica bytes are compared, a sample with each; 0: compare at start only",
        minimum=0,
    )
    on_corruption: str = declare(
        "report",
        "action when replicas diverge: log it, or end the job without a restart, because no newer snapshot is known "
        "to be correct",
        choices=("report", "abort"),
    )
    on_error: str = declare(
        "continue",
        "action when a snapshot or its flush fails: log it and train on, or raise",
        choices=("continue", "raise"),
    )
    on_lost: str = declare(
        "storage",
        "action when no snapshot can be restored: resume from the checkpoint that the script loaded from storage and "
        "fail if it loaded none; fail; or start without them",
        choices=("storage", "fail", "fresh"),
    )
    events: str = declare("", "directory for event logs (JSON lines); default: none")
    metrics_port: int | Literal["auto"] = declare(
        0,
        "loopback port where each SMP serves Prometheus metrics; auto: a free one, shown by ftckpt status; 0: none",
        minimum=0,
        auto=True,
    )
    metrics_dir: str = declare(
        "", "local directory where each SMP writes metrics for a node exporter's textfile collector"
    )

    def __new__(cls, *_values: Any, **settings: Any) -> Config:
        known = [setting.name for setting in fields(cls)]
        with _reported():
            for name in settings:
                if name not in known:
                    raise ConfigError(f"unknown setting {name!r} of ftckpt; {closest(str(name), known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        with _reported():
            self._check_all()

    def _check_all(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.metadata["quantity"] is not None:  # a 0 needs no unit
                object.__setattr__(self, setting.name, str(value))
            check_value(setting, getattr(self, setting.name))
        check_scheme(self.persist)
        # Absolute, because a script may change its working directory and an SMP has its own.
        for name in ("arena", "events", "metrics_dir", "secret_file", "persist"):
            object.__setattr__(self, name, absolute(getattr(self, name)))
        _check(self)

    @property
    def least_interval(self) -> int:
        """Shortest interval in iterations."""
        return 1 if self.interval == "auto" else self.interval

    def num_slots(self, protects: bool) -> int:
        """Slots of an arena: ``slots``, or the fewest that the job needs with or without protection."""
        return self.slots or self.least_slots(protects)

    def least_slots(self, protects: bool) -> int:
        """The fewest slots with which a job can start.

        One slot is written, one holds the committed snapshot, the candidate for protection. Protection adds one for
        the protected snapshot, persist one for the snapshot being flushed. No snapshot is skipped if each is
        protected before the next but one is due.
        """
        return (3 if protects else 2) + bool(self.persist)

    @property
    def chunk_bytes(self) -> int:
        """Size of a copy and of a checksum in bytes, a multiple of a page."""
        # Whole pages: a chunk cuts no element, as pages are multiples of any element's size.
        return size(self.chunk_size) // PAGE_BYTES * PAGE_BYTES

    @property
    def memory_limit_bytes(self) -> int:
        """Memory limit of a node in bytes; 0: available memory."""
        return size(self.memory_limit)

    @property
    def objects_bytes(self) -> int:
        """Space for objects in a slot, in bytes."""
        return size(self.objects_size)

    @property
    def events_dir(self) -> Path | None:
        """Directory for event logs, or None."""
        return Path(self.events) if self.events else None

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> Config:
        """Builds from a JSON section, in which ``layouts`` may be a list and ``persist_at_end`` and ``pin`` booleans;
        errors for unknown names suggest the closest valid one."""
        if not isinstance(section, Mapping):
            raise ConfigError(f"settings of ftckpt: expected a mapping, got {type(section).__name__}")
        layouts = section.get("layouts")
        if isinstance(layouts, (list, tuple)) and all(isinstance(name, str) for name in layouts):
            section = {**section, "layouts": ",".join(layouts)}
        switches = [one.name for one in fields(cls) if one.metadata["choices"] == ("on", "off")]
        given = {name: "on" if section[name] else "off" for name in switches if isinstance(section.get(name), bool)}
        return cls(**{str(name): value for name, value in {**section, **given}.items()})

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> tuple[Config, list[str]]:
        """Splits ``argv`` into the configuration of its ``--ftckpt*`` flags and all other arguments.

        Accepts ``--ftckpt-name value`` and ``--ftckpt-name=value``. Raises ConfigError for an unknown or repeated
        flag, and for a missing or invalid value.
        """
        settings_are_written(SettingSyntax.FLAG)
        with _reported():
            settings, rest = _parsed(argv)
        return cls.of_flags(settings), rest

    @classmethod
    def of_flags(cls, settings: Mapping[str, Any]) -> Config:
        """Builds from settings that were given as flags; messages name them as flags from then on."""
        settings_are_written(SettingSyntax.FLAG, ("", *settings))
        return cls(**settings)

    def flags(self) -> list[str]:
        """The flags from which ``from_flags`` builds an equal configuration."""
        words: list[str] = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value == setting.default:
                continue
            flag = flag_of(setting.name)
            words.append(flag if value is True else f"{flag}={value}")
        return words


taken: list[str] = []
"""Flags that ``ftckpt run`` has removed from the command line of a script."""


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds every ``--ftckpt*`` flag to a parser, for its ``--help`` and its checks."""
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


def _parsed(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings in the flags of ``argv``, and all other arguments."""
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
        # If a flag follows, the value is missing; ``--flag=--value`` can set such a value.
        if text is None or (text.startswith("--") and not has_value):
            raise ConfigError(f"{flag}: needs a value")
        if not text and not setting.default:  # usually an unset variable of a shell script
            raise ConfigError(f"{flag}: the value is empty; set one, or leave the flag out")
        settings[setting.name] = convert(flag, text, setting)
    if settings and not settings.get("enabled"):
        raise ConfigError("--ftckpt is missing: the other --ftckpt-* flags have no effect without it")
    return settings, rest


def _flag_target(flag: str) -> Field[Any]:
    flags = {flag_of(setting.name): setting for setting in fields(Config)}
    if flag not in flags:
        raise ConfigError(f"unknown flag {flag}; {closest(flag, list(flags))}")
    return flags[flag]


def _check(config: Config) -> None:
    """Raises ConfigError for invalid combinations; ``setting.check_value`` has checked each value alone."""
    # With one slot, the first byte of a snapshot would destroy the committed one.
    if config.slots == 1:
        raise ConfigError("--ftckpt-slots: 1 is too small; the least is 2, or 0 for as many as protection needs")
    if config.smp_cores > 1:
        raise ConfigError(
            f"--ftckpt-smp-cores: {config.smp_cores:g} is more than all cores; set a fraction such as 0.1"
        )
    check_protect(config.protect)
    check_layouts(config.layouts)
    if config.rollback_before >= 1 << 63:
        raise ConfigError(f"--ftckpt-rollback-before: {config.rollback_before} is too large for an iteration")
    if config.restore_from and config.rollback_before:
        raise ConfigError("--ftckpt-restore-from, --ftckpt-rollback-before: set only one of them")
    for name in ("job", "node", "rack"):
        value = getattr(config, name)
        if value and not is_name(value):
            raise ConfigError(f"{flag_of(name)}: {value!r} is not a name; {NAME_RULE}")
    if not config.arena:
        raise ConfigError("--ftckpt-arena: is empty; set it to a directory on a tmpfs")
    _check_storage(config)
    _check_metrics(config)


def _check_storage(config: Config) -> None:
    check_persist(config.persist, config.persist_format)
    # The class attribute is the default.
    if not config.persist and config.persist_interval != type(config).persist_interval:
        raise ConfigError(
            "--ftckpt-persist-interval: nothing is flushed without --ftckpt-persist; set it to the storage"
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
