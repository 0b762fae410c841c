"""Metrics on their way out: served on the loopback interface, or written to a file for a node exporter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftckpt.errors import SmpError
from ftckpt.smp.metrics import METRICS, PREFIX, Status

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

_HOST = "127.0.0.1"
_FILE_SECS = 15.0
"""Between two writes of the file: node exporters are asked about as often."""
_PATIENCE_SECS = 2.0
"""Longest wait of a reader for the SMP, which may be at a piece of work; then it gets what was known before."""


class Exporter:
    """One SMP's metrics. All but ``collect`` is called by the SMP's loop, which alone may look at what it knows.

    Args:
        status: gives what metrics are made of.
    """

    def __init__(self, job: str, node: str, status: Callable[[], Status]) -> None:
        self._labels = {"job": job, "node": node}
        self._status = status
        self._port: int | str = 0
        self._path: Path | None = None
        self._registry: CollectorRegistry | None = None
        self._server: Any = None
        self._families: list[Family] = []
        self._asked, self._answered = threading.Event(), threading.Condition()
        self._num_answers = 0
        self._next_file = 0.0
        self._loop = threading.get_ident()

    @property
    def url(self) -> str:
        """Where metrics are served; empty: nowhere."""
        return f"http://{_HOST}:{self._server.server_port}/metrics" if self._server is not None else ""

    def configure(self, port: int | str, directory: str) -> None:
        """Serve at ``port`` (0: not at all; ``auto``: any that is free), and write to ``directory`` (empty: nowhere).

        Raises:
            SmpError: the port is taken, or the directory cannot be had; the other is done nevertheless.
        """
        self._write_to(Path(directory) if directory else None)
        if port == self._port:
            return
        self._stop_serving()
        if port:
            self._serve(0 if port == "auto" else int(port))
        self._port = port

    def step(self) -> None:
        """Answer who has asked, and write the file if it is time."""
        is_due = self._path is not None and time.monotonic() >= self._next_file
        if not is_due and not self._asked.is_set():
            return
        self._asked.clear()
        self._families = list(self._made(self._status()))
        with self._answered:
            self._num_answers += 1
            self._answered.notify_all()
        if is_due:
            self._write()

    def collect(self) -> list[Family]:
        """For prometheus_client, on any thread: what the loop says within a moment."""
        if threading.get_ident() != self._loop:
            with self._answered:
                before = self._num_answers
                self._asked.set()
                self._answered.wait_for(lambda: self._num_answers > before, _PATIENCE_SECS)
        return self._families

    def close(self) -> None:
        """Serve no more; the file goes, so that nobody takes it for news."""
        self._stop_serving()
        self._write_to(None)

    def _made(self, status: Status) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, metric in METRICS.items():
            labels = [*self._labels, *filter(None, [metric.label])]
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(f"{PREFIX}{name}", metric.meaning, labels=labels)
            for label, value in metric.read(status):
                family.add_metric([*self._labels.values(), *filter(None, [label])], value)
            yield family

    def _serve(self, port: int) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, _ = start_http_server(port, _HOST, self._registry_of_mine())
        except OSError as error:
            raise SmpError(f"--ftckpt-metrics-port: {port} of this node cannot be had: {error.strerror}") from None

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._port = 0

    def _write_to(self, directory: Path | None) -> None:
        name = "-".join(["ftckpt", *self._labels.values()])
        path = directory / f"{name}.prom" if directory is not None else None
        if path == self._path:
            return
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path, self._next_file = path, 0.0

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        assert self._path is not None
        self._next_file = time.monotonic() + _FILE_SECS
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(self._path), self._registry_of_mine())
        except OSError as error:
            path, self._path = self._path, None
            raise SmpError(f"--ftckpt-metrics-dir: {path} cannot be written: {error.strerror}") from None

    def _registry_of_mine(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        if self._registry is None:
            self._registry = CollectorRegistry()
            self._registry.register(self)
        return self._registry
