"""Fixed-point activations and their product with 4-bit weights, against float64 on the dequantised matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from gdn_jax.limbs import q4_matvec, split_limbs
from gdn_jax.q4 import Q4Tensor, dequantize, quantize

TINY = 2.0**-126
"""Smallest normal float32: what flushing to zero can take away."""

matvec = jax.jit(q4_matvec, static_argnames=("precision",))
split = jax.jit(split_limbs, static_argnames=("limbs",))


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def random_q4(rows, columns, scale=0.05, seed=0):
    """Codes of every value, scales of both signs and of magnitude scale … 2 · scale."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
    scales = rng.uniform(1, 2, (rows, columns // 32)) * scale * rng.choice([-1, 1], (rows, columns // 32))
    return Q4Tensor.from_logical(codes, scales.astype(np.float16))


def activations(kind, shape, seed=1):
    rng = np.random.default_rng(seed)
    x = {
        "uniform": lambda: rng.uniform(-3, 3, shape),
        "gaussian": lambda: rng.normal(size=shape),
        "heavy": lambda: rng.standard_t(2, size=shape),
    }[kind]()
    return x.astype(np.float32)


def weights64(q):
    codes, scales = q.to_logical()
    return codes * np.repeat(scales.astype(np.float64), 32, axis=-1)


def oracle(q, x):
    return x.astype(np.float64) @ weights64(q).T


def max_rel(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


def exact_bound(q, x):
    """The documented bound on each output [B, N]: the groups' own, and the roundings of the sum of their terms."""
    w = weights64(q).reshape(q.shape[0], -1, 32)
    groups = x.astype(np.float64).reshape(len(x), -1, 32)
    mass = np.abs(w).sum(-1)  # [N, I/32]
    largest = np.abs(groups).max(-1)[:, None]  # [B, 1, I/32]
    terms = np.abs(np.einsum("ngj,bgj->bng", w, groups))
    scales = np.abs(np.asarray(q.scales).astype(np.float64))
    each = 2.0**-24 * (1.03 * largest * mass + 3 * terms) + TINY * (mass + scales + 1)
    additions = -(-w.shape[1] // 32) + 5
    return each.sum(-1) + 2.0**-24 * additions * (terms + each).sum(-1)


@pytest.mark.parametrize("limbs", [1, 2, 3])
@pytest.mark.parametrize("kind", ["uniform", "gaussian", "heavy"])
def test_limbs_are_the_stated_fixed_point_number(limbs, kind):
    x = activations(kind, (3, 256))
    digits, scale = (np.asarray(part) for part in split(x, limbs=limbs))
    assert digits.dtype == np.int8
    assert digits.shape == (limbs, 3, 256)
    assert scale.shape == (3, 8)
    groups = x.reshape(3, 8, 32)
    np.testing.assert_allclose(scale, np.abs(groups).max(-1) / 127, rtol=2.0**-16)
    assert not (scale.view(np.uint32) & 0xFF).any()
    places = 256.0 ** -np.arange(limbs).reshape(-1, 1, 1, 1)
    number = (digits.reshape(limbs, *groups.shape) * places).sum(0)
    error = np.abs(number - groups / scale[..., None].astype(np.float64))
    assert error.max() <= 0.51 * places[-1]
    # One more digit is worth having: the error is that of the last place, not of the leading one.
    assert error.max() >= 0.4 * places[-1]


def test_limbs_at_the_ends_of_the_range_and_at_ties():
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = 127, -127, 0.5, 1.5, -0.5, -2.5
    digits, scale = split(x, limbs=1)
    np.testing.assert_array_equal(np.asarray(digits)[0, 0, :6], [127, -127, 0, 2, 0, -2])
    np.testing.assert_array_equal(scale, [[1]])
    x[0, :4] = 127, 127 - 1 / 65536, 1 / 512, -1 / 65536
    digits, _ = split(x, limbs=3)
    np.testing.assert_array_equal(np.asarray(digits)[:, 0, :4].T, [[127, 0, 0], [127, 0, -1], [0, 1, -128], [0, 0, -1]])


@pytest.mark.parametrize("limbs", [1, 2, 3])
def test_special_groups(limbs):
    x = np.zeros((4, 64), np.float32)
    x[1, :32] = -0.0
    x[2, 40], x[3, 0] = np.inf, np.nan
    digits, scale = split(x, limbs=limbs)
    assert not np.asarray(digits).any()
    np.testing.assert_array_equal(scale, [[1, 1], [1, 1], [1, np.nan], [np.nan, 1]])


# Every number of groups that the steps of 32 distinguish: fewer, one more, several with and without a rest.
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 32), (3, 64), (4, 1056), (33, 1024), (48, 5120), (4, 17408), (5, 2112)]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_exact_product_against_the_float64_oracle(rows, columns, batch):
    q = random_q4(rows, columns)
    for kind in ("uniform", "heavy"):
        x = activations(kind, (batch, columns))
        y = np.asarray(matvec(q, x))
        assert y.dtype == np.float32
        assert y.shape == (batch, rows)
        want = oracle(q, x)
        assert (np.abs(y - want) <= exact_bound(q, x)).all()
        if rows * batch > 8:  # a single output may cancel: then only the bound above means something
            assert max_rel(y, want) <= 1e-6


def test_rows_beyond_one_batch_step_and_no_rows():
    q = random_q4(12, 96)
    x = activations("gaussian", (19, 96))
    np.testing.assert_allclose(matvec(q, x), oracle(q, x), rtol=0, atol=float(exact_bound(q, x).max()))
    assert matvec(q, x[:0]).shape == (0, 12)


@settings(deadline=None, max_examples=40)
@given(
    codes=st_numpy.arrays(np.int8, (3, 96), elements=st.integers(-8, 7)),
    scales=st_numpy.arrays(np.float16, (3, 3), elements=st.floats(-60_000, 60_000, width=16)),
    x=st_numpy.arrays(np.float32, (2, 96), elements=st.floats(-(2.0**90), 2.0**90, width=32)),
)
def test_the_documented_bound_holds_for_anything_finite(codes, scales, x):
    q = Q4Tensor.from_logical(codes, scales)
    assert (np.abs(np.asarray(matvec(q, x)) - oracle(q, x)) <= exact_bound(q, x)).all()


def spike(where):
    x = np.full((1, 128), 1e-3, np.float32)
    x[0, where] = 1e6
    return x


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (np.full((1, 128), 2100, np.float32), 1.0),
        (np.full((1, 128), 1e-3, np.float32), 1e-3),
        (np.full((1, 128), 1e-3, np.float32), 1e-7),
        (np.full((1, 128), 1e30, np.float32), 1.0),
        (np.full((1, 128), 1e30, np.float32), 30000.0),
        (np.full((1, 128), 1.2e36, np.float32), 1e-3),
        (np.zeros((1, 128), np.float32), 1.0),
        (spike(0), 1e-3),
        (spike([5, 6, 70]), 1.0),
    ],
)
def test_extreme_activations_stay_within_the_bound(x, scale):
    q = random_q4(16, 128, scale=scale)
    y = np.asarray(matvec(q, x))
    assert np.isfinite(y).all()
    assert (np.abs(y - oracle(q, x)) <= exact_bound(q, x)).all()


