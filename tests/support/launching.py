"""Jobs of real ranks that scripts of ``launch/`` start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftckpt.memory.directory import SMP_LOCK_NAME, list_arenas
from ftckpt.memory.locks import holder_of
from ftckpt.persist.backend import open_storage
from tests.support.event_logs import read_events
from tests.support.processes import free_ports, kill_all, started_with
from tests.support.repository import ROOT
from tests.support.storages import committed
from tests.support.waiting import until

OWNER_VAR = "FTCKPT_TEST_OWNER"
DEADLINE_SECS = 240.0
ITERATIONS = 60


class Launched:
    """Scripts of ``launch/`` that run together, with real ranks, and what these write.

    Args:
        here: for logs; all processes have it in their environment.
        arena: a directory on a tmpfs.
        training: the training script and its arguments, but for logs and ftckpt's.
    """

    def __init__(self, here: Path, arena: Path, training: Sequence[str]) -> None:
        self.here, self.arena, self.log = here, arena, here / "losses.jsonl"
        self.scripts: list[subprocess.Popen[bytes]] = []
        self._num_started = 0
        self.common = [
            *(*training, "--iterations", str(ITERATIONS), "--log-file", str(self.log)),
            *("--ftckpt", "--ftckpt-interval", "1", "--ftckpt-overhead-budget", "0"),
            *("--ftckpt-events", str(here / "events")),
        ]
        self.training = [*self.common, "--ftckpt-arena", str(arena)]
        launchers = ("TORCH", "PET_", "SLURM", "FTCKPT", "DS_")
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(launchers)},
            "PYTHONPATH": str(ROOT),
            "FTCKPT_PYTHON": sys.executable,
            "FTCKPT_DEVICE": "tests.standin:cpu",
            "FTCKPT_LAUNCHER": "torch.distributed.run",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            OWNER_VAR: str(here),
        }

    def start(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        with open(self.here / f"script{self._num_started}.log", "wb") as out:
            script = subprocess.Popen(
                command, env={**self.env, **env}, stdout=out, stderr=out, start_new_session=True, cwd=self.here
            )
        self._num_started += 1
        self.scripts.append(script)
        return script

    def events(self, rank: int, name: str) -> list[dict[str, Any]]:
        return read_events(self.here / "events", name, of=f"rank{rank}")

    def restored(self) -> list[int]:
        """Iterations from which attempts resumed."""
        return [event["iteration"] for event in self.events(0, "restored") if event["iteration"]]

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait for ``condition`` and return its value; fails when a script has ended before."""
        found: list[Any] = []

        def came() -> Any:
            ended = [script.returncode for script in self.scripts if script.poll() is not None]
            found.append(condition())
            assert found[-1] or not ended, f"ended with {ended} before {what}\n{self.output()}"
            return found[-1]

        until(came, lambda: f"{what}\n{self.output()}", DEADLINE_SECS)
        return found[-1]

    def kill_rank(self, rank: int) -> None:
        """SIGKILL, once it has three snapshots."""
        snapshots = self.wait_for("three snapshots", lambda: self.events(rank, "snapshot")[2:])
        os.kill(snapshots[-1]["pid"], signal.SIGKILL)

    def finish(self, secs: float = DEADLINE_SECS) -> None:
        until(lambda: all(script.poll() is not None for script in self.scripts), self.output, secs)
        codes = [script.returncode for script in self.scripts]
        assert codes == [0] * len(codes), f"ended with {codes}\n{self.output()}"

    def output(self, last: int = 3000) -> str:
        """The last characters that each script has written."""
        return "\n".join(path.read_text()[-last:] for path in sorted(self.here.glob("script*.log")))

    def stop_and_save(self, script: subprocess.Popen[bytes], storage: Path) -> int:
        """SIGTERM for the script alone, with four snapshots or more; returns the iteration that is flushed."""
        self.wait_for("snapshots", lambda: self.events(1, "snapshot")[3:])
        os.kill(script.pid, signal.SIGTERM)
        assert script.wait(120) == 143, self.output()
        line = self.output().splitlines()[-1]
        reached = re.fullmatch(rf"node .*: iteration (\d+) is at {storage}, after .* s", line)
        assert reached, self.output()
        assert int(reached[1]) >= 3 and committed(open_storage(str(storage))) == [int(reached[1])]
        self.scripts.remove(script)
        return int(reached[1])

    def check_went_on(self, restarts: int = 1) -> None:
        """From a snapshot, through all iterations; an iteration that was trained twice had the same loss twice."""
        restored = self.restored()
        assert len(restored) == restarts and min(restored) >= 2, restored
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        losses: dict[int, str] = {}
        for row in rows:
            assert losses.setdefault(row["iteration"], row["loss_hex"]) == row["loss_hex"]
        # A rank may be killed between the boundary of an iteration, whose snapshot counts, and its row.
        assert {*range(1, ITERATIONS + 1)} - {*losses} <= {*restored} and max(losses) == ITERATIONS
        assert not list(self.arena.iterdir()), "an ended job left something behind"

    def pids(self, node: str = "") -> list[int]:
        """Processes of this job that run, SMPs among them; of one node if it is named."""
        return started_with(f"{OWNER_VAR}={self.here}", *([f"FTCKPT_NODE={node}"] if node else []))

    def kill(self, node: str = "") -> list[int]:
        """SIGKILL what runs, of one node if it is named, until nothing does; returns the process ids."""
        return sorted(kill_all(lambda: self.pids(node), DEADLINE_SECS))

    def stop(self) -> None:
        """Kill what is left, known by a variable that only this test has in its environment."""
        for script in self.scripts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
            script.wait()
        self.kill()


