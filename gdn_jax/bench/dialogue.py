"""Both ends of a conversation with a program that stays: a case as JSON a line in, an answer as JSON a line out.

What it imports and compiles, it does once for all cases. One that dies or is silent for too long is started afresh for
the next case.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any, NamedTuple

__all__ = ["Program", "answer_lines"]


class _Running(NamedTuple):
    """A process, with pipes to and from it, and the file that its stderr goes to."""

    process: "subprocess.Popen[str]"
    questions: IO[str]
    answers: IO[str]
    complaints: IO[str]


class Program:
    """A command that answers lines, each within `timeout` seconds."""

    def __init__(self, *command: str, timeout: float):
        self._command = command
        self._timeout = timeout
        self._running: _Running | None = None

    def start(self) -> None:
        """Have it import what it needs while something else is done."""
        self._started()

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        """Its answer.

        Raises:
            RuntimeError: it ended instead, with what it complained of last; or it took too long.
        """
        running, too_late = self._started(), threading.Event()

        def give_up():
            too_late.set()
            running.process.kill()

        alarm = threading.Timer(self._timeout, give_up)
        alarm.start()
        try:
            answer = _exchange(running, json.dumps(case))
        finally:
            alarm.cancel()
        if answer:
            return json.loads(answer)
        status = running.process.wait()
        running.complaints.seek(0)
        last = (running.complaints.read().strip().splitlines() or ["no output"])[-1]
        self.stop()
        if too_late.is_set():
            raise RuntimeError(f"no answer within {self._timeout:g} s")
        raise RuntimeError(f"ended with status {status}: {last[:200]}")

    def stop(self) -> None:
        """End it; it happens by itself when this process ends."""
        if self._running is None:
            return
        process, *files = self._running
        self._running = None
        process.kill()
        process.wait()
        for file in files:
            with contextlib.suppress(BrokenPipeError):  # a question that nobody has read
                file.close()

    def _started(self) -> _Running:
        if self._running is None:
            pipe, complaints = subprocess.PIPE, tempfile.TemporaryFile("w+")  # noqa: SIM115 (`stop` closes it)
            process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=complaints, text=True)
            assert process.stdin is not None
            assert process.stdout is not None
            self._running = _Running(process, process.stdin, process.stdout, complaints)
            atexit.register(self.stop)
        return self._running


def _exchange(running: _Running, line: str) -> str:
    """The line that answers this one; empty if there is no one to answer."""
    try:
        print(line, file=running.questions, flush=True)
    except BrokenPipeError:
        return ""
    return running.answers.readline()


def answer_lines(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer every line of stdin. What libraries print goes to stderr meanwhile, so that it is no answer.

    Ends at the first error, whose first line is then the last one of stderr: after it, a GPU may answer nothing right.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answered = answer(json.loads(line))
            except Exception as error:
                sys.exit(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            print(json.dumps(answered), file=answers, flush=True)
