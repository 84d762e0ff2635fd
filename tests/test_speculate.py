"""Speculative decoding: whatever is proposed, the tokens, the state and the counts are those of the plain loop."""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gdn_jax.decoder import generate
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.decoder.drafters import draft_by_model, draft_by_mtp, draft_by_ngrams
from gdn_jax.decoder.drafting import Drafter, Proposal
from gdn_jax.decoder.generate import NOTHING, Policy, new_rows
from gdn_jax.decoder.ngram import NgramDrafter
from gdn_jax.decoder.prefix_cache import PrefixCache
from gdn_jax.decoder.sample import GREEDY, NOT_FINITE, SamplingParams
from gdn_jax.decoder.script import ScriptDrafter
from gdn_jax.decoder.speculate import (
    Drafting,
    SpeculativeGeneration,
    SpeculativeNetwork,
    advance_by_drafts,
    feed_with_drafter,
)
from gdn_jax.decoder.tokenizer import load_tokenizer
from gdn_jax.errors import GdnError, UnsupportedError
from gdn_jax.evidence.metrics import max_rel
from tests import test_generate
from tests.support import decoders, text_files
from tests.test_decoder_state_values import TINY
from tests.test_generate import CAPACITY, DRAWING, PROMPTS, VOCAB, WEIGHTS, run, tokens_of

DRAFTS = 3
PENALTY = dataclasses.replace(GREEDY, repetition_penalty=1.5)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, DRAWING, PENALTY], ids=["greedy", "drawn", "penalty"])


# A network whose logits depend on all tokens that were taken, and on the slots that they lie in.


@dataclasses.dataclass(frozen=True)
class Toy(test_generate.Toy, SpeculativeNetwork):
    """Its hidden state is what it remembers. A window is what it remembers after 0 … T tokens."""

    @property
    def hidden(self):
        return self.vocab

    def through(self, weights, state, tokens, lengths):
        """Logits, hidden states and memories after every token; the state after `lengths` of them."""

        def body(state, now):
            index, token = now
            logits, state = self.step(weights, state, token, index < lengths)
            return state, (logits, state.gdn)

        after, (logits, memories) = jax.lax.scan(body, state, (jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.T))
        return jnp.swapaxes(logits, 0, 1), jnp.swapaxes(memories[:, 0], 0, 1), memories, after

    def read(self, weights, state, tokens, lengths):
        _, hidden, _, _ = self.through(weights, state, tokens, lengths)
        return *self.prefill(weights, state, tokens, lengths), hidden

    def look(self, weights, state, tokens, lengths):
        logits, hidden, memories, after = self.through(weights, state, tokens, lengths)
        no_tokens = jnp.cumsum((tokens < 0) | (tokens >= self.vocab), axis=1) > 0
        logits = jnp.where(no_tokens[..., None], jnp.float32(jnp.nan), logits)
        window = jnp.concatenate([state.gdn[None], memories])
        return logits, hidden, dataclasses.replace(state, keys=after.keys), window

    def take(self, weights, state, window, counts):
        memory = jnp.take_along_axis(window, counts[None, None, :, None], axis=0)[0]
        return dataclasses.replace(state, gdn=memory, position=state.position + counts)


TOY = Toy()


class Plan(NamedTuple):
    """What a `Planned` proposes: round by round and row by row."""

    tokens: np.ndarray
    """What the rows draw, prompts in front of it, [B, S]."""
    counts: np.ndarray
    """How many tokens are proposed, [R, B]."""
    right: np.ndarray
    """How many of them are what the row draws, before one that is not, [R, B]."""
    wrong: np.ndarray
    """This one, [R, B]; 0: some other token."""


@dataclasses.dataclass(frozen=True)
class Planned(Drafter):
    """Proposes as its weights, a `Plan`, say. Its memory is the length of the rows and the number of the round."""

    count: ClassVar[int] = DRAFTS

    def begin(self, weights, *, batch, capacity):
        return jnp.zeros(batch, jnp.int32), jnp.int32(0)

    def read(self, weights, memory, tokens, lengths, hidden):
        return memory[0] + lengths, memory[1]

    def propose(self, weights, memory, pending, draw):
        length, number = memory
        ahead = jnp.arange(self.count, dtype=jnp.int32)[None]
        # What follows the wrong one is right again, and must not be taken all the same.
        tokens = jnp.take_along_axis(weights.tokens, length[:, None] + 1 + ahead, axis=1)
        wrong = jnp.where(weights.wrong[number] == 0, (tokens + 1).T % VOCAB, weights.wrong[number]).T
        tokens = jnp.where(ahead == weights.right[number][:, None], wrong, tokens)
        return Proposal(tokens, weights.counts[number]), (length, number + 1)


