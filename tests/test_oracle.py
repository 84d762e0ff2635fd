"""The float64 oracle against values worked out by hand, or by other arithmetic than its own (decimal, fractions)."""

import ast
import inspect
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gdn_jax.evidence import oracle

LN2 = 0.6931471805599453
LN3 = 1.0986122886681098
# From about 40 on sigmoid is 1 to the last bit of float64, so SiLU hands such values through unchanged.
OPEN = 64.0


def max_rel(got, ref):
    """max|Δ| / max|ref|."""
    return np.max(np.abs(got - ref)) / np.max(np.abs(ref))


# ---------------------------------------------------------------------------------------------------------------------
# Single operators
# ---------------------------------------------------------------------------------------------------------------------


def test_it_imports_nothing_but_numpy_and_the_standard_library():
    tree = ast.parse(inspect.getsource(oracle))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"collections.abc", "numpy", "numpy.typing", "operator", "typing"}


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.0, 0.5),
        (LN3, 0.75),
        (-LN3, 0.25),
        (OPEN, 1.0),
        (-1000.0, 0.0),
        (1000.0, 1.0),
        (-50.0, 1.9287498479639178e-22),
    ],
)
def test_sigmoid(x, expected):
    assert float(oracle.sigmoid(x)) == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize(("x", "expected"), [(0.0, 0.0), (LN3, 0.75 * LN3), (-LN3, -0.25 * LN3), (OPEN, OPEN)])
def test_silu(x, expected):
    assert float(oracle.silu(x)) == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("A_log", [-3.5, 0.0, 2.75])
@pytest.mark.parametrize("x", [-20.0, -19.5, -1.0, 0.0, 0.5, 19.5, 20.0])
def test_gate_from_minus_20_to_20_is_exact(x, A_log):
    """Against 80 decimal digits, where nothing overflows and 1 + exp(x) keeps both its terms."""
    with localcontext() as context:
        context.prec = 80
        expected = float(-(Decimal(A_log).exp() * (1 + Decimal(x).exp()).ln()))
    assert oracle.softplus_gate([x - 1.25], [1.25], [A_log]) == pytest.approx([expected], rel=1e-15, abs=0)


@pytest.mark.parametrize(("x", "A_log"), [(-20.25, 0.0), (-20.25, 2.75), (-45.0, -3.5)])
def test_gate_below_minus_20_is_one_exponential(x, A_log):
    """The other forms differ from it by exp(x)/2 of the value, 8e-10 at the border."""
    expected = float(-(Decimal(A_log) + Decimal(x)).exp())
    assert oracle.softplus_gate([x], [0.0], [A_log]) == pytest.approx([expected], rel=1e-15, abs=0)


@pytest.mark.parametrize("x", [20.25, 100.0, 1000.0])
def test_gate_above_20_is_linear(x):
    """F2: softplus(100) is 100, and 1000 does not overflow."""
    assert oracle.softplus_gate([x], [0.0], [0.0]) == [-x]
    assert oracle.softplus_gate([x], [0.0], [LN2]) == pytest.approx([-2 * x], rel=1e-15)


@pytest.mark.parametrize(
    ("x", "A_log", "decay"),
    [
        (-200.0, 89.0, 1.0),
        (-100.0, 89.0, 0.9999832984386824),  # exp(-exp(-11))
        (-100.0, 100.0, 0.36787944117144233),  # exp(-1)
        (-1000.0, 1000.0, 0.36787944117144233),  # both factors leave float64, their product is 1
        (0.0, 1000.0, 0.0),
        (30.0, 1000.0, 0.0),
        (-1000.0, 0.0, 1.0),
    ],
)
def test_decay_where_the_two_factors_overflow_and_underflow(x, A_log, decay):
    """F3."""
    assert np.exp(oracle.softplus_gate([x], [0.0], [A_log])) == pytest.approx([decay], rel=1e-15, abs=0)


def test_gate_branches_are_selected_element_by_element():
    """One array that meets all three branches and a NaN: none may spoil another."""
    g = oracle.softplus_gate([[-200.0, 0.0], [100.0, np.nan]], [0.0, 0.0], [89.0, 0.0])
    assert g[0] == pytest.approx([-math.exp(-111), -LN2], rel=1e-15, abs=0)
    assert g[1, 0] == pytest.approx(-100 * math.exp(89), rel=1e-15)
    assert np.isnan(g[1, 1])


