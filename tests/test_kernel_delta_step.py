"""The delta-step kernels: float64, addressing, masks, refusals; interpreted, compiled without a GPU, and on one."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.delta import delta_step as xla_delta_step
from gdn_jax.evidence import metrics, oracle
from gdn_jax.limbs import group_digits, split_limbs
from gdn_jax.norms import QK_EPS
from pallas_kernels.delta_step import Tiles, delta_layer_step, delta_step, supported, tuning
from pallas_kernels.operands import next_power_of_two
from tests.support.cases import assert_same_bits, error
from tests.support.deviceless import compile_for_h200
from tests.support.tolerances import CASE_TAP, DELTA_STEP

# The notice of the backend's end comes with every lowering; the kernels are for as long as it lives.
EPS = 1e-6
LAYERS, LAYER = 3, 1
SMALL = (2, 6, 12, 20)
# G, H, K, V: ratio 1 to 4; 8 and 12 to 256; powers of two, multiples of four and neither.
GEOMETRIES = [(3, 3, 60, 20), (1, 3, 64, 100), (2, 8, 256, 8), (1, 2, 12, 256), (1, 3, 100, 128), (2, 2, 3, 1)]
ROWS = 3


class Operands(NamedTuple):
    """What one layer hands the kernels."""

    state: jax.Array  # [L, B, H, K, V]
    xcv: jax.Array  # [B, C]
    z: jax.Array  # [B, H, V]
    beta: jax.Array  # [B, H]
    g: jax.Array  # [B, H]
    weight: jax.Array  # [V]

    @property
    def key_heads(self):
        _, _, H, K, V = self.state.shape
        return (self.xcv.shape[1] - H * V) // (2 * K)

    def parts(self):
        """The raw q [B, G, K], k [B, G, K] and v [B, H, V] in xcv."""
        B, G, K = self.xcv.shape[0], self.key_heads, self.state.shape[3]
        q, k, v = np.split(np.asarray(self.xcv), [G * K, 2 * G * K], axis=1)
        return q.reshape(B, G, K), k.reshape(B, G, K), v.reshape(self.z.shape)

    def qkv(self):
        """q normalised and scaled, k normalised, and v, rounded to float32."""
        q, k, v = self.parts()
        q, k = exact_qk(q, k)
        return np.float32(q), np.float32(k), v


def operands(G, H, K, V, *, rows=ROWS, layers=LAYERS, seed=0):
    """Every layer and row different; g from no decay to a nearly full reset."""
    rng = np.random.default_rng(seed)
    arrays = (
        rng.standard_normal((layers, rows, H, K, V)) / 4,
        rng.standard_normal((rows, 2 * G * K + H * V)),
        rng.standard_normal((rows, H, V)),
        rng.uniform(0, 1, (rows, H)),
        -rng.exponential(1.0, (rows, H)),
        1 + rng.standard_normal(V) / 10,
    )
    return Operands(*(jnp.asarray(array, jnp.float32) for array in arrays))


def exact_qk(q, k):
    """Raw q and k [..., K] -> q normalised and scaled, k normalised, in float64."""
    return oracle.qk_normalise(q) * q.shape[-1] ** -0.5, oracle.qk_normalise(k)


def exactly(x, q, k, v):
    """o, the gated norm of o and the next S of layer `LAYER` in float64, for q and k as the delta rule takes them."""
    q, k = (np.repeat(heads, v.shape[1] // heads.shape[1], axis=1) for heads in (q, k))
    s, o = oracle.delta_step(x.state[LAYER], q, k, v, x.beta, x.g)
    return o, oracle.gated_rms_norm(o, x.weight, x.z, EPS), s


def exactly_from_raw(x):
    """The same with q and k normalised in float64."""
    q, k, v = x.parts()
    q, k = exact_qk(q, k)
    return exactly(x, q, k, v)


jitted_step = jax.jit(delta_step, static_argnames=("tiles", "interpret"))
jitted_layer_step = jax.jit(
    delta_layer_step,
    static_argnames=("key_heads", "qk_eps", "eps", "split", "limbs", "keep", "tiles", "interpret"),
)


def step(x, layer=LAYER, **options):
    """`delta_step` on what precedes it in float32."""
    return jitted_step(x.state, as_layer(layer), *x.qkv(), x.beta, x.g, **options)


def whole_layer_step(x, layer=LAYER, **options):
    """All that `delta_layer_step` leaves."""
    arrays = (x.state, as_layer(layer), x.xcv, x.z, x.beta, x.g, x.weight)
    return jitted_layer_step(*arrays, key_heads=x.key_heads, qk_eps=QK_EPS, eps=EPS, **options)


def layer_step(x, layer=LAYER, **options):
    """Its output and the next state."""
    left = whole_layer_step(x, layer, **options)
    return left.onn, left.state


@pytest.fixture(
    params=[pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
)
def interpret(request):
    return request.param


@pytest.fixture(params=[step, layer_step])
def run(request, interpret):
    """Either function, interpreted or compiled; it gives its results as numpy arrays."""
    return lambda *args, **options: jax.device_get(request.param(*args, interpret=interpret, **options))


def as_layer(layer):
    return jnp.array([layer], jnp.int32)


def assert_other_layers_untouched(state, before):
    assert_same_bits(np.delete(state, LAYER, axis=0), np.delete(before, LAYER, axis=0))


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_step_agrees_with_float64_and_with_xla(interpret, geometry):
    """F12, F27, row by row, no worse than the plain form; every output element is written, other layers are not."""
    x = operands(*geometry)
    o, state = jax.device_get(step(x, interpret=interpret))
    q, k, v = x.qkv()
    want, _, want_s = exactly(x, q, k, v)
    for row in range(ROWS):
        assert error(o[row], want[row]) <= DELTA_STEP
        assert error(state[LAYER, row], want_s[row]) <= DELTA_STEP
    plain_o, plain_s = jax.jit(xla_delta_step)(x.state[LAYER], q, k, v, x.beta, x.g)
    # Figures of a few elements are accidents of rounding, so no bound lies below half an ulp of the largest.
    for got, plain, exact in ((o, plain_o, want), (state[LAYER], plain_s, want_s)):
        assert metrics.rms_rel(got, exact) <= max(2 * metrics.rms_rel(plain, exact), 2.0**-24)
    assert_other_layers_untouched(state, x.state)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_layer_step_agrees_with_float64(interpret, geometry):
    """From raw q and k to the gated norm; here every second row rests as well."""
    x = operands(*geometry)
    active = np.arange(ROWS) % 2 == 0
    onn, state = jax.device_get(layer_step(x, active=active, interpret=interpret))
    _, want, want_s = exactly_from_raw(x)
    for row in (0, 2):
        assert error(onn[row], want[row]) <= CASE_TAP
        assert error(state[LAYER, row], want_s[row]) <= DELTA_STEP
    assert_same_bits(onn[1], np.zeros_like(onn[1]))
    assert_same_bits(state[:, 1], x.state[:, 1])
    assert_other_layers_untouched(state, x.state)


def test_tiles_do_not_change_the_result_beyond_rounding(run):
    """One block of columns, several with a ragged last one, and several that fit but for the power of two."""
    x = operands(*SMALL)
    want, want_s = run(x)
    for tiles in (Tiles(16, 2), Tiles(4, 1)):
        got, state = run(x, tiles=tiles)
        assert error(got, want) <= DELTA_STEP
        assert error(state, want_s) <= DELTA_STEP


THREE_LIMBS = {"split": functools.partial(group_digits, limbs=3), "limbs": 3}


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [None, Tiles(16, 2)], ids=["whole head", "less than a group"])
def test_the_output_comes_as_limbs(interpret, tiles):
    """The bits of splitting the output afterwards; V of three groups, so the last block of columns is ragged."""
    x = operands(1, 3, 12, 96)
    active = np.array([True, False, True])
    options = {"active": active, "tiles": tiles, "interpret": interpret, **THREE_LIMBS}
    left = whole_layer_step(x, keep=True, **options)
    digits, x_scales = split_limbs(left.onn.reshape(ROWS, 3 * 96))
    np.testing.assert_array_equal(left.digits, digits)
    assert_same_bits(left.x_scales, x_scales)
    alone = whole_layer_step(x, **options)
    assert (alone.onn, alone.on, alone.q, alone.k) == (None,) * 4
    np.testing.assert_array_equal(alone.digits, digits)
    assert_same_bits((alone.x_scales, alone.state), (x_scales, left.state))


def test_taps_are_the_stages_in_between(interpret):
    x = operands(*SMALL)
    left = jax.device_get(whole_layer_step(x, keep=True, interpret=interpret))
    q, k, _ = x.parts()
    q, k = exact_qk(q, k)
    on, onn, _ = exactly_from_raw(x)
    for got, want in ((left.q, q), (left.k, k), (left.on, on), (left.onn, onn)):
        assert error(got, want) <= CASE_TAP
    assert_same_bits((left.onn, left.state), layer_step(x, interpret=interpret))


def test_limbs_of_a_layer_out_of_range_are_nan(interpret):
    x = operands(1, 3, 12, 96)
    left = whole_layer_step(x, LAYERS, interpret=interpret, **THREE_LIMBS)
    assert np.isnan(left.x_scales).all()
    assert_same_bits(left.state, x.state)


def test_the_layer_of_the_norm_is_an_operand(interpret):
    """One out of range is the nearest."""
    x = operands(*SMALL)
    want = layer_step(x, interpret=interpret)
    stacked = x._replace(weight=jnp.full((3, *x.weight.shape), jnp.nan))
    for index, place in ((-1, 0), (0, 0), (1, 1), (2**31 - 1, 2)):
        named = stacked._replace(weight=stacked.weight.at[place].set(x.weight))
        assert_same_bits(layer_step(named, weight_layer=as_layer(index), interpret=interpret), want)


def test_q_and_k_near_zero_are_normalised_by_the_sum_of_squares(interpret):
    """F1: a key of 1e-3 e_0 becomes 0.70711 e_0 and is written as such; a key of zeros writes nothing."""
    x = operands(1, 1, 128, 4, rows=1, layers=2)
    tiny = jnp.zeros((1, 260)).at[0, 128].set(1e-3).at[0, 256:].set(1.0)
    x = x._replace(state=jnp.zeros_like(x.state), xcv=tiny, beta=jnp.ones((1, 1)), g=jnp.zeros((1, 1)))
    _, state = layer_step(x, interpret=interpret)
    np.testing.assert_allclose(state[LAYER, 0, 0, 0], np.full(4, 0.5**0.5), rtol=CASE_TAP)
    assert not np.any(state[LAYER, 0, 0, 1:])
    _, state = layer_step(x._replace(xcv=tiny.at[0, 128].set(0.0)), interpret=interpret)
    assert not np.any(state)


# -- limits of the rule ---------------------------------------------------------------------------------------------


def test_limits_of_the_gates(run):
    """F9: no write and no decay leave S bit-unchanged. F4: g of -1e38 or -inf leaves the new token only."""
    x = operands(*SMALL)
    _, state = run(x._replace(beta=0 * x.beta, g=0 * x.g))
    assert_same_bits(state, x.state)
    fresh = run(x._replace(state=0 * x.state, g=0 * x.g))
    for g in (-1e38, -np.inf):
        y, state = run(x._replace(g=jnp.full_like(x.g, g)))
        np.testing.assert_array_equal(y, fresh[0])
        np.testing.assert_array_equal(state[LAYER], fresh[1][LAYER])


def test_a_nan_stays_in_its_row(run):
    """F11: in any operand of one row; the other rows keep their bits. Rows are isolated by value, too."""
    x = operands(*SMALL)
    good = run(x)
    for operand in ("state", "xcv", "beta", "g"):
        array = getattr(x, operand)
        row = (slice(None), 1) if operand == "state" else 1
        for value in (jnp.nan, 3.0):
            y, state = run(x._replace(**{operand: array.at[row].set(value)}))
            assert_same_bits((y[::2], state[:, ::2]), (good[0][::2], good[1][:, ::2]))
            assert np.isnan(y[1]).all() == np.isnan(value)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32])
def test_an_inactive_row_rests(run, dtype):
    """F25: output 0 and an untouched state, even full of NaN; active rows have the bits of an unmasked run."""
    x = operands(*SMALL)
    want = run(x)
    poisoned = x._replace(state=x.state.at[:, 1].set(jnp.nan), xcv=x.xcv.at[1].set(jnp.nan))
    y, state = run(poisoned, active=jnp.array([1, 0, 1], dtype))
    assert_same_bits((y[::2], state[:, ::2]), (want[0][::2], want[1][:, ::2]))
    assert_same_bits(y[1], np.zeros_like(y[1]))
    assert_same_bits(state[:, 1], poisoned.state[:, 1])


def test_every_layer_is_addressed_and_none_beyond(run):
    """The same S in any layer gives the same bits; a layer that does not exist gives NaN and leaves the state alone."""
    x = operands(*SMALL)
    want, state = run(x)
    for layer in range(LAYERS):
        moved = x._replace(state=x.state.at[layer].set(x.state[LAYER]))
        y, after = run(moved, layer)
        assert_same_bits(y, want)
        assert_same_bits(after, moved.state.at[layer].set(state[LAYER]))
    for layer in (-1, -2, LAYERS, 2**31 - 1):
        y, after = run(x, layer)
        assert np.isnan(y).all()
        assert_same_bits(after, x.state)


def test_the_same_program_gives_the_same_bits(run):
    """F58; F30: identical rows have one answer."""
    x = operands(*SMALL)
    repeated = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), x)
    x = repeated._replace(state=jnp.broadcast_to(x.state[:, :1], x.state.shape), weight=x.weight)
    y, state = run(x)
    assert_same_bits(run(x), (y, state))
    for row in range(1, ROWS):
        assert_same_bits((y[row], state[:, row]), (y[0], state[:, 0]))


def test_vmap_is_another_axis_of_rows(interpret):
    """F57."""
    xs = [operands(*SMALL, seed=seed) for seed in range(2)]
    y, state = jax.vmap(functools.partial(layer_step, interpret=interpret))(jax.tree.map(lambda *x: jnp.stack(x), *xs))
    for i, x in enumerate(xs):
        assert_same_bits((y[i], state[i]), layer_step(x, interpret=interpret))


# -- refusals -------------------------------------------------------------------------------------------------------


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes(G=2, H=6, K=12, V=20, B=2, L=3):
    """The shapes of both functions' operands by name."""
    return {
        "state": struct(L, B, H, K, V),
        "layer": struct(1, dtype=jnp.int32),
        "q": struct(B, G, K),
        "k": struct(B, G, K),
        "v": struct(B, H, V),
        "beta": struct(B, H),
        "g": struct(B, H),
        "xcv": struct(B, 2 * G * K + H * V),
        "z": struct(B, H, V),
        "norm_weight": struct(V),
    }


