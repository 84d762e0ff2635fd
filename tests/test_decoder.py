"""The whole decoder: against transformers and a float64 oracle, row by row, and in place."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.decoder import attention
from gdn_jax.decoder.attention import attend, rotate
from gdn_jax.decoder.block import Flow, blocks
from gdn_jax.decoder.config import DECODERS, DecoderConfig, MoeConfig
from gdn_jax.decoder.model import decode_step
from gdn_jax.decoder.moe import route
from gdn_jax.decoder.state import DecoderState, decoder_state_shapes, init_decoder_state
from gdn_jax.decoder.weights import abstract_decoder, read_decoder
from gdn_jax.errors import StateMismatchError, UnsupportedError
from gdn_jax.evidence.metrics import max_rel
from gdn_jax.norms import rms_norm
from gdn_jax.ops import Choice, choose_attend
from gdn_jax.q4 import Q4Tensor, dequantize
from gdn_jax.weights import DenseProjections, Q4Projections
from tests.support import decoder_oracle, decoders, tolerances
from tests.support.deviceless import compile_for_h200

MODELS, SMALL = decoders.MODELS, decoders.SMALL
LATE, NEVER = 9, 2  # row 1 starts so many tokens late, row 2 never does


def rows(state, which):
    """The chosen batch rows of a state, as numpy."""
    cut = jax.tree.map(lambda leaf: np.asarray(leaf)[:, which], state.replace(position=None))
    return cut.replace(position=np.asarray(state.position)[which])


def poisoned(state, row):
    """The state with NaN in everything that row `row` holds."""
    nan = jax.tree.map(lambda leaf: leaf.at[:, row].set(jnp.nan), state.replace(position=None))
    return nan.replace(position=state.position)


@functools.cache
def played(name):
    """The golden's tokens in three rows of one batch, a token a call: at once, late, and never (a row full of NaN).

    Returns the logits of each call [T, 3, vocab] and the states before and after.
    """
    cfg, weights = decoders.load(name)
    ids = decoders.golden(name).ids
    before = poisoned(init_decoder_state(cfg, batch=3, capacity=len(ids)), NEVER)
    state, logits = before, []
    for t in range(len(ids)):
        late = t >= LATE
        tokens = jnp.asarray([ids[t], ids[t - LATE] if late else 0, 5], jnp.int32)
        active = jnp.asarray([True, late, False])
        made, state = decoders.step(weights, state, tokens, cfg=cfg, active=active)
        logits.append(made)
    return np.asarray(jnp.stack(logits)), before, state


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name):
    golden = decoders.golden(name)
    logits = played(name)[0][:, 0]
    for t, want in zip(golden.at, golden.logits, strict=True):
        assert max_rel(logits[t], want) <= tolerances.DECODER_TRANSFORMERS, f"token {t}"
    assert golden.margin > 2 * tolerances.DECODER_TRANSFORMERS  # so that the choices are determined
    assert len(golden.ids) - golden.prompt == 256
    np.testing.assert_array_equal(logits[golden.prompt - 1 : -1].argmax(-1), golden.ids[golden.prompt :])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_prompts_at_once_equal_transformers(name):
    """A row for every token whose logits are known, which is the last of a prompt of its own."""
    cfg, weights = decoders.load(name)
    golden = decoders.golden(name)
    batch, longest = len(golden.at), int(golden.at.max()) + 1
    tokens = jnp.asarray(np.tile(golden.ids[:longest], (batch, 1)), jnp.int32)
    state = init_decoder_state(cfg, batch=batch, capacity=longest)
    logits, _ = decoders.prefill(weights, state, tokens, cfg=cfg, lengths=jnp.asarray(golden.at + 1, jnp.int32))
    for row, (t, want) in enumerate(zip(golden.at, golden.logits, strict=True)):
        assert max_rel(logits[row], want) <= tolerances.DECODER_TRANSFORMERS, f"token {t}"


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_independent_each_at_a_position_of_its_own(name):
    logits, _, state = played(name)
    np.testing.assert_array_equal(state.position, [600, 600 - LATE, 0])
    np.testing.assert_array_equal(logits[LATE:, 1], logits[:-LATE, 0])


@pytest.mark.parametrize("name", MODELS)
def test_an_inactive_row_has_logits_0_and_an_untouched_state(name):
    logits, before, after = played(name)
    assert not logits[:, NEVER].any()
    assert not logits[:LATE, 1].any()
    chex.assert_trees_all_equal(rows(after, NEVER), rows(before, NEVER))
    assert np.isfinite(logits).all()  # no NaN of row 2 reaches another


IDS = np.asarray([5, 95, 0, 17, 17, 60, 33, 2, 71, 8, 44, 95], np.int32)
CAPACITY = 16


def fresh(**how):
    return init_decoder_state(SMALL, batch=3, capacity=CAPACITY, **how)


def one(state, tokens, active=(True, True, True), tier="f32", **how):
    """One step of `SMALL`."""
    tokens, active = jnp.asarray(tokens, jnp.int32), jnp.asarray(active)
    return decoders.step(decoders.small(tier), state, tokens, cfg=SMALL, active=active, **how)


@functools.cache
def stepped():
    """The logits [T, vocab] of `SMALL` after each token of IDS."""
    state, logits = fresh(), []
    for token in IDS:
        made, state = one(state, [token] * 3)
        logits.append(made[0])
    return np.stack(logits)


@functools.cache
def filled(lengths, tokens=None):
    """Prompts of these lengths, all of one shape and so in one program: logits and state."""
    tokens = np.tile(IDS, (3, 1)) if tokens is None else np.asarray(tokens, np.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    return decoders.prefill(decoders.small(), fresh(), jnp.asarray(tokens), cfg=SMALL, lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(12, 0, 1), (11, 2, 3), (10, 7, 4)])
def test_prefill_is_steps(lengths):
    """Of every length from none to all, those shorter than the convolution is wide too. More in test_decoder_prompt."""
    logits, state = filled(lengths)
    np.testing.assert_array_equal(state.position, lengths)
    for row, length in enumerate(lengths):
        want = stepped()[length - 1] if length else np.zeros(SMALL.vocab)
        assert max_rel(logits[row], want) <= tolerances.DECODER_PROMPT, f"{length} tokens"
    # What follows is as if all had come token by token.
    inside = np.asarray(lengths) < len(IDS)
    logits, _ = one(state, IDS[np.asarray(lengths) % len(IDS)], inside)
    for row in np.flatnonzero(inside):
        assert max_rel(logits[row], stepped()[lengths[row]]) <= tolerances.DECODER_PROMPT, f"{lengths[row]} and one"


def test_a_row_alone_is_the_row_in_a_batch():
    state = init_decoder_state(SMALL, batch=1, capacity=CAPACITY)
    for token, want in zip(IDS, stepped(), strict=True):
        logits, state = decoders.step(decoders.small(), state, jnp.asarray([token]), cfg=SMALL)
        assert max_rel(logits[0], want) <= tolerances.DECODER_ALONE


def test_a_row_full_of_nan_stays_alone():
    _, state = filled((10, 7, 4))
    want, after = one(state, [3, 4, 5])
    got, spoilt = one(poisoned(state, 1), [3, 4, 5])
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(np.asarray(got)[[0, 2]], np.asarray(want)[[0, 2]])
    chex.assert_trees_all_equal(rows(spoilt, [0, 2]), rows(after, [0, 2]))


def test_what_stands_behind_a_prompt_changes_nothing():
    tokens = np.tile(IDS, (3, 1))
    tokens[1, 7:], tokens[2, 4:] = 9, 0
    chex.assert_trees_all_equal(filled((10, 7, 4), tuple(map(tuple, tokens))), filled((10, 7, 4)))


def test_a_full_row_and_a_token_outside_the_vocabulary_are_refused_by_themselves():
    """Traced, neither can be raised: NaN in these rows, their state untouched, the others as if nothing were."""
    _, state = filled((10, 7, 4))
    state = state.replace(position=state.position.at[0].set(CAPACITY))
    logits, after = one(state, [3, SMALL.vocab, 3])
    assert np.isnan(logits[:2]).all()
    chex.assert_trees_all_equal(rows(after, [0, 1]), rows(state, [0, 1]))
    alone, after_alone = one(state, [3, 3, 3], (False, False, True))
    chex.assert_tree_all_finite(logits[2])
    chex.assert_trees_all_equal((logits[2], rows(after, 2)), (alone[2], rows(after_alone, 2)))


def test_prefill_stops_where_a_row_is_refused():
    tokens = np.tile(IDS, (3, 1))
    tokens[0, 2], tokens[1, 3] = -1, SMALL.vocab
    logits, after = filled((12, 3, 4), tuple(map(tuple, tokens)))
    np.testing.assert_array_equal(after.position, [2, 3, 4])  # row 1 ends before its bad token
    assert np.isnan(logits[0]).all()
    np.testing.assert_array_equal(logits[1:], filled((12, 3, 4))[0][1:])
    chex.assert_trees_all_equal(rows(after, 0), rows(filled((2, 2, 2))[1], 0))


def test_a_reused_slot_starts_clean():
    """Behind its position a row may hold anything."""
    _, state = filled((10, 7, 4))
    dirty = state.replace(keys=state.keys.at[:, :, 10:].set(jnp.nan), values=state.values.at[:, :, 10:].set(jnp.inf))
    np.testing.assert_array_equal(one(dirty, [3, 4, 5])[0], one(state, [3, 4, 5])[0])


def test_bf16_keys_and_values_are_those_of_float32_rounded():
    wide, narrow = fresh(), fresh(kv_dtype="bfloat16")
    for token in IDS[:6]:
        (want, wide), (got, narrow) = one(wide, [token] * 3), one(narrow, [token] * 3)
    assert narrow.keys.dtype == narrow.values.dtype == jnp.bfloat16
    assert 0 < max_rel(got, want) < 2e-2
    # What goes into the first attention layer is still the same.
    for name in ("keys", "values"):
        first, exact = getattr(narrow, name)[0], getattr(wide, name)[0]
        np.testing.assert_array_equal(first, exact.astype(jnp.bfloat16))


def held(cfg, tier="f32"):
    """Drawn tensors and weights of a model of this configuration."""
    tensors = decoders.draw(cfg, "test_decoder")
    loaded, weights = read_decoder(decoders.Held(decoders.hf_config(cfg), tensors), tier=tier)
    assert loaded == cfg
    return tensors, weights


def as_float32(weights):
    """The float32 weights that weights of another tier stand for."""

    def widen(leaf):
        if isinstance(leaf, Q4Projections):
            return DenseProjections(*map(dequantize, (leaf.qkv, leaf.z, leaf.out)))
        return dequantize(leaf) if isinstance(leaf, Q4Tensor) else leaf.astype(jnp.float32)

    return jax.tree.map(widen, weights, is_leaf=lambda leaf: isinstance(leaf, Q4Tensor | Q4Projections))


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "bound"), [("bf16", tolerances.DECODER_BF16), ("q4", tolerances.DECODER_Q4)])
def test_a_tier_equals_float32_on_the_weights_it_stands_for(tier, bound):
    weights = decoders.small(tier)
    assert weights.tier == tier
    widened = as_float32(weights)
    assert max_rel(widened.moe.experts.gate, decoders.small().moe.experts.gate) > 1e-3  # not those before rounding
    got = want = fresh()
    for t in range(len(IDS)):
        tokens = IDS[[t, t - 1, t - 2]]
        logits, got = one(got, tokens, tier=tier)
        wanted, want = decoders.step(widened, want, jnp.asarray(tokens), cfg=SMALL, active=jnp.ones(3, bool))
        assert max_rel(logits, wanted) <= bound, f"token {t}"


def test_activations_of_8_bits_are_near_and_not_the_same():
    cfg = dataclasses.replace(SMALL, layer_types=("full_attention",), mlp_types=("dense",), gdn=None, moe=None)
    _, weights = held(cfg, tier="q4")
    state, token = init_decoder_state(cfg, batch=1, capacity=1), jnp.asarray([3], jnp.int32)
    exact, q8 = (decoders.step(weights, state, token, cfg=cfg, precision=name)[0] for name in ("exact", "q8"))
    assert 1e-3 < max_rel(q8, exact) < 1e-1


def test_the_kernels_bodies_give_what_xla_gives():
    """Every kind of layer; row 1 rests at every second token, and row 2 holds nothing but NaN."""
    state, taken = poisoned(fresh(), NEVER), 0
    for t in range(4):
        awake = t % 2 == 0
        logits, state = one(state, [IDS[t], IDS[taken], 0], (True, awake, False), implementation="interpret")
        assert max_rel(logits[0], stepped()[t]) <= tolerances.DECODER_ORACLE, f"token {t}"
        if awake:
            assert max_rel(logits[1], stepped()[taken]) <= tolerances.DECODER_ORACLE, f"token {taken}"
            taken += 1
        assert not logits[NEVER].any()
    chex.assert_trees_all_equal(rows(state, NEVER), rows(poisoned(fresh(), NEVER), NEVER))


ATTENTION = dataclasses.replace(
    SMALL, layer_types=("full_attention",), mlp_types=("dense",), gdn=None, moe=None, head_dim=32, rotary_dim=8
)


@pytest.mark.slow
def test_the_kernels_hand_on_attention_in_limbs_and_a_full_row_is_refused():
    _, weights = held(ATTENTION, tier="q4")
    states = {name: init_decoder_state(ATTENTION, batch=2, capacity=3) for name in ("xla", "interpret")}
    for t, token in enumerate(IDS[:4]):
        tokens, active = jnp.asarray([token, token]), jnp.asarray([True, t == 3])
        made = {}
        for name, state in states.items():
            how = {"cfg": ATTENTION, "active": active, "implementation": name}
            made[name], states[name] = decoders.step(weights, state, tokens, **how)
        row = 0 if t < 3 else 1
        assert max_rel(made["interpret"][row], made["xla"][row]) <= tolerances.DECODER_ORACLE, f"token {t}"
        np.testing.assert_array_equal(np.isnan(made["interpret"]), np.isnan(made["xla"]))
    assert np.isnan(made["interpret"][0]).all()  # its state is full


def test_attention_by_kernels_gives_way_under_transformations(monkeypatch):
    """As GDN layers do, where the implementation was not named."""
    _, weights = held(ATTENTION)
    batch, position, writes, layer = 2, jnp.asarray([0, 1]), jnp.ones(2, bool), jnp.zeros((), jnp.int32)
    shape = (1, batch, 2, ATTENTION.kv_heads, ATTENTION.head_dim)
    cache = attention.Cache(*(0.3 * jax.random.normal(jax.random.key(i), shape) for i in (0, 1)))
    x = jax.random.normal(jax.random.key(2), (batch, ATTENTION.hidden))

    def y(x, name=None):
        how = {"cfg": ATTENTION, "layer": layer, "precision": "exact", "implementation": name}
        return attention.attention_step(weights.attention, cache, x, position, writes, **how)[0]

    def transformed(name=None):
        program = jax.jit(
            lambda x: (jax.grad(lambda x: jnp.sum(y(x, name) ** 2))(x), jax.vmap(lambda x: y(x, name))(x[None]))
        )
        return program(x)

    want = transformed("xla")
    monkeypatch.setattr(attention, "choose_attend", lambda *_: Choice("attend", "interpret", "for this test"))
    assert max_rel(jax.jit(y)(x), want[1][0]) <= tolerances.DECODER_ORACLE
    for got, wanted in zip(transformed(), want, strict=True):
        assert max_rel(got, wanted) <= tolerances.DECODER_ORACLE
    with pytest.raises(UnsupportedError, match="'interpret' has no rule for"):
        transformed("interpret")


def test_attention_that_the_kernels_do_not_take_is_left_to_xla():
    """Heads of more than 256, under every name; see `choose_attend`."""
    for shape, name in (((1, 1, 4, 2, 300), "interpret"), ((1, 1, 4, 2, 32), "mosaic"), ((1, 1, 4, 2, 32), None)):
        choice = choose_attend(jax.ShapeDtypeStruct(shape, jnp.float32), 4, name)
        if name is not None or jax.default_backend() == "cpu":
            assert choice.implementation == "xla"
        assert choice.reason
    with pytest.raises(ValueError, match="implementation must be"):
        choose_attend(jax.ShapeDtypeStruct((1, 1, 4, 2, 32), jnp.float32), 4, "cuda")


GDN = gdn.GdnConfig(hidden=20, key_heads=2, value_heads=6, key_dim=6, value_dim=5, conv_width=3, norm_eps=1e-5)
ODD = DecoderConfig(
    vocab=50,
    hidden=20,
    layer_types=("full_attention", "linear_attention"),
    mlp_types=("dense", "dense"),
    heads=6,
    kv_heads=6,
    head_dim=10,
    rotary_dim=10,
    rope_theta=100.0,
    norm_eps=1e-5,
    tied=True,
    gdn=GDN,
    ffn=33,
)
SPARSE = MoeConfig(experts=5, experts_per_token=3, ffn=7, shared_ffn=9, norm_topk=False)
GEOMETRIES = {
    "attention first, a head each": ODD,
    "experts in some layers": dataclasses.replace(
        ODD, layer_types=ODD.layer_types[::-1] * 2, mlp_types=("moe", "dense") * 2, moe=SPARSE, kv_heads=2, tied=False
    ),
    "experts alone, attention alone": dataclasses.replace(
        ODD, layer_types=("full_attention",) * 3, mlp_types=("moe",) * 3, moe=SPARSE, gdn=None, ffn=None, kv_heads=1
    ),
    "GDN alone": dataclasses.replace(ODD, layer_types=("linear_attention",) * 3, mlp_types=("dense",) * 3),
    "one layer, one component turned": dataclasses.replace(
        ODD, layer_types=("full_attention",), mlp_types=("dense",), gdn=None, head_dim=7, rotary_dim=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_any_geometry_equals_the_float64_oracle(name):
    cfg = GEOMETRIES[name]
    tensors, weights = held(cfg)
    ids = np.asarray([7, 3, 3, 49, 0, 12, 30, 7, 21], np.int32)
    want = decoder_oracle.run(cfg, tensors, ids)
    state = init_decoder_state(cfg, batch=1, capacity=len(ids))
    for t, token in enumerate(ids):
        logits, state = decoders.step(weights, state, jnp.asarray([token]), cfg=cfg)
        assert max_rel(logits[0], want[t]) <= tolerances.DECODER_ORACLE, f"token {t}"
    assert np.isnan(decoders.step(weights, state, jnp.asarray([0]), cfg=cfg)[0]).all()  # the state is full
    at_once, _ = decoders.prefill(
        weights, init_decoder_state(cfg, batch=1, capacity=9), jnp.asarray(ids[None]), cfg=cfg
    )
    assert max_rel(at_once[0], want[-1]) <= tolerances.DECODER_ORACLE


def test_rms_norm_multiplies_by_one_more_than_its_weight():
    x = jnp.asarray([[3.0, 4.0]], jnp.float32)
    got = rms_norm(x, jnp.asarray([0.0, -0.5], jnp.float32), 0.5)
    np.testing.assert_allclose(got, [[3 / np.sqrt(13), 2 / np.sqrt(13)]], rtol=1e-6)


def test_rope_turns_halves_of_the_first_components_and_leaves_the_rest():
    x = jnp.asarray(np.arange(1.0, 7.0, dtype=np.float32)).reshape(1, 1, 6)
    np.testing.assert_array_equal(rotate(x, jnp.asarray([0]), 4, 100.0), x)
    turned = np.asarray([(1 + 3j) * np.exp(7j), (2 + 4j) * np.exp(0.7j)])
    want = [*turned.real, *turned.imag, 5, 6]
    np.testing.assert_allclose(rotate(x, jnp.asarray([7]), 4, 100.0)[0, 0], want, rtol=2e-6)


def test_attention_sees_its_own_slot_and_those_before_it():
    q = jnp.zeros((2, 2, 4), jnp.float32)  # equal scores: the mean of the values seen
    keys = jnp.full((2, 3, 1, 4), jnp.nan).at[:, :2].set(1.0)
    values = jnp.full((2, 3, 1, 4), jnp.inf).at[:, 0].set(1.0).at[:, 1].set(3.0)
    got = attend(q, keys, values, jnp.asarray([0, 1]))
    np.testing.assert_array_equal(got[:, 0, 0], [1.0, 2.0])


def test_large_scores_do_not_overflow():
    q = jnp.full((1, 1, 4), 1e4, jnp.float32)
    keys = jnp.asarray([[[[1e4] * 4], [[-1e4] * 4]]], jnp.float32)
    values = jnp.asarray([[[[1.0] * 4], [[2.0] * 4]]], jnp.float32)
    np.testing.assert_array_equal(attend(q, keys, values, jnp.asarray([1])), np.ones((1, 1, 4)))


def test_router_takes_the_largest_and_scales_them_if_asked_to():
    router = jnp.asarray([[0.0], [3.0], [1.0], [2.0]], jnp.float32)
    shares = np.exp([3.0, 2.0]) / np.exp([0.0, 3.0, 1.0, 2.0]).sum()
    for norm_topk, want in ((False, shares), (True, shares / shares.sum())):
        cfg = MoeConfig(experts=4, experts_per_token=2, ffn=1, shared_ffn=1, norm_topk=norm_topk)
        chosen, got = route(router, jnp.ones((1, 1), jnp.float32), cfg)
        np.testing.assert_array_equal(chosen, [[1, 3]])
        np.testing.assert_allclose(got, [want], rtol=1e-6)


def test_one_program_serves_every_token_and_takes_over_the_state():
    cfg = GEOMETRIES["GDN alone"]
    _, weights = held(cfg)
    state = init_decoder_state(cfg, batch=1, capacity=4)
    step = jax.jit(
        chex.assert_max_traces(decode_step, n=1), static_argnames=decoders.STATIC, donate_argnames=("state",)
    )
    for token in (1, 2, 3):
        given = state
        _, state = step(weights, state, jnp.asarray([token]), cfg=cfg)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert int(state.position[0]) == 3


@pytest.mark.deviceless
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_27b_model_is_decoded_in_place_on_a_gpu(kv_dtype):
    """Neither a copy of a stack of weights, nor of the cache, nor of the whole state."""
    cfg = DECODERS["qwen3.5-27b"]
    weights = abstract_decoder(cfg, tier="bf16")
    state = decoder_state_shapes(cfg, batch=2, capacity=1024, kv_dtype=kv_dtype)
    program = jax.jit(decode_step, static_argnames=decoders.STATIC, donate_argnames=("state",))
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = compile_for_h200(program, weights, state, tokens, cfg=cfg, implementation="xla").memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    # The partial sums of the head, one per 32 columns, are the largest thing beside weights and state.
    assert memory.temp_size_in_bytes < 1.2 * 4 * 2 * cfg.vocab * cfg.hidden / 32


@pytest.mark.deviceless
def test_a_period_of_a_4_bit_model_is_kernels_and_its_layers_numbers():
    """Two launches beside the kernels: one for the numbers of four layers, and the loop's own count."""
    cfg = DECODERS["qwen3.5-27b"]
    state = decoder_state_shapes(cfg, batch=1, capacity=1024)
    program = jax.jit(decode_step, static_argnames=decoders.STATIC, donate_argnames=("state",))
    compiled = compile_for_h200(
        program, abstract_decoder(cfg, tier="q4"), state, jax.ShapeDtypeStruct((1,), jnp.int32), cfg=cfg
    )
    text = compiled.as_text()
    [body] = re.findall(r"body=(%[^\s,]+)", text)
    _, _, body = text.partition(f"\n{body} (")
    body, _, _ = body.partition("\n}")
    launched = re.findall(r" = \S.* (fusion|copy|copy-start|dynamic-slice|dynamic-update-slice|custom-call)\(", body)
    of_a_gdn_layer, of_attention, of_an_mlp = 3, 5, 3
    norms = 2 * cfg.period
    assert launched.count("custom-call") == norms + 3 * of_a_gdn_layer + of_attention + cfg.period * of_an_mlp
    assert [kind for kind in launched if kind != "custom-call"] == ["fusion"] * 2