@dataclasses.dataclass(frozen=True)
class Mirror(Drafter):
    """The toy itself, its memory made of the hidden states that it is given: right as long as those are."""

    reads_hidden: ClassVar[bool] = True
    count: ClassVar[int] = DRAFTS

    def begin(self, weights, *, batch, capacity):
        return TOY.start(batch)

    def read(self, weights, memory, tokens, lengths, hidden):
        # Steps know where the tokens lie; what they remember is replaced.
        *_, after = TOY.through(weights, memory, tokens, lengths)
        last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return dataclasses.replace(after, gdn=jnp.where((lengths > 0)[None, :, None], last[None], memory.gdn))

    def propose(self, weights, memory, pending, draw):
        state, token, tokens = memory, pending, []
        for ahead in range(1, self.count + 1):
            logits, state = TOY.step(weights, state, token, jnp.ones(token.size, bool))
            token = draw(logits, ahead)
            tokens.append(token)
        counts = jnp.full(pending.size, self.count, jnp.int32)
        return Proposal(jnp.stack(tokens, axis=1), counts), dataclasses.replace(memory, keys=state.keys)


def drafted(
    prompts,
    drafting,
    *,
    network=TOY,
    weights=WEIGHTS,
    wanted=13,
    sampling=GREEDY,
    ends=(),
    chunk=4,
    rows=None,
    rewindable=False,
    known=None,
):
    """As `test_generate.generation`."""
    rows = new_rows(network.start(len(prompts)), batch=len(prompts), vocab=network.vocab) if rows is None else rows
    padded = np.full(8, -3, np.int32)
    padded[: len(ends)] = ends
    policy = Policy(sampling.knobs(), jnp.asarray(sampling.row_seeds(len(prompts))), jnp.asarray(padded))
    how = {"wanted": wanted, "chunk": chunk, "rewindable": rewindable, "known": known}
    return SpeculativeGeneration(network, weights, rows, policy, drafting=drafting, prompts=prompts, **how)


def run_drafted(prompts, drafting, **how):
    going = drafted(prompts, drafting, **how)
    return tokens_of(list(going), len(prompts)), going.finish(), going.counts


def assert_rows(got, want):
    """All that a sequence goes on from."""
    for name in ("tokens", "seen"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_array_equal(got.state.position, want.state.position)
    np.testing.assert_allclose(got.state.gdn, want.state.gdn, rtol=0, atol=1e-6)
    below = np.arange(CAPACITY)[None] < np.asarray(want.state.position)[:, None]
    keys = (np.asarray(rows.state.keys)[0, :, :, 0, 0][below] for rows in (got, want))
    np.testing.assert_array_equal(*keys)


LONG = 24
"""Tokens of the longest run of the toy."""
ROUNDS = LONG
NO_TOKENS = (-1, NOT_FINITE, VOCAB, 2**31 - 1, -(2**31))


@functools.cache
def free(sampling):
    """What the rows draw where nothing ends them."""
    return run(PROMPTS, wanted=LONG, sampling=sampling)[0]


def plan(sampling, counts, right, wrong=0):
    tokens = np.zeros((len(PROMPTS), CAPACITY), np.int32)
    for row, (prompt, drawn) in enumerate(zip(PROMPTS, free(sampling), strict=True)):
        tokens[row, : len(prompt) + LONG] = prompt + drawn
    numbers = (np.broadcast_to(np.int32(number), (ROUNDS, len(PROMPTS))) for number in (counts, right, wrong))
    return Plan(tokens, *numbers)


def random_plan(sampling, seed):
    rng, shape = np.random.default_rng(seed), (ROUNDS, len(PROMPTS))
    counts, right = rng.integers(0, DRAFTS + 1, (2, *shape))
    return plan(sampling, counts, right, rng.choice([0, *NO_TOKENS], shape))


def drafting(planned):
    return Drafting(Planned(), jax.tree.map(jnp.asarray, planned))


def counted(planned, rows, wanted, ends):
    """`by_accepted` and `proposed` by hand, from the tokens that the rows drew."""
    by_accepted, proposed = [0] * (DRAFTS + 1), 0
    for row, drawn in enumerate(rows):
        at, number = 1, 0
        while at < len(drawn):
            count = min(planned.counts[number, row], wanted - at - 1)
            accepted = 0
            while accepted < min(count, planned.right[number, row]) and drawn[at + accepted] not in ends:
                accepted += 1
            proposed += count
            by_accepted[accepted] += 1
            at += accepted + 1
            number += 1
    return by_accepted, proposed


def check_plan(planned, sampling, wanted, ends=()):
    tokens, rows, counts = run_drafted(PROMPTS, drafting(planned), sampling=sampling, wanted=wanted, ends=ends)
    want_tokens, want_rows = run(PROMPTS, sampling=sampling, wanted=wanted, ends=ends)
    assert tokens == want_tokens
    assert_rows(rows, want_rows)
    assert (counts.by_accepted, counts.proposed) == counted(planned, tokens, wanted, ends)
    return counts


# The loop on the device


@pytest.mark.slow
@SAMPLINGS
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_proposed_the_tokens_are_those_of_the_plain_loop(sampling, seed):
    """F31 … F34: rows and rounds that accept 0 … 3 of 0 … 3, tokens that are none, rows that end in any round."""
    planned = random_plan(sampling, seed)
    rng = np.random.default_rng(seed)
    # An end that one row draws early and another somewhere, and any number of tokens.
    drawn = free(sampling)
    ends = (drawn[seed % 4][int(rng.integers(2, 10))], drawn[(seed + 1) % 4][int(rng.integers(8, 20))])
    check_plan(planned, sampling, int(rng.integers(2, LONG)))
    check_plan(planned, sampling, LONG - 4, ends)


@SAMPLINGS
@pytest.mark.parametrize(("count", "right"), [(0, 0), (3, 0), (3, 3), (1, 1), (2, 3)])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 5, 13])
def test_drafts_that_are_all_alike(sampling, count, right, wanted):
    """F31, F33: none, all wrong in every round, all right; the last round is cut to what is wanted."""
    counts = check_plan(plan(sampling, count, right), sampling, wanted)
    accepted = min(count, right)
    assert counts.rounds == len(PROMPTS) * math.ceil((wanted - 1) / (accepted + 1))
    assert counts.accepted == len(PROMPTS) * (wanted - 1) - counts.rounds


