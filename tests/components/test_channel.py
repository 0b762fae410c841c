"""The channel between an SMP and others: authentication, bounds, and deadlines for all waits."""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import PeerAuthError, PeerError, SmpError
from ftckpt.events import Events
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp import peers as peers_module
from ftckpt.smp.channel import (
    FRAME,
    HELLO,
    MAGIC,
    TAG_BYTES,
    Channel,
    Deadlines,
    Delivery,
    Frame,
    Trust,
    connect,
    socket_address,
)
from ftckpt.smp.client import SmpClient
from ftckpt.smp.peers import CONNECTIONS, Fetch, Peers
from ftckpt.smp.ports import PortHold, listen_at
from ftckpt.smp.requests import (
    BytesRequest,
    ChunkRequest,
    ConfigureRequest,
    EndRequest,
    PackageRequest,
    ReportRequest,
    SmpRequest,
    StatusRequest,
    decode_request,
    encode_object,
    encode_request,
    exchange,
)
from ftckpt.smp.server import MAX_CONNECTIONS, MAX_UNPROVEN, Server
from tests.support.errors import lacks
from tests.support.smp_nodes import Seen
from tests.support.waiting import until

SECRET = Trust(b"s" * 32)
OTHER = Trust(b"o" * 32)
SEALED = Trust(b"s" * 32, encrypt=True)
SNAPSHOT = SnapshotId(b"l" * 16, 7)
PATIENT = Deadlines(connect_secs=20.0, step_secs=20.0, idle_secs=20.0, slowest_bytes_per_sec=1e9)
HASTY_TO_MEET = replace(PATIENT, connect_secs=2.0)
HASTY = replace(PATIENT, step_secs=0.5)
CHUNK = ChunkRequest(SNAPSHOT, "tp0-dp1", 3)
BOUND = 1 << 20


class Store:
    """The contents of a server: bytes by shard and chunk."""

    def __init__(self) -> None:
        self.bytes = {("tp0-dp1", 3): b"chunk three" * 1000}
        self.sending = self.wanted = 0
        self.valid = True

    @contextmanager
    def find(self, request: BytesRequest) -> Iterator[Delivery | None]:
        self.wanted += 1
        data = self.bytes.get((request.shard, getattr(request, "chunk", -1)))
        self.sending += 1
        try:
            yield Delivery(memoryview(data), xxhash.xxh3_64_intdigest(data), lambda: self.valid) if data else None
        finally:
            self.sending -= 1


@contextmanager
def serving(store: Store, events: Events, deadlines: Deadlines = PATIENT, trust: Trust = SECRET) -> Iterator[Server]:
    with closing(Server({}, find=store.find, events=events, deadlines=deadlines)) as server:
        server.listen("127.0.0.1", trust)
        yield server


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def events() -> Seen:
    return Seen()


@pytest.fixture
def server(store: Store, events: Seen) -> Iterator[Server]:
    with serving(store, events) as made:
        yield made


@pytest.fixture
def hasty_to_meet(store: Store, events: Seen) -> Iterator[Server]:
    """It soon cuts off those who do not prove that they know the secret."""
    with serving(store, events, HASTY_TO_MEET) as made:
        yield made


@contextmanager
def asking(port: int, trust: Trust = SECRET, deadlines: Deadlines = PATIENT) -> Iterator[Peers]:
    with closing(Peers(deadlines)) as peers:
        peers.configure({"n1": ("127.0.0.1", port)}, trust)
        yield peers


@pytest.fixture
def peers(server: Server) -> Iterator[Peers]:
    with asking(server.port) as made:
        yield made


