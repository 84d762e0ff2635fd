"""The 4-bit formats: every conversion is exact to the last bit, and what is not the format is refused."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import q4_blocks
from checkpoints.errors import CheckpointError
from gdn_jax.q4 import Q4Tensor, dequantize

SHAPES = [(1, 32), (3, 64), (4, 32), (33, 64), (48, 5120), (3, 17408)]
SMALLEST, LARGEST = float(np.finfo(np.float16).smallest_subnormal), float(np.finfo(np.float16).max)
SCALES = np.array([0.0, SMALLEST, 37 * SMALLEST, 0.0123, 1.0, LARGEST], np.float16)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def random_logical(shape, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, shape).astype(np.int8)
    patterns = rng.integers(0, 1 << 16, (*shape[:-1], shape[-1] // 32)).astype(np.uint16)
    scales = (patterns & 0xFBFF).view(np.float16)  # one exponent bit cleared: never infinite or NaN
    return codes, scales


def assert_same_bits(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def value(codes, scales):
    """The float32 weights of the logical form, spelled out."""
    return codes.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=-1)


def test_worked_byte():
    codes = np.zeros((1, 32), np.int8)
    codes[0, 3], codes[0, 19] = -2, 5
    scales = np.array([[-0.5]], np.float16)
    words = q4_blocks.pack_words(codes)
    np.testing.assert_array_equal(words, np.array([[0x5E000000, 0, 0, 0]], np.uint32))
    block = q4_blocks.pack_q4_0(codes, scales)
    assert block.tobytes() == bytes([0x00, 0xB8, *[0x88] * 3, 0xD6, *[0x88] * 12])
    tile = q4_blocks.pack_tiles(codes, scales)
    assert tile.tobytes() == bytes([0x00, 0xB8, *[0] * 6, *[0] * 3, 0x5E, *[0] * 60])


def test_every_nibble_pair_under_every_kind_of_scale():
    pairs = np.arange(256, dtype=np.uint8).reshape(16, 16)
    signed = np.concatenate([SCALES, -SCALES])
    blocks = np.empty((len(signed), 16, 18), np.uint8)
    blocks[..., :2] = signed.view(np.uint8).reshape(-1, 1, 2)
    blocks[..., 2:] = pairs
    blocks = blocks.reshape(len(signed), -1)
    codes, scales = q4_blocks.unpack_q4_0(blocks)
    reference = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    assert_same_bits(value(codes, scales), reference)
    assert_same_bits(q4_blocks.pack_q4_0(codes, scales), blocks)
    q = Q4Tensor.from_logical(codes, scales)
    assert_same_bits(np.asarray(dequantize(q)), reference)
    assert_same_bits(np.asarray(jax.jit(dequantize)(q)), reference)
    rebuilt = q4_blocks.unpack_tiles(q4_blocks.pack_tiles(codes, scales), codes.shape)
    assert_same_bits(q4_blocks.pack_q4_0(*rebuilt), blocks)


def test_every_finite_scale_is_exact_in_float32():
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = patterns[np.isfinite(patterns)]
    assert len(finite) == 63488
    codes = np.zeros((248, 256 * 32), np.int8)
    codes[:, ::32] = 1
    q = Q4Tensor.from_logical(codes, finite.reshape(248, 256))
    got = np.asarray(jax.jit(dequantize)(q))[:, ::32].reshape(-1)
    # By hand, in integers and powers of two: no conversion of the machine takes part.
    bits = finite.view(np.uint16).astype(np.int64)
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    significand = np.where(exponent > 0, fraction + 1024, fraction).astype(np.float64)
    exact = np.ldexp(significand, np.maximum(exponent, 1) - 25) * np.where(bits >> 15, -1.0, 1.0)
    np.testing.assert_array_equal(got.astype(np.float64), exact)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(exact))


@pytest.mark.parametrize("shape", SHAPES)
def test_all_formats_round_trip(shape):
    codes, scales = random_logical(shape)
    tiles = q4_blocks.pack_tiles(codes, scales)
    from_tiles = q4_blocks.unpack_tiles(tiles, shape)
    blocks = q4_blocks.pack_q4_0(*from_tiles)
    q = Q4Tensor.from_logical(*q4_blocks.unpack_q4_0(blocks))
    assert q.shape == shape
    assert q.nbytes == codes.size * 9 // 16 == blocks.size
    assert_same_bits(q4_blocks.pack_q4_0(*q.to_logical()), blocks)
    assert_same_bits(q4_blocks.pack_tiles(*q.to_logical()), tiles)
    for got, want in zip(q.to_logical(), (codes, scales), strict=True):
        assert_same_bits(got, want)
    assert_same_bits(np.asarray(dequantize(q)), value(codes, scales))


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), groups=st.integers(1, 4), data=st.data())
def test_any_bytes_round_trip_through_every_format(rows, groups, data):
    size = rows * groups
    raw = np.frombuffer(data.draw(st.binary(min_size=18 * size, max_size=18 * size)), np.uint8)
    blocks = raw.reshape(size, 18).copy()
    blocks[:, 1] &= 0xFB  # the scale stays finite
    blocks = blocks.reshape(rows, groups * 18)
    logical = q4_blocks.unpack_q4_0(blocks)
    tiles = q4_blocks.pack_tiles(*logical)
    device = Q4Tensor.from_logical(*q4_blocks.unpack_tiles(tiles, logical.codes.shape))
    assert_same_bits(q4_blocks.pack_q4_0(*device.to_logical()), blocks)
    np.testing.assert_array_equal(q4_blocks.unpack_words(q4_blocks.pack_words(logical.codes)), logical.codes)


def test_tiles_follow_the_stated_layout():
    shape = (10, 96)
    codes, scales = random_logical(shape, seed=4)
    tiles = q4_blocks.pack_tiles(codes, scales)
    assert tiles.shape == (3, 3, 72)
    for n in range(12):
        for i in range(96):
            tile, m, j = tiles[n // 4, i // 32], n % 4, i % 32
            byte = int(tile[8 + 16 * m + j % 16])
            nibble = byte >> 4 if j >= 16 else byte & 15
            scale = tile[2 * m : 2 * m + 2].view(np.float16)[0]
            inside = n < shape[0]
            assert (nibble ^ 8) - 8 == (codes[n, i] if inside else 0)
            assert scale.view(np.uint16) == (scales[n, i // 32].view(np.uint16) if inside else 0)


def test_words_follow_the_stated_bit_positions():
    codes, _ = random_logical((2, 64), seed=5)
    words = q4_blocks.pack_words(codes)
    for n, g, a, b, h in np.ndindex(2, 2, 4, 4, 2):
        nibble = (int(words[n, 4 * g + a]) >> 4 * (2 * b + h)) & 15
        assert (nibble ^ 8) - 8 == codes[n, 32 * g + 16 * h + 4 * a + b]


def test_stacks_views_and_read_only_arrays():
    codes, scales = random_logical((2, 6, 64), seed=6)
    blocks = q4_blocks.pack_q4_0(codes, scales)
    assert blocks.shape == (2, 6, 36)
    stack = Q4Tensor.from_logical(codes, scales)
    assert stack.shape == (2, 6, 64)
    layer = jax.tree.map(lambda leaf: leaf[1], stack)
    np.testing.assert_array_equal(np.asarray(dequantize(layer)), value(codes[1], scales[1]))
    np.testing.assert_array_equal(np.asarray(dequantize(stack))[1], value(codes[1], scales[1]))
    every_other = q4_blocks.pack_q4_0(codes[:, ::2], scales[:, ::2])
    np.testing.assert_array_equal(every_other, blocks[:, ::2])
    frozen = blocks[:, ::2]
    frozen.flags.writeable = False
    np.testing.assert_array_equal(q4_blocks.unpack_q4_0(frozen).codes, codes[:, ::2])


def test_it_is_a_pytree_of_two_leaves():
    q = Q4Tensor.from_logical(*random_logical((4, 64)))
    assert [leaf.dtype for leaf in jax.tree.leaves(q)] == [jnp.uint32, jnp.float16]
    abstract = jax.eval_shape(lambda tensor: tensor, q)
    assert abstract.shape == (4, 64)
    assert abstract.nbytes == q.nbytes


def test_storage_of_the_three_projections_of_the_27b_layer():
    def abstract(rows, columns):
        return Q4Tensor(
            codes=jax.ShapeDtypeStruct((rows, columns // 8), jnp.uint32),
            scales=jax.ShapeDtypeStruct((rows, columns // 32), jnp.float16),
        )

    total = sum(abstract(*shape).nbytes for shape in ((10240, 5120), (6144, 5120), (5120, 6144)))
    assert total == 61.875 * 2**20


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused_with_their_position(bad):
    codes, scales = random_logical((3, 96), seed=1)
    blocks, tiles = q4_blocks.pack_q4_0(codes, scales), q4_blocks.pack_tiles(codes, scales)
    pattern = np.array([bad], np.float16).view(np.uint8)
    blocks[2, 18:20] = pattern
    tiles[0, 1, 4:6] = pattern
    scales[2, 1] = bad
    where = r"scales must be finite, got -?(inf|nan) at \[2, 1\]"
    for make in (q4_blocks.pack_q4_0, q4_blocks.pack_tiles, Q4Tensor.from_logical):
        with pytest.raises(ValueError, match=where):
            make(codes, scales)
    with pytest.raises(CheckpointError, match=where):
        q4_blocks.unpack_q4_0(blocks)
    with pytest.raises(CheckpointError, match=where):
        q4_blocks.unpack_tiles(tiles, (3, 96))


@pytest.mark.parametrize("columns", [0, 1, 31, 33, 48])
def test_columns_that_do_not_make_groups_are_refused(columns):
    codes, scales = np.zeros((2, columns), np.int8), np.zeros((2, columns // 32), np.float16)
    for make in (q4_blocks.pack_q4_0, q4_blocks.pack_tiles, Q4Tensor.from_logical):
        with pytest.raises(ValueError, match=f"must be a multiple of 32, got {columns}"):
            make(codes, scales)
    with pytest.raises(ValueError, match="must be a multiple of 32"):
        q4_blocks.unpack_tiles(np.zeros(72, np.uint8), (2, columns))


def test_what_is_not_the_logical_form_is_refused():
    codes, scales = random_logical((4, 64))
    outside = codes.copy()
    outside[1, 40] = 8
    cases = [
        (codes.astype(np.int32), scales, TypeError, "codes must be int8"),
        (codes, scales.astype(np.float32), TypeError, "scales must be float16"),
        (codes, scales[:, :1], ValueError, r"scales must be \(4, 2\)"),
        (codes, scales[:3], ValueError, r"scales must be \(4, 2\)"),
        (outside, scales, ValueError, r"got 8 at \[1, 40\]"),
        (codes[0], scales[0], ValueError, r"codes must be \[..., N, I\]"),
    ]
    for bad_codes, bad_scales, error, message in cases:
        with pytest.raises(error, match=message):
            Q4Tensor.from_logical(bad_codes, bad_scales)


def test_damaged_bytes_are_refused():
    codes, scales = random_logical((6, 64))
    blocks, tiles = q4_blocks.pack_q4_0(codes, scales), q4_blocks.pack_tiles(codes, scales)
    with pytest.raises(CheckpointError, match="got shape"):
        q4_blocks.unpack_q4_0(blocks[:, :-1])
    with pytest.raises(TypeError, match="must be uint8"):
        q4_blocks.unpack_q4_0(blocks.view(np.int8))
    with pytest.raises(CheckpointError, match="take 288 bytes"):
        q4_blocks.unpack_tiles(tiles.reshape(-1)[:-1], (6, 64))
    with pytest.raises(CheckpointError, match="take 432 bytes"):
        q4_blocks.unpack_tiles(tiles, (9, 64))
    with pytest.raises(ValueError, match="N must be at least 1"):
        q4_blocks.unpack_tiles(tiles, (0, 64))


@pytest.mark.parametrize("byte", [4, 8 + 16 * 2 + 5])
def test_tile_padding_that_holds_data_is_refused(byte):
    tiles = q4_blocks.pack_tiles(*random_logical((6, 64)))
    tiles[1, 1, byte] = 1
    with pytest.raises(CheckpointError, match="padding rows after row 5 must be zero"):
        q4_blocks.unpack_tiles(tiles, (6, 64))


def test_dequantize_wants_a_q4_tensor():
    with pytest.raises(TypeError, match="must be a Q4Tensor"):
        dequantize(jnp.zeros((2, 32)))