@pytest.mark.parametrize("at", range(1, 8))
def test_an_end_that_was_proposed_ends_the_row_where_it_stands(at):
    """It is drawn, pending, and not among the accepted, wherever in a round it falls."""
    drawn = free(DRAWING)[0]
    end = drawn[at]
    until = drawn.index(end) + 1
    planned = plan(DRAWING, DRAFTS, DRAFTS)
    check_plan(planned, DRAWING, LONG - 4, (end,))
    tokens, rows, _ = run_drafted(PROMPTS, drafting(planned), sampling=DRAWING, wanted=LONG - 4, ends=(end,))
    assert tokens[0] == drawn[:until]
    assert rows.tokens[0] == end
    assert rows.state.position[0] == len(PROMPTS[0]) + until - 1


def test_counts_can_be_anything_and_are_never_trusted():
    """Beyond what there is, or below nothing."""
    alike = plan(GREEDY, DRAFTS, DRAFTS)
    for count in (DRAFTS + 1, 2**31 - 1):
        _, rows, counts = run_drafted(PROMPTS, drafting(plan(GREEDY, count, DRAFTS)))
        assert_rows(rows, run(PROMPTS)[1])
        assert counts == run_drafted(PROMPTS, drafting(alike))[2]
    tokens, _, counts = run_drafted(PROMPTS, drafting(plan(GREEDY, -(2**31), DRAFTS)))
    assert tokens == run(PROMPTS)[0]
    assert (counts.proposed, counts.accepted) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, dataclasses.replace(DRAWING, repetition_penalty=1.0)])
def test_hidden_states_are_those_of_the_tokens_and_draws_those_of_the_places(sampling):
    """A drafter that computes as the model does is always right: over prompts, and over whatever was accepted."""
    tokens, rows, counts = run_drafted(PROMPTS, Drafting(Mirror(), WEIGHTS), sampling=sampling)
    want, want_rows = run(PROMPTS, sampling=sampling)
    assert tokens == want
    assert_rows(rows, want_rows)
    assert counts.by_accepted == [0, 0, 0, 3 * len(PROMPTS)]
    # where some of its proposals are refused, it stays right: ends cut rows that others go on beside
    end = (want[1][4], want[2][7])
    tokens, rows, counts = run_drafted(PROMPTS, Drafting(Mirror(), WEIGHTS), sampling=sampling, ends=end)
    want, want_rows = run(PROMPTS, sampling=sampling, ends=end)
    assert tokens == want
    assert_rows(rows, want_rows)
    assert counts.accepted >= sum(map(len, tokens)) - counts.rounds - len(PROMPTS) > 0


def test_long_prompts_are_read_by_pieces(monkeypatch):
    """Hidden states of a piece follow those of the piece before it."""
    monkeypatch.setattr(generate, "LARGEST_PIECE", 4 * 16)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (37, 3, 16, 17)]
    tokens, rows, counts = run_drafted(prompts, Drafting(Mirror(), WEIGHTS))
    want, want_rows = run(prompts)
    assert tokens == want
    assert_rows(rows, want_rows)
    assert counts.by_accepted == [0, 0, 0, 3 * len(prompts)]


@pytest.mark.parametrize("chunk", [1, 7])
def test_blocks_of_any_number_of_rounds_give_the_same(chunk):
    planned = random_plan(DRAWING, 9)
    tokens, rows, counts = run_drafted(PROMPTS, drafting(planned), sampling=DRAWING, chunk=chunk)
    want = run_drafted(PROMPTS, drafting(planned), sampling=DRAWING)
    assert (tokens, counts) == (want[0], want[2])
    assert_rows(rows, want[1])


