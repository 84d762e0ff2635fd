"""Under jax's transformations: compiled once, donated without a copy, batched as a loop would, differentiable."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from tests.support import cases, tolerances
from tests.support.cases import assert_same_bits, error

CFG = cases.SMALL


def check_donation(donating, x):
    """F55: every byte of the state is aliased, and the compiled program copies no buffer of its shapes."""
    state = cases.random_state(CFG, layers=3, batch=2)
    lowered = donating.lower(cases.weights(CFG), state, x, cfg=CFG, layer=jnp.int32(1))
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for leaf in jax.tree.leaves(state):
        shape = re.escape(f"f32[{','.join(map(str, leaf.shape))}]")
        assert not re.search(rf"= \(?{shape}\S* (copy|copy-start)\(", compiled.as_text())


# ---------------------------------------------------------------------------------------------------------------------
# jit
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["step", "scan"])
def test_a_donated_state_is_not_copied(kind):
    """F55."""
    x = cases.inputs(CFG, 2)
    check_donation(*{"step": (cases.donating_step, x), "scan": (cases.donating_scan, x[None])}[kind])


def test_a_donated_state_is_gone_and_the_weights_are_not():
    """F55."""
    state, w = cases.random_state(CFG, layers=3, batch=2), cases.weights(CFG)
    before = cases.step(w, state, cases.inputs(CFG, 2), cfg=CFG, layer=jnp.int32(1))
    after = cases.donating_step(w, state, cases.inputs(CFG, 2), cfg=CFG, layer=jnp.int32(1))
    assert_same_bits(after, before)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(w))


def test_width_one_donates_its_empty_history_without_a_warning():
    cfg = cases.CASES[3].cfg
    assert cfg.conv_width == 1
    _, state = cases.donating_step(
        cases.weights(cfg), gdn.init_state(cfg, layers=2, batch=3), cases.inputs(cfg, 3), cfg=cfg, layer=jnp.int32(1)
    )
    assert state.conv_hist.shape == (2, 3, 0, cfg.conv_channels)


@pytest.mark.parametrize("kind", ["step", "scan"])
def test_one_trace_and_one_compilation_serve_all_layers_and_calls(kind):
    """F56."""
    function = {"step": gdn.step, "scan": gdn.scan}[kind]
    chex.clear_trace_counter()
    counted = jax.jit(chex.assert_max_traces(function, n=1), static_argnames=cases.STATIC)
    w, state = cases.weights(CFG), cases.random_state(CFG, layers=3, batch=2)
    x = cases.inputs(CFG, 2) if kind == "step" else cases.inputs(CFG, 4, 2)
    for layer in (0, 1, 2, 1):
        _, state = counted(w, state, x, cfg=CFG, layer=jnp.int32(layer))
    assert counted._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_equal_configurations_share_a_compilation():
    """F56: a configuration is hashed by value, not by identity."""
    chex.clear_trace_counter()
    counted = jax.jit(chex.assert_max_traces(gdn.step, n=1), static_argnames=cases.STATIC)
    for _ in range(2):
        cfg = gdn.GdnConfig(hidden=4, key_heads=1, value_heads=1, key_dim=3, value_dim=2, conv_width=1)
        state = gdn.init_state(cfg, layers=1)
        counted(cases.weights(cfg), state, cases.inputs(cfg, 1), cfg=cfg, layer=jnp.int32(0))


# ---------------------------------------------------------------------------------------------------------------------
# vmap
# ---------------------------------------------------------------------------------------------------------------------


def test_vmap_over_states_and_inputs_is_a_loop():
    """F57: another batch shape, hence to rounding and not to the bit."""
    w, n = cases.weights(CFG), 3
    states = [cases.random_state(CFG, layers=2, batch=2, label=f"state{i}") for i in range(n)]
    xs = cases.inputs(CFG, n, 2)
    batched = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    ys, after = jax.jit(jax.vmap(lambda state, x: gdn.step(w, state, x, cfg=CFG, layer=1)))(batched, xs)
    for i, state in enumerate(states):
        y, want = cases.step(w, state, xs[i], cfg=CFG, layer=jnp.int32(1))
        assert error(ys[i], y) <= tolerances.CASE_OUTPUT
        for got, leaf in zip(jax.tree.leaves(after), jax.tree.leaves(want), strict=True):
            assert error(got[i], leaf) <= tolerances.CASE_STATE


def test_vmap_over_weights_and_layers():
    """F57: an ensemble of layers over one input, each on its own slot."""
    layers = [cases.weights(CFG, f"layer{i}") for i in range(2)]
    state, x = cases.random_state(CFG, layers=2, batch=2), cases.inputs(CFG, 2)
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    ys, _ = jax.jit(jax.vmap(lambda w, slot: gdn.step(w, state, x, cfg=CFG, layer=slot)))(ensemble, jnp.arange(2))
    for slot, w in enumerate(layers):
        y, _ = cases.step(w, state, x, cfg=CFG, layer=jnp.int32(slot))
        assert error(ys[slot], y) <= tolerances.CASE_OUTPUT


# ---------------------------------------------------------------------------------------------------------------------
# grad
# ---------------------------------------------------------------------------------------------------------------------

FIELDS = {
    "in_proj_qkv.weight": lambda g: g.large.qkv,
    "in_proj_z.weight": lambda g: g.large.z,
    "out_proj.weight": lambda g: g.large.out,
    "in_proj_b.weight": lambda g: g.b,
    "in_proj_a.weight": lambda g: g.a,
    "conv1d.weight": lambda g: g.conv[:, None],
    "A_log": lambda g: g.A_log,
    "dt_bias": lambda g: g.dt_bias,
    "norm.weight": lambda g: g.norm,
}


@pytest.fixture(scope="module")
def gradients():
    """Of sum(c · ys) over three tokens, with respect to weights, state and inputs; c fixed."""
    xs, state = cases.inputs(CFG, 3, 2), cases.random_state(CFG, layers=1, batch=2)
    mixed = cases.inputs(CFG, 3, 2, label="cotangent")

    def loss(w, state, xs):
        return jnp.sum(mixed * gdn.scan(w, state, xs, cfg=CFG)[0])

    of_weights, of_state, of_xs = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(cases.weights(CFG), state, xs)
    found = {name: field(of_weights) for name, field in FIELDS.items()}
    found |= {"S": of_state.S[0], "HIST": of_state.conv_hist[0], "xs": of_xs}
    point = {**cases.canonical(CFG), "S": state.S[0], "HIST": state.conv_hist[0], "xs": xs}
    found, point = (jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree) for tree in (found, point))
    return found, point, np.asarray(mixed, np.float64)


def slope_of_oracle(mixed, point, name, direction, step=1e-5):
    """The central difference in float64 of the same sum, as point[name] moves along `direction`."""
    values = []
    for offset in (step * direction, -step * direction):
        moved = {**point, name: point[name] + offset}
        weights = {field: moved[field] for field in FIELDS}
        run = cases.oracle_run(CFG, moved["xs"], moved["S"], moved["HIST"], weights=weights)
        values.append(np.sum(mixed * run.ys))
    return (values[0] - values[1]) / (2 * step)


@pytest.mark.parametrize("name", [*FIELDS, "S", "HIST", "xs"])
def test_gradient_is_the_slope_of_the_oracle(gradients, name):
    """F57: along three random directions per argument, which meet every element of it."""
    found, point, mixed = gradients
    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = rng.standard_normal(point[name].shape) / np.sqrt(point[name].size)
        want = slope_of_oracle(mixed, point, name, direction)
        got = np.sum(found[name] * direction)
        assert abs(got - want) <= tolerances.GRADIENT * np.linalg.norm(found[name])


def test_forward_and_reverse_mode_agree():
    """F57."""
    w, state, x = cases.weights(CFG), cases.random_state(CFG, layers=1, batch=2), cases.inputs(CFG, 2)
    tangent, cotangent = cases.inputs(CFG, 2, label="tangent"), cases.inputs(CFG, 2, label="cotangent")

    def output(x):
        return gdn.step(w, state, x, cfg=CFG)[0]

    @jax.jit
    def both(x):
        _, pushed = jax.jvp(output, (x,), (tangent,))
        (pulled,) = jax.vjp(output, x)[1](cotangent)
        return jnp.vdot(pushed, cotangent), jnp.vdot(tangent, pulled)

    forward, reverse = both(x)
    np.testing.assert_allclose(forward, reverse, rtol=tolerances.MODES)


def test_gradient_of_a_zero_input_to_a_new_sequence_is_finite():
    """F57: every norm meets zero at once."""

    def loss(w, x):
        return jnp.sum(gdn.step(w, gdn.init_state(CFG, layers=1, batch=2), x, cfg=CFG)[0])

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(cases.weights(CFG), jnp.zeros((2, CFG.hidden)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("filth", [np.nan, np.inf])
def test_padding_does_not_reach_a_gradient(filth):
    """F15: 0 · NaN in a backward pass would; the gradient is that of the sequence without its padding."""
    w, xs = cases.weights(CFG), cases.inputs(CFG, 3, 2)

    def loss(w, xs, active):
        return jnp.sum(gdn.scan(w, gdn.init_state(CFG, layers=1, batch=2), xs, cfg=CFG, active=active)[0])

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    active = np.array([[True, True], [True, True], [False, False]])
    of_weights, of_xs = gradient(w, xs.at[2].set(filth), active)
    want_weights, want_xs = gradient(w, xs[:2], active[:2])
    for got, want in zip(jax.tree.leaves(of_weights), jax.tree.leaves(want_weights), strict=True):
        assert error(got, want) <= tolerances.CASE_TAP
    assert error(of_xs[:2], want_xs) <= tolerances.CASE_TAP
    assert not np.any(of_xs[2])


# ---------------------------------------------------------------------------------------------------------------------
# with and without jit
# ---------------------------------------------------------------------------------------------------------------------

TINY = cases.geometry(5, 1, 2, 3, 4, 2)
plain_and_jitted: Any = chex.variants(with_jit=True, without_jit=True)


class VariantTest(chex.TestCase):
    """Each public function plain and jitted: the same values to rounding, whatever was fused."""

    def run_variant(self, function, xs):
        case = cases.Case("variants", TINY, batch=2, layers=2, slot=1)
        start = cases.start_of(case)
        run = self.variant(functools.partial(function, cfg=TINY, layer=1))
        y, state, *_ = run(cases.weights(TINY), start, xs)
        want = cases.oracle_run(TINY, xs.reshape(-1, 2, TINY.hidden), start.S[1], start.conv_hist[1])
        chex.assert_trees_all_close(
            np.asarray(y), want.ys.reshape(y.shape).astype(np.float32), rtol=0, atol=tolerances.TINY_LAYER
        )
        chex.assert_trees_all_close(
            np.asarray(state.S[1]), want.S.astype(np.float32), rtol=0, atol=tolerances.TINY_LAYER
        )
        chex.assert_trees_all_equal(
            jax.tree.map(lambda leaf: np.asarray(leaf[0]), state), jax.tree.map(lambda leaf: np.asarray(leaf[0]), start)
        )

    @plain_and_jitted
    def test_step(self):
        self.run_variant(gdn.step, cases.inputs(TINY, 2))

    @plain_and_jitted
    def test_scan(self):
        self.run_variant(gdn.scan, cases.inputs(TINY, 3, 2))

    @plain_and_jitted
    def test_trace(self):
        self.run_variant(gdn.trace, cases.inputs(TINY, 2))
