"""The GPU kernel for y = W x with 4-bit weights: the same bodies in interpret mode and on a card, and compiled for one.

The oracle is float64 on the dequantised matrix. Weights that a product must not touch, those of other layers and of
rows next door, carry NaN scales: one stray read shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from gdn_jax.limbs import q4_matvec, split_limbs
from gdn_jax.q4 import Q4Tensor
from pallas_kernels.q4_gemv import MAX_BATCH, MAX_MATRICES, Tile, choose_tile, q4_gemv, supported
from pallas_kernels.q4_gemv.tuning import TABLE
from tests.support.deviceless import compile_for_h200

MAX_REL = 1e-6
ONE_WARP = Tile(rows=4, groups=32, warps=1)

product = jax.jit(q4_gemv, static_argnames=("tile", "interpret"))
# Interpreted bodies are long and run once: most of their time would go into optimising them.
interpreted = jax.jit(
    q4_gemv, static_argnames=("tile", "interpret"), compiler_options={"xla_backend_optimization_level": 0}
)
split = jax.jit(split_limbs, static_argnames=("limbs",))


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpret", "card"])
def run(request):
    """The product of q4 stacks with float32 activations, in interpret mode or on the card."""

    def run(stacks, x, layer=1, limbs=3, tile=None):
        pairs = tuple((q.codes, q.scales) for q in stacks)
        digits, x_scales = split(x, limbs=limbs)
        layer = jnp.array([layer], jnp.int32)
        call = interpreted if request.param else product
        ys = call(pairs, digits, x_scales, layer, tile=tile, interpret=request.param)
        return [np.asarray(y) for y in ys]

    return run


def stack(rows, columns, layers=3, layer=1, seed=0):
    """Random codes, scales of both signs; the other layers hold NaN scales, which no product may read."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (layers, rows, columns)).astype(np.int8)
    scales = rng.uniform(0.05, 0.1, (layers, rows, columns // 32)) * rng.choice([-1, 1], (layers, rows, columns // 32))
    q = Q4Tensor.from_logical(codes, scales.astype(np.float16))
    others = np.arange(layers) != layer
    return q.replace(scales=jnp.where(others[:, None, None], jnp.float16(np.nan), q.scales))


def activations(shape, seed=1):
    return np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)


def oracle(q, x, layer=1):
    codes, scales = q.to_logical()
    weights = codes[layer] * np.repeat(scales[layer].astype(np.float64), 32, axis=-1)
    return np.asarray(x, np.float64) @ weights.T


def assert_close(y, want):
    """NaN fails; each row of the batch by its own largest value."""
    assert y.dtype == np.float32
    assert y.shape == want.shape
    error = np.abs(y - want).max(axis=1) / np.abs(want).max(axis=1)
    assert error.max() <= MAX_REL


@pytest.mark.parametrize(
    ("rows", "columns", "batch"),
    [
        (1, 32, 1),
        (1, 1056, 1),
        (3, 96, 1),
        (3, 1056, 8),
        (33, 32, 2),
        (33, 1056, 3),
        (48, 96, 1),
        (48, 1056, 1),
        (100, 96, 3),
    ],
)
def test_against_float64(run, rows, columns, batch):
    q, x = stack(rows, columns), activations((batch, columns))
    [y] = run([q], x)
    if rows == 1:  # a single output may cancel; its error is that of the sum of its terms
        scale = np.abs(x).astype(np.float64) @ np.abs(np.asarray(q.scales[1, 0], np.float64)).repeat(32) * 8
        assert np.abs(y - oracle(q, x)).max() <= 2.0**-22 * scale.max()
    else:
        assert_close(y, oracle(q, x))


@pytest.mark.parametrize(("rows", "groups", "warps"), [(1, 32, 1), (2, 16, 1), (16, 64, 2), (8, 128, 4)])
def test_every_cut_gives_the_product(run, rows, groups, warps):
    """Rows and groups left over in each cut: 19 rows, 67 groups."""
    q, x = stack(19, 67 * 32), activations((2, 67 * 32))
    [y] = run([q], x, tile=Tile(rows, groups, warps))
    assert_close(y, oracle(q, x))


@pytest.mark.parametrize("limbs", [1, 2, 3])
def test_a_single_group_has_the_bits_of_the_reference(run, limbs):
    """One group leaves no order of summation open: limbs, dot products and the order of the scales must agree."""
    q, x = stack(40, 32, layers=2), activations((3, 32))
    [y] = run([q], x, limbs=limbs)
    digits, x_scales = split(x, limbs=limbs)
    if limbs != 2:  # the reference has no name for two
        precision = {1: "q8", 3: "exact"}[limbs]
        want = q4_matvec(jax.tree.map(lambda leaf: leaf[1], q), jnp.asarray(x), precision=precision)
        np.testing.assert_array_equal(y, want)
    places = 256.0 ** -np.arange(limbs)
    fixed = np.einsum("l,lbi->bi", places, np.asarray(digits, np.float64)) * np.repeat(
        np.asarray(x_scales), 32, axis=-1
    )
    assert_close(y, oracle(q, fixed))


def test_one_limb_is_the_product_with_8_bit_activations(run):
    q, x = stack(33, 1056), activations((3, 1056))
    digits, x_scales = (np.asarray(part) for part in split(x, limbs=1))
    [y] = run([q], x, limbs=1)
    assert_close(y, oracle(q, digits[0] * np.repeat(x_scales.astype(np.float64), 32, axis=-1)))
    error = np.abs(y - oracle(q, x)).max() / np.abs(y).max()
    assert 1e-3 < error < 5e-2  # three limbs would be far below


def test_several_matrices_in_one_launch(run):
    """Each has the bits of a launch of its own, whatever rows its neighbours leave over."""
    stacks = [stack(rows, 96, seed=rows) for rows in (33, 1, 6)]
    x = activations((2, 96))
    together = run(stacks, x, tile=ONE_WARP)
    for q, y in zip(stacks, together, strict=True):
        np.testing.assert_array_equal(y, run([q], x, tile=ONE_WARP)[0])
        if y.shape[1] > 1:
            assert_close(y, oracle(q, x))


def test_the_layer_is_an_operand(run):
    """One compilation for all layers; out of range means the nearest."""
    q = stack(33, 96)
    scales = jnp.where(jnp.isnan(q.scales), jnp.float16(0.0625), q.scales)
    q = q.replace(scales=scales)
    x = activations((1, 96))
    ys = {layer: run([q], x, layer=layer)[0] for layer in (-(2**31), -1, 0, 1, 2, 3, 2**31 - 1)}
    for layer in range(3):
        assert_close(ys[layer], oracle(q, x, layer))
    for outside, nearest in ((-(2**31), 0), (-1, 0), (3, 2), (2**31 - 1, 2)):
        np.testing.assert_array_equal(ys[outside], ys[nearest])


def test_layers_share_one_trace():
    q, x = stack(4, 32), activations((1, 32))
    digits, x_scales = split(x)
    traces = []

    @jax.jit
    def counted(layer):
        traces.append(layer)
        return q4_gemv(((q.codes, q.scales),), digits, x_scales, layer, interpret=True)

    for layer in range(3):
        counted(jnp.array([layer], jnp.int32))
    assert len(traces) == 1


@pytest.mark.parametrize("tile", [ONE_WARP, Tile(2, 16, 1)])
def test_no_row_or_group_of_a_neighbour_is_read(run, tile):
    """Groups left over would run into the next row, rows left over into the next layer."""
    q, x = stack(9, 96), activations((2, 96))
    rows = np.arange(9) % 2 == 1
    poisoned = q.replace(scales=jnp.where(rows[None, :, None], jnp.float16(np.nan), q.scales))
    [y] = run([poisoned], x, tile=tile)
    assert np.isnan(y[:, rows]).all()
    np.testing.assert_array_equal(y[:, ~rows], run([q], x, tile=tile)[0][:, ~rows])


def test_interpret_mode_starts_from_outputs_of_nan():
    """What makes the other tests see an output that is never written."""
    unwritten = pl.pallas_call(lambda y_ref: None, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)
    assert np.isnan(unwritten()).all()


@pytest.mark.parametrize(("bad", "column", "limbs"), [(np.nan, 0, 3), (np.inf, 1055, 3), (-np.inf, 1055, 1)])
def test_a_non_finite_activation_spoils_its_row_alone(run, bad, column, limbs):
    q, x = stack(33, 1056), activations((3, 1056))
    codes, scales = q.to_logical()
    codes[1, :, column] = 0  # also where it meets codes of 0
    q = Q4Tensor.from_logical(codes, np.nan_to_num(scales))
    spoilt = x.copy()
    spoilt[1, column] = bad
    [clean], [y] = run([q], x, limbs=limbs), run([q], spoilt, limbs=limbs)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])