def test_qk_norm_has_its_eps_on_the_sum_and_inside_the_root():
    """F1: 1e-3 · rsqrt(2e-6); a clamp would give 1.0, an eps on the mean 0.0880 or 0.9961."""
    x = np.zeros((2, 128))
    x[0, 0] = 1e-3
    expected = np.zeros((2, 128))
    expected[0, 0] = 0.7071067811865476
    np.testing.assert_allclose(oracle.qk_normalise(x), expected, rtol=1e-15, atol=0)


def test_qk_norm_per_head():
    got = oracle.qk_normalise([[[3.0, 4.0], [0.0, -2e-3]]])
    expected = [[[3 / math.sqrt(25.000001), 4 / math.sqrt(25.000001)], [0.0, -2 / math.sqrt(5)]]]
    np.testing.assert_allclose(got, expected, rtol=1e-15, atol=0)


def test_gated_norm_is_norm_then_weight_then_gate():
    """mean(3², 4²) + 3.5 = 16, so o becomes (0.75, 1); a gate before the norm would move that mean."""
    got = oracle.gated_rms_norm([[3.0, 4.0]], [2.0, 3.0], [[OPEN, LN3]], 3.5)
    np.testing.assert_allclose(got, [[0.75 * 2 * OPEN, 1.0 * 3 * 0.75 * LN3]], rtol=1e-15)


def test_gated_norm_weight_is_not_one_plus_w():
    assert np.array_equal(oracle.gated_rms_norm([[3.0, 4.0]], [0.0, 0.0], [[OPEN, OPEN]], 1e-6), [[0.0, 0.0]])


def test_conv_runs_from_the_oldest_frame_to_the_newest():
    """Digits tell the order: channel 0 reads 4321, and 1234 if the kernel is flipped."""
    window = np.array([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [4.0, 8.0]])
    weight = np.array([[1.0, 10.0, 100.0, 1000.0], [1000.0, 100.0, 10.0, 1.0]])
    assert np.array_equal(oracle.conv_step(window, weight[:, None, :]), [4321.0, 5678.0])
    assert np.array_equal(oracle.conv_step(window, weight), [4321.0, 5678.0])


def test_conv_ends_in_silu_of_the_sum():
    got = oracle.conv_step([[1.0, 1.0], [1.0, -1.0]], [[0.5 * LN3, 0.5 * LN3], [-2 * LN3, -LN3]])
    np.testing.assert_allclose(got, [0.75 * LN3, -0.25 * LN3], rtol=1e-15)


def test_conv_refuses_a_window_in_the_other_layout():
    with pytest.raises(ValueError, match=r"window must end in \[W, C\] = \[4, 2\].*got \[2, 4\]"):
        oracle.conv_step(np.ones((2, 4)), np.ones((2, 1, 4)))


# S' = S/2 = [[1, 2, 3], [4, 5, 6]], then S'ᵀk = (1+8, 2+10, 3+12) = (9, 12, 15), u = ((10,10,10) - that)/2
# = (0.5, -1, -2.5), S'' = S' + (1, 2)ᵀ u, and o = S''ᵀ q with q = (1, 1), where S' itself would give (5, 7, 9).
STATE = np.array([[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]])
AFTER = np.array([[1.5, 1.0, 0.5], [5.0, 3.0, 1.0]])
OUTPUT = np.array([6.5, 4.0, 1.5])


def test_delta_rule_decays_then_reads_then_writes_then_outputs():
    before = STATE.copy()
    S, o = oracle.delta_step(STATE, [1.0, 1.0], [1.0, 2.0], [10.0, 10.0, 10.0], 0.5, -LN2)
    np.testing.assert_allclose(S, AFTER, rtol=1e-15)
    np.testing.assert_allclose(o, OUTPUT, rtol=1e-15)
    assert np.array_equal(before, STATE)


def test_delta_rule_treats_leading_axes_one_by_one():
    """Three heads with their own operands: the worked case, an untouched state, and a full reset."""
    q, k, v = np.array([[1.0, 1.0]] * 3), np.array([[1.0, 2.0]] * 3), np.full((3, 3), 10.0)
    S, o = oracle.delta_step(np.stack([STATE] * 3), q, k, v, [0.5, 0.0, 1.0], [-LN2, 0.0, -np.inf])
    np.testing.assert_allclose(S[0], AFTER, rtol=1e-15)
    assert np.array_equal(S[1], STATE)
    assert np.array_equal(S[2], [[10.0] * 3, [20.0] * 3])
    assert np.array_equal(o[1:], [[10.0, 14.0, 18.0], [30.0, 30.0, 30.0]])


