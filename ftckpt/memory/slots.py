"""The slot files of an arena: created, mapped and deleted one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ftckpt.errors import ArenaError, CorruptError, MismatchError
from ftckpt.memory.atomic_files import fresh_name, replace_file
from ftckpt.memory.control_block import ControlBlock, SlotState
from ftckpt.memory.image import SlotImage, parse_image
from ftckpt.memory.mapping import Mapping, create_mapping, open_mapping

HEADER_NAME = "header"
"""The file with the header that starts each slot: it identifies an arena that has no allocated slot."""


def slot_name(slot: int) -> str:
    """File name of a slot."""
    return f"slot{slot}.safetensors"


class FreshSlot:
    """A slot file under construction: mapped under a temporary name, all pages allocated, the header written.
    Without ``reserves`` it has no header, and only pages that ``write_at`` writes.

    The caller ends it by ``take`` or ``discard``; after an error no file is left.

    Raises:
        MemoryBudgetError: the file system is full.
        ArenaError: the file cannot be created, or ``halted``, polled every 256 MiB, returned true.
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
        """Give the file its final name and return the mapping, which the caller owns. Discards on ArenaError."""
        try:
            # Renamed after the header is written: a kill before this leaves the slot unallocated, not damaged.
            self._fresh.rename(self._path)
        except OSError as error:
            self.discard()
            raise ArenaError(f"{self._path}: cannot be created: {error.strerror}") from None
        self._name.close()
        return self._mapping

    def discard(self) -> None:
        """Unmap and delete the file."""
        self._mapping.close()
        self._name.close()


SlotMapping = Mapping | str | None
"""A mapped slot; the reason why a slot is damaged; None: not allocated."""


def open_slot(arena: Path, nbytes: int, control: ControlBlock, slot: int, writable: bool) -> SlotMapping:
    """Map a slot file. A slot without a file is unallocated if its record is EMPTY, otherwise damaged.

    Raises:
        MemoryBudgetError: a file opened for writing has holes and the file system is too full to fill them.
    """
    path, problem = arena / slot_name(slot), ""
    for _ in range(2):  # twice: a missing file may have been created before its record was read
        try:
            return open_mapping(path, nbytes, writable)
        except ArenaError as error:
            problem = str(error)
        # In this order: a writer that frees a slot invalidates its record before it deletes the file.
        missing, record = not os.path.lexists(path), control.record(slot)
        if missing and record.state == SlotState.EMPTY and not record.torn:
            return None
    return problem


def write_header(directory: Path, image: SlotImage) -> None:
    """Create the file ``header`` of an arena under construction."""
    replace_file(directory / HEADER_NAME, image.header)


def header_file_good(directory: Path, image: SlotImage) -> bool:
    """Whether the file ``header`` is intact, so that it identifies the arena without any slot."""
    try:
        return (directory / HEADER_NAME).read_bytes() == image.header
    except OSError:
        return False


def image_of_files(path: Path, slots: int, digest: bytes) -> SlotImage:
    """The image from the first intact header, of the file ``header`` or of a slot, that has the control block's
    manifest digest.

    Raises:
        CorruptError: no such header.
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
            # An intact header may belong to another arena: the control block identifies this one.
            if image.manifest.digest == digest:
                return image
            errors.append(f"{name}: its manifest differs from the control block's")
        except (CorruptError, MismatchError) as error:
            errors.append(f"{name}: {error}")
        finally:
            mapping.close()
    raise CorruptError(f"{path}: no usable header: {'; '.join(errors)}")
