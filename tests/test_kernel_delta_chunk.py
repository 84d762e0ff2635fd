"""The Triton form of the chunked gated delta rule, and the host function: interpreted, compiled, and on a card."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import delta
from gdn_jax.evidence import oracle
from gdn_jax.evidence.metrics import rms_rel
from pallas_kernels.delta_chunk import MosaicTile, TritonTile, choose_backend, delta_chunk, supported
from tests.support.cases import assert_same_bits
from tests.support.deviceless import compile_for_h200

PRECISIONS = ("exact", "bf16")
EXACT_RMS = 2e-6
"""RMS error of o and of S relative to their RMS, whatever the keys: 1.1e-6 measured where all are alike."""
ROUNDING_RMS = 3.4e-7
"""For short sequences, where the plain form's own error may be an accident of few roundings: 2.3e-7 measured."""
BF16_RMS = 5e-3
"""4.4e-3 measured, where nothing decays."""
BF16_ALIKE_RMS = 3.8e-2
"""Where sums of writes cancel but for the last, and their roundings do not: 2.5e-2 measured, for o."""

NAMES = ("s", "q", "k", "v", "beta", "g")
SMALL = (130, 3, 2, 6, 12, 20)
# T, B, G, H, K, V: one to three chunks, the last one full or not; ratio 1 to 4; powers of two and others.
SIZES = [
    (1, 1, 1, 1, 16, 32),
    (3, 3, 2, 6, 100, 20),
    (31, 1, 3, 3, 60, 1),
    (63, 2, 1, 4, 64, 100),
    (64, 1, 2, 6, 128, 32),
    (65, 3, 2, 4, 20, 128),
    SMALL,
    (289, 2, 2, 6, 128, 64),
]


def operands(T, B, G, H, K, V, *, kind="mixed", seed=0):
    """S, q, k, v, beta, g as a layer has them, float32: k of length 1, q of length K^-1/2, decays by `kind`."""
    rng = np.random.default_rng(seed)
    s = rng.standard_normal((B, H, K, V)) / 4
    q, k = rng.standard_normal((2, T, B, G, K))
    if kind == "alike":
        k = k[:1] + 1e-3 * k
    if kind == "the same":
        k = k[:1] + 0 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, beta = rng.standard_normal((T, B, H, V)), rng.uniform(0, 1, (T, B, H))
    if kind in ("alike", "the same"):
        beta = 0.999 + 0 * beta
    share = rng.exponential(1.0, (T, B, H))
    g = {
        "mixed": -share,
        "weak": -1e-3 * share,
        "strong": -50 * rng.uniform(0, 1, (T, B, H)),
        "even": -27.6 + 0 * share,
        "resets": np.where(share > 3, -np.inf, np.where(share > 2, -1e38, -share)),
    }.get(kind, 0 * share)
    return [jnp.asarray(x, jnp.float32) for x in (s, q * K**-0.5, k, v, beta, g)]


@functools.cache
def exact_answer(sizes, kind="mixed"):
    """o and S of `operands` by the oracle, token by token."""
    return serial(*operands(*sizes, kind=kind))


