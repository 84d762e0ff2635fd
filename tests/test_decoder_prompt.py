"""Prompts at once against the same tokens one by one: whole, cut, padded, refused, spoilt, and in place."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.decoder import piece_attention
from gdn_jax.decoder.attention import Cache, attend
from gdn_jax.decoder.config import DECODERS
from gdn_jax.decoder.model import decode_step, prefill_tokens
from gdn_jax.decoder.piece_attention import attend_piece
from gdn_jax.decoder.state import decoder_state_shapes, init_decoder_state
from gdn_jax.decoder.weights import abstract_decoder, read_decoder
from gdn_jax.errors import UnsupportedError
from gdn_jax.evidence.metrics import max_rel, rms_rel
from tests.support import decoders, tolerances
from tests.support.deviceless import compile_for_h200

SMALL, T, CAPACITY = decoders.SMALL, 130, 140
LENGTHS = (130, 0, 1, 3, 63, 65)
BATCH = len(LENGTHS)


def with_ratio(ratio, **changes):
    cfg = gdn.GdnConfig(hidden=32, key_heads=2, value_heads=2 * ratio, key_dim=12, value_dim=16, conv_width=4)
    return dataclasses.replace(SMALL, gdn=cfg, **changes)


PLAIN = {"mlp_types": ("dense",) * 4, "moe": None}
MODELS = {
    "ratio 1, tied, attention first": with_ratio(
        1, tied=True, layer_types=("full_attention", "linear_attention", "linear_attention", "full_attention"), **PLAIN
    ),
    "ratio 2, experts alone, a key-value head each": with_ratio(2, mlp_types=("moe",) * 4, kv_heads=4, ffn=None),
    "ratio 3, experts in every second layer": SMALL,
    "ratio 4, one key-value head": with_ratio(4, layer_types=("linear_attention",) * 3 + ("full_attention",), **PLAIN),
}


TINY = with_ratio(2, layer_types=("linear_attention", "full_attention"), mlp_types=("dense",) * 2, moe=None)
ATTENTION = dataclasses.replace(TINY, layer_types=("full_attention",), mlp_types=("dense",), gdn=None)
"""For what costs programs of its own."""


@functools.cache
def weights_of(cfg, tier="f32"):
    return read_decoder(decoders.Held(decoders.hf_config(cfg), decoders.draw(cfg, "prompts")), tier=tier)[1]


def ids_of(cfg, tokens=T):
    """Tokens int32 [B, T], other ones in every row."""
    return np.random.default_rng(7).integers(0, cfg.vocab, (BATCH, tokens), np.int32)


IDS = ids_of(SMALL)


def fresh(cfg=SMALL, capacity=CAPACITY, batch=BATCH, **how):
    return init_decoder_state(cfg, batch=batch, capacity=capacity, **how)


@functools.partial(jax.jit, static_argnames="cfg")
def by_steps(weights, state, tokens, lengths, *, cfg):
    """Logits [B, vocab] after each row's last token and the state, a token at a time."""

    def body(carry, now):
        state, last, index = carry
        active = index < lengths
        logits, state = decode_step(weights, state, now, cfg=cfg, active=active)
        return (state, jnp.where(active[:, None], logits, last), index + 1), None

    start = state, jnp.zeros((tokens.shape[0], cfg.vocab), jnp.float32), jnp.int32(0)
    (state, last, _), _ = jax.lax.scan(body, start, tokens.T)
    return last, state


def at_once(state, tokens=IDS, lengths=LENGTHS, cfg=SMALL, tier="f32", **how):
    """The prompts of `cfg` in one program for every length, content and state."""
    lengths = jnp.asarray(lengths, jnp.int32)
    return decoders.prefill(weights_of(cfg, tier), state, jnp.asarray(tokens), cfg=cfg, lengths=lengths, **how)


def check(found, want):
    """Logits row by row, and every part of the state."""
    logits, state = found
    for row, (got, expected) in enumerate(zip(logits, want[0], strict=True)):
        assert max_rel(got, expected) <= tolerances.DECODER_PROMPT, f"logits of row {row}"
    np.testing.assert_array_equal(state.position, want[1].position)
    for (path, got), expected in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(want[1]), strict=True):
        assert rms_rel(got, expected) <= tolerances.DECODER_PROMPT_STATE, jax.tree_util.keystr(path)
        assert max_rel(got, expected) <= tolerances.DECODER_PROMPT_WORST, jax.tree_util.keystr(path)


