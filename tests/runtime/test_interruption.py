"""Ctrl-C, SIGTERM and SIGHUP stop a loop between two steps."""

import signal
import threading
from collections.abc import Iterator

import pytest

from esper.runtime.interruption import stop_on_interrupt


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """The tests' own process may have been started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_asks_to_stop_and_the_second_interrupts() -> None:
    with stop_on_interrupt() as should_stop:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_custom_handler_stays_in_place(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with stop_on_interrupt() as should_stop:
        assert signal.getsignal(signal.SIGINT) is handler
        signal.raise_signal(signal.SIGINT)
        assert not should_stop()
    assert signal.getsignal(signal.SIGINT) is handler


def test_outside_the_main_thread_nothing_is_installed() -> None:
    answers = []

    def ask() -> None:
        with stop_on_interrupt() as should_stop:
            answers.append(should_stop())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [False]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_asks_to_stop_and_is_named(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with stop_on_interrupt() as should_stop:
            assert should_stop.signal is None
            signal.raise_signal(number)
            assert should_stop()
            assert should_stop.signal == number
            assert signal.getsignal(number) is signal.SIG_DFL  # a second one ends the process
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stop_on_interrupt() as should_stop:
            signal.raise_signal(signal.SIGHUP)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGHUP, before)
