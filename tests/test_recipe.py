import hashlib
import math

import numpy as np
import pytest

from gdn_jax.config import GdnConfig
from gdn_jax.evidence import recipe

CFG = GdnConfig(hidden=40, key_heads=2, value_heads=6, key_dim=12, value_dim=20, conv_width=3)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()[:16]


# The goldens were computed from these very bits: a changed digest invalidates them all.
@pytest.mark.parametrize(
    ("array", "expected"),
    [
        pytest.param(lambda: recipe.gaussian("label", (1000,)), "23f823c1d578de3b", id="gaussian"),
        pytest.param(
            lambda: recipe.gaussian("label", (300, 300), 5120**-0.5), "fe3ed7f54c014a0f", id="gaussian-chunks"
        ),
        pytest.param(lambda: recipe.heavy_tailed("label", (70_000,)), "f0fed4dde9a34cf8", id="heavy"),
        pytest.param(lambda: recipe.uniform("label", (40_000,), -3.0, 3.0), "3c4f3f4e5f3ca5cd", id="uniform"),
        *(
            pytest.param(lambda name=name: recipe.layer_weights(CFG, "layer")[name], expected, id=name)
            for name, expected in {
                "in_proj_qkv.weight": "23f89159c67ddeed",
                "norm.weight": "d1583828c99df5fe",
                "A_log": "822c3948eb45b518",
                "dt_bias": "3c58e72bffbfa0ea",
            }.items()
        ),
    ],
)
def test_bits_are_fixed(array, expected):
    assert digest(array()) == expected


def test_integer_arithmetic_by_hand():
    """One word, its fields and its outlier draw worked out with Python integers."""
    key = int.from_bytes(hashlib.sha256(b"by hand").digest()[:16], "little")
    words = [int(word) for word in np.random.Philox(key=key).random_raw(200)]
    sums = [sum((word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131_070 for word in words]
    sd = math.sqrt((2**32 - 1) / 3)

    np.testing.assert_array_equal(
        recipe.gaussian("by hand", (200,)), [np.float32(total) * np.float32(1 / sd) for total in sums]
    )
    np.testing.assert_array_equal(
        recipe.uniform("by hand", (200,), -3.0, 3.0),
        [np.float32(-3.0 + (word >> 40) * (6.0 * 2.0**-24)) for word in words],
    )
    # The exponent is the number of leading zero base-4 digits of the second word, at most seven.
    exponents = [min(7, (64 - word.bit_length()) // 2) for word in words[1::2]]
    assert max(exponents) >= 2
    np.testing.assert_array_equal(
        recipe.heavy_tailed("by hand", (100,)),
        [
            np.float32(total * 2**exponent) * np.float32(1 / (sd * 2.5))
            for total, exponent in zip(sums[::2], exponents, strict=True)
        ],
    )


def test_gaussian_moments():
    values = recipe.gaussian("moments", (1_000_000,), 2.0).astype(np.float64)
    assert abs(values.mean()) < 5 * 2e-3
    assert values.std() == pytest.approx(2.0, rel=5e-3)
    assert (values**4).mean() / values.var() ** 2 == pytest.approx(2.7, rel=0.02)
    assert np.abs(values).max() < 2 * 3.47


@pytest.mark.parametrize("label", [f"heavy {i}" for i in range(8)])
def test_heavy_tail_has_outliers(label):
    values = recipe.inputs("heavy", label, (5, 5120)).astype(np.float64)
    rms = math.sqrt((values**2).mean())
    assert np.abs(values).max() > 20 * rms
    assert (values**4).mean() > 50 * rms**4


def test_heavy_tail_has_unit_variance():
    assert recipe.heavy_tailed("moments", (4_000_000,)).astype(np.float64).std() == pytest.approx(1.0, rel=0.05)


def test_uniform_covers_its_range():
    values = recipe.inputs("uniform", "range", (100_000,))
    assert -3 <= values.min() < -2.999
    assert 2.999 < values.max() < 3
    assert values.astype(np.float64).std() == pytest.approx(6 / math.sqrt(12), rel=0.01)


@pytest.mark.parametrize("kind", recipe.INPUT_KINDS)
def test_values_depend_on_the_label_and_not_on_the_shape(kind):
    flat = recipe.inputs(kind, "a", (100_000,))
    assert flat.dtype == np.float32
    np.testing.assert_array_equal(recipe.inputs(kind, "a", (7, 3)).ravel(), flat[:21])
    other = recipe.inputs(kind, "b", (100_000,))
    assert abs(np.corrcoef(flat, other)[0, 1]) < 5 / math.sqrt(flat.size)
    assert (flat == other).mean() < 1e-3


def test_empty_shape_and_scalar():
    assert recipe.gaussian("a", (0, 4)).shape == (0, 4)
    assert recipe.gaussian("a", ()).shape == ()


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="gaussian, heavy, uniform, got 'normal'"):
        recipe.inputs("normal", "a", (3,))


def test_layer_weights_shapes():
    weights = recipe.layer_weights(CFG, "layer")
    assert {name: array.shape for name, array in weights.items()} == {
        "in_proj_qkv.weight": (168, 40),
        "in_proj_z.weight": (120, 40),
        "in_proj_b.weight": (6, 40),
        "in_proj_a.weight": (6, 40),
        "conv1d.weight": (168, 1, 3),
        "dt_bias": (6,),
        "A_log": (6,),
        "norm.weight": (20,),
        "out_proj.weight": (40, 120),
    }
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


def test_layer_weights_are_realistic():
    """Projections of variance 1/fan-in; decays from 'forgets in one token' to 'holds for thousands'."""
    cfg = GdnConfig(hidden=512, key_heads=16, value_heads=48, key_dim=32, value_dim=48, conv_width=4)
    weights = recipe.layer_weights(cfg, "layer")
    assert weights["in_proj_qkv.weight"].std() == pytest.approx(512**-0.5, rel=0.02)
    assert weights["out_proj.weight"].std() == pytest.approx(2304**-0.5, rel=0.02)
    assert weights["conv1d.weight"].std() == pytest.approx(0.5, rel=0.05)
    assert weights["norm.weight"].mean() == pytest.approx(1, abs=0.05)
    decay = np.exp(-np.exp(weights["A_log"]) * np.log1p(np.exp(weights["dt_bias"])))
    assert decay.min() < 0.3
    assert decay.max() > 0.9995


def test_layers_with_different_labels_share_nothing():
    first, second = (recipe.layer_weights(CFG, label) for label in ("layer 0", "layer 1"))
    for name, array in first.items():
        assert not np.any(array == second[name]), name