def test_without_decay_it_is_the_plain_delta_rule():
    """F6: S + beta k (v - Sᵀk)ᵀ in exact fractions, over five steps."""
    rng = np.random.default_rng(6)
    q, k = (rng.integers(-4, 5, (5, 2)) / 8 for _ in range(2))
    v, beta = rng.integers(-16, 17, (5, 3)) / 4, rng.integers(0, 5, 5) / 4
    exact = [[Fraction(0)] * 3 for _ in range(2)]
    S = np.zeros((2, 3))
    for t in range(5):
        S, o = oracle.delta_step(S, q[t], k[t], v[t], beta[t], 0.0)
        key, query = ([Fraction(x) for x in vector[t]] for vector in (k, q))
        u = [Fraction(beta[t]) * (Fraction(v[t, j]) - key[0] * exact[0][j] - key[1] * exact[1][j]) for j in range(3)]
        exact = [[exact[i][j] + key[i] * u[j] for j in range(3)] for i in range(2)]
        expected = [float(query[0] * exact[0][j] + query[1] * exact[1][j]) for j in range(3)]
        np.testing.assert_allclose(S, np.array(exact, dtype=float), rtol=0, atol=1e-14)
        np.testing.assert_allclose(o, expected, rtol=0, atol=1e-14)
    assert np.max(np.abs(S)) > 0.5


def test_the_same_key_again_overwrites_its_value():
    """F8: k of length 1, beta 1, no decay."""
    k, second = [0.6, 0.8], [-5.0, 0.25, 11.0]
    S, _ = oracle.delta_step(np.zeros((2, 3)), k, k, [7.0, 8.0, 9.0], 1.0, 0.0)
    S, read = oracle.delta_step(S, k, k, second, 1.0, 0.0)
    np.testing.assert_allclose(read, second, rtol=0, atol=4e-15)
    np.testing.assert_allclose(S, np.outer(k, second), rtol=0, atol=4e-15)


def test_no_write_and_no_decay_leave_the_state_bit_unchanged():
    """F9."""
    rng = np.random.default_rng(9)
    before = rng.standard_normal((3, 4, 5))
    q, k, v = (rng.standard_normal((3, n)) for n in (4, 4, 5))
    after, _ = oracle.delta_step(before, q, k, v, np.zeros(3), np.zeros(3))
    assert after.tobytes() == before.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# The layer on selection matrices: x is the four projections laid end to end, so that every case can be read off
# ---------------------------------------------------------------------------------------------------------------------


def selecting_weights(*, G, H, K, V, W=1):
    """A layer with x = [q, k, v | z | b | a], a conv that passes the newest frame, decay ½ for a = 0, y[:HV] = ONN."""
    C, HV = 2 * G * K + H * V, H * V
    D = C + HV + 2 * H
    unit = np.eye(D)
    return {
        "in_proj_qkv.weight": unit[:C],
        "in_proj_z.weight": unit[C : C + HV],
        "in_proj_b.weight": unit[C + HV : C + HV + H],
        "in_proj_a.weight": unit[C + HV + H :],
        "conv1d.weight": np.tile(np.eye(W)[-1], (C, 1, 1)),
        "dt_bias": np.zeros(H),
        "A_log": np.zeros(H),
        "norm.weight": np.ones(V),
        "out_proj.weight": unit[:, :HV],
    }


def token(*, q, k, v, z, b, a):
    return np.concatenate([np.ravel(part) for part in (q, k, v, z, b, a)]).astype(float)


def run(weights, xs, *, G, H, K, V, eps=1e-6, **options):
    """run_layer by axis letters; xs is [T,D] for one row or [T,B,D]."""
    xs = xs[:, None, :] if xs.ndim == 2 else xs
    return oracle.run_layer(weights, xs, key_heads=G, value_heads=H, key_dim=K, value_dim=V, norm_eps=eps, **options)


