"""Which nodes ``ftckpt check`` has read from each other."""

from __future__ import annotations

from ftckpt.cli.check_pairs import distances


def test_few_nodes_are_all_paired_and_of_many_some_are_far_apart() -> None:
    for nodes in (2, 3, 8):
        assert distances(nodes) == list(range(1, nodes))
    assert distances(9) == [1, 2, 4] and distances(1000) == [1, 250, 500]
