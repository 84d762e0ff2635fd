"""The reference: one Gated DeltaNet layer in float64 numpy, written from the mathematics.

It shares no code with the library that it judges, nothing but numpy is imported, and where plain and fast disagree it
is plain. Weights are read exactly as stored and every operation after that is float64, so what it returns is the value
that a float32 implementation approximates, about nine digits beyond what that implementation can hold.

Axis letters: T tokens, B batch rows, D hidden, G key heads, H value heads, K key head dim, V value head dim, W conv
width, C = 2GK + HV conv channels, n tapped tokens. `...` stands for any leading axes.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

type Array = NDArray[np.float64]

# Added to the sum of squares of q and of k. A constant of the model, not the configured eps of its RMS norms.
QK_EPS = 1e-6
# Beyond this distance from zero softplus takes the form that can neither overflow nor lose its last digits.
SOFTPLUS_LIMIT = 20.0


class LayerRun(NamedTuple):
    """What a run over T tokens leaves, all float64: ys [T,B,D], S [B,H,K,V], conv_hist [B,W-1,C], and taps by name."""

    ys: Array
    S: Array
    conv_hist: Array
    taps: dict[str, Array]


class _Dims(NamedTuple):
    """The sizes of one layer, by axis letter."""

    D: int
    G: int
    H: int
    K: int
    V: int
    W: int

    @property
    def C(self) -> int:
        return 2 * self.G * self.K + self.H * self.V

    @property
    def R(self) -> int:
        return self.H // self.G


# ---------------------------------------------------------------------------------------------------------------------
# Single operators
# ---------------------------------------------------------------------------------------------------------------------


def sigmoid(x: ArrayLike) -> Array:
    """1 / (1 + exp(-x)), element by element, with no exponential of a positive number."""
    x = _float64(x)
    shrinking = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, shrinking) / (1.0 + shrinking)


def silu(x: ArrayLike) -> Array:
    """x · sigmoid(x), element by element."""
    return _float64(x) * sigmoid(x)


def softplus_gate(a: ArrayLike, dt_bias: ArrayLike, A_log: ArrayLike) -> Array:
    """g = -exp(A_log) · softplus(a + dt_bias) for a [...,H], dt_bias [H], A_log [H]: the log of the decay, at most 0.

    With x = a + dt_bias, softplus is x above 20 and log1p(exp(x)) down to -20; below that g = -exp(A_log + x), because
    there the two factors can be infinite and zero while their product is an ordinary number.
    """
    x, A_log = np.broadcast_arrays(_float64(a) + _float64(dt_bias), _float64(A_log))
    high, low = x > SOFTPLUS_LIMIT, x < -SOFTPLUS_LIMIT
    middle = ~(high | low)  # NaN included, so that it comes out as NaN
    rate = np.empty(x.shape)
    # Each branch sees its own elements only: one that is computed and then thrown away could still spoil the others.
    # A rate beyond the range of float64 is legitimate: g = -inf is a full reset.
    with np.errstate(over="ignore"):
        rate[high] = np.exp(A_log[high]) * x[high]
        rate[middle] = np.exp(A_log[middle]) * np.log1p(np.exp(x[middle]))
        rate[low] = np.exp(A_log[low] + x[low])
    return -rate


def conv_step(window: ArrayLike, weight: ArrayLike) -> Array:
    """silu(Σ_j weight[c,j] · window[j,c]): window [...,W,C], oldest frame first, weight [C,1,W] or [C,W] -> [...,C].

    Raises:
        ValueError: the window does not hold W frames of C channels.
    """
    window, weight = _float64(window), _float64(weight)
    kernel = weight[:, 0, :] if weight.ndim == 3 else weight
    if window.shape[-2:] != kernel.shape[::-1]:
        raise ValueError(
            f"window must end in [W, C] = {list(kernel.shape[::-1])} to fit a conv weight of shape "
            f"{list(weight.shape)}, got {list(window.shape)}"
        )
    total = np.zeros(window.shape[:-2] + window.shape[-1:])
    for j in range(kernel.shape[1]):
        total += kernel[:, j] * window[..., j, :]
    return silu(total)


def qk_normalise(x: ArrayLike) -> Array:
    """x / sqrt(Σ x² + 1e-6) over the last axis, [...,K] -> [...,K]: the eps is inside the root and on the sum."""
    x = _float64(x)
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + QK_EPS)


def delta_step(
    S: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: ArrayLike, g: ArrayLike
) -> tuple[Array, Array]:
    """S' = exp(g) S; u = beta (v - S'ᵀ k); S'' = S' + k uᵀ; o = S''ᵀ q. Returns (S'', o) and leaves its inputs alone.

    S [...,K,V], q and k [...,K] (already normalised, q scaled), v [...,V], beta and g [...] -> S [...,K,V], o [...,V].
    """
    S, q, k, v, beta, g = (_float64(array) for array in (S, q, k, v, beta, g))
    S = np.exp(g)[..., None, None] * S
    u = beta[..., None] * (v - _read(S, k))
    S = S + k[..., :, None] * u[..., None, :]
    return S, _read(S, q)


def gated_rms_norm(o: ArrayLike, weight: ArrayLike, z: ArrayLike, eps: float) -> Array:
    """o / sqrt(mean(o²) + eps) · weight · silu(z) over the last axis: o and z [...,V], weight [V] -> [...,V]."""
    o = _float64(o)
    normed = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + eps)
    return normed * _float64(weight) * silu(z)


def _read(S: Array, key: Array) -> Array:
    """Sᵀ key per head: [...,K,V] and [...,K] -> [...,V]."""
    return np.matmul(key[..., None, :], S)[..., 0, :]


# ---------------------------------------------------------------------------------------------------------------------
# The layer
# ---------------------------------------------------------------------------------------------------------------------


def run_layer(
    weights: Mapping[str, np.ndarray],
    xs: np.ndarray,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    norm_eps: float,
    S: np.ndarray | None = None,
    conv_hist: np.ndarray | None = None,
    taps_at: Sequence[int] = (),
    active: np.ndarray | None = None,
) -> LayerRun:
    """ys [T,B,D] of one layer for xs [T,B,D], token after token, from the given state (zeros where it is None).

    Args:
        weights: canonical name -> array of any real dtype: `in_proj_qkv.weight` [C,D], `in_proj_z.weight` [HV,D],
            `in_proj_b.weight` [H,D], `in_proj_a.weight` [H,D], `conv1d.weight` [C,1,W] or [C,W], `dt_bias` [H],
            `A_log` [H], `norm.weight` [V], `out_proj.weight` [D,HV]. One matrix at a time is held in float64.
        xs: the layer's input.
        key_heads: G.
        value_heads: H, a multiple of G.
        key_dim: K.
        value_dim: V.
        norm_eps: the eps of the gated RMS norm.
        S: [B,H,K,V], the recurrent state before the first token.
        conv_hist: [B,W-1,C], the conv's inputs before the first token, newest last.
        taps_at: tokens to tap, each in [0, T), in the order in which the taps shall hold them.
        active: bool [B]; an inactive row has ys 0, keeps its state bit for bit, and is never read from xs.

    Returns:
        The run. Its taps are, for the tokens of taps_at: XC [n,B,C] conv input, XCV [n,B,C] after conv and SiLU,
        Q [n,B,G,K] normed and scaled by K^-½, K [n,B,G,K] normed, Z [n,B,H,V], A and B [n,B,H] raw, BETA and G [n,B,H]
        made from B and from A, ON [n,B,H,V] before and ONN [n,B,H,V] after the gated norm, OUT [n,B,D], and after the
        token S [n,B,H,K,V] and HIST [n,B,W-1,C]. An inactive row's taps are 0, but for its S and HIST.

    Raises:
        ValueError: a weight is missing, a shape or size does not fit, or a token of taps_at lies outside the run.
        TypeError: an array is not real-valued, or `active` is not boolean.
    """
    _check_sizes(key_heads, value_heads, key_dim, value_dim, norm_eps)
    if np.ndim(xs) != 3:
        raise ValueError(f"xs must have the three axes [T, B, D], got shape {list(np.shape(xs))}")
    T, B, D = np.shape(xs)
    dims = _Dims(D, key_heads, value_heads, key_dim, value_dim, _conv_width(weights))
    _check_weights(weights, dims)
    S = _state("S", S, (B, dims.H, dims.K, dims.V))
    conv_hist = _state("conv_hist", conv_hist, (B, dims.W - 1, dims.C))
    tokens = _tokens(taps_at, T)
    rows = _active_rows(active, B)

    # Only the active rows are computed at all, so nothing that an inactive row holds can reach a result.
    run = _run_rows(weights, _float64(xs)[:, rows], S[rows], conv_hist[rows], dims, norm_eps, tokens)

    taps = {name: _place(np.zeros((B, *tap.shape[2:])), rows, tap) for name, tap in run.taps.items()}
    taps["S"] = _place(S, rows, run.taps["S"])
    taps["HIST"] = _place(conv_hist, rows, run.taps["HIST"])
    return LayerRun(
        ys=_place(np.zeros((B, D)), rows, run.ys),
        S=_place(S, rows, run.S[None])[0],
        conv_hist=_place(conv_hist, rows, run.conv_hist[None])[0],
        taps=taps,
    )


def _run_rows(
    weights: Mapping[str, np.ndarray],
    xs: Array,
    S: Array,
    conv_hist: Array,
    dims: _Dims,
    norm_eps: float,
    tokens: NDArray[np.intp],
) -> LayerRun:
    """The seven steps for checked arguments, every row of xs active."""
    _, G, H, K, V, W = dims
    T, B, _ = xs.shape

    # 1. The projections. B makes beta and A makes the gate, which is the opposite of what the letters suggest.
    XC = _project(xs, weights["in_proj_qkv.weight"])
    Z = _project(xs, weights["in_proj_z.weight"]).reshape(T, B, H, V)
    raw_b = _project(xs, weights["in_proj_b.weight"])
    raw_a = _project(xs, weights["in_proj_a.weight"])
    beta = sigmoid(raw_b)
    g = softplus_gate(raw_a, weights["dt_bias"], weights["A_log"])

    # 2. The causal conv, on the frames of the history followed by the inputs themselves.
    frames = np.concatenate([conv_hist, np.moveaxis(XC, 0, 1)], axis=1)  # [B, W-1+T, C]
    XCV = np.empty_like(XC)
    for t in range(T):
        XCV[t] = conv_step(frames[:, t : t + W], weights["conv1d.weight"])

    # 3. and 4. Split into heads, normalise q and k.
    q, k, v = np.split(XCV, [G * K, 2 * G * K], axis=-1)
    q = qk_normalise(q.reshape(T, B, G, K)) * K**-0.5
    k = qk_normalise(k.reshape(T, B, G, K))
    v = v.reshape(T, B, H, V)

    # 5. The delta rule. `repeat` makes R neighbours of each key head: value head h uses key head h // R.
    ON = np.empty((T, B, H, V))
    S_taps = np.empty((len(tokens), B, H, K, V))
    for t in range(T):
        q_t, k_t = (np.repeat(heads[t], dims.R, axis=-2) for heads in (q, k))
        S, ON[t] = delta_step(S, q_t, k_t, v[t], beta[t], g[t])
        S_taps[tokens == t] = S

    # 6. and 7. The gated norm per value head, and the way back to D.
    ONN = gated_rms_norm(ON, weights["norm.weight"], Z, norm_eps)
    ys = _project(ONN.reshape(T, B, H * V), weights["out_proj.weight"])

    per_token = {"XC": XC, "XCV": XCV, "Z": Z, "Q": q, "K": k, "A": raw_a, "B": raw_b, "BETA": beta, "G": g}
    per_token |= {"ON": ON, "ONN": ONN, "OUT": ys}
    taps = {name: array[tokens] for name, array in per_token.items()}
    taps["S"] = S_taps
    taps["HIST"] = np.moveaxis(frames[:, tokens[:, None] + np.arange(1, W)], 1, 0)
    return LayerRun(ys, S, frames[:, T:], taps)


def _project(x: Array, weight: np.ndarray) -> Array:
    """Weight · x for every token and row: x [T,B,I], weight [O,I] -> [T,B,O].

    All tokens go through one matrix product, so that the float64 copy of the weight is read once, then freed.
    """
    T, B, inner = x.shape
    return (x.reshape(T * B, inner) @ _float64(weight).T).reshape(T, B, len(weight))


def _place(resting: Array, rows: NDArray[np.intp], computed: Array) -> Array:
    """[n,B,...] holding computed [n,len(rows),...] in those rows, and resting [B,...] in all others."""
    placed = np.repeat(resting[None], len(computed), axis=0)
    placed[:, rows] = computed
    return placed


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def _float64(array: ArrayLike) -> Array:
    """The array in float64, exactly; itself when it is float64 already."""
    array = np.asarray(array)
    if not np.can_cast(array.dtype, np.float64):
        raise TypeError(f"expected real numbers that float64 can hold, got an array of dtype {array.dtype}")
    return array.astype(np.float64, copy=False)


def _check_sizes(key_heads: int, value_heads: int, key_dim: int, value_dim: int, norm_eps: float) -> None:
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        if operator.index(size) < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if value_heads % key_heads:
        raise ValueError(f"value_heads must be a multiple of key_heads, got {value_heads} and {key_heads}")
    if not 0 <= norm_eps < np.inf:
        raise ValueError(f"norm_eps must be finite and not negative, got {norm_eps}")


def _conv_width(weights: Mapping[str, np.ndarray]) -> int:
    """W, which the conv weight alone tells."""
    shape = np.shape(_weight(weights, "conv1d.weight"))
    if len(shape) not in (2, 3) or shape[-1] < 1:
        raise ValueError(f"conv1d.weight must be [C, 1, W] or [C, W] with W at least 1, got shape {list(shape)}")
    return shape[-1]


def _check_weights(weights: Mapping[str, np.ndarray], dims: _Dims) -> None:
    """Refuse a missing or misshapen weight before anything is computed."""
    D, H, V, W, C = dims.D, dims.H, dims.V, dims.W, dims.C
    allowed = {
        "in_proj_qkv.weight": [(C, D)],
        "in_proj_z.weight": [(H * V, D)],
        "in_proj_b.weight": [(H, D)],
        "in_proj_a.weight": [(H, D)],
        "conv1d.weight": [(C, 1, W), (C, W)],
        "dt_bias": [(H,)],
        "A_log": [(H,)],
        "norm.weight": [(V,)],
        "out_proj.weight": [(D, H * V)],
    }
    for name, shapes in allowed.items():
        got = np.shape(_weight(weights, name))
        if got not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name} must have shape {expected} for {dims}, got {list(got)}")


def _weight(weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in weights:
        raise ValueError(f"the weight {name} is missing; weights has {sorted(weights)}")
    return weights[name]


def _state(name: str, value: np.ndarray | None, shape: tuple[int, ...]) -> Array:
    """The given state in float64, or zeros."""
    if value is None:
        return np.zeros(shape)
    if np.shape(value) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(np.shape(value))}")
    return _float64(value)


def _tokens(taps_at: Sequence[int], T: int) -> NDArray[np.intp]:
    tokens = [operator.index(token) for token in taps_at]
    for token in tokens:
        if not 0 <= token < T:
            raise ValueError(f"taps_at must hold tokens of [0, {T}), got {token}")
    return np.array(tokens, dtype=np.intp)


def _active_rows(active: np.ndarray | None, B: int) -> NDArray[np.intp]:
    if active is None:
        return np.arange(B)
    active = np.asarray(active)
    if active.dtype != np.bool_:
        raise TypeError(f"active must be boolean, got an array of dtype {active.dtype}")
    if active.shape != (B,):
        raise ValueError(f"active must have shape [B] = [{B}], got {list(active.shape)}")
    return np.flatnonzero(active)
