"""Speculative decoding: a drafter proposes, the model looks at it in one call, and takes what it would have drawn.

One round, for every row that goes on: the drafter proposes d_1 … d_N after the pending token d_0; the model's logits
after each of d_0 … d_N give the tokens t_1 … t_N+1 that it draws there; d_i is accepted as long as d_i = t_i; with n
accepted, d_0 … d_n are taken, t_1 … t_n+1 are drawn, and t_n+1 is pending.

A token is drawn from the model's logits by its row's own randomness at its own place, so the tokens are those of
`generate.advance` whatever was proposed: not only their distribution is the same. For a proposal that does not depend
on this randomness, t_i = d_i with the model's probability of d_i, and else t_i is distributed as the model's other
tokens are: rejection sampling, exactly. A drafter that draws by the same randomness from logits of its own agrees more
often than with independent draws, the more the closer its logits are.
"""

import abc
import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Array, Bool, Float32, Int32
from gdn_jax.decoder.draft_check import begun, check_methods
from gdn_jax.decoder.drafting import Drafter
from gdn_jax.decoder.generate import (
    NOTHING,
    Generation,
    Network,
    Policy,
    Rows,
    after_prompts,
    bucket,
    ends_row,
    in_pieces,
    marked,
)
from gdn_jax.decoder.sample import sample
from gdn_jax.require import require_kind

__all__ = [
    "DraftCounts",
    "Drafting",
    "SpeculativeGeneration",
    "SpeculativeNetwork",
    "advance_by_drafts",
    "feed_with_drafter",
]


class SpeculativeNetwork(Network):
    """A network that can look at tokens without taking them."""

    @property
    @abc.abstractmethod
    def hidden(self) -> int:
        """D, the size of its hidden state of a token."""

    @abc.abstractmethod
    def read(
        self, weights: Any, state: Any, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"]
    ) -> tuple[Array, Any, Any]:
        """`prefill`, and beside its results the hidden state [B, T, D] of every token."""

    @abc.abstractmethod
    def look(
        self, weights: Any, state: Any, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"]
    ) -> tuple[Array, Any, Any, Any]:
        """Look at `lengths` [B] of the tokens: logits [B, T, vocab] after each, hidden [B, T, D], state, window."""

    @abc.abstractmethod
    def take(self, weights: Any, state: Any, window: Any, counts: Int32[Array, "B"]) -> Any:
        """The state that came with the window once the first `counts` tokens of each row are taken."""


@typing.no_type_check  # the class checks its own fields
@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter and its weights.

    Raises:
        TypeError: `drafter` is no Drafter.
    """

    drafter: Drafter
    weights: Any = None

    def __post_init__(self):
        require_kind("drafter", self.drafter, Drafter)


@dataclasses.dataclass
class DraftCounts:
    """How drafting went, over all rows: `by_accepted[n]` rounds accepted n proposals, and drew n + 1 tokens."""

    by_accepted: list[int]
    proposed: int = 0

    @property
    def rounds(self) -> int:
        """Rounds, each of which looks at what was proposed to one row."""
        return sum(self.by_accepted)

    @property
    def accepted(self) -> int:
        """Proposals that were accepted."""
        return sum(accepted * rounds for accepted, rounds in enumerate(self.by_accepted))


class Drafted(NamedTuple):
    """What some rounds drew and proposed, round by round."""

    tokens: Int32[Array, "n T B"]
    """`NOTHING` behind the tokens of a round."""
    proposed: Int32[Array, "n B"]
    accepted: Int32[Array, "n B"]
    """-1 where a row took no part."""


@functools.partial(jax.jit, static_argnames=("network", "drafter"), donate_argnames=("rows", "memory"))
def feed_with_drafter(
    weights: Any,
    rows: Rows,
    memory: Any,
    left: Array,
    prompts: Array,
    lengths: Array,
    wanted: Array,
    policy: Policy,
    draft_weights: Any,
    *,
    network: SpeculativeNetwork,
    drafter: Drafter,
) -> tuple[tuple[Rows, Array, Array], Any]:
    """`generate.feed` of what the drafter reads too: the results of the former, and the drafter's memory."""
    logits, state, hidden = network.read(weights, rows.state, prompts, lengths)
    memory = drafter.read(draft_weights, memory, prompts, lengths, hidden)
    return after_prompts(rows, logits, state, left, prompts, lengths, wanted, policy), memory