def repeated(*kinds, times, moe=True):
    """A model of these (mixer, MLP), so many times over."""
    mixers, mlps = zip(*kinds * times, strict=True)
    given = {"layer_types": mixers, "mlp_types": mlps, "ffn": 32 if "dense" in mlps else None}
    experts = MoeConfig(experts=2, experts_per_token=1, ffn=8, shared_ffn=8) if "moe" in mlps else None
    return dataclasses.replace(SMALL, **given, moe=experts, gdn=SMALL.gdn if G in mixers else None)


G, A = "linear_attention", "full_attention"


@pytest.mark.parametrize("loop_alike", [False, True])
@pytest.mark.parametrize(
    ("kinds", "times"),
    [
        ([(G, "dense"), (G, "moe"), (G, "moe"), (A, "moe")], 3),
        ([(A, "dense"), (G, "dense"), (G, "dense")], 2),
        ([(G, "moe"), (A, "dense"), (A, "dense"), (G, "dense"), (G, "dense")], 1),
        ([(G, "dense")], 5),
        ([(A, "moe")], 1),
    ],
)
def test_layers_know_their_numbers(kinds, times, loop_alike):
    """Of all layers, of their mixer's kind and of their MLP's, as the plan has them."""
    cfg = repeated(*kinds, times=times)
    seen = {A: 0, G: 1, "dense": 0, "moe": 1}

    def block(flow, plan, place):
        here = jnp.stack([jnp.asarray(number, jnp.int32) for number in place])
        row = jnp.concatenate([here, jnp.asarray([seen[plan.mixer], seen[plan.mlp]], jnp.int32)])
        return flow._replace(x=flow.x.at[flow.y].set(row), y=flow.y + 1)

    nothing = Flow(jnp.full((cfg.layers, 5), -1, jnp.int32), jnp.int32(0), None, None)
    found = jax.jit(lambda flow: blocks(flow, cfg, block, loop_alike=loop_alike))(nothing)
    assert found.x.tolist() == [
        [index, plan.mixer_ordinal, plan.mlp_ordinal, seen[plan.mixer], seen[plan.mlp]]
        for index, plan in enumerate(cfg.plan())
    ]


