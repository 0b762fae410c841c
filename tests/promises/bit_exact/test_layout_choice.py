"""A job is built in the layout that was chosen for the available ranks, and resumes from memory in another one.

``MEGATRON_LM=DIR`` names a checkout of Megatron-LM at core_v0.16.1, whose train loop is not in the wheel.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.errors import FtckptError
from tests.probe.scenes import COMMON
from tests.support import waiting
from tests.support.event_logs import read_events
from tests.support.pool import run_ranks
from tests.support.processes import Processes
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[3]
TINY = ["--layers", "4", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--micro-batch", "2"]
EXPERTS = ["--num-experts", "4"]


def attach(rank: int, world_size: int, words: list[str], settings: dict[str, Any], ask: bool) -> Any:
    """Chooses, builds, restores and trains until iteration 2 or one more than was restored, as a script would.

    Returns what was restored, the chosen sizes in the words of the script, and the digests before and after training.
    """
    import train_gpt

    import ftckpt.megatron
    import ftckpt.megatron.job

    ftckpt.megatron.configure(Config(enabled=True, node="n", protect="none", chunk_size="64KiB", **settings))
    ftckpt.megatron.job.choice = None
    args = train_gpt.parse_args([*TINY, *words, "--iterations", "9"])
    try:
        if ask:
            train_gpt.choose_layout(args)
        job = train_gpt.build(args)
        job.checkpointer = train_gpt.attach_checkpointer(job)
    except FtckptError as error:
        return str(error)
    digester = train_gpt.make_digester(job)
    start = job.checkpointer.restore() or 0
    job.iteration = start
    before = digester()
    args.iterations = max(2, start + 1)
    train_gpt.train(job)
    after = digester()
    job.checkpointer.close(remove=False)
    ftckpt.megatron.configure(Config())
    return start, (args.tp, args.pp, args.vpp, args.ep), before, after


def run(world_size: int, words: list[str], settings: dict[str, Any], ask: bool = True) -> Any:
    results = [result.value for result in run_ranks(attach, world_size, words, settings, ask)]
    assert all(other == results[0] for other in results)
    return results[0]


@pytest.mark.parametrize(
    ("model", "layouts", "sizes"),
    by_default(
        [
            ([], "tp2pp2,tp1pp2vpp2,tp1", {4: (2, 2, 1, 1), 2: (1, 2, 2, 1), 1: (1, 1, 1, 1)}),
            (EXPERTS, "pp2ep2dp2,ep2,tp1", {4: (1, 2, 1, 2), 2: (1, 1, 1, 2), 1: (1, 1, 1, 1)}),
        ],
        [],
    ),
    ids=["dense", "experts"],
)
def test_each_number_of_ranks_gets_its_layout_and_the_state(
    model: list[str], layouts: str, sizes: dict[int, Any], arena_root: Path
) -> None:
    settings = {"job": "choice", "arena": str(arena_root), "layouts": layouts}
    state, done = None, 0
    for ranks in (4, 2, 4, 1):
        start, chosen, before, after = run(ranks, model, settings)
        assert chosen == sizes[ranks] and start == done
        assert state in (None, before), "bits differ"
        state, done = after, max(2, start + 1)
    assert done == 5


def test_a_job_that_is_not_built_as_chosen_is_refused(arena_root: Path) -> None:
    settings = {"job": "choice", "arena": str(arena_root), "layouts": "tp2cp2,tp2"}
    told = run(4, [], settings)
    assert told == "layout tp2pp1cp2dp1 was chosen, but the model was built as tp2pp1dp2: build it with its sizes"
    assert "none was chosen: call ftckpt.megatron.choose_layout" in run(2, [], settings, ask=False)
    assert "no listed layout fits 1 rank: tp2cp2 needs a multiple of 4; tp2 needs a" in run(1, [], settings)


FLAGS = (
    "--hidden-dropout 0 --attention-dropout 0 --vocab-size 1023 --make-vocab-size-divisible-by 64 --bf16 "
    "--use-distributed-optimizer --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters 24 "
    "--lr-warmup-iters 5 --lr-decay-iters 100 --global-batch-size 16 --eval-interval 100"
)
"""Without dropout, whose masks depend on the layout, and with one size of the padded vocabulary in all layouts."""
LOSS = re.compile(r" iteration +(\d+)/ .* lm loss: ([^ ]+) ")


class MegatronLM:
    """Starts pretrain_gpt.py under the runner."""

    def __init__(self, checkout: Path, here: Path, arena: Path) -> None:
        self.here, self.checkout = here, checkout
        self.ftckpt = ["--ftckpt", "--ftckpt-job", "lm", "--ftckpt-protect", "none", "--ftckpt-node", "n"]
        self.ftckpt += ["--ftckpt-arena", str(arena), "--ftckpt-events", str(here / "events")]
        self.ftckpt += ["--ftckpt-objects-size", "1MiB", "--ftckpt-layouts", "tp2pp2,tp2pp1"]
        self.env = {
            **os.environ, "FTCKPT_DEVICE": "tests.standin:cpu", "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": f"{ROOT}:{checkout}",
            "NO_VCS_VERSION": "1", "PYENV_VERSION": platform.python_version(), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip

    def train(self, name: str, ranks: int, settings: Sequence[str], until: int | None = None) -> dict[int, float]:
        """To the end, or until there is a snapshot of iteration ``until``, when all die; losses by iteration."""
        log = self.here / f"{name}.log"
        script = ["-m", "ftckpt.megatron", str(self.checkout / "pretrain_gpt.py")]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(*script, *COMMON.split(), *FLAGS.split(), "--data-cache-path", str(self.here / "cache"), *settings),
        ]
        with Processes() as processes:
            processes.start("n", command, self.env, log)
            agent = processes.agents[0]
            ended = lambda: agent.poll() is not None or (until is not None and self.newest() >= until)  # noqa: E731
            waiting.until(ended, lambda: log.read_text()[-3000:], 300)
        found = {int(number): float(loss) for number, loss in LOSS.findall(log.read_text())}
        assert found, log.read_text()[-3000:]
        return found

    def told(self, name: str) -> list[dict[str, Any]]:
        """Events of rank 0."""
        return read_events(self.here / "events", name, of="rank0")

    def newest(self) -> int:
        """The newest iteration with a snapshot."""
        return max((event["iteration"] for event in self.told("snapshot")), default=0)


@pytest.fixture
def megatron_lm(tmp_path: Path, arena_root: Path) -> MegatronLM:
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM")
    copy = tmp_path / "megatron-lm"
    copy.mkdir()
    shutil.copytree(Path(checkout) / "megatron", copy / "megatron")
    for path in Path(checkout).glob("*.py"):
        shutil.copy(path, copy)
    return MegatronLM(copy, tmp_path, arena_root)
