"""The state as a value: created, reset, copied, forked, selected and merged, and what each leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from tests.support import cases
from tests.support.cases import assert_same_bits, rows_of

CFG = cases.SMALL


@pytest.fixture
def state():
    return cases.random_state(CFG, layers=3, batch=4)


def buffers(state):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}


def test_a_new_state_is_zero_in_the_documented_shapes():
    state = gdn.init_state(CFG, layers=3, batch=4)
    assert state.S.shape == (3, 4, 6, 12, 20)
    assert state.conv_hist.shape == (3, 4, 3, 2 * 2 * 12 + 6 * 20)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state))
    assert (state.layers, state.batch) == (3, 4)


def test_width_one_has_an_empty_history():
    assert gdn.init_state(cases.geometry(8, 1, 1, 4, 3, 1), layers=2).conv_hist.shape == (2, 1, 0, 11)


def test_bytes_of_the_27b_state():
    """151 MB and 5.9 MB per sequence, without allocating them."""
    sizes = gdn.state_nbytes(gdn.GEOMETRIES["qwen3.5-27b"].cfg, layers=48, batch=1)
    assert sizes == {"S": 48 * 48 * 128 * 128 * 4, "conv_hist": 48 * 3 * 10240 * 4}
    assert gdn.state_nbytes(CFG, layers=3, batch=4) == {
        "S": cases.random_state(CFG, layers=3, batch=4).S.nbytes,
        "conv_hist": cases.random_state(CFG, layers=3, batch=4).conv_hist.nbytes,
    }


# ---------------------------------------------------------------------------------------------------------------------
# reset
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filth", [np.nan, np.inf, -np.inf, 1e3])
def test_a_reused_slot_starts_clean(filth):
    """F26: 0 · NaN is NaN, so a reset that multiplies leaves it dirty. The next token is that of a new sequence."""
    dirty = jax.tree.map(lambda leaf: jnp.full_like(leaf, filth), gdn.init_state(CFG, layers=2, batch=2))
    fresh = gdn.init_state(CFG, layers=2, batch=2)
    assert_same_bits(gdn.reset(dirty), fresh)
    one = gdn.reset(dirty, rows=[1])
    assert_same_bits(rows_of(one, [1]), rows_of(fresh, [1]))
    assert_same_bits(rows_of(one, [0]), rows_of(dirty, [0]))
    y, _ = cases.step(cases.weights(CFG), gdn.reset(dirty), cases.inputs(CFG, 2), cfg=CFG)
    want, _ = cases.step(cases.weights(CFG), fresh, cases.inputs(CFG, 2), cfg=CFG)
    assert_same_bits(y, want)


@pytest.mark.parametrize("rows", [[2, 0], (2, 0), np.array([0, 2]), jnp.array([2, 0])])
def test_reset_of_rows_leaves_the_others_alone(state, rows):
    got = gdn.reset(state, rows=rows)
    assert_same_bits(rows_of(got, [1, 3]), rows_of(state, [1, 3]))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(rows_of(got, [0, 2])))


def test_traced_rows_out_of_range_reset_nothing(state):
    """F29: a negative index must not count from the end."""
    got = jax.jit(gdn.reset)(state, jnp.array([1, -1, 4, 2**31 - 1, -(2**31)]))
    assert_same_bits(rows_of(got, [0, 2, 3]), rows_of(state, [0, 2, 3]))
    assert not np.any(got.S[:, 1])


# ---------------------------------------------------------------------------------------------------------------------
# snapshot and restore
# ---------------------------------------------------------------------------------------------------------------------


def test_a_snapshot_survives_donated_steps_and_many_restores(state):
    """F37: save, run on a donated state, restore, run again, three times over: identical bits."""
    w, xs = cases.weights(CFG), cases.inputs(CFG, 3, 4)
    saved, want = gdn.snapshot(state), jax.tree.map(np.array, state)
    runs = []
    for _ in range(3):
        current = gdn.restore(saved)
        assert_same_bits(current, want)
        ys = []
        for x in xs:
            y, current = cases.donating_step(w, current, x, cfg=CFG, layer=jnp.int32(2))
            ys.append(y)
        runs.append((ys, current))
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])
    assert_same_bits(saved.state, want)


def test_snapshot_and_restore_own_their_buffers(state):
    saved = gdn.snapshot(state)
    first, second = gdn.restore(saved), gdn.restore(saved)
    everything = [buffers(value) for value in (state, saved.state, first, second)]
    assert len(set.union(*everything)) == sum(map(len, everything))


@pytest.mark.parametrize(
    "copy",
    [
        lambda s: gdn.branch(s, 1),
        lambda s: gdn.select(s, [0, 1, 2, 3]),
        lambda s: gdn.merge([s]),
        lambda s: gdn.reset(s),
        lambda s: gdn.reset(s, [0]),
    ],
    ids=["branch", "select", "merge", "reset", "reset-rows"],
)
def test_a_derived_state_may_be_donated(state, copy):
    """No function hands back the buffers of its argument, or donating the result would delete the original."""
    assert not buffers(copy(state)) & buffers(state)


# ---------------------------------------------------------------------------------------------------------------------
# branch, select, merge
# ---------------------------------------------------------------------------------------------------------------------


def test_branch_is_row_major(state):
    """Row b·n + i is fork i of row b."""
    assert_same_bits(gdn.branch(state, 3), rows_of(state, [b for b in range(4) for _ in range(3)]))


def test_branch_then_select_is_the_original(state):
    assert_same_bits(gdn.select(gdn.branch(state, 3), [0, 4, 8, 11]), state)


def test_select_reorders_and_repeats(state):
    assert_same_bits(gdn.select(state, [3, 1, 1]), rows_of(state, [3, 1, 1]))


def test_merge_of_selected_rows_is_the_original(state):
    parts = [gdn.select(state, [0]), gdn.select(state, [1, 2]), gdn.select(state, [3])]
    assert_same_bits(gdn.merge(parts), state)
    assert_same_bits(gdn.merge(iter(parts)), state)


def test_traced_rows_out_of_range_select_nan(state):
    """F29: never another sequence's state."""
    got = jax.jit(gdn.select)(state, jnp.array([2, -1, 4]))
    assert_same_bits(rows_of(got, [0]), rows_of(state, [2]))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(rows_of(got, [1, 2])))


def test_forks_diverge_and_the_trunk_stays(state):
    """Each fork sees its own token; one that sees what the trunk saw has the trunk's next state, to the bit."""
    w, x = cases.weights(CFG), cases.inputs(CFG, 4)
    trunk, fork = gdn.branch(state, 2), gdn.branch(state, 2)
    same = jnp.repeat(x, 2, axis=0)
    _, trunk = cases.step(w, trunk, same, cfg=CFG)
    _, fork = cases.step(w, fork, same.at[1::2].multiply(-1.0), cfg=CFG)
    assert_same_bits(rows_of(fork, [0, 2, 4, 6]), rows_of(trunk, [0, 2, 4, 6]))
    assert all(np.any(np.asarray(fork.S[0, row]) != np.asarray(trunk.S[0, row])) for row in (1, 3, 5, 7))