@functools.cache
def request_in_order():
    """Arguments that nothing is wrong with."""
    return decoders.small(), init_decoder_state(SMALL, batch=2, capacity=4), jnp.asarray([1, 2], jnp.int32), SMALL


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        ([1, 2], TypeError, "tokens .* must be an array, got list"),
        (np.ones((2, 32), np.float32), TypeError, "images and embeddings are not taken.* must be int32, got float32"),
        (np.asarray([1, 2], np.int64), TypeError, "must be int32, got int64"),
        (np.asarray([[1], [2]], np.int32), ValueError, r"must be \[B\] with B=2 .* got shape \(2, 1\)"),
        (np.asarray([1], np.int32), ValueError, r"must be \[B\] with B=2"),
        (np.asarray([1, 96], np.int32), ValueError, r"must lie in 0 … 95 \(the vocabulary\), got \[96\]"),
        (np.asarray([-1, 0], np.int32), ValueError, r"got \[-1\]"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tokens, error, words):
    weights, state, _, cfg = request_in_order()
    with pytest.raises(error, match=words):
        decode_step(weights, state, tokens, cfg=cfg)


@pytest.mark.parametrize(
    ("lengths", "error", "words"),
    [
        (np.asarray([1, 2], np.int64), TypeError, "lengths must be int32"),
        (np.asarray([1], np.int32), ValueError, r"lengths must be \[B\] with B=2"),
        (np.asarray([1, 3], np.int32), ValueError, r"lie in 0 … 2 .*got \[1, 3\]"),
        (np.asarray([-1, 2], np.int32), ValueError, "lie in 0 … 2"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, error, words):
    weights, state, tokens, cfg = request_in_order()
    with pytest.raises(error, match=words):
        decoders.prefill_tokens(weights, state, jnp.stack([tokens, tokens], 1), cfg=cfg, lengths=lengths)


def test_what_does_not_belong_together_is_refused():
    weights, state, tokens, cfg = request_in_order()
    other = dataclasses.replace(cfg, ffn=32)
    with pytest.raises(ValueError, match=r"weights.mlp.gate must have shape \(2, 32, 32\)"):
        decode_step(weights, state, tokens, cfg=other)
    with pytest.raises(ValueError, match="the weights have 'head', unlike"):
        decode_step(weights, state, tokens, cfg=dataclasses.replace(cfg, tied=True))
    with pytest.raises(TypeError, match=r"weights\.norm must be float32, got bfloat16"):
        decode_step(weights.replace(norm=weights.norm.astype(jnp.bfloat16)), state, tokens, cfg=cfg)
    with pytest.raises(TypeError, match="weights must be a DecoderWeights"):
        decode_step(weights.gdn, state, tokens, cfg=cfg)
    with pytest.raises(TypeError, match="cfg must be a DecoderConfig"):
        decode_step(weights, state, tokens, cfg=cfg.gdn)
    with pytest.raises(StateMismatchError, match=r"state.keys \[A, B, S, N, Hd\] must be"):
        decode_step(weights, state.replace(keys=state.keys[:1]), tokens, cfg=cfg)
    short = jax.tree.map(lambda leaf: leaf[:1], state.gdn)
    with pytest.raises(StateMismatchError, match=r"state.gdn.S must be"):
        decode_step(weights, state.replace(gdn=short), tokens, cfg=cfg)
    with pytest.raises(TypeError, match=r"state\.keys must be an array of float32 or bfloat16"):
        decode_step(weights, state.replace(keys=state.keys.astype(jnp.float16)), tokens, cfg=cfg)
    with pytest.raises(TypeError, match="state must be a DecoderState"):
        decode_step(weights, state.gdn, tokens, cfg=cfg)
    with pytest.raises(ValueError, match=r"active must be bool \(2,\)"):
        decode_step(weights, state, tokens, cfg=cfg, active=np.ones(3, bool))
    with pytest.raises(UnsupportedError, match="precision must be one of exact"):
        decode_step(weights, state, tokens, cfg=cfg, precision="q8")
    with pytest.raises(ValueError, match="implementation must be"):
        decode_step(weights, state, tokens, cfg=cfg, implementation="cuda")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"capacity": 0}, "capacity must be an integer of at least 1, got 0"),
        ({"capacity": True}, "capacity must be"),
        ({"batch": -1}, "batch must be an integer of at least 1, got -1"),
        ({"kv_dtype": "float16"}, "kv_dtype must be one of float32, bfloat16"),
    ],
)
def test_states_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        init_decoder_state(ODD, **{"capacity": 4, **wrong})


def test_a_state_starts_at_zero():
    state = init_decoder_state(ODD, batch=3, capacity=4)
    assert isinstance(state, DecoderState)
    assert (state.batch, state.capacity) == (3, 4)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state))
    assert state.keys.shape == (1, 3, 4, 6, 10)
