"""The delay of training's bursts by transfers of SMPs on a link between two nodes, and the rate of connections.

    python benchmarks/network.py --json FILE

Two network namespaces simulate two nodes, with links of a limited rate between them (tbf). Their trainers exchange
bytes three times an iteration: parameters during the forward, gradients during the backward, and
the rest in the phase ``tail``. Meanwhile SMPs protect one snapshot after the other, mirrored from node to node, at a
quarter of the link. A burst ends when the slower side has finished. Status 3: no namespaces can be made.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import conclude, environment, parser_of, print_table, scratch
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.smp import peers, traffic
from ftckpt.smp.channel import Deadlines, Delivery, Trust
from ftckpt.smp.chunk_source import AHEAD
from ftckpt.smp.link import SHARE
from ftckpt.smp.peers import Fetch, Peers
from ftckpt.smp.requests import ChunkRequest
from ftckpt.smp.server import Server
from ftckpt.smp.task_queue import TaskQueue
from tests.support.smp_nodes import SECRET, Node, Seen, describe

NODES = ("n0", "n1")
PORT, BURST_PORT = 20007, 20009
SPACES = tuple(f"ftckpt-{os.getpid()}-{side}" for side in range(2))
BURSTS = (("forward", 0.05, 0.10), ("backward", 0.45, 0.25), ("tail", 0.9, 0.05))
"""Phase, start and length of each at the full rate of the link, in iterations."""
MODES = ("off", "always", "phases", "profile")
GOAL = 0.02
NO_NAMESPACES = 3
PIECE, CHUNK, PROBE_BYTES = 64 << 10, 512 << 10, 4 << 20
PROBE = SnapshotId(bytes(16), 0)
MBITS = 200.0


class Sizes(NamedTuple):
    """Iterations that count, and seconds of each; chunks of half a MiB, the state of a node; runs."""

    iterations: int
    secs: float
    chunks: int
    runs: int


FULL = Sizes(20, 1.0, 24, 3)
QUICK = Sizes(4, 0.5, 4, 1)


def addresses(side: int, links: int) -> list[str]:
    return [f"10.213.{link}.{side + 1}" for link in range(links)]


@contextmanager
def two_nodes(links: int, mbits: float) -> Iterator[None]:
    """Two network namespaces with ``links`` between them. Raises CalledProcessError if they cannot be made."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        for space in SPACES:
            ip("netns", "add", space)
            stack.callback(subprocess.run, ["ip", "netns", "delete", space], check=False)
            ip("-n", space, "link", "set", "lo", "up")
        for link in range(links):
            end = f"bench{link}"
            ip("-n", SPACES[0], "link", "add", end, "type", "veth", "peer", "name", end, "netns", SPACES[1])
            for side, space in enumerate(SPACES):
                ip("-n", space, "address", "add", f"{addresses(side, links)[link]}/24", "dev", end)
                ip("-n", space, "link", "set", end, "up")
                limit = ["tbf", "rate", f"{mbits}mbit", "burst", "256kb", "latency", "20ms"]
                shape = ["tc", "-n", space, "qdisc", "add", "dev", end, "root", *limit]
                subprocess.run(shape, check=True, capture_output=True)
        yield


def start(side: int, part: str, *words: Any) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", SPACES[side], sys.executable, __file__, "--part", part, *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def trainer(side: str, node_dir: str, shape: str) -> None:
    """The bursts of one node; prints the seconds of each."""
    of: dict[str, Any] = json.loads(shape)
    number, nbytes_per_sec, length = int(side), of["mbits"] * 1e6 / 8, of["secs"]
    pulse, took = Heartbeat.open(Path(node_dir), 0, number), dict[str, list[float]]()
    sock = _meet(number)
    for iteration in range(of["iterations"]):
        begun = time.monotonic()
        for phase, at, share in BURSTS:
            pulse.beat(iteration, "forward")
            time.sleep(max(0.0, begun + at * length - time.monotonic()))
            pulse.beat(iteration, phase if of["tells"] else "forward")
            took.setdefault(phase, []).append(_exchange(sock, int(share * length * nbytes_per_sec)))
        pulse.beat(iteration, "backward")
        time.sleep(max(0.0, begun + length - time.monotonic()))
    print(json.dumps(took), flush=True)