@contextmanager
def played(deadlines: Deadlines = PATIENT) -> Iterator[tuple[socket.socket, Peers]]:
    """Peers that ask a socket of the test: what comes there is the test's to answer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        asking(listening.getsockname()[1], deadlines=deadlines) as peers,
    ):
        yield listening, peers


def dial(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def received_in_time(sock: socket.socket, opening: bytes) -> bytes:
    """The bytes sent to a client that sends ``opening``, even nothing, until it is disconnected in time."""
    received, begun = b"", time.monotonic()
    sock.sendall(opening)
    with suppress(ConnectionError):
        while piece := sock.recv(4096):
            received += piece
    assert time.monotonic() - begun < 10
    return received


def soon() -> float:
    return time.monotonic() + 20.0


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        with closing(Channel(one)) as asker, closing(Channel(listening.accept()[0])) as answerer:
            yield asker, answerer


def both(asker: Callable[[], object], answerer: Callable[[], object]) -> list[BaseException | None]:
    """Run both sides; what each raised."""
    raised: list[BaseException | None] = [None, None]

    def run(side: int, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            raised[side] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((asker, answerer))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


@contextmanager
def greeted(asks: Trust = SECRET, answers: Trust = SECRET) -> Iterator[tuple[Channel, Channel]]:
    """A channel after its handshake: the asker's end and the answerer's."""
    with channels() as (one, two):
        assert both(lambda: one.greet(asks, soon()), lambda: two.welcome(answers, soon())) == [None, None]
        yield one, two


@contextmanager
def tapped(change: Callable[[bytes], bytes], trust: Trust = SECRET) -> Iterator[tuple[Channel, Channel]]:
    """As ``greeted``; what the client sends after the handshake is gathered, changed, and then forwarded."""
    with greeted(trust, trust) as (asker, answerer):
        sent, write = bytearray(), asker.write

        def flush() -> None:
            write(change(bytes(sent)), soon())
            asker.close()

        asker.write = lambda data, deadline: sent.extend(data)  # type: ignore[method-assign, assignment]
        asker.flush = flush  # type: ignore[attr-defined]
        yield asker, answerer


def fetched(peers: Peers, request: BytesRequest = CHUNK, at_most: int = BOUND) -> tuple[bytes | None, str]:
    fetch = peers.fetch("n1", request, at_most)
    assert fetch.done.wait(30)
    return (None if fetch.data is None else bytes(fetch.data)), fetch.error


def answer(channel: Channel, data: bytes, value: int | None = None, valid: bool = True) -> None:
    """The answer of a server for bytes that it has."""
    number = xxhash.xxh3_64_intdigest(data) if value is None else value
    body = encode_object({"ok": True, "here": True, "hash": number})
    channel.send(body, soon(), Delivery(memoryview(data), number, lambda: valid))


@pytest.mark.parametrize("trust", [SECRET, SEALED])
def test_who_knows_the_secret_is_answered(store: Store, events: Seen, trust: Trust) -> None:
    with serving(store, events, trust=trust) as server, asking(server.port) as peers:
        for _ in range(3):
            assert fetched(peers) == (store.bytes["tp0-dp1", 3], "")
        assert fetched(peers, replace(CHUNK, chunk=4)) == (None, "")
        assert fetched(peers, PackageRequest(SNAPSHOT, "tp0-dp1")) == (None, "")
        until(lambda: store.sending == 0, "what was sent is let go")
        assert store.wanted == 5 and events.all == []


def test_both_sides_prove_the_secret() -> None:
    with greeted():
        pass
    with channels() as (one, two):
        refused = both(lambda: one.greet(OTHER, soon()), lambda: _welcome_and_close(two))
    assert [type(error) for error in refused] == [PeerAuthError, PeerAuthError]


def test_an_answerer_that_does_not_know_the_secret_is_not_believed() -> None:
    with channels() as (one, two):

        def pretend() -> None:
            two.write(two.read(HELLO.size, soon()), soon())
            two.write(two.read(32, soon()), soon())  # the asker's own proof, sent back

        refused, _ = both(lambda: one.greet(SECRET, soon()), pretend)
        assert isinstance(refused, PeerAuthError) and str(refused)


def proof_for(channel: Channel) -> bytes:
    """Exchanges hellos, the own one always the same; the proof that the other side waits for."""
    mine = HELLO.pack(MAGIC, 0, b"n" * 32)
    channel.write(mine, soon())
    theirs = bytes(channel.read(HELLO.size, soon()))
    return hmac.digest(SECRET.secret, b"ftckpt smp client" + mine + theirs, "sha256")


def test_a_proof_is_of_this_connection(server: Server) -> None:
    """A recorded beginning does not open a second connection."""
    with closing(Channel(dial(server))) as first, closing(Channel(dial(server))) as second:
        proof = proof_for(first)
        first.write(proof, soon())
        assert len(first.read(32, soon())) == 32
        assert proof_for(second) != proof
        second.write(proof, soon())
        with pytest.raises(PeerError, match=r"closed|broke"):
            second.read(33, soon())  # no more than bytes of no meaning


def test_nobody_on_the_way_can_switch_sealing_off() -> None:
    """Both hellos go into both proofs: a flag that was cleared on its way ends the connection."""
    with channels() as (asker, answerer):
        read = answerer.read

        def cleared(nbytes: int, deadline: float) -> bytearray:
            data = read(nbytes, deadline)
            if nbytes == HELLO.size:
                data[8] = 0
            return data

        answerer.read = cleared  # type: ignore[method-assign]
        raised = both(lambda: asker.greet(SEALED, soon()), lambda: _welcome_and_close(answerer))
    assert [type(error) for error in raised] == [PeerAuthError, PeerAuthError]


def _welcome_and_close(channel: Channel) -> None:
    with closing(channel):
        channel.welcome(SECRET, soon())


@pytest.mark.parametrize("opening", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, b"\0" * 48, MAGIC + b"n" * 72])
def test_who_does_not_know_it_is_shown_nothing(
    hasty_to_meet: Server, store: Store, events: Seen, opening: bytes
) -> None:
    with dial(hasty_to_meet) as sock:
        # To a wrong proof the answer is one of no meaning.
        assert len(received_in_time(sock, opening)) in (0, HELLO.size, HELLO.size + 32) and store.wanted == 0
    if opening.startswith(MAGIC):
        until(lambda: events.all, "named")
        assert [(name, fields["address"]) for name, fields in events.all] == [("peer_refused", "127.0.0.1")]


def test_a_port_is_taken_again_or_replaced(store: Store, events: Seen) -> None:
    with serving(store, events) as first:
        port = first.port
        assert first.listen("127.0.0.1", SECRET) == port == first.listen("127.0.0.1", OTHER, port)
        with closing(Server({}, find=store.find, events=events)) as other:
            assert other.listen("127.0.0.1", SECRET, port) not in (0, port)
    with closing(Server({}, find=store.find, events=events)) as again:
        assert again.listen("127.0.0.1", SECRET, port) == port


def test_a_port_is_held_for_an_smp_that_does_not_run_yet() -> None:
    """Nobody else gets it, before it is lent and after that; its listener stays when it is released."""
    held = PortHold("127.0.0.1")
    with closing(listen_at("127.0.0.1", held.number, 1)[0]) as other:
        assert other.getsockname()[1] != held.number
    held.lend()
    with closing(listen_at("127.0.0.1", held.number, 1)[0]) as smp, closing(socket.socket()) as peer:
        assert smp.getsockname()[1] == held.number
        held.close()
        held.lend()
        with closing(listen_at("127.0.0.1", held.number, 1)[0]) as other:
            assert other.getsockname()[1] != held.number
        peer.settimeout(10)
        peer.connect(("127.0.0.1", held.number))


def test_no_outgoing_connection_is_lent_the_port(server: Server) -> None:
    """While a killed SMP is away anybody may connect to somewhere."""
    least, most = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not least <= server.port <= most


def test_what_became_invalid_while_it_was_sent_is_dropped(peers: Peers, store: Store) -> None:
    store.valid = False
    assert fetched(peers) == (None, "")
    store.valid = True
    assert fetched(peers) == (store.bytes["tp0-dp1", 3], "")


class TestRecords:
    """After the handshake: nobody on the network can add, alter, repeat, reorder or cut anything unseen."""

    def receive(self, channel: Channel) -> Frame:
        return channel.receive(BOUND, BOUND, HASTY)

    @pytest.mark.parametrize("trust", [SECRET, SEALED])
    @pytest.mark.parametrize("nbytes", [0, 1, 300, 5 << 18])
    def test_a_frame_comes_through(self, trust: Trust, nbytes: int) -> None:
        data = os.urandom(nbytes)
        with greeted(trust, SECRET) as (asker, answerer):
            for sender, receiver in ((asker, answerer), (answerer, asker)):
                for _ in range(2):
                    got: list[Frame] = []
                    assert both(
                        lambda: sender.send(b"{}", soon(), Delivery(memoryview(data), 0)),  # noqa: B023
                        lambda: got.append(receiver.receive(2, BOUND * 2, PATIENT)),  # noqa: B023
                    ) == [None, None]
                    assert got[0] == Frame(b"{}", bytearray(data) if nbytes else None)

    @pytest.mark.parametrize("trust", [SECRET, SEALED])
    @pytest.mark.parametrize("at", [0, 4, 8, FRAME.size, FRAME.size + 5, FRAME.size + 12, 60, -18, -17, -1])
    def test_any_flipped_bit_is_seen(self, trust: Trust, at: int) -> None:
        def flip(data: bytes) -> bytes:
            changed = bytearray(data)
            changed[at] ^= 1
            return bytes(changed)

        with tapped(flip, trust) as (asker, answerer):
            asker.send(b'{"hash":1}', soon(), Delivery(memoryview(b"payload" * 5), 1))
            asker.flush()  # type: ignore[attr-defined]
            with pytest.raises(PeerError, match=r"altered|announces|closed"):
                self.receive(answerer)

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data[: len(data) // 2] * 2,  # the first frame twice
            lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
            lambda data: data[len(data) // 2 :],
            lambda data: data[:-3],
        ],
        ids=["repeated", "reordered", "left out", "cut"],
    )
    def test_no_record_can_be_moved(self, change: Callable[[bytes], bytes]) -> None:
        with tapped(change) as (asker, answerer):
            for body in (b"one", b"two"):
                asker.send(body, soon())
            asker.flush()  # type: ignore[attr-defined]
            with pytest.raises(PeerError, match=r"altered|closed"):
                for _ in range(2):
                    self.receive(answerer)

    def test_a_record_of_another_connection_or_direction_is_refused(self) -> None:
        recorded: list[bytes] = []
        with tapped(lambda data: recorded.append(data) or data) as (asker, answerer):  # type: ignore[func-returns-value]
            asker.send(b"stop", soon())
            asker.flush()  # type: ignore[attr-defined]
            assert self.receive(answerer).body == b"stop"
        with greeted() as (other, answerer):
            other.write(recorded[0], soon())
            with pytest.raises(PeerError, match="altered"):
                self.receive(answerer)
        with greeted() as (asker, answerer):
            sent = bytearray()
            answerer.write = lambda data, deadline: sent.extend(data)  # type: ignore[method-assign, assignment]
            answerer.send(b"stop", soon())
            asker.write(sent, soon())  # sent back to where it came from
            with pytest.raises(PeerError, match="altered"):
                self.receive(answerer)

    @pytest.mark.parametrize(
        "head", [(1 << 31, 0, 0), (0, 0, 1 << 62), (0xFFFFFFFF, 1, 0xFFFFFFFFFFFFFFFF), (2, 7, 0)]
    )
    def test_lengths_are_bounded_before_memory_is_made_for_them(self, head: tuple[int, int, int]) -> None:
        with greeted() as (asker, answerer):
            asker.write(FRAME.pack(*head), soon())
            with pytest.raises(PeerError, match="announces"):
                self.receive(answerer)

    @pytest.mark.parametrize(("asks", "answers"), [(SEALED, SECRET), (SECRET, SEALED)])
    def test_either_sides_wish_seals_both_directions(self, asks: Trust, answers: Trust) -> None:
        with greeted(asks, answers) as ends:
            for sender, receiver in (ends, ends[::-1]):
                seen, write = bytearray(), sender.write

                def tap(data: bytes | bytearray | memoryview, deadline: float) -> None:
                    seen.extend(data)  # noqa: B023
                    write(data, deadline)  # noqa: B023

                sender.write = tap  # type: ignore[method-assign]
                sender.send(b"the body is here", soon(), Delivery(memoryview(b"the payload is here"), 0))
                assert self.receive(receiver) == Frame(b"the body is here", bytearray(b"the payload is here"))
                assert b"is here" not in seen

    def test_no_record_is_sealed_as_another_was(self) -> None:
        """A nonce that comes twice under one key gives both records away, and the key of their tags."""
        with greeted(SEALED, SEALED) as ends:
            sent: list[bytes] = []
            for end in ends:
                end.write = lambda data, deadline: sent.append(bytes(data[FRAME.size :]))  # type: ignore[method-assign, assignment]
                for _ in range(3):
                    end.send(b"the same", soon())
        assert len({record[:8] for record in sent}) == len(sent) == 6


@pytest.mark.parametrize(
    "say, reason",
    [
        (lambda c: answer(c, b"four", value=0), ""),
        (lambda c: answer(c, b"x" * (BOUND + 1)), ""),
        (lambda c: c.send(b"[]", soon()), ""),
        (lambda c: c.send(b"\xff" * 24, soon()), ""),
        (lambda c: c.send(b"[" * 200_000, soon()), ""),
        (lambda c: c.send(b'{"ok": false, "error": "no"}', soon()), "refuses"),
        (lambda c: c.send(b"{}", soon()), ""),
        (lambda c: c.write(FRAME.pack(4, 0, 0) + b"fo", soon()), ""),
        (lambda c: c.write(FRAME.pack(4, 0, 0) + b"four" + bytes(TAG_BYTES), soon()), ""),
    ],
)
def test_nonsense_from_one_that_knows_the_secret_is_an_error(say: Callable[[Channel], None], reason: str) -> None:
    with played() as (listening, peers):
        fetch = peers.fetch("n1", CHUNK, BOUND)
        with closing(Channel(listening.accept()[0])) as channel:
            channel.welcome(SECRET, soon())
            assert decode_request(channel.receive(BOUND, 0, PATIENT).body) == CHUNK
            with suppress(PeerError):  # cut off in the middle
                say(channel)
        assert fetch.done.wait(30) and fetch.data is None and not lacks(fetch.error, *reason.split())


def test_what_nobody_waits_for_any_more_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one transfer takes its time, many are asked for and cancelled; the next one does not wait for them."""
    monkeypatch.setattr(peers_module, "CONNECTIONS", 1)
    last = ChunkRequest(replace(SNAPSHOT, iteration=8), "dp0", 1)
    with played() as (listening, peers):
        arrived: list[int] = []
        first = peers.fetch("n1", CHUNK, BOUND, arrived.append)
        with closing(Channel(listening.accept()[0])) as channel:
            channel.welcome(SECRET, soon())
            assert decode_request(channel.receive(BOUND, 0, PATIENT).body) == CHUNK
            cancelled = []
            for _ in range(1000):
                fetch = peers.fetch("n1", CHUNK, BOUND, arrived.append)
                fetch.cancel()
                cancelled.append(weakref.ref(fetch))
            del fetch
            wanted = peers.fetch("n1", last, BOUND, arrived.append)
            assert sum(each() is not None for each in cancelled) <= 2, "what is cancelled takes no memory"
            answer(channel, b"first")
            assert decode_request(channel.receive(BOUND, 0, PATIENT).body) == last
            answer(channel, b"last one")
            assert wanted.done.wait(30) and wanted.data == b"last one" and first.data == b"first"
            assert arrived == [5, 8]


