"""The tensor core form of the chunked gated delta rule: emulated, lowered, compiled and on a card.

Interpret mode has no rule for products of arrays in registers. The emulation computes the products as arrays; copies,
barriers, what warpgroups hand over and all that is between the products are interpreted, races looked for.
"""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_chunk import mosaic, mosaic_exact, mosaic_parts
from pallas_kernels.delta_chunk.mosaic import MosaicTile, launch_mosaic, mosaic_unsupported
from tests.support.deviceless import compile_for_h200

PRECISIONS = ("exact", "bf16")
RMS = {"exact": 1e-6, "bf16": 5e-3}
"""RMS error of o and of S, relative to their RMS. Measured with the emulation: 2.4e-7 and 2.2e-7 at "exact", 3.8e-3 and
3.3e-3 at "bf16"."""
ALIKE_RMS = {"exact": 2e-6, "bf16": 2e-2}
"""The same where each token replaces the value of the one before, so that sums of writes cancel but for the last, and
their roundings do not: 7.8e-7 and 7.9e-7 measured over 1024 tokens at "exact", 1.4e-2 and 6e-3 over 130 at "bf16"."""
DTYPES = {"exact": jnp.float32, "bf16": jnp.bfloat16}
"""Of q, k and v."""

SHAPES = [  # T, B, G, H, K, V
    (1, 1, 1, 1, 64, 64),
    (63, 2, 1, 2, 64, 128),
    (65, 1, 2, 2, 128, 64),
    (289, 1, 1, 1, 64, 64),
]
CARD_SHAPES = [(64, 1, 16, 48, 128, 128), (512, 3, 16, 32, 128, 128), (4096, 1, 16, 48, 128, 128)]
CARD_SHAPES += [(500, 2, 3, 9, 128, 192)]


def operands(precision, tokens, batch, key_heads, value_heads, key_dim, value_dim):
    """Of the sizes and the kind that a layer makes, from a state that is not zero."""
    rng = np.random.default_rng(0)

    def unit():
        x = rng.standard_normal((tokens, batch, key_heads, key_dim))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k, v = unit() / key_dim**0.5, unit(), rng.standard_normal((tokens, batch, value_heads, value_dim))
    q, k, v = (jnp.asarray(x, DTYPES[precision]) for x in (q, k, v))
    beta = jax.nn.sigmoid(jnp.asarray(rng.standard_normal((tokens, batch, value_heads)), jnp.float32))
    g = -jax.nn.softplus(jnp.asarray(rng.standard_normal((tokens, batch, value_heads)), jnp.float32)) / 8
    s = jnp.asarray(rng.standard_normal((batch, value_heads, key_dim, value_dim)) / 4, jnp.float32)
    return {"s": s, "q": q, "k": k, "v": v, "beta": beta, "g": g}


def serial(s, q, k, v, beta, g):
    """The serial rule in float64."""
    s, q, k, v, beta, g = (np.asarray(x.astype(jnp.float32), np.float64) for x in (s, q, k, v, beta, g))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    outputs = []
    for t in range(len(v)):
        s = s * np.exp(g[t])[..., None, None]
        u = beta[t][..., None] * (v[t] - np.einsum("bhkv,bhk->bhv", s, k[t]))
        s = s + k[t][..., None] * u[..., None, :]
        outputs.append(np.einsum("bhkv,bhk->bhv", s, q[t]))
    return np.stack(outputs), s


def assert_close(found, wanted, bound):
    for array, reference in zip(found, wanted, strict=True):
        array = np.asarray(array.astype(jnp.float32), np.float64)
        assert array.shape == reference.shape
        error = np.sqrt(np.mean((array - reference) ** 2) / np.mean(reference**2))
        assert error < bound, error


class EmulatedProduct:
    """`Product` of arrays, or of the arrays that shared memory holds."""

    @staticmethod
    def of(a, b):
        a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
        plgpu.commit_smem()  # what tensor cores read needs no commit before it may be overwritten
        return jnp.dot(a, b, preferred_element_type=jnp.float32)

    @staticmethod
    def of_pieces(a, b, meanwhile=lambda: None):
        meanwhile()
        return sum(EmulatedProduct.of(*pair) for pair in mosaic_parts.terms(a, b))

    @staticmethod
    def overlapped(first, second, between):
        return between(EmulatedProduct.of_pieces(*first)), EmulatedProduct.of_pieces(*second())

    @staticmethod
    def added(start, a, b, meanwhile=lambda: None):
        meanwhile()
        return start + EmulatedProduct.of(a, b)

    @staticmethod
    def chained(first, beside, last, meanwhile):
        meanwhile()
        return EmulatedProduct.of(*beside) + EmulatedProduct.of(*last(EmulatedProduct.of(*first)))