def test_two_tokens_by_hand():
    """The whole layer in small integers.

    Token 0 writes v = (64, 128) with beta 1. Token 1 decays it to (32, 64), sees v = (96, 0) with beta ½ and writes
    u = (32, -32): S = o = (64, 32). With eps 1040 the root is sqrt(2560 + 1040) = 60; norm weights (3, 6) and z
    (60, 120) make y = (192, 384). One key channel of 64 normalises to 1 - 1.2e-10, hence the tolerance.
    """
    sizes = {"G": 1, "H": 1, "K": 1, "V": 2}
    weights = selecting_weights(**sizes) | {"norm.weight": np.array([3.0, 6.0]), "dt_bias": np.array([5.0])}
    xs = np.stack(
        [
            token(q=OPEN, k=OPEN, v=(64, 128), z=(0, OPEN), b=OPEN, a=-5),
            token(q=OPEN, k=OPEN, v=(96, 0), z=(60, 120), b=0, a=-5),
        ]
    )
    got = run(weights, xs, **sizes, eps=1040.0, taps_at=(0, 1))
    near = {"rtol": 2e-9, "atol": 0}
    np.testing.assert_allclose(got.taps["S"][:, 0, 0, 0], [[64, 128], [64, 32]], **near)
    np.testing.assert_allclose(got.taps["ON"][:, 0, 0], [[64, 128], [64, 32]], **near)
    np.testing.assert_allclose(got.taps["ONN"][1, 0, 0], [192, 384], **near)
    np.testing.assert_allclose(got.ys[1, 0], [192, 384, 0, 0, 0, 0, 0, 0], **near)
    np.testing.assert_allclose(got.S[0, 0], [[64, 32]], **near)
    np.testing.assert_allclose(got.taps["BETA"][:, 0, 0], [1, 0.5], rtol=1e-15)
    np.testing.assert_allclose(got.taps["G"][:, 0, 0], [-LN2, -LN2], rtol=1e-15)
    assert np.array_equal(got.taps["B"][:, 0, 0], [OPEN, 0])
    assert np.array_equal(got.taps["A"][:, 0, 0], [-5, -5])


def test_value_heads_share_key_heads_in_groups():
    """Value head h uses key head h // R, for q and for k.

    Key head 0 looks along row 0 of S and key head 1 along row 1, so head 0 and 1 must write to row 0, 2 and 3 to row 1
    (a tiled mapping swaps 1 and 2). Query head 0 is (1, 0)/√2 and query head 1 is (1, 1)/2 after the scale.
    """
    sizes = {"G": 2, "H": 4, "K": 2, "V": 3}
    v = np.arange(64.0, 76.0).reshape(4, 3)
    x = token(q=[[64, 0], [64, 64]], k=[[64, 0], [0, 64]], v=v, z=np.zeros(12), b=[OPEN] * 4, a=[0] * 4)
    got = run(selecting_weights(**sizes), x[None], **sizes, taps_at=(0,))
    S = np.zeros((4, 2, 3))
    S[:2, 0], S[2:, 1] = v[:2], v[2:]
    np.testing.assert_allclose(got.S[0], S, rtol=1e-9)
    root = 0.7071067811865476
    np.testing.assert_allclose(got.taps["ON"][0, 0], v * np.array([[root], [root], [0.5], [0.5]]), rtol=1e-9)
    np.testing.assert_allclose(got.taps["Q"][0, 0], [[root, 0], [0.5, 0.5]], rtol=1e-9)
    np.testing.assert_allclose(got.taps["K"][0, 0], [[1, 0], [0, 1]], rtol=1e-9)


def test_parts_of_the_projections_are_laid_out_head_by_head():
    sizes = {"G": 2, "H": 4, "K": 3, "V": 2}
    x = np.arange(100.0, 100.0 + 20 + 8 + 8)
    got = run(selecting_weights(**sizes), x[None], **sizes, taps_at=(0,)).taps
    assert np.array_equal(got["XC"][0, 0], np.arange(100.0, 120.0))
    assert np.array_equal(got["XCV"], got["XC"])
    assert np.array_equal(got["Z"][0, 0], [[120, 121], [122, 123], [124, 125], [126, 127]])
    assert np.array_equal(got["B"][0, 0], [128, 129, 130, 131])
    assert np.array_equal(got["A"][0, 0], [132, 133, 134, 135])
    ratios = got["K"][0, 0] / got["K"][0, 0, :, :1]
    np.testing.assert_allclose(ratios, [[1, 107 / 106, 108 / 106], [1, 110 / 109, 111 / 109]], rtol=1e-15)


