"""Each tested release, installed next to this environment's, passes the conformance suite.

    python -m pytest -m slow -k versions

installs what PyPI has of them without their dependencies (``FTCKPT_RELEASES``, default a temporary directory, keeps
them), and takes others from there (a checkout as ``megatron-core-0.19.1``). The README has tables of what counts
as tested.

Pythons (found as ``python3.12``) and releases of torch have environments of their own, of up to 6 GB,
as ``launch/environment.sh`` makes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from ftckpt.frameworks.versions import TESTED
from tests.support.repository import ROOT

pytestmark = pytest.mark.multiproc

FROM_CHECKOUTS = {"megatron-core": ("0.17.1", "0.18.2", "0.19.0", "0.19.1"), "DeepSpeed": ()}
"""Which PyPI does not have."""
FRAMEWORKS = {"megatron-core": "megatron", "DeepSpeed": "deepspeed"}
IMPORTS = {  # from 0.18 on megatron-core imports triton, which the stand-in stands in for
    "megatron-core": "from tests import standin; standin.install(); import megatron.core",
    "DeepSpeed": "import deepspeed",
}
RELEASES = [(program, release) for program, releases in TESTED.items() for release in releases]
MARKS = "<!-- versions -->\n", "<!-- end of versions -->\n"
ENVIRONMENTS = (
    ("3.10", "2.6.0"), ("3.11", "2.7.1"), ("3.12", "2.8.0"), ("3.10", "2.9.1"), ("3.11", "2.10.0"),
    ("3.12", "2.11.0"), ("3.10", "2.12.1"), ("3.10", "2.13.0"), ("3.12", "2.13.0"), ("3.13", "2.13.0"),
    ("3.11", "2.14.1"),
)  # fmt: skip
"""Python and torch, other than those of this environment, which CI runs."""
FSDP2_ON_GPUS_ALONE = ("2.6.0",)
"""There plain torch goes through the suite under DDP."""
ENVIRONMENT_MARKS = "<!-- environments -->\n", "<!-- end of environments -->\n"
PREPARE = """
NAME=versions
source launch/environment.sh
TORCH=torch==$1
prepare "$ALL_EXTRAS" >&2
"""
CONFORMANCE = "tests/integrations/test_conformance.py"
SHOW = "import sys, torch; print(*sys.version_info[:2], sep='.', end=' '); print(torch.__version__)"


def num_passed(printed: str) -> int:
    found = re.search(r"(\d+) passed", printed)
    return int(found[1]) if found else 0


def table() -> str:
    """The table of all tested releases."""
    lines = ["| framework | releases that passed the conformance suite | with |", "|---|---|---|"]
    beside = f"torch {version('torch').partition('+')[0]}, Python {sys.version_info[0]}.{sys.version_info[1]}"
    for program, releases in TESTED.items():
        named = ", ".join(f"{one} (checkout)" if one in FROM_CHECKOUTS[program] else one for one in releases)
        lines.append(f"| {program} | {named} | {beside} |")
    return "\n".join(lines) + "\n"


def ran_with(torch: str) -> str:
    """The packages of environments besides torch, and the tests that cannot run there."""
    named = (ROOT / "launch/constraints.txt").read_text().replace("==", " ").split("\n")
    instead = ["DDP, since torch 2.6 has FSDP2 on GPUs alone"] if torch in FSDP2_ON_GPUS_ALONE else []
    return ", ".join([*filter(None, named), *instead])


def environments(those: Iterable[tuple[str, str]]) -> str:
    """A line for each Python, with the releases of torch that ran with the same on it."""
    releases: dict[tuple[str, str], list[str]] = {}
    for python, torch in sorted(those, key=lambda one: int(one[0].partition(".")[2])):
        releases.setdefault((python, ran_with(torch)), []).append(torch)
    lines = [f"| {python} | {', '.join(of_it)} | {with_} |\n" for (python, with_), of_it in releases.items()]
    return "| Python | torch | with |\n|---|---|---|\n" + "".join(lines)


def between(marks: tuple[str, str]) -> str:
    """The text of the page between two marks."""
    return (ROOT / "launch/README.md").read_text().partition(marks[0])[2].partition(marks[1])[0]


def test_the_page_has_the_table() -> None:
    assert between(MARKS) == table()


def test_the_page_has_the_environments() -> None:
    assert between(ENVIRONMENT_MARKS) == environments(ENVIRONMENTS)


def test_the_package_promises_what_the_table_shows() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r"Python :: (3\.\d+)", text)
    assert named == sorted({"3.11", *(python for python, _ in ENVIRONMENTS)})
    assert f'requires-python = ">={named[0]}"' in text


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    kept = os.environ.get("FTCKPT_RELEASES")
    if kept:
        yield Path(kept).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ftckpt-releases-") as folder:
        yield Path(folder)


def installed(program: str, release: str, store: Path) -> Path:
    """The release alone in a directory of its own: what it needs is there."""
    folder = store / f"{program}-{release}"
    if not folder.exists() and release in FROM_CHECKOUTS[program]:
        pytest.skip(f"PyPI has no {program} {release}: put a checkout at {folder}")
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        env = {**os.environ, "DS_BUILD_OPS": "0"}
        partial = folder.with_name(f".{folder.name}")
        run = subprocess.run(
            [*command, "--target", str(partial), f"{program}=={release}"],
            env=env, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        if run.returncode:
            pytest.skip(f"{program} {release} cannot be installed here: {run.stderr[-300:]}")
        partial.rename(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("program", "release"), RELEASES)
def test_release(program: str, release: str, store: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed(program, release, store)), "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    shown = subprocess.run(
        [sys.executable, "-c", f"{IMPORTS[program]} as it; print(it.__version__)"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.split()[-1].partition("+")[0] == release
    suite = ["-q", "-m", "", "-p", "no:cacheprovider", CONFORMANCE, "-k", FRAMEWORKS[program]]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *suite, "-o", "addopts="],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert num_passed(run.stdout) > 20, run.stdout[-500:]


def prepared(python: str, torch: str, folder: Path) -> Path:
    """The interpreter of an environment there that has torch, the frameworks and ftckpt."""
    base = shutil.which(f"python{python}")
    if base is None:
        pytest.skip(f"no python{python} was found")
    env = {**os.environ, "FTCKPT_VENV": str(folder), "FTCKPT_PYTHON": base, "PIP_NO_CACHE_DIR": "1"}
    run = subprocess.run(
        ["bash", "-c", PREPARE, "prepare", torch],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if run.returncode:
        pytest.skip(f"torch {torch} and the rest cannot be installed on Python {python}: {run.stderr[-300:]}")
    return folder / "bin/python"


def chosen(torch: str) -> list[str]:
    """The selection of the suite for pytest."""
    if torch in FSDP2_ON_GPUS_ALONE:
        return ["-k", "tp2pp2 or pp2dp2 or zero3 and not four or plain-ddp and not fp16"]
    return ["-m", "not slow"]


def passes(interpreter: Path, python: str, torch: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    shown = subprocess.run([interpreter, "-c", SHOW], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.partition("+")[0].split() == [python, torch]
    run = subprocess.run(
        [interpreter, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *chosen(torch), CONFORMANCE],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert num_passed(run.stdout) > 20 and "skipped" not in run.stdout, run.stdout[-500:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("python", "torch"), ENVIRONMENTS)
def test_environment(python: str, torch: str, store: Path) -> None:
    folder = store / f"python-{python}-torch-{torch}"
    try:
        passes(prepared(python, torch, folder), python, torch)
    finally:
        if "FTCKPT_RELEASES" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)
