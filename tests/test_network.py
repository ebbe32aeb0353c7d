"""Which interface a run communicates over, and listening at one address."""

import socket

import pytest

from torchtitan_clone.network import (
    InterfaceError,
    choose_interface,
    find_interface,
    is_loopback,
    join_host_and_port,
    listen,
    serve_store,
)

UNREACHABLE = "198.51.100.1"  # an address of no machine, to which there is a route or none

NO_NAMES = ("node0..cluster", "x" * 64)


def test_hosts_are_loopback_where_they_mean_this_machine_only():
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1")] == [True] * 4
    assert [is_loopback(host) for host in (UNREACHABLE, "no-such.invalid", "::", "0.0.0.0", *NO_NAMES)] == [False] * 6


def test_a_run_on_this_machine_communicates_over_loopback():
    for hosts in ([], ["localhost"], ["127.0.0.1", "::1"]):
        chosen = choose_interface("", hosts=hosts)
        assert chosen is not None
        assert (chosen.name, chosen.address) == ("lo", "127.0.0.1")


def test_a_named_interface_is_taken_whatever_the_hosts():
    assert choose_interface("lo", hosts=[UNREACHABLE]) == find_interface("lo")


def test_a_run_with_other_hosts_uses_the_interface_that_routes_there():
    chosen = choose_interface("", hosts=["localhost", UNREACHABLE])
    if chosen is None:
        pytest.skip("this machine has no route to other machines")
    assert not is_loopback(chosen.address)
    assert not chosen.name or find_interface(chosen.name).address == chosen.address


@pytest.mark.parametrize("host", NO_NAMES)
def test_a_host_that_is_no_name_has_no_interface(host):
    assert choose_interface("", hosts=[host]) is None


@pytest.mark.parametrize("name", ["nowhere0", "l", "lo\n", "x" * 300])
def test_an_unknown_interface_is_refused_with_those_that_exist(name):
    with pytest.raises(InterfaceError, match=r"no such network interface; available: .*\blo\b"):
        find_interface(name)


def test_a_store_listens_at_one_address():
    store = serve_store("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(OSError, match="in use"):
        listen("localhost", port=store.port)


def test_ports_are_joined_to_addresses_of_both_families():
    assert join_host_and_port("127.0.0.1", 80) == "127.0.0.1:80"
    assert join_host_and_port("::1", 80) == "[::1]:80"
