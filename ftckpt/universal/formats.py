"""Which reader is for which checkpoint, and which writer for which name of a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ftckpt.errors import ConvertError
from ftckpt.persist.paths import locate
from ftckpt.universal import arenas, safetensors, snapshots, universal_format
from ftckpt.universal.arenas import ArenaReader
from ftckpt.universal.catalog import Reader, Writer
from ftckpt.universal.deepspeed import files as deepspeed_files
from ftckpt.universal.deepspeed import universal_reader as deepspeed_universal
from ftckpt.universal.deepspeed.reader import DeepSpeedReader
from ftckpt.universal.deepspeed.universal_reader import DeepSpeedUniversalReader
from ftckpt.universal.deepspeed.universal_writer import DeepSpeedUniversalWriter
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron import dist_reader as megatron_dist
from ftckpt.universal.megatron import legacy_reader as megatron_legacy
from ftckpt.universal.megatron.dist_reader import MegatronDistReader
from ftckpt.universal.megatron.legacy_reader import MegatronLegacyReader
from ftckpt.universal.safetensors import MAX_FILE_BYTES, WeightsReader, WeightsWriter
from ftckpt.universal.snapshots import SnapshotReader
from ftckpt.universal.storage import PARTIAL
from ftckpt.universal.universal_format import UniversalReader, UniversalWriter


@dataclass(frozen=True)
class ReadOptions:
    """What a user says about the source."""

    spec: Spec | None = None
    iteration: int | None = None
    roles: frozenset[str] | None = None


class _Format(NamedTuple):
    """Whether a path is of a format, and how it is opened.

    ``title``: what it is, for people. ``takes``: the options that mean something for it. ``newest``: of several in a
    directory the one that is read.
    """

    title: str
    recognises: Callable[[Path], bool]
    open: Callable[[Sequence[Path], ReadOptions], Reader]
    takes: frozenset[str] = frozenset()
    newest: Callable[[Path], Path] = Path.absolute


_FORMATS = {
    "universal": _Format(
        "a universal checkpoint", universal_format.recognises, lambda paths, options: UniversalReader(paths[0])
    ),
    "ftckpt-snapshot": _Format(
        "snapshots on storage",
        snapshots.recognises,
        lambda paths, options: SnapshotReader(paths[0], options.iteration, options.roles),
        frozenset({"iteration"}),
    ),
    "ftckpt": _Format(
        "snapshots in memory",
        arenas.recognises,
        lambda paths, options: ArenaReader(paths, options.iteration, options.roles),
        frozenset({"iteration"}),
    ),
    "megatron-dist": _Format(
        "a Megatron torch_dist checkpoint",
        megatron_dist.recognises,
        lambda paths, options: MegatronDistReader(paths[0], options.iteration, options.roles),
        frozenset({"iteration"}),
        lambda path: megatron_dist.iteration_directory(path, None),
    ),
    "megatron-legacy": _Format(
        "a Megatron checkpoint of the format torch",
        megatron_legacy.recognises,
        lambda paths, options: MegatronLegacyReader(paths[0], options.spec, options.iteration, options.roles),
        frozenset({"iteration", "spec"}),
        lambda path: megatron_legacy.find(path, None),
    ),
    "deepspeed-universal": _Format(
        "a DeepSpeed universal checkpoint",
        deepspeed_universal.recognises,
        lambda paths, options: DeepSpeedUniversalReader(paths[0]),
        newest=lambda path: deepspeed_files.tag_directory(path, deepspeed_files.LATEST_UNIVERSAL),
    ),
    "deepspeed": _Format(
        "a DeepSpeed checkpoint",
        deepspeed_files.recognises,
        lambda paths, options: DeepSpeedReader(paths[0], options.spec, options.roles),
        frozenset({"spec"}),
        lambda path: deepspeed_files.tag_directory(path, deepspeed_files.LATEST),
    ),
    "safetensors": _Format(
        "Hugging Face weights in safetensors", safetensors.recognises, lambda paths, options: WeightsReader(paths[0])
    ),
}
"""By origin; the first that recognises a path reads it: a universal checkpoint holds safetensors files, too."""


def _megatron_dist_writer(path: Path, max_file_bytes: int) -> Writer:
    # Here: torch's own checkpoints take about as long to import as torch, and no other format needs them.
    from ftckpt.universal.megatron.dist_writer import MegatronDistWriter

    return MegatronDistWriter(path, max_file_bytes)


_WRITERS: dict[str, Callable[[Path, int], Writer]] = {
    "universal": UniversalWriter,
    "deepspeed-universal": lambda path, max_file_bytes: DeepSpeedUniversalWriter(path),
    "megatron-dist": _megatron_dist_writer,
    "safetensors": WeightsWriter,
}

_NUMBER = re.compile(r"\d+$")
"""In the name of a checkpoint's directory."""
_SHOWN_BY = {"ftckpt": "'ftckpt inspect'", "ftckpt-snapshot": "'ftckpt list' and 'ftckpt verify'"}
"""What shows snapshots."""

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
    paths = [_located(path) for path in paths]
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


def _located(path: Path) -> Path:
    """What is read of a directory that the user has named: its snapshots, where those lie beside what others load."""
    found = locate(str(path))
    return path if found.iteration is not None else Path(found.where)


def description(path: Path) -> str:
    """What lies at ``path`` in place of what a command looks for there, and who shows or reads it, for people; empty
    where it is nothing that is known."""
    if path.name.endswith(PARTIAL):
        return "is a conversion that was never completed: the same 'ftckpt convert' goes on with it"
    try:
        name = format_of(path)
        newest = _FORMATS[name].newest(path).name
    except (ConvertError, OSError):
        return ""
    title = _FORMATS[name].title
    if name in _SHOWN_BY:
        return f"has {title}: {_SHOWN_BY[name]} show them"
    if number := _NUMBER.search(newest):
        title += f" of iteration {int(number[0])}"
    return f"has {title}, not snapshots of ftckpt's: 'ftckpt convert' reads it"


def open_writer(path: Path, to: str, max_file_bytes: int = MAX_FILE_BYTES) -> Writer:
    """A writer of format ``to`` at ``path``. Raises ConvertError for a name that is not known."""
    if to not in _WRITERS:
        raise ConvertError(f"--to: {to!r} is not known; known are {', '.join(_WRITERS)}")
    return _WRITERS[to](path, max_file_bytes)
