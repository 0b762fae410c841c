"""Which reader is for which checkpoint, and which writer for which name of a format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ftckpt.convert import arenas, safetensors, snapshots, universal
from ftckpt.convert.arenas import ArenaReader
from ftckpt.convert.catalog import Reader, Writer
from ftckpt.convert.deepspeed import files as deepspeed_files
from ftckpt.convert.deepspeed import universal_reader as deepspeed_universal
from ftckpt.convert.deepspeed.reader import DeepSpeedReader
from ftckpt.convert.deepspeed.universal_reader import DeepSpeedUniversalReader
from ftckpt.convert.deepspeed.universal_writer import DeepSpeedUniversalWriter
from ftckpt.convert.language.spec import Spec
from ftckpt.convert.megatron import dist_reader as megatron_dist
from ftckpt.convert.megatron import legacy_reader as megatron_legacy
from ftckpt.convert.megatron.dist_reader import MegatronDistReader
from ftckpt.convert.megatron.legacy_reader import MegatronLegacyReader
from ftckpt.convert.safetensors import MAX_FILE_BYTES, WeightsReader, WeightsWriter
from ftckpt.convert.snapshots import SnapshotReader
from ftckpt.convert.storage import PARTIAL
from ftckpt.convert.universal import UniversalReader, UniversalWriter
from ftckpt.errors import ConvertError


@dataclass(frozen=True)
class ReadOptions:
    """What a user says about the source."""

    spec: Spec | None = None
    iteration: int | None = None
    roles: frozenset[str] | None = None


class _Format(NamedTuple):
    """Whether a path is of a format, and how it is opened. ``takes`` are the options that mean something for it."""

    recognises: Callable[[Path], bool]
    open: Callable[[Sequence[Path], ReadOptions], Reader]
    takes: frozenset[str] = frozenset()


_FORMATS = {
    "universal": _Format(universal.recognises, lambda paths, options: UniversalReader(paths[0])),
    "ftckpt-snapshot": _Format(
        snapshots.recognises,
        lambda paths, options: SnapshotReader(paths[0], options.iteration, options.roles),
        frozenset({"iteration"}),
    ),
    "ftckpt": _Format(
        arenas.recognises,
        lambda paths, options: ArenaReader(paths, options.iteration, options.roles),
        frozenset({"iteration"}),
    ),
    "megatron-dist": _Format(
        megatron_dist.recognises,
        lambda paths, options: MegatronDistReader(paths[0], options.iteration, options.roles),
        frozenset({"iteration"}),
    ),
    "megatron-legacy": _Format(
        megatron_legacy.recognises,
        lambda paths, options: MegatronLegacyReader(paths[0], options.spec, options.iteration, options.roles),
        frozenset({"iteration", "spec"}),
    ),
    "deepspeed-universal": _Format(
        deepspeed_universal.recognises, lambda paths, options: DeepSpeedUniversalReader(paths[0])
    ),
    "deepspeed": _Format(
        deepspeed_files.recognises,
        lambda paths, options: DeepSpeedReader(paths[0], options.spec, options.roles),
        frozenset({"spec"}),
    ),
    "safetensors": _Format(safetensors.recognises, lambda paths, options: WeightsReader(paths[0])),
}
"""By origin; the first that recognises a path reads it: a universal checkpoint holds safetensors files, too."""


def _megatron_dist_writer(path: Path, max_file_bytes: int) -> Writer:
    # Here: torch's own checkpoints take about as long to import as torch, and no other format needs them.
    from ftckpt.convert.megatron.dist_writer import MegatronDistWriter

    return MegatronDistWriter(path, max_file_bytes)


_WRITERS: dict[str, Callable[[Path, int], Writer]] = {
    "universal": UniversalWriter,
    "deepspeed-universal": lambda path, max_file_bytes: DeepSpeedUniversalWriter(path),
    "megatron-dist": _megatron_dist_writer,
    "safetensors": WeightsWriter,
}

_DAMAGES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def open_reader(paths: Sequence[Path], options: ReadOptions) -> Reader:
    """The checkpoint in ``paths``; several are directories of the nodes of one job.

    Raises:
        ConvertError: none of the known formats, or an option means nothing for it.
    """
    for path in paths:
        if not path.exists():
            raise ConvertError(
                f"{path}: does not exist; a source is the directory of a checkpoint ({', '.join(_FORMATS)}); for "
                "snapshots in memory it is ARENA/ftckpt-JOB/NODE, of each node"
            )
        # The name may be a link, or that of a tag's directory inside something unfinished.
        resolved = path.resolve()
        if any(name.endswith(PARTIAL) for name in (path.name, resolved.name, resolved.parent.name)):
            raise ConvertError(f"{path}: was never completed; finish what writes it, or remove it")
    names = [format_of(path) for path in paths]
    if len(paths) > 1 and set(names) != {"ftckpt"}:
        raise ConvertError(f"{', '.join(map(str, paths))}: only directories of nodes with arenas can be several")
    opener = _FORMATS[names[0]]
    for name, option in (("spec", "--spec"), ("iteration", "--iteration")):
        if getattr(options, name) is not None and name not in opener.takes:
            raise ConvertError(f"{option}: means nothing for {paths[0]}, which is {names[0]}")
    try:
        return opener.open(paths, options)
    except _DAMAGES as error:  # files of others can hold anything: whatever a reader trips over is damage
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConvertError(f"{paths[0]}: is damaged, or is not what a {names[0]} checkpoint is: {text}") from error


def format_of(path: Path) -> str:
    """The name of a checkpoint's format. Raises ConvertError where it is none that is known."""
    for name, opener in _FORMATS.items():
        if opener.recognises(path):
            return name
    raise ConvertError(f"{path}: is no checkpoint that is known here; known are {', '.join(_FORMATS)}")


def open_writer(path: Path, to: str, max_file_bytes: int = MAX_FILE_BYTES) -> Writer:
    """A writer of format ``to`` at ``path``. Raises ConvertError for a name that is not known."""
    if to not in _WRITERS:
        raise ConvertError(f"--to: {to!r} is not known; known are {', '.join(_WRITERS)}")
    return _WRITERS[to](path, max_file_bytes)
