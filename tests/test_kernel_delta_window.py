"""The delta-window kernels: float64, the single step's bits, lengths, refusals; interpreted, compiled, and on a GPU."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from gdn_jax.conv import conv_step
from gdn_jax.delta import delta_step
from gdn_jax.evidence import metrics, oracle
from gdn_jax.limbs import group_digits, split_limbs
from gdn_jax.norms import QK_EPS, gated_rms_norm, l2_normalise
from pallas_kernels.delta_step import delta_layer_step
from pallas_kernels.delta_step import tuning as step_tuning
from pallas_kernels.delta_window import Kept, Tiles, delta_window_fold, delta_window_look, supported, tuning
from pallas_kernels.operands import next_power_of_two
from pallas_kernels.project_in.kernel import convolve
from tests.support.cases import assert_same_bits, error
from tests.support.deviceless import compile_for_h200
from tests.support.tolerances import CASE_TAP, DELTA_STEP

# The notice of the backend's end comes with every lowering; the kernels are for as long as it lives.
EPS = 1e-6
LAYERS, LAYER = 3, 1


class Geometry(NamedTuple):
    """Key and value heads, their sizes, the convolution's width; rows and tokens of the window."""

    G: int
    H: int
    K: int
    V: int
    W: int
    B: int
    T: int


SMALL = Geometry(2, 6, 12, 20, 4, B=3, T=5)
GROUPS = Geometry(1, 2, 8, 96, 2, B=3, T=4)
LENGTHS = {3: (5, 0, 2), 1: (99,)}  # by rows; beyond the window counts as all of it
GEOMETRIES = [
    SMALL,
    Geometry(3, 3, 60, 20, 2, B=1, T=8),
    Geometry(1, 3, 64, 100, 1, B=1, T=4),
    Geometry(2, 2, 3, 1, 7, B=3, T=1),
]
BLOCKS = Tiles(8, 1)
"""Less than a head, and the last block is ragged: the norm has a launch of its own."""
SHAPES = {"whole heads": None, "blocks of columns": BLOCKS}


class Operands(NamedTuple):
    """A state, a window of all layers, and weights of all layers."""

    state: jax.Array  # [L, B, H, K, V]
    history: jax.Array  # [L, B, W-1, C]
    xc: jax.Array  # [L, T, B, C]
    z: jax.Array  # [L, T, B, H, V]
    beta: jax.Array  # [L, T, B, H]
    g: jax.Array  # [L, T, B, H]
    conv: jax.Array  # [L, C, W]
    norm: jax.Array  # [L, V]

    @property
    def key_heads(self):
        _, _, H, K, V = self.state.shape
        return (self.xc.shape[-1] - H * V) // (2 * K)


@functools.cache
def operands(geometry, layers=LAYERS, seed=0):
    """Every layer, token and row different; g from no decay to a nearly full reset."""
    G, H, K, V, W, B, T = geometry
    rng = np.random.default_rng(seed)
    C = 2 * G * K + H * V
    arrays = (
        rng.standard_normal((layers, B, H, K, V)) / 4,
        rng.standard_normal((layers, B, W - 1, C)),
        rng.standard_normal((layers, T, B, C)),
        rng.standard_normal((layers, T, B, H, V)),
        rng.uniform(0, 1, (layers, T, B, H)),
        -rng.exponential(1.0, (layers, T, B, H)),
        rng.standard_normal((layers, C, W)) / W**0.5,
        1 + rng.standard_normal((layers, V)) / 10,
    )
    return Operands(*(jnp.asarray(array, jnp.float32) for array in arrays))


def lengths_of(geometry):
    return jnp.array(LENGTHS[geometry.B], jnp.int32)


def kept(geometry):
    """The same, within the window."""
    return np.clip(LENGTHS[geometry.B], 0, geometry.T)


def as_layer(layer):
    return jnp.array([layer], jnp.int32)


jitted_look = jax.jit(
    delta_window_look, static_argnames=("key_heads", "qk_eps", "eps", "split", "limbs", "tiles", "interpret")
)
jitted_fold = jax.jit(delta_window_fold, static_argnames=("key_heads", "qk_eps", "tiles", "interpret"))


def whole_look(x, lengths, layer=LAYER, weight_layer=LAYER, look=jitted_look, **options):
    """All that a look at `LAYER`'s window gives."""
    window = (x.xc[LAYER], x.conv, x.z[LAYER], x.beta[LAYER], x.g[LAYER], x.norm)
    options |= {"weight_layer": as_layer(weight_layer), "key_heads": x.key_heads, "qk_eps": QK_EPS, "eps": EPS}
    return look(x.state, x.history, as_layer(layer), *window, lengths=lengths, **options)


