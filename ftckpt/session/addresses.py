"""The listening addresses of this node's SMP: as configured, as set for gloo or NCCL, or discovered."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from ftckpt.errors import ConfigError
from ftckpt.memory.memory_limits import read_lines
from ftckpt.smp.link import interfaces

LOOPBACK = "127.0.0.1"
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, RFC 3849), which no machine has: they select the default route."""
_OF_CONTAINERS = ("docker", "virbr", "br-", "cni", "veth")
"""Prefixes of interfaces to local containers and virtual machines, which reach no other machine."""
_SYSFS = Path("/sys/class/net")


def machine() -> str:
    """An identifier of this machine and network namespace: processes with the same one share the loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers share the boot id of their machine, but not its network.
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def listening_address(configured: str, machines: Collection[str], env: Mapping[str, str]) -> str:
    """The comma-separated listening addresses of this node's SMP.

    Those ``configured``; else loopback, if all ``machines`` are the same; else the address of an interface that
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, or of the route to MASTER_ADDR. Interfaces of the same kind are
    added, but only named ones if any is named.

    Raises:
        ConfigError: no address was found, or the configured one is not of this machine.
    """
    there = interfaces()
    if configured:
        return _with_alike(_configured(configured), there, _exact(configured))
    if len(set(machines)) == 1:
        return LOOPBACK
    towards = _towards(env.get("MASTER_ADDR", ""))
    for variable, names in (("GLOO_SOCKET_IFNAME", _exact), ("NCCL_SOCKET_IFNAME", nccl_names)):
        wanted = env.get(variable, "")
        candidates = _usable(there, names(wanted)) if wanted else []
        if candidates:
            # With several rails, the one towards MASTER_ADDR comes first.
            first = towards if towards in candidates else candidates[0]
            return _with_alike(first, there, names(wanted))
    # ``_is_reached`` excludes loopback: Debian's hosts file maps the host name to 127.0.1.1.
    ways = (towards, _towards(socket.gethostname()), *map(_towards, _ANYWHERE))
    found = next(filter(_is_reached, ways), "") or next(iter(_usable(there, _between_machines)), "")
    if not found:
        raise ConfigError(
            "--ftckpt-smp-listen: no address was found at which other nodes can reach this one; name an address of "
            f"this machine, or an interface ({_listed(there)})"
        )
    return _with_alike(found, there, _between_machines)


def _with_alike(first: str, there: Mapping[str, list[str]], wanted: Callable[[str], bool]) -> str:
    """``first``, and addresses of the same family on the ``wanted`` interfaces of the same kind."""
    kinds = {name: _kind(name) for name, addresses in there.items() if first in addresses}
    family = ":" in first
    alike = [
        next(filter(lambda one: (":" in one) == family, addresses), "")
        for name, addresses in there.items()
        if name not in kinds and wanted(name) and _kind(name) in kinds.values()
    ]
    return ",".join([first, *filter(_is_reached, alike)])


def _kind(name: str) -> tuple[str, ...]:
    """The common properties of a machine's rails: name without digits, type and speed of the link."""
    facts = (read_lines(_SYSFS / name / fact) for fact in ("type", "speed"))
    return re.sub("[0-9]", "", name), *(" ".join(lines) for lines in facts)


def nccl_names(setting: str) -> Callable[[str], bool]:
    """A predicate for ``NCCL_SOCKET_IFNAME``: interface prefixes, or exact names after ``=``; ``^`` negates."""
    excludes = setting.startswith("^")
    rest = setting.removeprefix("^")
    exact = rest.startswith("=")
    words = [word for word in rest.removeprefix("=").split(",") if word]

    def wanted(name: str) -> bool:
        listed = name in words if exact else name.startswith(tuple(words))
        return listed != excludes

    return wanted


def _exact(setting: str) -> Callable[[str], bool]:
    return [word.strip() for word in setting.split(",")].__contains__


def _between_machines(name: str) -> bool:
    return not name.startswith(_OF_CONTAINERS)


def _usable(there: Mapping[str, Iterable[str]], wanted: Callable[[str], bool]) -> list[str]:
    """The non-loopback addresses of the ``wanted`` interfaces."""
    return [
        address for name, addresses in there.items() if wanted(name) for address in addresses if _is_reached(address)
    ]


def _configured(setting: str) -> str:
    """The first usable address of ``setting``, a comma-separated list of addresses and interfaces."""
    there = interfaces()
    problem = ""
    for word in filter(None, map(str.strip, setting.split(","))):
        addresses = there.get(word, [word])
        for address in addresses:
            problem = _refusal(address)
            if not problem:
                return address
        problem = problem or f"{word!r} has no address"
    raise ConfigError(
        f"--ftckpt-smp-listen: {setting!r} cannot be listened at here: {problem}; name an address of this machine, "
        f"or an interface ({_listed(there)})"
    )


def _refusal(address: str) -> str:
    """Why the SMP cannot listen at ``address``; empty if it can."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(target[0]).is_unspecified:
            return f"{address!r} means all addresses, and other nodes need a specific one"
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.bind(target)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _is_reached(address: str) -> bool:
    """Whether other machines may reach this one at ``address``."""
    return bool(address) and not ipaddress.ip_address(address).is_loopback


def _towards(host: str) -> str:
    """This machine's address on the route to ``host``; empty if there is none. Sends nothing."""
    return next(filter(_is_reached, _ways(host)), "") if host else ""


def _ways(host: str) -> Iterator[str]:
    try:
        # Any port: connecting a UDP socket sends nothing, but binds it to a local address.
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family, kind, _, _, target in targets:
        with suppress(OSError), closing(socket.socket(family, kind)) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
            # Link-local addresses are not routable.
            if not address.startswith("fe80:"):
                yield address


def _listed(there: Mapping[str, Iterable[str]]) -> str:
    return ", ".join(f"{name} {'/'.join(addresses) or 'without address'}" for name, addresses in there.items())