def test_a_spike_that_meets_codes_of_zero():
    codes = np.random.default_rng(3).integers(-8, 8, (16, 128)).astype(np.int8)
    codes[:, 40] = 0
    q = Q4Tensor.from_logical(codes, np.full((16, 4), 0.01, np.float16))
    x = spike(40)
    error = np.abs(np.asarray(matvec(q, x)) - oracle(q, x))
    mass = np.abs(weights64(q)).reshape(16, 4, 32).sum(-1)
    assert (error <= 2.0**-24 * (1e6 * mass[:, 1] + 2e-3 * mass.sum(-1))).all()
    # The limitation is real: every activation of that group but the spike is below half a unit, and is lost.
    others = np.abs(codes[:, 32:64].sum(-1) * float(np.float16(0.01)) * 1e-3)
    np.testing.assert_allclose(error[0], others, rtol=0, atol=1e-9)


@pytest.mark.parametrize("magnitude", [1e-25, 1e-31, 1e-33, 1e-35, 1e-36, 2e-38, 1e-38, 1e-40])
def test_faint_activations_keep_their_accuracy_down_to_the_smallest_normal_number(magnitude):
    q = random_q4(16, 128, scale=1000.0)
    x = np.float32(np.random.default_rng(1).uniform(0.5, 1, (2, 128)) * magnitude)
    y = np.asarray(matvec(q, x))
    assert (np.abs(y - oracle(q, x)) <= exact_bound(q, x)).all()
    if magnitude >= 1e-36:
        assert max_rel(y, oracle(q, x)) <= 1e-5