GOOD = json.loads(encode_request(CHUNK))


@pytest.mark.parametrize(
    "body",
    [
        {**GOOD, "request": "shard"},
        {**GOOD, "shard": "d" * 201},
        {**GOOD, "shard": "../../etc"},
        {**GOOD, "shard": "a\0b"},
        {**GOOD, "chunk": -1},
        {**GOOD, "chunk": True},
        {**GOOD, "snapshot": f"{'00' * 16}.-7"},
        {**GOOD, "more": 1},
        {"request": "chunk"},
        {"request": "configure", "description": {}},
        {"request": "end"},
        {"request": "listen", "host": "127.0.0.1", "secret": "00" * 32},
        {"request": "status"},
    ],
)
def test_requests_that_nobody_may_make_over_the_network_are_refused(
    server: Server, store: Store, body: dict[str, object]
) -> None:
    with closing(Channel(dial(server))) as channel:
        channel.greet(SECRET, soon())
        channel.send(json.dumps(body).encode(), soon())
        reply = json.loads(channel.receive(BOUND, 0, PATIENT).body)
        assert reply["ok"] is False and reply["error"]
        assert exchange(channel, replace(CHUNK, chunk=9), PATIENT).fields == {"ok": True, "here": False}, "it goes on"
    assert store.wanted == 1


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=300)
    | st.dictionaries(st.sampled_from([*GOOD, "x"]), st.integers() | st.text()).map(encode_object)
)
def test_no_bytes_make_the_reader_of_requests_fail_in_another_way(data: bytes) -> None:
    with suppress(SmpError):
        assert len(getattr(decode_request(data), "shard", "")) <= 200