@functools.cache
def compiled(emulated, precision, stages):
    """Not through the kernel's own jit: its cache would hand emulated programs to others, and the reverse."""
    launch = functools.partial(inspect.unwrap(launch_mosaic), precision=precision, tile=MosaicTile(stages))
    return jax.jit(launch, compiler_options={"xla_backend_optimization_level": 0} if emulated else None)


@pytest.fixture(params=PRECISIONS)
def precision(request):
    return request.param


@pytest.fixture(params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def run(request, monkeypatch, capfd):
    """The launch, emulated or on the card; `stages` of its tile may be given."""
    emulated = request.param == "emulated"
    if emulated:
        for module in (mosaic, mosaic_exact, mosaic_parts):
            monkeypatch.setattr(module, "Product", EmulatedProduct)

    def run(precision, stages=2, **arrays):
        interpreted = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))
        with interpreted if emulated else contextlib.nullcontext():
            o, s = jax.block_until_ready(compiled(emulated, precision, stages)(**arrays))
        assert "RACE" not in capfd.readouterr().out
        return o, s

    return run


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(run, precision, shape):
    arrays = operands(precision, *shape)
    assert_close(run(precision, **arrays), serial(**arrays), RMS[precision])


SMALL = (130, 1, 1, 2, 64, 64)


@pytest.mark.parametrize("reset", [-np.inf, -1e38])
def test_resets(run, precision, reset):
    """In one head of two: at the border of chunks, inside one, and one after the other."""
    arrays = operands(precision, *SMALL)
    arrays["g"] = arrays["g"].at[jnp.array([5, 63, 64, 100, 101]), :, 0].set(reset)
    assert_close(run(precision, **arrays), serial(**arrays), RMS[precision])


def test_strong_decay_at_every_token(run, precision):
    """Its product over a chunk is far below what float32 can hold."""
    arrays = operands(precision, *SMALL)
    arrays["g"] = jnp.full_like(arrays["g"], -27.6)
    assert_close(run(precision, **arrays), serial(**arrays), RMS[precision])


@pytest.mark.parametrize("apart", [0.0, 1e-3])
def test_keys_alike_and_full_writes(run, precision, apart):
    arrays = operands(precision, *SMALL)
    k = arrays["k"].astype(jnp.float32)
    k = k[:1] + apart * k
    arrays["k"] = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(arrays["k"].dtype)
    arrays |= {"beta": jnp.full_like(arrays["beta"], 0.999), "g": jnp.zeros_like(arrays["g"])}
    assert_close(run(precision, **arrays), serial(**arrays), ALIKE_RMS[precision])


def test_nothing_written_and_nothing_decayed_leaves_the_state_bit_for_bit(run, precision):
    arrays = operands(precision, *SMALL)
    arrays |= {"beta": jnp.zeros_like(arrays["beta"]), "g": jnp.zeros_like(arrays["g"])}
    _, s = run(precision, **arrays)
    np.testing.assert_array_equal(s, arrays["s"])


def test_exact_a_full_reset_forgets_all(run):
    """Not a bit changes from it on, however large what the tokens before it in its chunk write."""
    arrays = operands("exact", *SMALL)
    arrays["g"] = arrays["g"].at[83].set(-np.inf)
    o, s = run("exact", **arrays)
    arrays |= {"s": 1e6 * arrays["s"], "v": arrays["v"].at[:83].multiply(1e6)}
    new_o, new_s = run("exact", **arrays)
    np.testing.assert_array_equal(new_o[83:], o[83:])
    np.testing.assert_array_equal(new_s, s)
    assert np.all(new_o[:83] != o[:83])


def test_exact_keys_ahead_change_no_bit(run):
    arrays = operands("exact", *SMALL)
    for one, two in zip(run("exact", stages=1, **arrays), run("exact", **arrays), strict=True):
        np.testing.assert_array_equal(one, two)


