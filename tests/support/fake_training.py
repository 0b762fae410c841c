"""One iteration of training on ``FakeDevice`` with a snapshot beside it."""

from __future__ import annotations

import torch

from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.schedule.bubbles import Bubbles, WindowPlan
from ftckpt.schedule.clock import DeviceClock
from ftckpt.schedule.iteration import IterationForecast
from tests.support.device_states import CPU, Landings, assert_holds, plan, shared_slot
from tests.support.fake_device import PAGE, SECS, FakeDevice

KINDS = ("start", "window", "forward", "window", "backward", "window", "forward", "tail", "fence", "optimizer")
SECS_OF = (0.0, 3.0, 2.0, 2.0, 4.0, 0.0, 1.0, 1.0, 0.0, 1.0)
"""In units of one copy. The windows take 6."""


class Run:
    """One iteration of training with a snapshot of ``num`` chunks, each of a page."""

    def __init__(self, fake: FakeDevice, copier: DeviceCopier, slot: torch.Tensor, num: int) -> None:
        self.fake, self.copier = fake, copier
        self.tensors = [torch.arange(num * PAGE // 4, dtype=torch.float32)]
        self.boundary = [self.tensors[0].clone()]
        self.copies, _ = plan(self.tensors, PAGE)
        self.slot, self.clock, self.bubbles = slot, DeviceClock(CPU), Bubbles(queued=True)
        self.plan = WindowPlan.of(IterationForecast(KINDS, SECS_OF), PAGE, PAGE)
        base = self.clock.mark()
        self.marks = [base]
        self.bubbles.begin(num * PAGE, self.plan)
        self.bubbles.enter(0, "start", base)
        self.seen = Landings(self.copies, slot, base)
        self.flight = self.seen.flight

    @property
    def planned(self) -> list[int]:
        """Chunks per place, if the iteration goes by the plan."""
        left, chunks = len(self.copies) * PAGE, []
        for place in range(len(KINDS)):
            nbytes = self.plan.allowed(place, left)
            left -= nbytes
            chunks.append(nbytes // PAGE)
        return chunks

    @property
    def done(self) -> list[int]:
        """Chunks that the device copied at each place."""
        chunks, place = [0] * len(KINDS), 0
        for entry in self.fake.log:
            if isinstance(entry, str):
                place = int(entry)
            else:
                chunks[place] += 1
        return chunks

    def start(self) -> None:
        self.copier.start(self.tensors, self.flight, self.bubbles)

    def enter(self, places: range) -> None:
        """The host passes these places, and the device has to do later what each takes."""
        for place in places:
            self.fake.compute_step(str(place))
            mark = self.clock.mark()
            self.marks.append(mark)
            self.bubbles.enter(place, KINDS[place], mark)
            self.fake.compute.enqueue(millis=SECS_OF[place])

    def fence_and_step(self) -> None:
        assert self.copier.fence(self.flight, SECS)
        self.fake.compute.enqueue(self.tensors[0].zero_)

    def finish(self) -> None:
        self.fake.go.set()
        self.seen.wait()
        self.fake.compute.synchronize()
        assert self.seen.arrived
        assert_holds(self.slot, self.copies, self.boundary)
        assert not self.tensors[0].any()


def slot_for(num: int) -> torch.Tensor:
    return shared_slot((num + 1) * PAGE)
