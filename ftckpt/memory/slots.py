"""The slot files of an arena: made, mapped and given back one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ftckpt.errors import ArenaError, CorruptError, MismatchError
from ftckpt.memory.control_block import ControlBlock, SlotState
from ftckpt.memory.directory import fresh_name
from ftckpt.memory.image import SlotImage, parse_image
from ftckpt.memory.mapping import Mapping, create_mapping, open_mapping

HEADER_NAME = "header"
"""The file with the bytes that each slot begins with: an arena is known by it before a slot has memory."""


def slot_name(slot: int) -> str:
    """File name of a slot."""
    return f"slot{slot}.safetensors"


class FreshSlot:
    """A slot's file before it is one: mapped, all pages allocated, the header written, under a name of its own.
    Where it ``reserves`` none it has the pages alone that are written by ``write_at``, and no header.

    Ends with ``take`` or ``discard``.

    Raises:
        MemoryBudgetError: no room; nothing is left behind.
        ArenaError: the file cannot be created, or ``halted``, asked every some 100 MB, said so; the same.
    """

    def __init__(
        self, path: Path, image: SlotImage, halted: Callable[[], bool] = bool, *, reserves: bool = True
    ) -> None:
        self._path = path
        with ExitStack() as undo:
            self._fresh = undo.enter_context(fresh_name(path))
            try:
                self._mapping = create_mapping(self._fresh, image.file_bytes, halted, reserves=reserves)
            except OSError as error:
                raise ArenaError(f"{path}: cannot be created: {error.strerror}") from None
            if reserves:
                self._mapping.data[: len(image.header)] = image.header
            self._name = undo.pop_all()

    def take(self) -> Mapping:
        """Give the file its name; the mapping is the caller's. Raises ArenaError, and is discarded."""
        try:
            # Named when it has its header: killed before this, the slot is not allocated, and not a damaged one.
            self._fresh.rename(self._path)
        except OSError as error:
            self.discard()
            raise ArenaError(f"{self._path}: cannot be created: {error.strerror}") from None
        self._name.close()
        return self._mapping

    def discard(self) -> None:
        """Give the memory back."""
        self._mapping.close()
        self._name.close()


SlotMapping = Mapping | str | None
"""A slot that is mapped; why it is damaged; or not allocated: without a file."""


def open_slot(arena: Path, nbytes: int, control: ControlBlock, slot: int, writable: bool) -> SlotMapping:
    """Map what is there. A missing file is damage if the record claims anything, else not allocated.

    Raises:
        MemoryBudgetError: a slot to be written has holes and there is no room to fill them.
    """
    path, problem = arena / slot_name(slot), ""
    for _ in range(2):  # a file that was missing may have been made before its record was read
        try:
            return open_mapping(path, nbytes, writable)
        except ArenaError as error:
            problem = str(error)
        # In this order: whoever frees a slot voids its record before it deletes the file.
        missing, record = not os.path.lexists(path), control.record(slot)
        if missing and record.state == SlotState.EMPTY and not record.torn:
            return None
    return problem


def write_header(directory: Path, image: SlotImage) -> None:
    """Make the file ``header`` of an arena that is being created."""
    with fresh_name(directory / HEADER_NAME) as fresh:
        with open(fresh, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(image.header)
        fresh.rename(directory / HEADER_NAME)


def header_file_good(directory: Path, image: SlotImage) -> bool:
    """Whether the arena is known by its file ``header``, whatever becomes of its slots."""
    try:
        return (directory / HEADER_NAME).read_bytes() == image.header
    except OSError:
        return False


def image_of_files(path: Path, slots: int, digest: bytes) -> SlotImage:
    """The image that the first sound header gives, the file's or a slot's, if the control block was made for its
    manifest.

    Raises:
        CorruptError: there is no sound header.
    """
    errors = []
    for name in (HEADER_NAME, *map(slot_name, range(slots))):
        try:
            mapping = open_mapping(path / name, None, writable=False)
        except ArenaError as error:
            errors.append(str(error))
            continue
        try:
            image = parse_image(mapping.data)
            # A sound header may be another arena's: whose this one is says the control block.
            if image.manifest.digest == digest:
                return image
            errors.append(f"{name}: its manifest is not the one of the control block")
        except (CorruptError, MismatchError) as error:
            errors.append(f"{name}: {error}")
        finally:
            mapping.close()
    raise CorruptError(f"{path}: no usable header: {'; '.join(errors)}")
