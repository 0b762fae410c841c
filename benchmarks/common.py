"""Shared by all benchmarks: the conditions of a run, its folders, statistics, tables and the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

ROOT = Path(__file__).resolve().parent.parent
_NUMBERS = re.compile(r"\[\s+-?\d[\d\s.,eE+-]*\]")
T = TypeVar("T")
PACKAGES = ("ftckpt", "torch", "megatron-core", "deepspeed", "numpy")


def environment(argv: Sequence[str], script: str, packages: Iterable[str] = ()) -> dict[str, Any]:
    """Hardware, versions (also of ``packages``), command, date and revision."""
    return {
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CPU stand-in for CUDA",
            "load_average_at_start": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in (*PACKAGES, *sorted(packages))},
        },
        "command": shlex.join(["python", script, *argv]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "revision": _revision(),
    }


@contextmanager
def scratch(*places: Path) -> Iterator[list[Path]]:
    """A new folder in each of ``places``, removed at the end. SIGTERM and SIGINT raise SystemExit in the block, once,
    so that nothing interrupts the cleaning up."""

    def end(number: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with ExitStack() as stack:
        for number, handler in previous.items():
            stack.callback(signal.signal, number, handler)
            signal.signal(number, end)
        folders: list[Path] = []
        for place in places:
            folders.append(Path(tempfile.mkdtemp(prefix="ftckpt-benchmark-", dir=place.absolute())))
            stack.callback(shutil.rmtree, folders[-1], ignore_errors=True)
        yield folders


def disk_bytes(folder: Path) -> int:
    """The bytes that the files below ``folder`` occupy."""
    # Blocks of 512 bytes on any file system; slots without memory are holes, which take nothing.
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


class Quartiles(NamedTuple):
    """Quartiles of the repeats of a measurement; of a single repeat all three are that one."""

    first: float
    median: float
    third: float


def quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3))


class Blocks:
    """The blocks of a result file: those that it has, and those that are to be measured.

    A plan is a named tuple that prints as its description; a block has its fields and the figures.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path, self.content = path, {**content, "blocks": []}
        if path.exists():
            before = json.loads(path.read_text())
            if self._conditions(before) != self._conditions(self.content):
                raise SystemExit(f"{path}: has another size, revision or machine; name another file")
            self.content = {**before, "blocks": [block for block in before["blocks"] if "error" not in block]}

    @staticmethod
    def _conditions(content: Mapping[str, Any]) -> list[Any]:
        about = content["environment"]
        return [content["sizes"], about["revision"], about["hardware"]["cpu"], about["hardware"]["cores"]]

    def measure(
        self, plans: Sequence[Any], run: Callable[[Any], dict[str, Any]], text: Callable[[dict[str, Any]], str]
    ) -> None:
        """Runs the plans whose blocks are missing, and writes the file after each. ``text`` describes a good one."""
        done = [block.items() for block in self.content["blocks"]]
        left = [plan for plan in plans if not any(plan._asdict().items() <= block for block in done)]
        begin = time.monotonic()
        for number, plan in enumerate(left):
            block = run(plan)
            self.content["blocks"].append({**plan._asdict(), **block})
            write_json(self._path, self.content)
            end_secs = (time.monotonic() - begin) / (number + 1) * (len(left) - number - 1)
            place = f"{len(plans) - len(left) + number + 1} of {len(plans)}"
            words = f"{place}, {plan}: {text(block) if 'error' not in block else 'failed'}"
            print(f"{words}; about {end_secs / 60:.0f} min left", file=sys.stderr, flush=True)

    def conclude(self, tables: Tables, reasons: Mapping[str, str], missed: Sequence[str], quick: bool) -> int:
        """Writes the file with the tables; failed blocks count as missed goals. Returns the exit code."""
        failed = dict.fromkeys(
            f"{one['job']}, {one['row']}: failed" for one in self.content["blocks"] if "error" in one
        )
        content = {**self.content, "tables": tables, "not_run": reasons}
        return conclude(self._path, content, [*failed, *missed], quick)


Tables = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Figures by place and row; a row that was not measured has none."""


def turns(items: Sequence[T], number: int) -> list[T]:
    """The items, from that of ``number`` on, then those before it."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, the first to the left, numbers to the right."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]), flush=True)


def print_tables(
    tables: Tables, heads: Sequence[str], cells: Callable[[Any, Any], list[str]], reasons: Mapping[str, str]
) -> None:
    """Prints a table per place. ``cells`` makes a line from a row's figures and its table; a row without figures
    shows its reason."""
    for place, table in tables.items():
        lines = [
            [row, *(cells(found, table) if found else [reasons.get(row, "failed"), *[""] * (len(heads) - 1)])]
            for row, found in table.items()
        ]
        print_table([place, *heads], lines)
        print()


def parser_of(text: str | None, arena: bool = False, disk: str = "") -> argparse.ArgumentParser:
    """A benchmark's parser: its docstring as it is, ``--json``, ``--quick`` and places. ``disk`` is their use."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--quick", action="store_true", help="small sizes whose figures mean nothing; no goal counts")
    if arena:
        parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    if disk:
        parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help=f"{disk}; not on a tmpfs")
    return parser


def conclude(path: Path, content: Mapping[str, Any], missed: Sequence[str], quick: bool) -> int:
    """Writes the result with the missed goals, and prints these; returns the exit code, 0 with ``quick``."""
    write_json(path, {**content, "missed": [] if quick else list(missed)})
    for line in () if quick else missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return int(bool(missed) and not quick)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the result, readable in a diff; a row of numbers is one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _NUMBERS.sub(lambda row: " ".join(row[0].split()), json.dumps(content, indent=1))
    path.write_text(text + "\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _revision() -> str | None:
    """The commit, marked where tracked files of the measured code differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "ftckpt"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if changed else "")