def _meet(side: int) -> socket.socket:
    host = addresses(0, 1)[0]
    if side == 0:
        with socket.create_server((host, BURST_PORT)) as listening:
            return listening.accept()[0]
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, BURST_PORT), 5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _exchange(sock: socket.socket, nbytes: int) -> float:
    """Sends and receives so many bytes; the slower of both directions counts."""
    sock.settimeout(60)
    sock.sendall(b"!")  # both are here
    sock.recv(1)
    begun, data = time.monotonic(), bytes(PIECE)

    def send() -> None:
        for at in range(0, nbytes, PIECE):
            sock.sendall(data[: min(PIECE, nbytes - at)])

    thread = threading.Thread(target=send)
    thread.start()
    left, buffer = nbytes, bytearray(PIECE)
    while left:
        left -= sock.recv_into(buffer, min(left, PIECE))
    thread.join()
    return time.monotonic() - begun


def smp(node_dir: str, described: str, host: str) -> None:
    """The SMP of one node, until its input ends; prints the bytes that it received."""
    tasks = TaskQueue(Path(node_dir), Seen())
    server = Server({}, find=tasks.service.find, events=Seen())
    server.listen(host, Trust(bytes.fromhex(SECRET)), PORT)
    tasks.configure(json.loads(Path(described).read_text()))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.is_set():
        if not tasks.step(time.monotonic() + 0.05):
            time.sleep(0.005)
    print(json.dumps({"received_bytes": tasks.status()["received_bytes"]}), flush=True)
    os._exit(0)


