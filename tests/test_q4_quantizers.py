"""The quantisers: the bound, the reference encoder's bits, and the optimality that each of them promises."""

import tracemalloc

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from checkpoints.q4_blocks import pack_q4_0
from gdn_jax.q4 import METHODS, Q4Tensor, dequantize, quantization_report, quantize, quantize_rows

LARGEST = float(np.finfo(np.float16).max)


def dequantized(coded):
    return coded.codes * np.repeat(coded.scales.astype(np.float64), 32, axis=-1)


def squared_error(w, coded, importance=1.0):
    """The objective of the search per group, in float64."""
    error = importance * (w.astype(np.float64) - dequantized(coded)) ** 2
    return error.reshape(*coded.scales.shape, 32).sum(axis=-1)


def relative_rms(w, coded):
    return np.sqrt(squared_error(w, coded).sum() / np.square(w, dtype=np.float64).sum())


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * np.float32(0.02)


def heavy_tailed(shape, seed=0):
    return np.random.default_rng(seed).standard_t(2, size=shape).astype(np.float32)


def ties(shape, seed=0):
    """Multiples of half a step: every quotient of the rule is a tie or a code."""
    rng = np.random.default_rng(seed)
    w = rng.integers(-16, 15, shape).astype(np.float32) / 64
    w[:, ::32] = -8 / 32
    return w