class Nodes(Launched):
    """A job of torchrun agents. Each is a simulated node with an arena directory of its own, and can be lost."""

    def __init__(self, here: Path, arena: Path, training: Sequence[str], *, count: int, nproc: int) -> None:
        super().__init__(here, arena, training)
        self.count, self.nproc, self.final, self.job = count, nproc, here / "final", f"test-{os.getpid()}"
        self.common += ["--dump-final", str(self.final)]
        self._endpoint = f"127.0.0.1:{free_ports(1)}"
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def node_dir(self, node: str) -> Path:
        """The directory of a node's arenas; no two nodes share one."""
        return self.arena / node / f"ftckpt-{self.job}" / node

    def start_node(self, node: str, address: str, *options: str, prefix: Sequence[str] = (), **env: str) -> None:
        """The first node that is started hosts the rendezvous. Ranks go by ``address``, in the order of the text."""
        (self.arena / node).mkdir()
        words = ["--job", self.job, "--nodes", str(self.count), "--nproc", str(self.nproc), "--runner", "none"]
        words += ["--endpoint", self._endpoint, "--node-rank", str(self._num_started), "--restarts", "4"]
        words += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"]
        words += ["--torchrun-arg", f"--local-addr={address}", *options]
        ours = ["--ftckpt-arena", str(self.arena / node)]
        command = [*prefix, "bash", str(ROOT / "launch" / "torchrun.sh"), *words, *self.common, *ours]
        self._agents[node] = self.start(command, FTCKPT_NODE=node, **env)

    def meet_at(self, host: str) -> None:
        """Set the address of the rendezvous, if not on loopback."""
        self._endpoint = f"{host}:{free_ports(1)}"

    def smp(self, node: str) -> int | None:
        """The process id of the node's SMP."""
        return holder_of(self.node_dir(node) / SMP_LOCK_NAME)

    def protected(self, since: float = 0.0) -> list[int]:
        """Snapshots that rank 0 reported as protected after ``since`` (epoch seconds)."""
        return [event["iteration"] for event in self.events(0, "protected") if event["time"] > since]

    def lose(self, node: str) -> set[str]:
        """SIGKILL all of a node at once: agent, ranks and SMP; its memory is lost. Returns the shards it had."""
        shards = {path.name.rpartition(".")[0] for path in list_arenas(self.node_dir(node))}
        agent, smp = self._agents.pop(node), self.smp(node)
        agent.kill()
        killed = self.kill(node)
        agent.wait()
        self.scripts.remove(agent)
        assert smp in killed and len(killed) >= 1 + self.nproc, f"{node}: only {killed} ran; its SMP was {smp}"
        shutil.rmtree(self.arena / node)
        return shards

    def rebuilt(self) -> dict[str, set[str]]:
        """The sources of each shard that was reconstructed."""
        found: dict[str, set[str]] = {}
        for rank in range(self.count * self.nproc):
            for event in self.events(rank, "rebuilt"):
                found.update({shard: set(event["sources"]) for shard in event["shards"]})
        return found

    def check_equal(self, losses: Sequence[str], finals: Sequence[dict[str, str]]) -> None:
        """Every loss that was logged and the final state of each rank are those of an undisturbed run."""
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        assert [row["loss_hex"] for row in rows] == [losses[row["iteration"] - 1] for row in rows]
        assert {row["iteration"] for row in rows} == set(range(1, len(losses) + 1))
        for rank, final in enumerate(finals):
            assert json.loads((self.final / f"rank{rank}.json").read_text()) == final, f"rank {rank}"

    def check_nothing_left(self) -> None:
        """No process, and nothing in the memory of nodes that were not lost."""
        until(lambda: not self.pids(), "no process is left")
        left = [path for root in self.arena.iterdir() for path in root.iterdir()]
        assert left == [], "an ended job left something behind"


def deepspeed_config(folder: Path) -> Path:
    """The configuration of the example with pipeline stages, for tests on a CPU."""
    section = json.loads((ROOT / "configs" / "deepspeed_zero1_pp.json").read_text())
    section["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own is compiled first, which takes minutes
    section["gradient_accumulation_steps"] = 2
    section["ftckpt"] = {"enabled": True}  # flags of the tests give the rest
    config = folder / "deepspeed.json"
    config.write_text(json.dumps(section))
    return config