class TestOfOneNode:
    """The same frames over a Unix socket, where the kernel identifies the peer."""

    @pytest.fixture
    def node_server(self, store: Store, events: Seen, tmp_path: Path) -> Iterator[Server]:
        handlers = {StatusRequest: lambda request: {"n": 5}, ReportRequest: self._fail}
        hasty = replace(PATIENT, step_secs=3.0, connect_secs=0.5)
        with closing(Server(handlers, find=store.find, events=events, deadlines=hasty)) as server:
            server.serve_node(tmp_path)
            stop = threading.Event()

            def loop() -> None:
                while not stop.is_set():
                    server.poll(0.02)

            thread = threading.Thread(target=loop)
            thread.start()
            yield server
            stop.set()
            thread.join(10)
        assert list(tmp_path.iterdir()) == []

    def _fail(self, request: SmpRequest) -> dict[str, object]:
        raise ZeroDivisionError("nobody thought of it")

    def test_its_user_needs_no_secret_and_bytes_come_too(
        self, node_server: Server, store: Store, tmp_path: Path
    ) -> None:
        assert (tmp_path / "smp.sock").stat().st_mode & 0o777 == 0o600
        with closing(connect(tmp_path, 5)) as channel:
            channel.greet(Trust(), soon())
            assert exchange(channel, StatusRequest(), PATIENT).fields == {"ok": True, "n": 5}
            assert exchange(channel, CHUNK, PATIENT, most_payload=BOUND).payload == store.bytes["tp0-dp1", 3]
            assert "ZeroDivisionError" in exchange(channel, ReportRequest(), PATIENT).error
            assert exchange(channel, EndRequest(), PATIENT).error

    def test_its_own_secret_opens_the_network_to_nobody(self, node_server: Server) -> None:
        """The rule is one of sockets: what needs no secret here is refused there."""
        node_server.listen("127.0.0.1", SECRET)
        with closing(Channel(dial(node_server))) as channel, pytest.raises(PeerAuthError):
            channel.greet(Trust(), soon())

    def test_its_state_is_nobodys_business_on_the_network(self, node_server: Server) -> None:
        node_server.listen("127.0.0.1", SECRET)
        with closing(Channel(dial(node_server))) as channel:
            channel.greet(SECRET, soon())
            for request in (StatusRequest(), ConfigureRequest({}), EndRequest()):
                assert exchange(channel, request, PATIENT).error

    def test_a_loop_that_stands_still_answers_nobody_and_holds_nobody(
        self, store: Store, events: Seen, tmp_path: Path
    ) -> None:
        with closing(Server({}, find=store.find, events=events, deadlines=HASTY)) as server:
            server.serve_node(tmp_path)
            with closing(connect(tmp_path, 5)) as channel:
                channel.greet(Trust(), soon())
                assert "busy" in exchange(channel, StatusRequest(), PATIENT).error
                assert exchange(channel, CHUNK, PATIENT, most_payload=BOUND).payload, "bytes do not wait for it"


