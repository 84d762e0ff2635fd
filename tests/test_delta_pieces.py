"""Pieces of a sequence at the same time: against float64 and one pass, with resets, gradients, kernels, odd sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import ops
from gdn_jax.delta import CHUNK, clean_chunks
from gdn_jax.delta_pieces import in_pieces, number_of_pieces, shapes_of_v
from gdn_jax.errors import UnsupportedError
from gdn_jax.evidence.metrics import rms_rel
from tests.test_kernel_delta_chunk import operands, serial

SIZES = (5 * CHUNK + 7, 3, 2, 4, 12, 20)
"""T, B, G, H, K, V: an odd batch, K != V, H > G > 1, a ragged last chunk."""
EXACT = 2e-6


@functools.cache
def compiled(pieces, precision="exact"):
    return jax.jit(in_pieces(functools.partial(clean_chunks, precision=precision), pieces))


@pytest.mark.parametrize("pieces", [3, 100])
@pytest.mark.parametrize("kind", ["mixed", "none", "resets", "alike", "strong"])
def test_pieces_agree_with_float64(pieces, kind):
    """F4 … F7: also where each write takes back most of the one before, and across full resets."""
    given = operands(*SIZES, kind=kind)
    for got, want in zip(compiled(pieces)(*given), serial(*given), strict=True):
        assert got.shape == want.shape
        assert rms_rel(got, want) <= EXACT


def test_rounded_operands_cost_no_more_in_pieces():
    given = operands(*SIZES)
    want = serial(*given)
    one, several = (compiled(pieces, "bf16")(*given) for pieces in (1, 3))
    for plain, cut, exact in zip(one, several, want, strict=True):
        assert rms_rel(cut, exact) <= 1.1 * rms_rel(plain, exact)


def test_a_reset_forgets_what_pieces_before_it_held():
    """Not a bit behind it depends on S or on earlier pieces, however large."""
    given = list(operands(*SIZES))
    at = 3 * CHUNK + 5
    given[5] = given[5].at[at].set(-np.inf)
    o, s = compiled(3)(*given)
    given[0], given[3] = 1e6 * given[0], given[3].at[:at].multiply(1e6)
    new_o, new_s = compiled(3)(*given)
    np.testing.assert_array_equal(new_o[at:], o[at:])
    np.testing.assert_array_equal(new_s, s)


@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1])
def test_there_are_no_more_pieces_than_chunks(tokens):
    given = operands(tokens, *SIZES[1:])
    one, several = compiled(1)(*given), compiled(7)(*given)
    for got, want in zip(several, one, strict=True):
        if tokens <= CHUNK:
            np.testing.assert_array_equal(got, want)
        else:
            assert rms_rel(got, np.asarray(want, np.float64)) <= EXACT


def test_gradients_are_those_of_one_pass():
    given = operands(2 * CHUNK + 9, 1, 1, 2, 8, 8)

    def total(pieces, *arrays):
        o, s = ops.delta_chunks(*arrays, precision="exact", implementation="xla", pieces=pieces)
        return jnp.sum(o * o) + jnp.sum(s * s)

    one, several = (jax.jit(jax.grad(functools.partial(total, n), tuple(range(6))))(*given) for n in (1, 2))
    for got, want in zip(several, one, strict=True):
        assert rms_rel(got, np.asarray(want, np.float64)) <= EXACT


@pytest.mark.parametrize("implementation", ["interpret", pytest.param(None, marks=pytest.mark.gpu)])
def test_kernels_compute_pieces_too(implementation):
    given = operands(2 * CHUNK + 9, 1, 1, 2, 16, 16)
    how = {"precision": "exact", "implementation": implementation, "pieces": 3}
    for got, want in zip(jax.jit(functools.partial(ops.delta_chunks, **how))(*given), serial(*given), strict=True):
        assert rms_rel(got, want) <= EXACT


@pytest.mark.parametrize(
    ("tokens", "pieces", "count"),
    [(1, 1, 1), (1, 9, 1), (64, 2, 1), (65, 2, 2), (130, 99, 3), (320, 4, 3), (512, 8, 8)],
)
def test_the_pieces_that_are_computed(tokens, pieces, count):
    """Their number and every v that a form is given, which are those that a form of zeros meets."""
    met = []

    def form(s, q, k, v, beta, g):
        met.append(v.shape)
        return jnp.zeros_like(v), jnp.zeros_like(s)

    given = operands(tokens, 2, 1, 2, 12, 20)
    jax.eval_shape(in_pieces(form, pieces), *given)
    assert number_of_pieces(tokens, pieces) == count
    assert tuple(met) == shapes_of_v(given[3].shape, 12, pieces)
    assert [(shape[1], shape[3]) for shape in met] == ([(2, 20)] if count == 1 else [(2 * count, 32), (2 * count, 20)])


@pytest.mark.parametrize(("pieces", "chosen"), [(1, "triton"), (2, "xla")])
def test_a_kernel_must_take_the_columns_of_both_passes(monkeypatch, pieces, chosen):
    """K + V of them, in the 27B geometry 256; the first 64 tokens are one piece however many are asked for."""

    def supported(batch, tokens, key_heads, heads, key_dim, columns, precision, *, backend="triton", interpret=False):
        return "too many columns" if backend != "triton" or columns > 128 else None

    monkeypatch.setattr(ops.chunk_kernels, "supported", supported)
    for tokens, expected in ((64, "triton"), (65, chosen)):
        v = jax.ShapeDtypeStruct((tokens, 1, 48, 128), jnp.float32)
        assert ops.choose_delta_chunks(v, 16, 128, "exact", None, pieces).implementation == expected


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "precision"), [(128, 128, "exact"), (100, 60, "exact"), (65, 64, "bf16")]
)
def test_a_named_kernel_that_does_not_take_both_passes_is_refused(key_dim, value_dim, precision):
    given = operands(65, 1, 1, 1, key_dim, value_dim)
    with pytest.raises(UnsupportedError, match=f"got K = {key_dim}, V = {key_dim + value_dim} .in pieces"):
        ops.delta_chunks(*given, precision=precision, implementation="interpret", pieces=2)


@pytest.mark.parametrize(("pieces", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError)])
def test_a_number_of_pieces_that_is_none(pieces, error):
    with pytest.raises(error, match=f"pieces must be (at least 1|an integer), got {pieces}"):
        in_pieces(clean_chunks, pieces)
    with pytest.raises(error, match=f"pieces must be (at least 1|an integer), got {pieces}"):
        ops.delta_chunks(*operands(1, *SIZES[1:]), precision="exact", implementation="xla", pieces=pieces)
