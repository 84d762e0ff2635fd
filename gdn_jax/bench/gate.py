"""The gate before every measurement: a kernel's result against float64. What does not pass is not timed.

Numpy only, so that programs in other frameworks can be held to the same references.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gdn_jax.evidence import bounds, oracle
from gdn_jax.evidence.metrics import max_rel

__all__ = [
    "BOUNDS",
    "chunk_errors",
    "delta_error",
    "error",
    "layer_errors",
    "product_error",
    "sample",
    "serial_delta",
    "serial_delta_gradients",
    "unpacked",
]

BOUNDS: Mapping[tuple[str, str], float] = {
    # Weights in 4 bits, exact in them and float32 in the activations. Measured: 1.8e-7 on an H200.
    ("gemv", "exact"): 1e-6,
    # 8-bit activations. Measured: 1.3e-2 on heavy-tailed ones.
    ("gemv", "q8"): 5e-2,
    # bfloat16 activations, scales and results, as other frameworks have them: a few units of 2^-9.
    ("gemv", "bf16"): 1e-2,
    # Float32 in another order of summation than ours.
    ("gemv", "f32"): 5e-6,
    # The worst of thousands of rows. Sums in float32, one term for every 32 columns, leave 1.5e-6 at 17408 columns; x
    # rounded to bfloat16 is a few units of 2^-9.
    ("gemm", "exact"): 3e-6,
    ("gemm", "bf16"): 1e-2,
    # The output and S of one step.
    ("delta", "f32"): bounds.OPERATOR,
    # Sequences: o of every token, and S. Measured by plain XLA on a CPU: 3.2e-7 and 2.3e-7; 5.5e-3 and 3.3e-3.
    ("chunk", "exact"): 2e-6,
    ("chunk rms", "exact"): 2e-6,
    ("chunk", "bf16"): 1e-2,
    ("chunk rms", "bf16"): 5e-3,
    # The same and the gradients of all operands. Measured by plain XLA on a CPU: 6.5e-7 and 3.5e-7; 5.2e-3 and 6.3e-3.
    ("chunk backward", "exact"): 2e-6,
    ("chunk backward rms", "exact"): 2e-6,
    ("chunk backward", "bf16"): 1e-2,
    ("chunk backward rms", "bf16"): 8e-3,
    ("layer", "exact"): bounds.LAYER,
    ("layer state", "exact"): bounds.STATE,
    # 8-bit activations of two products, through two norms: this sees a wrong operator, not a lost digit.
    ("layer", "q8"): 1e-1,
    ("layer state", "q8"): 1e-1,
    # Logits of a small model against plain XLA, float32 throughout.
    ("decoder", "exact"): 1e-5,
    ("decoder", "q8"): 1e-1,
    # Prompts: where sums differ in a last bit, the next rounding may go the other way, so that two forms are as far
    # from each other as from float32. Measured between chunks of 64 and of 48: 1.6e-2 (bfloat16 weights), 2.4e-4 (4
    # bits).
    ("decoder", "bf16"): 5e-2,
}
"""(subject, precision) -> the largest max_rel that passes."""


def sample(size: int, most: int = 128) -> np.ndarray:
    """At most `most` of `size` indices: both ends, where leftovers of a tiling lie, and an even spread between."""
    ends, spread = most // 4, most // 2
    parts = (np.arange(ends), np.linspace(0, size - 1, spread), np.arange(size - ends, size))
    return np.unique(np.clip(np.concatenate(parts).astype(np.int64), 0, size - 1))


def unpacked(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes int8 [N, I] and scales [N, I/32] -> code · scale, float64 [N, I]."""
    return codes * np.repeat(scales.astype(np.float64), codes.shape[1] // scales.shape[1], axis=1)


def product_error(y: np.ndarray, w: np.ndarray, x: np.ndarray) -> float:
    """max_rel of y [B, n] against W x, for the rows W [n, I] that y has, and x [B, I]: the worst row of the batch."""
    exact = np.asarray(x, np.float64) @ w.T
    return max(error(*pair) for pair in zip(y, exact, strict=True))


def delta_error(o: np.ndarray, s: np.ndarray, before: np.ndarray, inputs: tuple[np.ndarray, ...]) -> float:
    """The worse max_rel of o [B, H, V] and of S [B, H, K, V], after one step from `before`.

    `inputs`: q and k [B, G, K], v [B, H, V], beta and g [B, H].
    """
    q, k, v, beta, g = inputs
    q, k = (np.repeat(heads, before.shape[1] // heads.shape[1], axis=1) for heads in (q, k))
    exact_s, exact_o = oracle.delta_step(before, q, k, v, beta, g)
    return max(error(o, exact_o), error(s, exact_s))


def serial_delta(before: np.ndarray, *inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """o [T, B, H, V] of T tokens and S after the last, float64, from `before` [B, H, K, V].

    `inputs`: q and k [T, B, G, K], v [T, B, H, V], beta and g [T, B, H].
    """
    s, outputs = before, []
    for q, k, *others in zip(*inputs, strict=True):
        q, k = (np.repeat(heads, before.shape[1] // heads.shape[1], axis=1) for heads in (q, k))
        s, o = oracle.delta_step(s, q, k, *others)
        outputs.append(o)
    return np.stack(outputs), s


def serial_delta_gradients(
    do: np.ndarray, ds: np.ndarray, before: np.ndarray, *inputs: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Gradients of sum(do · o) + sum(ds · S) with respect to `before` and every one of `inputs`, float64.

    o and S, and what they are made of, as for `serial_delta`, of which this is every token backwards.
    """
    key_heads, ratio = inputs[0].shape[2], before.shape[1] // inputs[0].shape[2]
    q, k, v, beta, g = (np.asarray(x, np.float64) for x in inputs)
    q, k = (np.repeat(heads, ratio, axis=2) for heads in (q, k))
    states = [np.asarray(before, np.float64)]
    for token in zip(q, k, v, beta, g, strict=True):
        states.append(oracle.delta_step(states[-1], *token)[0])
    found, ds = [], np.asarray(ds, np.float64)
    for t in reversed(range(len(v))):
        decay = np.exp(g[t])[..., None, None]
        decayed, column = decay * states[t], k[t][..., None]
        missing = v[t] - np.sum(decayed * column, axis=-2)
        ds = ds + q[t][..., None] * do[t][..., None, :]
        du = np.sum(ds * column, axis=-2)
        dv, u = beta[t][..., None] * du, beta[t][..., None] * missing
        dq = np.sum(states[t + 1] * do[t][..., None, :], axis=-1)
        dk = np.sum(ds * u[..., None, :] - decayed * dv[..., None, :], axis=-1)
        ds = ds - column * dv[..., None, :]
        found.append((dq, dk, dv, np.sum(du * missing, axis=-1), np.sum(ds * decayed, axis=(-2, -1))))
        ds = decay * ds
    dq, dk, *others = (np.stack(arrays[::-1]) for arrays in zip(*found, strict=True))
    dq, dk = (x.reshape(*x.shape[:2], key_heads, ratio, -1).sum(axis=3) for x in (dq, dk))
    return ds, dq, dk, *others


def chunk_errors(
    got: Sequence[Any], exact: Sequence[Any], precision: str, subject: str = "chunk"
) -> tuple[float, float]:
    """max_rel and RMS error over RMS, each the worst of the arrays, which may be float64 of any library.

    `subject`: whose bounds, "chunk" or "chunk backward". The former is infinite where the latter is beyond its bound,
    or something is not finite: both are looked at.
    """
    worst, rms = 0.0, 0.0
    for array, reference in zip(got, exact, strict=True):
        difference = array - reference
        found = float(abs(difference).max()) / float(abs(reference).max())
        of_all = (float((difference**2).sum()) / float((reference**2).sum())) ** 0.5
        worst, rms = (max(*pair) if np.isfinite(pair).all() else np.inf for pair in ((worst, found), (rms, of_all)))
    return (worst if rms <= BOUNDS[f"{subject} rms", precision] else np.inf), rms


def layer_errors(
    got: tuple[np.ndarray, np.ndarray, np.ndarray],
    weights: Mapping[str, np.ndarray],
    x: np.ndarray,
    before: tuple[np.ndarray, np.ndarray],
    **geometry: Any,
) -> tuple[float, float]:
    """max_rel of a layer's y [B, D], and the worse of S and conv_hist, after one token x [B, D] from `before`."""
    run = oracle.run_layer(weights, x[None], S=before[0], conv_hist=before[1], **geometry)
    y, s, history = got
    return error(y, run.ys[0]), max(error(s, run.S), error(history, run.conv_hist))


def error(got: np.ndarray, exact: np.ndarray) -> float:
    """`max_rel`, infinite where something is not finite: NaN would compare as neither red nor green."""
    found = max_rel(got, exact)
    return found if np.isfinite(found) else float("inf")
