"""Prompt lookup: what followed the last time that the same tokens stood there (Saxena, 2023)."""

import dataclasses
from typing import Any, override

import flax.struct
import jax.numpy as jnp

from gdn_jax.axes import Array, Int32, Leaf
from gdn_jax.decoder.drafting import Drafter, Draw, Proposal
from gdn_jax.integers import positive_int

__all__ = ["History", "NgramDrafter"]


@flax.struct.dataclass
class History:
    """The tokens of B sequences: `tokens` int32 [B, S], of which row b has the first `length[b]`."""

    tokens: Leaf
    length: Leaf


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Proposes what followed the latest of the longest earlier matches of the last `least` to `longest` tokens.

    A match that ends so close to the end that too few tokens follow it is a repetition, and is taken to go on. Without
    a match nothing is proposed. It needs no weights, and 4 bytes of memory a token.
    """

    draft_tokens: int = 3
    longest: int = 4
    least: int = 2

    def __post_init__(self) -> None:
        for name in ("draft_tokens", "longest", "least"):
            positive_int(name, getattr(self, name))
        if self.least > self.longest:
            raise ValueError(f"least must be at most longest = {self.longest}, got {self.least}")

    @property
    @override
    def count(self) -> int:
        return self.draft_tokens

    @override
    def begin(self, weights: Any, *, batch: int, capacity: int) -> History:
        return History(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))

    @override
    def read(
        self, weights: Any, memory: History, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], hidden: Any
    ) -> History:
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        capacity = memory.tokens.shape[1]
        # What does not count goes beyond the end, where it is dropped, every token to a place of its own.
        at = jnp.where(index < lengths[:, None], memory.length[:, None] + index, capacity + index)
        rows = jnp.arange(tokens.shape[0])[:, None]
        kept = memory.tokens.at[rows, at].set(tokens, mode="drop", unique_indices=True)
        return History(kept, jnp.minimum(memory.length + lengths, capacity))

    @override
    def propose(
        self, weights: Any, memory: History, pending: Int32[Array, "B"], draw: Draw
    ) -> tuple[Proposal, History]:
        ones = jnp.ones(pending.size, jnp.int32)
        whole = self.read(weights, memory, pending[:, None], ones, None).tokens
        # The pending token's place; a full history has none, and proposes nothing.
        last = memory.length[:, None]
        place = jnp.arange(whole.shape[1], dtype=jnp.int32)[None]
        back = jnp.arange(self.longest, dtype=jnp.int32)[:, None]
        mine = jnp.take_along_axis(whole, jnp.maximum(last - back.T, 0), axis=1)[:, :, None]
        there = whole[:, jnp.maximum(place - back, 0)]
        same = (there == mine) & (place >= back)[None] & (last >= back.T)[:, :, None]
        # How far back they go on being the same: up to the first that differs.
        differs = jnp.concatenate([~same, jnp.ones_like(same[:, :1])], axis=1)
        matched = jnp.where(place < last, jnp.argmax(differs, axis=1).astype(jnp.int32), 0)
        # The longest first, and of these the latest.
        best = jnp.argmax(jnp.where(matched >= self.least, matched * whole.shape[1] + place, -1), axis=1)[:, None]
        found = jnp.take_along_axis(matched, best, axis=1)[:, 0] >= self.least
        ahead = jnp.arange(self.count, dtype=jnp.int32)[None]
        period = jnp.maximum(last - best, 1)
        tokens = jnp.take_along_axis(whole, jnp.minimum(best + 1 + ahead % period, whole.shape[1] - 1), axis=1)
        counts = jnp.where(found & (memory.length < whole.shape[1]), self.count, 0)
        return Proposal(tokens, counts.astype(jnp.int32)), memory
