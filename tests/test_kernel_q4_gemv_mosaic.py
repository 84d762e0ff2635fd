"""The tensor core form of y = W x with 4-bit weights: emulated lane by lane, lowered, compiled and on a card.

Interpret mode has no rule for what the kernel does with registers. So the emulation deals arrays to 128 threads as the
kernel's layouts say, runs the kernel's own code on those registers, and multiplies as the manual of the instruction
lays its operands out; copies, pipeline and stores are interpreted. A wrong layout or fragment gives a wrong product.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax.limbs import split_limbs
from pallas_kernels.q4_gemv import mosaic
from pallas_kernels.q4_gemv.mosaic import launch_mosaic, mosaic_unsupported
from pallas_kernels.q4_gemv.tuning import MOSAIC_TABLE, MosaicTile
from tests.support.deviceless import compile_for_h200
from tests.support.registers import Registers, emulated_inline
from tests.test_kernel_q4_gemv import activations, assert_close, oracle, stack

SMALL = MosaicTile(rows=16, stages=2)

split = jax.jit(split_limbs, static_argnames=("limbs",))


class EmulatedLane:
    """`mosaic.Lane` for values of all 128 threads at once."""

    constant = staticmethod(np.float32)
    element = staticmethod(lambda register, i: register[:, i])
    vector = staticmethod(lambda values: jnp.stack(list(values), axis=1))
    array = staticmethod(lambda registers, like: Registers(registers, like.layout, like.shape))
    word = staticmethod(lambda register: lax.bitcast_convert_type(register, jnp.uint32))
    nibbles = staticmethod(lambda word, shift: (word << jnp.uint32(shift)) & jnp.uint32(0xF0F0F0F0))
    join = staticmethod(lambda high, low: 256 * high + low)
    float = staticmethod(lambda value: value.astype(jnp.float32))
    times = staticmethod(lambda a, b: a * b)
    times_plus = staticmethod(lambda a, b, c: a * b + c)
    barrier = staticmethod(lambda: None)

    @staticmethod
    def mma(a, b):
        """PTX, m16n8k32 of 8-bit types, lane = 4 · group + thread of the group.

        a0 … a3: bytes 4 · thread … + 3 of row `group`, the same of row group + 8, then both 16 columns on.
        b0, b1: bytes 4 · thread … + 3 of column `group`, then 16 on. c0 … c3: columns 2 · thread, + 1 of row `group`,
        then of row group + 8.
        """
        a, b = (
            [lax.bitcast_convert_type(word, jnp.int8).astype(jnp.int32).reshape(4, 8, 16) for word in words]
            for words in (a, b)
        )
        rows = jnp.concatenate([jnp.concatenate(a[:2], axis=1), jnp.concatenate(a[2:], axis=1)], axis=2)
        columns = jnp.concatenate(b, axis=2)
        products = jnp.einsum("wmk,wnk->wmn", rows, columns).reshape(4, 2, 8, 4, 2)
        return [products[:, half, :, :, column].reshape(128) for half in (0, 1) for column in (0, 1)]


@pytest.fixture(params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def run(request, monkeypatch):
    """The product of q4 stacks with float32 activations, emulated or on the card, for each of some layers."""
    emulated = request.param == "emulated"
    if emulated:
        monkeypatch.setattr(plgpu, "inline_mgpu", emulated_inline)
        monkeypatch.setattr(mosaic, "Lane", EmulatedLane)

    @functools.cache
    def compiled(tile):
        # Not through the kernel's own jit: its cache would hand emulated programs to others, and the reverse.
        launch = functools.partial(launch_mosaic.__wrapped__, tile=tile)
        return jax.jit(launch, compiler_options={"xla_backend_optimization_level": 0} if emulated else None)

    def run(stacks, x, layers=(1,), limbs=3, tile=SMALL):
        digits, x_scales = split(x, limbs=limbs)
        pairs = tuple((q.codes, q.scales) for q in stacks)
        with plgpu.force_gpu_interpret_mode() if emulated else contextlib.nullcontext():
            products = [compiled(tile)(pairs, digits, x_scales, jnp.array([layer], jnp.int32)) for layer in layers]
        return [[np.asarray(y) for y in ys] for ys in products]

    return run


@pytest.mark.parametrize(
    ("rows", "columns", "batch", "limbs", "tile"),
    [
        (24, 2048, 1, 3, SMALL),
        (40, 1024, 2, 3, MosaicTile(32, 1)),
        (8, 3072, 3, 3, SMALL),
        (24, 2048, 4, 3, SMALL),
        (40, 1536, 4, 2, MosaicTile(32, 3)),
        (8, 512, 4, 1, MosaicTile(32, 1)),
        (8, 2048, 5, 3, SMALL),
        (72, 1024, 8, 2, MosaicTile(32, 4)),
    ],
)
def test_against_float64(run, rows, columns, batch, limbs, tile):
    """Rows left over in every cut, fewer steps than stages and more; other layers hold NaN."""
    q, x = stack(rows, columns), activations((batch, columns))
    [[y]] = run([q], x, limbs=limbs, tile=tile)
    assert_close(y, oracle(q, fixed_point(x, limbs)))


def fixed_point(x, limbs):
    """The numbers that the limbs of x stand for, in float64."""
    digits, x_scales = (np.asarray(part, np.float64) for part in split(x, limbs=limbs))
    return np.einsum("l,lbi->bi", 256.0 ** -np.arange(limbs), digits) * np.repeat(x_scales, 32, axis=-1)


def test_bits_depend_neither_on_the_cut_nor_on_rows_next_door(run):
    q, x = stack(24, 2048), activations((1, 2048))
    bad = np.arange(24) % 2 == 1
    poisoned = q.replace(scales=jnp.where(bad[None, :, None], jnp.float16(np.nan), q.scales))
    [[clean]], [[y]] = run([q], x), run([poisoned], x, tile=MosaicTile(32, 1))
    assert np.isnan(y[:, bad]).all()
    np.testing.assert_array_equal(y[:, ~bad], clean[:, ~bad])


@pytest.mark.parametrize(("batch", "limbs"), [(2, 3), (3, 1), (4, 3)])
def test_a_non_finite_activation_spoils_its_row_alone(run, batch, limbs):
    q, x = stack(16, 1024), activations((batch, 1024))
    codes, scales = q.to_logical()
    codes[1, :, 1023] = 0  # also where it meets codes of 0
    q = type(q).from_logical(codes, np.nan_to_num(scales))
    spoilt = x.copy()
    spoilt[1, 1023] = np.inf
    [[clean]], [[y]] = run([q], x, limbs=limbs), run([q], spoilt, limbs=limbs)
    assert np.isnan(y[1]).all()
    others = np.arange(batch) != 1
    np.testing.assert_array_equal(y[others], clean[others])
    assert_close(clean, oracle(q, fixed_point(x, limbs)))


def test_several_matrices_and_layers(run):
    """One launch for two matrices, one program for all layers; a layer out of range means the nearest."""
    stacks = [stack(rows, 1024, seed=rows) for rows in (24, 8)]
    stacks = [q.replace(scales=jnp.nan_to_num(q.scales, nan=0.0625)) for q in stacks]
    x = activations((1, 1024))
    layers = (-(2**31), 0, 2, 2**31 - 1)
    products = run(stacks, x, layers=layers)
    for layer, ys in zip(layers, products, strict=True):
        for q, y in zip(stacks, ys, strict=True):
            assert_close(y, oracle(q, x, min(max(layer, 0), 2)))


def operands(shapes, batch, limbs=3):
    """What the launch takes for matrices [L, N, I], as shapes."""
    shape = jax.ShapeDtypeStruct
    columns = shapes[0][2]
    matrices = tuple(
        (shape((layers, n, i // 8), jnp.uint32), shape((layers, n, i // 32), jnp.float16)) for layers, n, i in shapes
    )
    digits, x_scales = shape((limbs, batch, columns), jnp.int8), shape((batch, columns // 32), jnp.float32)
    return matrices, digits, x_scales, shape((1,), jnp.int32)


@pytest.mark.parametrize("tile", [MosaicTile(8, 2), MosaicTile(128, 2), MosaicTile(16, 0)])
def test_a_tile_that_is_not_one(tile):
    with pytest.raises(ValueError, match="rows of a tile must be 16, 32 or 64 and stages at least 1"):
        jax.eval_shape(functools.partial(launch_mosaic, tile=tile), *operands([(2, 16, 1024)], 1))


@pytest.mark.parametrize("batch", range(1, 9))
def test_what_a_step_copies_is_a_multiple_of_what_addresses_must_be(batch, monkeypatch):
    """Steps lie one behind the other in shared memory, and TMA writes to multiples of 128 bytes."""
    pipeline, found = plgpu.emit_pipeline, []

    def watched(*args, in_specs, **options):
        found.append(in_specs)
        return pipeline(*args, in_specs=in_specs, **options)

    monkeypatch.setattr(plgpu, "emit_pipeline", watched)
    jax.eval_shape(functools.partial(launch_mosaic.__wrapped__, tile=SMALL), *operands([(2, 16, 512)], batch))
    [specs] = found
    for spec, itemsize in zip(specs, (4, 2, 1, 4), strict=True):
        assert itemsize * math.prod(size for size in spec.block_shape if size is not None) % 128 == 0


def test_shapes_that_copies_cannot_cut():
    assert mosaic_unsupported([(2, 8, 512), (2, 48, 17408)]) is None
    for shape in ((2, 12, 1024), (2, 16, 1280)):
        assert str(shape) in str(mosaic_unsupported([(2, 8, 1024), shape]))


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
def test_lowers_for_cuda_without_a_gpu(batch):
    call = jax.jit(functools.partial(launch_mosaic.__wrapped__, tile=MosaicTile(32, 2)))
    traced = call.trace(*operands([(4, 16384, 5120)], batch))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") > 0


CUTS = [(1, MosaicTile(16, 4)), (1, MosaicTile(64, 2)), (2, MosaicTile(32, 4)), (8, MosaicTile(16, 3))]
CUTS += [(8, MosaicTile(32, 2)), (8, MosaicTile(64, 2))]


@pytest.mark.deviceless
@pytest.mark.parametrize(("batch", "tile"), CUTS)
def test_compiled_it_is_one_kernel_that_keeps_to_registers(batch, tile, tmp_path, monkeypatch):
    compiled = compile_without_spills((4, 5120, 17408), batch, 3, tile, tmp_path, monkeypatch)
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    text = compiled.as_text()
    assert text.count(" custom-call(") == 1
    assert "fusion(" not in text
    assert " copy(" not in text


@pytest.mark.deviceless
@pytest.mark.parametrize("key", MOSAIC_TABLE, ids=str)
def test_every_row_of_the_table_keeps_to_registers(key, tmp_path, monkeypatch):
    """For the largest matrix of the row's bucket."""
    shape = (1, key.rows, key.columns)
    compile_without_spills(shape, key.batch, key.limbs, MOSAIC_TABLE[key].tile, tmp_path, monkeypatch)


