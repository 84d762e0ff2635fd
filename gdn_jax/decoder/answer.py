"""What one row has been answered so far: tokens, text, and why it ended."""

from collections.abc import Collection

import numpy as np

from gdn_jax.decoder.generate import NOTHING
from gdn_jax.decoder.text_stream import TextStream

__all__ = ["Answer"]


class Answer:
    """The row's `tokens`, its `text` (with `stream`) and its `reason`: None while it goes on.

    `ends` are the ids after which it is over.
    """

    def __init__(self, stream: TextStream | None, ends: Collection[int]):
        self.tokens: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self._stream, self._ends = stream, ends
        self._delivered = 0

    def take(self, column: np.ndarray) -> int | None:
        """Take the row's tokens out of a block; if a stop string is complete, how many they were with its last."""
        for count, token in enumerate(column.tolist(), start=1):
            if self.reason is not None or token == NOTHING:
                return None
            self.tokens.append(token)
            if token in self._ends:
                self.reason = "eos"
            elif self._stream is not None:
                self.text += self._stream.push(token)
                if self._stream.stopped:
                    self.reason = "stop"
                    return count
        return None

    def close(self, reason: str) -> None:
        """No token follows; `reason` holds unless there is one already."""
        self.reason = self.reason or reason
        if self._stream is not None:
            self.text += self._stream.flush()

    def undelivered(self) -> str:
        """The text since the last call."""
        piece = self.text[self._delivered :]
        self._delivered = len(self.text)
        return piece