def run_look(x, lengths, **options):
    return np.asarray(whole_look(x, lengths, **options).onn)


def run_fold(x, counts, fold=jitted_fold, **options):
    arrays = (x.state, x.history, x.xc, x.conv, x.beta, x.g, jnp.asarray(counts, jnp.int32))
    return jax.device_get(fold(*arrays, key_heads=x.key_heads, qk_eps=QK_EPS, **options))


@pytest.fixture(
    params=[pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
)
def interpret(request):
    return request.param


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def how(request, interpret):
    """Either shape of the programs, interpreted or compiled."""
    return {"tiles": request.param, "interpret": interpret}


# -- references -----------------------------------------------------------------------------------------------------


def exactly(x, layer, row, tokens):
    """Outputs [t, H, V] and final S of one row of one layer, in float64."""
    _, _, H, K, V = x.state.shape
    G = x.key_heads
    s, frames = np.float64(x.state[layer, row]), np.float64(x.history[layer, row])
    outputs = []
    for t in range(tokens):
        window = np.concatenate([frames, np.float64(x.xc[layer, t, row])[None]])
        xcv, frames = oracle.conv_step(window, x.conv[layer]), window[1:]
        q, k, v = np.split(xcv, [G * K, 2 * G * K])
        q, k = (np.repeat(oracle.qk_normalise(part.reshape(G, K)), H // G, axis=0) for part in (q, k))
        s, o = oracle.delta_step(s, q * K**-0.5, k, v.reshape(H, V), x.beta[layer, t, row], x.g[layer, t, row])
        outputs.append(oracle.gated_rms_norm(o, x.norm[layer], x.z[layer, t, row], EPS))
    return np.array(outputs), s


def next_history(x, counts):
    """The last W-1 frames of [history, what is kept of xc], layer by layer and row by row."""
    rows = [
        jnp.concatenate([x.history[:, row], x.xc[:, :count, row]], axis=1)[:, count:]
        for row, count in enumerate(counts)
    ]
    return jnp.stack(rows, axis=1)


@jax.jit
def plain_token(s, history, xc, conv, z, beta, g, norm):
    """One token of a layer in plain XLA: its output, S and history."""
    B, H, K, V = s.shape
    xcv, history = conv_step(history, xc, conv)
    keys = (xcv.shape[1] - H * V) // 2
    q, k = (l2_normalise(part.reshape(B, -1, K)) for part in (xcv[:, :keys], xcv[:, keys : 2 * keys]))
    o, s = delta_step(s, q * jnp.float32(K**-0.5), k, xcv[:, 2 * keys :].reshape(B, H, V), beta, g)
    return gated_rms_norm(o, norm, z, EPS), s, history


def plainly(x, layer, tokens):
    """Outputs [T, B, H, V] and final S of a layer, token by token in plain XLA."""
    s, history, outputs = x.state[layer], x.history[layer], []
    for t in range(tokens):
        of_token = (x.xc[layer, t], x.conv[layer], x.z[layer, t], x.beta[layer, t], x.g[layer, t], x.norm[layer])
        y, s, history = plain_token(s, history, *of_token)
        outputs.append(y)
    return np.stack(outputs), np.asarray(s)


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_look_agrees_with_float64_and_changes_nothing(interpret, geometry):
    x = operands(geometry)
    y = run_look(x, lengths_of(geometry), interpret=interpret)
    for row, length in enumerate(kept(geometry)):
        want, _ = exactly(x, LAYER, row, length)
        for t in range(length):
            assert error(y[t, row], want[t]) <= CASE_TAP
        assert_same_bits(y[length:, row], np.zeros_like(y[length:, row]))


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_fold_agrees_with_float64_in_every_layer(interpret, geometry):
    """F21, F31, F34: rows keep all, none, and some; the history is the last of what there is, its bits unchanged."""
    x = operands(geometry)
    state, history = run_fold(x, lengths_of(geometry), interpret=interpret)
    counts = kept(geometry)
    assert_same_bits(history, next_history(x, counts))
    for row, count in enumerate(counts):
        for layer in range(LAYERS):
            if count:
                assert error(state[layer, row], exactly(x, layer, row, count)[1]) <= DELTA_STEP
            else:
                assert_same_bits(state[layer, row], x.state[layer, row])


def test_blocks_of_columns_agree_with_float64(interpret):
    x = operands(SMALL)
    y = run_look(x, lengths_of(SMALL), tiles=BLOCKS, interpret=interpret)
    state, history = run_fold(x, lengths_of(SMALL), tiles=BLOCKS, interpret=interpret)
    for row, length in enumerate(kept(SMALL)):
        want, want_s = exactly(x, LAYER, row, length)
        for t in range(length):
            assert error(y[t, row], want[t]) <= CASE_TAP
        assert error(state[LAYER, row], want_s) <= DELTA_STEP
    assert_same_bits(history, next_history(x, kept(SMALL)))


def test_it_is_no_worse_than_the_plain_form(interpret):
    x = operands(SMALL)
    everything = jnp.full(SMALL.B, SMALL.T, jnp.int32)
    exact = [exactly(x, LAYER, row, SMALL.T) for row in range(SMALL.B)]
    exact_y, exact_s = np.stack([y for y, _ in exact], axis=1), np.stack([s for _, s in exact])
    plain_y, plain_s = plainly(x, LAYER, SMALL.T)
    y, (state, _) = run_look(x, everything, interpret=interpret), run_fold(x, everything, interpret=interpret)
    for got, plain, want in ((y, plain_y, exact_y), (state[LAYER], plain_s, exact_s)):
        assert metrics.rms_rel(got, want) <= 2 * metrics.rms_rel(plain, want)


def convolved(history, xc, weight, *, interpret):
    """[B, W-1, C], [B, C], [C, W] -> [B, C]: the convolution as `project_in` carries it out."""
    frames = [*jnp.moveaxis(history, 1, 0), xc]
    taps = [jnp.broadcast_to(weight[:, j], xc.shape) for j in range(weight.shape[1])]
    size = next_power_of_two(xc.size)
    flat = [jnp.pad(array.reshape(-1), (0, size - xc.size)) for array in (*frames, *taps)]

    def body(*refs):
        values = [ref[...] for ref in refs[:-1]]
        refs[-1][...] = convolve(values[: len(frames)], values[len(frames) :])

    out = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((size,), jnp.float32), interpret=interpret)(*flat)
    return out[: xc.size].reshape(xc.shape)


@pytest.mark.slow
def test_a_window_has_the_bits_of_single_steps(interpret):
    """F36: the outputs of a look, and S after a fold, are those of as many `delta_layer_step`s.

    Interpreted, the compiler must not contract or reorder across operations, which it does differently in every
    program: fusion is off.
    """
    options = {"compiler_options": {"xla_disable_hlo_passes": "fusion"}} if interpret else {}
    static = ("key_heads", "qk_eps", "eps", "interpret")
    look, step = (jax.jit(each, static_argnames=static, **options) for each in (delta_window_look, delta_layer_step))
    fold = jax.jit(delta_window_fold, static_argnames=("key_heads", "qk_eps", "interpret"), **options)
    conv = jax.jit(convolved, static_argnames="interpret", **options)
    x = operands(SMALL)
    lengths = lengths_of(SMALL)
    y = whole_look(x, lengths, look=look, interpret=interpret).onn
    state, _ = run_fold(x, lengths, fold=fold, interpret=interpret)
    left, history = x.state, x.history[LAYER]
    for t in range(SMALL.T):
        xcv = conv(history, x.xc[LAYER, t], x.conv[LAYER], interpret=interpret)
        history = jnp.concatenate([history, x.xc[LAYER, t][:, None]], axis=1)[:, 1:]
        left = step(
            *(left, as_layer(LAYER), xcv, x.z[LAYER, t], x.beta[LAYER, t], x.g[LAYER, t], x.norm),
            weight_layer=as_layer(LAYER),
            active=t < lengths,
            key_heads=x.key_heads,
            qk_eps=QK_EPS,
            eps=EPS,
            interpret=interpret,
        )
        assert_same_bits(y[t], left.onn)
        left = left.state
    assert_same_bits(state[LAYER], left[LAYER])


def test_a_fold_in_two_parts_is_the_same_fold(interpret):
    """F33, and F35 for what is not folded: two tokens, then the other three, from a window that begins there."""
    x = operands(SMALL)
    state, history = run_fold(x, [2, 2, 2], interpret=interpret)
    rest = {name: jnp.roll(getattr(x, name), -2, axis=1) for name in ("xc", "beta", "g")}
    parts = run_fold(x._replace(state=state, history=history, **rest), [3, 0, 1], interpret=interpret)
    assert_same_bits(parts, run_fold(x, [5, 2, 3], interpret=interpret))


THREE_LIMBS = {"split": functools.partial(group_digits, limbs=3), "limbs": 3}


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [None, Tiles(16, 2)], ids=SHAPES)
def test_the_output_comes_as_limbs(interpret, tiles):
    """The bits of splitting the output afterwards, rows time-first; V of three groups."""
    x = operands(GROUPS)
    options = {"tiles": tiles, "interpret": interpret}
    onn = whole_look(x, lengths_of(GROUPS), **options).onn
    digits, x_scales = split_limbs(onn.reshape(-1, 2 * 96))
    made = whole_look(x, lengths_of(GROUPS), **options, **THREE_LIMBS)
    assert made.onn is None
    np.testing.assert_array_equal(made.digits, digits)
    assert_same_bits(made.x_scales, x_scales)
    lost = whole_look(x, lengths_of(GROUPS), LAYERS, **options, **THREE_LIMBS)
    assert np.isnan(lost.x_scales).all()


# -- what leaves no trace -------------------------------------------------------------------------------------------


def poisoned(x, lengths):
    """NaN in every token past its row's length, in all of a row without tokens, and in the other layers' state."""
    dead = jnp.arange(x.xc.shape[1])[:, None] >= jnp.asarray(lengths)[None]

    def spoil(array, mask):
        return jnp.where(mask.reshape(*mask.shape, *(1,) * (array.ndim - mask.ndim)), jnp.nan, array)

    tokens = {name: spoil(getattr(x, name), jnp.stack([dead] * LAYERS)) for name in ("xc", "z", "beta", "g")}
    rows = {name: spoil(getattr(x, name), jnp.stack([dead[0]] * LAYERS)) for name in ("state", "history")}
    return x._replace(**tokens, **rows)


def test_tokens_past_the_length_leave_no_trace(how):
    """F15, F25."""
    x, lengths = operands(SMALL), lengths_of(SMALL)
    bad = poisoned(x, LENGTHS[3])
    y, (state, history) = run_look(x, lengths, **how), run_fold(x, lengths, **how)
    assert_same_bits(run_look(bad, lengths, **how), y)
    after, frames = run_fold(bad, lengths, **how)
    assert_same_bits((after[:, ::2], frames[:, ::2]), (state[:, ::2], history[:, ::2]))
    assert_same_bits((after[:, 1], frames[:, 1]), (bad.state[:, 1], bad.history[:, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [SMALL, Geometry(1, 3, 64, 100, 1, B=1, T=4)], ids=str)
@pytest.mark.parametrize("layer", [LAYER, -1, LAYERS])
def test_what_a_fold_needs_is_kept_in_place(how, geometry, layer):
    """The layer's tokens up to the lengths, bit for bit; all else of the window, and the outputs, stay as they are."""
    x, lengths = operands(geometry), lengths_of(geometry)
    before = Kept(*(jnp.full_like(array, 7) for array in (x.xc, x.beta, x.g)))
    made = whole_look(x, lengths, layer=layer, kept=before, **how)
    assert_same_bits(made.onn, whole_look(x, lengths, layer=layer, **how).onn)
    given = np.arange(geometry.T)[:, None] < np.asarray(lengths)
    given = given & (np.arange(LAYERS) == layer)[:, None, None]
    for got, array, old in zip(made.kept, (x.xc, x.beta, x.g), before, strict=True):
        assert_same_bits(got, np.where(given[..., None], array, old))


def test_lengths_are_clipped(how):
    x, T = operands(SMALL), SMALL.T
    for given, meant in (((-1, T + 1, 2**31 - 1), (0, T, T)), ((-(2**31), 1, 0), (0, 1, 0))):
        given, meant = jnp.array(given, jnp.int32), jnp.array(meant, jnp.int32)
        assert_same_bits(run_look(x, given, **how), run_look(x, meant, **how))
        assert_same_bits(run_fold(x, given, **how), run_fold(x, meant, **how))
    assert_same_bits(run_fold(x, jnp.zeros(3, jnp.int32), **how), (x.state, x.history))


def test_without_lengths_all_tokens_count(interpret):
    x = operands(SMALL)
    assert_same_bits(
        run_look(x, None, interpret=interpret), run_look(x, jnp.full(3, 5, jnp.int32), interpret=interpret)
    )


def test_a_nan_stays_in_its_row_and_layer(how):
    """F11: in any operand of one row, and in any layer that is not looked at."""
    x, everything = operands(SMALL), jnp.full(3, 5, jnp.int32)
    y, (state, history) = run_look(x, everything, **how), run_fold(x, everything, **how)
    for name in ("state", "history", "xc", "z", "beta", "g"):
        array = getattr(x, name)
        rows = (slice(None), slice(None), 1) if name not in ("state", "history") else (slice(None), 1)
        bad = x._replace(**{name: array.at[rows].set(jnp.nan)})
        got = run_look(bad, everything, **how)
        assert_same_bits(got[:, ::2], y[:, ::2])
        assert np.isnan(got[0, 1]).all()
        other = x._replace(**{name: array.at[np.array([0, 2])].set(jnp.nan)})
        assert_same_bits(run_look(other, everything, **how), y)
        after, frames = run_fold(other, everything, **how)
        assert_same_bits((after[LAYER], frames[LAYER]), (state[LAYER], history[LAYER]))


def test_layers_are_addressed_and_none_beyond(how):
    """The layer of the state and that of the weights are two operands; a weight layer out of range is the nearest."""
    x, lengths = operands(SMALL), lengths_of(SMALL)
    y = run_look(x, lengths, **how)
    for layer in range(LAYERS):
        moved = x._replace(
            state=x.state.at[layer].set(x.state[LAYER]), history=x.history.at[layer].set(x.history[LAYER])
        )
        assert_same_bits(run_look(moved, lengths, layer=layer, **how), y)
    for layer in (-1, LAYERS, -(2**31), 2**31 - 1):
        assert np.isnan(run_look(x, lengths, layer=layer, **how)).all()
    for index, place in ((-1, 0), (0, 0), (2, 2), (2**31 - 1, 2)):
        moved = x._replace(conv=x.conv.at[place].set(x.conv[LAYER]), norm=x.norm.at[place].set(x.norm[LAYER]))
        assert_same_bits(run_look(moved, lengths, weight_layer=index, **how), y)


def test_limits_of_the_gates(how):
    """F9: no write and no decay leave S bit-unchanged. F4: g of -1e38 or -inf leaves what comes from there on only."""
    x, everything = operands(SMALL), jnp.full(3, 5, jnp.int32)
    state, _ = run_fold(x._replace(beta=0 * x.beta, g=0 * x.g), everything, **how)
    assert_same_bits(state, x.state)
    reset = 2
    other = x._replace(state=x.state + 1, beta=x.beta.at[:, :reset].set(0.5))
    for g in (-1e38, -np.inf):
        one, two = (each._replace(g=x.g.at[:, reset].set(g)) for each in (x, other))
        y = run_look(one, everything, **how)[reset:]
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(y, run_look(two, everything, **how)[reset:])
        np.testing.assert_array_equal(run_fold(one, everything, **how)[0], run_fold(two, everything, **how)[0])


def test_the_same_program_gives_the_same_bits(how):
    """F58; F30: identical rows have one answer."""
    x, everything = operands(SMALL), jnp.full(3, 5, jnp.int32)
    same = {
        name: jnp.broadcast_to(jnp.take(getattr(x, name), jnp.array([0]), axis=axis), getattr(x, name).shape)
        for name, axis in (("state", 1), ("history", 1), ("xc", 2), ("z", 2), ("beta", 2), ("g", 2))
    }
    x = x._replace(**same)
    y, (state, history) = run_look(x, everything, **how), run_fold(x, everything, **how)
    assert_same_bits((run_look(x, everything, **how), run_fold(x, everything, **how)), (y, (state, history)))
    for row in (1, 2):
        assert_same_bits((y[:, row], state[:, row], history[:, row]), (y[:, 0], state[:, 0], history[:, 0]))


# -- refusals -------------------------------------------------------------------------------------------------------


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def look_shapes(geometry=SMALL, L=LAYERS):
    """The shapes of a look's operands by name."""
    G, H, K, V, W, B, T = geometry
    C = 2 * G * K + H * V
    return {
        "state": struct(L, B, H, K, V),
        "conv_hist": struct(L, B, W - 1, C),
        "layer": struct(1, dtype=jnp.int32),
        "xc": struct(T, B, C),
        "conv_weight": struct(L, C, W),
        "z": struct(T, B, H, V),
        "beta": struct(T, B, H),
        "g": struct(T, B, H),
        "norm_weight": struct(L, V),
        "weight_layer": struct(1, dtype=jnp.int32),
        "lengths": struct(B, dtype=jnp.int32),
    }


def fold_shapes(geometry=SMALL, L=LAYERS):
    """The same of a fold's."""
    given = look_shapes(geometry, L)
    windows = {name: struct(L, *given[name].shape) for name in ("xc", "beta", "g")}
    given = {name: given[name] for name in ("state", "conv_hist", "conv_weight")} | windows
    return given | {"counts": struct(geometry.B, dtype=jnp.int32)}


def trace_look(key_heads=2, tiles=None, split=None, limbs=0, **changed):
    options = {"key_heads": key_heads, "qk_eps": QK_EPS, "eps": EPS, "tiles": tiles, "split": split, "limbs": limbs}
    return jax.eval_shape(functools.partial(delta_window_look, interpret=True, **options), **look_shapes() | changed)


def trace_fold(key_heads=2, tiles=None, **changed):
    options = {"key_heads": key_heads, "qk_eps": QK_EPS, "tiles": tiles}
    return jax.eval_shape(functools.partial(delta_window_fold, interpret=True, **options), **fold_shapes() | changed)


def test_shapes_out():
    assert trace_look().onn == struct(5, 3, 6, 20)
    assert trace_fold() == (fold_shapes()["state"], fold_shapes()["conv_hist"])


@pytest.mark.parametrize(
    ("trace", "changed", "message"),
    [
        (trace_look, {"layer": struct(dtype=jnp.int32)}, r"layer must have shape \[1\] .*got \[\]"),
        (trace_look, {"weight_layer": struct(2, dtype=jnp.int32)}, r"weight_layer must have shape \[1\]"),
        (trace_look, {"xc": struct(3, 168)}, r"xc must have the axes \[T, B, C\], got shape \[3, 168\]"),
        (trace_look, {"xc": struct(5, 3, 167)}, r"xc must have shape \[5, 3, 168\]"),
        (trace_look, {"xc": struct(4, 3, 168)}, r"beta must have shape \[4, 3, 6\]"),
        (trace_look, {"z": struct(5, 3, 120)}, r"z must have shape \[5, 3, 6, 20\]"),
        (trace_look, {"g": struct(3, 5, 6)}, r"g must have shape \[5, 3, 6\]"),
        (trace_look, {"norm_weight": struct(20)}, r"norm_weight must have shape \[3, 20\]"),
        (trace_look, {"conv_weight": struct(168, 4)}, r"conv_weight must have the axes \[L, C, W\]"),
        (trace_look, {"conv_weight": struct(3, 168, 0)}, "none empty"),
        (trace_look, {"conv_weight": struct(3, 168, 3)}, r"conv_hist must have shape \[3, 3, 2, 168\]"),
        (trace_look, {"lengths": struct(5, dtype=jnp.int32)}, r"lengths must have shape \[3\]"),
        (trace_look, {"kept": Kept(*[struct(3, 5, 3, 6)] * 3)}, r"kept.xc must have shape \[3, 5, 3, 168\]"),
        (trace_look, {"key_heads": 4}, "key_heads=4"),
        (trace_look, {"tiles": Tiles(24, 1)}, "block_v must be a power of two of at most 32, got 24"),
        (trace_fold, {"xc": struct(5, 3, 168)}, r"xc must have the axes \[L, T, B, C\]"),
        (trace_fold, {"xc": struct(2, 5, 3, 168)}, r"xc must have shape \[3, 5, 3, 168\]"),
        (trace_fold, {"conv_weight": struct(2, 168, 4)}, r"conv_weight must have shape \[3, 168, 4\]"),
        (trace_fold, {"conv_hist": struct(3, 3, 4, 168)}, r"conv_hist must have shape \[3, 3, 3, 168\]"),
        (trace_fold, {"counts": struct(dtype=jnp.int32)}, r"counts must have shape \[3\]"),
        (trace_fold, {"key_heads": 0}, "key_heads=0"),
        (trace_fold, {"tiles": Tiles(32, 3)}, "warps must be a power of two of at most 32, got 3"),
    ],
)
def test_shapes_that_do_not_fit(trace, changed, message):
    with pytest.raises(ValueError, match=message):
        trace(**changed)


@pytest.mark.parametrize(
    ("state", "tokens", "reason"),
    [
        (struct(48, 57, 48, 256, 256), 16, None),
        (struct(3, 2, 6, 12, 20), 0, "from 1 to 16 tokens, got T = 0"),
        (struct(3, 2, 6, 12, 20), 17, "from 1 to 16 tokens, got T = 17"),
        (struct(2, 6, 12, 20), 4, r"must have the axes \[L, B, H, K, V\]"),
        (struct(3, 2, 6, 12, 20, dtype=jnp.bfloat16), 4, "must be float32, got bfloat16"),
        (struct(1, 1, 1, 257, 20), 4, "at most 256, got K = 257, V = 20"),
        (struct(2**10, 2**11, 48, 128, 128), 4, r"L·B·H·V must be at most 2147483647"),
    ],
)
def test_supported_says_why_not(state, tokens, reason):
    said = supported(state, tokens, interpret=True)
    assert said is None if reason is None else re.search(reason, said or "")


@pytest.mark.parametrize(
    ("trace", "changed", "message"),
    [
        (trace_look, {"xc": struct(17, 3, 168)}, "from 1 to 16 tokens.*use the XLA implementation"),
        (trace_fold, {"xc": struct(3, 0, 3, 168)}, "from 1 to 16 tokens.*use the XLA implementation"),
        (trace_fold, {"state": struct(3, 3, 6, 12, 20, dtype=jnp.bfloat16)}, "state must be float32"),
        (trace_look, {"lengths": struct(3, dtype=jnp.bool_)}, "lengths must be int32"),
        (trace_look, {"xc": struct(5, 3, 168, dtype=jnp.bfloat16)}, "xc must be float32"),
        (trace_fold, {"counts": struct(3, dtype=jnp.uint32)}, "counts must be int32"),
        (trace_look, THREE_LIMBS, "V to be a multiple of 32, got V = 20"),
    ],
)
def test_what_the_kernels_do_not_take(trace, changed, message):
    with pytest.raises(NotImplementedError, match=message):
        trace(**changed)


# -- tiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["delta_window_look", "delta_window_fold"])
def test_unmeasured_tiles_are_those_of_a_single_step_within_64_floats_a_lane(kernel):
    for key_dim in (1, 12, 100, 128, 256):
        for value_dim in (1, 20, 128, 200, 256):
            for heads in (1, 48, 383, 384, 5000):
                asked = ("NVIDIA H100", key_dim, value_dim, heads)
                tiles, step = tuning.choose_tiles(kernel, *asked), step_tuning.choose_tiles("delta_layer_step", *asked)
                floats = next_power_of_two(key_dim) * step.block_v / (32 * step.warps)
                assert tiles.block_v == step.block_v
                assert tiles.warps == (step.warps if floats <= 64 else step.warps * floats / 64)


@pytest.mark.parametrize(
    ("kernel", "heads", "tiles"),
    [
        ("look", 47, (128, 8)),
        ("look", 48, (32, 4)),
        ("look", 95, (32, 4)),
        ("look", 96, (32, 2)),
        ("fold", 48, (32, 2)),
    ],
)
def test_measured_tiles_come_first(kernel, heads, tiles):
    assert tuning.choose_tiles(f"delta_window_{kernel}", "NVIDIA H200", 128, 128, heads) == Tiles(*tiles)


# -- compiled for a GPU, without one --------------------------------------------------------------------------------

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
BIG = Geometry(16, 48, 128, 128, 4, B=1, T=4)


def compile_look(geometry, L=2, tiles=None, output=None):
    """A look alone; `output`: the options that say in what form its output comes."""
    options = {"key_heads": geometry.G, "qk_eps": QK_EPS, "eps": EPS, "tiles": tiles, **(output or {})}
    program = jax.jit(functools.partial(delta_window_look, **options), compiler_options=NO_SPILLS)
    return compile_for_h200(program, **look_shapes(geometry, L))


def compile_fold(geometry, L=2, tiles=None):
    """A fold alone, state and history donated."""
    options = {"key_heads": geometry.G, "qk_eps": QK_EPS, "tiles": tiles}
    program = jax.jit(
        functools.partial(delta_window_fold, **options),
        donate_argnames=("state", "conv_hist"),
        compiler_options=NO_SPILLS,
    )
    return compile_for_h200(program, **fold_shapes(geometry, L))


def launches(program):
    return program.as_text().count(" custom-call(")


@pytest.mark.deviceless
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 4), (1, 16), (2, 4), (8, 8)])
def test_a_look_at_the_27b_state_copies_nothing(B, T):
    """One launch where programs take whole heads; else two, and nothing beside the output but o between them."""
    geometry = BIG._replace(B=B, T=T)
    for output in ({}, THREE_LIMBS):
        for tiles, o in ((Tiles(128, 8), 0), (None, 4 * T * B * 48 * 128)):
            program = compile_look(geometry, L=48, tiles=tiles, output=output)
            assert launches(program) == (2 if o else 1)
            assert program.memory_analysis().temp_size_in_bytes <= o + 512  # the table of outputs