@functools.cache
def steps_of(cfg=SMALL, lengths=LENGTHS, **how):
    tokens, counts = jnp.asarray(ids_of(cfg)), jnp.asarray(lengths, jnp.int32)
    return by_steps(weights_of(cfg), fresh(cfg, **how), tokens, counts, cfg=cfg)


def rows(state, which):
    """The chosen batch rows of a state, as numpy."""
    cut = jax.tree.map(lambda leaf: np.asarray(leaf)[:, which], state.replace(position=None))
    return cut.replace(position=np.asarray(state.position)[which])


# ----------------------------------------------------------------------------------------------------------------------
# What steps compute
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_unequal_lengths_are_steps(name):
    """Of none, one, fewer than the convolution is wide, and around a chunk: logits, S, history, keys and values."""
    cfg = MODELS[name]
    check(at_once(fresh(cfg), ids_of(cfg), cfg=cfg), steps_of(cfg))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 63])
def test_prompts_of_any_length_are_steps(tokens):
    """Programs of their own, without padding."""
    lengths = (tokens,) * BATCH
    check(at_once(fresh(TINY), IDS[:, :tokens], lengths, TINY), steps_of(TINY, lengths))


@pytest.mark.parametrize("cut", [1, 2, 64, 65, 129])
def test_a_prompt_may_be_cut_anywhere(cut):
    """The later part attends to what the earlier one has kept."""
    full = np.full(BATCH, T)
    _, state = at_once(fresh(), lengths=0 * full + cut)
    found = at_once(state, np.roll(IDS, -cut, axis=1), full - cut)
    check(found, steps_of(lengths=(T,) * BATCH))


def test_steps_go_on_where_prompts_end():
    """Each row at a position of its own."""
    _, state = at_once(fresh())
    lengths = np.asarray(LENGTHS) + 1
    active = lengths <= T
    tokens = IDS[np.arange(BATCH), np.minimum(LENGTHS, T - 1)]
    logits, _ = decoders.step(weights_of(SMALL), state, jnp.asarray(tokens), cfg=SMALL, active=jnp.asarray(active))
    want, _ = steps_of(lengths=tuple(int(n) for n in np.minimum(lengths, T)))
    for row in np.flatnonzero(active):
        assert max_rel(logits[row], want[row]) <= tolerances.DECODER_PROMPT, f"row {row}"


@pytest.mark.slow
def test_a_row_alone_is_the_row_in_a_batch():
    logits, state = at_once(fresh(TINY), cfg=TINY)
    alone, alone_state = at_once(fresh(TINY, batch=1), IDS[:1], LENGTHS[:1], TINY)
    assert max_rel(alone[0], logits[0]) <= tolerances.DECODER_ALONE
    for got, want in zip(*map(jax.tree.leaves, (rows(alone_state, [0]), rows(state, [0]))), strict=True):
        assert rms_rel(got, want) <= tolerances.DECODER_PROMPT_STATE


def test_bf16_keys_and_values_are_kept_as_steps_keep_them():
    cfg = dataclasses.replace(ATTENTION, layer_types=("full_attention",) * 2, mlp_types=("dense",) * 2)
    found, want = at_once(fresh(cfg, kv_dtype="bfloat16"), cfg=cfg), steps_of(cfg, kv_dtype="bfloat16")
    assert found[1].keys.dtype == jnp.bfloat16
    for (path, got), expected in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(want), strict=True):
        assert max_rel(got, expected) <= tolerances.DECODER_PROMPT_BF16_CACHE, jax.tree_util.keystr(path)


def test_no_tokens():
    logits, state = at_once(fresh(), IDS[:, :0], (0,) * BATCH)
    assert not logits.any()
    chex.assert_trees_all_equal(state, fresh())


@pytest.mark.slow
def test_4_bit_weights():
    found, lengths = at_once(fresh(TINY), cfg=TINY, tier="q4"), jnp.asarray(LENGTHS)
    check(found, by_steps(weights_of(TINY, "q4"), fresh(TINY), jnp.asarray(IDS), lengths, cfg=TINY))


# ----------------------------------------------------------------------------------------------------------------------
# What does not count, what is refused, and what is not finite
# ----------------------------------------------------------------------------------------------------------------------


