"""Export of an SMP's metrics: over HTTP on the loopback interface, or to a file for a node exporter."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ftckpt.errors import in_words
from ftckpt.smp.metrics import METRICS, PREFIX, SILENCE, Status

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

_HOST = "127.0.0.1"
_FILE_SECS = 15.0
"""Interval of writing the file, the usual scrape interval of node exporters, and of retrying a port."""
_PATIENCE_SECS = 2.0
"""Wait of a reader for the SMP's loop, which may be busy; then it gets the previous values."""
_READABLE, _ENTERABLE = 0o644, 0o755
"""A node exporter runs as another user; all other files of the SMP are private."""


class Exporter:
    """One SMP's metrics, a collector of prometheus_client. The SMP's loop calls all methods but ``collect``, as only
    it may read the SMP's state.

    Args:
        status: returns the values that metrics are computed from.
        report: called with a failure, once until it works again.
    """

    def __init__(self, job: str, node: str, status: Callable[[], Status], report: Callable[[str], None]) -> None:
        # Not ``job``: Prometheus uses that label for the scrape job and would rename this one.
        self._labels = {"training_job": job, "node": node}
        self._status = status
        self._report = report
        self._failing: set[str] = set()
        self._port: int | str = 0
        self._path: Path | None = None
        self._server: WSGIServer | None = None
        self._families: list[Family] = []
        self._asked: queue.SimpleQueue[Future[list[Family]]] = queue.SimpleQueue()
        self._next_try = 0.0
        self._loop, self._stepped = threading.get_ident(), time.monotonic()

    @property
    def url(self) -> str:
        """The address at which metrics are served; empty: they are not."""
        return f"http://{_HOST}:{self._server.server_port}/metrics" if self._server is not None else ""

    def configure(self, port: int | str, directory: str) -> None:
        """Serve at ``port`` (0: not at all; ``auto``: any free one) and write to ``directory`` (empty: nowhere).
        Failures are retried."""
        name = "-".join(["ftckpt", *self._labels.values()])
        path = Path(directory) / f"{name}.prom" if directory else None
        if path != self._path:
            self._remove_file()
        if port != self._port:
            self._stop_serving()
        self._port, self._path = port, path
        self._try()

    def step(self) -> None:
        """Answer readers, and write the file if it is due."""
        self._stepped = time.monotonic()
        while not self._asked.empty():
            self._asked.get().set_result(list(self._made()))
        if self._stepped >= self._next_try:
            self._try()

    def collect(self) -> list[Family]:
        """The metrics; any thread may call it, and waits for the loop to compute them."""
        if threading.get_ident() == self._loop:
            self._families = list(self._made())
        else:
            asked: Future[list[Family]] = Future()
            self._asked.put(asked)
            with suppress(FutureTimeoutError):  # another class than TimeoutError before Python 3.11
                self._families = asked.result(_PATIENCE_SECS)
        return [*self._families, self._silence()]

    def close(self) -> None:
        """Stop serving; the file is removed, so that nobody mistakes it for current values."""
        self._stop_serving()
        self._remove_file()

    def _made(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        for name, metric in METRICS.items():
            if name == SILENCE:
                continue
            labels = [*self._labels, *filter(None, [metric.label])]
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(f"{PREFIX}{name}", metric.meaning, labels=labels)
            for label, value in metric.read(status):
                family.add_metric([*self._labels.values(), *filter(None, [label])], value)
            yield family

    def _silence(self) -> Family:
        """Computed by the reader, not by the loop: it shows that the loop hangs and all other values are old."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"{PREFIX}{SILENCE}", METRICS[SILENCE].meaning, labels=[*self._labels])
        family.add_metric([*self._labels.values()], time.monotonic() - self._stepped)
        return family

    def _try(self) -> None:
        self._next_try = time.monotonic() + _FILE_SECS
        if self._port and self._server is None:
            text = f"--ftckpt-metrics-port: {self._port} cannot be served on this node"
            self._do(
                self._serve,
                text,
                "end its holder, another program or the SMP of another job (ftckpt jobs), or use auto",
            )
        if self._path is not None:
            self._do(self._write, f"--ftckpt-metrics-dir: {self._path} cannot be written", "it is retried")

    def _do(self, action: Callable[[], None], failed: str, remedy: str) -> None:
        try:
            action()
            self._failing.discard(failed)
        except (OSError, ImportError) as error:
            if failed not in self._failing:
                self._report(f"{failed}: {in_words(error)}; {remedy}")
            self._failing.add(failed)

    def _serve(self) -> None:
        from prometheus_client import start_http_server

        port = 0 if self._port == "auto" else int(self._port)
        self._server, _ = start_http_server(port, _HOST, self._registry())

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        assert self._path is not None
        if not self._path.parent.exists():
            self._path.parent.mkdir(parents=True)
            self._path.parent.chmod(_ENTERABLE)
        write_to_textfile(str(self._path), self._registry())
        self._path.chmod(_READABLE)

    def _remove_file(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        return registry
