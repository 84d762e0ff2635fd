"""How far a long command is, on a terminal or in a log."""

import time
from types import TracebackType
from typing import Any

from gdn_jax.convert import Progress

__all__ = ["Meter"]


class Meter:
    """Prints tensors, bytes and rate to `stream`: on a terminal one line that changes, in a log a line now and then.

    A context manager, which ends the line. Give it to `convert` and `verify` as `progress`.
    """

    def __init__(self, verb: str, stream: Any):
        self._verb = verb
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._interval = 0.1 if self._is_terminal else 5.0
        self._started = time.monotonic()
        self._due = self._started
        self._unfinished = False

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._unfinished:
            self._stream.write("\n")

    def __call__(self, progress: Progress) -> None:
        """Print where the work is, if it is time to."""
        now = time.monotonic()
        finished = progress.tensors == progress.all_tensors
        if now < self._due and not finished:
            return
        self._due = now + self._interval
        rate = progress.nbytes / max(now - self._started, 1e-9)
        line = (
            f"{self._verb}: {progress.tensors}/{progress.all_tensors} tensors, "
            f"{progress.nbytes / 1e6:,.0f} of {progress.all_nbytes / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s"
        )
        self._stream.write(f"\r{line}\x1b[K" if self._is_terminal else f"{line}\n")
        self._stream.flush()
        self._unfinished = self._is_terminal