def test_one_that_answers_byte_by_byte_is_given_up_in_time() -> None:
    """The deadline covers the message, not each read."""
    with played(HASTY) as (listening, peers):
        fetch = peers.fetch("n1", CHUNK, BOUND)
        with closing(Channel(listening.accept()[0])) as channel:
            channel.welcome(SECRET, soon())
            channel.receive(BOUND, 0, PATIENT)
            channel.write(FRAME.pack(1000, 0, 0), soon())
            begun = time.monotonic()
            while not fetch.done.is_set() and time.monotonic() - begun < 12:
                try:
                    channel.write(b"x", soon())
                except PeerError:
                    break
                time.sleep(0.05)  # a slow peer
            assert fetch.done.wait(3) and fetch.error
            assert time.monotonic() - begun < 15


def test_one_that_takes_nothing_is_cut_off(store: Store, events: Seen) -> None:
    store.bytes["tp0-dp1", 3] = bytes(64 << 20)
    with serving(store, events, HASTY) as server, closing(Channel(dial(server))) as channel:
        channel.greet(SECRET, soon())
        channel.send(encode_request(CHUNK), soon())
        until(lambda: store.wanted, "asked")
        until(lambda: server.connections == 0 and store.sending == 0, "cut off", 15)


def test_a_node_that_is_away_is_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_BACKOFF_SECS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with asking(port) as peers:
        assert fetched(peers)[1]
        again = peers.fetch("n1", CHUNK, BOUND)
        assert again.done.wait(30) and again.error and not again.tried
    assert not lacks(fetched(peers)[1], "n1")


