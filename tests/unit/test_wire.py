"""What travels between SMPs: who is let in, what is bounded, and that no wait is without an end."""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import ConfigError
from ftckpt.events import Events
from ftckpt.smp import peers as peers_module
from ftckpt.smp import wire
from ftckpt.smp.answers import MAX_CONNECTIONS, Answer, Answerer
from ftckpt.smp.peers import Peers
from ftckpt.smp.wire import Channel, Deadlines, Kind, PeerError, RefusedError, Request

SECRET = b"s" * 32
OTHER = b"o" * 32
LINEAGE = b"l" * 16
PATIENT = Deadlines(connect_secs=20.0, step_secs=20.0, idle_secs=20.0, slowest_bytes_per_sec=1e9)
HASTY_TO_MEET = replace(PATIENT, connect_secs=2.0)
HASTY = replace(PATIENT, step_secs=0.5)
CHUNK = Request(Kind.CHUNK, "tp0-dp1", LINEAGE, 7, 3)


class Seen(Events):
    def __init__(self) -> None:
        super().__init__(None, 0)
        self.all: list[tuple[str, dict[str, object]]] = []

    def emit(self, event: str, **fields: object) -> None:
        self.all.append((event, fields))


class Store:
    """What an answerer holds: bytes by shard and chunk."""

    def __init__(self) -> None:
        self.bytes = {("tp0-dp1", 3): b"chunk three" * 1000}
        self.held = self.asked = 0
        self.valid = True

    @contextmanager
    def find(self, request: Request) -> Iterator[Answer | None]:
        self.asked += 1
        data = self.bytes.get((request.shard, request.chunk))
        self.held += 1
        try:
            answer = Answer(memoryview(data), xxhash.xxh3_64_intdigest(data), lambda: self.valid) if data else None
            yield answer
        finally:
            self.held -= 1


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def events() -> Seen:
    return Seen()


@pytest.fixture
def answerer(store: Store, events: Seen) -> Iterator[Answerer]:
    with closing(Answerer("127.0.0.1", 0, SECRET, find=store.find, events=events, deadlines=PATIENT)) as made:
        yield made


@pytest.fixture
def hasty_to_meet(store: Store, events: Seen) -> Iterator[Answerer]:
    """It soon cuts off those who do not prove that they know the secret."""
    with closing(Answerer("127.0.0.1", 0, SECRET, find=store.find, events=events, deadlines=HASTY_TO_MEET)) as made:
        yield made


@pytest.fixture
def peers(answerer: Answerer) -> Iterator[Peers]:
    with closing(Peers(PATIENT)) as made:
        made.configure({"n1": ("127.0.0.1", answerer.port)}, SECRET)
        yield made


