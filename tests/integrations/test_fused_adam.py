"""FusedAdam of Transformer Engine and of Apex under real Megatron-core, DeepSpeed and plain torch.

By default over stand-ins of both; ``bash tests/probe/run.sh fused-adam DIR`` runs the same with the real Python of a
checkout, which ``FTCKPT_TEST_CHECKOUT`` names, over kernels in torch.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from tests.integrations.adapters import PlainJob
from tests.standin import te
from tests.support import ds_jobs, jobs
from tests.support.ds_jobs import BF16, fp16, zero
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

CHECKOUT = "FTCKPT_TEST_CHECKOUT"
_TE = "transformer_engine/pytorch/optimizers"


@dataclass(frozen=True)
class Library:
    """The library of the optimizer, and its checkout; None: the stand-in."""

    name: str
    checkout: Path | None = None

    def install(self) -> type:
        """Install it in a process made for one test; Megatron is imported by its next user."""
        if self.name == "te":
            te.install(self._release(), self.checkout)
            from transformer_engine.pytorch.optimizers import FusedAdam
        else:
            te.install_apex(self.checkout)
            from apex.optimizers import FusedAdam
        kind: type = FusedAdam
        assert self.checkout is None or Path(inspect.getfile(kind)).is_relative_to(self.checkout)
        return kind

    def _release(self) -> str:
        """The release of Transformer Engine."""
        if self.checkout is None:
            return te.RELEASES[-1]
        version = (self.checkout / "build_tools/VERSION.txt").read_text()
        return ".".join(version.strip().split(".")[:2])


def libraries() -> list[Library]:
    """The libraries to test.

    Raises:
        FileNotFoundError: what the environment names holds neither of them.
    """
    if CHECKOUT not in os.environ:
        return [Library("te"), Library("apex")]
    checkout = Path(os.environ[CHECKOUT]).resolve()
    found = [name for name, folder in (("te", _TE), ("apex", "apex/optimizers")) if (checkout / folder).is_dir()]
    if not found:
        raise FileNotFoundError(f"{checkout} holds neither Transformer Engine nor Apex")
    return [Library(found[0], checkout)]


@dataclass(frozen=True)
class Setup:
    """A job with the optimizer of ``library``: fields of OptimizerConfig."""

    library: Library
    optimizer: dict[str, Any] = field(default_factory=dict)


def prepare(setup: Setup) -> Any:
    """``train_gpt`` with it."""
    setup.library.install()
    import train_gpt

    train_gpt.OptimizerConfig = functools.partial(train_gpt.OptimizerConfig, **setup.optimizer)
    return train_gpt


def train_megatron(rank: int, world_size: int, run: jobs.Run, setup: Setup) -> jobs.Outcome:
    prepare(setup)
    return jobs.train(rank, world_size, run)


def train_with_deepspeed(
    rank: int, world_size: int, run: ds_jobs.Run, library: Library, options: dict[str, Any]
) -> jobs.Outcome:
    """The script gives the optimizer to ``deepspeed.initialize``."""
    from tests.standin.cuda import install_tensor

    install_tensor()  # it has a flag on "cuda"
    kind: Any = library.install()
    _let_deepspeed_know(library)
    import train_deepspeed

    train_deepspeed.own_optimizer = lambda _args, parameters: kind(parameters, lr=1e-3, **options)
    return ds_jobs.train(rank, world_size, run)


def _let_deepspeed_know(library: Library) -> None:
    """DeepSpeed looks for Apex when it is imported, and has been."""
    if library.name == "apex":
        import apex as installed
        from deepspeed.runtime import engine
        from deepspeed.runtime.zero import utils

        engine.APEX_INSTALLED, engine.apex = True, installed
        utils.ZERO_SUPPORTED_OPTIMIZERS.append(installed.optimizers.FusedAdam)


def train_plain(rank: int, world_size: int, run: jobs.Run, library: Library, options: dict[str, Any]) -> jobs.Outcome:
    """``run`` of launch/train_plain.py with this optimizer."""
    from tests.standin.cuda import install_tensor

    install_tensor()  # it has a flag on "cuda"
    kind: Any = library.install()
    import train_plain

    train_plain.build_optimizer = lambda args, parameters: kind(parameters, lr=args.lr, **options)
    job = PlainJob(run.argv)
    checkpointer = None
    if run.settings is not None:
        checkpointer = job.attach(
            Config(enabled=True, node="node", **{"protect": "none", "interval": 1, **run.settings})
        )
    start, rows = job.iteration, []
    while job.iteration < run.until:
        loss, grad_norm, *_ = job.train_iteration()
        rows.append((job.iteration, loss, grad_norm))
    hashes = dict(job.hashes())
    if checkpointer is not None:
        checkpointer.close(remove=run.end == "close")
    return jobs.Outcome(start, rows, hashes)


REMAINDERS = {"use_precision_aware_optimizer": True}
LIBRARIES = {library.name: library for library in libraries()}


@dataclass(frozen=True)
class Scene:
    """Arguments of train_gpt, fields of OptimizerConfig, ranks, and the iteration after which the job stops."""

    argv: tuple[str, ...] = ()
    optimizer: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    stop: int = 3
    te_alone: bool = False


SCENES = {
    "distributed": Scene(),
    "distributed-fp32": Scene(("--precision", "fp32")),
    # Scaled too high: the first iterations step nothing, so that no group has a number when the job stops.
    "distributed-fp16": Scene(("--precision", "fp16", "--loss-scale", str(2.0**19)), stop=1),
    "remainders": Scene(optimizer=REMAINDERS, te_alone=True),
    "whole-masters": Scene(optimizer={**REMAINDERS, "store_param_remainders": False}, te_alone=True),
    "float16": Scene(("--no-distributed-optimizer",)),
    "float16-scaled": Scene(("--no-distributed-optimizer", "--precision", "fp16"), ranks=1),
    "fp32": Scene(("--no-distributed-optimizer", "--precision", "fp32"), ranks=1),
    "experts": Scene(("--num-experts", "4", "--ep", "2")),
    "stages": Scene(("--pp", "2", "--untie"), {"decoupled_lr": 5e-4}),
}


def cases(every: list[Any], quick: list[Any]) -> list[Any]:
    """All cases of a checkout; of the stand-ins the quick ones by default."""
    return by_default(every, [case for case in quick if case in every]) if len(LIBRARIES) > 1 else every


def counted(rank: int, world_size: int, setup: Setup, run: jobs.Run) -> set[Any]:
    """The steps that groups have when ``run`` has restored and trained."""
    train_megatron(rank, world_size, run, setup)
    leaves = sys.modules["ftckpt.megatron"].integration.state._leaves
    return {group.get("step") for leaf in leaves for group in leaf.optimizer.param_groups if group["params"]}


@pytest.mark.parametrize("library", cases(list(LIBRARIES), ["te"]))
def test_another_layout_goes_on_at_the_same_step(library: str, settings: dict[str, Any]) -> None:
    """The embedding has a learning rate, and so a group, of its own: of two replicas the second owns it.

    The first has an empty group, whose steps nobody counts.
    """
    setup = Setup(LIBRARIES[library], {"decoupled_lr": 5e-4})
    run = jobs.Run(["--layers", "2"], 0, settings, end="keep")
    for ranks, argv, until in ((2, [], 3), (1, [], 4), (2, [], 6), (2, ["--pp", "2"], 7)):
        this = replace(run, argv=[*run.argv, *argv], until=until)
        found = [result.value for result in run_ranks(counted, ranks, setup, this, timeout_secs=200.0)]
        assert found == [{until}] * ranks


def test_state_that_megatron_does_not_show_is_refused_by_its_setting() -> None:
    library = next(iter(LIBRARIES.values()))
    assert run_ranks(refusals, 1, library)[0].value == [
        "exp_avg_dtype torch.bfloat16: its scales cannot be saved; use fp32",
        "exp_avg_sq_dtype torch.float16: its scales cannot be saved; use fp32",
        "main_params_dtype torch.float16: its scales cannot be saved; use fp32",
        "an optimizer step replayed by a CUDA graph cannot be fenced; leave out --optimizer-cuda-graph",
    ]


def refusals(rank: int, world_size: int, library: Library) -> list[str]:
    train_gpt = prepare(Setup(library, REMAINDERS if library.name == "te" else {}))
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY]))
    from ftckpt.megatron.state import MegatronState

    said = []
    for name, value in (
        ("exp_avg_dtype", torch.bfloat16),
        ("exp_avg_sq_dtype", torch.float16),
        ("main_params_dtype", torch.float16),
        ("optimizer_cuda_graph", True),
    ):
        config = job.optimizer.chained_optimizers[0].config
        before = getattr(config, name, False)
        setattr(config, name, value)
        with pytest.raises(UnsupportedError) as refused:
            MegatronState(job.model, job.optimizer, job.scheduler, {})
        said.append(str(refused.value))
        setattr(config, name, before)
    return said


def untested(**config: Any) -> dict[str, Any]:
    return {"optimizer": "none", "zero_allow_untested_optimizer": True, "scheduler": "none", **config}


DEEPSPEED = {
    "fp32": ds_jobs.Shape(2, config=untested()),
    "bf16": ds_jobs.Shape(2, config=untested(**BF16)),
    "fp16": ds_jobs.Shape(2, config=untested(**fp16(10))),
    "zero1": ds_jobs.Shape(2, config=untested(**BF16, **zero(1))),
    "zero2": ds_jobs.Shape(2, ["--freeze"], untested(**BF16, **zero(2))),
    "zero2-fp16": ds_jobs.Shape(2, config=untested(**fp16(19), **zero(2))),
    "zero3": ds_jobs.Shape(2, config=untested(**BF16, **zero(3))),
}
MASTERS = {"master_weights": True}
PLAIN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one": (("--wrap", "none", "--precision", "fp32"), {"adam_w_mode": False, "weight_decay": 0.1}),
    "ddp": ((), {}),
    "ddp-bf16": (("--precision", "bf16", "--freeze"), {}),
    "ddp-fp16": (("--precision", "fp16", "--loss-scale", "262144"), {}),
    "ddp-masters": (("--precision", "bf16"), MASTERS),
    "ddp-remainders": (("--precision", "bf16"), {**MASTERS, "store_param_remainders": True}),
    "fsdp2": (("--wrap", "fsdp2"), {}),
    "fsdp2-masters": (("--wrap", "fsdp2", "--precision", "bf16"), MASTERS),
}
"""Arguments of train_plain, and of the optimizer."""
FRAMEWORKS: dict[str, dict[str, Any]] = {"megatron": SCENES, "deepspeed": DEEPSPEED, "plain": PLAIN}
# Apex knows neither masters of its own nor DTensors.
FOR_TE_ALONE = [scene for scene in SCENES if SCENES[scene].te_alone] + list(PLAIN)[4:]
CASES = [
    f"{framework}-{library}-{case}"
    for framework, those in FRAMEWORKS.items()
    for library in LIBRARIES
    for case in those
    if library == "te" or case not in FOR_TE_ALONE
]
QUICK = [
    *("megatron-te-distributed-fp16", "megatron-apex-float16"),
    *("deepspeed-apex-zero2-fp16", "plain-te-fsdp2-masters"),
]


@pytest.mark.parametrize("case", cases(CASES, QUICK))
def test_a_restart_goes_on_bit_for_bit(case: str, settings: dict[str, Any]) -> None:
    framework, library, name = case.split("-", 2)
    found, stop = FRAMEWORKS[framework][name], 3
    train: Callable[..., jobs.Outcome]
    run: jobs.Run | ds_jobs.Run
    if framework == "megatron":
        ranks, stop = found.ranks, found.stop
        train = functools.partial(train_megatron, setup=Setup(LIBRARIES[library], found.optimizer))
        run = jobs.Run(found.argv, 6, settings)
    elif framework == "deepspeed":
        train = functools.partial(train_with_deepspeed, library=LIBRARIES[library], options={})
        run, ranks = ds_jobs.Run(found, 6, settings), found.ranks
    else:
        train = functools.partial(train_plain, library=LIBRARIES[library], options=found[1])
        run, ranks = jobs.Run(found[0], 6, settings), 2

    def outcomes(run: Any) -> list[jobs.Outcome]:
        results = run_ranks(train, ranks, run, timeout_secs=200.0, stand_in=framework == "megatron")
        return [result.value for result in results]

    # DeepSpeed's ranks exit at the third boundary: whether they still agree on its snapshot is not known.
    assert jobs.goes_on(outcomes, run, stop) in ((2, 3) if framework == "deepspeed" else (stop,))