def run(mode: str, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """One job: its bursts, and how many snapshots were protected meanwhile."""
    sides = range(2)
    with ExitStack() as stack:
        nodes = [
            Node(folder, name, [side], 2, chunks=sizes.chunks, chunk_bytes=CHUNK) for side, name in enumerate(NODES)
        ]
        for node in nodes:
            stack.callback(node.close)
        smps = [_start_smp(stack, side, nodes, mode) for side in sides] if mode != "off" else []
        learning = traffic.ITERATIONS + 5 if mode == "profile" else 0
        shape = {"iterations": learning + sizes.iterations, "mbits": MBITS, "secs": sizes.secs}
        text = json.dumps({**shape, "tells": mode == "phases"})
        trainers = [start(side, "trainer", side, nodes[side].dir, text) for side in sides]
        for one in trainers:
            stack.callback(one.kill)
        protected = _protect(nodes, trainers) if smps else 0
        took = [json.loads(one.communicate(timeout=60)[0]) for one in trainers]
        reports = [json.loads(one.communicate("", timeout=60)[0]) for one in smps]
    lengths = [
        sum(max(took[side][phase][at] for side in sides) for phase, *_ in BURSTS)
        for at in range(learning, learning + sizes.iterations)
    ]
    minutes = shape["iterations"] * sizes.secs / 60
    return {"mode": mode, "burst_secs": lengths, "protected_per_min": protected / minutes, "smps": reports}


def _start_smp(stack: ExitStack, side: int, nodes: Sequence[Node], mode: str) -> subprocess.Popen[str]:
    own = addresses(side, 1)[0]
    described = describe(nodes[side], nodes, Modes(peer=True), {}, network_rate=f"{SHARE * MBITS}Mbit/s")
    described["peers"] = {NODES[other]: [addresses(other, 1)[0], PORT] for other in range(2)}
    if mode == "profile":
        described["address"] = own  # without it nobody knows what counts its bytes
    path = nodes[side].dir.parent / f"{NODES[side]}.json"
    path.write_text(json.dumps(described))
    started = start(side, "smp", nodes[side].dir, path, own)
    stack.callback(started.kill)
    return started


def _protect(nodes: Sequence[Node], trainers: Sequence[subprocess.Popen[str]]) -> int:
    """Protects one snapshot after the other while trainers run; returns how many."""
    number = 0
    while all(one.poll() is None for one in trainers):
        number += 1
        for node in nodes:
            node.snapshot(number % 3, number)
            node.target(number)
        while not all(node.covered(number) for node in nodes):
            if any(one.poll() is not None for one in trainers):
                return number - 1
            time.sleep(0.02)
        for node in nodes:
            node.protected(number)
    return number


def giver(hosts: str) -> None:
    """Serves one chunk until its input ends."""
    data = os.urandom(PROBE_BYTES)

    @contextmanager
    def find(_request: Any) -> Iterator[Delivery | None]:
        yield Delivery(memoryview(data), xxhash.xxh3_64_intdigest(data))

    Server({}, find=find, events=Seen()).listen(hosts, Trust(bytes.fromhex(SECRET)), PORT)
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


def receiver(hosts: str, connections: str, mib: str) -> None:
    """Fetches ``mib`` MiB, as many chunks at a time as an SMP; prints bytes per second."""
    peers.CONNECTIONS, left, waiting = int(connections), (int(mib) << 20) // PROBE_BYTES, list[Fetch]()
    asking = Peers(Deadlines(10, 60, 60))
    asking.configure({NODES[0]: (hosts, PORT)}, Trust(bytes.fromhex(SECRET)))
    begun = time.monotonic()
    while left or waiting:
        while left and len(waiting) < AHEAD:
            waiting.append(asking.fetch(NODES[0], ChunkRequest(PROBE, "probe", 0), PROBE_BYTES))
            left -= 1
        fetch = waiting.pop(0)
        fetch.done.wait(60)
        assert fetch.data is not None, fetch.error
    print((int(mib) << 20) / (time.monotonic() - begun), flush=True)


def bytes_per_sec(links: int, connections: int, mib: int) -> float:
    hosts = ",".join(addresses(0, links))
    gives = start(0, "giver", hosts)
    try:
        assert gives.stdout is not None and gives.stdout.readline() == "ready\n"
        return float(start(1, "receiver", hosts, connections, mib).communicate(timeout=120)[0])
    finally:
        gives.communicate("", timeout=60)


def delay_of(case: Mapping[str, Any], alone: Mapping[str, Any]) -> float:
    """The median delay of all bursts of an iteration, of 1."""
    return statistics.median(case["burst_secs"]) / statistics.median(alone["burst_secs"]) - 1


def measure(sizes: Sizes) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Runs of each mode, which take turns, and rates by links and connections.

    Raises:
        CalledProcessError, FileNotFoundError: no namespaces can be made.
    """
    cases: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(sizes.runs):
        for mode in MODES:
            with scratch(Path("/dev/shm")) as [folder], two_nodes(1, MBITS):
                cases[mode].append(run(mode, folder, sizes))
    rates = []
    for links in (1, 2):
        with scratch(), two_nodes(links, 5 * MBITS):
            for connections in (1, 2, 4):
                rate = bytes_per_sec(links, connections, 64)
                rates.append({"links": links, "connections": connections, "bytes_per_sec": rate})
    return cases, rates


def row_of(mode: str, runs: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a mode."""
    delays = [delay_of(case, other) for case, other in zip(runs, alone, strict=True)]
    return {
        "mode": mode,
        "slow_down": delays,
        "protected_per_min": statistics.median(case["protected_per_min"] for case in runs),
    }


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables and writes the file; returns the exit code."""
    args, about = parser_of(__doc__).parse_args(argv), environment(argv, "benchmarks/network.py")
    try:
        cases, rates = measure(QUICK if args.quick else FULL)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"no namespaces: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
        return NO_NAMESPACES
    rows = [row_of(mode, runs, cases["off"]) for mode, runs in cases.items()]
    spreads = [
        f"{statistics.median(values):.1%} ({min(values):.1%} to {max(values):.1%})"
        for values in (row["slow_down"] for row in rows)
    ]
    lines = [
        (row["mode"], spread, f"{row['protected_per_min']:.0f}") for row, spread in zip(rows, spreads, strict=True)
    ]
    print_table(("bursts", "slower (min-max)", "protected a minute"), lines)
    named = [(f"{one['links']} x {one['connections']}", f"{one['bytes_per_sec'] / 1e9:.3f}") for one in rates]
    print_table(("links x connections", "GB/s"), named)
    worst = statistics.median(rows[-1]["slow_down"])
    missed = [f"bursts take {worst:.1%} longer with a profile; the goal is {GOAL:.0%}"] if worst > GOAL else []
    content = {"benchmark": "network", "environment": about, "cases": cases, "rows": rows, "rates": rates}
    return conclude(args.json, content, missed, args.quick)


PARTS = {"trainer": trainer, "smp": smp, "giver": giver, "receiver": receiver}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        PARTS[sys.argv[2]](*sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