def connect(answerer: Answerer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", answerer.port), timeout=10)


def soon() -> float:
    return time.monotonic() + 20.0


def pair() -> tuple[Channel, Channel]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return Channel(one), Channel(server.accept()[0])


def both(asker: Callable[[Channel], None], answerer: Callable[[Channel], None]) -> list[BaseException | None]:
    """Run both sides; what each raised."""
    ends, raised = pair(), [None, None]

    def run(side: int, action: Callable[[Channel], None]) -> None:
        try:
            action(ends[side])
        except BaseException as error:  # noqa: BLE001 - told to the test
            raised[side] = error
        ends[side].close()

    threads = [threading.Thread(target=run, args=each) for each in enumerate((asker, answerer))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def fetched(peers: Peers, request: Request = CHUNK, at_most: int = 1 << 20) -> tuple[bytes | None, str]:
    fetch = peers.fetch("n1", request, at_most)
    assert fetch.done.wait(30)
    return (None if fetch.data is None else bytes(fetch.data)), fetch.error


def test_who_knows_the_secret_is_answered(peers: Peers, store: Store) -> None:
    for _ in range(3):
        assert fetched(peers) == (store.bytes["tp0-dp1", 3], "")
    assert fetched(peers, Request(Kind.CHUNK, "tp0-dp1", LINEAGE, 7, 4)) == (None, "")
    deadline = time.monotonic() + 30
    while store.held and time.monotonic() < deadline:
        time.sleep(0.005)
    assert store.held == 0 and store.asked == 4


def test_both_sides_prove_the_secret() -> None:
    assert both(lambda c: wire.greet(c, SECRET, soon()), lambda c: wire.welcome(c, SECRET, soon())) == [None, None]
    refused = both(lambda c: wire.greet(c, OTHER, soon()), lambda c: wire.welcome(c, SECRET, soon()))
    assert [type(error) for error in refused] == [RefusedError, RefusedError]


def test_an_answerer_that_does_not_know_the_secret_is_not_believed() -> None:
    def pretend(channel: Channel) -> None:
        hello = channel.read(40, soon())
        channel.write(bytes(hello), soon())
        proof = channel.read(32, soon())
        channel.write(bytes(proof), soon())  # the asker's own proof, sent back

    refused, _ = both(lambda c: wire.greet(c, SECRET, soon()), pretend)
    assert isinstance(refused, RefusedError) and "does not know the job's secret" in str(refused)


def test_a_proof_is_of_this_connection(answerer: Answerer) -> None:
    """A recorded beginning does not open a second connection."""
    recorded = []
    for attempt in range(2):
        with closing(Channel(connect(answerer))) as channel:
            nonce = b"n" * 32
            channel.write(struct.pack("<8s32s", wire.MAGIC, nonce), soon())
            theirs = bytes(channel.read(40, soon()))[8:]
            if attempt == 0:
                recorded.append(hmac.new(SECRET, b"ftckpt smp asks" + nonce + theirs, "sha256").digest())
            channel.write(recorded[0], soon())
            if attempt == 0:
                assert len(channel.read(32, soon())) == 32
            else:
                with pytest.raises(PeerError, match=r"closed|broke"):
                    channel.read(32, soon())


@pytest.mark.parametrize(
    "opening", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, b"\0" * 40, wire.MAGIC + b"n" * 64]
)
def test_who_does_not_know_it_is_told_nothing(
    hasty_to_meet: Answerer, store: Store, events: Seen, opening: bytes
) -> None:
    with connect(hasty_to_meet) as sock:
        begun = time.monotonic()
        sock.sendall(opening)
        received = b""
        try:
            while piece := sock.recv(4096):
                received += piece
        except ConnectionError:
            pass
        assert time.monotonic() - begun < 15  # cut off in time, also where nothing was sent
        assert len(received) in (0, 40) and store.asked == 0
    if opening.startswith(wire.MAGIC):
        assert [(name, fields["address"]) for name, fields in events.all] == [("peer_refused", "127.0.0.1")]


def test_a_wrong_secret_is_refused_and_named_once(answerer: Answerer, store: Store, events: Seen) -> None:
    with closing(Peers(PATIENT)) as peers:
        peers.configure({"n1": ("127.0.0.1", answerer.port)}, OTHER)
        for _ in range(3):
            data, error = fetched(peers)
            assert data is None and "does not accept this node's secret" in error and "n1 at 127.0.0.1" in error
            time.sleep(0.3)
    assert store.asked == 0
    assert [name for name, _ in events.all] == ["peer_refused"] and "secret" in str(events.all[0][1]["reason"])


def test_a_replaced_secret_ends_what_the_old_one_opened(answerer: Answerer, peers: Peers) -> None:
    assert fetched(peers)[1] == ""
    answerer.replace_secret(OTHER)
    assert fetched(peers)[0] is None
    address = {"n1": ("127.0.0.1", answerer.port)}
    peers.configure(address, OTHER)
    assert fetched(peers)[1] == ""


def test_a_secret_must_keep_somebody_out(store: Store, events: Seen) -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        Answerer("127.0.0.1", 0, b"short", find=store.find, events=events)
    with pytest.raises(ConfigError, match="secret_file"), closing(Peers()) as peers:
        peers.configure({}, b"")


def test_an_address_that_is_not_here_is_an_error(store: Store, events: Seen) -> None:
    with pytest.raises(ConfigError, match="smp_listen"):
        Answerer("203.0.113.7", 0, SECRET, find=store.find, events=events)


def test_a_port_is_taken_again_or_replaced(store: Store, events: Seen) -> None:
    with closing(Answerer("127.0.0.1", 0, SECRET, find=store.find, events=events)) as first:
        with closing(Answerer("127.0.0.1", first.port, SECRET, find=store.find, events=events)) as other:
            assert other.port not in (0, first.port)
        port = first.port
    with closing(Answerer("127.0.0.1", port, SECRET, find=store.find, events=events)) as again:
        assert again.port == port


def test_what_became_invalid_while_it_was_sent_is_dropped(peers: Peers, store: Store) -> None:
    store.valid = False
    assert fetched(peers) == (None, "")
    store.valid = True
    assert fetched(peers) == (store.bytes["tp0-dp1", 3], "")


def test_more_than_was_asked_for_is_not_read(peers: Peers) -> None:
    data, error = fetched(peers, at_most=100)
    assert data is None and "announces 11000 bytes where at most 100" in error


@pytest.mark.parametrize(
    "answer, reason",
    [
        (struct.pack("<B7xQQ", 1, 1 << 62, 0), "announces"),
        (struct.pack("<B7xQQ", 9, 0, 0), "answers 9"),
        (struct.pack("<B7xQQ", 1, 4, 0) + b"four\x01", "does not match its checksum"),
        (struct.pack("<B7xQQ", 1, 4, xxhash.xxh3_64_intdigest(b"four")) + b"four\x07", "ends with 7"),
        (struct.pack("<B7xQQ", 1, 4, 0) + b"fo", "closed"),
        (b"\xff" * 24, "answers 255"),
    ],
)
def test_nonsense_from_one_that_knows_the_secret_is_an_error(answer: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, closing(Peers(PATIENT)) as peers:
        peers.configure({"n1": server.getsockname()}, SECRET)
        fetch = peers.fetch("n1", CHUNK, 1 << 20)
        with closing(Channel(server.accept()[0])) as channel:
            wire.welcome(channel, SECRET, soon())
            assert wire.read_request(channel, PATIENT) == CHUNK
            channel.write(answer, soon())
        assert fetch.done.wait(30) and fetch.data is None and reason in fetch.error


def test_what_nobody_waits_for_any_more_is_not_asked_for() -> None:
    """While one transfer takes its time, many are asked for and cancelled; the next one does not wait for them."""
    last = Request(Kind.CHUNK, "dp0", LINEAGE, 8, 1)
    with socket.create_server(("127.0.0.1", 0)) as server, closing(Peers(PATIENT)) as peers:
        peers.configure({"n1": server.getsockname()}, SECRET)
        arrived: list[int] = []
        first = peers.fetch("n1", CHUNK, 1 << 20, arrived.append)
        with closing(Channel(server.accept()[0])) as channel:
            wire.welcome(channel, SECRET, soon())
            assert wire.read_request(channel, PATIENT) == CHUNK
            for _ in range(1000):
                peers.fetch("n1", CHUNK, 1 << 20, arrived.append).cancel()
            wanted = peers.fetch("n1", last, 1 << 20, arrived.append)
            assert peers._peers["n1"].queue.qsize() <= 2
            for data in (b"first", b"last one"):
                wire.write_head(channel, len(data), xxhash.xxh3_64_intdigest(data), soon())
                channel.write(data, soon())
                wire.write_trailer(channel, True, soon())
                if data == b"first":
                    assert wire.read_request(channel, PATIENT) == last
            assert wanted.done.wait(30) and wanted.data == b"last one" and first.data == b"first"
            assert arrived == [5, 8]


def test_no_more_than_some_requests_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, closing(Peers(PATIENT)) as peers:
        peers.configure({"n1": server.getsockname()}, SECRET)
        fetches = [peers.fetch("n1", CHUNK, 1 << 20) for _ in range(200)]
        refused = [fetch for fetch in fetches if "requests wait" in fetch.error]
        assert 100 < len(refused) < 200 and not any(fetch.tried for fetch in refused)
        assert peers._peers["n1"].queue.qsize() <= 64


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("<B5xHI4x16sq", 9, 3, 0, LINEAGE, 7) + b"dp0",
        struct.pack("<B5xHI4x16sq", 1, 60000, 0, LINEAGE, 7) + b"d" * 60000,
        struct.pack("<B5xHI4x16sq", 1, 0, 0, LINEAGE, 7),
        struct.pack("<B5xHI4x16sq", 1, 3, 0, LINEAGE, -7) + b"dp0",
        struct.pack("<B5xHI4x16sq", 2, 9, 0, LINEAGE, 7) + b"../../etc",
        struct.pack("<B5xHI4x16sq", 2, 3, 0, LINEAGE, 7) + b"a\0b",
        b"\xff" * 40,
    ],
)
def test_requests_that_ask_for_nothing_known_end_the_connection(
    answerer: Answerer, store: Store, request_bytes: bytes
) -> None:
    with closing(Channel(connect(answerer))) as channel:
        wire.greet(channel, SECRET, soon())
        with pytest.raises(PeerError):
            channel.write(request_bytes, soon())
            channel.read(1, soon())
    assert store.asked == 0


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_of_requests_fail_in_another_way(data: bytes) -> None:
    one, two = pair()
    with closing(one), closing(two):
        one.write(data, soon())
        one.abort()
        try:
            found = wire.read_request(two, PATIENT)
            assert len(found.shard) <= 456
        except PeerError:
            pass


