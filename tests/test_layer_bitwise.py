"""What must agree to the last bit: programs of the same batch shape, slots, rows, replays and masked tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from tests.support import cases
from tests.support.cases import assert_same_bits, layers_of, rows_of

CFG = cases.SMALL
every_case = pytest.mark.parametrize("case", cases.CASES, ids=str)


def check_rows_are_independent():
    """F11, F58: a NaN, other values or another state in one row move no bit of the other rows."""
    w, xs = cases.weights(CFG), cases.inputs(CFG, 3, 4)
    state = cases.random_state(CFG, layers=2, batch=4)
    ys, end = cases.scan(w, state, xs, cfg=CFG, layer=jnp.int32(1))
    for filth in (jnp.nan, jnp.inf):
        bad_ys, bad_end = cases.scan(w, state, xs.at[0, 2, 5].set(filth), cfg=CFG, layer=jnp.int32(1))
        assert_same_bits(bad_ys[:, (0, 1, 3)], ys[:, (0, 1, 3)])
        assert_same_bits(rows_of(bad_end, [0, 1, 3]), rows_of(end, [0, 1, 3]))
        assert not np.isfinite(bad_ys[0, 2]).all()
    foul = gdn.GdnState(*(leaf.at[1, 0].set(jnp.nan) for leaf in (state.S, state.conv_hist)))
    foul_ys, _ = cases.scan(w, foul, xs, cfg=CFG, layer=jnp.int32(1))
    assert_same_bits(foul_ys[:, 1:], ys[:, 1:])
    assert np.isnan(foul_ys[:, 0]).all()


def check_first_and_last_layer_agree(layers=48):
    """The same weights and state as layer 0 and as layer 47: the same bits, and no other layer moves.

    K ≠ V and a random state, since a wrong offset or a transposed S is invisible in zeros.
    """
    w, xs, last = cases.weights(CFG), cases.inputs(CFG, 5, 2), layers - 1
    start = cases.random_state(CFG, layers=layers, batch=2)
    start = jax.tree.map(lambda leaf: leaf.at[last].set(leaf[0]), start)
    runs = {}
    for slot in (0, last):
        state, ys = start, []
        for x in xs:
            y, state = cases.step(w, state, x, cfg=CFG, layer=jnp.int32(slot))
            ys.append(y)
        others = np.arange(layers) != slot
        assert_same_bits(layers_of(state, others), layers_of(start, others))
        assert np.any(np.asarray(state.S[slot]) != np.asarray(start.S[slot]))
        runs[slot] = (jnp.stack(ys), state.S[slot], state.conv_hist[slot])
    assert_same_bits(runs[last], runs[0])


@every_case
def test_steps_equal_scan(case):
    assert_same_bits(cases.stepped(case)[:2], cases.scanned(case)[:2])


@every_case
def test_trace_equals_step(case):
    """Asking for intermediates must not change what is fused, and with it the last bit."""
    run = cases.traced(case)
    assert_same_bits(run[:2], cases.stepped(case)[:2])
    assert_same_bits(run.taps["OUT"], run.ys)
    final = gdn.GdnState(S=run.taps["S"][-1], conv_hist=run.taps["HIST"][-1])
    assert_same_bits(final, layers_of(run.state, case.slot))


@every_case
def test_other_layers_are_untouched(case):
    others = np.arange(case.layers) != case.slot
    want = layers_of(cases.start_of(case), others)
    for run in (cases.scanned(case), cases.stepped(case), cases.traced(case)):
        assert_same_bits(layers_of(run.state, others), want)


def test_first_and_last_of_48_layers_agree():
    check_first_and_last_layer_agree()


def test_rows_are_independent():
    check_rows_are_independent()


def test_a_program_gives_the_same_bits_twice():
    """F58."""
    w, state, xs = cases.weights(CFG), cases.random_state(CFG, layers=2, batch=3), cases.inputs(CFG, 4, 3)
    first, second = (cases.scan(w, state, xs, cfg=CFG, layer=jnp.int32(1)) for _ in range(2))
    assert_same_bits(first, second)


def test_identical_rows_give_identical_outputs():
    """F30: no row is served by another vector lane's arithmetic."""
    w = cases.weights(CFG)
    xs = jnp.repeat(cases.inputs(CFG, 5, 1), 7, axis=1)
    ys, state = cases.scan(w, gdn.init_state(CFG, layers=1, batch=7), xs, cfg=CFG)
    for row in range(1, 7):
        assert_same_bits(ys[:, row], ys[:, 0])
        assert_same_bits(rows_of(state, row), rows_of(state, 0))


@pytest.mark.parametrize("slot", [0, 2])
def test_a_stack_a_tuple_and_one_layer_agree(slot):
    layers = tuple(cases.weights(CFG, f"layer{i}") for i in range(3))
    stack = gdn.GdnStack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))
    state, x = cases.random_state(CFG, layers=3, batch=2), cases.inputs(CFG, 2)
    static = jax.jit(gdn.step, static_argnames=(*cases.STATIC, "layer"))
    one = cases.step(layers[slot], state, x, cfg=CFG, layer=jnp.int32(slot))
    assert_same_bits(cases.step(stack, state, x, cfg=CFG, layer=jnp.int32(slot)), one)
    assert_same_bits(static(layers, state, x, cfg=CFG, layer=slot), one)
    assert_same_bits(static(stack, state, x, cfg=CFG, layer=slot), one)
    assert len(stack) == 3


