"""Snapshot after snapshot in orders that nobody has thought of, each compared bit for bit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ftckpt.commands.device_bench import FLIGHT_SECS, Bench, NoWindow
from ftckpt.commands.findings import FAILED, PASSED, Finding
from ftckpt.errors import in_words
from ftckpt.windows.bubbles import Always, Turn, Windows

_AREA, _NAME = "device", "random orders"
_MOST_PAUSE_SECS = 0.003
"""Between two chunks: about as long as one takes."""
_TOLD_SECS = 10.0


class Thorough(NamedTuple):
    """For how long, and by which seed; None: by one that is drawn."""

    secs: float
    seed: int | None = None


NOT_THOROUGH = Thorough(0.0)


class _Pauses(Always):
    """Windows that come and go; the fence hurries some copies and not others."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
        hurry.wait(self._dice.uniform(0, _MOST_PAUSE_SECS))
        return Turn()


def look_thoroughly(
    bench: Bench, secs: float, seed: int | None = None, tell: Callable[[str], None] = print
) -> Finding:
    """Training that computes, comes to the fence and writes at random moments, for ``secs``.

    The text has the ``seed``: with it all is done again as it was, but for what device and kernel time.
    """
    seed = random.randrange(1 << 32) if seed is None else seed
    dice, begin, rounds, longest, told = random.Random(seed), time.monotonic(), 0, 0.0, 0.0
    while (passed := time.monotonic() - begin) < secs:
        if passed - told >= _TOLD_SECS:
            told = passed
            tell(f"        {_AREA}: {_NAME}: {rounds} snapshots in {passed:.0f} of {secs:.0f} s")
        try:
            fence_secs, differing = _round(bench, dice)
        except Exception as error:
            raise RuntimeError(f"snapshot {rounds + 1} of those by seed {seed}: {in_words(error)}") from error
        rounds, longest = rounds + 1, max(longest, fence_secs)
        if differing:
            text = f"snapshot {rounds} of those by seed {seed}: {differing} bytes are not those of the device"
            return Finding(
                _AREA, _NAME, FAILED, text, "do not use ftckpt here; tell us, with the JSON", {"seed": seed}
            )
    text = f"{rounds} snapshots in {secs:.0f} s (seed {seed}): every byte is right; the longest fence took "
    figures = {"seed": seed, "rounds": rounds, "longest_fence_secs": longest}
    return Finding(_AREA, _NAME, PASSED, f"{text}{longest * 1e3:.1f} ms", figures=figures)


def _round(bench: Bench, dice: random.Random) -> tuple[float, int]:
    """One snapshot: how long the host waited at its fence, and how many bytes are wrong."""
    wanted = bench.on_host()
    # Dice of their own for windows, which are asked on another thread.
    kinds: tuple[Callable[[], Windows], ...] = (Always, NoWindow, lambda: _Pauses(random.Random(dice.random())))
    flight = bench.flight(dice.choice(kinds)())
    _train(bench, dice)
    begin = time.perf_counter()
    if not bench.copier.fence(flight, FLIGHT_SECS):
        raise TimeoutError(f"the fence did not come to pass: {flight.error}")
    fence_secs = time.perf_counter() - begin
    _write(bench, dice)
    if dice.random() < 0.5:  # what the device does behind the fence meets copies that are still under way
        _train(bench, dice)
    bench.wait(flight)
    bench.synchronize()
    return fence_secs, bench.differing(wanted)


def _train(bench: Bench, dice: random.Random) -> None:
    """Some compute, and what a training thread may do besides: allocate, wait for the device, capture a graph."""
    device = bench.clock.device if bench.clock.on_device else torch.device("cpu")
    work = torch.ones(dice.choice((16, 256, 1024)), 256, device=device)
    for _ in range(dice.randrange(8)):
        work = work @ torch.ones(256, 256, device=device)
    if not bench.clock.on_device:
        time.sleep(dice.choice((0.0, 0.0, 0.001)))
        return
    what = dice.randrange(4)
    if what == 0:
        bench.synchronize()
    elif what == 1:
        bench.synchronize()  # as torch does before it captures
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            work.add_(1)
    elif what == 2:
        work.sum().item()


def _write(bench: Bench, dice: random.Random) -> None:
    """All tensors or some, in any order, by new values each time."""
    order = list(range(len(bench.state)))
    dice.shuffle(order)
    for index in order[: dice.randint(1, len(order))]:
        tensor = bench.state[index]
        tensor.copy_(torch.randint(-8, 8, tensor.shape, device=tensor.device))
