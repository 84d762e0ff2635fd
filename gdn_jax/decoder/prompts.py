"""Requests as users write them, checked and made into token ids before any work."""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gdn_jax.errors import UnsupportedError

if TYPE_CHECKING:
    from gdn_jax.decoder.tokenizer import Tokenizer

__all__ = ["NO_TOKENIZER", "read_count", "read_prompts", "read_stops"]

NO_TOKENIZER = "there is none with the model; name a directory that has one (tokenizer=…, --tokenizer DIR)"


def read_prompts(
    prompt: Any, tokenizer: "Tokenizer | None", *, vocab: int, vision: frozenset[int], may_be_empty: bool
) -> list[list[int]]:
    """The token ids of every row: of one prompt (text or ids), or of a sequence of prompts.

    Raises:
        TypeError: not text, ids, or a sequence of either. ValueError: no prompt, an empty one (unless `may_be_empty`),
        ids outside the vocabulary. UnsupportedError: text without a tokenizer, or images.
    """
    rows = []
    for row, single in enumerate(_rows(prompt)):
        ids = _encoded(single, tokenizer) if isinstance(single, str) else _ids(row, single)
        if not ids and not may_be_empty:
            raise ValueError(f"prompt {row} is empty: it has no tokens; give at least one")
        outside = [token for token in ids if not 0 <= token < vocab]
        if outside:
            raise ValueError(f"prompt {row} has ids outside the vocabulary, 0 … {vocab - 1}: {outside[:4]}")
        if not vision.isdisjoint(ids):
            raise UnsupportedError(
                f"prompt {row} holds places for images or videos (token {min(vision.intersection(ids))}); this is a "
                "text model, which reads text only"
            )
        rows.append(ids)
    return rows


def read_stops(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple. Raises TypeError where they are not text, ValueError where one is empty."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) for text in stops):
        raise TypeError(f"stop must be a string or a sequence of strings, got {stop!r:.80}")
    if "" in stops:
        raise ValueError("a stop string must not be empty: every text contains it")
    return stops


def read_count(name: str, value: Any) -> int:
    """An integer of at least 1. Raises TypeError or ValueError that name it."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r:.80}")
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return operator.index(value)


def _rows(prompt: Any) -> list[Any]:
    """The single prompts: a flat sequence of ids is one of them."""
    if isinstance(prompt, str):
        return [prompt]
    items = _items(prompt)
    if items is None:
        raise _misfit(prompt)
    if isinstance(prompt, np.ndarray | jax.Array):
        return items if prompt.ndim == 2 else [prompt]
    if not items or all(hasattr(item, "__index__") and np.ndim(item) == 0 for item in items):
        return [items]
    if all(isinstance(item, str) for item in items) or all(_items(item) is not None for item in items):
        return items
    raise _misfit(prompt)


def _items(value: Any) -> list[Any] | None:
    """The members of a sequence or array, None where it is neither."""
    if isinstance(value, np.ndarray | jax.Array):
        return list(np.asarray(value)) if value.ndim in (1, 2) else None
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) else None


def _misfit(prompt: Any) -> TypeError:
    parts = prompt if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) else (prompt,)
    kinds = sorted({type(part).__name__ for part in parts})
    hint = "; a conversation is encoded by tokenizer.encode_chat(messages)" if _holds_mapping(parts) else ""
    return TypeError(
        f"prompt must be text, token ids, or a sequence of texts or of sequences of ids, got {', '.join(kinds)}{hint}"
    )


def _holds_mapping(parts: Sequence[Any]) -> bool:
    return any(isinstance(part, Mapping) for part in parts)


def _encoded(text: str, tokenizer: "Tokenizer | None") -> list[int]:
    if tokenizer is None:
        raise UnsupportedError(f"a prompt of text needs a tokenizer, and {NO_TOKENIZER}; or give token ids")
    return tokenizer.encode(text)


def _ids(row: int, single: Any) -> list[int]:
    items = _items(single)
    if items is None or any(isinstance(item, bool | np.bool_) or not hasattr(item, "__index__") for item in items):
        raise TypeError(f"prompt {row} must be text or a flat sequence of integer token ids, got {single!r:.80}")
    return [operator.index(item) for item in items]
