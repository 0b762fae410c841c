"""Every code block of the pages runs as it stands, and every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.config import Config
from ftckpt.memory.directory import clean_job
from tests.support import jobs
from tests.support.flush_jobs import Job as FlushJob
from tests.support.pool import run_ranks
from tests.support.repository import ROOT, files_in
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

PAGES = [page for page in files_in("", ".md") if not page.is_relative_to(ROOT / "docs")]
"""Links of docs/ are relative to the site, whose build checks them."""
BLOCKS = [
    found
    for page in PAGES
    if page.name == "README.md" and "specs" not in page.parts
    for found in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S)
]
ENV = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "FTCKPT_DEVICE": "tests.standin:cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
JOB = Path("/dev/shm/ftckpt-readme")


def block(language: str, word: str) -> str:
    found = [text for kind, text in BLOCKS if kind == language and word in text]
    assert len(found) == 1, f"{len(found)} {language} blocks mention {word!r}"
    return found[0]


def run(text: str, timeout_secs: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-ec", text], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout_secs, check=False
    )


LINK = re.compile(r"(?<!\})\]\((?!https?:|\{)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)", path.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads], anchor


def test_each_benchmark_has_its_command_and_each_figure_a_program_that_is_there() -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    sections = {head: body for head, body in re.findall(r"^## (\w+): .*\n((?:(?!^## ).*\n)+)", page, re.M)}
    assert len(sections) > 6
    for name, body in sections.items():
        assert f"    python benchmarks/{name}.py" in body and (folder / f"{name}.py").exists(), name
    for result in re.findall(r"\]\((results/\S+\.json)\)", page + (folder / "RESULTS.md").read_text()):
        made = json.loads((folder / result).read_text())
        command = made.get("command") or made["environment"].get("command", "")
        for program in re.findall(r"benchmarks/\w+\.py", command):
            assert (ROOT / program).exists(), f"{result}: {program}"


@pytest.fixture
def live_job() -> Iterator[subprocess.Popen[bytes]]:
    """The job that the README starts, once it has snapshots."""
    clean_job(JOB.parent, "readme")
    command = block("bash", "--standalone")
    job = subprocess.Popen(
        ["bash", "-ec", command], cwd=ROOT, env=ENV, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        yield job
    finally:
        end(job)
        clean_job(JOB.parent, "readme")


def end(job: subprocess.Popen[bytes]) -> None:
    """SIGTERM: the agent ends its workers, which have sessions of their own."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(100)


def wait_for(what: str, command: str, timeout_secs: float = 200) -> str:
    outputs = [""]

    def shown() -> bool:
        outputs.append(run(command).stdout)
        return what in outputs[-1]

    until(shown, lambda: f"{what!r} in the output of {command!r}: {outputs[-1]}", timeout_secs)
    return outputs[-1]


def test_the_plan_of_a_large_job_names_what_it_survives() -> None:
    planned = run(block("bash", "--protect node,peer"))
    assert planned.returncode == 0, planned.stderr
    assert "512 ranks on 64 nodes" in planned.stdout and re.search(r"one node +64 +all", planned.stdout)
    assert all(f"\n{told}" in planned.stdout for told in ("yes: a node needs", "--zero 3: ", "--fsdp: "))
    assert "--ftckpt-persist-interval auto" in planned.stdout


@pytest.mark.slow
def test_start_inspect_open_kill_clean(live_job: subprocess.Popen[bytes]) -> None:
    inspect = block("bash", "list readme").splitlines()[0]
    shown = wait_for(" PROTECTED ", inspect)
    assert "tp0-pp1-cp0-dp1" in shown
    opened = subprocess.run(
        [sys.executable, "-c", block("python", "safe_open")], env=ENV, capture_output=True, text=True, check=False
    )
    assert "master fragments" in opened.stdout, opened.stderr
    refused = run(block("bash", "clean"))
    assert refused.returncode and JOB.exists(), "a job that runs was cleaned"
    end(live_job)
    assert JOB.exists(), "a job that was given up leaves its arenas"
    verified = run(block("bash", "list readme"))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    convert()
    cleaned = run(block("bash", "clean"))
    assert cleaned.returncode == 0 and not JOB.exists(), cleaned.stderr


def convert() -> None:
    """Converts the job's memory to the universal form, Megatron's and Hugging Face's; in the README's folders."""
    made = [ROOT / "runs" / f"readme-{kind}" for kind in ("universal", "megatron", "hf")]
    for path in made:
        shutil.rmtree(path, ignore_errors=True)
    try:
        converted = run(block("bash", "runs/readme-megatron"), timeout_secs=120)
        assert converted.returncode == 0, converted.stderr
        assert (
            (made[0] / "manifest.json").exists()
            and list(made[1].rglob("*.distcp"))
            and (made[2] / "config.json").exists()
        )
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)


def test_layouts_for_the_launcher() -> None:
    text = block("bash", "--ftckpt-layouts").replace("torchrun.sh ", "torchrun.sh --dry-run ")
    text = text.replace("pretrain_gpt.py", "launch/train_gpt.py")
    shown = run(f"STABLE_HOST=somewhere; YOUR_MEGATRON_FLAGS='--lr 1e-3'; {text}")
    assert shown.returncode == 0, shown.stderr
    assert "--nnodes" in shown.stdout and "1:2" in shown.stdout
    config, _ = Config.from_flags(shlex.split(shown.stdout)[-3:])
    assert config.layouts == "tp8pp2,tp8pp1"


