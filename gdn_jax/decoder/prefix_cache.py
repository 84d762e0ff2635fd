"""States of prompts that were read before, kept on the device, so that a prompt that begins alike reads only the rest.

What a GDN layer remembers cannot be cut shorter, so a prefix is of use where its own state was kept. The cache keeps
that of a prompt

 - where it parts from one that the cache knows: the second prompt with some beginning leaves it to the third,
 - before its last token: the same prompt again, or one that goes on from it, reads from there,
 - after its answer: the next turn of a conversation, written out as a whole, begins with both.

Rows of a batch are cached one by one.
"""

import collections
import dataclasses
import functools
import threading
import typing
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Array
from gdn_jax.decoder.generate import Rows, bucket
from gdn_jax.decoder.state import DecoderState
from gdn_jax.integers import positive_int

__all__ = ["CachedPrompts", "PrefixCache", "PrefixCacheStats"]

# Kept key-value slots are rounded up, so that few programs serve prefixes of all lengths.
_LEAST_SLOTS, _SLOTS = 64, 512


class PrefixCacheStats(NamedTuple):
    """What a cache has done, and what it holds.

    `hits` and `misses` count the prompts that began with a kept prefix, and the others; `tokens_saved` the tokens that
    were not read again. `entries` and `nbytes` are what is kept now, `evictions` what had to make room for others.
    """

    hits: int
    misses: int
    tokens_saved: int
    entries: int
    nbytes: int
    evictions: int


class _Entry(NamedTuple):
    """A prefix, the state after it (one row, and hardly more slots than it uses), and the bytes of this state."""

    tokens: np.ndarray
    state: DecoderState
    nbytes: int