@functools.partial(jax.jit, static_argnames=("network", "drafter", "rounds"), donate_argnames=("rows", "memory"))
def advance_by_drafts(
    weights: Any,
    rows: Rows,
    memory: Any,
    left: Array,
    policy: Policy,
    draft_weights: Any,
    *,
    network: SpeculativeNetwork,
    drafter: Drafter,
    rounds: int,
) -> tuple[Rows, Any, Array, Drafted]:
    """Up to so many rounds, which draw up to `left` int32 [B] tokens: rows, memory, what is left, what was drawn.

    They end when nothing is left in any row. Done rows keep every bit.
    """
    batch = left.size
    nothing = jnp.full((rounds, batch), -1, jnp.int32)
    drafted = Drafted(jnp.full((rounds, drafter.count + 1, batch), NOTHING, jnp.int32), nothing, nothing)

    def goes_on(carry: Any) -> Array:
        number, _, _, left, _ = carry
        return (number < rounds) & jnp.any(left > 0)

    def body(carry: Any) -> Any:
        number, rows, memory, left, drafted = carry
        rows, memory, left, found = _round(weights, draft_weights, rows, memory, left, policy, network, drafter)
        return number + 1, rows, memory, left, jax.tree.map(lambda all, one: all.at[number].set(one), drafted, found)

    start = (jnp.int32(0), rows, memory, left, drafted)
    _, rows, memory, left, drafted = jax.lax.while_loop(goes_on, body, start)
    return rows, memory, left, drafted


def _round(
    weights: Any,
    draft_weights: Any,
    rows: Rows,
    memory: Any,
    left: Int32[Array, "B"],
    policy: Policy,
    network: SpeculativeNetwork,
    drafter: Drafter,
) -> tuple[Rows, Any, Array, Drafted]:
    """One round; see the head of the module. What it drew comes as [T, B] and [B]."""
    active = left > 0
    place = rows.state.position

    def draw(logits: Array, ahead: Any) -> Array:
        return sample(logits, rows.seen, policy.seeds, place + ahead, policy.knobs)

    proposal, memory = drafter.propose(draft_weights, memory, rows.tokens, draw)
    # One token is drawn beyond those that are accepted.
    counts = jnp.clip(proposal.counts, 0, jnp.clip(left - 1, 0, drafter.count))
    tokens = jnp.concatenate([rows.tokens[:, None], proposal.tokens], axis=1)
    logits, hidden, state, window = network.look(weights, rows.state, tokens, jnp.where(active, counts + 1, 0))
    drawn = _draw_all(logits, rows.seen, tokens, place, policy)
    ended = ends_row(drawn, policy)

    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    agree = (drawn[:, :-1] == proposal.tokens) & ~ended[:, :-1] & (index[:, :-1] < counts[:, None])
    accepted = jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    taken = jnp.where(active, accepted + 1, 0)

    def at_last(of_all: Array) -> Array:
        return jnp.take_along_axis(of_all, accepted[:, None], axis=1)[:, 0]

    rows = Rows(
        state=network.take(weights, state, window, taken),
        tokens=jnp.where(active, at_last(drawn), rows.tokens),
        seen=marked(rows.seen, tokens, taken),
    )
    memory = drafter.read(draft_weights, memory, tokens, taken, hidden)
    left = jnp.where(active & ~at_last(ended), left - taken, 0)
    given = jnp.where(index < taken[:, None], drawn, jnp.int32(NOTHING))
    proposed, accepted = (jnp.where(active, number, -1) for number in (counts, accepted))
    return rows, memory, left, Drafted(given.T, proposed, accepted)


def _draw_all(
    logits: Float32[Array, "B T vocab"],
    seen: Bool[Array, "B vocab"],
    tokens: Int32[Array, "B T"],
    place: Int32[Array, "B"],
    policy: Policy,
) -> Int32[Array, "B T"]:
    """The token that the row draws after each of the tokens, the first of which is to stand at `place`."""
    batch, count, vocab = logits.shape
    index = jnp.arange(count, dtype=jnp.int32)
    # After token t of a row, its tokens 0 … t have been seen.
    row, after, token = jnp.arange(batch)[:, None, None], index[None, :, None], tokens[:, None]
    upto = jnp.broadcast_to(index[:, None] >= index[None], (batch, count, count))
    seen = jnp.broadcast_to(seen[:, None], logits.shape).at[row, after, token].max(upto)
    places = place[:, None] + 1 + index[None]
    drawn = sample(
        logits.reshape(-1, vocab),
        seen.reshape(-1, vocab),
        jnp.repeat(policy.seeds, count),
        places.reshape(-1),
        policy.knobs,
    )
    return drawn.reshape(batch, count)


@functools.partial(jax.jit, static_argnames=("network",), donate_argnames=("rows",))
def _consume(
    weights: Any, rows: Rows, given: Int32[Array, "n B"], counts: Int32[Array, "B"], *, network: Network
) -> Rows:
    """The rows once they have drawn the first `counts` of the tokens given, whatever they would have drawn."""

    def body(rows: Rows, now: tuple[Array, Array]) -> tuple[Rows, None]:
        index, tokens = now
        active = index < counts
        seen = rows.seen.at[jnp.arange(counts.size), rows.tokens].max(active)
        _, state = network.step(weights, rows.state, rows.tokens, active)
        return Rows(state=state, tokens=jnp.where(active, tokens, rows.tokens), seen=seen), None

    return jax.lax.scan(body, rows, (jnp.arange(given.shape[0], dtype=jnp.int32), given))[0]