def test_what_stands_behind_a_prompt_changes_nothing():
    padding = np.arange(T) >= np.asarray(LENGTHS)[:, None]
    chex.assert_trees_all_equal(at_once(fresh(), np.where(padding, (IDS + 1) % SMALL.vocab, IDS)), at_once(fresh()))


def test_a_row_of_no_tokens_keeps_its_state():
    logits, state = at_once(poisoned(fresh(), 1))
    assert not logits[1].any()
    chex.assert_trees_all_equal(rows(state, [1]), rows(poisoned(fresh(), 1), [1]))


def test_traced_lengths_beyond_the_prompt_are_its_ends():
    found = at_once(fresh(), lengths=(2**31 - 1, -7, *LENGTHS[2:]))
    chex.assert_trees_all_equal(found, at_once(fresh()))


@pytest.mark.parametrize("filth", [np.nan, np.inf])
def test_slots_without_a_token_may_hold_anything(filth):
    """A reused row is as good as a new one, also in a capacity that no block of slots divides."""
    dirty = fresh()
    dirty = dirty.replace(keys=jnp.full_like(dirty.keys, filth), values=jnp.full_like(dirty.values, filth))
    logits, state = at_once(dirty)
    want, clean = at_once(fresh())
    chex.assert_trees_all_equal(logits, want)
    for row, length in enumerate(LENGTHS):
        for name in ("keys", "values"):
            got, expected = (np.asarray(getattr(s, name))[:, row] for s in (state, clean))
            chex.assert_trees_all_equal(got[:, :length], expected[:, :length])
            assert not np.isfinite(got[:, length:]).any()


def test_a_row_is_refused_from_the_token_on_that_cannot_be_taken():
    """Traced: outside the vocabulary; at the end of the state; not where the token is padding."""
    tokens = IDS.copy()
    tokens[0, 70], tokens[4, 63], tokens[5, 2] = -1, SMALL.vocab, SMALL.vocab
    state = fresh().replace(position=jnp.asarray([0, CAPACITY, CAPACITY, CAPACITY - 2, 0, 0]))
    logits, after = at_once(state, tokens)
    np.testing.assert_array_equal(np.isnan(logits).all(axis=1), [True, False, True, True, False, True])
    assert not logits[1].any()
    np.testing.assert_array_equal(after.position, [70, CAPACITY, CAPACITY, CAPACITY, 63, 2])
    taken = (70, 0, 0, 2, 63, 2)
    want, kept = at_once(state, IDS, taken)
    chex.assert_trees_all_equal(rows(after, slice(None)), rows(kept, slice(None)))
    chex.assert_trees_all_equal(logits[4], want[4])


def poisoned(state, row):
    """The state with NaN in everything that row `row` holds."""
    nan = jax.tree.map(lambda leaf: leaf.at[:, row].set(jnp.nan), state.replace(position=None))
    return nan.replace(position=state.position)


def test_a_row_full_of_nan_stays_alone():
    _, state = at_once(fresh(), lengths=(5,) * BATCH)
    clean, spoilt = (at_once(s, lengths=(60, 9, 1, 3, 63, 65)) for s in (state, poisoned(state, 4)))
    assert np.isnan(spoilt[0][4]).all()
    others = [0, 1, 2, 3, 5]
    chex.assert_trees_all_equal(spoilt[0][np.array(others)], clean[0][np.array(others)])
    chex.assert_trees_all_equal(rows(spoilt[1], others), rows(clean[1], others))


@pytest.mark.parametrize("name", list(MODELS)[2:])
def test_a_token_of_nan_reaches_what_it_reaches_in_steps(name):
    """Its row, from itself on: what was kept of the tokens before it keeps its bits."""
    cfg, bad = MODELS[name], 66
    tokens = ids_of(cfg) % (cfg.vocab - 1)
    spoilt = tokens.copy()
    spoilt[0, bad] = cfg.vocab - 1
    weights = weights_of(cfg)
    weights = weights.replace(embed=weights.embed.at[-1].set(jnp.nan), head=weights.embed)
    program = functools.partial(decoders.prefill, weights, fresh(cfg), cfg=cfg, lengths=jnp.asarray(LENGTHS))
    clean, found = program(jnp.asarray(tokens)), program(jnp.asarray(spoilt))
    want = by_steps(weights, fresh(cfg), jnp.asarray(spoilt), jnp.asarray(LENGTHS), cfg=cfg)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    assert np.isnan(found[0][0]).all()
    chex.assert_trees_all_equal(rows(found[1], slice(1, None)), rows(clean[1], slice(1, None)))
    chex.assert_trees_all_equal(found[1].keys[:, 0, :bad], clean[1].keys[:, 0, :bad])