class PrefixCache:
    """States after prefixes of prompts, in at most `max_bytes` of device memory; give it to `Decoder.generate`.

        cache = PrefixCache(max_bytes=8 << 30)
        model.generate(prompt, prefix_cache=cache)

    Of the 27B model, a prefix takes 157 MB and 131 kB per token (keys and values in float32). The prefixes that were
    not used for the longest time make room for new ones; a state larger than the whole cache is not kept. Prefixes of
    fewer than `min_tokens` tokens are not kept either. What keeping costs: a copy of these bytes, and for each place in
    a prompt one more dispatch, since a piece of the prompt ends there.

    An entry belongs to the weights, as they lie in memory, and to the settings that led to it. Decoders of different
    models can share a cache, and its bytes, but never an entry; the entries of weights that are gone are dropped.

    Several threads may use a cache.

    Raises:
        TypeError: `max_bytes` or `min_tokens` is no integer. ValueError: one is below 1.
    """

    @typing.no_type_check
    def __init__(self, *, max_bytes: int, min_tokens: int = 1):
        self.max_bytes = positive_int("max_bytes", max_bytes)
        self.min_tokens = positive_int("min_tokens", min_tokens)
        self._lock = threading.Lock()
        # Least recently used first; the key is a model and the bytes of the tokens.
        self._entries: collections.OrderedDict[tuple[Hashable, bytes], _Entry] = collections.OrderedDict()
        self._weights: dict[Hashable, weakref.ref[Any]] = {}
        self._nbytes = self._hits = self._misses = self._saved = self._evictions = 0

    @property
    def stats(self) -> PrefixCacheStats:
        """What the cache has done so far, and what it holds now."""
        with self._lock:
            self._drop_orphans()
            return PrefixCacheStats(
                self._hits, self._misses, self._saved, len(self._entries), self._nbytes, self._evictions
            )

    def clear(self) -> None:
        """Drop all entries; what was counted stays."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def model(self, weights: Any, settings: Hashable) -> Hashable:
        """What entries of these weights under these settings are known by: the same objects have the same."""
        with self._lock:
            self._drop_orphans()
            # Weights are no hashable value, and comparing them would read them; an id is theirs as long as they live.
            key = (id(weights), settings)
            self._weights[key] = weakref.ref(weights)
            return key

    def longest(self, model: Hashable, tokens: np.ndarray) -> _Entry | None:
        """The longest kept prefix that leaves at least one of `tokens` int32 [n] to be read; it counts as used."""
        with self._lock:
            data = tokens.tobytes()
            sizes = {len(key) for owner, key in self._entries if owner == model and len(key) < len(data)}
            for size in sorted(sizes, reverse=True):
                if (key := (model, data[:size])) in self._entries:
                    self._entries.move_to_end(key)
                    entry = self._entries[key]
                    self._hits, self._saved = self._hits + 1, self._saved + entry.tokens.size
                    return entry
            self._misses += 1
            return None

    def parting(self, model: Hashable, tokens: np.ndarray) -> int:
        """How many tokens of int32 [n] are also the first ones of something that is kept; the most there are."""
        with self._lock:
            known = [entry.tokens for (owner, _), entry in self._entries.items() if owner == model]
        return max((_common(tokens, other) for other in known), default=0)

    def keep(self, model: Hashable, tokens: np.ndarray, state: DecoderState, row: int) -> None:
        """Keep a copy of row `row` of a state that has consumed `tokens` int32 [n]; known ones count as used."""
        slots = _slots(tokens.size, state.capacity)
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(_row_shapes(state, slots)))
        key = (model, tokens.tobytes())
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            elif self.min_tokens <= tokens.size and nbytes <= self.max_bytes:
                while self._nbytes + nbytes > self.max_bytes:  # before the copy is made, which then has room
                    self._nbytes -= self._entries.popitem(last=False)[1].nbytes
                    self._evictions += 1
                self._entries[key] = _Entry(tokens, _take_row(state, jnp.int32(row), slots=slots), nbytes)
                self._nbytes += nbytes

    def _drop_orphans(self) -> None:
        """Drop what belongs to weights that are gone, whose id may be given to others."""
        gone = {key for key, weights in self._weights.items() if weights() is None}
        for key in [key for key in self._entries if key[0] in gone]:
            self._nbytes -= self._entries.pop(key).nbytes
        for key in gone:
            del self._weights[key]


class CachedPrompts:
    """Prompts that are about to be read into fresh rows, with what `cache` knows of them.

    `reused` [B] says how many tokens of each need not be read, `rests` are the others, at least one of each; `marks`
    how many of these will have been read where a state is worth keeping. `model` is what `PrefixCache.model` says.
    """

    def __init__(self, cache: PrefixCache, model: Hashable, prompts: Sequence[Sequence[int]]):
        self._cache, self._model = cache, model
        self._prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
        self._entries = [cache.longest(model, prompt) for prompt in self._prompts]
        self.reused = [0 if entry is None else entry.tokens.size for entry in self._entries]
        self.rests = [list(prompt[count:]) for prompt, count in zip(prompts, self.reused, strict=True)]
        self.marks = [self._marks(row) for row in range(len(prompts))]

    def _marks(self, row: int) -> list[int]:
        prompt, earlier = self._prompts[row], self._prompts[:row]
        parting = max([self._cache.parting(self._model, prompt), *(_common(prompt, other) for other in earlier)])
        counts = {min(parting, prompt.size - 1), prompt.size - 1}
        least = max(self.reused[row] + 1, self._cache.min_tokens)
        return sorted(count - self.reused[row] for count in counts if count >= least)

    def restore(self, rows: Rows) -> Rows:
        """The fresh `rows`, which are donated, as if they had consumed what is not read again."""
        seen = np.zeros(rows.seen.shape, bool)
        state = rows.state
        for row, entry in enumerate(self._entries):
            if entry is not None:
                state = _put_row(state, jnp.int32(row), entry.state)
                seen[row, entry.tokens] = True
        return Rows(state=state, tokens=rows.tokens, seen=jnp.asarray(seen))

    def keep(self, row: int, count: int, rows: Rows) -> None:
        """Keep the state of a row that has consumed `count` tokens of its rest."""
        self._cache.keep(self._model, self._prompts[row][: self.reused[row] + count], rows.state, row)

    def keep_answers(self, rows: Rows, answers: Sequence[Sequence[int]]) -> None:
        """Keep the states at the end, where each row has consumed its prompt and its answer but for the last token.

        A row that the device has carried further, because only the host knew that it was over, is left out.
        """
        positions = np.asarray(rows.state.position)
        for row, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=True)):
            consumed = np.concatenate([prompt, np.asarray(answer[:-1], np.int32)])
            if consumed.size == positions[row]:
                self._cache.keep(self._model, consumed, rows.state, row)


def _common(tokens: np.ndarray, others: np.ndarray) -> int:
    """How many tokens the two begin with in common."""
    size = min(tokens.size, others.size)
    differing = np.flatnonzero(tokens[:size] != others[:size])
    return int(differing[0]) if differing.size else size


def _slots(count: int, capacity: int) -> int:
    """Key-value slots to keep of a row with `count` tokens: a power of two or, from 512 on, a multiple of that."""
    rounded = bucket(count, least=_LEAST_SLOTS) if count <= _SLOTS else -(-count // _SLOTS) * _SLOTS
    return min(rounded, capacity)


def _cut(state: DecoderState, slots: int) -> DecoderState:
    return dataclasses.replace(state, keys=state.keys[:, :, :slots], values=state.values[:, :, :slots])


@functools.partial(jax.jit, static_argnames=("slots",))
def _take_row(state: DecoderState, row: Array, *, slots: int) -> DecoderState:
    """A copy of one row, with its first `slots` key-value slots."""
    cut = _cut(state, slots)
    return jax.tree.map(lambda leaf, at: jax.lax.dynamic_slice_in_dim(leaf, row, 1, axis=at.axis), cut, cut.row_axes())


def _row_shapes(state: DecoderState, slots: int) -> Any:
    return jax.eval_shape(functools.partial(_take_row, slots=slots), state, jax.ShapeDtypeStruct((), jnp.int32))


@functools.partial(jax.jit, donate_argnames=("state",))
def _put_row(state: DecoderState, row: Array, saved: DecoderState) -> DecoderState:
    """The state with `saved` in place of one row; slots that were kept beyond the state's capacity are not used."""
    saved = _cut(saved, state.capacity)

    def put(leaf: Array, part: Array, at: Any) -> Array:
        start = [row if axis == at.axis else jnp.int32(0) for axis in range(leaf.ndim)]
        return jax.lax.dynamic_update_slice(leaf, part, start)

    return jax.tree.map(put, state, saved, state.row_axes())
