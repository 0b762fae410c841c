"""Whether snapshots come right from the device that is here: by a job's own copier, in the worst legal orders."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ftckpt.capture.affinity import cores_of_node, format_cores, num_nodes, numa_node_of
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.commands.check_busy_device import LOOKS
from ftckpt.commands.check_queues import QUEUES
from ftckpt.commands.check_thorough import NOT_THOROUGH, Thorough, look_thoroughly
from ftckpt.commands.device_bench import FLIGHT_SECS, Bench, NoWindow, all_have, bench_on, meet
from ftckpt.commands.findings import FAILED, PASSED, SKIPPED, WARNED, Finding, attempt
from ftckpt.errors import in_words
from ftckpt.model.text import human
from ftckpt.windows.clock import make_clock

_AREA = "device"
_ROUNDS = 5
_LAUNCHES_SECS, _BETWEEN_SECS = 0.5, 0.0005
"""For which kernels are launched alone, and between two of them: as often as a training thread does."""
_REDUCED_BYTES = 16 << 20
"""Of an all-reduce: about a bucket of gradients."""
_LEAST_SHARE = 0.8
"""Of the rate of a plain copy."""
_MOST_SLOWER = 1.2
"""Of the time of compute beside copies: REFT measured 17 to 38 % beside a side stream."""


def is_here() -> bool:
    """Whether this process sees a device."""
    return torch.cuda.is_available()


def look_at_device(
    arena: Path, nbytes: int, thorough: Thorough = NOT_THOROUGH, ranks: dist.ProcessGroup | None = None
) -> Iterator[Finding]:
    """Each finding as it comes; collective, where there are ``ranks``, which all-reduce over what training would.

    Args:
        nbytes: of the state that is copied.
        thorough: of copies in random orders behind that.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    # A launcher may have each rank see its own device alone.
    device = torch.device("cuda", local % torch.cuda.device_count()) if is_here() else torch.device("cpu")
    known = attempt(_AREA, "device", partial(_known, device))
    yield known
    if known.state == PASSED:
        yield attempt(_AREA, "NUMA", partial(_near, device))
    with ExitStack() as stack:
        bench = known if known.state == FAILED else _bench(stack, arena, device, nbytes)
        # Before anything is looked at together: a rank without would leave the others waiting for it.
        complete = ranks is None or all_have(isinstance(bench, Bench))
        if isinstance(bench, Bench):
            yield from _look(bench, thorough, partial(_beside_collectives, ranks if complete else None, complete))
        elif bench is not known:
            yield bench
    meet(thorough.secs)


def _known(device: torch.device) -> Finding:
    """Which device it is, and that this process can use it."""
    name = "CPU: none is here"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    stack = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    queues = os.environ.get(QUEUES, "as the driver has it")
    text = f"{name}, {stack}, torch {torch.__version__}, {QUEUES} {queues}"
    return Finding(_AREA, "device", PASSED if device.type == "cuda" else SKIPPED, text)


def _near(device: torch.device) -> Finding:
    """Whether this rank runs where its device is attached: across NUMA nodes copies and launches take longer."""
    name, own, node = "NUMA", os.sched_getaffinity(0), numa_node_of(device)
    there = cores_of_node(node)
    if num_nodes() < 2 or node is None or not there:
        text = "one NUMA node" if num_nodes() < 2 else "no cores are known to be near the device"
        return Finding(_AREA, name, SKIPPED, text)
    text = f"cores {format_cores(own)} of this rank, {format_cores(there)} near the device on NUMA node {node}"
    figures = {"cores": float(len(own)), "near_cores": float(len(own & there))}
    if not own & there:
        how = (
            f"bind the rank to NUMA node {node}: torchrun --numa-binding node, srun --gpu-bind=closest, or "
            f"numactl --cpunodebind={node}"
        )
        return Finding(_AREA, name, WARNED, f"{text}: not one is", how, figures)
    return Finding(_AREA, name, PASSED, text, figures=figures)


def _bench(stack: ExitStack, arena: Path, device: torch.device, nbytes: int) -> Bench | Finding:
    """What copies are made on until ``stack`` closes, or why there is none."""
    try:
        return stack.enter_context(bench_on(arena, make_clock(device), nbytes))
    except Exception as error:  # noqa: BLE001 - whatever a driver or a kernel says is what the user must see
        text = f"no {human(nbytes)} of state and a slot for it at {arena}: {in_words(error)}"
        how = "name less by --size, enlarge /dev/shm (a container's: --shm-size), or free the device's memory"
        return Finding(_AREA, "copies", FAILED, text, how)


