"""What a user meets who starts the lighthouse, or a replica group without one."""

import socket
import threading
import time

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.lighthouse import NoLighthouseError, await_lighthouse, start_lighthouse
from torchtitan_clone.testing.runs import options, train


@pytest.fixture
def port():
    """A port at which nobody listens."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def test_a_port_that_is_taken_is_an_error_of_one_line():
    lighthouse = start_lighthouse(FaultTolerance(), port=0)
    port = int(lighthouse.address().rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen at port {port}: Address already in use.*; choose another"):
        start_lighthouse(FaultTolerance(), port=port)
    await_lighthouse(f"http://localhost:{port}", seconds=5)
    lighthouse.shutdown()


@pytest.mark.parametrize("address", ["localhost:29510", "http://localhost", "29510", "http://localhost:x"])
def test_what_is_no_address_is_told(address):
    with pytest.raises(ConfigError, match=rf"\$TORCHFT_LIGHTHOUSE = {address}: must be an address as"):
        await_lighthouse(address, seconds=5)


def test_a_lighthouse_that_is_late_is_awaited(port):
    def start() -> None:
        time.sleep(0.5)
        with socket.create_server(("", port)) as server:
            server.accept()

    threading.Thread(target=start, daemon=True).start()
    await_lighthouse(f"http://localhost:{port}", seconds=20)


def test_a_group_without_a_lighthouse_ends_with_one_line_and_may_be_started_again(corpus, tmp_path, port):
    changes = {"fault_tolerance__enable": True, "fault_tolerance__group_size": 1}
    argv = options(corpus, tmp_path, fault_tolerance__process_group_timeout_ms=300, **changes)
    code, output = train(argv, log_folder=tmp_path, env={"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"})
    assert code == 1
    assert f"error: no lighthouse answers at $TORCHFT_LIGHTHOUSE = http://localhost:{port} (" in output
    assert "Traceback" not in output
    with pytest.raises(NoLighthouseError):
        await_lighthouse(f"http://localhost:{port}", seconds=0)
