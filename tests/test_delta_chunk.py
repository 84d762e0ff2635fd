"""The chunked delta rule against its serial form: in float64, bit by bit where documents meet, and in its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import delta, ops
from gdn_jax.errors import UnsupportedError
from gdn_jax.evidence import oracle
from gdn_jax.evidence.metrics import rms_rel
from tests.support import tolerances
from tests.support.cases import assert_same_bits


@functools.partial(jax.jit, static_argnames=("chunk", "precision"))
def chunked(*arrays, chunk=delta.CHUNK, **documents):
    return delta.delta_chunk(*arrays, form=functools.partial(delta.clean_chunks, chunk=chunk), **documents)


NAMES = ("s", "q", "k", "v", "beta", "g")
RESET = -np.inf


def operands(T, B=2, G=2, H=6, K=12, V=20, *, kind="mixed", seed=0):
    """S, q, k, v, beta, g as a layer has them, float32: k of length 1, q of length K^-1/2, decays by `kind`."""
    rng = np.random.default_rng(seed)
    s = rng.standard_normal((B, H, K, V)) / 4
    q, k = rng.standard_normal((2, T, B, G, K))
    if kind == "alike":
        k = k[:1] + 1e-3 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, beta = rng.standard_normal((T, B, H, V)), rng.uniform(0, 1, (T, B, H))
    if kind in ("alike", "full writes"):
        beta = 1 - 1e-3 * beta
    share = rng.exponential(1.0, (T, B, H))
    g = {
        "mixed": -share,
        "weak": -1e-3 * share,
        "strong": -50 * rng.uniform(0, 1, (T, B, H)),
        "even": -27.6 + 0 * share,
        "resets": np.where(share > 3, RESET, np.where(share > 2, -1e38, -share)),
    }.get(kind, 0 * share)
    return [np.asarray(x, np.float32) for x in (s, q * K**-0.5, k, v, beta, g)]


def serial(s, q, k, v, beta, g, lengths=None, segment_ids=None):
    """The oracle token by token: o, zero in the padding, and S after every row's last token."""
    T, B, H, _ = v.shape
    lengths = np.full(B, T) if lengths is None else np.asarray(lengths)
    s, o = s.astype(np.float64), np.zeros(v.shape)
    q, k = (np.repeat(x, H // q.shape[2], axis=2) for x in (q, k))
    for t in range(T):
        live = t < lengths
        if segment_ids is not None and t:
            s[live & (segment_ids[t] != segment_ids[t - 1])] = 0
        s[live], o[t, live] = oracle.delta_step(*(x[live] for x in (s, q[t], k[t], v[t], beta[t], g[t])))
    return o, s


@jax.jit
def serial_float32(s, q, k, v, beta, g, starts):
    """The library's own serial form, in a scan, S zeroed where `starts` [T, B]."""

    def body(s, token):
        start, *token = token
        o, s = delta.delta_step(jnp.where(start[:, None, None, None], 0.0, s), *token)
        return s, o

    s, o = jax.lax.scan(body, s, (starts, q, k, v, beta, g))
    return o, s


def check(got, want, bound):
    """o and S against float64."""
    for array, expected in zip(got, want, strict=True):
        assert array.shape == expected.shape
        assert rms_rel(array, expected) <= bound


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixed", "weak", "none", "full writes", "strong", "even", "resets"])
def test_long_sequences(kind):
    """F4, F5, F6: from no decay to a full reset in the midst of a chunk."""
    arrays = operands(2048, kind=kind)
    check(chunked(*arrays), serial(*arrays), tolerances.CHUNK)


def test_keys_alike_and_full_writes():
    """F7: without decay and with beta near 1, where float32 loses most; the serial form in float32 is 1.5e-6 off."""
    arrays = operands(2048, kind="alike")
    check(chunked(*arrays), serial(*arrays), tolerances.CHUNK_ALIKE)


@pytest.mark.parametrize("kind", ["mixed", "weak", "strong", "resets", "none", "alike"])
def test_products_of_operands_rounded_to_bf16(kind):
    """Decays, the triangular system and S stay float32: the error does not grow with the decay or with resets."""
    arrays = operands(289, B=1, K=64, V=48, kind=kind)
    bound = tolerances.CHUNK_BF16_ALIKE if kind == "alike" else tolerances.CHUNK_BF16
    found, want = chunked(*arrays, precision="bf16"), serial(*arrays)
    check(found, want, bound)
    assert rms_rel(found[0], want[0]) > 1e-3


def test_another_form_sees_clean_operands_and_its_results_are_spoilt_where_they_must_be():
    arrays, seen = operands(7, B=2), {}
    arrays[3][2, 0, 1, 4] = np.nan

    def form(s, *sequences, precision):
        seen["operands"] = (s, *sequences)
        return jnp.ones((7, 2, 6, 20)), 2 * jnp.ones_like(s)

    o, s = delta.delta_chunk(*map(jnp.asarray, arrays), lengths=jnp.array([7, 3], jnp.int32), form=form)
    assert all(np.isfinite(x).all() for x in seen["operands"])
    assert not any(np.any(np.asarray(x)[3:, 1]) for x in seen["operands"][1:])
    assert np.isnan(np.asarray(o)[2:, 0, 1, 4]).all()
    assert np.isnan(np.asarray(s)[0, 1, :, 4]).all()
    assert np.isnan(o).sum() + np.isnan(s).sum() == 5 + 12
    assert not np.any(np.asarray(o)[3:, 1])


def test_a_very_long_sequence():
    arrays = operands(16384, B=1, G=1, H=2, kind="weak")
    check(chunked(*arrays), serial(*arrays), tolerances.CHUNK)


@pytest.mark.parametrize(
    ("chunk", "T", "B", "G", "H", "K", "V"),
    [
        (1, 3, 5, 1, 5, 3, 1),
        (16, 70, 3, 4, 12, 100, 12),
        (100, 250, 1, 3, 3, 60, 20),
        (150, 150, 3, 2, 6, 20, 100),
        (64, 65, 1, 2, 8, 256, 24),
    ],
)
def test_chunk_sizes_and_geometries(chunk, T, B, G, H, K, V):
    """F10, F12, F14, F27: chunks of one token, of all, and such as divide nothing; ratio 1 to 5; K never equal to V."""
    arrays = operands(T, B, G, H, K, V)
    check(chunked(*arrays, chunk=chunk), serial(*arrays), tolerances.CHUNK)


def test_a_step_is_a_chunk_of_one():
    arrays = operands(1)
    s, *token = arrays
    check(chunked(*arrays), [x.reshape(y.shape) for x, y in zip(serial(*arrays), (token[2], s), strict=True)], 2e-7)


TAILS = (1, 2, 3, 31, 33, 63, 65, 289, 500, 1026, 0)


def test_tails_and_poisoned_padding():
    """F14, F15, F18: the state is that after the last token, and what stands in the padding is never used."""
    arrays = operands(1026, B=len(TAILS), H=2)
    padding = np.arange(1026)[:, None] >= np.array(TAILS)
    for array, filth in zip(arrays[1:], (np.nan, np.inf, np.nan, -np.inf, np.nan), strict=True):
        array[padding] = filth
    ids = np.where(padding, np.arange(1026)[:, None], 7).astype(np.int32)
    o, s = chunked(*arrays, lengths=jnp.array(TAILS, jnp.int32), segment_ids=ids)
    want_o, want_s = serial(*arrays, lengths=TAILS)
    assert not np.any(np.asarray(o)[padding])
    for row, length in enumerate(TAILS[:-1]):
        check((o[:length, row], s[row]), (want_o[:length, row], want_s[row]), tolerances.CHUNK)
    assert_same_bits(np.asarray(s)[-1], arrays[0][-1])


def test_no_tokens():
    s, *sequences = operands(1)
    o, after = chunked(s, *(x[:0] for x in sequences))
    assert o.shape == (0, 2, 6, 20)
    assert_same_bits(np.asarray(after), s)


def test_no_rows():
    s, *sequences = operands(3)
    o, after = chunked(s[:0], *(x[:, :0] for x in sequences))
    assert (o.shape, after.shape) == ((3, 0, 6, 20), (0, 6, 12, 20))


@pytest.mark.parametrize(("chunk", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError)])
def test_a_chunk_of_none_is_refused(chunk, error):
    with pytest.raises(error, match=f"chunk must be (at least 1|an integer), got {chunk!r}"):
        delta.clean_chunks(*map(jnp.asarray, operands(1)), chunk=chunk)


@pytest.mark.parametrize("precision", ["bfloat16", "BF16", "fp32", ""])
def test_an_unknown_precision_is_not_taken_for_exact(precision):
    arrays = tuple(map(jnp.asarray, operands(1)))
    with pytest.raises(UnsupportedError, match=f"precision must be one of exact, bf16, got {precision!r}"):
        delta.delta_chunk(*arrays, precision=precision)
    with pytest.raises(UnsupportedError, match=f"precision must be one of exact, q8, bf16, got {precision!r}"):
        ops.delta_chunks(*arrays, precision=precision, implementation=None)


# ---------------------------------------------------------------------------------------------------------------------
# Documents, and what is not finite
# ---------------------------------------------------------------------------------------------------------------------

PACKED = np.repeat(np.array([[4, 0], [4, 9], [7, 3], [4, -1], [5, 5]], np.int32), [37, 1, 2, 40, 50], axis=0)
"""Ids [130, 2]: documents of 38, 2, 40, 50 and of 37, 1, 2, 40, 50 tokens. An id that comes back is a new document."""
STARTS = ((38, 40, 80), (37, 38, 40, 80))
ALL = np.array([130, 130], np.int32)


def packed(arrays, segment_ids=PACKED, lengths=ALL):
    return tuple(np.asarray(x) for x in chunked(*arrays, lengths=lengths, segment_ids=segment_ids))


def test_packed_documents():
    """F17, F19: every document as if it had been alone, from a state of zeros; the first from the given state."""
    arrays = operands(len(PACKED))
    o, s = packed(arrays)
    check((o, s), serial(*arrays, segment_ids=PACKED), tolerances.CHUNK)
    for row, starts in enumerate(STARTS):
        for start, end in zip((0, *starts), (*starts, len(PACKED)), strict=True):
            cut = [arrays[0][row : row + 1] * (start == 0), *(x[start:end, row : row + 1] for x in arrays[1:])]
            want_o, want_s = serial(*cut)
            assert rms_rel(o[start:end, row], want_o[:, 0]) <= tolerances.CHUNK
        assert rms_rel(s[row], want_s[0]) <= tolerances.CHUNK


@pytest.mark.parametrize("value", [0.25, np.nan, np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_document_does_not_reach_the_next(name, value):
    """F19: whatever the first document and its state hold, not a bit of the others changes."""
    arrays = operands(len(PACKED))
    o, s = packed(arrays)
    changed = [x.copy() for x in arrays]
    sign = -1 if name == "g" else 1
    changed[NAMES.index(name)][(slice(None) if name == "s" else slice(37)), ...] = sign * value
    new_o, new_s = packed(changed)
    assert_same_bits((new_o[38:], new_s), (o[38:], s))
    assert np.any(new_o[:37] != o[:37])


@pytest.mark.parametrize("token", [0, 36, 70, 129])
@pytest.mark.parametrize(
    ("name", "value"), [("s", np.nan), ("q", np.inf), ("k", np.nan), ("v", np.inf), ("beta", np.nan), ("g", np.nan)]
)
def test_what_is_not_finite_reaches_what_it_reaches_serially(name, value, token):
    """F11: neither another row, nor an earlier token, nor another document, nor, from v and S, another value column."""
    arrays = operands(len(PACKED))
    clean = packed(arrays)
    at = {"s": (1, 3, 5, 7), "q": (token, 1, 1, 4), "k": (token, 1, 1, 4), "v": (token, 1, 3, 7)}
    arrays[NAMES.index(name)][at.get(name, (token, 1, 3))] = value
    starts = np.zeros(PACKED.shape, bool)
    starts[1:] = PACKED[1:] != PACKED[:-1]
    reached = [~np.isfinite(x) for x in serial_float32(*arrays, starts)]
    assert reached[0].any()
    for got, was, spoilt in zip(packed(arrays), clean, reached, strict=True):
        np.testing.assert_array_equal(np.isnan(got), spoilt)
        assert_same_bits(np.where(spoilt, 0, got), np.where(spoilt, 0, was))


def test_a_full_reset_forgets_all():
    """F4: after g = -inf at token 50, other tokens before it change no bit; nor does another state."""
    arrays = operands(len(PACKED))
    arrays[5][50] = RESET
    other = operands(len(PACKED), seed=1)
    mixed = [other[0], *(np.concatenate([b[:50], a[50:]]) for a, b in zip(arrays[1:], other[1:], strict=True))]
    mixed[5][50] = RESET
    (o, s), (new_o, new_s) = (packed(x, 0 * PACKED) for x in (arrays, mixed))
    assert_same_bits((new_o[50:], new_s), (o[50:], s))


@pytest.mark.parametrize("first", [0, 1, 64, 65, 129, 130])
def test_a_sequence_in_two_parts(first):
    """F16."""
    arrays, ids = operands(130), 0 * PACKED
    o, s = packed(arrays, ids, 0 * ALL + first)
    rest, s = packed([s, *(np.roll(x, -first, axis=0) for x in arrays[1:])], ids, ALL - first)
    check((np.concatenate([o[:first], rest[: 130 - first]]), s), serial(*arrays), tolerances.CHUNK)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------

TOKENS = 21
LENGTHS = np.array([TOKENS, 13], np.int32)
IDS = np.repeat(np.array([[0, 0], [1, 0], [1, 2]], np.int32), 7, axis=0)


def cotangents():
    rng = np.random.default_rng(5)
    return [np.asarray(rng.standard_normal(shape), np.float32) for shape in ((TOKENS, 2, 6, 20), (2, 6, 12, 20))]


def weighted(o, s):
    """A scalar that every element of o and S enters with a weight of its own."""
    return sum((weight * x).sum() for weight, x in zip(cotangents(), (o, s), strict=True))


@jax.jit
@jax.grad
def gradient(arrays, lengths, segment_ids):
    """In three chunks."""
    return weighted(*chunked(*arrays, chunk=8, lengths=lengths, segment_ids=segment_ids))


@jax.jit
@jax.grad
def serial_gradient(arrays, starts):
    return weighted(*serial_float32(*arrays, starts))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_slope_of_the_oracle(name):
    """F57: along three random directions per operand; ragged and packed."""
    point = operands(TOKENS)
    found = np.asarray(gradient(point, LENGTHS, IDS)[NAMES.index(name)], np.float64)
    rng, step = np.random.default_rng(0), 1e-5
    for _ in range(3):
        direction = rng.standard_normal(found.shape) / np.sqrt(found.size)
        sums = []
        for offset in (step, -step):
            moved = [np.asarray(x, np.float64) for x in point]
            moved[NAMES.index(name)] += offset * direction
            sums.append(weighted(*serial(*moved, lengths=LENGTHS, segment_ids=IDS)))
        want = (sums[0] - sums[1]) / (2 * step)
        assert abs(np.sum(found * direction) - want) <= tolerances.GRADIENT * np.linalg.norm(found)


@pytest.mark.parametrize("kind", ["resets", "strong", "alike"])
def test_gradient_is_that_of_the_serial_form(kind):
    """F4, F57: also through full resets, where a masked exponential could make it NaN."""
    point = operands(TOKENS, kind=kind)
    chunked_form = gradient(point, 0 * LENGTHS + TOKENS, 0 * IDS)
    serial_form = serial_gradient(point, np.zeros(IDS.shape, bool))
    for name, got, want in zip(NAMES, chunked_form, serial_form, strict=True):
        assert np.isfinite(got).all(), name
        assert rms_rel(got, want) <= tolerances.CHUNK_GRADIENT, name


def test_padding_has_no_gradient():
    """F15: zero even where it is NaN, and what is not padding keeps its bits."""
    point = operands(TOKENS)
    dirty = [x.copy() for x in point]
    for array in dirty[1:]:
        array[13:, 1] = np.nan
    clean, found = gradient(point, LENGTHS, IDS), gradient(dirty, LENGTHS, IDS)
    assert_same_bits(found, clean)
    assert not any(np.any(x[13:, 1]) for x in found[1:])
