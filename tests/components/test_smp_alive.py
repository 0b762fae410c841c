"""An SMP in a container of its own: its probe, and how it stands by while another one serves."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.errors import SmpError
from ftckpt.memory.locks import JOB_LOCK_NAME
from ftckpt.smp import __main__ as smp_main
from ftckpt.smp.requests import PersistRequest
from tests.support.mounting import rank_elsewhere
from tests.support.smps import JOB, NODE, SmpSite, answers, site_at
from tests.support.waiting import until


@pytest.fixture
def site(arena_root: Path) -> Iterator[SmpSite]:
    with site_at(arena_root) as one:
        yield one


def test_a_probe_is_content_with_an_smp_that_moves_and_with_no_other(
    site: SmpSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = argparse.Namespace(job=JOB, node=NODE, arena=site.root)
    assert smp_main.alive(asked) == 1 and capsys.readouterr().err
    pid = site.start().status()["pid"]
    assert smp_main.alive(asked) == 0
    os.kill(pid, signal.SIGSTOP)
    assert smp_main.alive(asked) == 0, "one that is slow is healthy"
    monkeypatch.setattr(smp_main, "MAX_SILENT_SECS", 0.2)
    until(lambda: smp_main.alive(asked) == 1)
    assert capsys.readouterr().err
    os.kill(pid, signal.SIGKILL)
    until(lambda: not site.pids())
    assert smp_main.alive(asked) == 1


def test_one_that_stands_by_serves_when_the_other_one_has_ended(site: SmpSite) -> None:
    client = site.start()
    first = client.status()["pid"]
    with subprocess.Popen(site.command("--stand-by"), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stderr.readline()
        assert process.poll() is None and client.status()["pid"] == first
        os.kill(first, signal.SIGKILL)
        until(lambda: answers(client) and client.status()["pid"] == process.pid)
        process.terminate()
        assert process.wait(20) == 0


def test_the_name_of_the_node_is_that_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCKPT_NODE", "pod-0")
    parser = argparse.ArgumentParser()
    smp_main.add_arguments(parser)
    assert parser.parse_args(["--job", "a"]).node == "pod-0"


def test_nothing_is_saved_while_ranks_of_another_container_train(site: SmpSite, tmp_path: Path) -> None:
    client = site.start()
    client.configure(site.description(persist=str(tmp_path)))
    request = PersistRequest("", 5.0, anew=True)
    with rank_elsewhere(site.node_dir, site.node_dir / JOB_LOCK_NAME):
        with pytest.raises(SmpError):
            client.persist(request)
        assert [one["lives"] for one in client.status()["trainers"]] == [None]
    assert client.persist(request)["flush"] in ("working", "cannot")
    assert [one["lives"] for one in client.status()["trainers"]] == [False]
