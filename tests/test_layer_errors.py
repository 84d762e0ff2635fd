"""Bad calls: the documented exception, and a message that names the offender. Nothing is computed before it is raised.

Under the run-time checker of signatures these tests also show that a public function validates before it does.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.errors import CheckpointError, StateMismatchError, UnsupportedError
from tests.support import cases

CFG = cases.SMALL
B, D, L = 2, CFG.hidden, 3
W = cases.weights(CFG)
STATE = gdn.init_state(CFG, layers=L, batch=B)
X = jnp.ones((B, D))
OTHER = dataclasses.replace(CFG, conv_width=3)
SIZES = {"hidden": 8, "key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5, "conv_width": 4}


def refuses(error, message):
    """The exact type, not a subclass of it: a caller may tell them apart."""
    return _Refusal(error, message)


class _Refusal:
    def __init__(self, error, message):
        self.error, self.message = error, message

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert kind is self.error, f"expected {self.error.__name__}, got {error!r}"
        assert re.search(self.message, str(error)), str(error)
        return True


def state_with(**leaves):
    return dataclasses.replace(STATE, **leaves)


def weights_with(**leaves):
    return dataclasses.replace(W, **leaves)


def stacked(copies):
    return gdn.GdnStack(jax.tree.map(lambda leaf: jnp.stack([leaf] * copies), W))


# What is wrong -> the arguments that differ from a good call, the error, its message.
BAD_CALLS = {
    "x-rank": ({"x": jnp.ones(D)}, ValueError, r"^xs? must be .*B=2.*got shape .*36"),
    "x-batch": ({"x": jnp.ones((3, D))}, ValueError, r"^xs? must be .*B=2.*got shape .*3, 36"),
    "x-hidden": ({"x": jnp.ones((B, D + 1))}, ValueError, r"^xs? must be .*D=36.*got .*2, 37"),
    "x-bfloat16": ({"x": X.astype(jnp.bfloat16)}, TypeError, "^xs? must be float32, got bfloat16"),
    "x-float16": ({"x": X.astype(jnp.float16)}, TypeError, "^xs? must be float32, got float16"),
    "x-int": ({"x": X.astype(jnp.int32)}, TypeError, "^xs? must be float32, got int32"),
    "x-float64": ({"x": np.ones((B, D))}, TypeError, "^xs? must be float32, got float64"),
    "x-none": ({"x": None}, TypeError, "^xs? must be"),
    "layer-high": ({"layer": L}, ValueError, r"layer must lie in 0 … 2 .*got 3"),
    "layer-high-array": ({"layer": jnp.int32(L)}, ValueError, r"layer must lie in 0 … 2 .*got 3"),
    "layer-negative": ({"layer": -1}, ValueError, r"layer must lie in 0 … 2 .*got -1"),
    "layer-beyond-int32": ({"layer": 2**32}, ValueError, r"layer must lie in 0 … 2 .*got 4294967296"),
    "layer-bool": ({"layer": True}, TypeError, "layer must be an int.*got True"),
    "layer-numpy-bool": ({"layer": np.True_}, TypeError, "layer must be an int.*True"),
    "layer-float": ({"layer": 1.0}, TypeError, r"layer must be an int.*got 1\.0"),
    "layer-vector": ({"layer": jnp.zeros(1, jnp.int32)}, TypeError, "layer must be an int"),
    "layer-none": ({"layer": None}, TypeError, "layer must be an int.*got None"),
    "layer-text": ({"layer": "1"}, TypeError, "layer must be an int.*got '1'"),
    "active-int": ({"active": np.ones(B, np.int32)}, ValueError, "active must be bool .*got int32"),
    "active-shape": ({"active": np.ones(B + 1, bool)}, ValueError, r"active must be bool .*got bool \(3,\)"),
    "active-scalar": ({"active": True}, ValueError, r"active must be bool .*got bool \(\)"),
    "cfg-none": ({"cfg": None}, TypeError, "cfg must be a GdnConfig, got NoneType"),
    "cfg-dict": ({"cfg": SIZES}, TypeError, "cfg must be a GdnConfig, got dict"),
    "precision": ({"precision": "q8"}, UnsupportedError, "precision must be .*exact.*got 'q8'"),
    "implementation-unknown": ({"implementation": "cuda"}, ValueError, "implementation must be .*got 'cuda'"),
    "implementation-mosaic": ({"implementation": "mosaic"}, UnsupportedError, "mosaic.*xla"),
    "implementation-triton": ({"implementation": "triton"}, UnsupportedError, "triton.*xla"),
    "state-geometry": (
        {"state": gdn.init_state(OTHER, layers=L, batch=B)},
        StateMismatchError,
        r"state\.conv_hist .*must be \(3, 2, 3, 168\).*got \(3, 2, 2, 168\)",
    ),
    "state-transposed": (
        {"state": state_with(S=jnp.swapaxes(STATE.S, 3, 4))},
        StateMismatchError,
        r"state\.S .*must be .*12, 20\).*got .*20, 12\)",
    ),
    "state-rank": ({"state": state_with(S=STATE.S[0])}, StateMismatchError, r"state\.S .*got shape \(2, 6, 12, 20\)"),
    "state-depths": (
        {"state": state_with(conv_hist=STATE.conv_hist[:2])}, StateMismatchError, r"state\.conv_hist .*got \(2, 2"
    ),
    "state-bfloat16": (
        {"state": state_with(S=STATE.S.astype(jnp.bfloat16))}, TypeError, r"state\.S must be float32, got bfloat16"
    ),
    "state-float64": (
        {"state": state_with(S=np.zeros(STATE.S.shape))}, TypeError, r"state\.S must be float32, got float64"
    ),
    "state-leaf-missing": ({"state": state_with(S=None)}, TypeError, r"state\.S"),
    "state-tuple": ({"state": (STATE.S, STATE.conv_hist)}, TypeError, "state must be a GdnState, got tuple"),
    "state-snapshot": ({"state": gdn.snapshot(STATE)}, TypeError, "state must be a GdnState, got Snapshot"),
    "weights-none": ({"w": None}, TypeError, "GdnWeights.*got NoneType"),
    "weights-list": ({"w": [W, W, W]}, TypeError, "GdnWeights.*got list"),
    "weights-shape": ({"w": weights_with(norm=W.norm[1:])}, ValueError, r"norm must have shape \(20,\).*got \(19,\)"),
    "weights-dtype": (
        {"w": weights_with(b=W.b.astype(jnp.bfloat16))}, TypeError, r"b must be float32, got bfloat16; cast it with"
    ),
    "weights-swapped": ({"w": weights_with(b=W.conv)}, ValueError, "b must have shape"),
    "weights-leaf-missing": ({"w": weights_with(norm=None)}, TypeError, "norm"),
    "stack-short": ({"w": stacked(2)}, StateMismatchError, "2.* 3"),
    "tuple-short": ({"w": (W, W)}, StateMismatchError, "2 layers of weights, the state 3"),
    "tuple-empty": ({"w": ()}, StateMismatchError, "0 layers of weights, the state 3"),
    "tuple-member": ({"w": (W, None, W)}, TypeError, "GdnWeights.*got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("function", [gdn.step, gdn.trace, gdn.scan], ids=["step", "trace", "scan"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused(function, name):
    changes, error, message = BAD_CALLS[name]
    call = {"w": W, "state": STATE, "x": X, "cfg": CFG, "layer": 1, **changes}
    w, state, x = (call.pop(key) for key in ("w", "state", "x"))
    if function is gdn.scan and x is not None:
        x = np.asarray(x)[None] if x.dtype == np.float64 else x[None]
    with refuses(error, message):
        function(w, state, x, **call)


def test_scan_takes_no_single_token_and_step_no_sequence():
    with refuses(ValueError, r"^xs must be \[T B D\].*got shape \(2, 36\)"):
        gdn.scan(W, STATE, X, cfg=CFG)
    with refuses(ValueError, r"^x must be \[B D\].*got shape \(1, 2, 36\)"):
        gdn.step(W, STATE, X[None], cfg=CFG)


@pytest.mark.parametrize("shape", [(4, 3), (3, 2), (2, 4), (4, 2, 1)])
def test_scan_takes_a_mask_per_sequence_or_per_token(shape):
    with refuses(ValueError, r"active must be bool \(4, 2\)"):
        gdn.scan(W, STATE, jnp.ones((4, B, D)), cfg=CFG, active=np.ones(shape, bool))


@pytest.mark.slow
def test_step_and_scan_take_a_mask_as_a_plain_list():
    mask = [True, False]
    y, _ = gdn.step(W, STATE, X, cfg=CFG, active=mask)
    ys, _ = gdn.scan(W, STATE, X[None], cfg=CFG, active=mask)
    assert not np.any(y[1])
    assert not np.any(ys[0, 1])


@pytest.mark.parametrize("index", [1.0, True, np.array([1])])
def test_a_traced_layer_of_another_kind(index):
    with refuses(TypeError, "layer must be an int or an int32 scalar"):
        jax.jit(lambda layer: gdn.step(W, STATE, X, cfg=CFG, layer=layer))(index)


def test_a_traced_layer_cannot_choose_from_a_tuple():
    with refuses(TypeError, "tuple of weights needs a Python int.*static"):
        jax.jit(lambda layer: gdn.step((W, W, W), STATE, X, cfg=CFG, layer=layer))(jnp.int32(1))


def test_weights_of_another_geometry():
    other = cases.weights(cases.CASES[0].cfg)
    with refuses(ValueError, r"large\.qkv must have shape \(168, 36\).*got \(420, 40\)"):
        gdn.step(other, STATE, X, cfg=CFG)


# ---------------------------------------------------------------------------------------------------------------------
# state functions
# ---------------------------------------------------------------------------------------------------------------------

BAD_ROWS = {
    "high": ([B], r"0 … 1 \(batch 2\), got \[2\]"),
    "negative": ([0, -1], r"0 … 1 \(batch 2\), got \[-1\]"),
    "beyond-int32": (np.array([2**33]), r"0 … 1 \(batch 2\), got \[8589934592\]"),
    "float": ([0.0], "rows must be .*integers"),
    "bool": ([True, False], "rows must be .*integers"),
    "nested": ([[0]], "rows must be .*integers"),
    "scalar": (0, "rows must be .*integers"),
    "text": ("0", "rows must be .*integers"),
}


@pytest.mark.parametrize("function", [gdn.reset, gdn.select])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(function, name):
    """F29."""
    rows, message = BAD_ROWS[name]
    with refuses(ValueError, message):
        function(STATE, rows)


def test_rows_may_repeat_only_where_that_means_something():
    """F29: a duplicate slot is an error in reset, and a fork in select."""
    with refuses(ValueError, r"rows must not repeat, got \[1, 1\]"):
        gdn.reset(STATE, [1, 1])
    assert gdn.select(STATE, [1, 1]).batch == 2


def test_no_rows_to_reset_is_no_error():
    cases.assert_same_bits(gdn.reset(STATE, []), STATE)


def test_select_needs_a_row():
    with refuses(ValueError, "rows must name at least one row"):
        gdn.select(STATE, [])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bool_])
@pytest.mark.parametrize("function", [gdn.reset, gdn.select])
def test_traced_rows_of_another_kind(function, dtype):
    with refuses(ValueError, r"rows must be integers \[n\]"):
        jax.jit(function)(STATE, jnp.ones(2, dtype))


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "2", None])
def test_bad_branch_count(n):
    with refuses(ValueError, f"n must be an integer of at least 1, got {n!r}"):
        gdn.branch(STATE, n)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
@pytest.mark.parametrize("name", ["layers", "batch"])
def test_bad_state_size(name, value):
    with refuses(ValueError, f"{name} must be an integer of at least 1, got {value!r}"):
        gdn.init_state(CFG, **{"layers": 1, "batch": 1, name: value})


def test_bad_merges():
    with refuses(ValueError, "merge needs at least one state"):
        gdn.merge([])
    with refuses(StateMismatchError, r"differ: conv_hist is .*3, 168\) in state 0 and .*2, 168\) in state 1"):
        gdn.merge([STATE, gdn.init_state(OTHER, layers=L, batch=B)])
    with refuses(StateMismatchError, "differ: S is"):
        gdn.merge([STATE, gdn.init_state(CFG, layers=L + 1, batch=B)])
    with refuses(TypeError, r"states\[1\] must be a GdnState or a DecoderState, got Snapshot"):
        gdn.merge([STATE, gdn.snapshot(STATE)])


def test_states_of_another_dtype_are_not_promoted():
    with refuses(TypeError, r"state\.S must be float32, got bfloat16"):
        gdn.merge([STATE, state_with(S=STATE.S.astype(jnp.bfloat16))])


@pytest.mark.parametrize(
    "function",
    [gdn.reset, gdn.snapshot, lambda s: gdn.branch(s, 2), lambda s: gdn.select(s, [0])],
    ids=["reset", "snapshot", "branch", "select"],
)
@pytest.mark.parametrize(
    "value", [None, 3, (STATE.S, STATE.conv_hist), gdn.snapshot(STATE)], ids=lambda v: type(v).__name__
)
def test_what_is_no_state(function, value):
    with refuses(TypeError, f"state must be a GdnState or a DecoderState, got {type(value).__name__}"):
        function(value)


def test_only_a_snapshot_can_be_restored():
    with refuses(TypeError, "snap must be a Snapshot, got GdnState"):
        gdn.restore(STATE)


# ---------------------------------------------------------------------------------------------------------------------
# configuration and weights
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-4, ValueError), (4.0, TypeError), ("4", TypeError),
                                              (True, TypeError), (None, TypeError)])  # fmt: skip
def test_bad_size(name, value, error):
    with refuses(error, f"{name} must be .*{re.escape(repr(value))}"):
        gdn.GdnConfig(**{**SIZES, name: value})


@pytest.mark.parametrize(
    ("eps", "error"),
    [
        (0.0, ValueError),
        (-1e-6, ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        (1e-50, ValueError),  # 0 in float32, where 0 · rsqrt(0) is NaN
        (1e39, ValueError),
        pytest.param(10**400, ValueError, id="beyond-float64"),
        ("1e-6", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_bad_epsilon(eps, error):
    with refuses(error, "norm_eps must "):
        gdn.GdnConfig(**SIZES, norm_eps=eps)


@pytest.mark.parametrize(
    "function",
    [
        lambda cfg: gdn.init_state(cfg, layers=1),
        lambda cfg: gdn.state_nbytes(cfg, layers=1, batch=1),
        lambda cfg: gdn.tap_shapes(cfg),
        lambda cfg: gdn.abstract(cfg),
        lambda cfg: gdn.from_canonical(cfg, cases.canonical(CFG)),
    ],
    ids=["init_state", "state_nbytes", "tap_shapes", "abstract", "from_canonical"],
)
@pytest.mark.parametrize("cfg", [None, SIZES], ids=["none", "dict"])
def test_what_is_no_configuration(function, cfg):
    with refuses(TypeError, f"cfg must be a GdnConfig, got {type(cfg).__name__}"):
        function(cfg)


def test_value_heads_are_a_multiple_of_key_heads():
    with refuses(ValueError, "value_heads must be a multiple of key_heads, got H=5, G=2"):
        gdn.GdnConfig(**{**SIZES, "value_heads": 5})


def test_a_configuration_is_a_frozen_value():
    sizes: dict[str, Any] = {name: np.int64(size) for name, size in SIZES.items()}
    cfg = gdn.GdnConfig(**sizes, norm_eps=1)
    assert cfg == gdn.GdnConfig(**SIZES, norm_eps=1.0)
    assert hash(cfg) == hash(gdn.GdnConfig(**SIZES, norm_eps=1.0))
    assert (cfg.ratio, cfg.key_channels, cfg.value_channels, cfg.conv_channels) == (2, 6, 20, 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.hidden = 9  # pyright: ignore[reportAttributeAccessIssue]


def tensors(**changes):
    """Good tensors with some replaced, or removed where the value is None."""
    merged = {**cases.canonical(CFG), **changes}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


def spoiled(name, value):
    tensor = cases.canonical(CFG)[name].copy()
    tensor.flat[-1] = value
    return {name: tensor}


@pytest.mark.parametrize("name", cases.canonical(CFG))
def test_a_tensor_that_is_missing_misshapen_or_not_finite_is_named(name):
    tensor, named = cases.canonical(CFG)[name], re.escape(repr(name))
    with refuses(CheckpointError, f"{named}.*is missing"):
        gdn.from_canonical(CFG, tensors(**{name: None}))
    with refuses(CheckpointError, f"{named} must have shape"):
        gdn.from_canonical(CFG, tensors(**{name: tensor[..., None]}))
    with refuses(CheckpointError, f"{named} must be float32.*got float64"):
        gdn.from_canonical(CFG, tensors(**{name: tensor.astype(np.float64)}))
    for value in (np.nan, np.inf, -np.inf):
        with refuses(CheckpointError, f"{named} holds 1 "):
            gdn.from_canonical(CFG, tensors(**spoiled(name, value)))


def test_an_unknown_tensor_is_named():
    with refuses(CheckpointError, "unknown tensor 'in_proj_qkvz.weight'"):
        gdn.from_canonical(CFG, tensors(**{"in_proj_qkvz.weight": np.ones(3, np.float32)}))


def test_tensors_are_copied():
    """Weights must not follow later changes of the arrays that they were made from."""
    source = {name: tensor.copy() for name, tensor in cases.canonical(CFG).items()}
    w = gdn.from_canonical(CFG, source)
    for tensor in source.values():
        tensor[...] = 7
    cases.assert_same_bits(w, W)