def test_zeros_and_huge_and_faint_activations(run):
    q, x = stack(33, 1056), activations((3, 1056))
    x[0], x[1], x[2] = 0, x[1] * np.float32(1e30), x[2] * np.float32(1e-30)
    [y] = run([q], x)
    assert not y[0].any()
    assert_close(y[1:], oracle(q, x)[1:])


def test_rows_do_not_depend_on_each_other(run):
    q, x = stack(33, 1056), activations((3, 1056))
    [y] = run([q], x)
    for b in range(3):
        other = activations((3, 1056), seed=2) * np.float32(100)
        other[b] = x[b]
        np.testing.assert_array_equal(run([q], other)[0][b], y[b])


def test_the_same_bits_every_time(run):
    q, x = stack(33, 1056), activations((3, 1056))
    first = run([q], x)[0]
    for _ in range(3):
        np.testing.assert_array_equal(run([q], x)[0], first)


def operands(**changes):
    """A well-formed call of two matrices, with changes, as shapes."""
    shape = jax.ShapeDtypeStruct
    parts = {
        "matrices": tuple((shape((2, n, 8), jnp.uint32), shape((2, n, 2), jnp.float16)) for n in (5, 7)),
        "digits": shape((3, 1, 64), jnp.int8),
        "x_scales": shape((1, 2), jnp.float32),
        "layer": shape((1,), jnp.int32),
    }
    return parts | changes