def serial(s, q, k, v, beta, g):
    s, outputs = np.asarray(s, np.float64), []
    q, k = (np.repeat(np.asarray(x), v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    for token in zip(q, k, np.asarray(v), np.asarray(beta), np.asarray(g), strict=True):
        s, o = oracle.delta_step(s, *token)
        outputs.append(o)
    return np.stack(outputs), s


STATIC = ("precision", "backend", "tile", "interpret")
jitted = jax.jit(delta_chunk, static_argnames=STATIC)
# What runs once need not be compiled well.
QUICKLY = {"xla_backend_optimization_level": 0}
interpreted = jax.jit(delta_chunk, static_argnames=STATIC, compiler_options=QUICKLY)
plain = jax.jit(delta.delta_chunk, compiler_options=QUICKLY if jax.default_backend() == "cpu" else None)


@pytest.fixture(params=[pytest.param(True, id="interpreted"), pytest.param(False, id="card", marks=pytest.mark.gpu)])
def interpret(request):
    return request.param


@pytest.fixture
def run(interpret):
    """The Triton form, interpreted or compiled; results as numpy arrays."""

    def run(*arrays, precision="exact", tile=None):
        program = interpreted if interpret else jitted
        return jax.device_get(program(*arrays, precision=precision, backend="triton", tile=tile, interpret=interpret))

    return run


def check(got, want, bound):
    for array, exact in zip(got, want, strict=True):
        assert array.shape == exact.shape
        assert rms_rel(array, exact) <= bound


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_exact_is_as_good_as_the_plain_form(run, sizes):
    """F10, F12, F14, F27."""
    arrays = operands(*sizes)
    for got, xla, want in zip(run(*arrays), plain(*arrays), exact_answer(sizes), strict=True):
        assert got.dtype == np.float32
        check([got], [want], max(2 * rms_rel(xla, want), ROUNDING_RMS))


@pytest.mark.parametrize("sizes", SIZES[1::2], ids=str)
def test_bf16_is_within_its_bound(run, sizes):
    check(run(*operands(*sizes), precision="bf16"), exact_answer(sizes), BF16_RMS)


KINDS = (130, 2, 1, 3, 64, 32)


@pytest.mark.parametrize("kind", ["weak", "none", "strong", "even", "resets"])
def test_decays(run, kind):
    """F4, F5, F6: from none to a full reset in the midst of a chunk."""
    arrays = operands(*KINDS, kind=kind)
    for precision, bound in zip(PRECISIONS, (EXACT_RMS / 4, BF16_RMS), strict=True):
        check(run(*arrays, precision=precision), exact_answer(KINDS, kind), bound)


@pytest.mark.parametrize("kind", ["the same", "alike"])
def test_keys_alike_and_full_writes(run, kind):
    """F7, F8: each write takes back the one before."""
    arrays = operands(*KINDS, kind=kind)
    for precision, bound in zip(PRECISIONS, (EXACT_RMS, BF16_ALIKE_RMS), strict=True):
        check(run(*arrays, precision=precision), exact_answer(KINDS, kind), bound)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "kind"), [(2048, "alike"), (2048, "none"), (16384, "weak")])
