"""What the values of settings may be, alone and beside each other, where a range or a choice does not say it."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

from ftckpt.errors import ConfigError
from ftckpt.persist_setting import check_persist
from ftckpt.setting import flag_of

if TYPE_CHECKING:
    from ftckpt.config import Config

MODES = ("node", "replica", "copy", "peer")
"""What guards snapshots; ``parity.modes`` has what each of them is."""

NAME_RULE = "use 1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LAYOUT = re.compile(r"((tp|pp|vpp|cp|ep|etp|dp)[1-9][0-9]{0,8})+")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
_MOST_PORT = 65535


def is_name(text: str) -> bool:
    """Whether a job, a node or a rack may be called so: the names become parts of paths and of socket addresses."""
    return bool(_NAME.fullmatch(text))


def check(config: Config) -> None:
    """Refuse (ConfigError) what cannot be meant; ``setting.check_value`` has seen each value alone."""
    # One slot would lose the whole snapshot with the first byte of the next one.
    if config.slots == 1:
        raise ConfigError("--ftckpt-slots: 1 is too small; the least is 2, or 0 for as many as protection needs")
    if config.smp_cores > 1:
        raise ConfigError(
            f"--ftckpt-smp-cores: {config.smp_cores:g} is more than all cores; give a share such as 0.1"
        )
    check_protect(config.protect)
    _check_layouts(config.layouts)
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


def check_protect(protect: str) -> tuple[str, ...]:
    """The modes that ``protect`` lists; () for none.

    Raises:
        ConfigError: an unknown mode, one twice, replica beside copy, or auto or none beside others.
    """
    modes = tuple(mode.strip() for mode in protect.split(","))
    known = ("auto", "none", *MODES)
    for mode in modes:
        if mode not in known:
            raise ConfigError(f"--ftckpt-protect: {mode!r} is not one of {', '.join(known)}")
    if len(set(modes)) < len(modes):
        raise ConfigError(f"--ftckpt-protect: {protect!r} names a mode twice")
    if len(modes) > 1 and {"auto", "none"} & set(modes):
        raise ConfigError(f"--ftckpt-protect: {protect!r}: auto and none stand alone")
    if {"replica", "copy"} <= set(modes):
        raise ConfigError(f"--ftckpt-protect: {protect!r}: replica and copy guard the same bytes; choose one")
    return () if modes == ("none",) else modes


def _check_layouts(layouts: str) -> None:
    if not layouts or _FUNCTION.fullmatch(layouts):
        return
    for name in layouts.split(","):
        axes = re.findall("[a-z]+", name)
        if not _LAYOUT.fullmatch(name.strip()) or len(set(axes)) < len(axes):
            raise ConfigError(
                f"--ftckpt-layouts: {name!r} is not a layout; write axes (tp, pp, vpp, cp, ep, etp, dp), each at "
                "most once, and sizes, such as tp2pp2 or tp2pp1ep2, with commas between layouts; or module:function"
            )


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
    if config.metrics_port != "auto" and config.metrics_port > _MOST_PORT:
        raise ConfigError(f"--ftckpt-metrics-port: {config.metrics_port} is too large; the most is {_MOST_PORT}")


def _require_installed(package: str, who: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{who} needs {package}, which is not installed: pip install 'ftckpt[{extra}]'")