def test_conv_history_holds_inputs_with_the_newest_last():
    """Width 3 and weights (1, 10, 100): frames 1 and 2 given, then tokens 3 and 4 make 321 and 432."""
    sizes = {"G": 1, "H": 1, "K": 1, "V": 1}
    weights = selecting_weights(**sizes, W=3) | {"conv1d.weight": np.tile([1.0, 10.0, 100.0], (3, 1, 1))}
    xs = np.stack([token(q=n, k=n, v=n, z=0, b=0, a=0) for n in (3, 4)])
    history = np.array([[[1.0] * 3, [2.0] * 3]])
    got = run(weights, xs, **sizes, conv_hist=history, taps_at=(0, 1))
    assert np.array_equal(got.taps["XCV"][:, 0], [[321] * 3, [432] * 3])
    assert np.array_equal(got.taps["HIST"][:, 0], [[[2] * 3, [3] * 3], [[3] * 3, [4] * 3]])
    assert np.array_equal(got.conv_hist[0], [[3] * 3, [4] * 3])
    assert np.array_equal(history[0], [[1] * 3, [2] * 3])


def test_a_run_shorter_than_the_history_leaves_zeros_on_its_left():
    """F21."""
    sizes = {"G": 1, "H": 1, "K": 1, "V": 1}
    got = run(selecting_weights(**sizes, W=4), token(q=-7, k=-8, v=-9, z=0, b=0, a=0)[None], **sizes)
    assert np.array_equal(got.conv_hist[0], [[0] * 3, [0] * 3, [-7, -8, -9]])


