"""Ctrl-C as a request that is obeyed at a safe place."""

import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupts"]


class Interrupts:
    """While it is open, the first Ctrl-C only sets `requested`; a second one raises KeyboardInterrupt as usual.

    Between a dispatch that takes a donated state and the assignment of the new one, an exception would lose both. In a
    thread other than the main one, or where the program has its own handler, nothing is changed.
    """

    def __init__(self):
        self.requested = False
        self._installed = False

    def __enter__(self) -> "Interrupts":
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
