"""Ctrl-C, SIGTERM and SIGHUP: handled, delayed, and remembered if a library swallows them."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# signals since `main` began, kept here because a library can swallow their exceptions
SIGNALS: list[int] = []


def list_stop_signals() -> list[int]:
    """Ctrl-C, SIGTERM, and SIGHUP, which a terminal sends when it closes, unless nohup is used."""
    stop = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stop.append(signal.SIGHUP)
    return [int(number) for number in stop]


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let `handler` handle the stop signals inside the block.

    In another thread this does nothing, because Python delivers signals only to the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, handler) for number in list_stop_signals()}
    try:
        yield
    finally:
        for number, previous in handlers.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """Delay the stop signals until the end of the block.

    Use it to fork processes. An exception during a fork would be printed and lost, and the new
    process, which inherits the handlers, would print another traceback.
    """
    held: list[int] = []
    try:
        with handling(lambda number, frame: held.append(number)):
            yield
    finally:
        for number in held:
            signal.raise_signal(number)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """A signal handler that ends the program; from a destructor, at the next `end_if_stopped`.

    Complete files stay. Incomplete files are deleted now or at the next start.
    """
    SIGNALS.append(number)
    while frame:
        if frame.f_code.co_name == "__del__":
            return  # Python would print an exception with its traceback, and go on
        frame = frame.f_back
    raise SystemExit(128 + number)


def end_if_stopped() -> None:
    """End the program if a signal's exception was swallowed, for example by a destructor.

    Call it between phases.
    """
    if SIGNALS:
        raise SystemExit(128 + SIGNALS[-1])
