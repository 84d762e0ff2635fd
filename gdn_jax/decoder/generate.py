"""The token loop on the device: prompts in, blocks of tokens out, the host one dispatch behind.

    feed      prompts [B, T] -> the first new token of every row
    advance   n more tokens in one dispatch: draw, consume, draw, …; rows that are done stay as they are

Between dispatches the host owns `Rows`, which holds everything a sequence needs to go on. The last token drawn is
pending: the state has consumed every token before it. So n tokens cost n - 1 steps, and a conversation continues by
feeding the pending token in front of the next prompt.
"""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, override

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Array, Bool, Float32, Int32, Leaf
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.sample import NOT_FINITE, Knobs, sample
from gdn_jax.decoder.state import DecoderState, check_decoder_state
from gdn_jax.errors import GdnError, StateMismatchError
from gdn_jax.require import require_array, require_kind
from gdn_jax.state import BoundedState, RowAxis

__all__ = [
    "LARGEST_PIECE",
    "NOTHING",
    "Generation",
    "Network",
    "Policy",
    "Rows",
    "advance",
    "after_prompts",
    "bucket",
    "check_rows",
    "ends_row",
    "feed",
    "in_pieces",
    "largest_piece",
    "marked",
    "new_rows",
]

NOTHING = -1
"""In a block, what stands where a row drew no token because it is done."""

# Prompts are padded to a power of two between these; longer ones are fed in pieces of the largest. So there are eight
# programs for prompts of every length, and no more than half of a prompt's last piece is padding.
_SMALLEST_PIECE = 16
LARGEST_PIECE = 2048
"""Tokens of all prompts together that are read at once, at most: more rows make products no faster, and take room."""


class Network(abc.ABC):
    """A model without its weights and state: a hashable value, so that equal ones share compiled programs.

    States have the fields of `DecoderState`: `gdn` (a pytree with the batch on axis 1), `position` int32 [B], and
    key-value slots that are not read from `position` on.
    """

    @abc.abstractmethod
    def step(self, weights: Any, state: Any, tokens: Array, active: Array) -> tuple[Array, Any]:
        """Consume tokens int32 [B] in the rows where `active` bool [B]: logits float32 [B, vocab], next state."""

    @abc.abstractmethod
    def prefill(self, weights: Any, state: Any, tokens: Array, lengths: Array) -> tuple[Array, Any]:
        """Consume tokens int32 [B, T], `lengths` [B] of them: logits [B, vocab] after each row's last, next state."""


@flax.struct.dataclass
class Rows(BoundedState):
    """B sequences that can go on: the decoder's state, the pending token, and which tokens were consumed.

    `tokens` int32 [B]: drawn, but not consumed yet. `seen` bool [B, vocab]: consumed at least once.
    """

    state: Any
    tokens: Leaf
    seen: Leaf

    @property
    @override
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    @override
    def capacity(self) -> int:
        return self.state.capacity

    @property
    @override
    def used(self) -> Leaf:
        return self.state.used

    @override
    def row_axes(self) -> Any:
        axes: dict[str, Any] = {"tokens": RowAxis(0, NOTHING), "seen": RowAxis(0, False)}
        return Rows(state=self.state.row_axes(), **axes)

    @override
    def check(self) -> None:
        require_kind("state.state", self.state, DecoderState)
        self.state.check()
        require_array("state.tokens", self.tokens, "int32")
        require_array("state.seen", self.seen, "bool")
        if self.tokens.shape != (self.state.batch,) or self.seen.shape[:-1] != (self.state.batch,):
            raise StateMismatchError(
                f"state.tokens must be [B] and state.seen [B, vocab] with B={self.state.batch}, got "
                f"{self.tokens.shape} and {self.seen.shape}"
            )

    @override
    def resized(self, capacity: int) -> "Rows":
        return dataclasses.replace(self, state=self.state.resized(capacity))


class Policy(NamedTuple):
    """How tokens are drawn: settings, `seeds` uint32 [B], and `ends` int32 [E], the tokens that end a row."""

    knobs: Knobs
    seeds: Leaf
    ends: Leaf


def new_rows(state: Any, *, batch: int, vocab: int) -> Rows:
    """Sequences that have consumed nothing, around a decoder state that has not either."""
    return Rows(state=state, tokens=jnp.zeros(batch, jnp.int32), seen=jnp.zeros((batch, vocab), bool))