def test_faint_scales_and_faint_activations_together():
    """The product of both scales is below float32, the result is not."""
    q = random_q4(16, 128, scale=1e-4)
    x = np.full((1, 128), 1e-33, np.float32)
    assert max_rel(np.asarray(matvec(q, x)), oracle(q, x)) <= 1e-3


@pytest.mark.parametrize("precision", ["exact", "q8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_show_in_their_row_only(precision, bad):
    codes, scales = random_q4(8, 96).to_logical()
    codes, scales = codes.copy(), scales.copy()
    codes[:, 50], scales[3] = 0, 0
    q = Q4Tensor.from_logical(codes, scales)
    x = activations("gaussian", (3, 96))
    clean = np.asarray(matvec(q, x, precision=precision))
    x[1, 50] = bad
    y = np.asarray(matvec(q, x, precision=precision))
    assert not np.isfinite(y[1]).any()
    np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])


def test_negative_zero_changes_nothing():
    q = random_q4(8, 64)
    x = activations("gaussian", (1, 64))
    x[0, ::3] = 0
    negative = np.where(x == 0, np.float32(-0.0), x)
    np.testing.assert_array_equal(matvec(q, x), matvec(q, negative))


def test_q8_errs_by_half_a_unit_of_eight_bits():
    q = random_q4(16, 256)
    for kind in ("uniform", "gaussian", "heavy"):
        x = activations(kind, (2, 256))
        largest = np.abs(x.astype(np.float64)).reshape(2, 8, 32).max(-1)
        mass = np.abs(weights64(q)).reshape(16, 8, 32).sum(-1)
        bound = np.einsum("bg,ng->bn", largest, mass) / 254 * (1 + 1e-5)
        error = np.abs(np.asarray(matvec(q, x, precision="q8")) - oracle(q, x))
        assert (error <= bound).all()


def test_q8_equals_exact_where_eight_bits_hold_the_activations():
    q = random_q4(16, 128)
    x = np.random.default_rng(5).integers(-127, 128, (2, 128)).astype(np.float32)
    x[:, ::32] = 127
    np.testing.assert_allclose(matvec(q, x, precision="q8"), oracle(q, x), rtol=0, atol=float(exact_bound(q, x).max()))