STEP_NAMES = ("state", "layer", "q", "k", "v", "beta", "g")
LAYER_NAMES = ("state", "layer", "xcv", "z", "beta", "g", "norm_weight")


def trace_step(tiles=None, active=None, **changed):
    given = shapes() | changed
    call = functools.partial(delta_step, active=active, tiles=tiles, interpret=True)
    return jax.eval_shape(call, *(given[n] for n in STEP_NAMES))


def trace_layer_step(tiles=None, active=None, key_heads=2, split=None, limbs=0, **changed):
    given = shapes() | changed
    options = {"active": active, "split": split, "limbs": limbs, "tiles": tiles, "interpret": True}

    def run(*arrays):
        left = delta_layer_step(*arrays, key_heads=key_heads, qk_eps=QK_EPS, eps=EPS, **options)
        return left.onn, left.state

    return jax.eval_shape(run, *(given[n] for n in LAYER_NAMES))


def test_shapes_out():
    given = shapes()
    for trace in (trace_step, trace_layer_step):
        y, state = trace()
        assert (y.shape, y.dtype) == (given["v"].shape, jnp.float32)
        assert (state.shape, state.dtype) == (given["state"].shape, jnp.float32)


@pytest.mark.parametrize("trace", [trace_step, trace_layer_step])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": struct(dtype=jnp.int32)}, r"layer must have shape \[1\] .*got \[\]"),
        ({"beta": struct(2, 5)}, r"beta must have shape \[2, 6\] .*got \[2, 5\]"),
        ({"g": struct(6)}, r"g must have shape \[2, 6\]"),
        ({"active": np.ones(3, bool)}, r"active must have shape \[2\]"),
        ({"tiles": Tiles(24, 1)}, "block_v must be a power of two of at most 32, got 24"),
        ({"tiles": Tiles(64, 1)}, "block_v must be a power of two of at most 32, got 64"),
        ({"tiles": Tiles(32, 0)}, "warps must be a power of two of at most 32, got 0"),
    ],
)
def test_shapes_that_do_not_fit(trace, changed, message):
    with pytest.raises(ValueError, match=message):
        trace(**changed)


