"""A whole capture over ``FakeDevice``, with a control block that only writes down what it was told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.capture import capture as capture_module
from ftckpt.capture.capture import Capture
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.memory.control_block import SlotState
from ftckpt.model.snapshot import SnapshotId
from ftckpt.schedule.clock import DeviceClock
from tests.support.device_states import CPU, assert_holds, live_state, plan, shared_slot
from tests.support.fake_device import PAGE, SECS, FakeDevice
from tests.support.waiting import until

SNAPSHOT = SnapshotId(b"l" * 16, 7)


class Control:
    """The control block's part in a capture: what was told of its one slot, in order."""

    slots = 1

    def __init__(self) -> None:
        self.told: list[str] = []
        self.state = SlotState.EMPTY

    def snapshot(self, _slot: int) -> SnapshotId | None:
        return SNAPSHOT if self.state == SlotState.SEALED else None

    def begin(self, _slot: int) -> None:
        self._tell("begin", SlotState.WRITING)

    def set_objects(self, _slot: int, nbytes: int, digest: int) -> None: ...

    def seal(self, _slot: int, _snapshot: SnapshotId, hashed: bool) -> None:
        self._tell("seal", SlotState.SEALED)

    def void(self, _slot: int) -> None:
        self._tell("void", SlotState.EMPTY)

    def _tell(self, what: str, state: SlotState) -> None:
        self.told.append(what)
        self.state = state


class DeviceSnapshots:
    """A capture of ``live_state`` into one slot. ``copier`` is the device's, ``slot`` the bytes in host memory; the
    last ``volatile`` chunks are of volatile state."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        windows: Any = None,
        tensors: Sequence[torch.Tensor] = (),
        settled: bool = True,
        volatile: int = 0,
    ) -> None:
        self.tensors = list(tensors) or live_state()
        self.boundary = [tensor.clone() for tensor in self.tensors]
        self.copies, size = plan(self.tensors, 3 * PAGE, parity=not volatile)
        self.slot, self.control = shared_slot(size), Control()
        arena: Any = SimpleNamespace(
            control=self.control,
            image=SimpleNamespace(
                num_stepped_chunks=len(self.copies) - volatile,
                objects=SimpleNamespace(begin=0, end=PAGE, nbytes=PAGE),
                manifest=None,
            ),
            slot=lambda _slot: memoryview(self.slot.numpy()),
            slot_error=lambda _slot: None,
            checks=None,
            hash_chunk=lambda _slot, _chunk: 0,
        )
        monkeypatch.setattr(capture_module, "chunk_copies", lambda image, parts: self.copies)
        pieces: Any = [
            SimpleNamespace(tensor=tensor, counted=None, fragment=SimpleNamespace(key=str(at)))
            for at, tensor in enumerate(self.tensors)
        ]
        self.copier = DeviceCopier(DeviceClock(CPU), own_stream=True)
        self.capture = Capture(arena, pieces, [], self.copier, windows)
        if settled:
            self.copier._registrar.begin()
            until(lambda: self.copier._registrar.idle, "registered", SECS)
        FakeDevice.now.copies = 0  # of the warm-up
        FakeDevice.now.log.clear()

    def begin(self) -> None:
        self.capture.at_boundary()
        self.capture.begin(SNAPSHOT, (), {})

    def take(self) -> None:
        """One snapshot, whole and sealed, with an optimizer's step behind its fence."""
        self.boundary = [tensor.clone() for tensor in self.tensors]
        self.begin()
        self.capture.fence(SECS)
        for tensor in self.tensors:
            FakeDevice.now.compute.enqueue(lambda tensor=tensor: tensor.add_(1))
        self.capture.settle(SECS)
        FakeDevice.now.compute.synchronize()
        assert self.control.told[-1] == "seal"
        self.assert_boundary()

    def assert_boundary(self) -> None:
        assert_holds(self.slot, self.copies, self.boundary, begin=PAGE)  # the first page is that of the objects