def test_width_one_has_an_empty_history():
    sizes = {"G": 1, "H": 1, "K": 1, "V": 1}
    weights = selecting_weights(**sizes) | {"conv1d.weight": np.array([[[2.0]], [[3.0]], [[4.0]]])}
    xs = np.stack([token(q=OPEN, k=OPEN, v=n * OPEN, z=0, b=OPEN, a=0) for n in (1, 2)])
    got = run(weights, xs, **sizes, taps_at=(0, 1))
    assert np.array_equal(got.taps["XCV"][:, 0], [[2 * OPEN, 3 * OPEN, 4 * OPEN], [2 * OPEN, 3 * OPEN, 8 * OPEN]])
    assert got.conv_hist.shape == (1, 0, 3)
    assert got.taps["HIST"].shape == (2, 1, 0, 3)
    np.testing.assert_allclose(got.S, [[[[8 * OPEN]]]], rtol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# The layer on dense weights. Small eighths make the input projections exact, whatever the order of their sums
# ---------------------------------------------------------------------------------------------------------------------

SIZES = {"G": 2, "H": 6, "K": 3, "V": 5}
WIDTH, HIDDEN = 4, 11


def eighths(rng, *shape):
    return (rng.integers(-12, 13, shape) / 8).astype(np.float32)


def dense_weights(seed=0):
    G, H, K, V = SIZES.values()
    rng, C = np.random.default_rng(seed), 2 * G * K + H * V
    shapes = {
        "in_proj_qkv.weight": (C, HIDDEN),
        "in_proj_z.weight": (H * V, HIDDEN),
        "in_proj_b.weight": (H, HIDDEN),
        "in_proj_a.weight": (H, HIDDEN),
        "conv1d.weight": (C, 1, WIDTH),
        "dt_bias": (H,),
        "A_log": (H,),
        "norm.weight": (V,),
        "out_proj.weight": (HIDDEN, H * V),
    }
    return {name: eighths(rng, *shape) for name, shape in shapes.items()}


def dense_xs(T, B, seed=1):
    return eighths(np.random.default_rng(seed), T, B, HIDDEN)


def test_every_projection_is_weight_times_x_for_its_own_token_and_row():
    weights, xs = dense_weights(), dense_xs(3, 2)
    got = run(weights, xs, **SIZES, taps_at=range(3))
    pairs = {"XC": "in_proj_qkv.weight", "Z": "in_proj_z.weight", "B": "in_proj_b.weight", "A": "in_proj_a.weight"}
    for tap, name in pairs.items():
        expected = [[[math.sumprod(map(float, w), map(float, x)) for w in weights[name]] for x in row] for row in xs]
        assert np.array_equal(got.taps[tap].reshape(3, 2, -1), expected), tap
    onn = got.taps["ONN"].reshape(3, 2, -1)
    expected = [[[math.sumprod(map(float, w), o) for w in weights["out_proj.weight"]] for o in row] for row in onn]
    assert max_rel(got.ys, np.array(expected)) <= 2e-15


@pytest.mark.parametrize("first", [0, 1, 2, 5, 7])
def test_two_runs_equal_one(first):
    """F16, also where the first run is shorter than the history, or has no token at all."""
    weights, xs = dense_weights(), dense_xs(7, 2)
    whole = run(weights, xs, **SIZES)
    start = run(weights, xs[:first], **SIZES)
    rest = run(weights, xs[first:], **SIZES, S=start.S, conv_hist=start.conv_hist)
    assert max_rel(np.concatenate([start.ys, rest.ys]), whole.ys) <= 1e-15
    assert max_rel(rest.S, whole.S) <= 1e-15
    assert np.array_equal(rest.conv_hist, whole.conv_hist)


def test_a_given_state_matters_and_stays_as_it_was():
    weights, xs = dense_weights(), dense_xs(2, 1)
    S, history = np.full((1, 6, 3, 5), 0.5), np.full((1, 3, 42), 0.25)
    got = run(weights, xs, **SIZES, S=S, conv_hist=history)
    assert max_rel(got.ys, run(weights, xs, **SIZES).ys) > 1e-2
    assert np.all(S == 0.5)
    assert np.all(history == 0.25)


def test_rows_of_a_batch_are_sequences_of_their_own():
    """F11 as well: row 1 holds a NaN, which stays there."""
    weights, xs = dense_weights(), dense_xs(4, 3)
    xs[2, 1, 0] = np.nan
    got = run(weights, xs, **SIZES)
    for row in (0, 2):
        alone = run(weights, xs[:, row], **SIZES)
        assert max_rel(got.ys[:, row], alone.ys[:, 0]) <= 1e-15
        assert max_rel(got.S[row], alone.S[0]) <= 1e-15
    assert np.all(np.isfinite(got.ys[:2, 1]))
    assert np.all(np.isnan(got.ys[2:, 1]))


def test_an_inactive_row_is_zero_and_keeps_its_state():
    """F25, with rubbish in the row's input."""
    weights, xs = dense_weights(), dense_xs(4, 3)
    rng = np.random.default_rng(2)
    S, history = rng.standard_normal((3, 6, 3, 5)), rng.standard_normal((3, 3, 42))
    everything = run(weights, xs, **SIZES, S=S, conv_hist=history, taps_at=(1, 3))
    xs[:, 1] = np.inf
    got = run(weights, xs, **SIZES, S=S, conv_hist=history, taps_at=(1, 3), active=np.array([True, False, True]))
    assert not np.any(got.ys[:, 1])
    assert got.S[1].tobytes() == S[1].tobytes()
    assert got.conv_hist[1].tobytes() == history[1].tobytes()
    for slot in (0, 1):
        assert np.array_equal(got.taps["S"][slot, 1], S[1])
        assert np.array_equal(got.taps["HIST"][slot, 1], history[1])
    assert not any(np.any(tap[:, 1]) for name, tap in got.taps.items() if name not in ("S", "HIST"))
    for row in (0, 2):
        assert max_rel(got.ys[:, row], everything.ys[:, row]) <= 1e-15
        assert max_rel(got.S[row], everything.S[row]) <= 1e-15
        assert all(max_rel(got.taps[name][:, row], tap[:, row]) <= 1e-15 for name, tap in everything.taps.items())


def test_no_active_row_changes_nothing():
    got = run(dense_weights(), dense_xs(2, 2), **SIZES, active=np.zeros(2, bool), taps_at=(1,))
    assert got.ys.shape == (2, 2, HIDDEN)
    assert not any(np.any(array) for array in (got.ys, got.S, got.conv_hist))


def test_taps_come_in_the_order_asked_for_and_with_their_shapes():
    G, H, K, V = SIZES.values()
    weights, xs, C = dense_weights(), dense_xs(5, 2), 42
    got = run(weights, xs, **SIZES, taps_at=(4, 0, 4))
    shapes = {"XC": (C,), "XCV": (C,), "Z": (H, V), "Q": (G, K), "K": (G, K), "A": (H,), "B": (H,), "BETA": (H,)}
    shapes |= {"G": (H,), "ON": (H, V), "ONN": (H, V), "OUT": (HIDDEN,), "S": (H, K, V), "HIST": (WIDTH - 1, C)}
    assert {name: tap.shape for name, tap in got.taps.items()} == {name: (3, 2, *s) for name, s in shapes.items()}
    first = run(weights, xs[:1], **SIZES)
    for slot, S, history, y in ((0, got.S, got.conv_hist, got.ys[4]), (1, first.S, first.conv_hist, got.ys[0])):
        assert max_rel(got.taps["S"][slot], S) <= 1e-15
        assert np.array_equal(got.taps["HIST"][slot], history)
        assert np.array_equal(got.taps["OUT"][slot], y)
    assert all(np.array_equal(tap[0], tap[2]) for tap in got.taps.values())


def test_everything_returned_is_float64():
    got = run(dense_weights(), dense_xs(2, 1), **SIZES, taps_at=(0,))
    assert {array.dtype for array in (*got[:3], *got.taps.values())} == {np.dtype(np.float64)}


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_stored_weights_are_read_exactly(dtype):
    """Eighths up to 1.5 are exact in every one of these formats, so the results agree to the last bit."""
    weights, xs = dense_weights(), dense_xs(3, 2)
    narrow = {name: array.astype(dtype) for name, array in weights.items()}
    assert np.array_equal(run(narrow, xs.astype(dtype), **SIZES).ys, run(weights, xs, **SIZES).ys)


def test_conv_weight_without_its_middle_axis():
    weights, xs = dense_weights(), dense_xs(3, 2)
    squeezed = weights | {"conv1d.weight": weights["conv1d.weight"][:, 0]}
    assert np.array_equal(run(squeezed, xs, **SIZES).ys, run(weights, xs, **SIZES).ys)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("in_proj_qkv.weight", (HIDDEN, 42)),
        ("in_proj_z.weight", (42, HIDDEN)),
        ("in_proj_b.weight", (2, HIDDEN)),
        ("in_proj_a.weight", (6,)),
        ("conv1d.weight", (42, 4, 1)),
        ("conv1d.weight", (42,)),
        ("conv1d.weight", (42, 1, 0)),
        ("dt_bias", (6, 1)),
        ("A_log", (2,)),
        ("norm.weight", (30,)),
        ("out_proj.weight", (30, HIDDEN)),
    ],
)
def test_a_misshapen_weight_is_named(name, shape):
    with pytest.raises(ValueError, match=rf"^{name} must"):
        run(dense_weights() | {name: np.zeros(shape, np.float32)}, dense_xs(1, 1), **SIZES)