class SpeculativeGeneration(Generation):
    """A `Generation` whose tokens come by drafts. `chunk` counts rounds; `counts` says how they went so far.

    `known`: the tokens of each row that the rows' state holds already, as far as the drafter is to know them.
    """

    def __init__(
        self,
        network: SpeculativeNetwork,
        weights: Any,
        rows: Rows,
        policy: Policy,
        *,
        drafting: Drafting,
        wanted: int,
        known: Sequence[Sequence[int]] | None = None,
        **settings: Any,
    ):
        self.counts = DraftCounts([0] * (drafting.drafter.count + 1))
        self._drafting, self._speculative = drafting, network
        self._given: dict[int, np.ndarray] = {}
        self._last = np.zeros((0, 0), np.int32)
        batch = rows.batch
        self._missing = np.full(batch, wanted)
        drafter, draft_weights = drafting.drafter, drafting.weights
        self._memory = begun(drafter, draft_weights, batch=batch, capacity=rows.capacity)
        sizes = {"batch": batch, "vocab": rows.seen.shape[1], "hidden": network.hidden}
        check_methods(drafter, draft_weights, self._memory, **sizes)
        self._tell(known or [()] * batch)
        super().__init__(network, weights, rows, policy, wanted=wanted, **settings)

    def _tell(self, known: Sequence[Sequence[int]]) -> None:
        """Have the drafter read what no model will read again. One that needs hidden states does without."""
        drafter, weights = self._drafting.drafter, self._drafting.weights
        if drafter.reads_hidden:
            return
        for piece, starts, ends in in_pieces(known, [()] * len(known)):
            lengths = jnp.asarray(ends - starts, jnp.int32)
            self._memory = _told(weights, self._memory, jnp.asarray(piece), lengths, drafter=drafter)

    @override
    def _read_piece(self, rows: Rows, left: Array, piece: Array, lengths: Array, wanted: Array) -> Any:
        found, self._memory = feed_with_drafter(
            *(self._weights, rows, self._memory, left, piece, lengths, wanted, self._policy, self._drafting.weights),
            network=self._speculative,
            drafter=self._drafting.drafter,
        )
        return found

    @override
    def _advance(self, rows: Rows, left: Array) -> tuple[Rows, Array, Any]:
        rows, self._memory, left, drafted = advance_by_drafts(
            *(self._weights, rows, self._memory, left, self._policy, self._drafting.weights),
            network=self._speculative,
            drafter=self._drafting.drafter,
            rounds=self._chunk,
        )
        return rows, left, drafted

    @override
    def _on_host(self, tokens: Any) -> np.ndarray:
        """The rounds' tokens one after the other, row by row. Once no row misses any, no more rounds are dispatched."""
        self._last = self._in_rows(tokens) if isinstance(tokens, Drafted) else np.asarray(tokens)
        self._missing -= np.sum(self._last != NOTHING, axis=0)
        if not self._missing[self._running].any():
            self.stop()
        return self._last

    def _in_rows(self, tokens: Drafted) -> np.ndarray:
        drafted = jax.tree.map(np.asarray, tokens)
        took_part = drafted.accepted >= 0
        self.counts.proposed += int(drafted.proposed[took_part].sum())
        for accepted in drafted.accepted[took_part].tolist():
            self.counts.by_accepted[accepted] += 1
        columns = [column[column != NOTHING] for column in drafted.tokens.reshape(-1, drafted.tokens.shape[2]).T]
        rows = np.full((max(map(len, columns)), len(columns)), NOTHING, np.int32)
        for row, column in enumerate(columns):
            rows[: len(column), row] = column
        return rows

    @override
    def halt(self, row: int, steps: int) -> None:
        self._given[row] = self._last[:steps, row]
        super().halt(row, steps)

    @override
    def _again(self, rows: Rows, steps: Array) -> Rows:
        # Not drawn again: products of another number of rows may round otherwise, and so might choose otherwise.
        counts = np.asarray(steps)
        given = np.zeros((bucket(int(counts.max()), least=1), counts.size), np.int32)
        for row in np.flatnonzero(counts):
            given[: counts[row], row] = self._given[int(row)][: counts[row]]
        return _consume(self._weights, rows, jnp.asarray(given), steps, network=self._speculative)


@functools.partial(jax.jit, static_argnames=("drafter",), donate_argnames=("memory",))
def _told(weights: Any, memory: Any, tokens: Array, lengths: Array, *, drafter: Drafter) -> Any:
    return drafter.read(weights, memory, tokens, lengths, None)
