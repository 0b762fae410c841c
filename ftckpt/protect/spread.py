"""Who stands with whom: groups no two of whose members fail together, and the nodes that keep packages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ftckpt.protect.modes import MOST_MEMBERS

T = TypeVar("T")


def spread(members: Sequence[T], domain: Callable[[T], str], most: int = 0, least: int = 2) -> list[list[T]]:
    """Groups of which no two members share a domain, about equally large.

    They have at most ``most`` members (0: any number), but more where a group would else have fewer than
    ``least``. Where domains are equally large the k-th of each stand together. Groups of one are left only where
    one domain has more members than all others together.
    """
    sizes = Counter(map(domain, members))
    if not sizes:
        return []
    order = {name: place for place, name in enumerate(sizes)}
    ordered = sorted(members, key=lambda member: order[domain(member)])
    # Dealt in turn, members of one domain meet again only after as many groups as there are.
    largest = max(sizes.values())
    num = max(largest, -(-len(ordered) // most) if most else 1)
    if len(ordered) // num < least:
        num = max(largest, len(ordered) // least, 1)
    return [ordered[place::num] for place in range(num)]


def apart(
    members: Sequence[T], node_of: Callable[[T], str], rack_of: Callable[[T], str], most: int, least: int = 2
) -> list[list[T]]:
    """As ``spread``: over racks where the members are in two or more, otherwise over nodes.

    Who would be alone for want of other racks stands with others of its rack: a lost node is then survived, a lost
    rack is not.
    """
    if len({rack_of(member) for member in members} - {""}) < 2:
        return spread(members, node_of, most, least)
    groups = spread(members, lambda member: rack_of(member) or f"node {node_of(member)}", most, least)
    alone = [group[0] for group in groups if len(group) == 1]
    return [group for group in groups if len(group) > 1] + spread(alone, node_of, most, least)


def replica_partition(
    ranks: Sequence[int], node_of: Callable[[int], str], rack_of: Callable[[int], str], most: int = MOST_MEMBERS
) -> list[tuple[int, ...]]:
    """The groups of one replica set: no two ranks of a group share a node, nor a rack where it can be helped.

    Every rank is in exactly one tuple; a tuple of one is a rank whose share is not protected.
    """
    return [tuple(group) for group in apart(sorted(ranks), node_of, rack_of, most)]


def mirror_nodes(
    nodes: Sequence[str], node: str, copies: int, racks: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The ``copies`` nodes that keep the packages of ``node``: the next ones in turn, those of other racks first.

    Every node keeps about as many as any other where racks are equally large.
    """
    place = nodes.index(node)
    others = [*nodes[place + 1 :], *nodes[:place]]
    own = racks.get(node, "") if racks else ""
    if not racks or not own:
        return tuple(others[:copies])
    far = [other for other in others if racks.get(other, "") != own]
    turn = sum(racks.get(other, "") == own for other in nodes[:place]) % max(len(far), 1)
    near = [other for other in others if racks.get(other, "") == own]
    return (*far[turn:], *far[:turn], *near)[:copies]