@pytest.mark.parametrize(
    ("trace", "changed", "message"),
    [
        (trace_step, {"q": struct(2, 4, 12)}, r"multiple of key heads.*H = 6 with q of shape \[2, 4, 12\]"),
        (trace_step, {"q": struct(2, 12)}, r"multiple of key heads.*q of shape \[2, 12\]"),
        (trace_step, {"q": struct(2, 2, 20)}, r"q must have shape"),
        (trace_step, {"k": struct(2, 3, 12)}, r"k must have shape \[2, 2, 12\]"),
        (trace_step, {"v": struct(2, 6, 12)}, r"v must have shape \[2, 6, 20\]"),
        (trace_layer_step, {"key_heads": 0}, "key_heads=0"),
        (trace_layer_step, {"key_heads": 4}, "key_heads=4"),
        (trace_layer_step, {"xcv": struct(2, 167)}, r"xcv must have shape \[2, 168\]"),
        (trace_layer_step, {"z": struct(2, 120)}, r"z must have shape \[2, 6, 20\]"),
        (trace_layer_step, {"norm_weight": struct(12)}, r"norm_weight must have shape \[20\]"),
    ],
)
def test_operands_that_do_not_fit(trace, changed, message):
    with pytest.raises(ValueError, match=message):
        trace(**changed)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (struct(3, 2, 6, 12, 20), None),
        (struct(48, 57, 48, 256, 256), None),
        (struct(2, 6, 12, 20), r"must have the axes \[L, B, H, K, V\], got shape \[2, 6, 12, 20\]"),
        (struct(3, 2, 6, 12, 20, dtype=jnp.bfloat16), "must be float32, got bfloat16"),
        (struct(3, 0, 6, 12, 20), "every axis .* at least 1"),
        (struct(1, 1, 1, 257, 20), "at most 256, got K = 257, V = 20"),
        (struct(1, 2**20, 48, 128, 128), r"B·H·V must be at most 2147483647"),
    ],
)
def test_supported_says_why_not(state, reason):
    if reason is None:
        assert supported(state, interpret=True) is None
        return
    assert re.search(reason, supported(state, interpret=True) or "")
    for trace in (trace_step, trace_layer_step):
        with pytest.raises(NotImplementedError, match=f"{reason}.*use the XLA implementation"):
            trace(state=state)