def check_rows(rows: Any, cfg: DecoderConfig) -> None:
    """Refuse rows of another model.

    Raises:
        TypeError: not Rows, or a leaf of another dtype. StateMismatchError: a leaf of another shape.
    """
    require_kind("state", rows, Rows)
    rows.check()
    check_decoder_state(rows.state, cfg)
    if rows.seen.shape[1:] != (cfg.vocab,):
        raise StateMismatchError(f"state.seen must be [B, vocab] with vocab={cfg.vocab}, got {rows.seen.shape}")


@functools.partial(jax.jit, static_argnames=("network",), donate_argnames=("rows",))
def feed(
    weights: Any,
    rows: Rows,
    left: Array,
    prompts: Array,
    lengths: Array,
    wanted: Array,
    policy: Policy,
    *,
    network: Network,
) -> tuple[Rows, Array, Array]:
    """Consume `lengths` [B] tokens of prompts int32 [B, T] and draw each row's next: rows, what is left, block [1, B].

    Of the `wanted` tokens, one is drawn here; nothing is left after a token of `policy.ends`. A row of length 0 keeps
    its tokens and its `left` int32 [B].
    """
    logits, state = network.prefill(weights, rows.state, prompts, lengths)
    return after_prompts(rows, logits, state, left, prompts, lengths, wanted, policy)


def after_prompts(
    rows: Rows,
    logits: Float32[Array, "B vocab"],
    state: Any,
    left: Int32[Array, "B"],
    prompts: Int32[Array, "B T"],
    lengths: Int32[Array, "B"],
    wanted: Array,
    policy: Policy,
) -> tuple[Rows, Array, Array]:
    """What `feed` returns, from the logits and the state that prompts led to."""
    seen = marked(rows.seen, prompts, lengths)
    drawn, ended = _drawn(logits, seen, state.position, policy)
    tokens = jnp.where(lengths > 0, drawn, rows.tokens)
    left = jnp.where(lengths > 0, jnp.where(ended, jnp.int32(0), wanted - 1), left)
    return Rows(state=state, tokens=tokens, seen=seen), left, tokens[None]


def marked(
    seen: Bool[Array, "B vocab"], tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"]
) -> Bool[Array, "B vocab"]:
    """`seen` with the first `lengths` of the tokens."""
    batch, width = tokens.shape
    counted = jnp.arange(width, dtype=jnp.int32)[None] < lengths[:, None]
    return seen.at[jnp.arange(batch)[:, None], tokens].max(counted)


@functools.partial(jax.jit, static_argnames=("network", "steps"), donate_argnames=("rows",))
def advance(
    weights: Any, rows: Rows, left: Array, policy: Policy, *, network: Network, steps: int
) -> tuple[Rows, Array, Array]:
    """Draw up to `steps` tokens in each row, no more than `left` int32 [B]: rows, what is left, block [steps, B].

    A row is done, with nothing left, after a token of `policy.ends`. Done rows keep every bit and give `NOTHING`.
    """

    def body(carry: tuple[Rows, Array], _: None) -> tuple[tuple[Rows, Array], Array]:
        rows, left = carry
        active = left > 0
        seen = rows.seen.at[jnp.arange(left.size), rows.tokens].max(active)
        logits, state = network.step(weights, rows.state, rows.tokens, active)
        drawn, ended = _drawn(logits, seen, state.position, policy)
        rows = Rows(state=state, tokens=jnp.where(active, drawn, rows.tokens), seen=seen)
        left = jnp.where(active & ~ended, left - 1, jnp.int32(0))
        return (rows, left), jnp.where(active, drawn, jnp.int32(NOTHING))

    (rows, left), block = jax.lax.scan(body, (rows, left), length=steps)
    return rows, left, block


def _drawn(logits: Array, seen: Array, position: Array, policy: Policy) -> tuple[Array, Array]:
    """The tokens that come to stand at `position` [B], and which of them end their row."""
    drawn = sample(logits, seen, policy.seeds, position, policy.knobs)
    return drawn, ends_row(drawn, policy)


