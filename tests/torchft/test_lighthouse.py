"""Errors of the lighthouse, and of a replica group that cannot reach one."""

import socket
import threading
import time

import pytest

from tests.support.runs import options, train
from torchtitan_clone.commands import lighthouse
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.network import NoAnswerError
from torchtitan_clone.torchft.lighthouse import (
    parse_lighthouse_address,
    start_lighthouse,
    wait_for_lighthouse,
)


@pytest.fixture
def port():
    """Returns a port on which no server listens."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def test_a_port_in_use_is_a_config_error():
    lighthouse = start_lighthouse(FaultTolerance(), port=0)
    port = int(lighthouse.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen at port {port}: Address already in use.*; choose another"):
        start_lighthouse(FaultTolerance(), port=port)
    wait_for_lighthouse(f"http://localhost:{port}", seconds=5)
    lighthouse.server.shutdown()


@pytest.mark.parametrize("bind", ["198.51.100.7", "no-such.invalid", "", "a b", "a..b"])
def test_an_address_of_another_machine_is_a_config_error(bind):
    with pytest.raises(ConfigError, match=f"cannot listen at {bind}:0: .*; choose another port, or an address of this"):
        start_lighthouse(FaultTolerance(), port=0, bind=bind)


def test_a_lighthouse_listens_at_the_address_that_it_prints():
    for bind in ("127.0.0.2", "::1"):
        lighthouse = start_lighthouse(FaultTolerance(), port=0, bind=bind)
        wait_for_lighthouse(lighthouse.url, seconds=5)
        host, port = parse_lighthouse_address(lighthouse.url)
        assert host == bind
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        lighthouse.server.shutdown()


def test_a_name_is_resolved_before_connections_are_forbidden(monkeypatch):
    """The name stands for one that only a DNS server knows, which a process that cannot connect cannot ask."""
    resolve = socket.getaddrinfo

    def resolve_as_dns(host, *args, **kwargs):
        return resolve("127.0.0.3" if host == "known-to-dns.invalid" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_as_dns)
    lighthouse = start_lighthouse(FaultTolerance(), port=0, bind="known-to-dns.invalid")
    assert lighthouse.url.startswith("http://known-to-dns.invalid:")
    wait_for_lighthouse(lighthouse.url, seconds=5)
    lighthouse.server.shutdown()


@pytest.mark.parametrize(
    "address",
    ["localhost:29510", "http://localhost", "29510", "http://localhost:x", "http://a..b:1", f"http://{'x' * 64}:1"],
)
def test_an_invalid_address_is_a_config_error(address):
    with pytest.raises(ConfigError, match=rf"\$TORCHFT_LIGHTHOUSE = {address}: must be an address as"):
        wait_for_lighthouse(address, seconds=5)


def test_a_lighthouse_that_starts_late_is_found(port):
    def start() -> None:
        time.sleep(0.5)
        with socket.create_server(("", port)) as server:
            server.accept()

    threading.Thread(target=start, daemon=True).start()
    wait_for_lighthouse(f"http://localhost:{port}", seconds=20)


@pytest.mark.parametrize("option", ["heartbeat_timeout_ms=-5", "min_replica_size=0"])
def test_the_script_checks_ranges(option, capsys):
    assert lighthouse.main(["--port=0", f"--fault_tolerance.{option}"]) == 2
    assert f"error: fault_tolerance.{option.replace('=', ' = ')}: must be " in capsys.readouterr().err


def test_a_group_without_a_lighthouse_exits_with_one_line(corpus, tmp_path, port):
    changes = {"fault_tolerance__enable": True, "fault_tolerance__group_size": 1}
    argv = options(corpus, tmp_path, fault_tolerance__process_group_timeout_ms=300, **changes)
    code, output = train(argv, log_folder=tmp_path, env={"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"})
    assert code == 1
    assert f"error: no lighthouse answers at $TORCHFT_LIGHTHOUSE = http://localhost:{port} (" in output
    assert "Traceback" not in output
    with pytest.raises(NoAnswerError):
        wait_for_lighthouse(f"http://localhost:{port}", seconds=0)