# ----------------------------------------------------------------------------------------------------------------------
# Attention in blocks
# ----------------------------------------------------------------------------------------------------------------------

POSITION, KEPT, TOKENS = np.array([0, 9, 30]), np.array([11, 0, 7]), 11


def drawn(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attended(q, keys, values, lengths=KEPT, precision="exact"):
    cache = Cache(jnp.asarray(keys), jnp.asarray(values))
    place = jnp.asarray(POSITION, jnp.int32), jnp.asarray(lengths, jnp.int32)
    return np.asarray(attend_piece(jnp.asarray(q), cache, jnp.int32(1), *place, precision=precision))


def one_by_one(q, keys, values):
    """Token by token, as a step attends; NaN in the padding."""
    found = np.full(q.shape, np.nan, np.float32)
    for t in range(TOKENS):
        o = attend(jnp.asarray(q[t]), jnp.asarray(keys[1]), jnp.asarray(values[1]), jnp.asarray(POSITION + t))
        found[t] = np.where((t < KEPT)[:, None, None], o, np.nan)
    return found


@pytest.fixture(params=[(256, 512), (4, 10), (3, 5), (1, 1), (11, 37)], ids=str)
def operands(request, monkeypatch):
    """q and a cache of two layers with 6 query and 2 key-value heads; blocks that do or do not divide 11 and 37."""
    monkeypatch.setattr(piece_attention, "QUERIES", 3 * request.param[0])
    monkeypatch.setattr(piece_attention, "_LEAST_QUERIES", 1)
    monkeypatch.setattr(piece_attention, "SLOTS", request.param[1])
    return drawn(TOKENS, 3, 6, 8, seed=0), drawn(2, 3, 37, 2, 8, seed=1), drawn(2, 3, 37, 2, 8, seed=2)


def test_attention_in_blocks_is_that_of_steps(operands):
    got, want = attended(*operands), one_by_one(*operands)
    seen = ~np.isnan(want)
    assert max_rel(got[seen], want[seen]) <= tolerances.DECODER_PROMPT
    assert np.isfinite(got).all()  # in the padding too


def test_attention_rounded_to_bf16(operands):
    got, want = attended(*operands, precision="bf16"), one_by_one(*operands)
    seen = ~np.isnan(want)
    assert 1e-4 < rms_rel(got[seen], want[seen]) <= tolerances.ATTENTION_BF16


def test_attention_sees_what_was_kept_and_no_more(operands):
    q, keys, values = operands
    clean = attended(*operands)
    for row, end in enumerate(POSITION + KEPT):
        keys[1, row, end:], values[1, row, end:] = np.nan, -np.inf
    keys[0], values[0] = np.nan, np.nan
    chex.assert_trees_all_equal(attended(q, keys, values), clean)


@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_attention_to_what_is_not_finite(operands, which):
    """As in steps: tokens before it, other rows and heads, and of a value the other components, keep their bits."""
    clean = attended(*operands)
    operands[which][1, 0, 5, 1, 3] = np.nan
    got, counted = attended(*operands), (np.arange(TOKENS)[:, None] < KEPT)[:, :, None, None]
    spoilt = np.isnan(one_by_one(*operands)) & counted
    assert 0 < spoilt.sum() < spoilt.size
    np.testing.assert_array_equal(np.isnan(got), spoilt)
    chex.assert_trees_all_equal(np.where(spoilt, 0, got), np.where(spoilt, 0, clean))


def test_large_scores_do_not_overflow(operands):
    q, keys, values = operands
    got = attended(1e4 * q, 1e4 * keys, values)
    seen = ~np.isnan(one_by_one(*operands))
    want = one_by_one(1e4 * q, 1e4 * keys, values)
    assert max_rel(got[seen], want[seen]) <= tolerances.DECODER_PROMPT


# ----------------------------------------------------------------------------------------------------------------------
# bfloat16
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["f32", "q4"])
def test_bf16_is_near_exact(tier):
    """Logits and every part of the state, RMS-relative; coarser than exact, and wrong by no operator."""
    rounded, exact = (at_once(fresh(TINY), cfg=TINY, tier=tier, precision=name) for name in ("bf16", "exact"))
    errors = [rms_rel(*pair) for pair in zip(*map(jax.tree.leaves, (rounded, exact)), strict=True)]
    assert 1e-3 < max(errors) <= tolerances.PROMPT_BF16


