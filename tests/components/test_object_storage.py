"""Refusals of an object store, by the status of its answer: error texts are arbitrary."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ftckpt.errors import StorageError
from ftckpt.persist.objects import ObjectStorage

pytest.importorskip("obstore")

LISTING = (
    b"""<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>"""
)


class Store(BaseHTTPRequestHandler):
    """Answers with ``status``."""

    status = 200
    refuses_conditions = False
    failures = 0
    """Requests that it is going to fail."""
    objects: dict[str, bytes]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind, name = type(self), self.path.partition("?")[0]
        status, reply = kind.status, LISTING if "list-type" in self.path else b""
        if kind.failures > 0 and self.command == "PUT":
            kind.failures, status = kind.failures - 1, 503
        if status == 200 and kind.refuses_conditions and self.headers.get("If-None-Match"):
            status = 501
        elif status == 200 and self.headers.get("If-None-Match") and name in kind.objects:
            status = 412
        elif status == 200 and self.command == "PUT":
            kind.objects[name] = body
        elif status == 200 and name.count("/") > 2 and name not in kind.objects:
            status = 404
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time(), usegmt=True))
        self.send_header("Last-Modified", formatdate(usegmt=True))
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kind() -> type[Store]:
    return type("ThisStore", (Store,), {"objects": {}})


@pytest.fixture
def url(kind: type[Store]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def opened(url: str) -> ObjectStorage:
    return ObjectStorage(
        "s3://b/status code: 403", endpoint=url, access_key_id="a", secret_access_key="b", region="us-east-1",
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )  # fmt: skip


@pytest.mark.parametrize(("status", "lasting"), [(401, True), (403, True), (404, True), (500, False)])
def test_a_bucket_that_refuses(status: int, lasting: bool, kind: type[Store], url: str) -> None:
    kind.status = status
    with pytest.raises(StorageError) as caught:
        opened(url)
    assert caught.value.lasting == lasting


def test_a_store_that_knows_no_conditions(kind: type[Store], url: str) -> None:
    kind.refuses_conditions = True
    storage = opened(url)
    assert storage.create("k", b"one") and not storage.create("k", b"two")
    assert list(kind.objects.values()) == [b"one"]


def test_a_store_that_fails_may_know_conditions(kind: type[Store], url: str) -> None:
    storage = opened(url)
    kind.status = 500
    with pytest.raises(StorageError) as caught:
        storage.create("k", b"one")
    kind.status = 200
    assert not caught.value.lasting
    kind.failures = 1  # the next request is answered, and is the one that makes it
    assert storage.create("k", b"one") and not storage.create("k", b"two")


def test_of_two_who_create_while_a_store_fails_one_does(
    kind: type[Store], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = opened(url), opened(url)
    size = one.size

    def outrun(name: str) -> int | None:
        found = size(name)
        assert other.create(name, b"other")  # after the look, before the write
        return found

    monkeypatch.setattr(one, "size", outrun)
    kind.failures = 2
    with pytest.raises(StorageError) as caught:
        one.create("k", b"one")
    assert not caught.value.lasting and not kind.objects
    monkeypatch.undo()
    assert one.create("k", b"one") and not other.create("k", b"other")
    kind.failures = 2
    with pytest.raises(StorageError):
        other.create("k", b"other")
    assert list(kind.objects.values()) == [b"one"]
