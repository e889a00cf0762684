"""What a signal does where nobody looks: it ends the command, whatever that makes of it."""

import os
import signal

import pytest

from jobs.errors import OutputError, StoppedError
from runner.signals import Signals


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_what_nobody_watches() -> None:
    signals = Signals()
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(StoppedError, match="stopped"), signals.taken():
        kill_myself()

    assert signals.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_whoever_turns_it_into_another_error_changes_nothing() -> None:
    """As numpy does, where its import is broken off."""
    with pytest.raises(StoppedError), Signals().taken():
        try:
            kill_myself()
        except BaseException as error:
            raise ImportError("multiarray failed to import") from error


def test_an_error_of_ours_stays_one() -> None:
    with pytest.raises(OutputError), Signals().taken():
        raise OutputError("the disk is full")


def test_where_somebody_watches_a_signal_is_a_wish() -> None:
    signals = Signals()

    with signals.taken(), signals.stop.watched():
        kill_myself()
        assert signals.stop.is_asked
        assert not signals.stop.is_over(grace=100.0)
        kill_myself()
        assert signals.stop.is_over(grace=100.0)
