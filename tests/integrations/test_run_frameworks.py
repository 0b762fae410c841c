"""``ftckpt run`` with scripts of three frameworks as they are: ranks that are killed come back from memory."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import Launched, deepspeed_config
from tests.support.repository import ROOT
from tests.support.running import READY

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SMALL = ("--layers", "2", "--hidden", "32", "--seq", "32")
SCRIPTS = {
    "megatron": ("train_gpt.py", "--pp", "2", *SMALL, "--heads", "2"),
    "deepspeed": ("train_deepspeed.py", "--pp", "2", *SMALL),
    "plain": ("train_plain.py", *SMALL, "--heads", "2"),
}


@pytest.fixture(params=SCRIPTS)
def launched(request: pytest.FixtureRequest, tmp_path: Path, arena_root: Path) -> Iterator[Launched]:
    name = "megatron.core" if request.param == "megatron" else request.param
    if request.param != "plain" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script, *arguments = SCRIPTS[request.param]
    if request.param == "deepspeed":
        arguments += ["--deepspeed_config", str(deepspeed_config(tmp_path))]
    job = Launched(tmp_path, arena_root, [str(ROOT / "launch" / script), *arguments])
    job.env |= {"DS_ACCELERATOR": "cpu", "TMPDIR": str(tmp_path)}
    if request.param == "plain":
        del job.env["FTCKPT_DEVICE"]  # which stands in for what the others need
    yield job
    job.stop()


@pytest.mark.timeout(600)
def test_a_killed_rank_comes_back_from_the_server(launched: Launched) -> None:
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    # So many iterations that it trains until the test is over.
    job = [*launched.training, "--iterations", "1000000", "--ftckpt-job", "job"]
    agent = launched.start([sys.executable, "-m", "ftckpt", "run", *words, *job])
    launched.wait_for("a server", lambda: READY in launched.output(10**6))
    launched.kill_rank(1)
    (restored,) = launched.wait_for("a restart", launched.restored)
    launched.wait_for("iterations", lambda: rows(launched)[-1][0] > restored + 3)
    losses: dict[int, str] = {}
    for iteration, loss in rows(launched):
        assert losses.setdefault(iteration, loss) == loss
    assert "workers are started as new processes" not in launched.output(10**6)
    agent.terminate()
    assert agent.wait(60) == 1, launched.output()


def rows(launched: Launched) -> list[tuple[int, str]]:
    """Iterations that were logged, with their losses."""
    lines = launched.log.read_text().splitlines(keepends=True)
    return [
        (row["iteration"], row["loss_hex"])
        for row in map(json.loads, (line for line in lines if line.endswith("\n")))
    ]
