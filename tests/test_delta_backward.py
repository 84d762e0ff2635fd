"""The backward pass of the chunks: against float64, against autodiff of both forms, through resets, and in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gdn_jax import delta, ops
from gdn_jax.bench.chunk_case import serially
from gdn_jax.chunks import by_chunks
from gdn_jax.evidence.metrics import rms_rel
from tests.support import tolerances
from tests.support.cases import assert_same_bits
from tests.test_delta_chunk import NAMES, RESET, operands, serial

SLOPE = 5e-9
"""Along a random direction, against the oracle's central difference, relative to the gradient's norm: 1.6e-9 measured,
less than a rounding, since those of two thousand terms and more average out."""
BF16_RMS = 1.1e-2
"""7.5e-3 measured, where beta is near 1; 3.4e-3 with decays."""
BF16_ALIKE_RMS = 1e-1
"""6.5e-2 measured, beta, where keys are alike."""

# T, B, G, H, K, V and the chunk: a chunk no longer than a key, as in every published geometry; spans of three chunks
# and an odd batch; a chunk that is not full; one token; and keys much shorter than a chunk.
USUAL, SPANS, SHORT, ONE = (
    (289, 1, 2, 6, 64, 48, 64),
    (70, 5, 1, 3, 12, 20, 4),
    (3, 3, 2, 4, 12, 20, 64),
    (1, 3, 1, 2, 9, 5, 64),
)
CROWDED = (289, 2, 2, 6, 12, 20, 64)


def point(case, kind="mixed", *, part="both"):
    """Operands of a case, and random cotangents of o and S, one of them zero where `part` names the other."""
    given, rng = operands(*case[:-1], kind=kind), np.random.default_rng(5)
    do, ds = (np.asarray(rng.standard_normal(x.shape), np.float32) for x in (given[3], given[0]))
    return given, (do * (part != "S"), ds * (part != "o"))


@functools.cache
def gradient_of(form, **how):
    """(operands, cotangents) -> gradients, compiled once for every shape."""
    return jax.jit(lambda given, cotangents: jax.vjp(functools.partial(form, **how), *given)[1](cotangents))


def found(case, given, cotangents, precision="exact"):
    return gradient_of(delta.clean_chunks, precision=precision, chunk=case[-1])(given, cotangents)


def truth(given, cotangents):
    """By autodiff of the serial form in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (given, cotangents))
        return [np.asarray(x) for x in gradient_of(serially)(*wide)]


def errors(got, want):
    """RMS-relative, of every operand; what should be zero must be."""
    assert all(np.isfinite(x).all() for x in got)
    return np.array(
        [rms_rel(x, y) if y.any() else (np.inf if np.any(x) else 0.0) for x, y in zip(got, want, strict=True)]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Against float64, and against autodiff
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "part"),
    [
        *(
            (USUAL, kind, "both")
            for kind in ("mixed", "weak", "none", "full writes", "strong", "even", "resets", "alike")
        ),
        *((USUAL, kind, "S") for kind in ("weak", "full writes", "alike")),
        *((USUAL, kind, "o") for kind in ("mixed", "resets", "alike")),
        *((SPANS, kind, "both") for kind in ("mixed", "none", "resets", "alike")),
        *((SHORT, kind, part) for kind in ("mixed", "resets") for part in ("both", "o", "S")),
        *((ONE, "mixed", part) for part in ("both", "o", "S")),
    ],
)
def test_error_is_at_most_twice_that_of_the_serial_form(case, kind, part):
    """F4, F5, F7, F57: under autodiff, both against float64, the worst of the six operands."""
    at = point(case, kind, part=part)
    exact = truth(*at)
    assert max(errors(found(case, *at), exact)) <= 2 * max(errors(gradient_of(serially)(*at), exact))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full writes", "none", "alike"])
def test_keys_much_shorter_than_a_chunk_lose_what_the_chunked_form_loses(kind):
    """The serial form then forgets its own roundings within a chunk. The chunked one sums them, forwards and back."""
    at = point(CROWDED, kind)
    exact = truth(*at)
    ours, before = (
        errors(got, exact) for got in (found(CROWDED, *at), gradient_of(by_chunks, precision="exact", chunk=64)(*at))
    )
    assert np.all(ours <= 1.5 * before)  # at most 1.28, of g by JAX 0.12; the others are below 1.01
    assert max(ours) <= tolerances.CHUNK_ALIKE


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_slope_of_the_oracle(name):
    """F4, F57: through full resets, over several spans. A g of -inf or -1e38 stays where it is."""
    given, cotangents = point(SPANS, "resets")
    got = np.asarray(found(SPANS, given, cotangents)[NAMES.index(name)], np.float64)
    rng, step = np.random.default_rng(0), 1e-5
    direction = rng.standard_normal(got.shape) / np.sqrt(got.size)
    if name == "g":
        direction = np.where(given[5] < -1e30, 0, direction)
    sums = []
    for offset in (step, -step):
        moved = [np.asarray(x, np.float64) for x in given]
        moved[NAMES.index(name)] += offset * direction
        sums.append(sum((x * y).sum() for x, y in zip(cotangents, serial(*moved), strict=True)))
    assert abs(np.sum(got * direction) - (sums[0] - sums[1]) / (2 * step)) <= SLOPE * np.linalg.norm(got)


