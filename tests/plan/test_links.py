"""Time of collectives, and which link a group is tied to."""

import pytest

from shardtrain.plan.hardware import parse_cluster
from shardtrain.plan.links import FAST_LATENCY, REACHED, Group, Kind, group, seconds

NVLINK, CARD = 300e9, 25e9  # of an A100, of its part of a DGX A100's network
RING = Group(size=8, inside=8, bandwidth=100e9, latency=0.0)


def degrees(**given: int) -> dict[str, int]:
    return {**dict.fromkeys(("pipeline", "replica", "data", "context", "tensor"), 1), **given}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-reduce", 2 * 7 / 8 * 1e9 / 100e9),
        ("all-gather", 7 / 8 * 1e9 / 100e9),
        ("reduce-scatter", 7 / 8 * 1e9 / 100e9),
        ("send", 1e9 / 100e9),
    ],
)
def test_bytes_over_bandwidth(kind: Kind, expected: float) -> None:
    assert seconds(kind, 1e9, RING) == pytest.approx(expected)


def test_a_tree_wins_where_latency_counts() -> None:
    """2 x 1023 rounds of a ring against 2 x 10 of a tree."""
    many = Group(size=1024, inside=8, bandwidth=100e9, latency=1e-5)
    assert seconds("all-reduce", 1e3, many) == pytest.approx(2 * 10 * 1e-5, rel=1e-3)
    assert seconds("all-gather", 1e3, many) == pytest.approx(1023 * 1e-5, rel=1e-3)


def test_nobody_to_talk_to_costs_nothing() -> None:
    assert seconds("all-reduce", 1e9, Group(1, 1, 1.0, 1.0)) == 0


def test_tensor_within_a_host_uses_its_fast_link() -> None:
    found = group(parse_cluster("a100-80:48x8"), degrees(data=48, tensor=8), ["tensor"])
    assert found == Group(8, 8, NVLINK * REACHED, FAST_LATENCY)
    assert not found.crosses


def test_tensor_over_two_hosts_is_tied_to_the_network() -> None:
    """Eight neighbours share the ring's way out, so each has the cards of all of them."""
    found = group(parse_cluster("a100-80:2x8"), degrees(tensor=16), ["tensor"])
    assert found.crosses
    assert found.inside == 8
    assert found.bandwidth == pytest.approx(8 * CARD * REACHED)


def test_data_across_hosts_with_tensor_inside_has_one_card() -> None:
    found = group(parse_cluster("a100-80:48x8"), degrees(data=48, tensor=8), ["data"])
    assert (found.size, found.inside) == (48, 1)
    assert found.bandwidth == pytest.approx(CARD * REACHED)


def test_a_rack_is_one_domain() -> None:
    found = group(parse_cluster("gb200:18x4"), degrees(tensor=72), ["tensor"])
    assert not found.crosses


def test_a_desktop_has_its_bus() -> None:
    found = group(parse_cluster("rtx4090:1x4"), degrees(data=4), ["data"])
    assert found.bandwidth == pytest.approx(32e9 * REACHED)
