"""Each release that counts as tested, installed beside this environment's, goes through the conformance suite.

    python -m pytest -m slow -k versions

installs what PyPI has of them without their dependencies (``FTCKPT_RELEASES``, default a temporary directory, keeps
them), takes others from there (a checkout as ``megatron-core-0.19.1``), and writes the table of the README when all
have passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from ftckpt.frameworks.versions import TESTED
from tests.support.launching import ROOT

pytestmark = pytest.mark.multiproc

FROM_CHECKOUTS = {"megatron-core": ("0.17.1", "0.18.2", "0.19.0", "0.19.1"), "DeepSpeed": ()}
"""Which PyPI does not have."""
FRAMEWORKS = {"megatron-core": "megatron", "DeepSpeed": "deepspeed"}
RELEASES = [(program, release) for program, releases in TESTED.items() for release in releases]
MARKS = "<!-- versions -->\n", "<!-- end of versions -->\n"
passed: dict[tuple[str, str], int] = {}


def table() -> str:
    """Of all that counts as tested."""
    lines = ["| framework | releases that passed the conformance suite | with |", "|---|---|---|"]
    beside = f"torch {version('torch').partition('+')[0]}, Python {sys.version_info[0]}.{sys.version_info[1]}"
    for program, releases in TESTED.items():
        named = ", ".join(f"{one} (checkout)" if one in FROM_CHECKOUTS[program] else one for one in releases)
        lines.append(f"| {program} | {named} | {beside} |")
    return "\n".join(lines) + "\n"


def test_the_readme_has_the_table() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.partition(MARKS[0])[2].partition(MARKS[1])[0] == table()


@pytest.fixture(scope="module")
def written() -> Iterator[None]:
    """The table is written when all have passed."""
    yield
    if set(passed) == set(RELEASES):
        readme = ROOT / "README.md"
        before, _, rest = readme.read_text().partition(MARKS[0])
        readme.write_text(before + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2])


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
def test_release(program: str, release: str, store: Path, written: None) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed(program, release, store)), "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    asked = {"megatron": "megatron.core", "deepspeed": "deepspeed"}[FRAMEWORKS[program]]
    shown = subprocess.run(
        [sys.executable, "-c", f"import {asked} as it; print(it.__version__)"],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.split()[-1].partition("+")[0] == release
    suite = [
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "tests/multiproc/test_conformance.py",
        "-k",
        FRAMEWORKS[program],
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *suite, "-o", "addopts="],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    count = re.search(r"(\d+) passed", run.stdout)
    assert count is not None and int(count[1]) > 20, run.stdout[-500:]
    passed[program, release] = int(count[1])