def _look(bench: Bench, thorough: Thorough, collectives: Callable[[Bench], Finding]) -> Iterator[Finding]:
    looks: tuple[tuple[str, Callable[[Bench], Finding]], ...] = (
        ("registration", _registered), ("exact copies", _exact), ("fence", _fenced), ("late windows", _late),
        ("copies while written", _overwritten), *LOOKS, ("graph capture", _captured), ("rate", _rate),
        ("compute beside copies", _beside), ("collectives beside copies", collectives),
    )  # fmt: skip
    for name, look in looks:
        yield attempt(_AREA, name, partial(look, bench))
    if thorough.secs:
        yield attempt(_AREA, "random orders", partial(look_thoroughly, bench, *thorough))


def _registered(bench: Bench) -> Finding:
    """By the copier, beside a thread that launches kernels as training does."""
    if not bench.clock.on_device:
        return Finding(_AREA, "registration", SKIPPED, "a CPU's memory needs none")
    assert isinstance(bench.copier, DeviceCopier)
    with _launching(bench.clock.device) as alone:
        time.sleep(_LAUNCHES_SECS)
    begin = time.perf_counter()
    with _launching(bench.clock.device) as beside:
        is_through = bench.copier.pin_now(FLIGHT_SECS)
    secs = time.perf_counter() - begin
    rate = bench.slot_bytes / secs
    figures = {"secs": secs, "longest_launch_secs": max(beside), "longest_alone_secs": max(alone)}
    if not is_through:
        text = f"the slot is not pinned after {secs:.0f} s"
        return Finding(_AREA, "registration", FAILED, text, "see the driver's log", figures)
    if not bench.copier.reaches(bench.slot):
        text = "the driver refused to pin the slot: copies are staged, slower, and wait for the device"
        how = "allow more locked memory: ulimit -l unlimited; of a container --ulimit memlock=-1"
        return Finding(_AREA, "registration", WARNED, text, how, figures)
    figures["bytes_per_sec"] = rate
    longest = (
        f"the longest launch of a kernel meanwhile took {max(beside) * 1e3:.1f} ms, alone {max(alone) * 1e3:.1f}"
    )
    return Finding(_AREA, "registration", PASSED, f"pins {rate / 1e9:.1f} GB/s; {longest}", figures=figures)


@contextmanager
def _launching(device: torch.device) -> Iterator[list[float]]:
    """Seconds that each launch of a small kernel takes the host, on a thread of its own."""
    launches, over, small = [0.0], threading.Event(), torch.zeros(64, device=device)
    small.add_(1)  # the first launch loads the kernel

    def launch() -> None:
        with torch.cuda.device(device):
            while not over.is_set():
                begin = time.perf_counter()
                small.add_(1)
                launches.append(time.perf_counter() - begin)
                over.wait(_BETWEEN_SECS)

    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    try:
        yield launches
    finally:
        over.set()
        thread.join(FLIGHT_SECS)


def _compared(name: str, differing: int, text: str) -> Finding:
    if differing:
        return Finding(
            _AREA, name, FAILED, f"{text}: {differing} bytes differ", "do not use ftckpt here; tell us, with the JSON"
        )
    return Finding(_AREA, name, PASSED, text)


def _exact(bench: Bench) -> Finding:
    wanted = bench.on_host()
    for _ in range(_ROUNDS):
        bench.wait(bench.flight())
    return _compared("exact copies", bench.differing(wanted), "every byte of a snapshot is that of the device")


def _fenced(bench: Bench) -> Finding:
    """The optimizer writes right behind the fence, which on a device is a wait of its own."""
    differing = 0
    for _ in range(_ROUNDS):
        wanted = bench.on_host()
        flight = bench.flight()
        if not bench.copier.fence(flight, FLIGHT_SECS):
            raise TimeoutError(f"the fence did not come to pass: {flight.error}")
        bench.write()
        bench.wait(flight)
        bench.synchronize()
        differing += bench.differing(wanted)
    return _compared("fence", differing, "what is written behind the fence is in no snapshot")


def _late(bench: Bench) -> Finding:
    """All copies still wait for their window when the fence comes."""
    wanted, windows = bench.on_host(), NoWindow()
    flight = bench.flight(windows)
    windows.held.wait(FLIGHT_SECS)
    if not bench.copier.fence(flight, FLIGHT_SECS):
        raise TimeoutError(f"the fence did not come to pass: {flight.error}")
    bench.write()
    bench.wait(flight)
    bench.synchronize()
    return _compared("late windows", bench.differing(wanted), "copies that come late hold the optimizer up, not tear")


def _overwritten(bench: Bench) -> Finding:
    """The counterproof: without a fence bytes that were written over do show, so that the others prove something."""
    wanted, windows = bench.on_host(), NoWindow()
    flight = bench.flight(windows)
    windows.held.wait(FLIGHT_SECS)
    bench.write()
    bench.synchronize()
    flight.hurry.set()
    bench.wait(flight)
    if bench.differing(wanted):
        return Finding(_AREA, "copies while written", PASSED, "without a fence it shows: these checks can fail")
    return Finding(
        _AREA, "copies while written", FAILED, "a write below a copy did not show: the checks above prove nothing",
        "tell us, with the JSON",
    )  # fmt: skip