def attempt(tile=None, interpret=True, **changes):
    call = functools.partial(q4_gemv, tile=tile, interpret=interpret)
    return jax.eval_shape(lambda parts: call(**parts), operands(**changes))


def test_what_the_errors_start_from_is_accepted():
    assert [y.shape for y in attempt()] == [(1, 5), (1, 7)]


S = jax.ShapeDtypeStruct
CODES, SCALES = operands()["matrices"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrices": (CODES, SCALES)}, r"pairs \(codes, scales\)"),
        ({"matrices": ((CODES, SCALES, SCALES),)}, r"pairs \(codes, scales\)"),
        ({"matrices": ((S((5, 8), jnp.uint32), SCALES),)}, r"codes of matrix 0 must be \[L, N, I/8\]"),
        ({"matrices": ((S((2, 5, 16), jnp.uint32), SCALES),)}, r"codes of matrix 0 .* \(2, 5, 8\).* got \(2, 5, 16\)"),
        ({"matrices": ((CODES, S((2, 5, 4), jnp.float16)),)}, r"scales of matrix 0 .* \(2, 5, 2\).* got \(2, 5, 4\)"),
        (
            {"matrices": ((CODES, SCALES), (S((3, 5, 8), jnp.uint32), S((3, 5, 2), jnp.float16)))},
            r"same L, got 2 and 3 \(matrix 1\)",
        ),
        ({"digits": S((3, 64), jnp.int8)}, r"digits must be \[limbs, B, I\]"),
        ({"x_scales": S((1, 3), jnp.float32)}, r"x_scales must be \[B, I/32\] = \(1, 2\)"),
        ({"layer": S((), jnp.int32)}, r"layer must be \[1\]"),
        ({"tile": Tile(3, 32, 1)}, r"rows of a tile must be a power of two, got 3"),
        ({"tile": Tile(4, 0, 1)}, r"groups of a tile must be a power of two, got 0"),
    ],
)
def test_contradictory_operands_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        attempt(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrices": ()}, "1 to 4 matrices, got 0"),
        ({"matrices": operands()["matrices"] * 3}, "1 to 4 matrices, got 6"),
        ({"digits": S((3, 9, 64), jnp.int8), "x_scales": S((9, 2), jnp.float32)}, "1 to 8 rows, got 9"),
        ({"digits": S((3, 0, 64), jnp.int8), "x_scales": S((0, 2), jnp.float32)}, "1 to 8 rows, got 0"),
        ({"digits": S((4, 1, 64), jnp.int8)}, "1 to 3 limbs, got 4"),
        ({"matrices": ((S((2, 0, 8), jnp.uint32), S((2, 0, 2), jnp.float16)),)}, "at least 1"),
        ({"matrices": ((S((0, 5, 8), jnp.uint32), S((0, 5, 2), jnp.float16)),)}, "at least 1"),
        (
            {
                "matrices": ((S((2, 5, 5), jnp.uint32), S((2, 5, 1), jnp.float16)),),
                "digits": S((3, 1, 40), jnp.int8),
                "x_scales": S((1, 1), jnp.float32),
            },
            "multiple of 32",
        ),
        ({"matrices": ((S((2, 5, 8), jnp.int32), SCALES),)}, "codes of matrix 0 must be uint32, got int32"),
        ({"matrices": ((CODES, S((2, 5, 2), jnp.bfloat16)),)}, "scales of matrix 0 must be float16, got bfloat16"),
        ({"digits": S((3, 1, 64), jnp.float32)}, "digits must be int8"),
        ({"x_scales": S((1, 2), jnp.float16)}, "x_scales must be float32"),
        ({"layer": S((1,), jnp.uint32)}, "layer must be int32"),
    ],
)
def test_what_the_kernel_does_not_take_is_not_implemented(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        attempt(**changes)


@pytest.mark.skipif("jax.default_backend() == 'gpu'", reason="a GPU is here")
def test_without_a_gpu_the_kernel_refuses_before_the_launch():
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU.*\(cpu\)"):
        attempt(interpret=False)
    assert "NVIDIA GPU" in (supported([(1, 1, 32)], 1, 3) or "")


def test_supported_answers_beforehand():
    assert supported([(48, 248320, 5120)], 1, 3, interpret=True) is None
    assert supported([(1, 1, 32)] * MAX_MATRICES, MAX_BATCH, 1, interpret=True) is None
    assert "9" in (supported([(1, 1, 32)], 9, 3, interpret=True) or "")
    assert "exceed" in (supported([(1, 2**31, 32)], 1, 3, interpret=True) or "")


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (48, 5120), (1023, 17408), (5120, 6144), (248320, 5120)])
def test_the_default_cut_is_valid_and_one_group_per_lane(rows, columns, batch):
    tile, source = choose_tile("a card that nobody has measured", rows, columns, batch, 3)
    assert source
    assert all(size >= 1 and size & (size - 1) == 0 for size in tile)
    assert tile.groups == 32 * tile.warps
    assert tile.rows * batch <= 32