@pytest.mark.deviceless
@pytest.mark.parametrize(("L", "B", "T"), [(48, 1, 4), (48, 1, 16), (2, 64, 8)])
def test_a_fold_of_the_27b_state_stays_in_place(L, B, T):
    """F55: two launches, S first, and no copy of the history that it reads and the second one writes over."""
    program = compile_fold(BIG._replace(B=B, T=T), L=L)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * L * B * (48 * 128 * 128 + 3 * 10240)
    assert memory.temp_size_in_bytes == 0
    assert launches(program) == 2
    assert re.findall(r"= f32\[\d+,\d+,\d+,\d+\S* (?:copy|copy-start|fusion|dynamic-\S+)\(", program.as_text()) == []


@pytest.mark.deviceless
@pytest.mark.parametrize(("K", "V"), [(60, 20), (12, 100), (256, 256), (8, 256), (256, 8)])
@pytest.mark.parametrize("W", [1, 4])
def test_every_head_size_compiles_without_spills(K, V, W):
    geometry = Geometry(2, 6, K, V, W, B=1, T=8)
    compile_look(geometry)
    compile_fold(geometry)


@pytest.mark.deviceless
def test_the_check_for_spills_finds_some():
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_look(BIG._replace(G=1, H=3), tiles=Tiles(128, 2))


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "tiles"), [(1, None), (2, None), (1, Tiles(128, 8)), (2, Tiles(64, 4))])
def test_the_27b_geometry(B, tiles):
    geometry = BIG._replace(B=B, T=8)
    x = operands(geometry)
    lengths = jnp.array([8, 5][:B], jnp.int32)
    y = run_look(x, lengths, tiles=tiles)
    state, history = run_fold(x, lengths, tiles=tiles)
    assert_same_bits(history, next_history(x, np.asarray(lengths)))
    for row in range(B):
        want, want_s = exactly(x, LAYER, row, int(lengths[row]))
        for t in range(len(want)):
            assert error(y[t, row], want[t]) <= CASE_TAP
        assert error(state[LAYER, row], want_s) <= DELTA_STEP


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "tiles"), [(1, Tiles(128, 8)), (2, Tiles(64, 4))])
def test_with_the_tiles_of_single_steps_a_fold_has_their_bits(B, tiles):
    geometry = BIG._replace(B=B, T=8)
    x = operands(geometry)
    lengths = jnp.array([8, 5][:B], jnp.int32)
    state, _ = run_fold(x, lengths, tiles=tiles)
    step = jax.jit(delta_layer_step, static_argnames=("key_heads", "qk_eps", "eps", "tiles"))
    conv = jax.jit(functools.partial(convolved, interpret=False))
    single, frames = x.state, x.history[LAYER]
    for t in range(geometry.T):
        xcv = conv(frames, x.xc[LAYER, t], x.conv[LAYER])
        frames = jnp.concatenate([frames, x.xc[LAYER, t][:, None]], axis=1)[:, 1:]
        of_token = (x.z[LAYER, t], x.beta[LAYER, t], x.g[LAYER, t], x.norm[LAYER])
        single = step(
            *(single, as_layer(LAYER), xcv, *of_token),
            key_heads=geometry.G,
            qk_eps=QK_EPS,
            eps=EPS,
            active=t < lengths,
            tiles=tiles,
        ).state
    assert_same_bits(state[LAYER], single[LAYER])


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31_elements():
    """F28: 48 layers of 57 rows at H = 48, K = V = 128 hold 2,151,677,952 elements of S.

    The last layer must get the bits that layer 0 gets from the same S, and the layers between, which are of zeros and
    get tokens that write nothing, must stay at zero.
    """
    layers, geometry = 48, BIG._replace(B=57, T=1)
    x = operands(geometry, layers=1)

    @functools.partial(jax.jit, static_argnames="fill")
    def spread(part, fill=0.0):
        """[1, …] -> [48, …], in the first and the last layer."""
        ends = (jnp.arange(layers) % (layers - 1) == 0).reshape(-1, *(1,) * (part.ndim - 1))
        return jnp.where(ends, part, jnp.float32(fill))

    counts = jnp.ones(57, jnp.int32)
    state, history = jax.jit(
        functools.partial(delta_window_fold, key_heads=geometry.G, qk_eps=QK_EPS), donate_argnums=(0, 1)
    )(*(spread(getattr(x, name)) for name in ("state", "history", "xc", "conv", "beta", "g")), counts)
    assert state.size > 2**31
    assert_same_bits((state[-1], history[-1]), (state[0], history[0]))
    assert not jnp.any(state[1:-1] != 0)
    for row in (0, 56):
        assert error(state[-1, row], exactly(x, 0, row, 1)[1]) <= DELTA_STEP


@pytest.mark.gpu
def test_outputs_are_written_over_memory_full_of_nan(how):
    """F10: outputs are placed where freed arrays of NaN were; what goes unwritten shows."""
    x, lengths = operands(SMALL), lengths_of(SMALL)
    want = run_look(x, lengths, **how)
    for _ in range(8):
        poison = [jnp.full(want.shape, jnp.nan) for _ in range(4)]
        jax.block_until_ready(poison)
        for leaf in poison:
            leaf.delete()
        assert_same_bits(run_look(x, lengths, **how), want)
