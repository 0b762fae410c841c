"""``ftckpt init``: writes editable launch scripts and configurations to a directory."""

from __future__ import annotations

import argparse
import filecmp
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from errno import EISDIR
from pathlib import Path
from typing import NamedTuple

import ftckpt
from ftckpt.cli.answers import Answer, Lines
from ftckpt.errors import ConfigError
from ftckpt.memory.atomic_files import fresh_name


class Kit(NamedTuple):
    """The files for one way of starting jobs, as patterns relative to the repository, and example commands.

    In a command ``{here}`` is the target directory as the user named it, ``{root}`` its absolute path.
    ``needs``: packages to install. ``on_cpus``: how to train without a GPU.
    """

    help: str
    patterns: tuple[str, ...]
    commands: tuple[str, ...]
    needs: str = "The first needs Megatron-core: pip install 'ftckpt[megatron]'"
    on_cpus: str = ""


_PAGES = ("launch/README.md", "launch/RUNBOOK.md")
_ALWAYS = ("launch/job.sh", *_PAGES, "configs/ftckpt.flags")
_MEGATRON = (
    "launch/torchrun.sh",
    "launch/train_gpt.py",
    "launch/train_plain.py",
    "launch/text_data.py",
    "configs/*.flags",
)
_SLURM = ("launch/slurm.sh", "launch/smp_step.sh", "launch/smp_process.sh", "launch/*.sbatch")
_DEEPSPEED = ("launch/*deepspeed*", "launch/torchrun.sh", "launch/text_data.py", "configs/*.json")

_WATCH = "ftckpt status    # from another terminal, while it trains"

KITS = {
    "torchrun": Kit(
        "one or several nodes under torchrun, for Megatron or plain torch",
        (*_ALWAYS, *_MEGATRON),
        (
            "bash {here}launch/torchrun.sh --job first {here}launch/train_gpt.py --pp 2 --iterations 1000 --ftckpt",
            "bash {here}launch/torchrun.sh --job plain --runner none {here}launch/train_plain.py --iterations 1000 "
            "--ftckpt",
            _WATCH,
        ),
        needs="The first needs GPUs and Megatron-core: pip install 'ftckpt[megatron]'",
        on_cpus="Without a GPU the second trains on CPU cores: put --nproc 4 before the script",
    ),
    "slurm": Kit(
        "batch scripts for nodes with 8 A100, and for Frontier",
        (*_ALWAYS, *_MEGATRON, *_SLURM),
        (
            "export FTCKPT_ROOT={root}",
            "sbatch --nodes=3 {here}launch/a100.sbatch --nodes 2 {here}launch/train_gpt.py --pp 2 --ftckpt",
            "sbatch -A PROJECT --nodes=3 {here}launch/frontier.sbatch --nodes 2 {here}launch/train_gpt.py --pp 2 "
            "--ftckpt",
        ),
    ),
    "k8s": Kit(
        "pods under Kubernetes, by JobSet or Kubeflow's training operator",
        (*_ALWAYS, *_MEGATRON, "launch/smp_pod.sh", "launch/smp_process.sh", "launch/k8s/*"),
        (
            "head -c 32 /dev/urandom | kubectl create secret generic run1-ftckpt --from-file=secret=/dev/stdin",
            "kubectl apply --dry-run=server -f {here}launch/k8s/jobset.yaml",
        ),
        needs="",
    ),
    "deepspeed": Kit(
        "DeepSpeed's launcher, or torchrun with DeepSpeed",
        (*_ALWAYS, *_DEEPSPEED),
        (
            "bash {here}launch/deepspeed.sh --job first {here}launch/train_deepspeed.py --deepspeed_config "
            "{here}configs/deepspeed_zero2.json",
            _WATCH,
        ),
        needs="It needs DeepSpeed: pip install 'ftckpt[deepspeed]'",
        on_cpus="Without a GPU it trains on CPU cores: put --nproc 4 before the script. The first start compiles "
        "code for some minutes",
    ),
    "monitoring": Kit(
        "alerts for Prometheus and a dashboard for Grafana",
        ("configs/monitoring/*", *_PAGES),
        ("promtool check rules {here}configs/monitoring/alerts.yaml",),
        needs="",
    ),
}


def add_init(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    kits = "; ".join(f"{name}: {kit.help}" for name, kit in KITS.items())
    parser.add_argument("kit", choices=KITS, metavar="KIT", help=kits)
    parser.add_argument("directory", type=Path, metavar="DIR", help="target directory; created if missing")
    parser.add_argument("--force", action="store_true", help="replace files that differ from ftckpt's")


def shipped() -> Path:
    """The parent of ``launch`` and ``configs``: in an installed package, or the root of a checkout."""
    package = Path(ftckpt.__file__).parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent


def run_init(arguments: argparse.Namespace) -> Lines:
    """Writes the kit and names the next steps.

    Raises:
        ConfigError: other files have these names, or a file cannot be written; nothing was written.
    """
    kit, to, root = KITS[arguments.kit], arguments.directory, shipped()
    names = sorted({str(path.relative_to(root)) for pattern in kit.patterns for path in root.glob(pattern)})
    missing = [pattern for pattern in kit.patterns if not any(root.glob(pattern))]
    if missing:
        raise ConfigError(f"{root} has no {', '.join(missing)}: install ftckpt from its wheel or from a checkout")
    there = [name for name in names if (to / name).exists() or (to / name).is_symlink()]
    other = [name for name in there if not _same(root / name, to / name)]
    if other and not arguments.force:
        raise ConfigError(
            f"{to} has other files of these names: {', '.join(other)}; name another directory, or replace them with "
            "--force"
        )
    _write(root, to, names)
    for name in names:
        yield f"{to / name}{' (was there)' if name in there and name not in other else ''}"
    places = {"here": "" if to == Path(".") else shlex.quote(f"{to}/"), "root": shlex.quote(str(to.resolve()))}
    commands = [command.format(**places) for command in kit.commands]
    yield "\nNow, for example:"
    yield from (f"  {command}" for command in commands)
    yield from (f"{sentence}." for sentence in (kit.needs, kit.on_cpus) if sentence)
    yield Answer({"files": [str(to / name) for name in names], "commands": commands})


def _write(root: Path, to: Path, names: Sequence[str]) -> None:
    """Writes all files, or none if one cannot be written: then new directories are removed, too."""
    made: list[Path] = []
    try:
        with ExitStack() as half_made:
            fresh: dict[str, Path] = {}
            for name in names:
                target = to / name
                if target.is_dir() and not target.is_symlink():
                    raise IsADirectoryError(EISDIR, "it is a directory", str(target))
                made += [path for path in reversed(target.parents) if not path.exists()]
                target.parent.mkdir(parents=True, exist_ok=True)
                fresh[name] = half_made.enter_context(fresh_name(target))
                shutil.copy(root / name, fresh[name])
            for name, path in fresh.items():
                path.replace(to / name)
    except OSError as error:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()
        raise ConfigError(
            f"{error.filename or to} cannot be written: {error.strerror}; name another directory"
        ) from None


def _same(ours: Path, theirs: Path) -> bool:
    return theirs.is_file() and filecmp.cmp(ours, theirs, shallow=False)
