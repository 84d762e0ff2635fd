"""Weights and inputs as a function of a text label: the same bits with every numpy version, on every machine.

A label is hashed into the key of a counter-based bit generator, and only its raw 64-bit words are used: numpy keeps
those stable, but not the sampling methods built on them. Words become small integers exactly, and integers become
float32 by operations that IEEE 754 rounds in one way; no exponential or logarithm of a maths library takes part.
So a golden needs to store no weights, and a run elsewhere can rebuild them.

A shape is filled in C order, so the first n values of a label do not depend on the shape.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np

from gdn_jax.config import GdnConfig

__all__ = ["INPUT_KINDS", "gaussian", "heavy_tailed", "inputs", "layer_state", "layer_weights", "uniform"]

_FIELD_MEAN = 4 * (2**16 - 1) // 2
_FIELD_SD = math.sqrt(4 * (2**32 - 1) / 12)

# The outlier factor 2^e has P(e >= n) = 4^-n, cut at n = 7, so that E[4^e] = 7 · 3/4 + 1 = 2.5².
_OUTLIER_STEPS = 7
_OUTLIER_RMS = 2.5

# Bounds the temporaries; a few hundred KiB stay in the cache of one core.
_VALUES_PER_CHUNK = 2**15


def gaussian(label: str, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """`scale · z`, z of mean 0 and variance 1: the centred sum of the four 16-bit fields of one word.

    Bell-shaped with |z| < 3.47 and kurtosis 2.7. Returns float32 of `shape`.
    """
    factor = np.float32(scale / _FIELD_SD)
    return _fill(label, shape, 1, lambda words: _bell(words[:, 0]).astype(np.float32) * factor)


def heavy_tailed(label: str, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """`scale · z · 2^e / 2.5`, z as in `gaussian` and P(e >= n) = 4^-n for n up to 7: variance 1 and real outliers.

    The tail falls like a power of the value up to about 170: somewhat heavier than Student's t with 3 degrees of
    freedom, as the activations of language models are. Returns float32 of `shape`.
    """
    factor = np.float32(scale / (_FIELD_SD * _OUTLIER_RMS))

    def values(words: np.ndarray) -> np.ndarray:
        draw = words[:, 1] >> np.uint64(64 - 2 * _OUTLIER_STEPS)
        exponent = sum((draw < 4**n).astype(np.int64) for n in range(_OUTLIER_STEPS))
        # At most 18 significant bits, whatever the exponent: the conversion to float32 is exact.
        return (_bell(words[:, 0]) << exponent).astype(np.float32) * factor

    return _fill(label, shape, 2, values)


def uniform(label: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """`low + (high - low) · k · 2^-24` rounded to float32, k uniform on the integers 0 … 2^24 - 1."""
    step = (high - low) * 2.0**-24
    return _fill(label, shape, 1, lambda words: low + step * (words[:, 0] >> np.uint64(40)).astype(np.float64))


INPUT_KINDS: dict[str, Callable[[str, tuple[int, ...]], np.ndarray]] = {
    "gaussian": gaussian,
    "heavy": heavy_tailed,
    "uniform": lambda label, shape: uniform(label, shape, -3.0, 3.0),
}


def inputs(kind: str, label: str, shape: tuple[int, ...]) -> np.ndarray:
    """Activations of a kind: "gaussian" and "heavy" of variance 1, "uniform" on [-3, 3). Returns float32 of `shape`.

    Raises:
        ValueError: the kind is none of the three.
    """
    if kind not in INPUT_KINDS:
        raise ValueError(f"kind must be one of {', '.join(INPUT_KINDS)}, got {kind!r}")
    return INPUT_KINDS[kind](label, shape)


def layer_weights(cfg: GdnConfig, label: str) -> dict[str, np.ndarray]:
    """One layer's weights: canonical name -> float32 array, in the layout of a Qwen3.5 checkpoint.

    `in_proj_qkv` [C, D], `in_proj_z` [H·V, D], `in_proj_b` and `in_proj_a` [H, D], `conv1d` [C, 1, W], `dt_bias` and
    `A_log` [H], `norm` [V], `out_proj` [D, H·V]. The projections keep the variance of their input. `exp(A_log)` runs
    over 0.01 … 16, as in a freshly initialised model, and `dt_bias` over [-7, 1): together heads that forget within
    one token and heads that hold for 10^5.
    """

    def fan_in(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return gaussian(f"{label}/{name}", shape, 1 / math.sqrt(shape[-1]))

    shapes = {
        "in_proj_qkv.weight": (cfg.conv_channels, cfg.hidden),
        "in_proj_z.weight": (cfg.value_channels, cfg.hidden),
        "in_proj_b.weight": (cfg.value_heads, cfg.hidden),
        "in_proj_a.weight": (cfg.value_heads, cfg.hidden),
        "conv1d.weight": (cfg.conv_channels, 1, cfg.conv_width),
        "out_proj.weight": (cfg.hidden, cfg.value_channels),
    }
    return {
        **{name: fan_in(name, shape) for name, shape in shapes.items()},
        "dt_bias": uniform(f"{label}/dt_bias", (cfg.value_heads,), -7.0, 1.0),
        "A_log": uniform(f"{label}/A_log", (cfg.value_heads,), -4.605, 2.773),
        "norm.weight": np.float32(1) + gaussian(f"{label}/norm.weight", (cfg.value_dim,), 0.1),
    }


def layer_state(cfg: GdnConfig, label: str, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """A state as if tokens had gone before: S [B, H, K, V] and conv history [B, W-1, C], float32."""
    S = gaussian(f"{label}/S", (batch, cfg.value_heads, cfg.key_dim, cfg.value_dim), 0.25)
    return S, gaussian(f"{label}/conv_hist", (batch, cfg.conv_width - 1, cfg.conv_channels))


def _bell(words: np.ndarray) -> np.ndarray:
    """The sum of the four 16-bit fields of each word less its mean, as int64: two fields to a half-word at a time."""
    pairs = np.uint64(0x0000FFFF0000FFFF)
    halves = (words & pairs) + ((words >> np.uint64(16)) & pairs)
    return ((halves & np.uint64(0xFFFFFFFF)) + (halves >> np.uint64(32))).astype(np.int64) - _FIELD_MEAN


def _fill(
    label: str, shape: tuple[int, ...], words_per_value: int, values: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """float32 of `shape` in C order, each value made by `values` from the label's next words [n, words_per_value]."""
    generator = np.random.Philox(key=int.from_bytes(hashlib.sha256(label.encode()).digest()[:16], "little"))
    flat = np.empty(math.prod(shape), np.float32)
    for start in range(0, flat.size, _VALUES_PER_CHUNK):
        part = flat[start : start + _VALUES_PER_CHUNK]
        part[:] = values(generator.random_raw(part.size * words_per_value).reshape(-1, words_per_value))
    return flat.reshape(shape)
