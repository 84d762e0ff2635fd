"""The kernels of a layer's input half: `split_rows` and `project_in`, interpreted, compiled without a GPU, and on one.

The oracle of `project_in` is float64 on dequantised weights. Layers of weights that a launch must not touch hold NaN.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.evidence import oracle
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.limbs import group_digits, split_limbs
from gdn_jax.q4 import Q4Tensor
from pallas_kernels.limbs import split_rows
from pallas_kernels.project_in import Gates, InputWeights, project_gates, project_in, supported
from pallas_kernels.q4_gemv import Tile
from tests.support.cases import assert_same_bits, error
from tests.support.deviceless import compile_for_h200
from tests.support.tolerances import CASE_TAP

GATES = Gates(beta=write_strength, g=log_decay)
LAYERS, LAYER = 3, 1
WEIGHT_LAYERS, WEIGHT_LAYER = 4, 2
CHANNELS, VALUES, HEADS, COLUMNS = 19, 21, 3, 96
TILE = Tile(rows=4, groups=32, warps=1)
"""Rows are left over in both matrices."""


class Operands(NamedTuple):
    """What one layer hands the kernel; `qkv` and `z` as `Q4Tensor` stacks."""

    qkv: Q4Tensor
    z: Q4Tensor
    b: jax.Array
    a: jax.Array
    conv: jax.Array
    dt_bias: jax.Array
    A_log: jax.Array
    history: jax.Array
    x: jax.Array

    def weights(self):
        pairs = {name: (q.codes, q.scales) for name, q in (("qkv", self.qkv), ("z", self.z))}
        return InputWeights(**pairs, b=self.b, a=self.a, conv=self.conv, dt_bias=self.dt_bias, A_log=self.A_log)


def operands(width=4, batch=3, columns=COLUMNS, seed=0):
    """Every weight outside of layer `WEIGHT_LAYER` is NaN."""
    rng = np.random.default_rng(seed)

    def dense(*shape):
        leaf = np.full((WEIGHT_LAYERS, *shape), np.nan)
        leaf[WEIGHT_LAYER] = rng.standard_normal(shape)
        return jnp.asarray(leaf, jnp.float32)

    def packed(rows):
        codes = rng.integers(-8, 8, (WEIGHT_LAYERS, rows, columns)).astype(np.int8)
        scales = rng.uniform(0.05, 0.1, (WEIGHT_LAYERS, rows, columns // 32)).astype(np.float16)
        q = Q4Tensor.from_logical(codes, scales)
        others = np.arange(WEIGHT_LAYERS) != WEIGHT_LAYER
        return q.replace(scales=jnp.where(others[:, None, None], jnp.float16(np.nan), q.scales))

    return Operands(
        qkv=packed(CHANNELS),
        z=packed(VALUES),
        b=dense(HEADS, columns) / columns**0.5,
        a=dense(HEADS, columns) / columns**0.5,
        conv=dense(CHANNELS, width),
        dt_bias=dense(HEADS),
        A_log=dense(HEADS),
        history=jnp.asarray(rng.standard_normal((LAYERS, batch, width - 1, CHANNELS)), jnp.float32),
        x=jnp.asarray(rng.standard_t(3, (batch, columns)), jnp.float32),
    )


def launch(o, layer, weight_layer, active=None, *, keep=True, tile=TILE, limbs=3, interpret=False):
    """The launch on an x that is split into limbs beforehand."""
    digits, x_scales = split_limbs(o.x, limbs)
    indices = {"layer": layer, "weight_layer": weight_layer}
    options = {"gates": GATES, "active": active, "keep": keep, "tile": tile, "interpret": interpret}
    return project_in(o.weights(), o.history, o.x, digits, x_scales, **indices, **options)


STATIC = ("keep", "tile", "limbs", "interpret")
compiled = jax.jit(launch, static_argnames=STATIC)
# Interpreted bodies are long and run once: most of their time would go into optimising them.
interpreted = jax.jit(launch, static_argnames=STATIC, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpret", "card"])
def interpret(request):
    return request.param


@pytest.fixture
def run(interpret):
    """The launch, interpreted or on the card; its results as numpy arrays."""

    def run(o, layer=LAYER, weight_layer=WEIGHT_LAYER, active=None, **options):
        call = interpreted if interpret else compiled
        indices = (jnp.array([index], jnp.int32) for index in (layer, weight_layer))
        return jax.device_get(call(o, *indices, active, interpret=interpret, **options))

    return run


def exactly(o):
    """Every result in float64, by field, the history of slot `LAYER` alone."""

    def dequantised(q):
        codes, scales = q.to_logical()
        return codes[WEIGHT_LAYER] * np.repeat(scales[WEIGHT_LAYER].astype(np.float64), 32, axis=-1)

    x = np.asarray(o.x, np.float64)
    b, a, conv, dt_bias, a_log = (np.asarray(leaf[WEIGHT_LAYER], np.float64) for leaf in o[2:7])
    xc, raw_b, raw_a = x @ dequantised(o.qkv).T, x @ b.T, x @ a.T
    window = np.concatenate([np.asarray(o.history[LAYER], np.float64), xc[:, None]], axis=1)
    return {
        "xc": xc,
        "z": x @ dequantised(o.z).T,
        "b": raw_b,
        "a": raw_a,
        "beta": oracle.sigmoid(raw_b),
        "g": oracle.softplus_gate(raw_a, dt_bias, a_log),
        "xcv": oracle.conv_step(window, conv),
        "history": window[:, 1:],
    }


# -- project_gates --------------------------------------------------------------------------------------------------


def gates_alone(o, weight_layer, interpret):
    operands = (o.x, o.b, o.a, o.dt_bias, o.A_log)
    return project_gates(*operands, weight_layer=weight_layer, gates=GATES, interpret=interpret)


gates_compiled = jax.jit(gates_alone, static_argnames="interpret")


def run_gates(o, interpret, weight_layer=WEIGHT_LAYER):
    return jax.device_get(gates_compiled(o, jnp.array([weight_layer], jnp.int32), interpret))


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 1120), (8, 96), (17, 96)])
def test_gates_alone_against_float64(interpret, rows, columns):
    """1120 columns are a whole step and a bit of a second one; 17 rows are two readings of the weights and a row."""
    o = operands(batch=rows, columns=columns)
    made, want = run_gates(o, interpret), exactly(o)
    for field in made._fields:
        for row in range(rows):
            assert error(getattr(made, field)[row], want[field][row]) <= CASE_TAP, field


def test_rows_of_gates_alone_do_not_depend_on_each_other(interpret):
    o = operands(batch=11)
    want, made = run_gates(o, interpret), run_gates(o._replace(x=o.x.at[9].set(jnp.nan)), interpret)
    others = np.arange(11) != 9
    assert_same_bits(jax.tree.map(lambda leaf: leaf[others], made), jax.tree.map(lambda leaf: leaf[others], want))
    assert all(np.isnan(leaf[9]).all() for leaf in made)


def test_gates_alone_take_the_nearest_layer_of_weights(interpret):
    o = operands()
    last = jax.tree.map(lambda leaf: jnp.roll(leaf, WEIGHT_LAYERS - 1 - WEIGHT_LAYER, axis=0), o[2:7])
    moved = o._replace(**dict(zip(o._fields[2:7], last, strict=True)))
    assert_same_bits(run_gates(moved, interpret, WEIGHT_LAYERS + 3), run_gates(o, interpret))


def test_gates_alone_refuse_what_does_not_fit():
    o = operands()
    index = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"\ba must"):
        gates_alone(o._replace(a=o.a[:, 1:]), index, True)
    with pytest.raises(NotImplementedError, match="rows must be from 1"):
        gates_alone(o._replace(x=o.x[:0]), index, True)


# -- project_in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "batch", "columns"), [(1, 2, 32), (2, 1, 608), (3, 2, 96), (4, 3, 96)])
def test_against_float64(run, width, batch, columns):
    """Every result, row by row; other layers of the history keep their bits.

    W = 1 has no history. 608 columns are a whole step of the gates and a bit of a second one.
    """
    o = operands(width, batch, columns)
    made = run(o)
    for field, want in exactly(o).items():
        got = getattr(made, field)
        got = got[LAYER] if field == "history" else got
        assert (got.shape, got.dtype) == (want.shape, np.float32)
        for row in range(batch if want.size else 0):
            assert error(got[row], want[row]) <= CASE_TAP, field
    others = np.arange(LAYERS) != LAYER
    assert_same_bits(made.history[others], np.asarray(o.history)[others])


def test_what_is_kept_changes_nothing(run):
    o = operands()
    made, kept = run(o, keep=False), run(o)
    assert (made.xc, made.b, made.a) == (None, None, None)
    assert_same_bits(made, kept._replace(xc=None, b=None, a=None))
    assert_same_bits(kept.history[LAYER, :, -1], kept.xc)


def test_rows_of_a_tile_do_not_change_the_bits_of_a_product(run):
    """Only the groups of a step decide the order of summation."""
    o = operands()
    want, made = run(o), run(o, tile=TILE._replace(rows=16))
    assert_same_bits((made.xc, made.z, made.history), (want.xc, want.z, want.history))


def test_one_limb_is_the_product_with_8_bit_activations(run):
    """The gates take x itself, so they keep their bits."""
    o = operands()
    made, exact = run(o, limbs=1), run(o)
    assert_same_bits((made.beta, made.g, made.b, made.a), (exact.beta, exact.g, exact.b, exact.a))
    digits, x_scales = split_limbs(o.x, 1)
    eight_bits = np.asarray(digits[0]) * np.repeat(np.asarray(x_scales, np.float64), 32, axis=-1)
    want = exactly(o._replace(x=eight_bits))
    assert error(made.xc, want["xc"]) <= CASE_TAP
    assert error(made.z, want["z"]) <= CASE_TAP
    assert error(made.xc, exact.xc) > 1e-4


def test_an_inactive_row_keeps_its_history_whatever_it_holds(run):
    """F25."""
    o = operands()
    want = run(o)
    spoilt = o._replace(x=o.x.at[1].set(jnp.nan), history=o.history.at[:, 1].set(jnp.nan))
    made = run(spoilt, active=jnp.array([1, 0, 1], jnp.int32))
    assert_same_bits(made.history[:, [0, 2]], want.history[:, [0, 2]])
    assert_same_bits(made.history[:, 1], spoilt.history[:, 1])
    assert_same_bits(made.xcv[[0, 2]], want.xcv[[0, 2]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_activation_stays_in_its_row(run, bad):
    """F11."""
    o = operands()
    want, made = run(o), run(o._replace(x=o.x.at[1, 5].set(bad)))
    assert np.isnan(made.xcv[1]).all()
    assert np.isnan(made.z[1]).all()
    assert np.isnan(bad) == np.isnan(made.g[1]).all()  # an infinite a has limits: a full reset, or no decay at all
    for field in ("xcv", "z", "beta", "g"):
        assert_same_bits(getattr(made, field)[[0, 2]], getattr(want, field)[[0, 2]])
    assert_same_bits(made.history[:, [0, 2]], want.history[:, [0, 2]])


def test_rows_do_not_depend_on_each_other(run):
    o, other = operands(), operands(seed=1)
    want = run(o)
    for row in range(3):
        mixed = o._replace(x=other.x.at[row].set(o.x[row]), history=other.history.at[:, row].set(o.history[:, row]))
        made = run(mixed)
        for field in ("xcv", "z", "beta", "g"):
            assert_same_bits(getattr(made, field)[row], getattr(want, field)[row])
        assert_same_bits(made.history[:, row], want.history[:, row])


def test_the_same_bits_every_time(run):
    """F58."""
    o = operands()
    first = run(o)
    for _ in range(3):
        assert_same_bits(run(o), first)


def test_every_layer_of_the_history_is_addressed_and_none_beyond(run):
    o = operands()
    want = run(o)
    for layer in range(LAYERS):
        moved = o._replace(history=o.history.at[layer].set(o.history[LAYER]))
        made = run(moved, layer)
        assert_same_bits(made.xcv, want.xcv)
        assert_same_bits(made.history, moved.history.at[layer].set(want.history[LAYER]))
    for layer in (-(2**31), -1, LAYERS, 2**31 - 1):
        assert_same_bits(run(o, layer).history, o.history)


@pytest.mark.parametrize(("outside", "nearest"), [(-(2**31), 0), (-1, 0), (WEIGHT_LAYERS, -1), (2**31 - 1, -1)])
def test_a_layer_of_weights_out_of_range_is_the_nearest(run, outside, nearest):
    o = operands()
    weights = jax.tree.map(lambda leaf: leaf.at[nearest].set(leaf[WEIGHT_LAYER]), o[:7])
    assert_same_bits(run(Operands(*weights, o.history, o.x), weight_layer=outside), run(o))


# -- refusals -------------------------------------------------------------------------------------------------------


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes(channels=CHANNELS, values=VALUES, heads=HEADS, columns=COLUMNS, width=4, batch=2, layers=3, limbs=3):
    """The shapes of the operands by name, weights by their own."""
    int32 = functools.partial(struct, dtype=jnp.int32)

    def packed(rows):
        codes = struct(layers, rows, columns // 8, dtype=jnp.uint32)
        return codes, struct(layers, rows, columns // 32, dtype=jnp.float16)

    return {
        "qkv": packed(channels),
        "z": packed(values),
        "b": struct(layers, heads, columns),
        "a": struct(layers, heads, columns),
        "conv": struct(layers, channels, width),
        "dt_bias": struct(layers, heads),
        "A_log": struct(layers, heads),
        "history": struct(layers, batch, width - 1, channels),
        "x": struct(batch, columns),
        "digits": struct(limbs, batch, columns, dtype=jnp.int8),
        "x_scales": struct(batch, columns // 32),
        "layer": int32(1),
        "weight_layer": int32(1),
        "active": None,
    }


def from_shapes(given, **options):
    weights = InputWeights(*(given[name] for name in InputWeights._fields))
    others = [given[name] for name in ("history", "x", "digits", "x_scales")]
    named = {name: given[name] for name in ("layer", "weight_layer", "active")}
    return project_in(weights, *others, **named, gates=GATES, **options)


def trace(tile=None, **changed):
    return jax.eval_shape(functools.partial(from_shapes, tile=tile, interpret=True), shapes() | changed)


def test_shapes_out():
    made = trace()
    want = ((3, 2, 3, CHANNELS), (2, CHANNELS), (2, VALUES), (2, HEADS), (2, HEADS))
    assert tuple(leaf.shape for leaf in made[:5]) == want
    assert made[5:] == (None, None, None)


CODES, SCALES = shapes()["qkv"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": (struct(3, 19, 8, dtype=jnp.uint32), SCALES)}, r"codes of qkv must have shape \[3, 19, 12\].*19, 8\]"),
        ({"qkv": (CODES, struct(3, 19, 2, dtype=jnp.float16))}, r"scales of qkv must have shape \[3, 19, 3\]"),
        ({"qkv": (struct(4, 19, 12, dtype=jnp.uint32), SCALES)}, r"codes of qkv must have shape \[3, 19, 12\]"),
        ({"z": (struct(3, 21, 8, dtype=jnp.uint32), SCALES)}, r"codes of z must have shape \[3, 21, 12\]"),
        ({"a": struct(3, 4, 96)}, r"a must have shape \[3, 3, 96\] .* got \[3, 4, 96\]"),
        ({"dt_bias": struct(3)}, r"dt_bias must have shape \[3, 3\] .* got \[3\]"),
        ({"A_log": struct(3, 4)}, r"A_log must have shape \[3, 3\]"),
        ({"history": struct(3, 2, 4, 19)}, r"history must have shape \[3, 2, 3, 19\] .* got \[3, 2, 4, 19\]"),
        ({"x": struct(1, 96)}, r"x must have shape \[2, 96\]"),
        ({"x_scales": struct(2, 4)}, r"x_scales must have shape \[2, 3\]"),
        ({"layer": struct(dtype=jnp.int32)}, r"layer must have shape \[1\] .* got \[\]"),
        ({"weight_layer": struct(2, dtype=jnp.int32)}, r"weight_layer must have shape \[1\]"),
        ({"active": struct(3, dtype=jnp.bool_)}, r"active must have shape \[2\]"),
    ],
)
def test_shapes_that_do_not_fit(changed, message):
    with pytest.raises(ValueError, match=message):
        trace(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": (struct(3, 19, 12, dtype=jnp.int32), SCALES)}, "codes of qkv must be uint32, got int32"),
        ({"qkv": (CODES, struct(3, 19, 3))}, "scales of qkv must be float16, got float32"),
        ({"b": struct(3, 3, 96, dtype=jnp.bfloat16)}, "b must be float32, got bfloat16"),
        ({"conv": struct(3, 19, 4, dtype=jnp.float16)}, "conv must be float32, got float16"),
        ({"history": struct(3, 2, 3, 19, dtype=jnp.bfloat16)}, "history must be float32, got bfloat16"),
        ({"digits": struct(3, 2, 96, dtype=jnp.uint8)}, "digits must be int8, got uint8"),
        ({"layer": struct(1, dtype=jnp.uint32)}, "layer must be int32, got uint32"),
        ({"active": struct(2)}, "active must be bool or int32, got float32"),
    ],
)
def test_dtypes_that_the_kernel_does_not_take(changed, message):
    with pytest.raises(NotImplementedError, match=message):
        trace(**changed)


def test_supported_answers_beforehand():
    assert supported(48, 10240, 6144, 5120, 8, 3, interpret=True) is None
    for request, reason in (
        ((3, 19, 21, 96, 9, 3), "1 to 8 rows, got 9"),
        ((3, 19, 21, 96, 1, 4), "1 to 3 limbs, got 4"),
        ((3, 19, 21, 80, 1, 3), "multiple of 32"),
    ):
        assert reason in (supported(*request, interpret=True) or "")
    nine = shapes(batch=9)
    with pytest.raises(NotImplementedError, match="project_in: the batch must have 1 to 8 rows, got 9"):
        jax.eval_shape(functools.partial(from_shapes, interpret=True), nine)


# -- split_rows -----------------------------------------------------------------------------------------------------


@pytest.fixture
def split(interpret):
    """`split_rows` of an elementwise product, jitted, interpreted or on the card."""

    @functools.partial(jax.jit, static_argnames=("limbs",))
    def split(*inputs, limbs=3):
        def produce(*blocks):
            return functools.reduce(jnp.multiply, blocks)

        return split_rows(
            inputs, produce, functools.partial(group_digits, limbs=limbs), limbs=limbs, interpret=interpret
        )

    return split


def activations(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_t(3, shape), jnp.float32)


@pytest.mark.parametrize(("batch", "columns", "limbs"), [(1, 32, 3), (3, 96, 3), (2, 384, 1), (1, 5120, 2)])
def test_rows_are_split_as_by_the_library(split, batch, columns, limbs):
    """One group, three (which no block of eight divides), twelve, 160; the same bits."""
    x = activations(batch, columns)
    digits, scales = split(x, limbs=limbs)
    assert (digits.shape, digits.dtype) == ((limbs, batch, columns), jnp.int8)
    assert (scales.shape, scales.dtype) == ((batch, columns // 32), jnp.float32)
    want_digits, want_scales = jax.jit(split_limbs, static_argnames="limbs")(x, limbs=limbs)
    np.testing.assert_array_equal(digits, want_digits)
    assert_same_bits(scales, want_scales)


def test_the_producer_is_part_of_the_launch(split):
    x, y = activations(2, 96), activations(2, 96, seed=1)
    digits, scales = split(x, y)
    want_digits, want_scales = split(x * y)
    np.testing.assert_array_equal(digits, want_digits)
    assert_same_bits(scales, want_scales)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_spoils_its_group_alone(split, bad):
    x = activations(3, 96)
    digits, scales = split(x.at[1, 40].set(bad))
    want_digits, want_scales = (np.array(part) for part in split(x))
    want_digits[:, 1, 32:64], want_scales[1, 1] = 0, np.nan
    np.testing.assert_array_equal(digits, want_digits)
    assert_same_bits(scales, want_scales)


def test_columns_that_are_no_groups_are_refused():
    with pytest.raises(NotImplementedError, match="multiple of 32, got I = 80"):
        split_rows((jnp.zeros((1, 80)),), lambda x: x, functools.partial(group_digits, limbs=3), limbs=3)


# -- compiled for a GPU, without one --------------------------------------------------------------------------------

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
BIG = {"channels": 10240, "values": 6144, "heads": 48, "columns": 5120, "layers": 48}


@pytest.mark.deviceless
@pytest.mark.parametrize(("batch", "limbs"), [(1, 3), (1, 1), (2, 3)])
def test_one_launch_advances_the_27b_history_in_place(batch, limbs):
    """Of all operands the history alone is aliased; nothing is copied, kept or spilt."""
    given = shapes(**BIG, batch=batch, limbs=limbs)

    def step(history, others):
        return from_shapes({"history": history, **others})

    program = jax.jit(step, donate_argnums=0, compiler_options=NO_SPILLS)
    history = given.pop("history")
    compiled = compile_for_h200(program, history, given)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * history.size
    assert memory.temp_size_in_bytes <= 256  # the table of outputs
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count(" custom-call(") == 1
    assert not any(f" {op}(" in entry for op in ("copy", "fusion", "dynamic-slice", "transpose"))


@pytest.mark.deviceless
@pytest.mark.parametrize("width", [1, 2])
def test_other_widths_and_masks_compile(width):
    given = shapes(width=width) | {"active": struct(2, dtype=jnp.bool_)}
    program = jax.jit(functools.partial(from_shapes, keep=True), compiler_options=NO_SPILLS)
    assert compile_for_h200(program, given).as_text().count(" custom-call(") == 1


@pytest.mark.deviceless
@pytest.mark.parametrize("limbs", [1, 3])
@pytest.mark.parametrize("columns", [5120, 96])
def test_splitting_a_row_is_one_launch(columns, limbs):
    def split(x):
        return split_rows((x,), lambda x: x, functools.partial(group_digits, limbs=limbs), limbs=limbs)

    compiled = compile_for_h200(jax.jit(split, compiler_options=NO_SPILLS), struct(1, columns))
    assert compiled.memory_analysis().temp_size_in_bytes <= 64
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count(" custom-call(") == 1
    assert not any(f" {op}(" in entry for op in ("copy", "fusion"))


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_the_27b_layer(batch):
    """The default cut at full size against plain XLA, the same bits at every call, over memory full of NaN (F10)."""
    cfg = gdn.GEOMETRIES["qwen3.5-27b"].cfg
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    def packed(rows):
        codes = jax.random.bits(next(keys), (2, rows, cfg.hidden // 8), jnp.uint32)
        return Q4Tensor(codes, jnp.full((2, rows, cfg.hidden // 32), 0.01, jnp.float16))

    channels, heads = cfg.conv_channels, cfg.value_heads
    o = Operands(
        qkv=packed(channels),
        z=packed(cfg.value_channels),
        b=normal(2, heads, cfg.hidden) / 70,
        a=normal(2, heads, cfg.hidden) / 70,
        conv=normal(2, channels, 4),
        dt_bias=jnp.zeros((2, heads)),
        A_log=jnp.zeros((2, heads)),
        history=normal(2, batch, 3, channels),
        x=normal(batch, cfg.hidden),
    )
    index = jnp.array([1], jnp.int32)
    made = jax.device_get(compiled(o, index, index, tile=None))
    last = jax.tree.map(lambda leaf: jnp.stack([leaf] * WEIGHT_LAYERS)[:, 1], o[:7])
    want = exactly(Operands(*last, history=o.history, x=o.x))
    for field, exact in want.items():
        if (got := getattr(made, field)) is not None:
            assert error(got[1] if field == "history" else got, exact) <= CASE_TAP, field
    for _ in range(8):
        poison = [jnp.full_like(leaf, jnp.nan) for leaf in jax.tree.leaves(made) for _ in range(4)]
        jax.block_until_ready(poison)
        for leaf in poison:
            leaf.delete()
        assert_same_bits(jax.device_get(compiled(o, index, index, tile=None)), made)


@pytest.mark.gpu
def test_a_history_beyond_two_to_the_31_elements():
    """F28: the last of 2^25 layers lies beyond an offset of 32 bits."""
    layers = 2**31 // (3 * CHANNELS) + 8
    o = operands(batch=1)
    place = jax.jit(lambda leaf, at: jnp.zeros((layers, *leaf.shape[1:]), jnp.float32).at[at].set(leaf[LAYER]))
    history = place(o.history, layers - 1)
    assert history.size > 2**31
    weight_layer = jnp.array([WEIGHT_LAYER], jnp.int32)
    made = compiled(o._replace(history=history), jnp.array([layers - 1], jnp.int32), weight_layer)
    want = compiled(o, jnp.array([LAYER], jnp.int32), weight_layer)
    assert_same_bits(made.xcv, want.xcv)
    assert_same_bits(made.history[-1], want.history[LAYER])
    assert not jnp.any(made.history[:-1] != 0)
