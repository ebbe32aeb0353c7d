"""Numbers in environment variables."""

import pytest

from torchtitan_clone.config.environment import EnvironmentVariableError, environment_integer


def test_an_integer_in_range_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert environment_integer("RANK", default=3) == 3
    monkeypatch.setenv("RANK", "007")
    assert environment_integer("RANK", default=3, high=7) == 7


@pytest.mark.parametrize("text", ["", "-1", "8", "1.0", "1e0", "0x1", " 1", "1\n", "\u0661", "9" * 5000])
def test_anything_else_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RANK", text)
    with pytest.raises(
        EnvironmentVariableError, match=r"^\$RANK = .*: must be an integer from 0 to 7; unset it"
    ) as caught:
        environment_integer("RANK", default=0, high=7)
    assert len(str(caught.value)) < 400