def test_no_rounds_are_dispatched_once_no_row_misses_tokens():
    """The 24 tokens come in three blocks of two rounds, and one more is on its way when the last of them is read."""
    blocks = drafted(PROMPTS, drafting(plan(GREEDY, DRAFTS, DRAFTS)), wanted=LONG, chunk=2)
    assert [len(block) for block in blocks] == [1, 8, 8, 7, 0]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWING])
@pytest.mark.parametrize("used", [[1, 1, 2, 3], [5, 12, 1, 9], [13, 13, 13, 6], [4, 5, 8, 9]])
def test_a_row_that_the_host_ends_goes_back_to_its_last_token(sampling, used):
    """As without drafts, from blocks that are cut otherwise."""

    def ended(going):
        taken = [[] for _ in PROMPTS]
        for block in going:
            for row, step in np.ndindex(len(PROMPTS), len(block)):
                if len(taken[row]) < used[row] and block[step, row] != NOTHING:
                    taken[row].append(int(block[step, row]))
                    if len(taken[row]) == used[row] < 13:
                        going.halt(row, step + 1)
        return taken, going.finish()

    planned = drafting(random_plan(sampling, 3))
    taken, rows = ended(drafted(PROMPTS, planned, sampling=sampling, rewindable=True))
    want, want_rows = ended(test_generate.generation(PROMPTS, sampling=sampling, rewindable=True))
    assert taken == want
    assert_rows(rows, want_rows)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWING])
def test_rows_go_on_with_and_without_drafts(sampling):
    planned = drafting(random_plan(sampling, 4))
    first, rows, _ = run_drafted(PROMPTS, planned, wanted=7, sampling=sampling)
    pending = [[row[-1]] for row in first]
    held = jax.tree.map(np.array, rows)
    plainly, plain_rows = run(pending, wanted=6, sampling=sampling, rows=rows)
    again, again_rows, _ = run_drafted(
        *(pending, Drafting(NgramDrafter(DRAFTS))), wanted=6, sampling=sampling, rows=jax.tree.map(jnp.asarray, held)
    )
    want = run(PROMPTS, sampling=sampling)
    assert [a + b for a, b in zip(first, plainly, strict=True)] == want[0]
    assert again == plainly
    assert_rows(plain_rows, want[1])
    assert_rows(again_rows, want[1])


def test_stopping_gives_out_what_is_on_its_way():
    going = drafted(PROMPTS, drafting(random_plan(GREEDY, 5)), wanted=LONG)
    blocks = []
    for block in going:
        blocks.append(block)
        going.stop()
    tokens = tokens_of(blocks, 4)
    assert all(1 < len(row) < LONG and row == free(GREEDY)[number][: len(row)] for number, row in enumerate(tokens))
    rows = going.finish()
    assert rows.tokens.tolist() == [row[-1] for row in tokens]
    assert rows.state.position.tolist() == [len(p) + len(row) - 1 for p, row in zip(PROMPTS, tokens, strict=True)]
    onward = run([[row[-1]] for row in tokens], wanted=4, rows=rows)[0]
    for row, before, after in zip(free(GREEDY), tokens, onward, strict=True):
        assert after == row[len(before) :][:4]


@pytest.mark.parametrize(("prompt", "wanted"), [([49, 6], 1), ([49, 6], 9), ([49], 3)])
def test_logits_that_are_not_finite_are_an_error_that_names_the_row(prompt, wanted):
    """In a prompt, or in a round: token 49 leaves 0.75 at 6, so 1.75 times the weights there overflow."""
    weights = WEIGHTS.at[6].set(3e38).at[49].set(jnp.where(jnp.arange(VOCAB) == 6, 90.0, 0.0))
    planned = drafting(plan(GREEDY, 0, 0))
    with pytest.raises(GdnError, match="not finite in row 2"):
        list(drafted([[1], [2], prompt, [3]], planned, weights=weights, wanted=wanted))


def test_settings_share_a_program():
    """F56: greedy and drawn, seeds, ends, numbers of tokens, plans."""
    run_drafted(PROMPTS, drafting(plan(GREEDY, 1, 1)))
    sizes = advance_by_drafts._cache_size(), feed_with_drafter._cache_size()
    for sampling in (DRAWING, PENALTY, SamplingParams(top_k=3, seed=2)):
        run_drafted(PROMPTS, drafting(plan(GREEDY, 2, 1)), sampling=sampling, ends=(4, 5), wanted=20)
    assert (advance_by_drafts._cache_size(), feed_with_drafter._cache_size()) == sizes