@pytest.mark.parametrize("name", sorted(dense_weights()))
def test_a_missing_weight_is_named(name):
    weights = dense_weights()
    del weights[name]
    with pytest.raises(ValueError, match=f"the weight {name} is missing"):
        run(weights, dense_xs(1, 1), **SIZES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"G": 4}, ValueError, "value_heads must be a multiple of key_heads, got 6 and 4"),
        ({"K": 0}, ValueError, "key_dim must be at least 1, got 0"),
        ({"eps": math.nan}, ValueError, "norm_eps must be finite and not negative, got nan"),
        ({"S": np.zeros((1, 6, 5, 3))}, ValueError, r"S must have shape \[1, 6, 3, 5\], got \[1, 6, 5, 3\]"),
        ({"conv_hist": np.zeros((1, 4, 42))}, ValueError, r"conv_hist must have shape \[1, 3, 42\], got \[1, 4, 42\]"),
        ({"taps_at": (1,)}, ValueError, r"taps_at must hold tokens of \[0, 1\), got 1"),
        ({"taps_at": (-1,)}, ValueError, r"taps_at must hold tokens of \[0, 1\), got -1"),
        ({"active": np.array([1])}, TypeError, "active must be boolean, got an array of dtype int64"),
        ({"active": np.array([True, True])}, ValueError, r"active must have shape \[B\] = \[1\], got \[2\]"),
        ({"S": np.zeros((1, 6, 3, 5), complex)}, TypeError, "expected real numbers .* dtype complex128"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        run(dense_weights(), dense_xs(1, 1), **(SIZES | options))


def test_xs_without_a_batch_axis():
    with pytest.raises(ValueError, match=r"xs must have the three axes \[T, B, D\], got shape \[11\]"):
        run(dense_weights(), np.zeros(HIDDEN), **SIZES)
