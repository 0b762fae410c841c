"""The SMP's loop waits for requests, and for the signal that ends it."""

from __future__ import annotations

from tests.support.processes import run_python

SCRIPT = """
import signal, time
from ftckpt.events import Events
from ftckpt.smp.server import Server

def handler(*_):  # what delays it until behind the deadline may be a busy machine
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until:
        pass

server = Server({}, find=lambda name: None, events=Events(None, 0))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.01)
server.poll(0.02)
print("polled")
"""


def test_a_signal_that_comes_as_a_wait_runs_out_ends_the_wait() -> None:
    done = run_python(SCRIPT, secs=30)
    assert done.stdout == "polled\n", done.stderr