def test_a_measured_row_goes_before_the_rule(monkeypatch):
    measured = type(choose_tile("card", 5000, 5000, 1, 3))(Tile(16, 64, 2), "a record")
    monkeypatch.setitem(TABLE, ("card", 8192, 8192, 1, 3), measured)
    assert choose_tile("card", 5120, 6144, 1, 3) == measured
    for other in (("other", 5120, 6144, 1, 3), ("card", 4096, 6144, 1, 3), ("card", 5120, 6144, 2, 3)):
        assert choose_tile(*other) != measured


# The shapes of a 27B model, and with each what the default cut does differently.
MODEL_SHAPES = {
    "qkv": ([10240], 5120),
    "qkv and z": ([10240, 6144], 5120),
    "gate and up": ([17408, 17408], 5120),
    "out": ([5120], 6144),
    "down": ([5120], 17408),
    "head": ([248320], 5120),
}


FAIL_ON_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


@pytest.mark.deviceless
@pytest.mark.parametrize("limbs", [1, 3])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["qkv and z", "out"])
def test_compiles_for_the_card_without_spills_or_copies(name, batch, limbs):
    """One custom call, fed by the operands themselves; a register that does not fit fails the compilation."""
    rows, columns = MODEL_SHAPES[name]
    program = jax.jit(q4_gemv, compiler_options=FAIL_ON_SPILLS)
    compiled = compile_for_h200(program, *model_operands(rows, columns, batch, limbs))
    assert compiled.memory_analysis().temp_size_in_bytes <= 64  # the table of outputs
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count(" custom-call(") == 1
    assert not any(f" {op}(" in entry for op in ("copy", "fusion", "dynamic-slice", "transpose"))


