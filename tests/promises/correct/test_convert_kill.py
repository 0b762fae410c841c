"""A conversion that is killed, interrupted or out of space leaves no destination, and the same command resumes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Box, Fragment
from ftckpt.universal.catalog import Catalog, Reader, Writer
from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.formats import ReadOptions, open_reader
from ftckpt.universal.megatron.dist_writer import MegatronDistWriter
from ftckpt.universal.safetensors import WeightsWriter
from ftckpt.universal.universal_format import UniversalWriter
from tests.support.errors import raises
from tests.support.killing import killed_at
from tests.support.tiers import by_default

pytestmark = pytest.mark.faults

NUM, ROWS, COLUMNS = 12, 64, 50


class Columns(Reader):
    """Tensors whose left and right halves lie in two fragments, so that every row is put together."""

    def __init__(self, num: int = NUM, rows: int = ROWS) -> None:
        whole = [np.random.default_rng(n).standard_normal((rows, COLUMNS), np.float32) for n in range(num)]
        halves = (0, COLUMNS // 2)
        self.expected = {f"weight/layers.{n}.weight": value.tobytes() for n, value in enumerate(whole)}
        self._held = [np.ascontiguousarray(v[:, at : at + COLUMNS // 2]) for v in whole for at in halves]
        fragments = [
            Fragment.whole(key, "F32", (rows, COLUMNS), Box((0, at), (rows, COLUMNS // 2)))
            for key in self.expected
            for at in halves
        ]
        self._catalog = Catalog("ftckpt", 5, {"tp": 2}, tuple(fragments), {"counter": 5})

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def read(self, index: int) -> Bytes:
        return self._held[index].reshape(-1).view(np.uint8)

    def close(self) -> None:
        pass


def contents(path: Path) -> dict[str, bytes]:
    source = open_reader([path], ReadOptions())
    found = {f.key: source.read(i).tobytes() for i, f in enumerate(source.catalog.fragments)}
    source.close()
    return found


ALONE = Options(workers=1)


def more_steps(action: Callable[[], object]) -> None:
    """Bytes that are written to a file and not yet on the disk are a step, too."""
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        with suppress(OSError):
            os.rmdir("nothing of this name")
        fsync(descriptor)

    os.fsync = counted  # type: ignore[assignment]
    action()


@pytest.mark.parametrize("make", by_default([UniversalWriter, WeightsWriter, MegatronDistWriter], [UniversalWriter]))
def test_killed_anywhere(tmp_path: Path, make: Callable[[Path, int], Writer]) -> None:
    """Before every file-system call of a conversion: nothing, or all, is under the destination's name, and the next
    run completes it without rewriting finished files."""
    source = Columns()
    resumed, step = set(), 0
    while True:
        out = tmp_path / f"out{step}"
        killed = killed_at(step, lambda out=out: more_steps(lambda: convert(source, make(out, 40_000), ALONE)))
        if out.exists():
            assert contents(out) == source.expected
        if not killed:
            break
        resumed.add(convert(source, make(out, 40_000), Options(workers=2)).resumed)
        assert contents(out) == source.expected
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(out.name)) == [out.name]
        step += 1
    assert step > 25 and resumed == set(range(5))


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000,) * 2)
"""

HALTED = """
import signal, threading
from ftckpt.universal.universal_format import UniversalReader

interrupted, reads, read = threading.Event(), [], UniversalReader.read

def read_some(reader, index):
    reads.append(index)
    if len(reads) > 40:
        interrupted.wait()
    return read(reader, index)

def interrupt(*arguments):
    interrupted.set()
    raise KeyboardInterrupt

UniversalReader.read = read_some
signal.signal(signal.SIGINT, interrupt)
"""
"""Half of the way, and no further before the signal is there: however slow the test is, it comes in the middle."""

TELLS = """
import atexit
atexit.register(lambda: print("imports:", sorted({"torch", "torch.distributed.checkpoint"} & sys.modules.keys())))
"""