def test_bf16_is_for_prompts():
    tokens = jnp.asarray(IDS[:, 0])
    with pytest.raises(
        UnsupportedError, match="one of exact for weights of tier 'f32', got 'bf16'; bf16 is for prompt"
    ):
        decode_step(weights_of(SMALL), fresh(), tokens, cfg=SMALL, precision="bf16")
    with pytest.raises(UnsupportedError, match="one of exact, bf16 for weights of tier 'f32', got 'q8'"):
        prefill_tokens(weights_of(SMALL), fresh(), tokens[:, None], cfg=SMALL, precision="q8")


# ----------------------------------------------------------------------------------------------------------------------
# Transformations, and memory
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_are_those_of_steps():
    """Of logits, keys and values, for lengths 5, 0 and 2; those of GDN layers are in `test_prefill`."""
    tokens, lengths = jnp.asarray(IDS[:3, :5]), jnp.asarray([5, 0, 2], jnp.int32)
    mixed = jnp.asarray(drawn(3, ATTENTION.vocab, seed=9))

    def gradient(function):
        def loss(weights):
            logits, state = function(weights, fresh(ATTENTION, 8, 3), tokens, lengths=lengths, cfg=ATTENTION)
            return jnp.sum(mixed * logits) + jnp.sum(state.keys * state.values)

        return jax.jit(jax.grad(loss))(weights_of(ATTENTION))

    found, want = gradient(prefill_tokens), gradient(by_steps)
    for (path, got), expected in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(want), strict=True):
        assert rms_rel(got, expected) <= tolerances.PROMPT_GRADIENT, jax.tree_util.keystr(path)


def test_vmap_is_a_loop():
    tokens = jnp.asarray(IDS[:, :5]).reshape(2, 3, 5)
    program = functools.partial(prefill_tokens, weights_of(ATTENTION), cfg=ATTENTION)
    start = fresh(ATTENTION, 8, 3)
    batched, one = jax.jit(jax.vmap(program, in_axes=(None, 0)))(start, tokens), jax.jit(program)
    for number in range(2):
        check(jax.tree.map(lambda leaf, number=number: leaf[number], batched), one(start, tokens[number]))


def check_in_place(compiled, state):
    """All of the state is taken over, and nothing of the shape of one of its stacks is copied or converted."""
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes
    for leaf in jax.tree.leaves((state.gdn, state.keys)):
        shape = re.escape(f"[{','.join(map(str, leaf.shape))}]")
        assert not re.search(rf"= \(?\w+{shape}\S* (copy|copy-start|convert|transpose)\(", compiled.as_text())


def test_the_state_is_updated_in_place():
    """And what is held beside weights and state does not grow with the capacity."""
    cfg = dataclasses.replace(TINY, layer_types=TINY.layer_types * 2, mlp_types=TINY.mlp_types * 2)
    program = jax.jit(prefill_tokens, static_argnames=decoders.STATIC, donate_argnames=("state",))
    tokens, held = jax.ShapeDtypeStruct((3, 64), jnp.int32), []
    for capacity in (1 << 12, 1 << 15):
        state = decoder_state_shapes(cfg, batch=3, capacity=capacity, kv_dtype="bfloat16")
        compiled = program.lower(abstract_decoder(cfg, tier="f32"), state, tokens, cfg=cfg).compile()
        check_in_place(compiled, state)
        held.append(compiled.memory_analysis().temp_size_in_bytes)
    assert held[1] <= 1.01 * held[0]


@pytest.mark.deviceless
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_a_prompt_of_the_27b_model_is_read_in_place_on_a_gpu(kv_dtype):
    cfg = DECODERS["qwen3.5-27b"]
    state = decoder_state_shapes(cfg, batch=1, capacity=32768, kv_dtype=kv_dtype)
    program = jax.jit(prefill_tokens, static_argnames=decoders.STATIC, donate_argnames=("state",))
    tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    compiled = compile_for_h200(program, abstract_decoder(cfg, tier="q4"), state, tokens, cfg=cfg)
    check_in_place(compiled, state)
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 30