@pytest.mark.deviceless
@pytest.mark.parametrize("key", TABLE, ids=str)
def test_every_row_of_the_table_compiles_without_spills(key):
    """For the largest matrix of the row's bucket."""
    program = jax.jit(functools.partial(q4_gemv, tile=TABLE[key].tile), compiler_options=FAIL_ON_SPILLS)
    compile_for_h200(program, *model_operands([key.rows], key.columns, key.batch, key.limbs, layers=1))


@pytest.mark.deviceless
def test_a_cut_that_spills_does_not_compile():
    """What the test above relies on."""
    program = jax.jit(functools.partial(q4_gemv, tile=Tile(64, 64, 1)), compiler_options=FAIL_ON_SPILLS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_for_h200(program, *model_operands([1024], 5120, 1, 1))


def model_operands(rows, columns, batch, limbs, layers=4):
    return (
        tuple((S((layers, n, columns // 8), jnp.uint32), S((layers, n, columns // 32), jnp.float16)) for n in rows),
        S((limbs, batch, columns), jnp.int8),
        S((batch, columns // 32), jnp.float32),
        S((1,), jnp.int32),
    )


def random_stack(key, layers, rows, columns):
    codes, scales = jax.random.split(key)
    return Q4Tensor(
        jax.random.bits(codes, (layers, rows, columns // 8), jnp.uint32),
        jax.random.uniform(scales, (layers, rows, columns // 32), jnp.float32, 0.005, 0.015).astype(jnp.float16),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_the_shapes_of_a_model(name, batch):
    rows, columns = MODEL_SHAPES[name]
    keys = jax.random.split(jax.random.key(0), len(rows))
    stacks = [random_stack(key, 2, n, columns) for key, n in zip(keys, rows, strict=True)]
    x = activations((batch, columns))
    pairs = tuple((q.codes, q.scales) for q in stacks)
    for limbs, layer in ((3, 0), (3, 1), (1, 1)):
        digits, x_scales = split(x, limbs=limbs)
        arguments = (pairs, digits, x_scales, jnp.array([layer], jnp.int32))
        ys, again = product(*arguments), product(*arguments)
        for q, y, same in zip(stacks, ys, again, strict=True):
            np.testing.assert_array_equal(y, same)
            if limbs == 3:
                chosen = np.r_[0:8, q.shape[1] - 40 : q.shape[1]]
                part = Q4Tensor(q.codes[:, chosen], q.scales[:, chosen])
                assert np.isfinite(y).all()
                assert_close(np.asarray(y)[:, chosen], oracle(part, x, layer))


@pytest.mark.gpu
def test_weights_beyond_two_to_the_31_words():
    """8.6 GB of codes in one stack: an offset in 32 bits would read elsewhere."""
    layers, rows, columns = 205, 16384, 5120
    one = random_stack(jax.random.key(3), 1, rows, columns)

    @jax.jit
    def at_the_end(leaf):
        return jnp.zeros((layers, *leaf.shape[1:]), leaf.dtype).at[-1].set(leaf[0])

    codes, scales = at_the_end(one.codes), at_the_end(one.scales)
    assert codes.size > 2**31
    digits, x_scales = split(activations((1, columns)))
    [y] = product(((codes, scales),), digits, x_scales, jnp.array([layers - 1], jnp.int32))
    [want] = product(((one.codes, one.scales),), digits, x_scales, jnp.array([0], jnp.int32))
    np.testing.assert_array_equal(y, want)
    [zeros] = product(((codes, scales),), digits, x_scales, jnp.array([layers - 2], jnp.int32))
    assert not np.asarray(zeros).any()