def test_bf16_float32_operands_are_rounded_and_o_is_float32(run):
    arrays = operands("bf16", *SMALL)
    o, s = run("bf16", **arrays)
    wide, wide_s = run("bf16", **{name: x.astype(jnp.float32) for name, x in arrays.items()}, stages=3)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), o)
    np.testing.assert_array_equal(wide_s, s)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARD_SHAPES, ids=str)
def test_large_shapes_have_the_same_bits_at_every_run(precision, shape):
    arrays = operands(precision, *shape)
    results = [launch_mosaic(**arrays, precision=precision, tile=MosaicTile(stages)) for stages in (1, 2, 2)]
    assert_close(results[0], serial(**arrays), RMS[precision])
    for again in results[1:]:
        for a, b in zip(results[0], again, strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_it_does_not_take():
    takes = functools.partial(mosaic_unsupported, 1, 512, 16, 48)
    assert takes(128, 128, "bf16") is None
    assert takes(64, 192, "bf16") is None
    assert takes(128, 128, "exact") is None
    for key_dim, value_dim in ((100, 128), (256, 128), (128, 96), (128, 0)):
        assert f"K = {key_dim}, V = {value_dim}" in str(takes(key_dim, value_dim, "bf16"))


@pytest.mark.parametrize("stages", [0, 4])
def test_a_tile_that_is_not_one(stages):
    with pytest.raises(ValueError, match="stages must be 1, 2 or 3"):
        jax.eval_shape(functools.partial(launch_mosaic, precision="exact", tile=MosaicTile(stages)), **shapes(*SMALL))


def shapes(*sizes, dtype=jnp.bfloat16):
    """The operands, as shapes."""
    tokens, batch, key_heads, value_heads, key_dim, value_dim = sizes
    shape = jax.ShapeDtypeStruct
    keys = shape((tokens, batch, key_heads, key_dim), dtype)
    gates = shape((tokens, batch, value_heads), jnp.float32)
    values = shape((tokens, batch, value_heads, value_dim), dtype)
    s = shape((batch, value_heads, key_dim, value_dim), jnp.float32)
    return {"s": s, "q": keys, "k": keys, "v": values, "beta": gates, "g": gates}


def test_lowers_for_cuda_without_a_gpu(precision):
    launch = functools.partial(inspect.unwrap(launch_mosaic), precision=precision, tile=MosaicTile())
    traced = jax.jit(launch).trace(**shapes(*CARD_SHAPES[0], dtype=DTYPES[precision]))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") > 0


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("precision", "sizes", "stages", "dtype"),
    [
        ("bf16", (4096, 1, 16, 48, 128, 128), 2, jnp.bfloat16),
        ("bf16", (4096, 1, 16, 48, 128, 128), 3, jnp.float32),
        ("bf16", (500, 3, 2, 2, 64, 192), 1, jnp.bfloat16),
        ("exact", (4096, 1, 16, 48, 128, 128), 2, jnp.float32),
        ("exact", (500, 3, 2, 2, 64, 192), 1, jnp.bfloat16),
    ],
)
def test_compiled_all_kernels_keep_to_registers(precision, sizes, stages, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_for_h200(launch_mosaic, **shapes(*sizes, dtype=dtype), precision=precision, tile=MosaicTile(stages))
    logs = [log.read_text() for log in tmp_path.glob("*.ptxas")]
    assert len(logs) == {"exact": 3, "bf16": 2}[precision]
    for log in logs:
        assert "0 bytes spill stores, 0 bytes spill loads" in log
        assert "serialized" not in log  # what ptxas says of matrix instructions that it must wait for one by one
    for ptx in tmp_path.glob("*.ptx"):
        assert not any(constant_left_operands(ptx.read_text()).values())


def constant_left_operands(ptx):
    """Registers of left operands of matrix instructions that hold one constant alone, by name, and the constant.

    Of one that is not 0 and that two groups of instructions read, ptxas 13.0 sets a copy after the first has read it.
    """
    written = {}
    for name, value in re.findall(r"^\s+[\w.:]+\s+\{?(%r\d+)[^,;]*, ([^;]+);", ptx, re.MULTILINE):
        written.setdefault(name, []).append(value)

    def constant(name):
        values = written.get(name, [])
        if len(values) != 1:
            return None
        return int(values[0]) if values[0].isdecimal() else constant(values[0])

    left = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, \{([^}]*)\}", ptx)
    found = {name: constant(name) for names in left for name in names.split(",")}
    return {name: value for name, value in found.items() if value is not None}
