"""`norm_rows`: sum, RMSNorm and limbs of a row in one launch, interpreted, compiled without a GPU, and on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.limbs import group_digits, split_limbs
from pallas_kernels.limbs import MAX_NORM_COLUMNS, norm_rows
from tests.support.cases import assert_same_bits, error
from tests.support.deviceless import compile_for_h200

LAYERS, EPS = 3, 1e-6
NORM = 4e-7  # one rounding each of the sum, the mean, the root and three products

run = jax.jit(
    lambda x, y, weight, layer, limbs, interpret: norm_rows(
        x,
        y,
        weight,
        layer,
        functools.partial(group_digits, limbs=limbs),
        limbs=limbs,
        eps=EPS,
        interpret=interpret,
    ),
    static_argnames=("limbs", "interpret"),
)


@pytest.fixture(
    params=[pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
)
def interpret(request):
    return request.param


def drawn(batch, columns, seed=0):
    rng = np.random.default_rng(seed)
    arrays = (rng.standard_t(3, (batch, columns)), rng.standard_normal((batch, columns)))
    weight = rng.standard_normal((LAYERS, columns)) * 0.3
    return tuple(jnp.asarray(array, jnp.float32) for array in (*arrays, weight))


def at(layer):
    return jnp.array([layer], jnp.int32)


@pytest.mark.parametrize(("batch", "columns"), [(1, 32), (3, 96), (2, 1024), (1, 5120)])
@pytest.mark.parametrize("limbs", [1, 3])
def test_sum_norm_and_limbs_agree_with_float64(batch, columns, limbs, interpret):
    x, y, weight = drawn(batch, columns)
    made = run(x, y, weight, at(1), limbs, interpret)
    assert_same_bits(made.total, x + y)
    total = np.asarray(made.total, np.float64)
    want = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + EPS) * (1 + np.asarray(weight[1], np.float64))
    assert error(made.h, want) <= NORM
    digits, scales = split_limbs(made.h, limbs)
    assert_same_bits((made.digits.astype(jnp.float32), made.x_scales), (digits.astype(jnp.float32), scales))


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (LAYERS, LAYERS - 1)])
def test_a_layer_out_of_range_is_the_nearest(given, meant, interpret):
    arrays = drawn(2, 96)
    assert_same_bits(run(*arrays, at(given), 3, interpret).h, run(*arrays, at(meant), 3, interpret).h)


def test_rows_are_independent_and_repeatable(interpret):
    x, y, weight = drawn(3, 160)
    want = run(x, y, weight, at(0), 3, interpret)
    spoilt = run(x.at[1, 7].set(jnp.nan), y, weight, at(0), 3, interpret)
    assert np.isnan(spoilt.x_scales[1]).all()
    for got in (spoilt, run(x, y, weight, at(0), 3, interpret)):
        for name in ("total", "h", "x_scales"):
            assert_same_bits(getattr(got, name)[np.r_[0, 2]], getattr(want, name)[np.r_[0, 2]])


@pytest.mark.parametrize("columns", [80, MAX_NORM_COLUMNS + 32])
def test_rows_that_do_not_fit_are_refused(columns):
    with pytest.raises(NotImplementedError, match=f"multiple of 32 columns, at most 16384, got D = {columns}"):
        run(*drawn(1, columns), at(0), 3, True)


@pytest.mark.deviceless
@pytest.mark.parametrize("columns", [1024, 2560, 5120, MAX_NORM_COLUMNS])
def test_it_compiles_for_a_card_without_spills(columns):
    struct = jax.ShapeDtypeStruct
    row = struct((8, columns), jnp.float32)
    program = jax.jit(
        lambda *arrays: norm_rows(*arrays, functools.partial(group_digits, limbs=3), limbs=3, eps=EPS),
        compiler_options={"xla_gpu_fail_ptx_compilation_on_register_spilling": True},
    )
    compiled = compile_for_h200(program, row, row, struct((64, columns), jnp.float32), struct((1,), jnp.int32))
    assert compiled.memory_analysis().temp_size_in_bytes <= 64
    assert compiled.as_text().count("custom-call(") == 1