def test_long_sequences(run, T, kind):
    sizes = (T, 1, 1, 2, 12, 20)
    check(run(*operands(*sizes, kind=kind)), exact_answer(sizes, kind), EXACT_RMS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_writes_and_no_decay_leave_the_state_bit_for_bit(run, precision):
    """F9."""
    s, q, k, v, beta, g = operands(*SMALL)
    assert_same_bits(run(s, q, k, v, 0 * beta, 0 * g, precision=precision)[1], s)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_from_a_state_of_zeros(run, precision):
    """F20: the same bits as after a full reset of any other."""
    s, q, k, v, beta, g = operands(*SMALL)
    g = g.at[0].set(-np.inf)
    assert_same_bits(run(0 * s, q, k, v, beta, g, precision=precision), run(s, q, k, v, beta, g, precision=precision))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reset", [-np.inf, -1e38])
@pytest.mark.parametrize("factor", [0.25, 3.0, 1e6])
def test_a_full_reset_forgets_all(run, precision, reset, factor):
    """F4, F19: whatever the tokens before it in its chunk hold, and however large, not a bit changes from it on."""
    arrays = operands(*SMALL)
    arrays[5] = arrays[5].at[83].set(reset)
    o, s = run(*arrays, precision=precision)
    changed = [x if n in "kq" else factor * x for n, x in zip(NAMES[:4], arrays[:4], strict=True)]
    changed[3] = jnp.concatenate([changed[3][:83], arrays[3][83:]])
    new_o, new_s = run(*changed, *arrays[4:], precision=precision)
    assert_same_bits(tuple(np.float32(x) for x in (new_o[83:], new_s)), tuple(np.float32(x) for x in (o[83:], s)))
    assert np.any(new_o[:83] != o[:83])


def test_columns_and_rows_of_any_size_keep_their_digits(run):
    """At "exact": value columns, keys and queries from 2^-30 to 2^30, each judged by its own size."""
    s, q, k, v, beta, g = operands(*KINDS)
    columns = np.exp2(np.linspace(-30, 30, v.shape[-1], dtype=np.float32).round())
    queries = np.exp2(np.arange(q.shape[0], dtype=np.float32) % 61 - 30)[:, None, None, None]
    o, after = run(s * columns[None, None, None], q * queries, k, v * columns[None, None, None], beta, g)
    check((o / queries / columns, after / columns), exact_answer(KINDS), EXACT_RMS / 4)


def test_a_sequence_in_two_parts(run):
    """F16, the second from within a chunk of the whole."""
    s, *sequence = operands(*SMALL)
    o, between = run(s, *(x[:65] for x in sequence))
    rest, after = run(between, *(x[65:] for x in sequence))
    check((np.concatenate([o, rest]), after), exact_answer(SMALL), EXACT_RMS / 4)


def test_padding_neither_writes_nor_decays(run):
    """F15, F18: a chunk that ends, filled up with tokens of zeros, and another one of them."""
    s, *sequence = operands(*SMALL)
    padded = [jnp.pad(x, [(0, 126)] + [(0, 0)] * (x.ndim - 1)) for x in sequence]
    o, after = run(s, *padded)
    check((o[:130], after), exact_answer(SMALL), EXACT_RMS / 4)
    assert not np.any(o[130:])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_do_not_depend_on_one_another(run, precision):
    """F11, F58, F30: the other rows keep their bits, also beside NaN; the same again gives the same bits."""
    arrays = operands(*SMALL)
    good = run(*arrays, precision=precision)
    assert_same_bits(run(*arrays, precision=precision), good)
    for name, value in zip(NAMES, (3.0, np.nan, np.nan, np.nan, np.nan, np.nan), strict=True):
        n = NAMES.index(name)
        spoilt = arrays[n].at[1].set(value) if name == "s" else arrays[n].at[:, 1].set(value)
        o, s = run(*arrays[:n], spoilt, *arrays[n + 1 :], precision=precision)
        assert_same_bits((o[:, ::2], s[::2]), (good[0][:, ::2], good[1][::2]))
        assert np.any(o[:, 1] != good[0][:, 1])


def test_bfloat16_operands_are_their_float32_values(run):
    """At "bf16" o comes in v's dtype, and nothing else depends on it."""
    s, q, k, v, beta, g = operands(*SMALL)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    for precision, dtype in zip(PRECISIONS, (jnp.float32, jnp.bfloat16), strict=True):
        o, after = run(s, q, k, v, beta, g, precision=precision)
        wide_o, wide_after = run(s, *wide, beta, g, precision=precision)
        assert o.dtype == dtype
        assert wide_o.dtype == jnp.float32
        assert_same_bits((o.astype(np.float32), after), (wide_o.astype(dtype).astype(np.float32), wide_after))


@pytest.mark.slow
def test_tiles_do_not_change_the_result_beyond_rounding(run):
    """One block of columns, several, and a ragged last one; read ahead or not."""
    arrays = operands(*KINDS[:5], 100)
    want = serial(*arrays)
    for tile in (TritonTile(16, 4, 1), TritonTile(128, 8, 2)):
        check(run(*arrays, tile=tile), want, EXACT_RMS / 4)


# -- refusals -------------------------------------------------------------------------------------------------------


def shapes(T=130, B=3, G=2, H=6, K=12, V=20, dtype=jnp.float32):
    struct = jax.ShapeDtypeStruct
    gates = struct((T, B, H), jnp.float32)
    return {
        "s": struct((B, H, K, V), jnp.float32),
        "q": struct((T, B, G, K), dtype),
        "k": struct((T, B, G, K), dtype),
        "v": struct((T, B, H, V), dtype),
        "beta": gates,
        "g": gates,
    }


def trace(precision="exact", backend="triton", tile=None, interpret=True, **changed):
    call = functools.partial(delta_chunk, precision=precision, backend=backend, tile=tile, interpret=interpret)
    return jax.eval_shape(call, **(shapes() | changed))


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": struct(130, 2, 12)}, r"q must have the axes \[T, B, G, K\], got shape \[130, 2, 12\]"),
        ({"v": struct(130, 6, 20)}, r"v must have the axes \[T, B, H, V\], got shape \[130, 6, 20\]"),
        ({"q": struct(130, 3, 4, 12)}, "value heads must be a multiple of key heads, got H = 6 and G = 4"),
        ({"q": struct(130, 3, 0, 12)}, "multiple of key heads, got H = 6 and G = 0"),
        ({"k": struct(130, 3, 2, 16)}, r"k must have shape \[130, 3, 2, 12\] .*got \[130, 3, 2, 16\]"),
        ({"v": struct(131, 3, 6, 20)}, r"v must have shape \[130, 3, 6, 20\]"),
        ({"s": struct(3, 6, 20, 12)}, r"s must have shape \[3, 6, 12, 20\] .*got \[3, 6, 20, 12\]"),
        ({"beta": struct(130, 3, 2)}, r"beta must have shape \[130, 3, 6\]"),
        ({"g": struct(130, 6)}, r"g must have shape \[130, 3, 6\]"),
        ({"tile": TritonTile(24, 4, 1)}, "block_v of a tile must be a power of two from 16 to 128, got 24"),
        ({"tile": TritonTile(8, 4, 1)}, "block_v of a tile must be a power of two from 16 to 128, got 8"),
        ({"tile": TritonTile(32, 0, 1)}, "warps of a tile must be a power of two from 1 to 16, got 0"),
        ({"tile": TritonTile(32, 4, 0)}, "stages of a tile must be from 1 to 8, got 0"),
        ({"tile": MosaicTile()}, "backend 'triton' takes a TritonTile, got MosaicTile"),
    ],
)
def test_what_does_not_fit_together(changed, message):
    with pytest.raises(ValueError, match=message):
        trace(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": struct(130, 3, 2, 12, dtype=jnp.float16)}, "q must be float32 or bfloat16, got float16"),
        ({"k": struct(130, 3, 2, 12, dtype=jnp.bfloat16)}, "k must be float32, got bfloat16"),
        ({"v": struct(130, 3, 6, 20, dtype=jnp.bfloat16)}, "v must be float32, got bfloat16"),
        ({"s": struct(3, 6, 12, 20, dtype=jnp.bfloat16)}, "s must be float32, got bfloat16"),
        ({"g": struct(130, 3, 6, dtype=jnp.bfloat16)}, "g must be float32, got bfloat16"),
        ({"precision": "q8"}, "the precision must be exact or bf16, got 'q8'"),
        ({"backend": "cuda"}, "the backend must be triton or mosaic, got 'cuda'"),
        ({"backend": "mosaic", "precision": "bf16"}, "cannot be interpreted"),
        (shapes(K=129), "K and V must be at most 128, got K = 129, V = 20; use the XLA implementation"),
        (shapes(V=256), "K and V must be at most 128, got K = 12, V = 256"),
        (shapes(T=0), "B, T, G, H, K and V must be at least 1, got 3, 0, 2, 6, 12, 20"),
        (shapes(B=2**16), "B and H must be at most 65535"),
    ],
)
def test_what_it_does_not_take(changed, message):
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        trace(**changed)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU is told")
def test_compiled_it_needs_a_gpu():
    for backend, precision in ((None, "exact"), ("triton", "bf16"), ("mosaic", "bf16")):
        sizes = dict(zip("TBGHKV", (64, 1, 1, 1, 64, 64), strict=True))
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            trace(precision=precision, backend=backend, interpret=False, **shapes(**sizes))


