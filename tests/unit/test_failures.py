"""What failures a job has had, and which it is to expect by that; where that lies, and who reads it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import StorageError
from ftckpt.model.failures import (
    FailureRate,
    FailureRecord,
    LastAttempt,
    StartFacts,
    ended_by,
    expected,
    in_words,
    next_record,
)
from ftckpt.model.tiers import JOB, KINDS, NODE, PROCESS
from ftckpt.persist.commit import OWNER_NAME, TRAINED_NAME, claim, require_owner
from ftckpt.persist.failures import last_attempt, tell_trained
from ftckpt.persist.storage import open_storage
from ftckpt.store.directory import FAILURES_NAME
from ftckpt.store.failures import note_end, read_failures, still_trains, write_failures

FIRST = FailureRecord("job", 1, "w1", ("a", "b"), ("run",), 1000.0)
BOTH = ("a", "b")


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (StartFacts(BOTH, ("run",)), PROCESS),
        (StartFacts((*BOTH, "c"), ("run", "more")), PROCESS),
        (StartFacts(("a",), ("run",)), NODE),
        (StartFacts(("a", "c"), ("another",)), NODE),
        (StartFacts(BOTH, ("run",), lost=True), JOB),
        (StartFacts(("a",), ("run",), lost=True), JOB),
        (StartFacts(("c",), ("run",)), JOB),
        (StartFacts((), ("another",)), JOB),
        (StartFacts(BOTH, ("another",)), ""),
        (StartFacts(BOTH, ()), PROCESS),
        (StartFacts(BOTH, ("run",), taken_back=True), ""),
    ],
)
def test_how_an_attempt_has_ended(start: StartFacts, kind: str) -> None:
    assert ended_by(FIRST, start) == kind
    assert ended_by(None, start) == "" == ended_by(FIRST.as_ended(), start)


def test_a_launcher_without_a_name_may_be_the_same() -> None:
    assert ended_by(replace(FIRST, runs=()), StartFacts(BOTH, ("another",))) == PROCESS


def test_the_newest_counts_and_what_any_node_knows_of_it() -> None:
    second = replace(FIRST, number=2)
    found = [LastAttempt(FIRST, 9e9), LastAttempt(second, 5.0), LastAttempt(second.as_ended(), 3.0)]
    assert LastAttempt.newest(found) == (second.as_ended(), 5.0)
    assert LastAttempt.newest([]) is None


def test_times_of_one_clock_alone_are_compared() -> None:
    late = LastAttempt(replace(FIRST, began=7000.0), 7300.0)  # of a node whose clock is ahead
    newest = LastAttempt.newest([LastAttempt(FIRST, 1400.0), late])
    assert newest is not None and newest.secs == 400.0


def test_what_was_seen_adds_up_over_attempts() -> None:
    begins = replace(FIRST, owner="w", nodes=("a",), began=5000.0)
    assert next_record(None, "", begins) == begins
    second = next_record(LastAttempt(FIRST, 1600.0), NODE, begins)
    assert (second.number, second.secs, second.node_secs, second.seen) == (2, 600.0, 1200.0, {NODE: 1})
    assert (second.owner, second.nodes, second.began) == ("w", ("a",), 5000.0)
    third = next_record(LastAttempt(second, 5100.0), NODE, begins)
    assert (third.number, third.secs, third.node_secs, third.seen) == (3, 700.0, 1300.0, {NODE: 2})
    clean = next_record(LastAttempt(third, 4000.0), "", begins)
    assert (clean.secs, clean.seen) == (700.0, {NODE: 2}), "a clock that went back takes nothing away"


def test_who_has_seen_nothing_goes_by_what_is_assumed() -> None:
    given_secs = {PROCESS: 100.0, NODE: 200.0, JOB: 300.0}
    for record in (None, FIRST):
        assert {kind: rate.mtbf_secs for kind, rate in expected(given_secs, record, 2).items()} == given_secs


def test_rates_are_the_mean_of_the_gamma_distribution_that_follows() -> None:
    """Processes and nodes by the time of nodes, on as many as there are now."""
    record = replace(FIRST, secs=7200.0, node_secs=28800.0, seen={PROCESS: 3, JOB: 1})
    rates = expected(dict.fromkeys(KINDS, 3600.0), record, 2)
    assert rates[PROCESS] == FailureRate(3600.0, 3, 14400.0) and rates[PROCESS].mtbf_secs == 18000.0 / 4
    assert rates[NODE].mtbf_secs == 18000.0, "that none was seen counts, too"
    assert rates[JOB].mtbf_secs == 10800.0 / 2
    assert in_words(rates).startswith("process 3 in 4 h seen, one in 1 h assumed: one in 1.25 h; node 0 in 4 h")


@given(st.floats(1.0, 1e8), st.floats(1.0, 1e8), st.integers(10, 10_000))
def test_what_was_seen_for_long_outweighs_what_was_assumed(assumed: float, true: float, many: int) -> None:
    rate = FailureRate(assumed, many, many * true)
    least, most = sorted((assumed, true))
    assert least * (1 - 1e-9) <= rate.mtbf_secs <= most * (1 + 1e-9)
    assert abs(rate.mtbf_secs - true) <= abs(assumed - true) / many * (1 + 1e-6) + 1e-6


def test_a_node_keeps_them_beside_its_arenas_and_the_time_when_it_has_trained(tmp_path: Path) -> None:
    write_failures(tmp_path, FIRST)
    assert read_failures(tmp_path) is None, "no arena is there: what it had is lost"
    (tmp_path / "dp0.01230123").mkdir()
    os.utime(tmp_path / FAILURES_NAME, (5.0, 5.0))
    assert read_failures(tmp_path) == (FIRST, 5.0)
    still_trains(tmp_path)
    last = read_failures(tmp_path)
    assert last is not None and last.trained > 1e9
    note_end(tmp_path, FIRST)
    last = read_failures(tmp_path)
    assert last is not None and last.record.ended
    (tmp_path / FAILURES_NAME).write_text("{}")
    with pytest.raises(ValueError, match="missing"):
        read_failures(tmp_path)
    (tmp_path / FAILURES_NAME).unlink()
    note_end(tmp_path, FIRST)
    still_trains(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["dp0.01230123"], "that of another attempt stays as it is"


def test_storage_keeps_them_of_the_run_that_writes_there(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert last_attempt(storage, "job") is None
    claim(storage, "w1", "job", FIRST)
    assert last_attempt(storage, "job") == (FIRST, FIRST.began) and last_attempt(storage, "other") is None
    tell_trained(storage, "w0", 9e9, ended=True)
    assert last_attempt(storage, "job") == (FIRST, FIRST.began), "an earlier run says nothing of this one"
    tell_trained(storage, "w1", 1700.0)
    assert last_attempt(storage, "job") == (FIRST, 1700.0)
    tell_trained(storage, "w1", 1800.0, ended=True)
    assert last_attempt(storage, "job") == (FIRST.as_ended(), 1800.0)
    (tmp_path / TRAINED_NAME).write_text("[")
    assert last_attempt(storage, "job") == (FIRST, FIRST.began)
    claim(storage, "w1", "job")
    assert last_attempt(storage, "job") is None, "as an older version has claimed it"
    (tmp_path / OWNER_NAME).write_text('{"failures": {"number": 1}}')
    with pytest.raises(StorageError, match=r"owner\.json: is damaged"):
        last_attempt(storage, "job")


def test_what_an_earlier_run_has_left_is_no_reason_to_give_up(tmp_path: Path) -> None:
    """Storage may be away when this run begins, and be claimed late. A later run has the place to stay."""
    storage = open_storage(str(tmp_path))
    claim(storage, "another", "job", FIRST)
    for began, lasting in ((FIRST.began + 1, False), (FIRST.began - 1, True), (0.0, True)):
        with pytest.raises(StorageError) as caught:
            require_owner(storage, "mine", began)
        assert caught.value.lasting == lasting, began
    claim(storage, "another", "job")
    with pytest.raises(StorageError, match="not claimed it yet") as caught:
        require_owner(storage, "mine", 1.0)
    assert not caught.value.lasting
    claim(storage, "mine", "job", FIRST)
    assert require_owner(storage, "mine", FIRST.began)