def test_what_is_known_already_is_told_to_the_drafter():
    """Rows whose state holds tokens that no model reads again; the others know nothing."""
    known = [prompt[:-1] if row % 2 else () for row, prompt in enumerate(PROMPTS)]
    _, rows = run([[*prompt] for prompt in PROMPTS], wanted=1)
    planned = drafting(plan(GREEDY, DRAFTS, DRAFTS))
    first, *_ = run(PROMPTS, wanted=1)
    # The pending token is fed, and what stands before it is known.
    known = [list(prompt) for prompt in PROMPTS]
    tokens, _, counts = run_drafted(first, planned, rows=rows, wanted=12, known=known)
    assert tokens == [row[1:13] for row in free(GREEDY)]
    assert counts.by_accepted == [0, 0, len(PROMPTS), 2 * len(PROMPTS)]


def test_what_is_known_is_told_in_pieces(monkeypatch):
    """Of no more tokens than prompts are read in. Before, a round is traced."""
    monkeypatch.setattr(generate, "LARGEST_PIECE", 4 * 16)
    told = []

    class Listener(Planned):
        def read(self, weights, memory, tokens, lengths, hidden):
            told.append(tokens.shape)
            return super().read(weights, memory, tokens, lengths, hidden)

    known = [list(range(37)), [3], [], [1, 2]]
    drafted([[1], [2], [3], [4]], Drafting(Listener(), drafting(plan(GREEDY, 0, 0)).weights), known=known)
    assert told[0] == (4, DRAFTS + 1)
    assert set(told[1:]) == {(4, 16)}


def test_a_script_is_believed_as_far_as_it_is_right():
    """It goes on after what was drawn instead, proposes nothing where it is silent, and may hold what is no token."""
    script = np.array(plan(GREEDY, 0, 0).tokens)
    script[1, len(PROMPTS[1]) + 3] = -1
    script[2, len(PROMPTS[2]) + 3] = VOCAB
    script[3, len(PROMPTS[3]) + 1 :: 2] += 1
    tokens, rows, counts = run_drafted(PROMPTS, Drafting(ScriptDrafter(DRAFTS), jnp.asarray(script)))
    want, want_rows = run(PROMPTS)
    assert tokens == want
    assert_rows(rows, want_rows)
    # rounds of the rows, (proposed, accepted): the first draws tokens 1 to 4
    rounds = [
        [(3, 3), (3, 3), (3, 3)],
        [(2, 2), (3, 3), (3, 3), (0, 0)],
        [(3, 2), (3, 3), (3, 3), (0, 0)],
        [(3, 0), *[(3, 1)] * 4, (2, 1), (0, 0)],
    ]
    assert counts.proposed == sum(proposed for row in rounds for proposed, _ in row)
    assert counts.by_accepted == [sum(accepted == n for row in rounds for _, accepted in row) for n in range(4)]


# Statistics

MANY, FEW = 20_000, 8
SMALL_TOY = Toy(vocab=FEW)
SMALL_WEIGHTS = jnp.asarray(np.random.default_rng(1).normal(size=(FEW, FEW)) / 2, jnp.float32)
DRAWN = SamplingParams(seed=1)


@dataclasses.dataclass(frozen=True)
class Guess(Drafter):
    """One token a round, drawn by its own randomness with the probabilities that are its weights."""

    count: ClassVar[int] = 1

    def begin(self, weights, *, batch, capacity):
        return jnp.int32(0)

    def read(self, weights, memory, tokens, lengths, hidden):
        return memory + 1

    def propose(self, weights, memory, pending, draw):
        key = jax.random.fold_in(jax.random.key(99), memory)
        tokens = jax.random.categorical(key, jnp.log(weights), shape=pending.shape)
        return Proposal(tokens[:, None].astype(jnp.int32), jnp.ones(pending.size, jnp.int32)), memory


@functools.cache
def likelihoods():
    """p(t_0), p(t_1 | t_0) and p(t_2 | t_0, t_1) after the token 3: [8, 8, 8] each."""
    before = jnp.asarray([[3, a, b] for a in range(FEW) for b in range(FEW)], jnp.int32)
    contexts = SMALL_TOY.start(FEW * FEW), before, jnp.full(FEW * FEW, 3, jnp.int32)
    logits, *_ = jax.jit(SMALL_TOY.through)(SMALL_WEIGHTS, *contexts)
    first, second, third = np.moveaxis(np.asarray(jax.nn.softmax(logits)).reshape(FEW, FEW, 3, FEW), 2, 0)
    # of the contexts, t_0 tells the first two apart, and nothing the first
    return first[0, 0][:, None, None], second[:, 0][:, :, None], third