def chunks_of(peers: Peers, number: int) -> list[Fetch]:
    fetches = [peers.fetch("n1", CHUNK, BOUND) for _ in range(number)]
    for fetch in fetches:
        assert fetch.done.wait(30)
    return fetches


class TestSeveralConnections:
    def test_what_is_asked_for_at_once_comes_over_several(self, store: Store, events: Seen) -> None:
        together = threading.Barrier(CONNECTIONS)

        @contextmanager
        def meet(request: BytesRequest) -> Iterator[Delivery | None]:
            together.wait(20)
            with store.find(request) as delivery:
                yield delivery

        with (
            closing(Server({}, find=meet, events=events, deadlines=PATIENT)) as server,
            asking(server.listen("127.0.0.1", SECRET)) as peers,
        ):
            assert all(fetch.data is not None for fetch in chunks_of(peers, CONNECTIONS))
            assert server.connections == CONNECTIONS

    def test_each_address_of_a_node_is_used(
        self, store: Store, events: Seen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hosts = "127.0.0.1,127.0.0.2"
        with closing(Server({}, find=store.find, events=events, deadlines=PATIENT)) as server:
            came: set[str] = set()
            port = server.listen(hosts, SECRET)

            def connect_to(place: tuple[str, int], timeout_secs: float) -> Channel:
                made = connect(place, timeout_secs)
                came.add(place[0])
                return made

            monkeypatch.setattr(peers_module, "connect", connect_to)
            with closing(Peers(PATIENT)) as peers:
                peers.configure({"n1": (hosts, port)}, SECRET)
                until(lambda: (chunks_of(peers, CONNECTIONS), came == set(hosts.split(",")))[1], "both are used")


def test_strangers_keep_nobody_out(server: Server, events: Seen) -> None:
    with ExitStack() as socks:
        for _ in range(MAX_CONNECTIONS + MAX_UNPROVEN):
            socks.enter_context(dial(server))
        until(lambda: events.all, "named", 15)
        assert str(events.all[0][1]["reason"])
        assert server.connections <= MAX_UNPROVEN
        # While all of them are still there: they have twenty seconds to prove the secret.
        with asking(server.port, deadlines=HASTY_TO_MEET) as peers:
            assert fetched(peers)[1] == ""


def test_a_request_to_the_nodes_smp_ends_by_its_deadline(tmp_path: Path) -> None:
    """Each stage takes nearly all that is allowed: the sum is not."""
    with socket.socket(socket.AF_UNIX) as listening:
        with socket_address(tmp_path) as address:
            listening.bind(address)
        listening.listen()

        def serve() -> None:
            with closing(Channel(listening.accept()[0])) as channel, suppress(PeerError):
                time.sleep(0.7)  # a slow SMP
                channel.welcome(Trust(), soon())
                channel.receive(BOUND, 0, PATIENT)
                time.sleep(0.7)  # a slow SMP
                body = encode_object({"ok": True})
                channel.send(body, soon())

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(SmpError):
            SmpClient(tmp_path, tmp_path, "job", "n0").status(1.0)
        assert 0.9 < time.monotonic() - begun < 1.4
        thread.join(10)


def test_closing_leaves_no_thread(store: Store, events: Seen) -> None:
    before = set(threading.enumerate())  # some of them may be ending
    with serving(store, events) as server, asking(server.port) as peers:
        assert fetched(peers)[1] == ""
        begun = time.monotonic()
    left = begun + 8 - time.monotonic()  # less than it waits for a thread that does not end
    until(lambda: set(threading.enumerate()) <= before, "no thread is left", left)
