"""CPU affinity of background threads: the cores and the NUMA node near a device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ftckpt.events import log

if TYPE_CHECKING:
    import torch

SYSFS = Path("/sys")
T = TypeVar("T")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def near_cores(device: torch.device) -> set[int] | None:
    """The cores of the device's NUMA node that this process may use; None if it is unknown or the only one."""
    node = numa_node_of(device) if num_nodes() > 1 else None
    return cores_of_node(node) & os.sched_getaffinity(0) or None


def parse_cores(text: str) -> set[int]:
    """Parses a list such as ``0-3,8``, the format of the kernel's cpulist files.

    Raises:
        ValueError: another format, a descending range, or a number of more than five digits.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} in {text!r} is not a core or a range of cores such as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part} runs backwards")
        numbers.update(range(first, last + 1))
    return numbers


def format_cores(numbers: Set[int]) -> str:
    """Inverse of ``parse_cores``: ascending, neighbours joined into ranges."""
    ranges: list[list[int]] = []
    for core in sorted(numbers):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def numa_node_of(device: torch.device) -> int | None:
    """The NUMA node of a CUDA or ROCm device; None for other devices and if it is unknown."""
    if device.type != "cuda":
        return None
    try:
        import torch

        properties = torch.cuda.get_device_properties(device)
        # sysfs names PCI functions domain:bus:device.function, in hex. A GPU is function 0.
        address = "{:04x}:{:02x}:{:02x}.0".format(
            *(getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        )
        node = int((SYSFS / "bus/pci/devices" / address / "numa_node").read_text())
    except Exception as error:  # noqa: BLE001 - older torch, a container without sysfs: only speed is at stake
        log.debug("ftckpt: NUMA node of %s is not known: %s", device, error)
        return None
    # The kernel writes -1 if the platform does not report the node.
    return node if node >= 0 else None


def pin(wanted: Set[int] | None) -> bool:
    """Binds the calling thread, and no other one, to the cores ``wanted`` (None: any); returns whether it succeeded.

    A refusal of the operating system is only logged: the thread works on other cores as well.
    """
    if wanted is None:
        return True
    try:
        os.sched_setaffinity(0, wanted)  # Linux: 0 is the calling thread, not the process
    except (OSError, ValueError, OverflowError) as error:
        log.warning("ftckpt: cannot bind a thread to cores %s: %s", format_cores(wanted), error)
        return False
    return True


def run_on(wanted: Set[int] | None, call: Callable[[], T]) -> T:
    """Runs ``call`` on a thread bound to ``wanted``; None: on the calling thread. Passes on its result or error."""
    if wanted is None:
        return call()
    with ThreadPoolExecutor(1, "ftckpt-bound", initializer=pin, initargs=(wanted,)) as pool:
        return pool.submit(call).result()


def num_nodes() -> int:
    """The number of NUMA nodes of this machine; 0 if the kernel does not report it."""
    return len(list((SYSFS / "devices/system/node").glob("node[0-9]*")))


def cores_of_node(node: int | None) -> set[int]:
    """Cores of a NUMA node; none if the node does not exist or has only memory."""
    if node is None:
        return set()
    try:
        return parse_cores((SYSFS / f"devices/system/node/node{node}/cpulist").read_text().strip())
    except (OSError, ValueError):
        return set()
