"""Limit of protection's use of the network: as configured, or a share of the links at the SMP's addresses."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import math
import socket
import struct
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from ftckpt.memory.memory_limits import read_lines
from ftckpt.model.text import human_secs
from ftckpt.units import in_words, rate

_LEAST_SHARE = 0.05
"""Received fraction of a target from which its rate is meaningful."""
MARGIN = 4
"""Timeout of a target as a multiple of its forecast: at each end training may take up to half of the time."""
SHARE = 0.25
"""Share of a link, each way. While ranks reduce gradients training has all of it (``task_queue.NETWORK_PHASES``)."""
ASSUMED_GBITS = 25.0
"""Assumed speed of an unknown link, that of small cloud machines. A wrong guess costs time, not safety."""
_SYSFS = Path("/sys/class/net")
# linux/sockios.h and linux/if.h; a machine has a few dozen addresses.
_SIOCGIFCONF, _SIOCGIFFLAGS, _IFF_UP, _MOST_IPV4 = 0x8912, 0x8913, 0x1, 256
_IFCONF, _IFREQ = struct.Struct("iL"), struct.Struct("16s4x4s16x")
_UNUSABLE = 0x08 | 0x20 | 0x40
"""IFA_F_DADFAILED, _DEPRECATED, _TENTATIVE."""


@dataclass(frozen=True)
class NetworkLimit:
    """Limit of the bytes per second that a node receives, and that it sends, for protection (0: none), and its
    source."""

    bytes_per_sec: float
    source: str

    def secs(self, nbytes: int) -> float:
        """Minimum time for ``nbytes`` one way."""
        return nbytes / self.bytes_per_sec if self.bytes_per_sec else 0.0

    def too_slow(self, nbytes: int, mtbf_secs: float) -> tuple[str, str] | None:
        """Why ``nbytes`` cannot be transferred before the next expected failure, and the remedy; None: they can."""
        if self.secs(nbytes) <= mtbf_secs:
            return None
        often = f"memory is lost once in {human_secs(mtbf_secs)}"
        why = f"protecting a snapshot takes {human_secs(self.secs(nbytes))}, and {often}"
        return why, f"--ftckpt-network-rate {in_words(MARGIN * nbytes / mtbf_secs)}"

    def __str__(self) -> str:
        return f"{f'{in_words(self.bytes_per_sec)} each way' if self.bytes_per_sec else 'no limit'} ({self.source})"


@dataclass
class TransferForecast:
    """Forecast of the time for a target's ``due_bytes``: by ``limit``, or at the measured rate if that is lower.

    Measured from the first to the last arrival: a node that sends nothing extends no deadline.
    """

    due_bytes: int
    limit: NetworkLimit
    mtbf_secs: float
    _first: tuple[float, int] | None = None
    _received: int = -1
    _measured_secs: float = 0.0

    def begin(self, received_bytes: int) -> None:
        """Start a target; the measurement of the previous one counts until there is a new one."""
        self._first, self._received = None, received_bytes

    def note(self, received_bytes: int, now_secs: float) -> None:
        """Note the bytes received so far, of all targets together."""
        if received_bytes != self._received and self._first is not None:
            share = (received_bytes - self._first[1]) / self.due_bytes if self.due_bytes else math.inf
            if share >= _LEAST_SHARE:
                self._measured_secs = (now_secs - self._first[0]) / share
        elif received_bytes != self._received:
            self._first = now_secs, received_bytes
        self._received = received_bytes

    @property
    def wait_secs(self) -> float:
        """The timeout of a target, if it is longer than ``protect_timeout_secs``."""
        return min(MARGIN * max(self.limit.secs(self.due_bytes), self._measured_secs), self.mtbf_secs)


def network_limit(setting: str, address: str, sysfs: Path = _SYSFS) -> NetworkLimit:
    """The limit from ``Config.network_rate`` for an SMP at ``address``, one or several separated by commas."""
    if setting != "auto":
        return NetworkLimit(rate(setting), "as set")
    try:
        names = interfaces_at(address)
    except (OSError, ValueError, KeyError):
        return _assumed(f"no interface has {address}")
    if not names:
        return NetworkLimit(0.0, "loopback: nothing leaves the machine")
    speeds = [_speed_gbits(sysfs / name) for name in names]
    gbits, what = sum(filter(None, speeds)), " and ".join(names)
    if None in speeds:
        return _assumed(f"{what} does not report its speed")
    return NetworkLimit(SHARE * gbits * 1e9 / 8, f"{SHARE:.0%} of the {gbits:g} Gbit/s of {what}")


def unknown_limit(setting: str) -> NetworkLimit:
    """The same without a node, for a forecast."""
    return network_limit(setting, "") if setting != "auto" else _assumed("each node takes the speed of its link")


def interfaces_at(addresses: str) -> list[str]:
    """The names of the interfaces with these addresses, separated by commas, without loopback.

    Raises:
        OSError, ValueError: an invalid address.
        KeyError: no interface has an address.
    """
    places = (socket.getaddrinfo(one, 0, type=socket.SOCK_STREAM)[0][4][0] for one in addresses.split(","))
    hosts = [host for host in map(ipaddress.ip_address, places) if not host.is_loopback]
    there = {address: name for name, found in interfaces().items() for address in found}
    return list(dict.fromkeys(there[str(host)] for host in hosts))


def interfaces() -> dict[str, list[str]]:
    """Addresses of the interfaces that are up, by name, in the kernel's order, IPv4 first."""
    found: dict[str, list[str]] = {}
    # A sandbox may forbid the list or the socket: callers also have another way to find an address.
    with suppress(OSError), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16s24x", name.encode()))
                if struct.unpack_from("<H", reply, 16)[0] & _IFF_UP:
                    found[name] = []
        # One struct ifreq per address: a name or label, and a sockaddr_in (family, port, address).
        buffer = bytearray(_MOST_IPV4 * _IFREQ.size)
        place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        nbytes, _ = _IFCONF.unpack(fcntl.ioctl(probe, _SIOCGIFCONF, _IFCONF.pack(len(buffer), place)))
        for label, address in _IFREQ.iter_unpack(buffer[:nbytes]):
            name = label.partition(b"\0")[0].partition(b":")[0].decode()
            if name in found:
                found[name].append(socket.inet_ntoa(address))
    for line in read_lines(Path("/proc/net/if_inet6")):
        digits, _, _, scope, flags, name = line.split()
        # Link-local addresses (scope 20) are meaningless to other machines.
        if name in found and scope != "20" and not int(flags, 16) & _UNUSABLE:
            found[name].append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def _speed_gbits(interface: Path) -> float | None:
    """Gbit/s of an interface backed by hardware; None if unknown. A virtual one (veth) reports a meaningless rate."""
    if not _has_hardware(interface):
        return None
    try:
        mbits = int((interface / "speed").read_text())
    except (OSError, ValueError):  # unreadable while the link is down or if the driver has none
        return None
    # -1 or 2^32 - 1: unknown to the driver.
    return mbits / 1e3 if 0 < mbits < (1 << 32) - 1 else None


def _has_hardware(interface: Path, depth: int = 4) -> bool:
    """Whether it, or an interface below it, is a device: bonds, VLANs and bridges report their links' speed."""
    if (interface / "device").exists():
        return True
    return depth > 0 and any(_has_hardware(lower, depth - 1) for lower in interface.glob("lower_*"))


def _assumed(why: str) -> NetworkLimit:
    source = f"{SHARE:.0%} of {ASSUMED_GBITS:g} Gbit/s, assumed: {why}; set --ftckpt-network-rate"
    return NetworkLimit(SHARE * ASSUMED_GBITS * 1e9 / 8, source)
