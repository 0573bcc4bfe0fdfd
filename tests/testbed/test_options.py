import math
from ipaddress import IPv4Network, collapse_addresses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.errors import BadInput, PotluckError
from potluck.testbed.network import choose_network
from potluck.testbed.options import (
    check_load,
    check_prefix,
    parse_memory,
    parse_names,
    parse_rate,
    parse_speeds,
    scale_speeds,
)


def test_speeds_of_three_devices_on_two_cores() -> None:
    speeds = scale_speeds(parse_speeds("1.42:1:1"), cores=2)
    assert speeds == pytest.approx([0.7474, 0.5263, 0.5263], abs=1e-4)
    assert scale_speeds([3], cores=2) == [1.0]


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=16), st.integers(1, 64))
def test_speeds_keep_their_ratios_and_fit_the_cores(ratios: list[float], cores: int) -> None:
    speeds = scale_speeds(ratios, cores)
    assert max(speeds) <= 1
    assert math.fsum(speeds) <= 0.9 * cores + 1e-9
    assert max(speeds) > 0.999 or math.fsum(speeds) > 0.9 * cores - 1e-4  # no slower than need be
    for ratio, speed in zip(ratios, speeds, strict=True):
        assert speed == pytest.approx(ratio / ratios[0] * speeds[0], rel=0.02, abs=2e-6)


@pytest.mark.parametrize("text", ["", "1:x", "1::1", "0:1", "-1", "nan", "inf:1", ":".join(["1"] * 251)])
def test_bad_speeds(text: str) -> None:
    with pytest.raises(BadInput, match="--speeds"):
        parse_speeds(text)


def test_rates() -> None:
    assert parse_rate("1gbit") == 10**9
    assert parse_rate("2.5Gbit") == 2_500_000_000
    assert parse_rate("100mbit") == 10**8
    for text in ("fast", "100", "1kbit", "100mbps", "-1gbit", "0gbit"):
        with pytest.raises(BadInput, match="--link"):
            parse_rate(text)


def test_memory() -> None:
    assert parse_memory(None, 2) == [None, None]
    assert parse_memory("4GiB", 2) == [4 << 30, 4 << 30]
    assert parse_memory("1.5GiB:512MiB:none", 3) == [3 << 29, 512 << 20, None]
    for text in ("4GB", "1KiB", "2GiB:2GiB", ""):
        with pytest.raises(BadInput, match="--memory"):
            parse_memory(text, 3)


def test_names() -> None:
    assert parse_names(None, 2) == ["device-0", "device-1"]
    assert parse_names("hub:cam-1", 2) == ["hub", "cam-1"]
    for text in ("hub", "hub:hub", "hub:Cam", "hub:../x", "hub:-a", "hub:", f"hub:{'x' * 41}"):
        with pytest.raises(BadInput, match="--names"):
            parse_names(text, 2)


def test_prefix_is_no_path_and_no_part_of_another() -> None:
    check_prefix("potluck")
    for prefix in ("", "a-b", "../a", "A", "*", "x" * 17):
        with pytest.raises(BadInput, match="prefix"):
            check_prefix(prefix)


@given(st.lists(st.tuples(st.integers(0, 2**24 - 1), st.integers(9, 32)), max_size=8))
@example([(0, 9), (1 << 23, 9)])
def test_network_overlaps_none_in_use(used: list[tuple[int, int]]) -> None:
    networks = [IPv4Network((0x0A000000 + host, length), strict=False) for host, length in used]
    in_use = [*networks, IPv4Network("0.0.0.0/0")]
    blocked = [network if network.prefixlen <= 24 else network.supernet(new_prefix=24) for network in networks]
    if list(collapse_addresses(blocked)) == [IPv4Network("10.0.0.0/8")]:
        with pytest.raises(PotluckError, match="no addresses"):
            choose_network(in_use)
        return
    chosen = choose_network(in_use)
    assert chosen.prefixlen == 24
    assert chosen.subnet_of(IPv4Network("10.0.0.0/8"))
    assert not any(chosen.overlaps(network) for network in networks)


def test_no_network_left() -> None:
    with pytest.raises(PotluckError, match="no addresses"):
        choose_network([IPv4Network("10.0.0.0/8")])


def test_network_after_the_last_comes_the_first() -> None:
    upper = [IPv4Network("10.77.0.0/16"), IPv4Network("10.76.0.0/14"), IPv4Network("10.80.0.0/12")]
    upper += [IPv4Network("10.96.0.0/11"), IPv4Network("10.128.0.0/9")]
    assert choose_network(upper) == IPv4Network("10.0.0.0/24")
    assert choose_network([*upper, IPv4Network("10.0.0.0/10")]) == IPv4Network("10.64.0.0/24")


def test_a_lighter_load_slows_all_devices_alike() -> None:
    full, light = (scale_speeds([2, 1, 1], cores=2, load=load) for load in (0.9, 0.45))
    assert light == pytest.approx([speed / 2 for speed in full], abs=1e-5)


@pytest.mark.parametrize("load", [0.0, -1.0, 0.91, float("nan")])
def test_a_load_that_leaves_no_room_for_messages_is_refused(load: float) -> None:
    with pytest.raises(BadInput, match="--load"):
        check_load(load)