def every_magnitude(shape, seed=0):
    rng = np.random.default_rng(seed)
    exponents = np.repeat(rng.uniform(-50, 18, (shape[0], shape[1] // 32)), 32, axis=1)
    return np.float32(rng.normal(size=shape) * np.exp2(exponents) / 5)


def zeros(shape):
    return np.zeros(shape, np.float32)


def negative_zeros(shape):
    return -zeros(shape)


def constant(shape):
    return np.full(shape, 0.37, np.float32)


def negative_constant(shape):
    return -constant(shape)


KINDS = [gaussian, heavy_tailed, ties, every_magnitude, zeros, negative_zeros, constant, negative_constant]
small_groups = st_numpy.arrays(
    np.float32, (2, 64), elements=st.floats(-400_000, 400_000, width=32, allow_subnormal=False)
)
similar_groups = st_numpy.arrays(
    np.float32, (2, 32), elements=st.sampled_from([-1.5, -0.75, 0.0, 0.75, 1.5, 1e-7, 3e-7])
)


def assert_within_half_a_scale(w):
    coded = quantize_rows(w, "absmax")
    half = np.repeat(coded.scales.astype(np.float64), 32, axis=-1) / 2
    assert (np.abs(w.astype(np.float64) - dequantized(coded)) <= half).all()


@pytest.mark.parametrize("kind", KINDS)
def test_absmax_errs_by_half_a_scale_at_most(kind):
    assert_within_half_a_scale(kind((64, 512)))


@settings(deadline=None, max_examples=60)
@given(st.one_of(small_groups, similar_groups))
def test_absmax_bound_holds_for_any_weights(w):
    assert_within_half_a_scale(w)


def test_absmax_bound_where_scales_are_subnormal():
    tiny = np.float32(2.0**-24)
    peaks = np.arange(1, 4000, dtype=np.float32) * tiny / 16
    w = np.zeros((len(peaks), 32), np.float32)
    w[:, 3], w[:, 7] = peaks, -peaks / 3
    assert_within_half_a_scale(w)
    assert quantize_rows(w, "absmax").scales.min() == tiny


def test_absmax_is_the_plain_rule():
    w = heavy_tailed((32, 256), seed=3)
    codes, scales = quantize_rows(w, "absmax")
    groups = w.reshape(32, 8, 32)
    np.testing.assert_array_equal(scales, (np.abs(groups).max(-1) / np.float32(7)).astype(np.float16))
    expected = np.rint(groups / scales.astype(np.float32)[..., None]).clip(-8, 7)
    np.testing.assert_array_equal(codes.reshape(groups.shape), expected)


def assert_equals_reference_encoder(w):
    reference = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(pack_q4_0(*quantize_rows(w, "q4_0")), reference)


@pytest.mark.parametrize("kind", KINDS)
def test_q4_0_equals_the_reference_encoder(kind):
    assert_equals_reference_encoder(kind((64, 512)))


@settings(deadline=None, max_examples=60)
@given(st.one_of(small_groups, similar_groups))
def test_q4_0_equals_the_reference_encoder_for_any_weights(w):
    # Where the inverse of a step overflows the reference encodes what it computes from infinity; see the test below.
    steps = np.abs(w.reshape(-1, 32)).max(axis=1) / 8
    assume(np.all((steps == 0) | (steps > np.float32(2.0**-127))))
    assert_equals_reference_encoder(w)


def test_q4_0_takes_the_first_of_equal_magnitudes():
    w = np.zeros((2, 32), np.float32)
    w[0, [5, 9]] = 4, -4
    w[1, [5, 9]] = -4, 4
    codes, scales = quantize_rows(w, "q4_0")
    np.testing.assert_array_equal(scales, [[-0.5], [0.5]])
    np.testing.assert_array_equal(codes[:, [5, 9]], [[-8, 7], [-8, 7]])


def test_q4_0_weights_whose_inverse_step_overflows_are_zero():
    w = np.full((1, 32), 1e-39, np.float32)
    w[0, ::2] = -0.9e-39
    coded = quantize_rows(w, "q4_0")
    np.testing.assert_array_equal(coded.codes, 0)
    assert coded.scales[0, 0] == 0


@pytest.mark.parametrize("kind", [gaussian, heavy_tailed, ties, every_magnitude, constant, zeros])
@pytest.mark.parametrize("weighted", [False, True])
def test_mse_is_never_worse_than_the_simple_rules(kind, weighted):
    w = kind((48, 256))
    ms = np.random.default_rng(7).lognormal(sigma=2, size=256) if weighted else None
    importance = ms if weighted else 1.0
    best = squared_error(w, quantize_rows(w, "mse", activation_ms=ms), importance)
    for method in ("absmax", "q4_0"):
        assert (best <= squared_error(w, quantize_rows(w, method), importance) * (1 + 1e-12)).all()


@settings(deadline=None, max_examples=30)
@given(
    st.one_of(small_groups, similar_groups), st_numpy.arrays(np.float64, (64,), elements=st.floats(0, 1e6, width=32))
)
def test_mse_is_never_worse_for_any_weights_and_importances(w, ms):
    ms = ms[: w.shape[1]]
    best = squared_error(w, quantize_rows(w, "mse", activation_ms=ms), ms)
    for method in ("absmax", "q4_0"):
        assert (best <= squared_error(w, quantize_rows(w, method), ms) * (1 + 1e-12) + 1e-300).all()


def test_mse_is_never_worse_where_the_importances_that_differ_are_lost_in_float32():
    w = gaussian((64, 32))
    w[:, 0] = 0
    ms = np.full(32, 1e-44)
    ms[0] = 1
    best = squared_error(w, quantize_rows(w, "mse", activation_ms=ms), ms)
    simple = [squared_error(w, quantize_rows(w, method), ms) for method in ("absmax", "q4_0")]
    assert (simple[1] < simple[0]).any()
    assert (best <= np.minimum(*simple) * (1 + 1e-12)).all()


def test_mse_gains_what_it_should_on_gaussian_weights():
    # Measured over 10 million weights: 0.0970, 0.0859 and 0.0809; a search over 300 scales reaches 0.0808.
    w = gaussian((128, 1024))
    errors = {method: relative_rms(w, quantize_rows(w, method)) for method in METHODS}
    assert errors["absmax"] == pytest.approx(0.0970, rel=0.01)
    assert errors["q4_0"] == pytest.approx(0.0859, rel=0.01)
    assert errors["mse"] == pytest.approx(0.0809, rel=0.01)


def test_mse_clips_outliers_in_columns_that_carry_no_activation():
    w = gaussian((32, 512))
    w[:, ::32] *= 100
    ms = np.ones(512)
    ms[::32] = 1e-9
    weighted = squared_error(w, quantize_rows(w, "mse", activation_ms=ms), ms).sum()
    plain = squared_error(w, quantize_rows(w, "mse"), ms).sum()
    assert weighted < 0.02 * plain


def test_mse_reproduces_a_matrix_that_is_on_a_grid():
    rng = np.random.default_rng(2)
    codes = rng.integers(-8, 8, (16, 64)).astype(np.int8)
    codes[:, ::32] = -8
    scales = np.exp2(rng.integers(-9, -3, (16, 2))).astype(np.float16) * rng.choice([-1, 1], (16, 2)).astype(np.float16)
    w = np.float32(codes * np.repeat(scales.astype(np.float32), 32, axis=1))
    np.testing.assert_array_equal(dequantized(quantize_rows(w, "mse")), w)


def test_importance_of_zero_everywhere_falls_back_to_a_sound_scale():
    w = gaussian((4, 64))
    coded = quantize_rows(w, "mse", activation_ms=np.zeros(64))
    np.testing.assert_array_equal(dequantized(coded), dequantized(quantize_rows(w, "absmax")))


@pytest.mark.parametrize("method", METHODS)
def test_zeros_stay_zeros_with_scale_zero(method):
    w = gaussian((2, 96))
    w[0, 32:64] = 0
    codes, scales = quantize_rows(w, method)
    np.testing.assert_array_equal(codes[0, 32:64], 0)
    assert scales[0, 1] == 0
    assert np.count_nonzero(scales) == 5


@pytest.mark.parametrize("method", METHODS)
def test_rows_do_not_depend_on_how_they_are_chunked(method):
    w = heavy_tailed((70, 4096) if method == "mse" else (150, 4096))
    whole = quantize_rows(w, method)
    for n in (0, 31, 32, len(w) - 1):
        alone = quantize_rows(w[n : n + 1], method)
        np.testing.assert_array_equal(whole.codes[n : n + 1], alone.codes)
        np.testing.assert_array_equal(whole.scales[n : n + 1], alone.scales)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_sources_count_as_their_exact_float32(dtype):
    w = gaussian((8, 64)).astype(dtype)
    for got, want in zip(quantize_rows(w), quantize_rows(w.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("method", METHODS)
def test_public_quantize_takes_jax_arrays_stacks_and_views(method):
    w = gaussian((2, 4, 96))
    q = quantize(jnp.asarray(w), method)
    assert isinstance(q, Q4Tensor)
    assert q.shape == w.shape
    np.testing.assert_array_equal(np.asarray(dequantize(q)), dequantized(quantize_rows(w, method)))
    turned = np.ascontiguousarray(w[0].T).T
    np.testing.assert_array_equal(quantize_rows(turned, method).codes, quantize_rows(w[0], method).codes)


def test_memory_beyond_the_result_is_a_few_megabytes():
    w = gaussian((4096, 2048))
    tracemalloc.start()
    for method in ("absmax", "q4_0"):
        tracemalloc.reset_peak()
        coded = quantize_rows(w, method)
        result = coded.codes.nbytes + coded.scales.nbytes
        del coded
        assert tracemalloc.get_traced_memory()[1] < result + (6 << 20)
    tracemalloc.stop()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_counted_and_located(method, bad):
    w = gaussian((2, 40, 4096))
    w[1, 7, 5] = w[1, 7, 6] = w[1, 39, 4000] = bad
    with pytest.raises(ValueError, match=r"3 of 327680 weights are infinite or NaN, the first at \(1, 7, 5\)"):
        quantize(w, method)


@pytest.mark.parametrize(("method", "limit"), [("absmax", 7 * LARGEST), ("q4_0", 8 * LARGEST), ("mse", 7 * LARGEST)])
def test_weights_beyond_the_largest_scale_are_refused(method, limit):
    w = np.zeros((2, 64), np.float32)
    w[1, 40] = limit
    assert abs(dequantized(quantize_rows(w, method))[1, 40] - limit) <= LARGEST / 2
    w[1, 40] = limit * 1.01
    with pytest.raises(ValueError, match="too large for method="):
        quantize_rows(w, method)


def test_bad_requests_are_refused():
    w = gaussian((2, 64))
    cases = [
        (w, {"method": "best"}, ValueError, "method must be one of absmax, q4_0, mse, got 'best'"),
        (w[:, :40], {}, ValueError, "multiple of 32, got 40"),
        (w[:, :0], {}, ValueError, "not empty"),
        (w[:0], {}, ValueError, "not empty"),
        (w[0], {}, ValueError, r"must be \[..., N, I\]"),
        (w.astype(np.float64), {}, TypeError, "got float64"),
        (w.astype(np.int32), {}, TypeError, "got int32"),
        (w, {"activation_ms": np.ones(64)}, ValueError, "method='mse' only"),
        (w, {"method": "mse", "activation_ms": np.ones(32)}, ValueError, r"\[I\] = \(64,\)"),
        (w, {"method": "mse", "activation_ms": -np.ones(64)}, ValueError, "not negative"),
        (w, {"method": "mse", "activation_ms": np.full(64, np.nan)}, ValueError, "must be finite"),
    ]
    for source, options, error, message in cases:
        with pytest.raises(error, match=message):
            quantize(source, **options)


def test_report_measures_what_it_says():
    scales = np.array([[0.5, 0.25], [0.0, 0.5], [0.0, 0.0], [1.0, 1.0]], np.float16)
    codes = np.ones((4, 64), np.int8)
    codes[3] = 0
    w = np.zeros((4, 64), np.float32)
    w[0, :32], w[0, 32:] = 0.5, 0.25
    w[1, 3], w[1, 32:] = 0.125, 0.5  # one block lost to its scale
    w[3, 5] = -0.25  # a row lost: its codes are all 0; row 2 is zero in the source as well
    report = quantization_report(w, Q4Tensor.from_logical(codes, scales))
    error, norm = 0.125**2 + 0.25**2, np.square(w, dtype=np.float64).sum()
    assert report.max_error == 0.25
    assert report.rms_error == pytest.approx(np.sqrt(error / 256), rel=1e-12)
    assert report.rms_relative == pytest.approx(np.sqrt(error / norm), rel=1e-12)
    assert report.zero_code_share == 0.25
    assert report.zeroed_rows == 0.25
    assert report.zeroed_blocks == 2 / 8
    assert all(type(field) is float for field in report)


def test_report_counts_blocks_whose_scale_underflows():
    w = np.full((4, 64), 1e-3, np.float32)
    w[0], w[1, :32] = 1e-9, 1e-9
    for method in METHODS:
        report = quantization_report(w, quantize(w, method))
        assert report.zeroed_rows == 0.25
        assert report.zeroed_blocks == 3 / 8


def test_report_of_a_large_matrix_equals_the_direct_figures():
    w = gaussian((100, 4096))
    coded = quantize_rows(w)
    report = quantization_report(w, Q4Tensor.from_logical(*coded))
    assert report.rms_relative == pytest.approx(relative_rms(w, coded), rel=1e-12)
    assert report.max_error == np.abs(w - dequantized(coded)).max()
    assert report.zero_code_share == np.mean(coded.codes == 0)
    zero = np.zeros((2, 32), np.float32)
    assert quantization_report(zero, quantize(zero)) == (0, 0, 0, 1, 0, 0)


def test_report_refuses_a_matrix_of_another_shape():
    w = gaussian((2, 64))
    with pytest.raises(ValueError, match=r"shape of q, \(2, 64\), got \(1, 64\)"):
        quantization_report(w[:1], quantize(w))
    with pytest.raises(TypeError, match="must be a Q4Tensor"):
        quantization_report(w, w)