@pytest.mark.parametrize("kind", ["full writes", "mixed", "resets", "alike"])
def test_products_of_operands_rounded_to_bf16(kind):
    """As near as the rounded forward pass is, whose products they are."""
    at = point(USUAL, kind)
    worst = max(errors(found(USUAL, *at, precision="bf16"), truth(*at)))
    assert 1e-3 < worst <= (BF16_ALIKE_RMS if kind == "alike" else BF16_RMS)


# ---------------------------------------------------------------------------------------------------------------------
# Resets, and what is not finite
# ---------------------------------------------------------------------------------------------------------------------


def test_nothing_flows_through_a_reset():
    """F4: from S to what came before it, not a bit; nor to the g that makes it."""
    given, (_, ds) = point(SPANS, "mixed")
    given[5][37] = RESET
    s, *tokens = found(SPANS, given, (0 * given[3], ds))
    assert not np.any(s)
    assert not any(np.any(x[:37]) for x in tokens)
    assert not np.any(tokens[-1][37])
    assert all(np.any(x[37:]) for x in tokens[1:])


def test_every_g_that_resets_has_no_gradient():
    given, cotangents = point(SPANS, "resets")
    of_g = np.asarray(found(SPANS, given, cotangents)[-1])
    resets = given[5] < -1e30
    assert 0 < resets.mean() < 1
    assert not np.any(of_g[resets])
    assert np.all(of_g[~resets] != 0)


@pytest.mark.parametrize(
    ("name", "value"), [("v", np.nan), ("k", np.inf), ("beta", np.nan), ("g", np.inf), ("s", np.nan)]
)
def test_what_is_not_finite_carries_no_gradient(name, value):
    """F11: all gradients are finite, and those of another row keep their bits."""
    given, cotangents = point((70, 2, 1, 3, 12, 20, 64))
    gradient = gradient_of(delta.delta_chunk)
    clean = gradient(given, cotangents)
    given[NAMES.index(name)][(0 if name == "s" else (33, 0))] = value
    spoilt = gradient(given, cotangents)
    assert all(np.isfinite(x).all() for x in spoilt)
    assert_same_bits(
        [x[1:] if i == 0 else x[:, 1:] for i, x in enumerate(spoilt)],
        [x[1:] if i == 0 else x[:, 1:] for i, x in enumerate(clean)],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Transformations, kernels, memory
# ---------------------------------------------------------------------------------------------------------------------

SMALL = (24, 2, 2, 4, 12, 20, 8)
SMALL_FORM = functools.partial(delta.clean_chunks, chunk=8)


def loss(form, given):
    o, s = form(*given)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(s))


@functools.cache
def loss_gradient(form):
    return jax.jit(jax.grad(functools.partial(loss, form)))


def check(got, want, bound=tolerances.CHUNK_GRADIENT):
    assert max(errors(jax.tree.leaves(got), [np.asarray(x) for x in jax.tree.leaves(want)])) <= bound


@pytest.mark.slow
def test_vmap_is_a_loop():
    """F57."""
    given, gradient = [operands(*SMALL[:-1], seed=seed) for seed in range(3)], loss_gradient(SMALL_FORM)
    batched = jax.jit(jax.vmap(gradient))([jnp.stack(leaves) for leaves in zip(*given, strict=True)])
    for i, one in enumerate(given):
        check([x[i] for x in batched], gradient(one))


def test_parts_in_a_scan_with_remat():
    """F16, F57: the gradient of S links them."""

    def in_parts(s, *tokens):
        @jax.checkpoint
        def body(s, part):
            o, s = SMALL_FORM(s, *part)
            return s, o

        s, o = lax.scan(body, s, tuple(x.reshape(3, 8, *x.shape[1:]) for x in tokens))
        return o.reshape(tokens[2].shape), s

    given = operands(*SMALL[:-1])
    check(loss_gradient(in_parts)(given), loss_gradient(SMALL_FORM)(given))


def test_forward_mode_is_refused():
    given = operands(*SMALL[:-1])
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp"):
        jax.jit(lambda given: jax.jvp(SMALL_FORM, given, given)).lower(given)


@pytest.mark.slow
def test_a_kernel_has_the_same_backward_pass_and_keeps_its_own_values():
    """Even one that was asked for by name."""
    given, cotangents = point(SMALL)
    by_kernel = functools.partial(ops.delta_chunks, precision="bf16", implementation="interpret")
    values, pull = jax.jit(functools.partial(jax.vjp, by_kernel))(*given)
    assert_same_bits(values, jax.jit(by_kernel)(*given))
    assert "pallas_call" in str(jax.make_jaxpr(functools.partial(jax.vjp, by_kernel))(*given))
    assert 1e-3 < max(errors(jax.jit(pull)(cotangents), truth(given, cotangents))) <= BF16_RMS


@pytest.mark.slow
def test_memory_of_a_long_sequence_is_a_small_part_of_what_autodiff_takes():
    """Per token: autodiff keeps the same however long the sequence, this keeps S once in a span. Measured: 1/15."""

    def per_token(form, tokens):
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(tokens, 1, 2, 4, 32, 16)]
        lowered = gradient_of(form, precision="exact", chunk=64).lower(given, (given[3], given[0]))
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes / tokens

    assert per_token(delta.clean_chunks, 8192) < per_token(by_chunks, 512) / 10