@pytest.mark.slow
@pytest.mark.parametrize("probabilities", [np.eye(FEW)[5], np.arange(1.0, FEW + 1) / 36], ids=["one", "some"])
def test_tokens_have_the_distribution_of_the_model_and_acceptance_its_probability(probabilities):
    """The proposal after t_0 is accepted with p(d | t_0), summed over how often d is proposed."""
    guess = Drafting(Guess(), jnp.asarray(probabilities, jnp.float32))
    how = {"network": SMALL_TOY, "weights": SMALL_WEIGHTS, "sampling": DRAWN, "wanted": 3, "chunk": 2}
    tokens, _, counts = run_drafted([[3]] * MANY, guess, **how)
    p0, p1, p2 = likelihoods()
    joint = (p0 * p1 * p2).astype(np.float64)
    np.testing.assert_allclose(joint.sum(), 1, atol=1e-5)
    found = np.zeros((FEW,) * 3)
    np.add.at(found, tuple(np.array(tokens).T), 1)
    for axis in range(3):  # each pair of tokens
        expected = joint.sum(axis=axis) * MANY / joint.sum()
        assert expected.min() > 5
        assert stats.chisquare(found.sum(axis=axis).ravel(), expected.ravel()).pvalue > 1e-3
    # With three tokens wanted, the first round has room for one proposal, and the second for none.
    assert counts.proposed == MANY
    likely = float(np.sum((p0 * p1)[..., 0] * probabilities))
    assert abs(counts.accepted / MANY - likely) <= 4 * math.sqrt(likely * (1 - likely) / MANY)


# Prompt lookup


def looked_up(drafter, tokens, capacity):
    """What it is to propose after these tokens, the last of which is pending."""
    if len(tokens) > capacity:
        return []
    for size in range(drafter.longest, drafter.least - 1, -1):
        tail = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tail:
                follows = tokens[end:]
                return [follows[ahead % len(follows)] for ahead in range(drafter.draft_tokens)]
    return []


def no_draws(logits, ahead):
    """Prompt lookup draws nothing."""
    raise AssertionError


propose = jax.jit(lambda drafter, memory, pending: drafter.propose(None, memory, pending, no_draws), static_argnums=0)
read = jax.jit(lambda drafter, *operands: drafter.read(None, *operands, None), static_argnums=0)


@pytest.mark.parametrize(
    "drafter", [NgramDrafter(), NgramDrafter(5, 3, 1), NgramDrafter(1, 1, 1), NgramDrafter(2, 40, 30)], ids=str
)
def test_prompt_lookup_is_what_a_plain_search_finds(drafter):
    """After every token of random and periodic sequences, read in pieces of any length, until the memory is full."""
    capacity, batch, piece = 33, 6, 3
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, letters, 2 * capacity).tolist() for letters in (2, 3, 3, 5)]
    sequences += [([4, 7, 1] * capacity)[: 2 * capacity], ([9] * 20 + [3] + [9] * capacity)[: 2 * capacity]]
    sequences = [row[:capacity] + rng.integers(0, 3, capacity).tolist() for row in sequences]
    memory, found = drafter.begin(None, batch=batch, capacity=capacity), 0
    lengths = np.zeros(batch, int)
    while (lengths < capacity).any():
        proposal, same = propose(
            drafter, memory, jnp.asarray([row[at] for row, at in zip(sequences, lengths, strict=True)], jnp.int32)
        )
        assert jax.tree.all(jax.tree.map(np.array_equal, same, memory))
        assert np.all((np.asarray(proposal.tokens) >= 0) & (np.asarray(proposal.tokens) < 10))
        for row, at in enumerate(lengths):
            want = looked_up(drafter, sequences[row][: at + 1], capacity)
            assert proposal.tokens[row, : proposal.counts[row]].tolist() == want
            found += bool(want)
        counts = rng.integers(0, piece + 1, batch)
        tokens = np.array(
            [[row[at + i] for i in range(piece)] for row, at in zip(sequences, lengths, strict=True)], np.int32
        )
        memory = read(drafter, memory, jnp.asarray(tokens), jnp.asarray(counts, jnp.int32))
        lengths = np.minimum(lengths + counts, capacity)
        assert memory.length.tolist() == lengths.tolist()
    assert found > 0
    assert propose(drafter, memory, jnp.zeros(batch, jnp.int32))[0].counts.tolist() == [0] * batch


@pytest.mark.parametrize(
    ("error", "words", "numbers"),
    [
        (ValueError, "draft_tokens must be", (0,)),
        (TypeError, "draft_tokens", (1.5,)),
        (TypeError, "longest", (3, "4")),
        (ValueError, "least must be", (3, 4, 0)),
        (ValueError, "least must be at most longest = 2, got 3", (3, 2, 3)),
    ],
)
def test_a_prompt_lookup_that_makes_no_sense_is_refused(error, words, numbers):
    with pytest.raises(error, match=words):
        draft_by_ngrams(*numbers[:1], **dict(zip(("longest", "least"), numbers[1:], strict=False)))


# A real small model. One capacity, batch and size of prompts: each combination is compiled.

ROOM, BATCH, NEW = 640, 3, 60
TOKENS = np.random.default_rng(1).integers(4, TINY.vocab, 64).tolist()
IDS = [TOKENS[:3], TOKENS[3:20], TOKENS[20:29]]
SPECULATED_STATE = 3e-6  # measured 3.3e-7, by JAX 0.12 1.3e-6: S, history, keys and values after up to 623 tokens
ALIKE = SamplingParams(temperature=1.1, top_p=0.9, repetition_penalty=1.1, seed=(4, 5, 6))
EITHER = pytest.mark.parametrize("sampling", [GREEDY, ALIKE], ids=["greedy", "drawn"])


