"""The wheel, made of the source distribution, has all that users need without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ftckpt.commands.init import KITS
from tests.support.launching import ROOT

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, tree: Path, to: Path) -> Path:
    command = [sys.executable, "-c", BUILD, what, str(to)]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return to / run.stdout.splitlines()[-1]


def sources() -> list[str]:
    """What the packages are made of."""
    folders = ("ftckpt", "launch", "configs", "patches")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    alone = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]
    return [*alone, *(str(path.relative_to(ROOT)) for path in found if path.is_file())]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pip`` would unpack."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in sources():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "tree" / name)
    sdist = build("build_sdist", folder / "tree", folder)
    with tarfile.open(sdist) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    with zipfile.ZipFile(build("build_wheel", unpacked, folder)) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_every_file_of_the_package(installed: Path) -> None:
    ours = {name for name in sources() if name.startswith("ftckpt/")}
    there = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert ours <= there
    assert any(name.endswith("licenses/LICENSE") for name in there)
    assert not {name for name in there if name.startswith("tests") or Path(name).name in ("demo.sh", "test.sh")}


def test_no_link_of_a_page_leads_nowhere(installed: Path) -> None:
    pages = [*(installed / "ftckpt").rglob("*.md")]
    links = [(page, name) for page in pages for name in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text())]
    assert len(pages) > 8 and len(links) > 20
    dead = [f"{page.relative_to(installed)}: {name}" for page, name in links if not (page.parent / name).exists()]
    assert not dead, dead


INIT = """
from ftckpt.commands.init import KITS
from ftckpt.commands.main import main
import ftckpt
print([main(["init", kit, "."]) for kit in KITS], ftckpt.__file__, sep="\\n")
"""


def test_kits_are_written_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", INIT]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    codes, where = run.stdout.splitlines()[-2:]
    assert codes == str([0] * len(KITS)) and Path(where).is_relative_to(installed)
    for name in ("launch/torchrun.sh", "launch/a100.sbatch", "configs/deepspeed_zero2.json", "patches/apply.sh"):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
