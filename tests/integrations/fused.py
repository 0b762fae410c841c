"""Jobs whose optimizer is FusedAdam of Transformer Engine or of Apex: a stand-in or, from a checkout, the real one.

``FTCKPT_TEST_CHECKOUT`` in the environment names the checkout.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.config import Config
from tests.support import ds_jobs, jobs, te
from tests.support.adapters import PlainJob

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


def train(rank: int, world_size: int, run: jobs.Run, setup: Setup) -> jobs.Outcome:
    prepare(setup)
    return jobs.train(rank, world_size, run)


def train_with_deepspeed(
    rank: int, world_size: int, run: ds_jobs.Run, library: Library, options: dict[str, Any]
) -> jobs.Outcome:
    """The script gives the optimizer to ``deepspeed.initialize``."""
    from tests.support.standin.cuda import install_tensor

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
    from tests.support.standin.cuda import install_tensor

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


def steps(optimizers: Sequence[Any]) -> set[Any]:
    """The step counts of groups that have parameters."""
    return {group.get("step") for one in optimizers for group in one.param_groups if group["params"]}
