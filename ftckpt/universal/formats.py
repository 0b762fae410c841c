"""The registry of formats: opens the reader that recognizes a path, and the writer of a format's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from ftckpt.universal.huggingface.writer import HuggingFaceWriter
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
    """The user's options for the source."""

    spec: Spec | None = None
    iteration: int | None = None
    roles: frozenset[str] | None = None


class _Format(NamedTuple):
    """A format that can be read.

    ``title``: its name in messages. ``recognises``: whether a path has this format. ``takes``: the options it
    supports. ``newest``: the checkpoint that is read in a directory of several.
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
"""Formats by origin. The first that recognizes a path reads it: a universal checkpoint has safetensors files too."""


def _megatron_dist_writer(path: Path, max_file_bytes: int) -> Writer:
    # Imported on use: torch.distributed.checkpoint takes about as long to import as torch, and only this needs it.
    from ftckpt.universal.megatron.dist_writer import MegatronDistWriter

    return MegatronDistWriter(path, max_file_bytes)


_WRITERS: dict[str, Callable[[Path, int], Writer]] = {
    "universal": UniversalWriter,
    "deepspeed-universal": lambda path, max_file_bytes: DeepSpeedUniversalWriter(path),
    "megatron-dist": _megatron_dist_writer,
    "safetensors": WeightsWriter,
    "huggingface": HuggingFaceWriter,
}

_NUMBER = re.compile(r"\d+$")
"""The iteration in the name of a checkpoint's directory."""
_OURS = ("ftckpt", "ftckpt-snapshot")
"""Formats of snapshots, which commands show."""

_DAMAGES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def open_reader(paths: Sequence[Path], options: ReadOptions) -> Reader:
    """Opens the checkpoint in ``paths``; several paths are directories of the nodes of one job.

    The caller closes the reader.

    Raises:
        ConvertError: the format is unknown, does not support an option, or the checkpoint cannot be read.
    """
    for path in paths:
        if not path.exists():
            raise ConvertError(
                f"{path}: does not exist; a source is the directory of a checkpoint ({', '.join(_FORMATS)}); for "
                "snapshots in memory it is ARENA/ftckpt-JOB/NODE, of each node"
            )
        # The path may be a link to a partial destination, or a tag's directory inside one.
        resolved = path.resolve()
        if any(name.endswith(PARTIAL) for name in (path.name, resolved.name, resolved.parent.name)):
            raise ConvertError(f"{path}: was never completed; repeat the command that writes it, or remove it")
    paths = [_located(path) for path in paths]
    names = [format_of(path) for path in paths]
    if len(paths) > 1 and set(names) != {"ftckpt"}:
        raise ConvertError(f"{', '.join(map(str, paths))}: several sources have to be directories of arenas")
    opener = _FORMATS[names[0]]
    for name, option in (("spec", "--spec"), ("iteration", "--iteration")):
        if getattr(options, name) is not None and name not in opener.takes:
            raise ConvertError(f"{option}: not supported for {paths[0]}, which is {names[0]}")
    try:
        return opener.open(paths, options)
    except _DAMAGES as error:  # a corrupt file of another program can raise any of these in a reader
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConvertError(f"{paths[0]}: is corrupt, or not a valid {names[0]} checkpoint: {text}") from error


def format_of(path: Path) -> str:
    """The name of a checkpoint's format. Raises ConvertError if it is unknown."""
    for name, opener in _FORMATS.items():
        if opener.recognises(path):
            return name
    raise ConvertError(f"{path}: not a checkpoint of a known format; known are {', '.join(_FORMATS)}")


def _located(path: Path) -> Path:
    """The path to read for a path that the user named: its snapshots, if exports are stored next to them."""
    found = locate(str(path))
    return path if found.iteration is not None else Path(found.where)


def description(path: Path) -> str:
    """A message's part for commands that find another kind of checkpoint at ``path``: its kind, and the command for
    it; empty if it is unknown."""
    if path.name.endswith(PARTIAL):
        return "is an unfinished conversion: repeat its 'ftckpt convert' to resume it"
    try:
        name = format_of(path)
        newest = _FORMATS[name].newest(path).name
    except (ConvertError, OSError):
        return ""
    title = _FORMATS[name].title
    if name in _OURS:
        return f"has {title}: 'ftckpt list' and 'ftckpt verify' show them"
    if number := _NUMBER.search(newest):
        title += f" of iteration {int(number[0])}"
    return f"has {title}, not ftckpt snapshots: 'ftckpt convert' reads it"


def open_writer(
    path: Path, to: str, max_file_bytes: int = MAX_FILE_BYTES, hf_config: Mapping[str, Any] | None = None
) -> Writer:
    """A writer of format ``to`` at ``path``; ``hf_config``: see ``HuggingFaceWriter``.

    Raises:
        ConvertError: the format is unknown, or has no use for ``hf_config``.
    """
    if to not in _WRITERS:
        raise ConvertError(f"--to: unknown format {to!r}; known are {', '.join(_WRITERS)}")
    if hf_config is not None:
        if _WRITERS[to] is not HuggingFaceWriter:
            raise ConvertError(f"--hf-config: --to {to} does not use it; --to huggingface does")
        return HuggingFaceWriter(path, max_file_bytes, hf_config)
    return _WRITERS[to](path, max_file_bytes)