@pytest.mark.parametrize(
    ("trace", "changed"),
    [
        (trace_step, {"layer": struct(1, dtype=jnp.uint32)}),
        (trace_step, {"v": struct(2, 6, 20, dtype=jnp.bfloat16)}),
        (trace_layer_step, {"z": struct(2, 6, 20, dtype=jnp.float16)}),
        (trace_layer_step, {"active": np.ones(2, np.float32)}),
    ],
)
def test_dtypes_that_the_kernels_do_not_take(trace, changed):
    with pytest.raises(NotImplementedError, match=f"{next(iter(changed))} must be .*use the XLA implementation"):
        trace(**changed)


def test_limbs_need_whole_groups_of_columns():
    with pytest.raises(NotImplementedError, match="V to be a multiple of 32, got V = 20"):
        trace_layer_step(**THREE_LIMBS)


def test_there_is_no_derivative():
    x = operands(*SMALL)
    with pytest.raises(NotImplementedError):
        jax.grad(lambda g: jnp.sum(step(x._replace(g=g), interpret=True)[0]))(x.g)


# -- tiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["delta_step", "delta_layer_step"])
def test_the_rule_keeps_a_lane_within_its_registers(kernel):
    for key_dim in range(1, 257):
        for value_dim in range(1, 257):
            block_v, warps = tuning.choose_tiles(kernel, "no such device", key_dim, value_dim, 48)
            keys = next_power_of_two(key_dim)
            assert key_dim <= keys < 2 * key_dim
            assert block_v & (block_v - 1) == 0
            assert 1 <= block_v < 2 * value_dim
            assert warps in (1, 2, 4, 8)
            assert keys * block_v <= 64 * 32 * warps


