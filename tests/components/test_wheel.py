"""The wheel, made of the source distribution, has all that users need without a checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.cli.init import KITS
from tests.support import trainers
from tests.support.errors import lacks
from tests.support.repository import ROOT, files_in
from tests.support.waiting import until

TOOLS = ("build==1.3.0", "twine==6.2.0")
ENDS = ("-py3-none-any.whl", ".tar.gz")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, tree: Path, to: Path) -> Path:
    command = [sys.executable, "-c", BUILD, what, str(to)]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return to / run.stdout.splitlines()[-1]


def sources() -> list[str]:
    """What the packages are made of."""
    folders = ("ftckpt", "launch", "configs")
    found = [path for folder in folders for path in files_in(folder)]
    alone = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]
    return [*alone, *(str(path.relative_to(ROOT)) for path in found)]


def copy_sources(to: Path) -> Path:
    for name in sources():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return to


def install(wheel: Path, made: Path) -> Path:
    """A new environment, with the wheel alone; what it needs comes from this one, without this one's ftckpt."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True, timeout=120)
    (site,) = made.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(made / "bin/python"), "install", "--no-deps", "--no-index"]
    run = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return made


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sdist = build("build_sdist", copy_sources(folder / "tree"), folder)
    with tarfile.open(sdist) as file:
        # Python 3.11.2 has no filters; what is unpacked is of this test's own making.
        file.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        file.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return install(build("build_wheel", unpacked, folder), folder / "environment")


@pytest.fixture
def installed(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


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


def test_kits_are_written_without_a_checkout(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # which may name a checkout
    program = environment / "bin/ftckpt"
    shown = subprocess.run([program, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ftckpt.__version__ in shown.stdout
    for kit in KITS:
        run = subprocess.run([program, "init", kit, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
    for name in ("launch/torchrun.sh", "launch/a100.sbatch", "configs/deepspeed_zero2.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_uploaded_is_built_checked_and_installed(tmp_path: Path) -> None:
    tools = {**os.environ, "PYTHONPATH": str(trainers.install("build and twine", TOOLS, lacks_more=True))}

    def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 280}
        done = subprocess.run(command, cwd=tmp_path, env=env, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--outdir", "dist", copy_sources(tmp_path / "tree"), env=tools)
    made = sorted((tmp_path / "dist").iterdir())
    assert [path.name.partition("-")[2] for path in made] == [f"{ftckpt.__version__}{end}" for end in ENDS]
    run(sys.executable, "-m", "twine", "check", "--strict", *made, env=tools)
    environment = install(made[0], tmp_path / "environment")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = run(environment / "bin/python", "-c", "import ftckpt.dcp, ftckpt.torch; print(ftckpt.__file__)", env=bare)
    assert Path(shown.strip()).is_relative_to(environment)
    assert ftckpt.__version__ in run(environment / "bin/ftckpt", "--version", env=bare)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_job_from_the_wheel_alone_goes_on_after_a_kill(environment: Path, tmp_path: Path, arena_root: Path) -> None:
    program, python = environment / "bin/ftckpt", environment / "bin/python"
    subprocess.run([program, "init", "torchrun", "."], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    env = {**os.environ, "FTCKPT_PYTHON": str(python), "OMP_NUM_THREADS": "1"}
    words = ["--job", "first", "--nproc", "2", "--runner", "none", "launch/train_plain.py", "--iterations", "300"]
    command = ["bash", "launch/torchrun.sh", *words, "--ftckpt", f"--ftckpt-arena={arena_root}"]
    log = tmp_path / "log"

    def trainers() -> list[dict[str, int]]:
        asked = [program, "status", "first", "--json", "--arena", str(arena_root)]
        told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60).stdout
        return [one for node in json.loads(told)["nodes"] for one in node["trainers"]] if told else []

    with log.open("w") as out:
        job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=out)
    try:
        until(lambda: [one["iteration"] > 20 for one in trainers()] == [True, True], log.read_text, 120)
        os.kill(trainers()[1]["pid"], signal.SIGKILL)
        assert job.wait(180) == 0, log.read_text()
    finally:
        job.terminate()
        job.wait(60)
    text = log.read_text()
    assert re.search(r"2 ranks: iteration \d+ from memory", text), text
    assert not lacks(text, "300")
    assert not list(arena_root.iterdir())
