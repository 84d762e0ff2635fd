"""Products of many rows: by kernel and by XLA, of a stack, in bfloat16, row by row, and in bounded memory."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gdn_jax import ops
from gdn_jax.errors import UnsupportedError
from gdn_jax.evidence.metrics import rms_rel
from gdn_jax.q4 import dequantize, quantize
from tests.support import tolerances
from tests.support.cases import assert_same_bits

LAYERS, ROWS, COLUMNS = 3, 40, 96
LAYER = jnp.int32(1)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


DENSE = drawn(LAYERS, ROWS, COLUMNS)
STACKS = {"f32": jnp.asarray(DENSE), "bf16": jnp.asarray(DENSE).astype(jnp.bfloat16), "q4": quantize(DENSE)}


def as_float64(stack, layer=1):
    """The matrix that a layer of a stack stands for."""
    exact = dequantize(stack) if not isinstance(stack, jax.Array) else stack
    return np.asarray(exact[layer].astype(jnp.float32), np.float64)


def rounded(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def multiplied(stack, x, *, precision="exact", implementation="xla", layer=LAYER):
    program = jax.jit(
        lambda w, x: ops.project_rows((w,), x, precision=precision, implementation=implementation, layer=layer)
    )
    [y] = program(stack, x)
    return np.asarray(y)


@pytest.mark.parametrize("rows", [1, 8, 21])
@pytest.mark.parametrize("tier", STACKS)
def test_rows_are_those_of_the_matrix_it_stands_for(tier, rows, monkeypatch):
    """At once, and in batches of which the last is in part."""
    x = drawn(rows, COLUMNS, seed=1)
    want = x @ as_float64(STACKS[tier]).T
    assert rms_rel(multiplied(STACKS[tier], x), want) <= tolerances.PROJECTION
    monkeypatch.setattr(ops, "_PARTIAL_SUMS", 0)
    assert rms_rel(multiplied(STACKS[tier], x), want) <= tolerances.PROJECTION


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["exact", "q8"])
def test_rows_by_the_kernel_are_those_of_xla(precision):
    """More of them than one launch takes, the last launch in part; and of two matrices at once."""
    x = drawn(21, COLUMNS, seed=1)
    found = {}
    for name in ("interpret", "xla"):
        matrices = STACKS["q4"], quantize(DENSE[:, ::-1])
        program = jax.jit(
            lambda w, x, name=name: ops.project_rows(w, x, precision=precision, implementation=name, layer=LAYER)
        )
        found[name] = program(matrices, x)
    for by_kernel, by_xla in zip(*found.values(), strict=True):
        assert by_kernel.shape == (21, ROWS)
        assert rms_rel(by_kernel, by_xla) <= tolerances.PROJECTION
    assert rms_rel(found["xla"][1], np.asarray(found["xla"][0])[:, ::-1]) <= tolerances.PROJECTION


@pytest.mark.parametrize("tier", STACKS)
def test_bf16_rounds_activations_and_dense_weights_and_nothing_else(tier):
    x, w = drawn(21, COLUMNS, seed=1), as_float64(STACKS[tier])
    want = rounded(x) @ (w if tier == "q4" else rounded(w)).T
    assert rms_rel(multiplied(STACKS[tier], x, precision="bf16"), want) <= tolerances.PROJECTION
    assert 1e-3 < rms_rel(want, x @ w.T) < 5e-3


@pytest.mark.parametrize("precision", ["exact", "bf16"])
@pytest.mark.parametrize("tier", STACKS)
def test_what_is_not_finite_stays_in_its_row(tier, precision):
    x = drawn(21, COLUMNS, seed=1)
    clean = multiplied(STACKS[tier], x, precision=precision)
    x[9, 5], x[20, 7] = np.nan, np.inf
    spoilt = multiplied(STACKS[tier], x, precision=precision)
    others = np.delete(np.arange(21), [9, 20])
    assert_same_bits(spoilt[others], clean[others])
    assert not np.isfinite(spoilt[[9, 20]]).any()


def test_a_matrix_alone_is_a_layer_of_its_stack():
    x = drawn(21, COLUMNS, seed=1)
    for stack in STACKS.values():
        alone = jax.tree.map(lambda leaf: leaf[1], stack)
        assert rms_rel(multiplied(alone, x, layer=None), multiplied(stack, x)) <= tolerances.PROJECTION


def test_what_is_held_beside_the_operands_does_not_grow_with_the_rows():
    """Copies of the matrix for its products, and some partial sums, for 64 rows as for 512."""
    matrix = jax.ShapeDtypeStruct((2, 1024, 5120), jnp.float32)
    held = []
    for rows in (64, 512):
        x = jax.ShapeDtypeStruct((rows, 5120), jnp.float32)
        program = jax.jit(lambda w, x: ops.project_rows((w,), x, precision="exact", implementation="xla", layer=LAYER))
        held.append(program.lower(matrix, x).compile().memory_analysis().temp_size_in_bytes - 4 * rows * (5120 + 1024))
    one_layer, partial_sums = 4 * 1024 * 5120, 4 * ops._PARTIAL_SUMS
    assert all(nbytes <= 2 * one_layer + 2 * partial_sums for nbytes in held)


def test_gradient_and_vmap_of_kernels_are_those_of_xla(monkeypatch):
    """Where the implementation was not named; a name is refused."""
    x = drawn(9, COLUMNS, seed=1)

    def total(x, name):
        [y] = ops.project_rows((STACKS["q4"],), x, precision="exact", implementation=name, layer=LAYER)
        return jnp.sum(y * y)

    want = jax.jit(jax.grad(lambda x: total(x, "xla")))(x), jax.jit(jax.vmap(lambda x: total(x, "xla")))(x[None])
    with pytest.raises(UnsupportedError, match="'interpret' has no rule for"):
        jax.grad(total)(x, "interpret")
    chosen = ops.Choice("project", "interpret", "for this test")
    monkeypatch.setattr(ops, "choose_rows", lambda *_: chosen)
    found = jax.jit(jax.grad(lambda x: total(x, None)))(x), jax.jit(jax.vmap(lambda x: total(x, None)))(x[None])
    for got, expected in zip(found, want, strict=True):
        assert rms_rel(got, expected) <= tolerances.PROJECTION


@pytest.mark.parametrize("name", ["triton", "mosaic", "interpret"])
def test_a_kernel_without_bf16_is_refused_by_name(name):
    x = jnp.asarray(drawn(21, COLUMNS, seed=1))
    with pytest.raises(UnsupportedError, match=f"implementation='{name}' cannot carry out project_rows"):
        ops.project_rows((STACKS["q4"],), x, precision="bf16", implementation=name, layer=LAYER)
    # Dense matrices are XLA's under every name.
    assert multiplied(STACKS["f32"], x, precision="bf16", implementation=name).shape == (21, ROWS)


def test_precisions_of_steps_and_of_prompts():
    ops.check_precision("bf16", "q4", ops.PROMPT_PRECISIONS)
    with pytest.raises(
        UnsupportedError, match="one of exact, q8 for weights of tier 'q4', got 'bf16'; bf16 is for pro"
    ):
        ops.check_precision("bf16", "q4")
    with pytest.raises(UnsupportedError, match=r"one of exact, bf16 for weights of tier 'f32', got 'q8'$"):
        ops.check_precision("q8", "f32", ops.PROMPT_PRECISIONS)