def test_a_measured_row_goes_before_the_rule(monkeypatch):
    def row(heads, tiles, device="card"):
        return tuning.Measured("delta_step", device, 128, 128, heads, tiles, "experiments/…")

    rows = (row(384, Tiles(16, 1)), row(48, Tiles(16, 2)), row(48, Tiles(16, 4), "other"))
    monkeypatch.setattr(tuning, "MEASURED", rows)
    rule = tuning.choose_tiles("delta_step", "no such device", 128, 128, 48)
    found = [tuning.choose_tiles("delta_step", "card", 128, 128, heads) for heads in (16, 48, 383, 384, 9999)]
    assert found == [rule, Tiles(16, 2), Tiles(16, 2), Tiles(16, 1), Tiles(16, 1)]
    assert tuning.choose_tiles("delta_step", "card", 128, 64, 48) != Tiles(16, 2)


# -- compiled for a GPU, without one --------------------------------------------------------------------------------

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def compile_step(tiles=None, options=NO_SPILLS, **sizes):
    """`delta_step` alone, its state donated."""
    given = shapes(**sizes)
    program = jax.jit(lambda *arrays: delta_step(*arrays, tiles=tiles), donate_argnums=0, compiler_options=options)
    return compile_for_h200(program, *(given[name] for name in STEP_NAMES))