@pytest.mark.parametrize(("kind", "low", "high"), [("uniform", 3.4e-3, 4.0e-3), ("gaussian", 4.9e-3, 5.7e-3)])
def test_the_error_of_eight_bit_activations(kind, low, high):
    """RMS-relative on Gaussian weights: 3.7e-3 and 5.3e-3, up to 1.1e-2 on heavy tails; weights at 4 bits: 9.7e-2."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(256, 2048)).astype(np.float32)
    q, x = quantize(w), activations(kind, (3, 2048))
    want = oracle(q, x)

    def rms_relative(error):
        return np.sqrt(np.square(error).mean() / np.square(want).mean())

    assert low < rms_relative(matvec(q, x, precision="q8") - want) < high
    assert rms_relative(matvec(q, x) - want) < 3e-7
    assert 0.09 < rms_relative(x.astype(np.float64) @ w.T.astype(np.float64) - want) < 0.105


def test_exact_is_as_good_as_float32_on_the_dequantised_matrix():
    q = random_q4(256, 5120)
    x = activations("heavy", (1, 5120))
    plain = np.asarray(dequantize(q)) @ x[0]
    error = np.sqrt(np.square(np.asarray(matvec(q, x)) - oracle(q, x)).mean())
    assert error <= 2 * np.sqrt(np.square(plain - oracle(q, x)).mean())


def test_rows_of_one_batch_shape_do_not_depend_on_each_other():
    q = random_q4(24, 1056)
    x = activations("gaussian", (3, 1056))
    other = x.copy()
    other[[0, 2]] = activations("heavy", (2, 1056), seed=9)
    first, second = np.asarray(matvec(q, x)), np.asarray(matvec(q, other))
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(np.asarray(matvec(q, x)), first)
    alone = np.asarray(matvec(q, x[1:2]))
    np.testing.assert_allclose(alone[0], first[1], rtol=0, atol=float(exact_bound(q, x).max()))


def test_it_composes_with_a_stack_of_layers():
    layers = [random_q4(8, 64, seed=seed) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x = jnp.asarray(activations("gaussian", (2, 64)))
    scanned = jax.jit(lambda s, x: jax.lax.map(lambda q: q4_matvec(q, x), s))(stack, x)
    mapped = jax.jit(jax.vmap(q4_matvec, in_axes=(0, None)))(stack, x)
    for n, layer in enumerate(layers):
        tolerance = float(exact_bound(layer, np.asarray(x)).max())
        np.testing.assert_allclose(scanned[n], oracle(layer, np.asarray(x)), rtol=0, atol=tolerance)
        np.testing.assert_allclose(mapped[n], oracle(layer, np.asarray(x)), rtol=0, atol=tolerance)


@pytest.mark.parametrize("batch", [1, 64])
def test_the_matrix_is_never_unpacked_as_a_whole(batch):
    rows, columns = 17408, 5120
    q = Q4Tensor(
        codes=jax.ShapeDtypeStruct((rows, columns // 8), jnp.uint32),
        scales=jax.ShapeDtypeStruct((rows, columns // 32), jnp.float16),
    )
    x = jax.ShapeDtypeStruct((batch, columns), jnp.float32)
    program = jax.jit(functools.partial(q4_matvec, precision="exact")).lower(q, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < rows * columns * 2


def test_bad_requests_are_refused():
    q, x = random_q4(8, 64), jnp.zeros((2, 64), jnp.float32)
    stack = jax.tree.map(lambda leaf: leaf[None], q)
    cases = [
        (lambda: q4_matvec(q, x, precision="bf16"), ValueError, "precision must be one of exact, q8, got 'bf16'"),
        (lambda: q4_matvec(q, x[:, :32]), ValueError, r"I=64 \(the columns of q\), got \(2, 32\)"),
        (lambda: q4_matvec(q, x[0]), ValueError, r"x must be \[B, I\]"),
        (lambda: q4_matvec(q, x.astype(jnp.bfloat16)), TypeError, "x must be float32, got bfloat16"),
        (lambda: q4_matvec(stack, x), ValueError, "q must be one matrix"),
        (lambda: q4_matvec(x, x), TypeError, "q must be a Q4Tensor"),
        (lambda: split_limbs(x, limbs=4), ValueError, "limbs must be 1, 2 or 3, got 4"),
        (lambda: split_limbs(x[:, :40]), ValueError, r"I a multiple of 32, got shape \(2, 40\)"),
        (lambda: split_limbs(x.astype(jnp.int32)), TypeError, "x must be float32, got int32"),
    ]
    for request, error, message in cases:
        with pytest.raises(error, match=message):
            request()
