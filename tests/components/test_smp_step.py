"""The SMP by itself, in a step under Slurm or in a container of a pod: when memory is saved and emptied, and when it
stays."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.errors import lacks
from tests.support.repository import ROOT
from tests.support.waiting import until

PYTHON = """#!/bin/bash
cd {here}
case "$*" in
*" ftckpt.smp "*)
    [ ! -f smp.ends ] || exit 3
    echo "$@" >words
    echo $$ >pid
    trap 'echo ended >>log; [ -f deaf ] || exit 0' TERM
    touch runs
    while :; do sleep 0.05; done
    ;;
*" save "*)
    echo save "${{@: -1}}" >>times
    echo save >>log
    if [ -f fails ]; then [ ! -e once.left ] || rm fails once.left; exit 2; fi
    cat saved
    ;;
*" clean "*) echo removed arenas; cat kept >&2; echo clean >>log && rm -r memory/ftckpt-job ;;
esac
"""
SAVED = "node n: iteration 7 is at /storage, after 0.1 s\n"
NOT_WANTED = "node n: nothing is saved: the job has --ftckpt-persist-at-end off\n"
STAYS = "Requeue=1 Restarts=2 PreemptTime=None"
REQUEUED = "Requeue=1 Restarts=3"
GIVES_WAY = "Requeue=1 Restarts=2 PreemptTime=2026-11-25T21:18:35"


class Step:
    """``smp_step.sh`` with stand-ins for Python, ``squeue`` and ``scontrol``."""

    SCRIPT = "smp_step.sh"

    def __init__(self, here: Path, persists: str, slurm: tuple[str, str], saved: str = SAVED) -> None:
        self.here, self.memory = here, here / "memory" / "ftckpt-job"
        self.memory.mkdir(parents=True)
        (here / "saved").write_text(saved)
        for name in ("log", "kept"):
            (here / name).touch()
        says = dict(zip(("squeue", "scontrol"), slurm, strict=True))
        scripts = {"python3": PYTHON.format(here=here), **{n: f"#!/bin/bash\necho '{t}'\n" for n, t in says.items()}}
        for name, text in scripts.items():
            (here / name).write_text(text)
            (here / name).chmod(0o755)
        self._command = ["bash", str(ROOT / "launch" / self.SCRIPT), "job", str(here / "memory"), persists]
        self.env = {
            **os.environ, "PATH": f"{here}:{os.environ['PATH']}", "FTCKPT_PYTHON": str(here / "python3"),
            "FTCKPT_SAVE_SECS": "4", "SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n",
            "SLURM_RESTART_COUNT": "2",
        }  # fmt: skip

    def end(self, told: bool = True) -> tuple[int, list[str]]:
        """The code with which it ends, and what was called."""
        said = (self.here / "said").open("w")
        with said, subprocess.Popen(self._command, env=self.env, stdout=said) as process:
            try:
                if told:
                    until((self.here / "runs").exists, "the SMP does not run")
                    process.send_signal(signal.SIGTERM)
                code = process.wait(30)
            finally:
                process.kill()
                with suppress(OSError):  # it runs in a process group of its own
                    os.kill(int((self.here / "pid").read_text()), signal.SIGKILL)
        return code, (self.here / "log").read_text().split()


@pytest.mark.parametrize(
    ("persists", "slurm", "saved", "called"),
    [
        pytest.param("1", ("COMPLETING", STAYS), SAVED, ["save", "clean", "ended"], id="cancelled"),
        pytest.param("1", ("COMPLETING", REQUEUED), SAVED, ["save", "clean", "ended"], id="requeued"),
        pytest.param("1", ("RUNNING", GIVES_WAY), SAVED, ["save", "clean", "ended"], id="gives way"),
        pytest.param("", ("COMPLETING", STAYS), SAVED, ["clean", "ended"], id="cancelled without storage"),
        pytest.param("", ("COMPLETING", REQUEUED), SAVED, ["ended"], id="requeued without storage"),
        pytest.param("", ("RUNNING", GIVES_WAY), SAVED, ["ended"], id="gives way without storage"),
        pytest.param("1", ("COMPLETING", STAYS), NOT_WANTED, ["save", "ended"], id="wants no save"),
        pytest.param("1", ("RUNNING", STAYS), SAVED, ["ended"], id="goes on"),
    ],
)
def test_memory_goes_when_it_is_of_no_more_use(
    persists: str, slurm: tuple[str, str], saved: str, called: list[str], tmp_path: Path
) -> None:
    step = Step(tmp_path, persists, slurm, saved)
    assert step.end() == (143, called)
    assert step.memory.exists() == ("clean" not in called)


def test_a_save_that_fails_is_tried_again_and_memory_stays(tmp_path: Path) -> None:
    step = Step(tmp_path, "1", ("COMPLETING", STAYS))
    (tmp_path / "fails").touch()
    code, called = step.end()
    assert code == 143 and called.count("save") > 1 and "clean" not in called and step.memory.exists()


def test_a_save_that_succeeds_in_the_end_counts(tmp_path: Path) -> None:
    """Ranks take their time to end."""
    step = Step(tmp_path, "1", ("COMPLETING", STAYS))
    (tmp_path / "fails").touch()
    (tmp_path / "once.left").touch()
    assert step.end() == (143, ["save", "save", "clean", "ended"])


def test_where_the_log_is_kept_is_said(tmp_path: Path) -> None:
    step = Step(tmp_path, "", ("COMPLETING", STAYS))
    (tmp_path / "kept").write_text("its log is kept in /home\n")
    assert step.end() == (143, ["clean", "ended"])
    assert not lacks((tmp_path / "said").read_text(), "smp_step.sh", "/home")


def test_the_end_of_the_smp_is_that_of_the_step(tmp_path: Path) -> None:
    step = Step(tmp_path, "1", ("RUNNING", STAYS))
    (tmp_path / "smp.ends").touch()
    assert step.end(told=False) == (3, []) and step.memory.exists()


def test_an_smp_that_does_not_end_is_killed(tmp_path: Path) -> None:
    step = Step(tmp_path, "1", ("RUNNING", STAYS))
    step.env["FTCKPT_SMP_END_SECS"] = "1"
    (tmp_path / "deaf").touch()
    assert step.end() == (143, ["ended"])


class PodStep(Step):
    """``smp_pod.sh`` with a stand-in for Python; a rank has got so far as to have memory."""

    SCRIPT = "smp_pod.sh"

    def __init__(self, here: Path, *, has_memory: bool = True) -> None:
        super().__init__(here, "", ("", ""))
        (self.memory / "n" / (".mirror" if not has_memory else "dp0.00000000")).mkdir(parents=True)
        self.env |= {"FTCKPT_NODE": "n", "FTCKPT_SAVE_SECS": "7"}


def test_a_pod_that_goes_saves_and_keeps_its_memory(tmp_path: Path) -> None:
    step = PodStep(tmp_path)
    assert step.end() == (143, ["save", "ended"]) and step.memory.exists()
    assert (tmp_path / "times").read_text() == "save 7\n"
    words = (tmp_path / "words").read_text()
    assert "--node n " in words and "--stand-by" in words, "another SMP may serve when it starts again"


def test_a_pod_without_memory_has_nothing_to_save(tmp_path: Path) -> None:
    assert PodStep(tmp_path, has_memory=False).end() == (143, ["ended"])


def test_the_smp_of_a_pod_ends_whatever_became_of_the_save(tmp_path: Path) -> None:
    step = PodStep(tmp_path)
    (tmp_path / "fails").touch()
    assert step.end() == (143, ["save", "ended"])


def test_the_end_of_the_smp_is_that_of_the_container(tmp_path: Path) -> None:
    step = PodStep(tmp_path)
    (tmp_path / "smp.ends").touch()
    assert step.end(told=False) == (3, [])
