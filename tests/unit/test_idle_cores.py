"""Background copies leave cores to training, and wait for one no longer than training gives them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from ftckpt.capture import copier as copier_module
from ftckpt.capture.copier import HostCopier
from ftckpt.idle_cores import has_idle_core, waits
from tests.unit.test_copier import LONG_SECS, Watched


def test_spinning_processes_leave_no_core_idle() -> None:
    spin = "print(flush=True)\nwhile True:\n    pass"
    spinning = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)
    ]
    try:
        for process in spinning:
            assert process.stdout is not None and process.stdout.readline()
        assert not has_idle_core()
    finally:
        for process in spinning:
            process.kill()
            process.communicate()


def test_a_thread_waits_until_it_computes() -> None:
    goes, ends = threading.Event(), threading.Event()

    def run() -> None:
        goes.wait()
        while not ends.is_set():
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        deadline = time.monotonic() + LONG_SECS
        while not waits(thread):
            assert time.monotonic() < deadline
        goes.set()
        while waits(thread):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        goes.set()
        ends.set()
        thread.join()
    assert waits(thread)  # nobody is kept from a core by one that has ended


def test_while_training_computes_copies_wait_for_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    monkeypatch.setattr(copier_module, "has_idle_core", lambda: bool(looked.release()))
    monkeypatch.setattr(copier_module, "waits", lambda thread: False)
    with closing(HostCopier()) as copier:
        watched = Watched()
        flight = watched.start(copier)
        for _ in range(3):
            assert looked.acquire(timeout=LONG_SECS)
        assert not watched.slot.any()
        assert copier.fence(flight, LONG_SECS)
        assert watched.copied


def test_copies_go_on_beside_others_while_training_itself_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(copier_module, "has_idle_core", lambda: bool(looks.append(None)))
    monkeypatch.setattr(copier_module, "waits", lambda thread: True)
    with closing(HostCopier()) as copier:
        flight = Watched().start(copier)
        assert flight.wait(LONG_SECS)
    # The patience is one for all of a snapshot's copies.
    assert len(looks) == copier_module._PATIENCE + len(flight.copies)
