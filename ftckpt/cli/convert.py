"""``ftckpt convert``: converts a checkpoint to a format that any layout, or another program, loads."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from os import _exit as exit_now
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftckpt.cli.answers import Answer, Lines, ProgressLine
from ftckpt.cli.options import add_arena, size_of
from ftckpt.cli.targets import memory_at
from ftckpt.errors import ConfigError
from ftckpt.model.layouts import layout_name
from ftckpt.model.text import human
from ftckpt.persist_setting import PERSIST_FORMATS

if TYPE_CHECKING:
    from ftckpt.universal.conversion import Conversion, Options
    from ftckpt.universal.language.spec import Spec

_INTERRUPTED = 130
"""The exit status that shells give a command ended by Ctrl-C."""


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    text = "checkpoint or storage; or a job's name, or directories with arenas, of each node"
    parser.add_argument("source", nargs="+", metavar="SRC", help=text)
    parser.add_argument("destination", type=Path, metavar="DST", help="new directory; DST.partial until complete")
    parser.add_argument(
        "--to", choices=PERSIST_FORMATS[1:], default="universal", help="format of DST (default: %(default)s)"
    )
    parser.add_argument("--spec", metavar="FILE|NAME", help="where parameters are, if not in the checkpoint")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the specification"
    )
    parser.add_argument(
        "--hf-config", type=Path, metavar="FILE", help="keys of config.json that SRC does not have; --to huggingface"
    )
    parser.add_argument("--iteration", type=int, metavar="N", help="which snapshot of arenas (default: the newest)")
    parser.add_argument("--roles", metavar="LIST", help="only these: weight,master,exp_avg,… (default: all)")
    for option, of in (("--max-memory", "all workers"), ("--max-file", "one file")):
        text = f"of {of} (default: %(default)s)"
        parser.add_argument(option, type=size_of(option), default="4GiB", metavar="SIZE", help=text)
    parser.add_argument("--workers", type=int, metavar="N", help="files at once (default: cores, 8 at most)")
    parser.add_argument("--verify", action="store_true", help="read DST and compare it with SRC")
    parser.add_argument("--dry-run", action="store_true", help="show what would be written, and write nothing")
    parser.add_argument(
        "--background", action="store_true", help="run at the lowest CPU and disk priority, until standard input ends"
    )
    add_arena(parser)


def run_convert(arguments: argparse.Namespace) -> Lines:
    """Converts. Raises ConfigError or ConvertError."""
    if arguments.background:
        _stay_behind()
    arguments.source = [memory_at(one, arguments.arena) or Path(one) for one in arguments.source]
    try:
        yield from _run(arguments)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command resumes where this one stopped") from None


def _stay_behind() -> None:
    """Lowers this process's priorities, and lifts the data limit inherited from the SMP: ``--max-memory`` applies."""
    from ftckpt.smp.footprint import yield_cores, yield_disks

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    yield_cores()
    yield_disks()
    threading.Thread(target=_end_with_input, name="ftckpt-input", daemon=True).start()


def _end_with_input() -> None:
    # The starting process never writes to this pipe; it reads as ended once that process exits, even if killed.
    while os.read(0, 4096):
        pass
    exit_now(_INTERRUPTED)


def _run(arguments: argparse.Namespace) -> Lines:
    # Imported late, as in other functions: torch takes seconds to load, and ``--help`` does not need it.
    from ftckpt.universal.conversion import prepare
    from ftckpt.universal.conversion import run as run_conversion
    from ftckpt.universal.formats import ReadOptions, open_reader, open_writer
    from ftckpt.universal.huggingface.writer import load_config

    hf_config = load_config(arguments.hf_config) if arguments.hf_config is not None else None
    options = _options(arguments, hf_config)
    spec = _spec(arguments)
    with closing(open_reader(arguments.source, ReadOptions(spec, arguments.iteration, options.roles))) as reader:
        writer = open_writer(arguments.destination, arguments.to, arguments.max_file, hf_config)
        conversion = prepare(reader, writer, options)
        yield from _described(conversion, options, spec, arguments)
        names, destination = [unit.name for unit in conversion.units], str(arguments.destination)
        value = {"destination": destination, "files": names, "bytes": conversion.nbytes, "written": False}
        if arguments.dry_run:
            yield "dry run: nothing was written"
            yield Answer(value)
            return
        with ProgressLine("writing", conversion.nbytes) as progress:
            report = run_conversion(conversion, options, progress)
        resumed = f", {report.resumed} of them from before" if report.resumed else ""
        yield f"written {report.files} files{resumed}, {human(report.nbytes)} in {report.secs:.1f} s"
        if arguments.verify:
            yield _verify(conversion, options, arguments.destination)
        yield Answer({**value, "written": True, "verified": arguments.verify})


