"""The same promises on a GPU, by the same test bodies, and offsets that only a large memory reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.evidence import goldens
from tests.support import cases, tolerances
from tests.support.cases import assert_same_bits, error
from tests.test_layer import check_golden, check_outputs_and_state, check_taps
from tests.test_layer_bitwise import check_first_and_last_layer_agree, check_rows_are_independent
from tests.test_transforms import check_donation

pytestmark = pytest.mark.gpu
every_case = pytest.mark.parametrize("case", cases.CASES, ids=str)


@every_case
def test_every_path_agrees_with_float64(case):
    check_outputs_and_state(case, cases.scanned(case))
    check_outputs_and_state(case, cases.stepped(case))
    check_outputs_and_state(case, cases.traced(case))
    check_taps(case, cases.traced(case))


@every_case
def test_steps_scan_and_trace_agree_bitwise(case):
    assert_same_bits(cases.stepped(case)[:2], cases.scanned(case)[:2])
    assert_same_bits(cases.traced(case)[:2], cases.stepped(case)[:2])


@pytest.mark.parametrize("name", ["ratio1", "ratio3-heavy-state-width3", "27b-t5-gaussian", "27b-t5-heavy"])
def test_scan_agrees_with_transformers(name):
    check_golden(goldens.load(name))


@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_the_27b_layer_is_within_its_bound_of_float64(kind):
    golden = goldens.load(f"27b-t5-{kind}")
    s, history = golden.initial_state()
    start = gdn.GdnState(S=jnp.asarray(s[None]), conv_hist=jnp.asarray(history[None]))
    ys, end = cases.scan(
        gdn.from_canonical(golden.cfg, golden.weights()), start, jnp.asarray(golden.xs()), cfg=golden.cfg
    )
    want = cases.oracle_run(golden.cfg, golden.xs(), s, history, weights=golden.weights())
    assert cases.token_errors(ys, want.ys).max() <= tolerances.LAYER_27B
    assert error(end.S[0], want.S) <= tolerances.STATE


def test_rows_are_independent():
    check_rows_are_independent()


def test_first_and_last_of_48_layers_agree():
    check_first_and_last_layer_agree()


def test_a_donated_state_is_not_copied():
    """F55."""
    x = cases.inputs(cases.SMALL, 2)
    check_donation(cases.donating_step, x)
    check_donation(cases.donating_scan, x[None])


def test_offsets_beyond_two_to_the_31_elements():
    """F28: 48 layers of 57 rows at H = 48, K = V = 128 hold 2,151,677,952 elements of S.

    The last rows of the last layer lie beyond 2^31, so an int32 offset reads and writes elsewhere: the step must match
    float64 there, give the bits that layer 0 gives from the same state, and leave all other layers at zero.
    """
    layers, rows = 48, 57
    cfg = cases.geometry(64, 16, 48, 128, 128, 4)
    w, x = cases.weights(cfg), cases.inputs(cfg, rows)
    one = cases.random_state(cfg, layers=1, batch=rows)
    place = jax.jit(
        lambda state, part, slot: jax.tree.map(
            lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new[0], slot, 0), state, part
        ),
        donate_argnums=0,
    )
    state = gdn.init_state(cfg, layers=layers, batch=rows)
    assert state.S.size > 2**31
    for slot in (0, layers - 1):
        state = place(state, one, jnp.int32(slot))
    outputs = {}
    for slot in (layers - 1, 0):
        outputs[slot], state = cases.donating_step(w, state, x, cfg=cfg, layer=jnp.int32(slot))
    assert_same_bits(outputs[layers - 1], outputs[0])
    first, last = (jax.tree.map(lambda leaf, i=slot: leaf[i], state) for slot in (0, layers - 1))
    assert_same_bits(last, first)
    assert not jnp.any(state.S[1:-1] != 0)
    want = cases.oracle_run(cfg, x[None], one.S[0], one.conv_hist[0])
    assert cases.token_errors(outputs[layers - 1][None], want.ys).max() <= tolerances.CASE_OUTPUT
    assert cases.token_errors(np.asarray(last.S)[None], want.S[None]).max() <= tolerances.CASE_STATE
    cleared = gdn.reset(state, rows=[rows - 1])
    assert not jnp.any(cleared.S[:, -1] != 0)
    assert_same_bits(cleared.S[-1, :-1], last.S[:-1])
    assert_same_bits(gdn.select(cleared, [rows - 2]).S[-1, 0], last.S[-2])
