"""Megatron-core with the lines of a patch: the schedule is followed and the optimizer fenced by them alone."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftckpt.megatron.job import CORE
from tests.support import jobs, patch_files
from tests.support.plain import merged
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys
from tests.support import standin
standin.install()
import megatron.core, torch.distributed, train_gpt
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from ftckpt.megatron import integration, hooks
from ftckpt.megatron.job import CORE, is_patched
from tests.support.plain import Recorder

hooks.install()  # the runner has done so
torch.distributed.init_process_group("gloo")
job = train_gpt.build(train_gpt.parse_args(sys.argv[2:]))
recorder = Recorder()
leaf = job.optimizer.chained_optimizers[0].optimizer
inner = leaf.step
hooks.follow(recorder, job.optimizer, None)
guards = len(integration.hooks.undo)
wrapped = hasattr(schedules.forward_backward_no_pipelining, "__wrapped__")
guarded = "step_with_ready_grads" in vars(job.optimizer)
integration.hooks.remove()  # the lines must hold alone
leaf.step = lambda *a, **k: (recorder.log.append("write"), inner(*a, **k))[1]
before = job.config.finalize_model_grads_func
train_gpt.train_step(job)
trained = list(recorder.log)
recorder.log.clear()
arguments = dict(forward_step_func=train_gpt.forward_step, model=job.model, num_microbatches=job.num_micro,
                 seq_length=32, micro_batch_size=2, forward_only=True)
batch = job.data.next_batch(job.num_micro, 2, 0, 2)
get_forward_backward_func()(data_iterator=[iter(batch) for _ in job.model], **arguments)
assert job.config.finalize_model_grads_func is before and job.config.timers is None
evaluated = list(recorder.log)
integration.remove()
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as out:
    json.dump({
        "core": megatron.core.__file__,
        "patched": [name for name in CORE if is_patched(sys.modules[name])],
        "wrapped": wrapped, "guarded": guarded, "guards": guards,
        "trained": trained, "evaluated": evaluated,
    }, out)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to import a patched copy of the installed megatron.core from."""
    pytest.importorskip("megatron.core")
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    root = tmp_path_factory.mktemp("patched")
    shutil.copytree(Path(spec.origin).parent, root / "megatron/core", ignore=shutil.ignore_patterns("__pycache__"))
    import megatron.core

    name = next(name for name in patch_files.NAMES if megatron.core.__version__ in patch_files.versions(name))
    for file, parts in patch_files.hunks(name).items():
        if not file.startswith("megatron/core/"):
            continue
        text = (root / file).read_text()
        for part in parts:
            assert text.count(part.old) == 1
            text = text.replace(part.old, part.new)
        (root / file).write_text(text)
    return root


def train(core: Path, out: Path, argv: list[str], runner: bool) -> tuple[list[dict[str, Any]], str]:
    """What each of two ranks saw in one iteration, and what they wrote."""
    (out / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{core}:{ROOT}:{ROOT / 'launch'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if runner:
        environment["FTCKPT_DEVICE"] = "tests.support.standin:cpu"
        command += ["-m", "ftckpt.megatron"]
        argv = [*argv, "--ftckpt"]
    ended = subprocess.run(
        [*command, str(out / "script.py"), str(out), *jobs.TINY, "--iterations", "2", *argv],
        env={**environment, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)], ended.stderr


ACTS = f"no run-time hooks in patched modules: {', '.join(CORE)}"
LAYOUTS = {"no pipeline": [], "pp2": ["--pp", "2"], "pp2-vpp2": ["--pp", "2", "--vpp", "2", "--layers", "4"]}


@pytest.mark.parametrize(
    ("layout", "runner"), by_default([("no pipeline", False), ("pp2", True), ("pp2-vpp2", False)], [])
)
def test_the_lines_follow_and_fence_without_hooks(core: Path, tmp_path: Path, layout: str, runner: bool) -> None:
    ranks, written = train(core, tmp_path, LAYOUTS[layout], runner)
    assert written.count(ACTS) == runner
    for seen in ranks:
        assert seen["core"].startswith(str(core))
        assert seen["patched"] == list(CORE)
        assert not seen["wrapped"] and not seen["guarded"], "a hook acts where a line does"
        assert seen["guards"] == 1, "torch's own hook before a step is all that is left"
        assert seen["evaluated"] == ["pause"]
        log = seen["trained"]
        told = merged([kind for kind in log if kind not in ("fence", "write")])
        assert set(told[:-1:2]) == {"window"} and told[-1] == "tail"
        assert told.count("forward") == told.count("backward") > 0
        assert log.index("tail") < log.index("fence") < log.index("write")
