"""Layers of 4-bit weights: loaded, bound from a pool, mixed with float32 layers; and refused by halves."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.errors import StalePoolError, StateMismatchError, UnsupportedError
from gdn_jax.evidence import bounds, recipe
from gdn_jax.evidence.metrics import differing, max_rel, rms_rel
from tests.support import cases

CFG = gdn.GdnConfig(hidden=96, key_heads=2, value_heads=6, key_dim=20, value_dim=32, conv_width=4)
LARGE = ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight")
STATIC = ("cfg", "precision", "implementation")
scan = jax.jit(gdn.scan, static_argnames=STATIC)
step = jax.jit(gdn.step, static_argnames=STATIC)
trace = jax.jit(gdn.trace, static_argnames=STATIC)


@pytest.fixture(scope="module")
def tensors():
    return recipe.layer_weights(CFG, "tiers")


@pytest.fixture(scope="module")
def f32(tensors):
    return gdn.from_canonical(CFG, tensors)


@pytest.fixture(scope="module")
def q4(tensors):
    return gdn.from_canonical(CFG, tensors, tier="q4")


def inputs(kind="heavy", tokens=12, batch=3):
    return jnp.asarray(recipe.inputs(kind, f"tiers/{kind}", (tokens, batch, CFG.hidden)))


def oracle(tensors, xs):
    zeros = gdn.init_state(CFG, layers=1, batch=xs.shape[1])
    return cases.oracle_run(CFG, xs, zeros.S[0], zeros.conv_hist[0], weights=tensors)


def dequantised(tensors, weights):
    matrices = (weights.large.qkv, weights.large.z, weights.large.out)
    return {**tensors, **{name: np.asarray(gdn.dequantize(q)) for name, q in zip(LARGE, matrices, strict=True)}}


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "uniform"])
def test_exact_precision_equals_the_dequantised_oracle(tensors, q4, kind):
    xs = inputs(kind)
    ys, state = scan(q4, gdn.init_state(CFG, layers=1, batch=3), xs, cfg=CFG)
    run = oracle(dequantised(tensors, q4), xs)
    assert max(max_rel(a, b) for a, b in zip(ys, run.ys, strict=True)) <= bounds.GOLDEN
    assert max_rel(state.S[0], run.S) <= bounds.STATE


def test_q8_precision_differs_by_its_activations_alone(tensors, q4):
    xs = inputs("uniform")
    state = gdn.init_state(CFG, layers=1, batch=3)
    ys, _ = scan(q4, state, xs, cfg=CFG, precision="q8")
    run = oracle(dequantised(tensors, q4), xs)
    assert 1e-3 < rms_rel(ys, run.ys) < 5e-2


@pytest.mark.parametrize("precision", ["exact", "q8"])
def test_steps_scan_and_trace_agree_bitwise(q4, precision):
    xs, state = inputs(), gdn.init_state(CFG, layers=2, batch=3)
    ys, final = scan(q4, state, xs, cfg=CFG, layer=jnp.int32(1), precision=precision)
    stepped = traced = state
    for x, y in zip(xs, ys, strict=True):
        y_step, stepped = step(q4, stepped, x, cfg=CFG, layer=jnp.int32(1), precision=precision)
        y_trace, traced, taps = trace(q4, traced, x, cfg=CFG, layer=jnp.int32(1), precision=precision)
        chex.assert_trees_all_equal(y_step, y_trace, taps["OUT"], y)
    chex.assert_trees_all_equal(final, stepped, traced)


def test_gates_are_the_same_bits_in_both_tiers(f32, q4):
    """b and a stay float32 in both tiers: BETA and G must not differ at all."""
    x, state = inputs()[0], gdn.init_state(CFG, layers=1, batch=3)
    (_, _, a), (_, _, b) = (trace(w, state, x, cfg=CFG) for w in (f32, q4))
    for tap in ("A", "B", "BETA", "G"):
        assert differing(a[tap], b[tap]) == 0
    assert rms_rel(b["XC"], a["XC"]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [("f32", "q4", "f32"), ("q4", "f32", "q4")])
def test_mixed_tuple_equals_each_layer_alone(f32, q4, pattern):
    weights = tuple({"f32": f32, "q4": q4}[tier] for tier in pattern)
    xs, state = inputs(), gdn.init_state(CFG, layers=3, batch=3)
    mixed = jax.jit(gdn.scan, static_argnames=(*STATIC, "layer"))
    for layer, alone in enumerate(weights):
        ys, after = mixed(weights, state, xs, cfg=CFG, layer=layer)
        ys_alone, after_alone = scan(alone, state, xs, cfg=CFG, layer=jnp.int32(layer))
        chex.assert_trees_all_equal((ys, after), (ys_alone, after_alone))
    with pytest.raises(TypeError, match="tuple of weights needs a Python int"):
        scan(weights, state, xs, cfg=CFG, layer=jnp.int32(0))
    with pytest.raises(StateMismatchError, match="2 layers of weights, the state 3"):
        gdn.scan(weights[:2], state, xs, cfg=CFG)


def test_q4_stack_equals_each_layer_alone(q4):
    other = gdn.from_canonical(CFG, recipe.layer_weights(CFG, "tiers/other"), tier="q4")
    stack = gdn.GdnStack(jax.tree.map(lambda *leaves: jnp.stack(leaves), q4, other))
    xs, state = inputs(), gdn.init_state(CFG, layers=2, batch=3)
    for layer, alone in enumerate((q4, other)):
        chex.assert_trees_all_equal(
            scan(stack, state, xs, cfg=CFG, layer=jnp.int32(layer)),
            scan(alone, state, xs, cfg=CFG, layer=jnp.int32(layer)),
        )


def test_storage_of_the_27b_layer():
    cfg = gdn.GEOMETRIES["qwen3.5-27b"].cfg
    large = gdn.abstract(cfg, tier="q4").large
    assert sum(matrix.nbytes for matrix in (large.qkv, large.z, large.out)) == 61.875 * 2**20
    assert sum(leaf.size for leaf in jax.tree.leaves(gdn.abstract(cfg).large)) == 115_343_360


def test_precision_of_another_tier_is_refused(f32, q4):
    x, state = inputs()[0], gdn.init_state(CFG, layers=1, batch=3)
    with pytest.raises(UnsupportedError, match="precision must be one of exact for weights of tier 'f32', got 'q8'"):
        gdn.step(f32, state, x, cfg=CFG, precision="q8")
    with pytest.raises(UnsupportedError, match=r"precision must be one of exact, q8 .* got 'bf16'"):
        gdn.step(q4, state, x, cfg=CFG, precision="bf16")


def test_columns_that_do_not_divide_are_refused():
    cfg = gdn.GdnConfig(hidden=96, key_heads=1, value_heads=3, key_dim=8, value_dim=20, conv_width=4)
    with pytest.raises(UnsupportedError, match=r"D=96, H·V=60"):
        gdn.from_canonical(cfg, recipe.layer_weights(cfg, "odd"), tier="q4")


def pool_of(weights, names=("L0.in_proj_qkv", "L0.in_proj_z", "L0.out_proj")):
    matrices = (weights.large.qkv, weights.large.z, weights.large.out)
    return gdn.Q4Pool.build(dict(zip(names, matrices, strict=True)))


@pytest.mark.parametrize("small_tier", ["f32", "q4"])
def test_bound_layer_equals_the_loaded_one(f32, q4, small_tier):
    pool = pool_of(q4)
    bound = gdn.bind_q4({"f32": f32, "q4": q4}[small_tier], pool, keys=pool.keys())
    assert bound.tier == "q4"
    chex.assert_trees_all_equal(bound, q4)
    assert pool.nbytes == sum(matrix.nbytes for matrix in (q4.large.qkv, q4.large.z, q4.large.out))
    assert len(pool) == 3


def test_a_rebuilt_or_cleared_pool_refuses_every_earlier_key(f32, q4):
    pool = pool_of(q4)
    keys = pool.keys()
    bound = gdn.bind_q4(f32, pool, keys=keys)
    pool.rebuild({key.name: pool.resolve(key) for key in keys})  # the same names, the same shapes, the same arrays
    for refused in (lambda: gdn.bind_q4(f32, pool, keys=keys), lambda: pool.resolve(keys[0])):
        with pytest.raises(StalePoolError, match=r"in_proj_qkv.*generation"):
            refused()
    fresh = pool.keys()
    chex.assert_trees_all_equal(gdn.bind_q4(f32, pool, keys=fresh), bound)
    pool.clear()
    with pytest.raises(StalePoolError):
        gdn.bind_q4(f32, pool, keys=fresh)
    with pytest.raises(KeyError, match="holds nothing"):
        pool.key("L0.in_proj_qkv")
    chex.assert_trees_all_equal(bound, q4)  # weights bound before are values and stay valid


def test_a_key_of_another_pool_is_refused(f32, q4):
    with pytest.raises(StalePoolError):
        gdn.bind_q4(f32, pool_of(q4), keys=pool_of(q4).keys())


def test_a_mixture_of_fresh_and_stale_keys_is_refused(f32, q4):
    pool = pool_of(q4)
    stale = pool.keys()
    pool.rebuild({key.name: pool.resolve(key) for key in stale})
    with pytest.raises(StalePoolError):
        gdn.bind_q4(f32, pool, keys=(*pool.keys()[:2], stale[2]))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (0, 0, 2)])
def test_matrices_in_the_wrong_place_are_refused(f32, q4, order):
    """The three shapes differ pairwise, so exact shapes prove the wiring."""
    pool = pool_of(q4)
    keys = pool.keys()
    with pytest.raises(ValueError, match="must have shape"):
        gdn.bind_q4(f32, pool, keys=tuple(keys[i] for i in order))


def test_malformed_pools_and_bindings_are_refused_and_change_nothing(f32, q4):
    pool = pool_of(q4)
    keys, generation = pool.keys(), pool.generation
    qkv = q4.large.qkv
    stacked = jax.tree.map(lambda leaf: leaf[None], qkv)
    for bad, error in (
        ({"a": f32.large.qkv}, TypeError),
        ({3: qkv}, TypeError),
        ([("a", qkv)], TypeError),
        ({"a": stacked}, ValueError),
        ({"a": qkv.replace(scales=qkv.scales[:-1])}, ValueError),
        ({"a": qkv.replace(scales=qkv.scales.astype(jnp.float32))}, TypeError),
        ({"a": qkv.replace(codes=qkv.codes.astype(jnp.int32))}, TypeError),
    ):
        with pytest.raises(error):
            pool.rebuild(bad)
    assert (pool.generation, pool.keys()) == (generation, keys)
    for bad_keys, error in ((keys[:2], ValueError), ((*keys, keys[0]), ValueError), (("a", "b", "c"), TypeError)):
        with pytest.raises(error):
            gdn.bind_q4(f32, pool, keys=bad_keys)
    with pytest.raises(TypeError, match="pool must be a Q4Pool"):
        gdn.bind_q4(f32, {}, keys=keys)


def test_a_layer_of_half_a_tier_is_refused(f32, q4):
    x, state = inputs()[0], gdn.init_state(CFG, layers=1, batch=3)
    for half in (
        q4.replace(large=q4.large.replace(z=f32.large.z)),
        f32.replace(large=f32.large.replace(z=q4.large.z)),
    ):
        with pytest.raises(TypeError, match=r"weight large\.z"):
            gdn.step(half, state, x, cfg=CFG)
