"""What is told of how old snapshots really get: what was seen, when it has changed, and what to do."""

from __future__ import annotations

from ftckpt.config import Config
from ftckpt.job.actions import Announcement
from ftckpt.job.ages import Ages
from ftckpt.job.agreement import Coverage, Verdict
from ftckpt.model.snapshot import SnapshotId

RESTS, WORKS = Verdict(0, 0, cover=Coverage.DONE), Verdict(0, 0, target=3, cover=Coverage.WORKING)


def at(iteration: int) -> SnapshotId:
    return SnapshotId(b"l" * 16, iteration)


class Job:
    """Each iteration takes half a second, and is whole at the next boundary."""

    def __init__(self, protects: bool = True, **settings: object) -> None:
        self.ages = Ages(Config(**settings), protects)  # type: ignore[arg-type]
        self.iteration = 0
        self.told: list[tuple[float, Announcement]] = []

    def train(self, iterations: int, every: int = 1, left_out: int = 1, verdict: Verdict = WORKS) -> None:
        """Each ``every``-th is protected, and one of ``left_out`` snapshots is taken."""
        for _ in range(iterations):
            self.iteration += 1
            whole = at((self.iteration - 1) // left_out * left_out)
            protected = at(self.iteration // every * every)
            for news in self.ages.look(self.iteration, whole, protected, [verdict], self.iteration / 2):
                self.told.append((self.iteration / 2, news))
            if self.iteration % left_out:
                self.ages.leave_out()


def test_ages_are_told_after_a_minute_and_then_where_they_have_changed() -> None:
    job = Job()
    job.train(3000, every=4)
    ((secs, news),) = job.told
    assert secs == 60.5 and news.event == "ages"
    assert news.fields == {
        "secs": 60.0, "iterations": 120, "due": 120, "left_out": 0, "whole": 120, "whole_age": 1, "protected": 30,
        "protected_age": 3,
    }  # fmt: skip
    assert news.text == (
        "of 120 snapshots in 60 s 120 became whole: the newest was at most 1 iterations (0.5 s) old; 30 became "
        "protected: the newest was at most 3 iterations (1.5 s) old"
    )
    job.train(3000, every=7)
    assert len(job.told) == 1, "less than twice as seldom"
    job.train(3000, every=100)
    assert [news.fields["protected_age"] for _, news in job.told[1:]] == [99]


def test_what_is_left_out_is_told_at_once_and_once_with_what_to_change() -> None:
    job = Job()
    job.train(3000, every=4, left_out=2)
    ((secs, news),) = job.told
    assert secs < 20 and news.fields["left_out"] == 8
    assert "8 were left out because every slot was kept" in news.text
    assert "--ftckpt-slots" in news.text and "--ftckpt-protect-interval" in news.text
    job.train(3000, every=4)
    assert len(job.told) == 2 and "left out" not in job.told[1][1].text


def test_why_snapshots_are_seldom_protected_is_told_by_its_setting() -> None:
    for verdict, named in ((RESTS, "--ftckpt-smp-cores"), (WORKS, "--ftckpt-network-gbps")):
        job = Job()
        job.train(200, every=40, verdict=verdict)
        assert named in job.told[0][1].text
    job = Job()
    job.ages.busy = 0.96
    job.train(200, every=40, verdict=RESTS)
    assert "no more than 0.1 of a node's idle cores, or 0.01 of all: here 96% are busy" in job.told[0][1].text
    for quiet in (Job(protect_interval=40), Job()):
        quiet.train(200, every=40 if quiet.ages.config.protect_interval == 40 else 5, verdict=RESTS)
        assert "--ftckpt" not in quiet.told[0][1].text, "as it was asked for, or often enough"


def test_where_nothing_is_protected_nothing_is_said_of_it() -> None:
    job = Job(protects=False)
    job.train(200, verdict=RESTS)
    assert "protected" not in job.told[0][1].text and "protected" not in job.told[0][1].fields