@given(
    st.sampled_from(Kind), st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", fullmatch=True),
    st.binary(min_size=16, max_size=16), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_requests_come_through(kind: Kind, shard: str, lineage: bytes, iteration: int, chunk: int) -> None:
    one, two = pair()
    with closing(one), closing(two):
        request = Request(kind, shard, lineage, iteration, chunk)
        one.write(request.encode(), soon())
        assert wire.read_request(two, PATIENT) == request


def test_one_that_never_answers_is_given_up_in_time() -> None:
    hasty = replace(PATIENT, connect_secs=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, closing(Peers(hasty)) as peers:
        peers.configure({"n1": server.getsockname()}, SECRET)
        begun = time.monotonic()
        data, error = fetched(peers)
        assert data is None and "sends nothing in time" in error
        assert 0.3 < time.monotonic() - begun < 15


def test_one_that_answers_byte_by_byte_is_given_up_in_time() -> None:
    """The deadline is of the whole, not of each read."""
    with socket.create_server(("127.0.0.1", 0)) as server, closing(Peers(HASTY)) as peers:
        peers.configure({"n1": server.getsockname()}, SECRET)
        fetch = peers.fetch("n1", CHUNK, 1 << 20)
        with closing(Channel(server.accept()[0])) as channel:
            wire.welcome(channel, SECRET, soon())
            wire.read_request(channel, PATIENT)
            wire.write_head(channel, 1000, 0, soon())
            begun = time.monotonic()
            while not fetch.done.is_set() and time.monotonic() - begun < 30:
                try:
                    channel.write(b"x", soon())
                except PeerError:
                    break
                time.sleep(0.05)
            assert fetch.done.wait(30) and "in time" in fetch.error
            assert time.monotonic() - begun < 15


def test_one_that_takes_nothing_is_cut_off(store: Store, events: Seen) -> None:
    store.bytes["tp0-dp1", 3] = bytes(64 << 20)
    answerer = Answerer("127.0.0.1", 0, SECRET, find=store.find, events=events, deadlines=HASTY)
    with closing(answerer), closing(Channel(connect(answerer))) as channel:
        wire.greet(channel, SECRET, soon())
        channel.write(CHUNK.encode(), soon())
        deadline = time.monotonic() + 15
        while not store.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        while answerer.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert answerer.connections == 0 and store.held == 0


def test_a_node_that_comes_back_is_asked_again(store: Store, events: Seen) -> None:
    with closing(Peers(PATIENT)) as peers:
        first = Answerer("127.0.0.1", 0, SECRET, find=store.find, events=events, deadlines=PATIENT)
        peers.configure({"n1": ("127.0.0.1", first.port)}, SECRET)
        assert fetched(peers)[1] == ""
        first.close()
        assert fetched(peers)[0] is None
        again = Answerer("127.0.0.1", first.port, SECRET, find=store.find, events=events, deadlines=PATIENT)
        with closing(again):
            assert again.port == first.port
            deadline = time.monotonic() + 30
            while fetched(peers)[0] is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_node_that_is_away_is_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_BACKOFF_SECS", (60.0,))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with closing(Peers(PATIENT)) as peers:
        peers.configure({"n1": ("127.0.0.1", port)}, SECRET)
        assert "cannot be reached" in fetched(peers)[1]
        again = peers.fetch("n1", CHUNK, 1 << 20)
        assert again.done.wait(30) and "cannot be reached" in again.error and not again.tried
    assert fetched(peers)[1] == "n1: its SMP has no address"


def test_connections_are_limited(hasty_to_meet: Answerer, events: Seen) -> None:
    socks, answerer = [], hasty_to_meet
    try:
        for _ in range(MAX_CONNECTIONS + 5):
            socks.append(connect(answerer))
        deadline = time.monotonic() + 15
        while not events.all and time.monotonic() < deadline:
            time.sleep(0.01)
        assert answerer.connections <= MAX_CONNECTIONS
        assert "connections already" in str(events.all[0][1]["reason"])
    finally:
        for sock in socks:
            sock.close()
    deadline = time.monotonic() + 30  # those that did not prove anything are cut off, and others let in
    with closing(Peers(PATIENT)) as peers:
        peers.configure({"n1": ("127.0.0.1", answerer.port)}, SECRET)
        while fetched(peers)[0] is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_closing_leaves_no_thread(store: Store, events: Seen) -> None:
    before = set(threading.enumerate())  # some of them may be ending
    answerer = Answerer("127.0.0.1", 0, SECRET, find=store.find, events=events)
    peers = Peers()
    peers.configure({"n1": ("127.0.0.1", answerer.port)}, SECRET)
    assert fetched(peers)[1] == ""
    begun = time.monotonic()
    peers.close()
    answerer.close()
    deadline = begun + 8  # less than it waits for a thread that does not end
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