def compile_without_spills(shape, batch, limbs, tile, folder, monkeypatch):
    """The launch for one matrix [L, N, I], compiled; the assembler's report must show no spills."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for_h200(launch_mosaic, *operands([shape], batch, limbs), tile=tile)
    [log] = folder.glob("*.ptxas")
    assert "0 bytes spill stores, 0 bytes spill loads" in log.read_text()
    return compiled


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(16384, 5120), (5120, 6144), (5120, 17408), (1000, 5120)])
def test_matrices_of_a_large_model(rows, columns, batch):
    """Every output, in the cuts of both ends, the same bits at every call."""
    q, x = stack(rows, columns, layers=2), activations((batch, columns))
    digits, x_scales = split(x)
    tiles = (MosaicTile(16, 3), MosaicTile(64, 2), MosaicTile(64, 2))
    layer = jnp.array([1], jnp.int32)
    ys = [np.asarray(launch_mosaic(((q.codes, q.scales),), digits, x_scales, layer, tile=tile)[0]) for tile in tiles]
    assert_close(ys[0], oracle(q, x))
    for y in ys[1:]:
        np.testing.assert_array_equal(y, ys[0])


@pytest.mark.gpu
def test_offsets_beyond_four_gigabytes():
    """The last of 100 layers starts 4.4 GB into the codes; the layers before it are zero."""
    layers, rows, columns = 100, 17408, 5120
    one, x = stack(rows, columns, layers=1, layer=0), activations((1, columns))
    place = jax.jit(lambda part: jnp.zeros((layers, *part.shape[1:]), part.dtype).at[-1].set(part[0]))
    pairs = ((place(one.codes), place(one.scales)),)
    digits, x_scales = split(x)
    call = functools.partial(launch_mosaic, pairs, digits, x_scales, tile=MosaicTile(32, 2))
    [y], [zeros] = (call(jnp.array([layer], jnp.int32)) for layer in (layers - 1, layers - 2))
    assert_close(np.asarray(y), oracle(one, x, 0))
    assert not np.asarray(zeros).any()