@functools.cache
def decoder(label="tests/speculate", cfg=TINY):
    return Decoder(cfg=cfg, weights=decoders.drawn(cfg, label), capacity=ROOM)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    tokenizer = load_tokenizer(text_files.write_tokenizer(tmp_path_factory.mktemp("text")))
    return dataclasses.replace(decoder(), tokenizer=tokenizer)


@pytest.fixture
def model(loaded, monkeypatch):
    monkeypatch.setattr(generate, "_SMALLEST_PIECE", 32)
    return loaded


DRAFTERS = ["n-grams", "itself", "another model"]


def draft_by(name, model):
    """The models share their programs."""
    if name == "n-grams":
        return draft_by_ngrams(DRAFTS, least=1)
    return draft_by_model(model if name == "itself" else decoder("tests/another"), DRAFTS)


@pytest.fixture(params=DRAFTERS)
def draft(request, model):
    return draft_by(request.param, model)


def assert_states(got, want):
    """All that rows go on from: what is whole to the bit, and numbers within rounding, layer by layer."""
    for name in ("tokens", "seen"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    got, want = got.state, want.state
    np.testing.assert_array_equal(got.position, want.position)
    below = (np.arange(want.capacity)[None] < np.asarray(want.position)[:, None])[None, :, :, None, None]
    pairs = [*zip(jax.tree.leaves(got.gdn), jax.tree.leaves(want.gdn), strict=True)]
    pairs += [
        tuple(np.where(below, leaf, 0) for leaf in both) for both in ((got.keys, want.keys), (got.values, want.values))
    ]
    for ours, theirs in pairs:
        for layer in range(len(theirs)):
            assert max_rel(ours[layer], theirs[layer]) <= SPECULATED_STATE


def assert_results(got, want):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
    if want.state is not None:
        assert_states(got.state, want.state)


@pytest.mark.slow
@EITHER
def test_results_are_those_without_drafts(model, draft, sampling):
    """Tokens, lengths, texts, reasons and states of rows that end early, inside of rounds, and at their length."""
    drawn = model.generate(IDS, max_new_tokens=NEW, ignore_eos=True, sampling=sampling).tokens
    ending = dataclasses.replace(model, ends=(int(drawn[0, 9]), int(drawn[1, 40])))
    how = {"max_new_tokens": NEW, "sampling": sampling, "keep_state": True}
    want, got = ending.generate(IDS, **how), ending.generate(IDS, **how, draft=draft)
    assert_results(got, want)
    assert got.lengths[0] < NEW > got.lengths[1]
    assert want.drafts is None
    # every round draws one token that was not proposed, or the end of a row, which counts as such
    assert got.drafts.rounds + got.drafts.accepted == got.lengths.sum() - BATCH
    assert got.drafts.proposed >= got.drafts.accepted


def test_a_single_token_needs_no_round(model, draft):
    got = model.generate(IDS, max_new_tokens=1, draft=draft, keep_state=True)
    assert_results(got, model.generate(IDS, max_new_tokens=1, keep_state=True))
    assert (got.drafts.rounds, got.drafts.proposed) == (0, 0)


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_a_model_that_drafts_for_itself_is_nearly_always_right(model, temperature):
    """Also of what is drawn, since both draw by the same randomness. Only rounding may tell them apart."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    itself, another = (
        model.generate(IDS, max_new_tokens=NEW, ignore_eos=True, sampling=sampling, draft=draft_by(name, model)).drafts
        for name in ("itself", "another model")
    )
    assert itself.accepted >= 0.98 * itself.proposed > 0
    assert another.accepted < 0.5 * another.proposed


def test_long_texts_are_those_without_drafts(model, draft):
    """F36: as many greedy tokens as there is room for, 623, and S after them."""
    how = {"max_new_tokens": ROOM - max(map(len, IDS)), "ignore_eos": True, "keep_state": True}
    got = model.generate(IDS, **how, draft=draft)
    assert_results(got, model.generate(IDS, **how))
    assert got.drafts.rounds + got.drafts.accepted == got.lengths.sum() - BATCH
    assert got.drafts.accepted > 0


@EITHER
def test_a_state_goes_on_with_and_without_drafts(model, draft, sampling):
    """And what is said in between is read by the drafter too."""
    how = {"ignore_eos": True, "sampling": sampling, "keep_state": True}
    first = model.generate(IDS, max_new_tokens=20, draft=draft, **how)
    said = [[40, 41], [], [7]]
    plainly = model.generate(IDS, max_new_tokens=20, **how)
    want = model.generate(said, max_new_tokens=30, state=plainly.state, **how)
    for onward in (None, draft):
        assert_results(model.generate(said, max_new_tokens=30, state=first.state, draft=onward, **how), want)


@pytest.mark.parametrize(("name", "sampling"), [("n-grams", GREEDY), ("itself", ALIKE)], ids=["greedy", "drawn"])
def test_a_stop_string_takes_the_state_back_to_the_token_that_completed_it(model, name, sampling):
    """In the middle of a round, whose other tokens leave no trace; rows beside it go on."""
    draft = draft_by(name, model)
    free = model.generate(IDS, max_new_tokens=NEW, ignore_eos=True, sampling=sampling)
    stops = [text[len(text) // 2 : len(text) // 2 + 3] for text in free.text[:2]]
    how = {"max_new_tokens": NEW, "ignore_eos": True, "sampling": sampling, "stop": stops, "keep_state": True}
    want, got = model.generate(IDS, **how), model.generate(IDS, **how, draft=draft)
    assert_results(got, want)
    assert "stop" in got.finish_reason
    onward = {"max_new_tokens": 10, "ignore_eos": True, "sampling": sampling}
    assert_results(
        model.generate([[]] * BATCH, state=got.state, **onward),
        model.generate([[]] * BATCH, state=want.state, **onward),
    )


def test_an_interrupt_leaves_a_result_to_go_on_from(model, draft):
    def interrupt(row, text):
        raise KeyboardInterrupt

    free = model.generate(IDS, max_new_tokens=NEW, ignore_eos=True)
    got = model.generate(
        IDS, max_new_tokens=NEW, ignore_eos=True, chunk=16, keep_state=True, draft=draft, on_text=interrupt
    )
    assert set(got.finish_reason) <= {"interrupted", "length"}
    for row, count in enumerate(got.lengths):
        assert got.tokens[row, :count].tolist() == free.tokens[row, :count].tolist()
    least = NEW - int(got.lengths.max())
    onward = model.generate([[]] * BATCH, max_new_tokens=max(least, 1), ignore_eos=True, state=got.state).tokens
    for row, count in enumerate(got.lengths):
        assert onward[row, :least].tolist() == free.tokens[row, count : count + least].tolist()


@pytest.mark.parametrize("name", ["n-grams", "itself"])
def test_a_prefix_cache_changes_neither_tokens_nor_proposals(model, name):
    """A drafter knows the tokens that are not read again, too."""
    draft = draft_by(name, model)
    prompts = [TOKENS[:25], [*TOKENS[:20], 9, 9], TOKENS[30:40]]
    how = {"max_new_tokens": NEW, "ignore_eos": True, "draft": draft}
    want, cache = model.generate(prompts, **how), PrefixCache(max_bytes=1 << 30)
    for reused in (0, 24 + 21 + 9):
        got = model.generate(prompts, **how, prefix_cache=cache)
        assert got.timings.reused_tokens == reused
        assert_results(got, want)
        assert got.drafts == want.drafts


@pytest.mark.parametrize("name", ["n-grams", "another model"])
def test_what_a_row_is_proposed_does_not_depend_on_the_others(model, name):
    """The counts of a batch are sums over its rows, whatever these are: of a text alone, a third of three of it."""
    draft = draft_by(name, model)

    def counts(*prompts):
        sampling = SamplingParams(temperature=0.7, seed=(9, 9, 9))
        found = model.generate(list(prompts), max_new_tokens=NEW, ignore_eos=True, sampling=sampling, draft=draft)
        return np.array([found.drafts.proposed, *found.drafts.by_accepted])

    one, two, three = IDS
    alone = [counts(prompt, prompt, prompt) for prompt in IDS]
    np.testing.assert_array_equal(3 * counts(one, two, three), sum(alone))
    np.testing.assert_array_equal(3 * counts(three, one, three), alone[0] + 2 * alone[2])


@pytest.mark.parametrize(
    ("error", "words", "draft"),
    [
        (TypeError, "draft must be a Drafting, got NgramDrafter", lambda: NgramDrafter()),
        (TypeError, "draft must be a Drafting, got str", lambda: "ngrams"),
        (
            ValueError,
            "draw from the model's vocabulary of 96 tokens, got one of 64",
            lambda: draft_by_model(decoder("tests/small", dataclasses.replace(TINY, vocab=64))),
        ),
        (ValueError, "draft_tokens must be", lambda: draft_by_model(decoder(), 0)),
        (TypeError, "draft_tokens", lambda: draft_by_model(decoder(), 2.0)),
        (UnsupportedError, r"head: load it with Decoder.load\(…, mtp=True\)", lambda: draft_by_mtp(decoder())),
    ],
)
def test_drafts_that_make_no_sense_are_refused_before_any_work(model, monkeypatch, error, words, draft):
    monkeypatch.setattr("gdn_jax.decoder.decoder.SpeculativeGeneration", None)
    with pytest.raises(error, match=words):
        model.generate(IDS, draft=draft())