def _captured(bench: Bench) -> Finding:
    if not bench.clock.on_device:
        return Finding(_AREA, "graph capture", SKIPPED, "no device")
    wanted, graph, windows = bench.on_host(), torch.cuda.CUDAGraph(), NoWindow()
    work = torch.ones(1024, device=bench.clock.device)
    flight = bench.flight(windows)
    windows.held.wait(FLIGHT_SECS)
    with torch.cuda.graph(graph):  # which waits for all of the device first
        work.add_(1)
        flight.hurry.set()
        bench.wait(flight)
    graph.replay()
    bench.synchronize()
    return _compared("graph capture", bench.differing(wanted), "copies go on beside the capture of a graph")


def _rate(bench: Bench) -> Finding:
    """Against a plain copy of the same bytes into the same kind of memory; both warm."""
    ours, plain = [], []
    whole = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bench.state])
    place = torch.empty(whole.numel(), dtype=torch.uint8, pin_memory=bench.clock.on_device)
    for _ in range(_ROUNDS):
        bench.synchronize()
        begin = time.perf_counter()
        bench.wait(bench.flight())
        ours.append(whole.numel() / (time.perf_counter() - begin))
        begin = time.perf_counter()
        place.copy_(whole, non_blocking=True)
        bench.synchronize()
        plain.append(whole.numel() / (time.perf_counter() - begin))
    rate, limit = statistics.median(ours), statistics.median(plain)
    text = f"{rate / 1e9:.1f} GB/s; a plain copy {limit / 1e9:.1f} GB/s ({rate / limit:.0%})"
    figures = {"bytes_per_sec": rate, "plain_bytes_per_sec": limit}
    if rate < _LEAST_SHARE * limit:
        return Finding(_AREA, "rate", WARNED, text, "see whether the rank's cores are near the device", figures)
    return Finding(_AREA, "rate", PASSED, text, figures=figures)


def _beside(bench: Bench) -> Finding:
    """Matrix products, alone and while snapshots are copied."""
    width = 2048 if bench.clock.on_device else 512  # a product of which many fit into a flight
    left = torch.randn(width, width, device=bench.clock.device)
    return _slower(bench, "compute beside copies", "compute takes", lambda: left.mm(left))


def _beside_collectives(ranks: dist.ProcessGroup | None, complete: bool, bench: Bench) -> Finding:
    """All-reduces over NCCL, RCCL or gloo: as many on every rank."""
    name = "collectives beside copies"
    if ranks is None:
        alone = "alone: start it on all ranks, as torchrun does"
        return Finding(_AREA, name, SKIPPED, alone if complete else "there is a rank without copies")
    device = bench.clock.device if bench.clock.on_device else torch.device("cpu")
    numbers = torch.ones(_REDUCED_BYTES // 4, device=device)

    def fewest(units: int) -> int:
        number = torch.tensor([units], device=device)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=ranks)
        return int(number.item())

    return _slower(
        bench, name, "all-reduces take", lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=ranks), fewest
    )


def _slower(
    bench: Bench, name: str, what: str, work: Callable[[], object], agree: Callable[[int], int] = int
) -> Finding:
    """By how much longer ``work`` takes while snapshots are copied; ``agree`` on how often it is done at a time.

    That is as often as a flight lasts: what is done behind the flight takes as long as ever, and hides what it costs.
    """

    def secs(units: int) -> float:
        begin = time.perf_counter()
        for _ in range(units):
            work()
        bench.finish()
        return time.perf_counter() - begin

    secs(1)
    unit_secs = secs(_ROUNDS) / _ROUNDS
    units = agree(max(1, int(_flight_secs(bench) / unit_secs)))
    alone, beside = [], []
    for _ in range(_ROUNDS):
        alone.append(secs(units))
        flight = bench.flight()
        beside.append(secs(units))
        bench.wait(flight)
    ratio = statistics.median(beside) / statistics.median(alone)
    text, figures = f"{what} {ratio:.2f} times as long while copies run", {"ratio": ratio, "times": units}
    if ratio > _MOST_SLOWER:
        how = "windows keep copies out of it (--ftckpt-schedule bubble); --ftckpt-copy-rate bounds them"
        return Finding(_AREA, name, WARNED, text, how, figures)
    return Finding(_AREA, name, PASSED, text, figures=figures)


def _flight_secs(bench: Bench) -> float:
    """Of one flight alone."""
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        bench.wait(bench.flight())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
