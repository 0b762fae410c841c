"""Training, its SMP, a restart, a flush and a universal export need torch, numpy, xxhash and cryptography alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.cli.main import main
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = ("yaml", "obstore", "zstandard", "prometheus_client", "safetensors")
WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS!r}))  # an import of them fails\n"
DEADLINE_SECS = 150.0


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Environment of processes that have no extra, and of those that they start."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT)
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "PET_", "FTCKPT"))}
    return {**ours, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def start(bare: dict[str, str], log: Path, iterations: int, *settings: str) -> subprocess.Popen[bytes]:
    """Two ranks of the example for plain torch."""
    model = ["--wrap", "fsdp2", "--layers", "1", "--hidden", "32", "--seq", "32", "--global-batch", "4"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    script = [str(ROOT / "launch" / "train_plain.py"), *model, "--iterations", str(iterations), "--ftckpt", *settings]
    with log.open("wb") as out:
        command = [sys.executable, *launch, "--monitor-interval", "0.1", *script]
        return subprocess.Popen(command, env=bare, stdout=out, stderr=out, start_new_session=True)


def ended(job: subprocess.Popen[bytes], log: Path) -> str:
    """The output of a command that must succeed."""
    try:
        code = job.wait(DEADLINE_SECS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
    assert code == 0, log.read_text()[-5000:]
    return log.read_text()


def trainers(arena: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, int]]:
    """From ``ftckpt status``."""
    capsys.readouterr()
    if main(["status", "bare", "--json", "--arena", str(arena)]) != 0:
        return []
    return [one for node in json.loads(capsys.readouterr().out)["nodes"] for one in node["trainers"]]


def test_a_job_with_the_hard_ones_alone(
    bare: dict[str, str], tmp_path: Path, arena_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, log = tmp_path / "stored", tmp_path / "log"
    stored.mkdir()
    settings = [
        *("--ftckpt-job", "bare", "--ftckpt-arena", str(arena_root), "--ftckpt-persist", str(stored)),
        *("--ftckpt-persist-interval", "40", "--ftckpt-persist-format", "universal"),
    ]
    job = start(bare, log, 120, *settings)

    def victim() -> int | None:
        """A rank to kill, once there are snapshots; 0: the job has ended before."""
        if job.poll() is not None:
            return 0
        ranks = trainers(arena_root, capsys)
        return ranks[1]["pid"] if len(ranks) == 2 and min(one["iteration"] for one in ranks) > 20 else None

    try:
        until(lambda: victim() is not None, "snapshots", 100)
        if pid := victim():
            os.kill(pid, signal.SIGKILL)
    finally:
        printed = ended(job, log)
    assert "2 ranks: iteration" in printed and "from memory" in printed, printed
    assert (stored / "latest").read_text() == "iter_0000120\n"
    assert not list(arena_root.iterdir())


def test_a_specification_names_its_extra(bare: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: []\n")
    command = [sys.executable, "-m", "ftckpt", "convert", str(tmp_path), str(tmp_path / "out")]
    words = ["--spec", str(tmp_path / "rules.yaml"), "--to", "universal"]
    ran = subprocess.run([*command, *words], env=bare, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2 and "pip install 'ftckpt[cli]'" in ran.stderr, ran.stderr