def test_without_a_gpu_the_form_that_can_be_interpreted_is_chosen():
    sizes = (1, 64, 1, 1, 64, 64)
    assert supported(*sizes, "bf16", interpret=True) is None
    assert choose_backend(*sizes, "bf16", interpret=True) == "triton"


# -- compiled without a GPU -----------------------------------------------------------------------------------------

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
BIG = {"T": 4096, "B": 1, "G": 16, "H": 48, "K": 128, "V": 128}


def compiled(precision, tile=None, backend="triton", **sizes):
    call = functools.partial(delta_chunk, precision=precision, backend=backend, tile=tile)
    return compile_for_h200(jax.jit(call, compiler_options=NO_SPILLS), **shapes(**sizes))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("precision", "dtype"), [("exact", jnp.float32), ("bf16", jnp.float32), ("bf16", jnp.bfloat16)]
)
def test_the_27b_geometry_is_three_launches_without_spills(precision, dtype):
    program = compiled(precision, **BIG, dtype=dtype)
    assert re.findall(r" (fusion|copy|copy-start|custom-call)\(", program.as_text()) == ["custom-call"] * 3
    # Beside operands and results: 5 or 2 pieces of a key head's vectors, products of 2 matrices a key head, and 6 or 2
    # pieces of matrices a value head; a few percent more for decays and scales.
    pieces = (5, 6) if precision == "exact" else (2, 2)
    floats = 4096 * (16 * 128 * pieces[0] // 2 + 2 * 16 * 64 + 48 * 64 * pieces[1] // 2)
    assert program.memory_analysis().temp_size_in_bytes <= 1.03 * 4 * floats


@pytest.mark.deviceless
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("T", "K", "V"), [(500, 100, 60), (65, 128, 20), (64, 12, 128)])
def test_every_head_size_compiles_without_spills(precision, T, K, V):
    compiled(precision, T=T, K=K, V=V)


@pytest.mark.deviceless
def test_the_check_for_spills_finds_some():
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compiled("exact", TritonTile(128, 4, 1), **BIG)


@pytest.mark.deviceless
def test_on_hopper_tensor_cores_are_programmed_directly_where_that_is_possible():
    for precision, (key_dim, form) in itertools.product(PRECISIONS, ((128, "mosaic"), (100, "triton"))):
        text = compiled(precision, backend=None, **BIG | {"K": key_dim}).as_text()
        targets = "".join(re.findall(r'custom_call_target="([^"]+)"', text))
        assert set(re.findall("triton|mosaic", targets)) == {form}
