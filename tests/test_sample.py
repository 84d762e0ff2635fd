"""Sampling against exact probabilities: each filter, the penalty, seeds, and what may not change a row's draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gdn_jax.decoder.sample import GREEDY, NOT_FINITE, SamplingParams, sample

DRAWS = 4096
LOGITS = np.array([1.5, -0.5, 2.0, 0.25, 1.0, -1.25, 0.75, 1.75, -2.0, 0.0, 1.25, -0.75], np.float32)

_sample = jax.jit(sample)


ROWS, VOCAB = 64, 128


def draw(logits, params, *, positions=0, seen=False):
    """Tokens [B] for logits [B, vocab] at one position or at positions [B].

    Filled up with tokens that cannot come up and rows that nobody looks at, so that few shapes are compiled.
    """
    logits = np.atleast_2d(logits)
    batch, vocab = logits.shape
    rows = -(-batch // ROWS) * ROWS
    full = np.full((rows, VOCAB), -np.inf, np.float32)
    full[:batch, :vocab] = logits
    marks = np.zeros(full.shape, bool)
    marks[:batch, :vocab] = seen
    seeds, at = np.zeros(rows, np.uint32), np.zeros(rows, np.int32)
    seeds[:batch], at[:batch] = params.row_seeds(batch), positions
    return np.asarray(_sample(*map(jnp.asarray, (full, marks, seeds, at)), params.knobs()))[:batch]


def counts(params, *, seen):
    """How often each token comes up: one seed, successive positions."""
    params = dataclasses.replace(params, seed=(params.seed,) * DRAWS)
    tokens = draw(np.tile(LOGITS, (DRAWS, 1)), params, positions=np.arange(DRAWS), seen=seen)
    return np.bincount(tokens, minlength=len(LOGITS))


def exact(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seen=None):
    """The distribution by its definition, token by token in float64."""
    logits = [float(logit) for logit in LOGITS]
    for token in np.flatnonzero(seen) if seen is not None else ():
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    weight = {token: np.exp(logit / temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weight, key=lambda token: (-weight[token], token))
    ranked = ranked[: top_k or None]
    whole, kept = sum(weight[token] for token in ranked), []
    for token in ranked:
        kept.append(token)
        if sum(weight[member] for member in kept) >= top_p * whole:
            break
    kept = [token for token in kept if weight[token] >= min_p * weight[ranked[0]]]
    total = sum(weight[token] for token in kept)
    return np.array([weight[token] / total if token in kept else 0.0 for token in range(len(logits))])


def fits(observed, probabilities):
    """Whether a chi-square test at the 0.1 % level lets the counts pass; a token of probability 0 never comes up."""
    possible = probabilities > 0
    if observed[~possible].any():
        return False
    return possible.sum() == 1 or stats.chisquare(observed[possible], probabilities[possible] * DRAWS).pvalue > 1e-3


SEEN = np.arange(len(LOGITS)) % 3 == 0
CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 1.3},
    {"min_p": 0.25},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.3, "temperature": 1.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "top_k": 4},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_frequencies_are_the_exact_probabilities(case, seed):
    assert fits(counts(SamplingParams(seed=seed, **case), seen=SEEN), exact(seen=SEEN, **case))


@pytest.mark.parametrize(
    ("used", "claimed"),
    [
        ({"temperature": 1.0}, {"temperature": 1.1}),
        ({"top_k": 5}, {"top_k": 6}),
        ({"top_k": 6}, {"top_k": 5}),
        ({"top_p": 0.5}, {"top_p": 0.7}),
        ({"top_p": 0.7}, {"top_p": 0.5}),
        ({"min_p": 0.25}, {"min_p": 0.15}),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.2}),
        # temperature before the filters: after them, other tokens would be kept
        ({"top_p": 0.8, "temperature": 2.0}, {"top_p": 0.62, "temperature": 2.0}),
    ],
)
def test_the_statistical_test_can_fail(used, claimed):
    assert not fits(counts(SamplingParams(**used), seen=SEEN), exact(seen=SEEN, **claimed))


def test_ties_at_the_edge_keep_the_smaller_ids():
    logits = np.tile(np.float32([1, 2, 2, 2, 0]), (64, 1))
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        assert set(draw(logits, params)) == {1, 2}


def test_greedy_takes_the_first_of_equals_and_needs_no_seed():
    logits = np.float32([[0, 3, 1, 3], [5, 4, 3, 2], [-3, -2, -1, -1]])
    for seed in (0, 7):
        assert draw(logits, dataclasses.replace(GREEDY, seed=seed)).tolist() == [1, 0, 2]


def test_the_penalty_moves_a_greedy_choice():
    seen = [False, True, False]
    assert draw(np.float32([1.0, 1.5, 0.5]), dataclasses.replace(GREEDY, repetition_penalty=2.0), seen=seen) == [0]
    assert draw(np.float32([-1.5, -1.0, -3]), dataclasses.replace(GREEDY, repetition_penalty=2.0), seen=seen) == [0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=9, top_p=0.95), SamplingParams(min_p=0.05)])
def test_a_row_draws_the_same_in_any_batch(params):
    rng = np.random.default_rng(0)
    logits, positions = rng.normal(0, 2, (6, 50)), np.arange(6) * 11
    logits, positions = jnp.asarray(logits, jnp.float32), jnp.asarray(positions, jnp.int32)
    seeds = jnp.array([4, 4, 9, 2**32 - 1, 0, 4], jnp.uint32)
    together = _sample(logits, jnp.zeros(logits.shape, bool), seeds, positions, params.knobs())
    for row in range(6):
        at = slice(row, row + 1)
        alone = _sample(logits[at], jnp.zeros((1, 50), bool), seeds[at], positions[at], params.knobs())
        assert alone == together[row]


def test_seeds_and_positions_matter():
    flat = np.zeros((64, VOCAB))
    assert len(set(draw(flat, SamplingParams()))) > 40  # one seed for all: row i gets seed + i
    assert len(set(draw(flat, SamplingParams(seed=(3,) * 64)))) == 1
    assert len(set(draw(flat, SamplingParams(seed=(3,) * 64), positions=np.arange(64)))) > 40
    assert draw(flat, SamplingParams(seed=2**32 - 1))[1] == draw(flat, SamplingParams(seed=0))[0]


def test_a_stricter_filter_that_keeps_a_token_keeps_the_draw():
    logits, positions = np.tile(LOGITS, (DRAWS, 1)), np.arange(DRAWS)
    seeds = (5,) * DRAWS
    free = draw(logits, SamplingParams(seed=seeds), positions=positions)
    kept = set(np.argsort(-LOGITS)[:4])
    strict = draw(logits, SamplingParams(seed=seeds, top_k=4), positions=positions)
    assert set(strict) == kept
    survivors = [i for i in range(DRAWS) if free[i] in kept]
    assert DRAWS / 3 < len(survivors) < DRAWS
    assert np.array_equal(free[survivors], strict[survivors])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)])
def test_logits_without_a_finite_maximum_give_no_token_and_leave_other_rows_alone(params):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 8)).astype(np.float32)
    clean = draw(logits, params)
    logits[1, 3], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    tokens = draw(logits, params)
    assert (tokens[1:4] == NOT_FINITE).all()
    assert (tokens[[0, 4]] == clean[[0, 4]]).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_extreme_temperatures_and_logits_stay_finite(temperature):
    logits = np.float32([[1e30, -1e30, 0, 5], [1e-30, 0, -1e-30, 0], [-np.inf, 3, 3.5, -np.inf]])
    tokens = draw(logits, SamplingParams(temperature=temperature, top_p=0.999, min_p=0.0))
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert tokens[0] == 0
    assert tokens[2] in (1, 2)


def test_changing_settings_compiles_nothing():
    logits = np.zeros((2, 17))
    draw(logits, GREEDY)
    before = _sample._cache_size()
    for params in (SamplingParams(), SamplingParams(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, seed=(1, 2))):
        draw(logits, params)
    assert _sample._cache_size() == before


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ValueError, "temperature must be 0 or lie in 1e-06", {"temperature": -1}),
        (ValueError, "temperature must be 0 or lie in", {"temperature": 1e-9}),
        (ValueError, "temperature must be finite", {"temperature": float("nan")}),
        (TypeError, "temperature must be a number, got '1'", {"temperature": "1"}),
        (TypeError, "top_k must be an integer, got 1.5", {"top_k": 1.5}),
        (TypeError, "top_k must be an integer, got True", {"top_k": True}),
        (ValueError, "top_k must be an integer in 0", {"top_k": -1}),
        (ValueError, "top_p must lie in", {"top_p": 0}),
        (ValueError, "top_p must lie in", {"top_p": 1.01}),
        (ValueError, "min_p must lie in", {"min_p": -0.1}),
        (ValueError, "repetition_penalty must lie in", {"repetition_penalty": 0}),
        (ValueError, "seed must be an integer in 0", {"seed": -1}),
        (ValueError, "seed must be an integer in 0", {"seed": (0, 2**32)}),
        (TypeError, "seed must be an integer, got None", {"seed": None}),
    ],
)
def test_settings_out_of_range_are_refused(error, message, settings):
    with pytest.raises(error, match=message):
        SamplingParams(**settings)


def test_seeds_for_another_batch_are_refused():
    with pytest.raises(ValueError, match="one for each of the 3 rows, got 2 seeds"):
        SamplingParams(seed=[1, 2]).row_seeds(3)


def test_settings_are_a_frozen_hashable_value():
    params = SamplingParams(seed=[1, 2], top_k=np.int32(4), temperature=1)
    assert params == SamplingParams(seed=(1, 2), top_k=4)
    assert hash(params) == hash(SamplingParams(seed=(1, 2), top_k=4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
