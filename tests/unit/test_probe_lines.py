"""The comparison of what Megatron-LM logged, by which its check says that two runs are one."""

from __future__ import annotations

from tests.probe.lines import Lines, compare, farthest, join, resumed

LINE = (
    "iteration {n}/ 9 | consumed samples: {samples} | learning rate: 2.0E-04 | lm loss: {loss} | loss scale: 1.0 | "
    "grad norm: {norm} | num zeros: {zeros} | number of skipped iterations: 0 |"
)
KEYS = ("iteration 3/ 9", "iteration 4/ 9")


def lines(**changed: object) -> Lines:
    """Two iterations; what is changed is so in the second."""
    usual = {"samples": 48, "loss": "6.9E+00", "norm": 0.8, "zeros": 18.0}
    return {KEYS[0]: {LINE.format(n=3, **usual)}, KEYS[1]: {LINE.format(n=4, **{**usual, **changed})}}


def test_equal_lines() -> None:
    assert compare(lines(), lines()) == (2, [])
    assert farthest(lines(), lines()) == 0.0


def test_any_difference_is_shown_where_there_is_to_be_none() -> None:
    for changed in ({"loss": "6.900001E+00"}, {"zeros": 19.0}, {"samples": 64}):
        same, wrong = compare(lines(), lines(**changed))
        assert same == 1
        assert [line[0] for line in wrong] == ["-", "+"]


def test_losses_and_norms_may_differ_by_rounding_and_nothing_else_may() -> None:
    found = lines(loss="6.9007E+00", norm=0.801, zeros=19.0)
    assert compare(lines(), found, 2e-4) == (2, [])
    assert compare(lines(), found, farthest(lines(), found)) == (2, [])
    assert 9e-5 < farthest(lines(), found) < 1.1e-4
    for changed in ({"loss": "6.902E+00"}, {"norm": 0.805}, {"samples": 49}, {"loss": "nan"}, {"norm": "inf"}):
        assert compare(lines(), lines(**changed), 2e-4)[0] == 1, changed


def test_a_line_that_is_missing_or_too_many_is_wrong() -> None:
    short = resumed(lines(), 3)
    assert list(short) == [KEYS[1]]
    for rounding in (0.0, 2e-4):
        assert compare(lines(), short, rounding)[1] == [f"- {next(iter(lines()[KEYS[0]]))}"]
        assert compare(short, lines(), rounding)[1] == [f"+ {next(iter(lines()[KEYS[0]]))}"]


def test_each_of_several_lines_must_be_one_that_is_expected() -> None:
    both = lines()
    join(both, lines(loss="6.5E+00"))
    assert compare(both, lines(loss="6.5E+00")) == (2, [])
    assert compare(lines(), both)[0] == 1


def test_a_field_that_is_missing_is_more_than_rounding() -> None:
    found = lines()
    found[KEYS[1]] = {next(iter(found[KEYS[1]])).replace(" | num zeros: 18.0", "")}
    assert compare(lines(), found, 2e-4)[0] == 1


def test_a_run_that_begins_later_tells_the_mean_of_its_first_two_losses() -> None:
    def numbered(**losses: float) -> Lines:
        usual = {"samples": 48, "norm": 0.8, "zeros": 18.0}
        found = {f"iteration {n[1:]}/ 9": {LINE.format(n=n[1:], loss=f"{x:.6E}", **usual)} for n, x in losses.items()}
        return {
            **found,
            "validation loss at iteration 6": {"validation loss at iteration 6 | lm loss value: 6.5E+00 |"},
        }

    whole = numbered(_5=7.0, _6=6.812995, _7=6.741928, _8=6.7)
    for mean in (6.777461, 6.777462):
        assert compare(resumed(whole, 5), numbered(_6=6.812995, _7=mean, _8=6.7)) == (4, [])
    for wrong in (6.741928, 6.777464):
        assert compare(resumed(whole, 5), numbered(_6=6.812995, _7=wrong, _8=6.7))[0] == 3
    assert whole == numbered(_5=7.0, _6=6.812995, _7=6.741928, _8=6.7)
    assert compare(resumed(whole, 7), {key: whole[key] for key in ("iteration 8/ 9",)}) == (1, [])
