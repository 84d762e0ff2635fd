"""Text out of tokens as they come: no half characters, nothing of a stop string, nothing lost."""

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopFilter", "TextStream"]

_REPLACEMENT = "\ufffd"
# A character of UTF-8 has at most four bytes, so three at the end may still become one.
_MOST_HELD = 3
# Tokens that are decoded again as context: a decoder may treat the first token specially, for instance drop its space.
_CONTEXT, _WINDOW = 8, 32


class Detokenizer:
    """The text of a growing sequence of tokens, in pieces.

    `decode` turns a list of ids into text, with U+FFFD for bytes that are no character. Each new token is decoded
    together with some before it, and what is new in the text is given out, except for U+FFFD at its end: those may be
    the beginning of a character that the next token completes. Everything before them must be final, as in byte-level
    vocabularies.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._text = ""
        self._given = 0  # characters of `_text`

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        self._window.append(token)
        self._text = self._decode(self._window)
        kept = self._text.rstrip(_REPLACEMENT)
        held = min(len(self._text) - len(kept), _MOST_HELD)
        piece = self._give(len(self._text) - held)
        if len(self._window) > _WINDOW:
            del self._window[:-_CONTEXT]
            waiting = len(self._text) - self._given
            self._text = self._decode(self._window)
            self._given = max(len(self._text) - waiting, 0)
        return piece

    def flush(self) -> str:
        """What was held back, now that no token follows."""
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece


class StopFilter:
    """Lets text through up to the first stop string; holds back an end that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that certainly stands before every stop string; sets `stopped` once one is complete."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        certain = len(text) - self._possible(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, now that no text follows."""
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


class TextStream:
    """The text of one row: tokens in, pieces of text out, until a stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._filter.stopped

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        return self._filter.push(self._detokenizer.push(token))

    def flush(self) -> str:
        """The rest, now that no token follows."""
        return self._filter.push(self._detokenizer.flush()) + self._filter.flush()