def ends_row(drawn: Int32[Array, "..."], policy: Policy) -> Bool[Array, "..."]:
    """Which tokens end their row."""
    ends = policy.ends.reshape(*(1,) * drawn.ndim, -1)
    return jnp.any(drawn[..., None] == ends, axis=-1) | (drawn == NOT_FINITE)


def bucket(count: int, *, least: int) -> int:
    """The smallest power of two that is at least `count` and at least `least`."""
    return max(least, 1 << (count - 1).bit_length())


def largest_piece(batch: int) -> int:
    """Tokens of each of so many prompts that are read at once, at most."""
    return max(_SMALLEST_PIECE, LARGEST_PIECE // bucket(batch, least=1))


def _pieces(lengths: Sequence[int], marks: Sequence[Sequence[int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Where each row's next piece starts and ends, until all have their length: [B] twice. No piece crosses a mark."""
    starts = np.zeros(len(lengths), np.int64)
    stops = [[*row, length] for row, length in zip(marks, lengths, strict=True)]
    while (starts < lengths).any():
        targets = [next((s for s in row if s > at), at) for row, at in zip(stops, starts, strict=True)]
        ends = np.minimum(starts + largest_piece(len(lengths)), targets)
        yield starts, ends
        starts = ends


def in_pieces(
    prompts: Sequence[Sequence[int]], marks: Sequence[Sequence[int]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The prompts' tokens as pieces [B, T], padded, and for each where its rows start and end in the prompts."""
    for starts, ends in _pieces([len(prompt) for prompt in prompts], marks):
        counts = ends - starts
        piece = np.zeros((len(prompts), bucket(int(counts.max()), least=_SMALLEST_PIECE)), np.int32)
        for row, prompt in enumerate(prompts):
            piece[row, : counts[row]] = prompt[starts[row] : ends[row]]
        yield piece, starts, ends


class _Block(NamedTuple):
    """A dispatched block of tokens [n, B], and what its rows were before it, if they may have to go back there."""

    tokens: Array
    before: "_Mark | None"


class _Mark(NamedTuple):
    """Everything in `Rows` that consuming a token overwrites; key-value slots beyond the position do not matter."""

    gdn: Any
    position: Array
    tokens: Array
    seen: Array

    @classmethod
    def of(cls, rows: Rows) -> "_Mark":
        """A copy, which survives the donation of the rows."""
        return jax.tree.map(jnp.copy, cls(rows.state.gdn, rows.state.position, rows.tokens, rows.seen))


class Generation:
    """One request on its way. Iterating gives blocks of tokens int32 [n, B] as the device finishes them.

    The next block is dispatched before one is read, so the device does not wait for the host. The first block is the
    one token that the prompts lead to; `prompts` holds at least one token per row, and `wanted` new ones are drawn
    unless rows end before. After the iteration, `finish` gives the rows.

    `marks` says for each row after how many tokens of its prompt, fewer than all and in ascending order, its state is
    wanted: `at_mark(row, count, rows)` is called when it has consumed just so many, and may copy from the rows.

    With `rewindable`, rows that the host ends (`halt`) go back to exactly the token they ended with; the price is a
    copy of the GDN state for every block in flight.

    Raises:
        GdnError: while iterating, if a row's logits are not finite.
    """

    def __init__(
        self,
        network: Network,
        weights: Any,
        rows: Rows,
        policy: Policy,
        *,
        prompts: Sequence[Sequence[int]],
        wanted: int,
        chunk: int,
        rewindable: bool,
        marks: Sequence[Sequence[int]] | None = None,
        at_mark: Callable[[int, int, Rows], None] | None = None,
    ):
        self._network, self._weights, self._policy = network, weights, policy
        self._chunk, self._rewindable = chunk, rewindable
        self._ends = np.asarray(policy.ends)
        self._running = np.ones(len(prompts), bool)
        self._rewinds: dict[int, tuple[_Mark, int]] = {}
        self._at_mark = at_mark
        self._rows, self._left, first = self._feed(rows, prompts, wanted, marks or [()] * len(prompts))
        self._undispatched = wanted - 1
        self._read: _Block | None = None
        self._queue = collections.deque([_Block(first, None)])
        first.copy_to_host_async()

    def _feed(
        self, rows: Rows, prompts: Sequence[Sequence[int]], wanted: int, marks: Sequence[Sequence[int]]
    ) -> tuple[Rows, Array, Array]:
        left, block = jnp.zeros(len(prompts), jnp.int32), rows.tokens[None]
        for piece, starts, ends in in_pieces(prompts, marks):
            fed = (jnp.asarray(piece), jnp.asarray(ends - starts, jnp.int32), jnp.int32(wanted))
            rows, left, block = self._read_piece(rows, left, *fed)
            for row in np.flatnonzero(ends > starts).tolist():
                if self._at_mark is not None and ends[row] in marks[row]:
                    self._at_mark(row, int(ends[row]), rows)
        return rows, left, block

    def __iter__(self) -> Iterator[np.ndarray]:
        while self._queue and (self._running.any() or self._read is None):
            if self._undispatched > 0 and self._running.any():
                self._dispatch()
            self._read = self._queue.popleft()
            tokens = self._on_host(self._read.tokens)
            bad = np.flatnonzero((tokens == NOT_FINITE).any(axis=0))
            if bad.size:
                raise GdnError(
                    f"the model's logits are not finite in row {bad[0]}: its weights or activations overflow; "
                    "check the checkpoint, or use a tier of higher precision"
                )
            self._running &= ~np.isin(tokens, self._ends).any(axis=0)
            yield tokens

    def halt(self, row: int, steps: int) -> None:
        """End `row` with the token in line `steps` - 1 of the block that was read last."""
        self._running[row] = False
        self._left = self._left.at[row].set(0)
        if not self._rewindable or self._read is None:
            return
        if self._read.before is not None:
            self._rewinds[row] = (self._read.before, steps)
        elif self._queue:  # it ended with its first token, which no block has consumed before the one in the queue
            assert self._queue[0].before is not None
            self._rewinds[row] = (self._queue[0].before, 0)

    def stop(self) -> None:
        """Dispatch nothing more. The iteration goes on over what is on its way, so that tokens and rows agree."""
        self._undispatched = 0

    def finish(self) -> Rows:
        """The rows, each having drawn the tokens that were given out and no others."""
        rows = self._rows
        if self._rewinds:
            steps = np.zeros(self._running.size, np.int32)
            for row, (mark, count) in self._rewinds.items():
                steps[row] = count
                rows = _back_to(rows, mark, jnp.arange(steps.size) == row)
            rows = self._again(rows, jnp.asarray(steps))
        return rows

    def _again(self, rows: Rows, steps: Array) -> Rows:
        """Rows that went back to a mark, with so many of the tokens drawn that they drew from there."""
        # The same program on the same values draws the same tokens again.
        return self._advance(rows, steps)[0]

    def _dispatch(self) -> None:
        before = _Mark.of(self._rows) if self._rewindable else None
        self._rows, self._left, tokens = self._advance(self._rows, self._left)
        for leaf in jax.tree.leaves(tokens):
            leaf.copy_to_host_async()
        self._queue.append(_Block(tokens, before))
        self._undispatched -= self._chunk

    def _read_piece(self, rows: Rows, left: Array, piece: Array, lengths: Array, wanted: Array) -> Any:
        return feed(self._weights, rows, left, piece, lengths, wanted, self._policy, network=self._network)

    def _on_host(self, tokens: Any) -> np.ndarray:
        """A block that `_advance` gave, as it is given out."""
        return np.asarray(tokens)

    def _advance(self, rows: Rows, left: Array) -> tuple[Rows, Array, Array]:
        return advance(self._weights, rows, left, self._policy, network=self._network, steps=self._chunk)


@functools.partial(jax.jit, donate_argnames=("rows",))
def _back_to(rows: Rows, mark: _Mark, chosen: Array) -> Rows:
    """The rows with those in `chosen` bool [B] as they were at the mark."""

    def pick(axis: int, old: Array, new: Array) -> Array:
        mask = chosen.reshape([-1 if i == axis else 1 for i in range(new.ndim)])
        return jnp.where(mask, old, new)

    gdn = jax.tree.map(functools.partial(pick, 1), mark.gdn, rows.state.gdn)
    state = rows.state.replace(gdn=gdn, position=pick(0, mark.position, rows.state.position))
    return Rows(state=state, tokens=pick(0, mark.tokens, rows.tokens), seen=pick(0, mark.seen, rows.seen))