def test_reset_then_replay():
    """Every output and the state itself, since equal outputs do not see S."""
    w, xs = cases.weights(CFG), cases.inputs(CFG, 5, 2)
    fresh = gdn.init_state(CFG, layers=2, batch=2)
    first = cases.scan(w, fresh, xs, cfg=CFG, layer=jnp.int32(1))
    again = cases.scan(w, gdn.reset(first[1]), xs, cfg=CFG, layer=jnp.int32(1))
    assert_same_bits(again, first)


def test_a_new_state_equals_a_state_of_zeros():
    """F20."""
    w, xs = cases.weights(CFG), cases.inputs(CFG, 2, 2)
    zeros = gdn.GdnState(S=jnp.zeros((1, 2, 6, 12, 20)), conv_hist=jnp.zeros((1, 2, 3, CFG.conv_channels)))
    assert_same_bits(
        cases.scan(w, gdn.init_state(CFG, layers=1, batch=2), xs, cfg=CFG), cases.scan(w, zeros, xs, cfg=CFG)
    )


def test_two_scans_equal_one():
    """F16, for the serial form: also where the first is shorter than the convolution's history."""
    w, xs = cases.weights(CFG), cases.inputs(CFG, 6, 2)
    whole = cases.scan(w, gdn.init_state(CFG, layers=1, batch=2), xs, cfg=CFG)
    for cut in (1, 5):
        head, state = cases.scan(w, gdn.init_state(CFG, layers=1, batch=2), xs[:cut], cfg=CFG)
        tail, state = cases.scan(w, state, xs[cut:], cfg=CFG)
        assert_same_bits((jnp.concatenate([head, tail]), state), whole)


# ---------------------------------------------------------------------------------------------------------------------
# inactive rows and padding
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filth", [0.0, np.nan, np.inf, 1e30])
def test_an_inactive_row_is_zero_and_keeps_its_state(filth):
    """F25: to the bit, negative zeros and NaN in the state included, whatever its input holds."""
    w, active = cases.weights(CFG), jnp.array([True, False, True, False])
    state = cases.random_state(CFG, layers=2, batch=4)
    state = dataclasses.replace(state, S=state.S.at[1, 1, 0, 0, :2].set(jnp.array([-0.0, jnp.nan])))
    x = cases.inputs(CFG, 4)
    y, after = cases.step(w, state, x, cfg=CFG, layer=jnp.int32(1))
    masked = [
        cases.step(w, state, x.at[1::2].set(filth), cfg=CFG, layer=jnp.int32(1), active=active),
        cases.trace(w, state, x.at[1::2].set(filth), cfg=CFG, layer=jnp.int32(1), active=active)[:2],
    ]
    ys, scanned = cases.scan(w, state, x.at[1::2].set(filth)[None], cfg=CFG, layer=jnp.int32(1), active=active)
    for got_y, got in (*masked, (ys[0], scanned)):
        assert_same_bits(got_y[1::2], jnp.zeros((2, CFG.hidden)))
        assert_same_bits(rows_of(got, [1, 3]), rows_of(state, [1, 3]))
        assert_same_bits(got_y[::2], y[::2])
        assert_same_bits(rows_of(got, [0, 2]), rows_of(after, [0, 2]))


def test_taps_of_an_inactive_row():
    """OUT is 0, S and HIST are the untouched state."""
    state = cases.random_state(CFG, layers=1, batch=2)
    _, _, taps = cases.trace(cases.weights(CFG), state, cases.inputs(CFG, 2), cfg=CFG, active=jnp.array([True, False]))
    assert not np.any(taps["OUT"][1])
    assert_same_bits((taps["S"][1], taps["HIST"][1]), (state.S[0, 1], state.conv_hist[0, 1]))


@pytest.mark.parametrize("filth", [0.0, np.nan, np.inf, -1e30])
def test_padding_after_the_true_length_changes_nothing(filth):
    """F18, F15: lengths 6, 0, 1 and 2 of 6; outputs, S and history are those of the true length."""
    w, lengths = cases.weights(CFG), np.array([6, 0, 1, 2])
    xs, active = cases.inputs(CFG, 6, 4), np.arange(6)[:, None] < lengths[None]
    states, full = [cases.random_state(CFG, layers=1, batch=4)], []
    for x in xs:
        y, state = cases.step(w, states[-1], x, cfg=CFG)
        states.append(state)
        full.append(y)
    padded = jnp.where(jnp.asarray(active)[:, :, None], xs, jnp.float32(filth))
    ys, end = cases.scan(w, states[0], padded, cfg=CFG, active=active)
    assert_same_bits(ys, np.where(active[:, :, None], np.stack(full), np.float32(0)))
    for row, length in enumerate(lengths):
        assert_same_bits(rows_of(end, row), rows_of(states[length], row))


def test_a_mask_per_sequence_is_that_mask_at_every_token():
    w, xs = cases.weights(CFG), cases.inputs(CFG, 3, 2)
    state, mask = cases.random_state(CFG, layers=1, batch=2), np.array([False, True])
    assert_same_bits(
        cases.scan(w, state, xs, cfg=CFG, active=mask),
        cases.scan(w, state, xs, cfg=CFG, active=np.broadcast_to(mask, (3, 2))),
    )


@pytest.mark.parametrize("index", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("function", [cases.step, cases.trace, cases.scan], ids=["step", "trace", "scan"])
def test_a_traced_layer_out_of_range_gives_nan_and_moves_nothing(function, index):
    """It cannot be refused while tracing; clamping it in silence would corrupt another layer."""
    state, x = cases.random_state(CFG, layers=3, batch=2), cases.inputs(CFG, 2)
    x = x[None] if function is cases.scan else x
    y, after, *_ = function(cases.weights(CFG), state, x, cfg=CFG, layer=jnp.int32(index))
    assert np.isnan(y).all()
    assert_same_bits(after, state)
