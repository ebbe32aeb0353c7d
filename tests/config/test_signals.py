"""The signals that stop a run."""

import signal

import pytest

from torchtitan_clone.config.environment import STOP_SIGNALS, handled_signals


@pytest.mark.parametrize(("handler", "ignored"), [(signal.SIG_DFL, set()), (signal.SIG_IGN, {signal.SIGHUP})])
def test_a_hangup_that_nohup_ignores_stays_ignored(handler, ignored):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert set(STOP_SIGNALS) - set(handled_signals()) == ignored
    finally:
        signal.signal(signal.SIGHUP, before)