def compile_layer_step(tiles=None, options=NO_SPILLS, output=None, **sizes):
    """`delta_layer_step` alone, its state donated; `output`: the options that say in what form its output comes."""
    given = shapes(**sizes)
    fixed = {"key_heads": sizes["G"], "qk_eps": QK_EPS, "eps": EPS, "tiles": tiles, **(output or {})}
    program = jax.jit(functools.partial(delta_layer_step, **fixed), donate_argnums=0, compiler_options=options)
    return compile_for_h200(program, *(given[name] for name in LAYER_NAMES))


def assert_in_place(program, state_bytes, temp_bytes):
    """All of the state aliased, nothing of its size copied or kept."""
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == state_bytes
    assert memory.temp_size_in_bytes <= temp_bytes
    copies = re.findall(r"= f32\[\d+,\d+,\d+,\d+,\d+\]\S* (?:copy|copy-start|fusion|dynamic-\S+)\(", program.as_text())
    assert copies == []


BIG = {"G": 16, "H": 48, "K": 128, "V": 128}


@pytest.mark.deviceless
@pytest.mark.parametrize("compile_kernel", [compile_step, compile_layer_step])
@pytest.mark.parametrize(("L", "B"), [(48, 1), (2, 64)])
def test_one_launch_keeps_the_27b_state_in_place(compile_kernel, L, B):
    """F55."""
    program = compile_kernel(L=L, B=B, **BIG)
    assert_in_place(program, 4 * L * B * 48 * 128 * 128, temp_bytes=0)


@pytest.mark.deviceless
@pytest.mark.parametrize(("L", "B", "keep"), [(48, 1, False), (48, 1, True), (2, 64, False)])
def test_with_limbs_the_27b_state_stays_in_place(L, B, keep):
    output = {"keep": keep, **THREE_LIMBS}
    program = compile_layer_step(L=L, B=B, output=output, **BIG)
    assert_in_place(program, 4 * L * B * 48 * 128 * 128, temp_bytes=128)  # the table of outputs
    assert program.as_text().count(" custom-call(") == 1


@pytest.mark.deviceless
@pytest.mark.parametrize("compile_kernel", [compile_step, compile_layer_step])
@pytest.mark.parametrize(("K", "V"), [(60, 20), (100, 60), (12, 100), (256, 256), (8, 256), (256, 8)])
def test_every_head_size_compiles_without_spills(compile_kernel, K, V):
    compile_kernel(K=K, V=V, G=2, H=6)


@pytest.mark.deviceless
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32])
def test_masked_rows_and_vmap_compile(dtype):
    given = shapes()
    arrays = [struct(5, *given[name].shape, dtype=given[name].dtype) for name in STEP_NAMES]
    mapped = jax.vmap(lambda *a: delta_step(*a[:-1], active=a[-1]))
    program = compile_for_h200(
        jax.jit(mapped, donate_argnums=0, compiler_options=NO_SPILLS), *arrays, struct(5, 2, dtype=dtype)
    )
    assert_in_place(program, 4 * arrays[0].size, temp_bytes=0)


