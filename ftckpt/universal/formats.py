"""Which reader is for which checkpoint, and which writer for which name of a format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ftckpt.errors import ConvertError
from ftckpt.universal import arenas, reader, weights
from ftckpt.universal.arenas import ArenaSource
from ftckpt.universal.atomic import PARTIAL
from ftckpt.universal.catalog import Sink, Source
from ftckpt.universal.deepspeed import files as deepspeed_files
from ftckpt.universal.deepspeed import universal as deepspeed_universal
from ftckpt.universal.deepspeed.universal import DeepSpeedUniversalSource
from ftckpt.universal.deepspeed.universal_sink import DeepSpeedUniversalSink
from ftckpt.universal.deepspeed.zero import DeepSpeedSource
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron import dist as megatron_dist
from ftckpt.universal.megatron import legacy as megatron_legacy
from ftckpt.universal.megatron.dist import MegatronDistSource
from ftckpt.universal.megatron.dist_sink import MegatronDistSink
from ftckpt.universal.megatron.legacy import MegatronLegacySource
from ftckpt.universal.reader import UniversalSource
from ftckpt.universal.weights import WeightsSource
from ftckpt.universal.writer import MAX_FILE_BYTES, SafetensorsSink, UniversalSink


@dataclass(frozen=True)
class Request:
    """What a user says about the source."""

    spec: Spec | None = None
    iteration: int | None = None
    roles: frozenset[str] | None = None


class _Reader(NamedTuple):
    """Of one format: whether a path is of it, and how it is opened. ``takes`` are fields of a request that count."""

    recognises: Callable[[Path], bool]
    open: Callable[[Sequence[Path], Request], Source]
    takes: frozenset[str] = frozenset()


_READERS = {
    "universal": _Reader(reader.recognises, lambda paths, request: UniversalSource(paths[0])),
    "ftckpt": _Reader(
        arenas.recognises,
        lambda paths, request: ArenaSource(paths, request.iteration, request.roles),
        frozenset({"iteration"}),
    ),
    "megatron-dist": _Reader(
        megatron_dist.recognises,
        lambda paths, request: MegatronDistSource(paths[0], request.iteration, request.roles),
        frozenset({"iteration"}),
    ),
    "megatron-legacy": _Reader(
        megatron_legacy.recognises,
        lambda paths, request: MegatronLegacySource(paths[0], request.spec, request.iteration, request.roles),
        frozenset({"iteration", "spec"}),
    ),
    "deepspeed-universal": _Reader(
        deepspeed_universal.recognises, lambda paths, request: DeepSpeedUniversalSource(paths[0])
    ),
    "deepspeed": _Reader(
        deepspeed_files.is_deepspeed,
        lambda paths, request: DeepSpeedSource(paths[0], request.spec, request.roles),
        frozenset({"spec"}),
    ),
    "safetensors": _Reader(weights.recognises, lambda paths, request: WeightsSource(paths[0])),
}
"""By origin; the first that recognises a path reads it."""

_SINKS: dict[str, Callable[[Path, int], Sink]] = {
    "universal": UniversalSink,
    "deepspeed-universal": lambda path, max_file_bytes: DeepSpeedUniversalSink(path),
    "megatron-dist": MegatronDistSink,
    "safetensors": SafetensorsSink,
}


_DAMAGES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def open_source(paths: Sequence[Path], request: Request) -> Source:
    """The checkpoint that ``paths`` hold; several are directories of the nodes of one job.

    Raises:
        ConvertError: none of the known formats, or what was asked for means nothing for it.
    """
    for path in paths:
        if not path.exists():
            raise ConvertError(f"{path}: does not exist")
        whole = path.resolve()
        if any(name.endswith(PARTIAL) for name in (path.name, whole.name, whole.parent.name)):
            raise ConvertError(f"{path}: was never completed; finish what writes it, or remove it")
    found = [format_of(path) for path in paths]
    if len(paths) > 1 and set(found) != {"ftckpt"}:
        raise ConvertError(f"{', '.join(map(str, paths))}: only directories of nodes with arenas can be several")
    opener = _READERS[found[0]]
    for name, option in (("spec", "--spec"), ("iteration", "--iteration")):
        if getattr(request, name) is not None and name not in opener.takes:
            raise ConvertError(f"{option}: means nothing for {paths[0]}, which is {found[0]}")
    try:
        return opener.open(paths, request)
    except _DAMAGES as error:  # foreign files can say anything
        told = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConvertError(f"{paths[0]}: is damaged, or is not what a {found[0]} checkpoint is: {told}") from error


def format_of(path: Path) -> str:
    """The name of a checkpoint's format. Raises ConvertError where it is none that is known."""
    for name, opener in _READERS.items():
        if opener.recognises(path):
            return name
    raise ConvertError(f"{path}: is no checkpoint that is known here; known are {', '.join(_READERS)}")


def open_sink(path: Path, to: str, max_file_bytes: int = MAX_FILE_BYTES) -> Sink:
    """A writer of format ``to`` at ``path``. Raises ConvertError for a name that is not known."""
    if to not in _SINKS:
        raise ConvertError(f"--to: {to!r} is not known; known are {', '.join(_SINKS)}")
    return _SINKS[to](path, max_file_bytes)