def start(source: Path, out: Path, *words: str, first: str = "") -> subprocess.Popen[str]:
    run = f"import sys\n{first}\nfrom ftckpt.cli.main import main\nsys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", run, "convert", str(source), str(out), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A universal checkpoint of 20 MB."""
    source = Columns(80, 1200)
    convert(source, UniversalWriter(tmp_path / "large"), Options())
    return tmp_path / "large", source.expected


@pytest.mark.parametrize("kind", by_default([signal.SIGKILL, signal.SIGINT], [signal.SIGINT]))
def test_the_command_killed_in_the_middle(
    tmp_path: Path, large: tuple[Path, dict[str, bytes]], kind: signal.Signals
) -> None:
    path, expected = large
    words = ("--max-file", "1MiB", "--workers", "2")
    command = start(path, tmp_path / "out", *words, first=HALTED)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "out.partial").glob("tensors-*"))) < 5:
        assert command.poll() is None and time.monotonic() < deadline
    os.kill(command.pid, kind)
    _, err = command.communicate(timeout=60)
    assert command.returncode == (-kind if kind == signal.SIGKILL else 130)
    assert kind == signal.SIGKILL or "interrupted; the same command resumes" in err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConvertError, match="never completed"):
        open_reader([tmp_path / "out.partial"], ReadOptions())
    again = start(path, tmp_path / "out", *words, "--verify", first=TELLS)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "imports: ['torch']" in out, "what no universal checkpoint needs takes about as long to import"
    assert "of them from before" in out and "verified 80 tensors" in out
    assert contents(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, large: tuple[Path, dict[str, bytes]]) -> None:
    """The limit on files' sizes fails as a full disk does: in the middle of a file."""
    path, expected = large
    words = ("--max-file", "3MiB")
    command = start(path, tmp_path / "out", *words, first=LIMITED)
    _, err = command.communicate(timeout=120)
    assert command.returncode == 2 and "no room: free some" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert [entry for entry in (tmp_path / "out.partial").iterdir() if entry.suffix == ".safetensors"] == []
    again = start(path, tmp_path / "out", *words)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert contents(tmp_path / "out") == expected


def test_two_at_once(tmp_path: Path) -> None:
    """The second is refused while the first writes, and harms nothing."""
    source = Columns()
    refused = []

    class Slow(UniversalWriter):
        def finish(self, catalog: Catalog, units: object) -> None:
            with raises(ConvertError, "another process"):
                convert(source, UniversalWriter(tmp_path / "out", 40_000), Options())
            refused.append(True)
            super().finish(catalog, units)  # type: ignore[arg-type]

    convert(source, Slow(tmp_path / "out", 40_000), Options())
    assert refused and contents(tmp_path / "out") == source.expected


MEASURED = """
import sys, threading, time
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
from test_convert_kill import Columns
from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.formats import open_writer
source = Columns(6, 100_000)  # 20 MB each
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024
convert(Columns(2), open_writer(Path(sys.argv[2], "warm"), "universal"), Options())
before, peak, stop = anonymous(), [0], threading.Event()
def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)  # a sample
watcher = threading.Thread(target=watch)
watcher.start()
convert(source, open_writer(Path(sys.argv[2], "out"), "universal", 40_000_000), Options(4, int(sys.argv[3])))
stop.set()
watcher.join()
print(peak[0] - before)
"""


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """120 MB in files of 40 MB, from fragments that have to be put together; the limit is of all workers."""
    most = {}
    for limit in (50 << 20, 200 << 20):
        paths = f"{Path(__file__).parent}:{Path(__file__).parents[3]}"
        words = [sys.executable, "-c", MEASURED, paths, str(tmp_path / str(limit)), str(limit)]
        found = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
        assert found.returncode == 0, found.stderr
        most[limit] = int(found.stdout)
    assert all(peak < limit + (8 << 20) for limit, peak in most.items()), most
