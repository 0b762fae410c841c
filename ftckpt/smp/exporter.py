"""Metrics on their way out: served on the loopback interface, or written to a file for a node exporter."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftckpt.errors import in_words
from ftckpt.events import log
from ftckpt.smp.metrics import METRICS, PREFIX, SILENCE, Status

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

_HOST = "127.0.0.1"
_FILE_SECS = 15.0
"""Between two writes of the file, as often as node exporters are asked, and between two tries for a port."""
_PATIENCE_SECS = 2.0
"""Longest wait of a reader for the SMP, which may be at a piece of work; then it gets what was known before."""
_MOST_READERS, _READER_SECS = 8, 5.0
"""At a time; and the longest silence of one. Each takes a thread, and any process of the machine may be one."""
_READABLE, _ENTERABLE = 0o644, 0o755
"""A node exporter is another user; the SMP makes everything else for its own."""


class _Server(ThreadingHTTPServer):
    """Hangs up on readers that are too many."""

    daemon_threads = True

    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        from prometheus_client import MetricsHandler

        self._places = threading.BoundedSemaphore(_MOST_READERS)
        handler = type("_Handler", (MetricsHandler.factory(registry),), {"timeout": _READER_SECS})
        super().__init__((_HOST, port), handler)
        threading.Thread(target=self.serve_forever, name="smp-metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be had
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Who hangs up early, or says nothing, is no matter for the log.
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("metrics could not be served")


class Exporter:
    """One SMP's metrics. All but ``collect`` is called by the SMP's loop, which alone may look at what it knows.

    Args:
        status: gives what metrics are made of.
        tell: of what fails, once until it works again.
    """

    def __init__(self, job: str, node: str, status: Callable[[], Status], tell: Callable[[str], None]) -> None:
        # Not job, which is Prometheus' own word for what it scrapes: it would rename this one.
        self._labels = {"training_job": job, "node": node}
        self._status = status
        self._tell = tell
        self._told: set[str] = set()
        self._port: int | str = 0
        self._path: Path | None = None
        self._registry: CollectorRegistry | None = None
        self._server: _Server | None = None
        self._families: list[Family] = []
        self._asked, self._answered = threading.Event(), threading.Condition()
        self._num_answers = 0
        self._next_try = 0.0
        self._loop, self._stepped = threading.get_ident(), time.monotonic()

    @property
    def url(self) -> str:
        """Where metrics are served; empty: nowhere."""
        return f"http://{_HOST}:{self._server.server_port}/metrics" if self._server is not None else ""

    def configure(self, port: int | str, directory: str) -> None:
        """Serve at ``port`` (0: not at all; ``auto``: any that is free), and write to ``directory`` (empty: nowhere).
        What cannot be had is tried for again and again."""
        name = "-".join(["ftckpt", *self._labels.values()])
        path = Path(directory) / f"{name}.prom" if directory else None
        if path != self._path:
            self._remove_file()
            self._path = path
        if port != self._port:
            self._stop_serving()
            self._port = port
        self._next_try = 0.0
        self._try()

    def step(self) -> None:
        """Answer who has asked, and write the file if it is time."""
        self._stepped = time.monotonic()
        if self._asked.is_set():
            self._answer()
        if (self._port or self._path is not None) and self._stepped >= self._next_try:
            self._try()

    def collect(self) -> list[Family]:
        """For prometheus_client, on any thread: what the loop says within a moment."""
        if threading.get_ident() != self._loop:
            with self._answered:
                before = self._num_answers
                self._asked.set()
                self._answered.wait_for(lambda: self._num_answers > before, _PATIENCE_SECS)
        return [*self._families, self._silence()]

    def close(self) -> None:
        """Serve no more; the file goes, so that nobody takes it for news."""
        self._stop_serving()
        self._remove_file()

    def _answer(self) -> None:
        self._asked.clear()
        self._families = list(self._made(self._status()))
        with self._answered:
            self._num_answers += 1
            self._answered.notify_all()

    def _made(self, status: Status) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
        """Here, and not in the loop: it says that the loop does not move, and all else is old."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"{PREFIX}{SILENCE}", METRICS[SILENCE].meaning, labels=[*self._labels])
        family.add_metric([*self._labels.values()], time.monotonic() - self._stepped)
        return family

    def _try(self) -> None:
        self._next_try = time.monotonic() + _FILE_SECS
        for action in (self._serve, self._write):
            try:
                action()
                self._told.discard(action.__name__)
            except (OSError, ImportError) as error:
                if action.__name__ not in self._told:
                    self._tell(_IN_VAIN[action.__name__].format(self._port, self._path, in_words(error)))
                self._told.add(action.__name__)

    def _serve(self) -> None:
        if self._port and self._server is None:
            self._server = _Server(0 if self._port == "auto" else int(self._port), self._registry_of_mine())

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _write(self) -> None:
        if self._path is None:
            return
        from prometheus_client import write_to_textfile

        self._answer()
        if not self._path.parent.exists():
            self._path.parent.mkdir(parents=True)
            self._path.parent.chmod(_ENTERABLE)
        write_to_textfile(str(self._path), self._registry_of_mine())
        self._path.chmod(_READABLE)

    def _remove_file(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _registry_of_mine(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        if self._registry is None:
            self._registry = CollectorRegistry()
            self._registry.register(self)
        return self._registry


_IN_VAIN = {
    Exporter._serve.__name__: "--ftckpt-metrics-port: {0} of this node cannot be had, and is tried for again: {2}; "
    "another program has it, or the SMP of another job (ftckpt ls); auto takes one that is free",
    Exporter._write.__name__: "--ftckpt-metrics-dir: {1} cannot be written, and is tried again: {2}",
}