@pytest.mark.deviceless
@pytest.mark.parametrize("row", tuning.MEASURED)
def test_every_measured_configuration_compiles_without_spills(row):
    compile_kernel = {"delta_step": compile_step, "delta_layer_step": compile_layer_step}[row.kernel]
    compile_kernel(K=row.key_dim, V=row.value_dim, G=1, H=3, tiles=row.tiles)


@pytest.mark.deviceless
def test_the_check_for_spills_finds_some():
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_step(K=128, V=128, G=1, H=3, tiles=Tiles(128, 1))


def decode(state, xcv, z, beta, g, weight, *, unroll):
    """Five tokens through all layers, the state and the layer index carried; each layer's input depends on the last."""

    def layer(carry, _):
        state, index, z = carry
        left = delta_layer_step(state, index, xcv, z, beta, g, weight, key_heads=BIG["G"], qk_eps=QK_EPS, eps=EPS)
        return (left.state, index + 1, z + left.onn), None

    def token(carry, _):
        state, z = carry
        first = jnp.zeros(1, jnp.int32)
        (state, _, z), _ = jax.lax.scan(layer, (state, first, z), length=state.shape[0], unroll=unroll)
        return (state, z), z

    return jax.lax.scan(token, (state, z), length=5)


@pytest.mark.deviceless
@pytest.mark.parametrize(("L", "unroll"), [(48, 1), (8, 8)])
def test_loops_over_layers_and_tokens_copy_nothing(L, unroll, tmp_path):
    """Beside the state only a token's activations; layers unrolled within a token form one command buffer."""
    given = shapes(L=L, B=1, **BIG)
    program = jax.jit(
        decode,
        static_argnames="unroll",
        donate_argnums=0,
        compiler_options=NO_SPILLS | {"xla_dump_to": str(tmp_path)},
    )
    arrays = (given[name] for name in ("state", "xcv", "z", "beta", "g", "norm_weight"))
    assert_in_place(
        compile_for_h200(program, *arrays, unroll=unroll), 4 * L * 48 * 128 * 128, temp_bytes=4 * 48 * 128 * 4
    )
    if unroll == L:
        [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
        before, captured = thunks.read_text().split("kCommandBuffer")
        assert "delta_layer_step" not in before
        assert captured.count("delta_layer_step") == L


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("run", [step, layer_step])
def test_offsets_beyond_two_to_the_31_elements(run):
    """F28: 48 layers of 57 rows at H = 48, K = V = 128 hold 2,151,677,952 elements of S.

    The last layer's last rows lie beyond 2^31: they must get the bits that layer 0 gets from the same S, agree with
    float64, and leave all other layers at zero.
    """
    layers, rows = 48, 57
    x = operands(**BIG, rows=rows, layers=LAYER + 1)
    place = jax.jit(lambda state, part, at: jax.lax.dynamic_update_index_in_dim(state, part, at, 0), donate_argnums=0)
    state = jnp.zeros((layers, *x.state.shape[1:]), jnp.float32)
    assert state.size > 2**31
    outputs = {}
    for layer in (layers - 1, 0):
        state = place(state, x.state[LAYER], layer)
        outputs[layer], state = run(x._replace(state=state), layer)
    assert_same_bits(outputs[layers - 1], outputs[0])
    assert_same_bits(state[-1], state[0])
    assert not jnp.any(state[1:-1] != 0)
    o, onn, s = exactly_from_raw(x)
    want, tolerance = (o, DELTA_STEP) if run is step else (onn, CASE_TAP)
    for row in (0, rows - 1):
        assert error(outputs[layers - 1][row], want[row]) <= tolerance
        assert error(state[-1, row], s[row]) <= DELTA_STEP


@pytest.mark.gpu
@pytest.mark.parametrize("run", [step, layer_step])
@pytest.mark.parametrize("geometry", [(16, 48, 128, 128), (2, 6, 60, 20), (1, 3, 100, 60)])
def test_outputs_are_written_over_memory_full_of_nan(run, geometry):
    """F10: outputs are placed where freed arrays of NaN were; what goes unwritten shows."""
    x = operands(*geometry)
    want = run(x)
    for _ in range(8):
        poison = [jnp.full_like(leaf, jnp.nan) for leaf in want for _ in range(4)]
        jax.block_until_ready(poison)
        for leaf in poison:
            leaf.delete()
        assert_same_bits(run(x), want)