def six_lines(rank: int, world_size: int, text: str, settings: dict[str, Any]) -> int:
    import train_gpt

    import ftckpt.megatron

    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--iterations", "3"]))
    ftckpt.megatron.configure(Config(enabled=True, node="node", **settings))
    names = {
        "model": job.model,
        "optimizer": job.optimizer,
        "scheduler": job.scheduler,
        "data": job.data,
        "progress": job.progress,
        "last": 3,
        "train_step": lambda: train_gpt.train_step(job),
    }
    exec(text, names)
    return int(names["iteration"])


def test_six_lines_of_python(settings: dict[str, Any], arena_root: Path) -> None:
    results = run_ranks(six_lines, 2, block("python", "megatron.attach"), settings)
    assert [result.value for result in results] == [3, 3]
    assert not list(arena_root.iterdir())


def six_plain_lines(rank: int, world_size: int, text: str, settings: dict[str, Any]) -> int:
    import train_plain

    job = train_plain.build(train_plain.parse_args(["--layers", "1", "--hidden", "16", "--iterations", "3"]))
    names = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler, "data": job.data, "last": 3}

    names |= {"train_step": partial(train_plain.train_step, job), "torch": torch}
    with pytest.MonkeyPatch.context() as patch:
        flags = Config(enabled=True, node="node", **settings).flags()
        patch.setattr(sys, "argv", ["train.py", "--flag-of-the-script", *flags])
        patch.setattr(torch.distributed, "init_process_group", lambda backend: None)  # ranks of a test have theirs
        exec(text, names)
    return int(names["iteration"])


def test_six_lines_of_plain_python(settings: dict[str, Any], arena_root: Path) -> None:
    results = run_ranks(six_plain_lines, 2, block("python", "torch.attach"), settings, stand_in=False)
    assert [result.value for result in results] == [3, 3]
    assert not list(arena_root.iterdir())


@pytest.mark.slow
def test_the_launch_line_reaches_the_script(tmp_path: Path) -> None:
    """The line as it stands, on one rank, with a script that replaces Megatron-LM's."""
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import sys, ftckpt.megatron as m; print('RUNS', sys.argv[1:], m.integration.config.interval)")
    text = block("bash", "$YOUR_MEGATRON_FLAGS --ftckpt\n")
    text = text.replace("--nproc-per-node 8", "--standalone --nproc-per-node 1")
    result = run(f"cd {tmp_path}; YOUR_MEGATRON_FLAGS='--lr 1e-3'; export PYTHONPATH={ROOT}; {text}")
    assert "RUNS ['--lr', '1e-3'] auto" in result.stdout, result.stderr


@pytest.mark.slow
def test_the_section_and_the_line_for_deepspeed(tmp_path: Path) -> None:
    """Both as they stand, on one rank, with a script that trains nothing."""
    section = json.loads(block("json", "ftckpt"))["ftckpt"]
    assert Config.from_mapping(section) == Config(enabled=True)
    (tmp_path / "train.py").write_text("import sys, ftckpt.deepspeed, deepspeed; print('RUNS', sys.argv[1:])")
    text = block("bash", "--deepspeed_config").replace("--nproc-per-node 8", "--standalone --nproc-per-node 1")
    result = run(f"cd {tmp_path}; export PYTHONPATH={ROOT}; {text}")
    assert "RUNS ['--deepspeed_config', 'ds.json']" in result.stdout, result.stderr


def test_the_next_job_under_slurm(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/jobs\necho 7\n')
    sbatch.chmod(0o755)
    ran = run(f"PATH={tmp_path}:$PATH\n{block('bash', 'afternotok')}")
    first, following = (tmp_path / "jobs").read_text().splitlines()
    assert ran.returncode == 0 and first.startswith("--parsable ") and "--ftckpt-persist" in first
    assert following == first.replace("--parsable", "--dependency=afternotok:7")


def test_the_flags_file_lists_every_setting_with_its_default() -> None:
    text = (ROOT / "configs" / "ftckpt.flags").read_text()
    words = [word for line in text.splitlines() if not line.startswith("#") for word in line.split()]
    assert Config.from_flags(words) == (Config(enabled=True), [])
    for setting in fields(Config)[1:]:
        assert re.search(rf"--ftckpt-{setting.name.replace(chr(95), chr(45))}\b", text), setting.name


def test_what_is_on_storage_is_shown_verified_and_converted(arena_root: Path) -> None:
    runs = [ROOT / "runs" / name for name in ("readme-storage", "readme-stored")]
    for path in runs:
        shutil.rmtree(path, ignore_errors=True)
    runs[0].mkdir(parents=True)
    job = FlushJob(arena_root, str(runs[0]))
    try:
        job.start()
        job.snapshot(0, 7)
        job.flush(7)
        job.settled(7)
        shown = run(block("bash", "readme-stored"))
        assert shown.returncode == 0, shown.stderr
        assert "a restart would take iter_0000007" in shown.stdout and "iter_0000007 is pinned" in shown.stdout
        assert (runs[1] / "manifest.json").exists()
    finally:
        job.close()
        for path in runs:
            shutil.rmtree(path, ignore_errors=True)
