"""What replica groups require of a machine."""

import socket
import sys

import pytest

from tests.support.runs import options, train
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.torchft import door
from torchtitan_clone.torchft.lighthouse import start_lighthouse


def test_all_missing_requirements_are_one_config_error(monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://here:1")
    door.check_requirements()
    for port in ('"abc"', '"70000"'):
        monkeypatch.setenv("TORCHFT_MANAGER_PORT", port.strip('"'))
        with pytest.raises(ConfigError, match=rf"\$TORCHFT_MANAGER_PORT = {port}: must be an integer from 0 to 65,535"):
            door.check_requirements()
    monkeypatch.delenv("TORCHFT_MANAGER_PORT")
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE")
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ConfigError) as error:
        door.check_requirements()
    for text in (
        'pip install "torchft==0.2.0"',
        "$TORCHFT_LIGHTHOUSE is not set; start scripts/lighthouse.py",
    ):
        assert text in str(error.value)


def test_a_port_of_the_manager_that_is_in_use_is_named(corpus, tmp_path):
    lighthouse = start_lighthouse(FaultTolerance(), port=0)
    argv = options(corpus, tmp_path, fault_tolerance__enable=True, fault_tolerance__group_size=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        env = {"TORCHFT_LIGHTHOUSE": lighthouse.url, "TORCHFT_MANAGER_PORT": str(port)}
        code, output = train(argv, log_folder=tmp_path, env=env)
    lighthouse.server.shutdown()
    assert code == 2
    rule = "this replica group cannot listen at 127.0.0.1: Address already in use; set it to a free port"
    assert f"error: $TORCHFT_MANAGER_PORT = {port}: {rule}" in output
    assert "Traceback" not in output