def _options(arguments: argparse.Namespace, hf_config: dict[str, Any] | None) -> Options:
    from ftckpt.universal.conversion import Options

    roles = frozenset(filter(None, arguments.roles.split(","))) if arguments.roles is not None else None
    if roles is not None and not roles:
        raise ConfigError("--roles: names no role; give a list such as weight,master")
    identity = {
        # Resolved: the same command from another directory resumes the conversion.
        "source": " ".join(str(path.resolve()) for path in arguments.source),
        "--to": arguments.to,
        "--hf-config": json.dumps(hf_config, sort_keys=True),
        "--spec": f"{arguments.spec or ''} {' '.join(sorted(arguments.set))}".strip(),
    }
    options = Options(max_memory=arguments.max_memory, roles=roles, identity=identity)
    if arguments.workers is None:
        return options
    if arguments.workers < 1:
        raise ConfigError(f"--workers: {arguments.workers} is too small; the least is 1")
    return replace(options, workers=arguments.workers)


def _spec(arguments: argparse.Namespace) -> Spec | None:
    from ftckpt.universal.language.spec import Spec

    given = {}
    for text in arguments.set:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not re.fullmatch(r"-?\d+", value):
            raise ConfigError(f"--set: {text!r} is not NAME=VALUE with an integer")
        given[name] = int(value)
    if arguments.spec is None:
        if given:
            raise ConfigError("--set: it sets variables of a specification; name one with --spec")
        return None
    return Spec.load(arguments.spec, given)


def _verify(conversion: Conversion, options: Options, destination: Path) -> str:
    from ftckpt.universal.formats import ReadOptions, open_reader
    from ftckpt.universal.verification import verify

    began = time.monotonic()
    with (
        closing(open_reader([destination], ReadOptions())) as written,
        ProgressLine("verifying", conversion.nbytes) as progress,
    ):
        tensors = verify(conversion, written, options.workers, progress)
        also = "" if written.catalog.origin == "safetensors" else ", and all objects that both have"
    return f"verified {tensors} tensors against the source{also}, in {time.monotonic() - began:.1f} s"


def _described(
    conversion: Conversion, options: Options, spec: Spec | None, arguments: argparse.Namespace
) -> Iterator[str]:
    """Lines about source and destination; with ``--dry-run`` also every tensor, file and rule."""
    catalog = conversion.catalog
    layout = layout_name(catalog.layout) if catalog.layout else ""
    yield f"source       {catalog.origin}, iteration {catalog.iteration}{f', layout {layout}' if layout else ''}"
    by_role: dict[str, list[int]] = {}
    for tensor in conversion.tensors:
        by_role.setdefault(tensor.role, []).append(tensor.nbytes)
    for role, sizes in by_role.items():
        yield f"  {role:<11}{len(sizes)} tensors, {human(sum(sizes))}"
    if catalog.derived:
        yield f"  {len(catalog.derived)} weights are casts of their masters"
    yield f"destination  {arguments.to}, {len(conversion.units)} files, {human(conversion.nbytes)}"
    memory = min(options.max_memory, options.workers * conversion.memory())
    yield f"memory       {human(memory)} at most, {options.workers} workers, limit {human(options.max_memory)}"
    if conversion.left_out:
        yield f"left out     {len(conversion.left_out)} tensors that {arguments.to} does not support"
    if not arguments.dry_run:
        return
    if arguments.destination.exists():
        yield f"refused      {arguments.destination} exists: name another one"
    if conversion.memory() > options.max_memory:
        yield f"refused      one file takes {human(conversion.memory())}: raise --max-memory or lower --max-file"
    for line in spec.summary if spec is not None else ():
        yield f"  {line}"
    for unit in conversion.units:
        yield f"{unit.name}  {human(unit.nbytes)}"
        for part in unit.parts:
            shape = "×".join(map(str, part.tensor.shape)) or "scalar"
            yield f"  {part.tensor.key}  {part.tensor.dtype} {shape}"
    for key in conversion.left_out:
        yield f"left out: {key}"
