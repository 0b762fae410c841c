"""Pods on this machine that follow a manifest: what a kubelet and a container runtime do with it, by namespaces.

A pod has a network, a host name and, where its containers share them, process ids of its own, and its volumes; a
container has a root of its own with the volumes that it mounts. Nothing else of the machine is a stand-in: commands,
probes, signals and their order are those of the manifest. It takes root.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import kill_all, mounts_of, running
from tests.support.repository import ROOT
from tests.support.waiting import until

_TOOLS = ("unshare", "nsenter", "ip", "mount", "chroot")
_PAUSE = "trap : CHLD; while :; do sleep 3600 & wait -n; done"
"""A pod's first process, which waits for orphans."""
_POLL_SECS = 0.05
_BACK_OFF_SECS = 1.0
"""Before a container starts again; a kubelet's first is 10 s."""
_LEAST_GRACE_SECS = 2
"""A kubelet leaves it to a container whose pod has used its time up."""
_EMPTY_DIR = "256m"
Json = dict[str, Any]


def may_run() -> str:
    """Why no pods can run here; empty if they can."""
    if missing := [name for name in _TOOLS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt-get install util-linux iproute2"
    tried = "mount -t tmpfs t /mnt && ip link add a0 type veth peer name a1"
    spaces = ["unshare", "-m", "-n", "-p", "-i", "-u", "-f", "sh", "-c", tried]
    if os.geteuid() or subprocess.run(spaces, capture_output=True, check=False).returncode:
        return "pods of one's own need root, mounts and networks"
    return ""


@dataclass(frozen=True)
class Provided:
    """The parts that a manifest leaves open: ``image`` maps paths in every container, ``env`` is the image's."""

    image: Mapping[str, Path]
    env: Mapping[str, str]
    claims: Mapping[str, Path]
    secrets: Mapping[str, Mapping[str, bytes]]


class Cluster:
    """A network and the names of its hosts. Use as a context."""

    def __init__(self, provided: Provided) -> None:
        self.provided = provided
        self.root = Path(tempfile.mkdtemp(prefix="ftckpt-test-pods-"))
        self.hosts = self.root / "hosts"
        self.pods: list[Pod] = []
        self._names: dict[str, str] = {}

    def __enter__(self) -> Cluster:
        if reason := may_run():
            shutil.rmtree(self.root)
            pytest.skip(reason)
        self.hosts.write_text("127.0.0.1 localhost\n")
        self._switch = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        network = f"/proc/{self._switch.pid}/ns/net"
        until(lambda: os.readlink(network) != os.readlink("/proc/self/ns/net"), "a network")
        self.call("-t", self._switch.pid, "-n", "sh", "-c", "ip link add br0 type bridge && ip link set br0 up")
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.kill()
        self._switch.kill()
        self._switch.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def call(self, *words: object) -> None:
        """Run a command in namespaces."""
        run = subprocess.run(["nsenter", *map(str, words)], capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{words}: {run.stderr}"

    def start(
        self, spec: Json, hostname: str, names: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Pod:
        """A pod, and who finds it under ``names``; ``env`` is what its controller adds to all containers."""
        pod = Pod(self, len(self.pods) + 1, spec, hostname, dict(env or {}))
        self.pods.append(pod)
        self._names |= dict.fromkeys([hostname, *names], pod.ip)
        # In place: it is mounted in all containers.
        self.hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {one}\n" for one, ip in self._names.items()))
        pod.begin()
        return pod

    def plug(self, pod: int, ip: str) -> None:
        """Join the network of a process to the others."""
        port = f"p{ip.rpartition('.')[2]}"
        link = f"ip link add {port} type veth peer name eth0 netns {pod} && ip link set {port} master br0 up"
        # The names of process ids are those of this test's namespace.
        self.call("-t", self._switch.pid, "-n", "sh", "-c", link)
        address = f"ip link set lo up && ip addr add {ip}/24 dev eth0 && ip link set eth0 up"
        self.call("-t", pod, "-n", "sh", "-c", address)

    def logs(self, last: int = 3000) -> str:
        """The output of all containers."""
        files = sorted(self.root.glob("pod*/*.log"))
        return "".join(f"\n--- {path.parent.name} {path.stem}\n{path.read_text()[-last:]}" for path in files)


@dataclass
class Container:
    """A container of a pod, and its process, which may be one after another."""

    pod: Pod
    spec: Json
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    mounts: str = ""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    def start(self) -> None:
        self.starts += 1
        script = self.pod.directory / f"{self.name}.sh"
        script.write_text(self._script())
        own_pids = [] if self.pod.spec.get("shareProcessNamespace") else ["-p", "-f"]
        command = ["nsenter", "-t", str(self.pod.pause), "-m", "-u", "-n", "-i", "-p", "unshare", "-m", *own_pids]
        with open(self.pod.directory / f"{self.name}.log", "ab") as out:
            self.process = subprocess.Popen(
                [*command, "sh", str(script)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={}
            )
        pods, self.mounts = mounts_of(self.pod.pause), ""

        def has_mounts() -> bool:
            """Mounts that are not those of the pod; afterwards they name the container."""
            found = mounts_of(self.pid) if self.pid else ""
            self.mounts = found if found not in (pods, mounts_of(os.getpid())) else ""
            return bool(self.mounts)

        until(lambda: self.process.poll() is not None or has_mounts(), f"{self.name} has mounts")

    def _script(self) -> str:
        cluster, root = self.pod.cluster, self.pod.directory / f"{self.name}.root"
        root.mkdir(exist_ok=True)
        lines = ["set -e", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "mount --make-rprivate /"]
        lines += [f"mount -t tmpfs -o mode=755 image {root}", f"cd {root}"]
        for name in ("bin", "sbin", "lib", "lib64"):
            lines += [f"cp -P /{name} ."] if Path(f"/{name}").is_symlink() else _bound(f"/{name}", f"/{name}")
        lines += _bound("/usr", "/usr") + _bound("/etc", "/etc") + _bound("/dev", "/dev") + _bound("/sys", "/sys")
        lines += [line for where, what in cluster.provided.image.items() for line in _bound(str(what), where)]
        lines += ["mkdir proc", "mount -t proc proc ./proc", "mkdir -m 1777 -p tmp"]
        lines += ["mount -t tmpfs -o size=64m shm ./dev/shm", f"mount --bind {cluster.hosts} ./etc/hosts"]
        for mount in self.spec.get("volumeMounts", []):
            what = self.pod.volumes[mount["name"]] / mount.get("subPath", ".")
            what.mkdir(exist_ok=True)
            lines += _bound(str(what), mount["mountPath"])
        env = self.env()
        words = [expanded(word, env) for word in (*self.spec.get("command", []), *self.spec.get("args", []))]
        settings = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in env.items())])
        inner = f"cd {shlex.quote(self.spec.get('workingDir', '/'))} && exec {shlex.join(words)}"
        return "\n".join([*lines, f"exec chroot . {settings} sh -c {shlex.quote(inner)}", ""])

    def env(self) -> dict[str, str]:
        """The environment: the image's and the manifest's."""
        env = {"HOME": "/root", "HOSTNAME": self.pod.hostname, **self.pod.cluster.provided.env}
        of_the_api = {"status.podIP": self.pod.ip, "metadata.name": f"{self.pod.hostname}-x"}
        for one in self.spec.get("env", []):
            source = one.get("valueFrom")
            env[one["name"]] = of_the_api[source["fieldRef"]["fieldPath"]] if source else expanded(one["value"], env)
        return env | self.pod.env

    @property
    def pid(self) -> int:
        """The first process; 0 where none runs."""
        if self.process is None or self.process.poll() is not None:
            return 0
        depth = 1 if self.pod.spec.get("shareProcessNamespace") else 2
        pids = [self.process.pid]
        for _ in range(depth):
            with suppress(OSError):
                pids = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split() or [0]
        return int(pids[0])

    def pids(self) -> list[int]:
        """All its processes, as its cgroup would have them: known by its mounts."""
        return [pid for pid in running() if self.mounts and mounts_of(pid) == self.mounts]

    def probe(self, what: str) -> bool:
        """Run a probe's command in the container."""
        probe = self.spec[what]
        settings = [f"{name}={value}" for name, value in self.env().items()]
        command = ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-i", "-p", "-r", "-w", "env", "-i", *settings]
        command += probe["exec"]["command"]
        with suppress(subprocess.TimeoutExpired):
            secs = probe.get("timeoutSeconds", 1)
            return subprocess.run(command, capture_output=True, timeout=secs, check=False).returncode == 0
        return False

    def ended(self) -> int | None:
        """The exit code, once all its processes have ended."""
        if self.process is None or self.process.poll() is None:
            return None
        self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL, for all of it."""
        kill_all(self.pids, 20)
        self.mounts = ""  # another container's may get this name
        if self.process is not None:
            self.process.wait(20)

    def stop(self, deadline: float) -> bool:
        """SIGTERM for its first process, SIGKILL for all at the deadline; whether it has ended before that."""
        with suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, signal.SIGTERM)
        deadline = max(deadline, time.monotonic() + _LEAST_GRACE_SECS)
        while self.ended() is None and self.process is not None:
            if time.monotonic() >= deadline:
                self.kill()
                return False
            time.sleep(_POLL_SECS)
        return True


class Pod:
    """The processes and the volumes of a pod, until ``delete`` or ``kill``."""

    def __init__(self, cluster: Cluster, number: int, spec: Json, hostname: str, env: dict[str, str]) -> None:
        self.cluster, self.spec, self.hostname, self.env = cluster, spec, hostname, env
        self.directory, self.ip = cluster.root / f"pod{number}", f"10.77.0.{number}"
        self.sidecars = [Container(self, one) for one in spec["initContainers"]]
        assert all(one.spec["restartPolicy"] == "Always" for one in self.sidecars), "a kubelet would await their ends"
        self.main = [Container(self, one) for one in spec["containers"]]
        self.volumes: dict[str, Path] = {}
        self.problem = ""
        self.has_succeeded = False
        self._leaving = threading.Event()
        self._killed: list[str] = []

    def container(self, name: str) -> Container:
        (found,) = (one for one in (*self.sidecars, *self.main) if one.name == name)
        return found

    def begin(self) -> None:
        self.directory.mkdir()
        spaces = ["--mount", "--uts", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pause = shlex.join(["hostname", self.hostname]) + f"; exec bash -c {shlex.quote(_PAUSE)}"
        self._unshare = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", pause], env={"PATH": os.environ["PATH"]}, stderr=subprocess.DEVNULL
        )
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        until(lambda: children.read_text().strip() != "", "a first process")
        self.pause = int(children.read_text())
        until(lambda: Path(f"/proc/{self.pause}/cmdline").read_bytes().startswith(b"bash"), "its host name")
        self.cluster.plug(self.pause, self.ip)
        for volume in self.spec.get("volumes", []):
            self._provide(volume)
        self._kubelet = threading.Thread(target=self._keep, daemon=True)
        self._kubelet.start()

    def _provide(self, volume: Json) -> None:
        where = self.volumes[volume["name"]] = self.directory / "volumes" / volume["name"]
        where.mkdir(parents=True)
        if "emptyDir" in volume:
            assert (volume["emptyDir"].get("medium") == "Memory") == ("sizeLimit" in volume["emptyDir"])
            # In the pod's own mounts: it goes with the pod.
            self.cluster.call(
                "-t", self.pause, "-m", "mount", "-t", "tmpfs", "-o", f"size={_EMPTY_DIR}", "tmpfs", where
            )
        elif "secret" in volume:
            for name, word in self.cluster.provided.secrets[volume["secret"]["secretName"]].items():
                # As a kubelet lays them: a link to a directory of one version.
                (data := where / "..data").mkdir(exist_ok=True)
                (data / name).write_bytes(word)
                (data / name).chmod(volume["secret"]["defaultMode"])
                (where / name).symlink_to(f"..data/{name}")
        else:
            self.volumes[volume["name"]] = self.cluster.provided.claims[volume["persistentVolumeClaim"]["claimName"]]

    def inside(self, volume: str) -> Path:
        """A volume as the pod sees it, from here."""
        return Path(f"/proc/{self.pause}/root{self.volumes[volume]}")

    def _keep(self) -> None:
        try:
            for container in self.sidecars:
                self._start_sidecar(container)
            for container in self.main:
                container.start()
            while not self._leaving.wait(_POLL_SECS):
                self._look()
        except Exception as error:  # noqa: BLE001 - told to the test
            self.problem = f"{type(error).__name__}: {error}"

    def _start_sidecar(self, container: Container) -> None:
        container.start()
        probe = container.spec["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            if self._leaving.wait(probe["periodSeconds"]) or container.probe("startupProbe"):
                return
        raise AssertionError(f"{container.name} does not start")

    def _look(self) -> None:
        for container in (*self.sidecars, *self.main):
            code = container.ended()
            restarts = code or container in self.sidecars
            if code is not None and restarts and not self._leaving.wait(_BACK_OFF_SECS):
                container.start()
        if all(container.ended() == 0 for container in self.main):
            self._leaving.set()
            self._end_sidecars(time.monotonic() + self.grace_secs)
            self.has_succeeded = True

    @property
    def grace_secs(self) -> int:
        return int(self.spec.get("terminationGracePeriodSeconds", 30))

    def delete(self) -> list[str]:
        """End the pod as a kubelet does; names of the containers that had to be killed at the deadline."""
        self._leaving.set()
        self._kubelet.join(60)
        deadline = time.monotonic() + self.grace_secs
        for container in self.main:
            if not container.stop(deadline):
                self._killed.append(container.name)
        self._end_sidecars(deadline)
        self.kill()
        return self._killed

    def _end_sidecars(self, deadline: float) -> None:
        for container in reversed(self.sidecars):
            if not container.stop(deadline):
                self._killed.append(container.name)

    def kill(self) -> None:
        """All processes at once; the memory goes with them."""
        self._leaving.set()
        with suppress(ProcessLookupError):
            os.kill(self.pause, signal.SIGKILL)
        self._kubelet.join(60)
        for container in (*self.sidecars, *self.main):
            container.kill()
        self._unshare.wait(20)


def expanded(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` as a kubelet expands it: what is not there stays."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)


def python_image() -> dict[str, Path]:
    """The image of this Python, at its places, and of the launch scripts where manifests have them."""
    prefixes = {Path(sys.prefix), Path(sys.base_prefix), ROOT}
    tops = {path for path in prefixes if not path.is_relative_to("/usr")}
    return {**{str(path): path for path in tops}, "/opt/ftckpt": ROOT}


def _bound(what: str, where: str) -> list[str]:
    """Lines of a script that mount a directory below the root that is being made."""
    return [f"mkdir -p .{where}", f"mount --rbind {shlex.quote(what)} .{where}"]
