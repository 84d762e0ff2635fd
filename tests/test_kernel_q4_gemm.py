"""The product of many rows with 4-bit weights: emulated warpgroup by warpgroup, lowered, compiled and on a card.

Interpret mode has no rule for matrix instructions with operands in registers. So the emulation deals arrays to the
threads of a warpgroup as the kernel's layouts say, runs the kernel's own code on those registers, and multiplies as the
manual of the instruction lays its operands out; copies, barriers and the warpgroups' pipeline are interpreted, races
looked for. The oracle is float64 on the dequantised matrix; weights that no product may touch carry NaN scales.
"""

import contextlib
import functools
import inspect
import re
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax.evidence.metrics import rms_rel
from gdn_jax.q4 import Q4Tensor
from pallas_kernels.q4_gemm import MAX_PIECES, Tile, choose_tile, host, mosaic, q4_gemm, split_pieces, supported
from tests.support.deviceless import compile_for_h200
from tests.support.registers import Registers, emulated_inline
from tests.test_kernel_q4_gemv import activations, oracle, stack

MAX_REL = 6e-7
"""A row of y by its own largest value, up to 384 columns."""
LARGE_RMS = 4.5e-7
"""Of all y, for 5120 and 6144 columns; measured on an H200: 2.7e-7 and 3.0e-7, most of it by sums over the groups."""
LARGE_MAX_REL = 1.5e-6
"""The worst row of these by its own largest value: half as much again as float32 sums in the same order leave."""
SMALL = Tile(rows=64, tokens=16, warpgroups=1, stages=2, in_flight=2)
H200 = "NVIDIA H200"


class Flight(NamedTuple):
    """Sums that the matrix units are busy with, as the commit group of that number."""

    number: int
    sums: list


class EmulatedLane:
    """`mosaic.Lane` for values of all 128 threads at once."""

    committed = 0

    element = staticmethod(lambda register, i: register[:, i])
    vector = staticmethod(lambda values: jnp.stack(list(values), axis=1))
    array = staticmethod(lambda registers, like: Registers(registers, like.layout, like.shape))
    float = staticmethod(lambda value: value.astype(jnp.float32))
    times_plus = staticmethod(lambda a, b, c: a * b + c)

    @staticmethod
    def codes(word, shift):
        """[128, 2]: the nibbles from bits `shift` and 16 + `shift` on, in two's complement."""
        tops = [word[:, 0] << jnp.uint32(28 - first) for first in (shift, 16 + shift)]
        return jnp.stack([lax.bitcast_convert_type(top, jnp.int32) >> 28 for top in tops], axis=1)

    @classmethod
    def multiply(cls, codes, x, g):
        """PTX, wgmma m64nNk16, A in registers, lane = 4 · group + thread of the group: 16 rows to a warp.

        a0 … a3: columns 2 · thread and + 1 of row `group`, the same of row group + 8, then both 8 columns on. Sums in
        the order of c, half and e: column 8c + 2 · thread + e of row group + 8 · half.
        """
        products = jnp.float32(0)
        for piece in x:
            for half in range(2):
                parts = [pair.reshape(4, 8, 8) for pair in codes[4 * half : 4 * half + 4]]
                upper, lower = (jnp.concatenate(parts[row::2], axis=2) for row in range(2))
                a = jnp.concatenate([upper, lower], axis=1).reshape(64, 16).astype(jnp.float32)
                b = lax.slice_in_dim(piece, 32 * g + 16 * half, 32 * g + 16 * half + 16, axis=1)
                products = products + a @ b.astype(jnp.float32).T
        cls.committed += 1
        sums = products.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
        return Flight(cls.committed, list(sums.reshape(-1, 128)))

    @classmethod
    def wait(cls, groups, flight):
        assert flight.number <= cls.committed - groups, "sums are read that are still on their way"
        return np.fromiter(flight.sums, object)


def emulated_operands(x):
    """`_XOperands` of the emulation: the pieces of x themselves, each [tokens, 128]."""
    arrays = [piece.read() for piece in x]
    # All of a step is waited for within it: the copy engine may overwrite x as soon as the barrier says so.
    plgpu.commit_smem()
    return arrays


@functools.cache
def emulated_launch(tile):
    """The kernel without its own jit, whose cache would hand emulated programs to others, and the reverse."""
    call = functools.partial(inspect.unwrap(mosaic.launch), tile=tile)
    return jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def run(request, monkeypatch, capfd):
    """y of one matrix, emulated or on the card."""
    emulated = request.param == "emulated"
    if emulated:
        monkeypatch.setattr(plgpu, "inline_mgpu", emulated_inline)
        monkeypatch.setattr(mosaic, "Lane", EmulatedLane)
        monkeypatch.setattr(mosaic, "_XOperands", types.SimpleNamespace(of=emulated_operands))
        monkeypatch.setattr(
            mosaic, "memref", types.SimpleNamespace(store=lambda value, y, place: y.store(value, place))
        )
        monkeypatch.setattr(host, "launch", lambda *operands, tile: emulated_launch(tile)(*operands))
        monkeypatch.setattr(host, "tensor_core_objection", lambda: None)

    def run(q, x, pieces=3, layer=1, tile=SMALL):
        padded = max(tile.tokens, -(-len(x) // 8) * 8)
        # Blocks that are shifted inwards write outputs of their neighbours again, the same bits: no race that matters.
        whole = q.shape[1] % (tile.rows * tile.cluster) == 0 and padded % tile.tokens == 0
        interpreted = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=whole))
        with interpreted if emulated else contextlib.nullcontext():
            operands = [(q.codes, q.scales)], jnp.asarray(x), jnp.array([layer], jnp.int32)
            [y] = q4_gemm(*operands, pieces=pieces, tile=tile)
            y = np.asarray(y)
        assert "RACE" not in capfd.readouterr().out
        return y

    return run


def assert_close(y, want, bound=MAX_REL):
    """NaN fails; each row by its own largest value."""
    assert y.dtype == np.float32
    assert y.shape == want.shape
    error = np.abs(y - want).max(axis=1) / np.abs(want).max(axis=1)
    assert error.max() <= bound, error.max()


def rounded(x):
    """x as one piece has it."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


CASES = [  # N, I, M, pieces, tile
    (72, 384, 1, 3, SMALL),  # N is not a multiple of the tile; more steps than stages
    (136, 256, 65, 3, Tile(128, 64, 2, 3, 1)),  # nor is M, nor of 8; two warpgroups
    (128, 384, 16, 2, Tile(128, 16, 1, 1, 2)),  # two shares of 64 rows in a warpgroup, one stage
    (192, 128, 3, 3, Tile(192, 16, 3, 2, 1)),  # three warpgroups, one step
    (64, 128, 45, 1, Tile(64, 40, 1, 2, 2)),  # instructions of no power of two
    (128, 384, 16, 3, Tile(64, 16, 1, 2, 1, cluster=2)),  # blocks that fetch x for one another
    (136, 256, 16, 1, Tile(64, 16, 1, 2, 2, cluster=2)),  # of which the last has no rows of its own
]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns", "tokens", "pieces", "tile"), CASES)
def test_against_float64(run, rows, columns, tokens, pieces, tile):
    q, x = stack(rows, columns), activations((tokens, columns))
    y = run(q, x, pieces, tile=tile)
    if pieces == 1:
        assert_close(y, oracle(q, rounded(x)))
    elif pieces == 2:
        assert_close(y, oracle(q, rounded(x) + rounded(x - rounded(x))))
    else:
        assert_close(y, oracle(q, x))


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_the_error_is_that_of_rounding_x(run, pieces):
    """An element of y by the sum of its terms' magnitudes.

    p pieces leave at most (2^-8)^p of an x, three of them nothing. A group's sum is made by 2 p instructions, which
    line 17 numbers up with the largest of them and may cut each off at 24 bits; then it is scaled and added up.
    """
    q, x = stack(72, 384), activations((3, 384))
    y = run(q, x, pieces)
    codes, scales = q.to_logical()
    weights = np.abs(codes[1]) * np.repeat(np.abs(scales[1].astype(np.float64)), 32, axis=-1)
    magnitudes = np.abs(x).astype(np.float64) @ weights.T
    dropped = 0 if pieces == 3 else 2.0 ** (-8 * pieces)
    sums = (2 * pieces * 17 + 384 // 32 + 1) * 2.0**-24
    assert (np.abs(y - oracle(q, x)) <= (dropped + sums) * magnitudes).all()
    if pieces < 3:  # and three pieces would be far below
        assert (np.abs(y - oracle(q, x)) / magnitudes).max() > dropped / 64


def test_each_code_meets_its_column(run):
    """x one-hot gives the columns of W back, to the bit: every code in every place of a step, in whole tiles."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (1, 128, 128)).astype(np.int8)
    codes[0, :16] = np.arange(-8, 8)[:, None]
    scales = np.full((1, 128, 4), 0.5, np.float16) * [1, -2, 4, 0.25]
    q = Q4Tensor.from_logical(codes, scales.astype(np.float16))
    y = run(q, np.eye(128, dtype=np.float32), layer=0)
    np.testing.assert_array_equal(y.T, codes[0] * np.repeat(scales[0], 32, axis=-1))


def test_three_pieces_hold_every_bit_of_x(run):
    """Through weights that are 1 on the diagonal; x from faint to huge."""
    codes = np.eye(128, dtype=np.int8)[None]
    q = Q4Tensor.from_logical(codes, np.ones((1, 128, 4), np.float16))
    x = drawn_bits(np.arange(-80, 100), (128, 128), seed=2)
    # In a group of its own, since a sum holds 24 bits in all.
    x *= np.arange(128)[:, None] // 32 == np.arange(128) // 32
    alone = np.where(np.eye(128, dtype=bool), x, 0)
    np.testing.assert_array_equal(np.diag(run(q, alone, layer=0)), np.diag(x))


def test_bits_depend_neither_on_the_cut_nor_on_what_lies_next_door(run):
    """Neither on weights of other rows, nor on other rows of x."""
    q, x = stack(72, 384), activations((5, 384))
    clean = run(q, x)
    bad = np.arange(72) % 2 == 1
    poisoned = q.replace(scales=jnp.where(bad[None, :, None], jnp.float16(np.nan), q.scales))
    y = run(poisoned, x, tile=Tile(64, 24, 1, 3, 1))
    assert np.isnan(y[:, bad]).all()
    np.testing.assert_array_equal(y[:, ~bad], clean[:, ~bad])
    changed = x.copy()
    changed[[0, 3]] *= np.float32(-3e4)
    others = [1, 2, 4]
    np.testing.assert_array_equal(run(q, changed)[others], clean[others])
    np.testing.assert_array_equal(run(q, x[others])[0], clean[1])  # nor on how many there are


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(run, bad, pieces):
    q, x = stack(72, 384), activations((3, 384))
    codes, scales = q.to_logical()
    codes[1, :, 383] = 0  # also where it meets codes of 0
    q = Q4Tensor.from_logical(codes, np.nan_to_num(scales))
    clean = run(q, x, pieces)
    x[1, 383] = bad
    spoilt = run(q, x, pieces)
    assert np.isfinite(clean).all()
    assert not np.isfinite(spoilt[1]).any()
    np.testing.assert_array_equal(spoilt[[0, 2]], clean[[0, 2]])


def test_a_spike_that_meets_codes_of_0_costs_no_digit(run):
    q, x = stack(72, 384), activations((3, 384)) * np.float32(1e-3)
    codes, scales = q.to_logical()
    codes[1, :, 37] = 0
    q = Q4Tensor.from_logical(codes, np.nan_to_num(scales))
    clean = run(q, x)
    x[:, 37] = [1e6, -1e30, 0]
    y = run(q, x)
    assert_close(y, oracle(q, x))
    assert_close(y[2:], oracle(q, x)[2:])
    assert_close(clean, oracle(q, np.where(np.arange(384) == 37, 0, x)))


@pytest.mark.parametrize(("of_x", "of_scales"), [(1e30, 1), (1e-30, 1), (1, 2e-7), (1e33, 2e-7), (0, 1)])
def test_magnitudes(run, of_x, of_scales):
    """Scales of 2e-7 / 20 are subnormal in float16."""
    q, x = stack(72, 384), activations((3, 384)) * np.float32(of_x)
    codes, scales = q.to_logical()
    q = Q4Tensor.from_logical(codes, (np.nan_to_num(scales).astype(np.float64) * 20 * of_scales).astype(np.float16))
    y, want = run(q, x), oracle(q, x)
    if of_x:
        assert_close(y, want)
    else:
        np.testing.assert_array_equal(y, want)


def test_the_layer_is_an_operand(run):
    """One program for all layers; out of range means the nearest."""
    q = stack(72, 384)
    q = q.replace(scales=jnp.nan_to_num(q.scales, nan=0.0625))
    x = activations((1, 384))
    for layer in (-(2**31), 0, 2, 2**31 - 1):
        assert_close(run(q, x, layer=layer), oracle(q, x, min(max(layer, 0), 2)))


# ----------------------------------------------------------------------------------------------------------------------
# Pieces of x
# ----------------------------------------------------------------------------------------------------------------------


def drawn_bits(exponents, shape, seed=0):
    """Float32 of both signs, 24 random significant bits, exponents drawn from those given."""
    rng = np.random.default_rng(seed)
    mantissas = rng.integers(2**23, 2**24, shape) * rng.choice([-1, 1], shape)
    return np.ldexp(mantissas.astype(np.float64), rng.choice(exponents, shape) - 23).astype(np.float32)


def put_together(split):
    """The numbers that pieces stand for, in float64, their columns in order."""
    split = np.asarray(split).astype(np.float64)
    grouped = split.reshape(*split.shape[:-1], -1, 16)
    ordered = np.empty_like(grouped)
    ordered[..., mosaic.COLUMN_ORDER] = grouped
    return ordered.reshape(split.shape).sum(axis=0)


@pytest.mark.parametrize("jitted", [False, True])
def test_three_pieces_add_up_to_x(jitted):
    split = jax.jit(split_pieces, static_argnums=1) if jitted else split_pieces
    x = drawn_bits(np.arange(-103, 127), (64, 512))
    x[0, :4] = 1e38, -3.38e38, 0, -0.0
    np.testing.assert_array_equal(put_together(split(x, 3)), x.astype(np.float64))
    faint = drawn_bits(np.arange(-149, -103), (64, 512))
    assert np.abs(put_together(split(faint, 3)) - faint).max() <= 2.0**-126  # what flushing to zero may take away


@pytest.mark.parametrize("pieces", [1, 2])
def test_fewer_pieces_round(pieces):
    x = drawn_bits(np.arange(-80, 127), (64, 512))
    error = np.abs(put_together(split_pieces(x, pieces)) - x.astype(np.float64))
    assert (error <= 2.0 ** (-8 * pieces) * np.abs(x)).all()
    np.testing.assert_array_equal(put_together(split_pieces(x, 1)), rounded(x))


def test_places_of_columns_are_those_of_the_codes_in_a_word():
    """Word a of a group holds, from its lowest bits on, what lane a multiplies with places 2a, 2a + 1, 2a + 8, …"""
    x = np.broadcast_to(np.arange(32, dtype=np.float32), (1, 32))
    [[places]] = np.asarray(split_pieces(x, 1)).astype(np.int32)
    for a in range(4):
        column = np.zeros((1, 32), np.int8)
        for half in range(2):
            for number, place in enumerate((2 * a, 2 * a + 1, 2 * a + 8, 2 * a + 9)):
                column[:] = 0
                column[0, places[16 * half + place]] = 1
                [[words]] = np.asarray(Q4Tensor.from_logical(column[None], np.ones((1, 1, 1), np.float16)).codes)
                # Pairs are 16 bits apart: bits 0 and 16, then 8 and 24; the second half of a group 4 bits on.
                assert words[a] == 1 << 4 * half + (0, 16, 8, 24)[number]


# ----------------------------------------------------------------------------------------------------------------------
# What it takes
# ----------------------------------------------------------------------------------------------------------------------

S = jax.ShapeDtypeStruct


def matrix(rows, columns, layers=2):
    """A matrix [L, N, I], as shapes."""
    return S((layers, rows, columns // 8), jnp.uint32), S((layers, rows, columns // 32), jnp.float16)


def attempt(**changes):
    """The call for a request that it takes, but for the changes."""
    request = {"x": S((5, 256), jnp.float32), "layer": S((1,), jnp.int32), "pieces": 3, "tile": SMALL}
    request |= {"matrices": [matrix(72, 256), matrix(64, 256)]} | changes
    how = {name: request.pop(name) for name in ("pieces", "tile")}
    return jax.eval_shape(lambda request: q4_gemm(**request, **how), request)


@pytest.fixture
def hopper(monkeypatch):
    """As if the device were one."""
    monkeypatch.setattr(host, "tensor_core_objection", lambda: None)


@pytest.mark.usefixtures("hopper")
def test_what_the_errors_start_from_is_accepted():
    assert [(y.shape, y.dtype) for y in attempt()] == [((5, 72), jnp.float32), ((5, 64), jnp.float32)]


CODES, SCALES = matrix(72, 256)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": S((256,), jnp.float32)}, r"x must be \[M, I\], got shape \(256,\)"),
        ({"matrices": [(S((72, 32), jnp.uint32), SCALES)]}, r"codes of matrix 0 must be \[L, N, I/8\], got shape"),
        (
            {"matrices": [(S((2, 72, 16), jnp.uint32), SCALES)]},
            r"codes of matrix 0 .*\[2, 72, 32\].* got \[2, 72, 16\]",
        ),
        ({"matrices": [(CODES, S((2, 72, 4), jnp.float16))]}, r"scales of matrix 0 .*\[2, 72, 8\].* got \[2, 72, 4\]"),
        ({"layer": S((), jnp.int32)}, r"layer must have shape \[1\]"),
        ({"tile": Tile(96, 64, 1, 2, 2)}, "64 or 128 for each compute warpgroup"),
        ({"tile": Tile(192, 64, 1, 2, 2)}, "64 or 128 for each compute warpgroup"),
        ({"tile": Tile(128, 64, 2, 2, 2)}, "no more than the 72 rows of the matrix"),
        ({"tile": Tile(64, 60, 1, 2, 2)}, "a multiple of 8 tokens, 256 at most"),
        ({"tile": Tile(64, 264, 1, 2, 2)}, "a multiple of 8 tokens, 256 at most"),
        ({"tile": Tile(64, 64, 1, 0, 2)}, "at least one stage"),
        ({"tile": Tile(64, 64, 1, 2, 0)}, "1 or 2 sums in flight"),
        ({"tile": Tile(64, 64, 1, 2, 2, cluster=3)}, "1, 2 or 4 blocks in a cluster"),
        ({"tile": Tile(64, 16, 1, 2, 2, cluster=4)}, "a multiple of 8 tokens for each block of a cluster"),
    ],
)
def test_contradictory_requests_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        attempt(**changes)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pieces": 0}, "1 to 3 pieces, got 0"),
        ({"pieces": 4}, "1 to 3 pieces, got 4"),
        ({"matrices": []}, "at least one matrix"),
        ({"x": S((0, 256), jnp.float32)}, "at least one row, got 0"),
        ({"x": S((5, 256), jnp.bfloat16)}, "x must be float32, got bfloat16"),
        ({"matrices": [(S((2, 72, 32), jnp.int32), SCALES)]}, "codes of matrix 0 must be uint32, got int32"),
        ({"matrices": [(CODES, S((2, 72, 8), jnp.bfloat16))]}, "scales of matrix 0 must be float16, got bfloat16"),
        ({"layer": S((1,), jnp.uint32)}, "layer must be int32"),
        ({"matrices": [matrix(72, 256), matrix(56, 256)]}, r"got one of shape \(2, 56, 256\)"),
        ({"matrices": [matrix(76, 256)]}, r"got one of shape \(2, 76, 256\)"),
        ({"matrices": [matrix(72, 192)], "x": S((5, 192), jnp.float32)}, r"got one of shape \(2, 72, 192\)"),
        ({"matrices": [matrix(72, 256, layers=0)]}, r"got one of shape \(0, 72, 256\)"),
    ],
)
def test_what_the_kernel_does_not_take_is_not_implemented(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        attempt(**changes)


@pytest.mark.usefixtures("hopper")
def test_supported_answers_beforehand():
    assert supported([(48, 248320, 5120)], 2048, MAX_PIECES) is None
    assert supported([(1, 64, 128)], 1, 1) is None
    assert "exceed" in (supported([(1, 64, 128)], 2**31, 1) or "")
    assert "pieces" in (supported([(1, 64, 128)], 1, 4) or "")


@pytest.mark.skipif("jax.default_backend() == 'gpu'", reason="a GPU is here")
def test_without_a_gpu_the_kernel_refuses_before_the_launch():
    with pytest.raises(NotImplementedError, match=r"q4_gemm: the kernel needs an NVIDIA GPU.*\(cpu\)"):
        attempt()


# ----------------------------------------------------------------------------------------------------------------------
# Compiled
# ----------------------------------------------------------------------------------------------------------------------

MODEL_SHAPES = {
    "qkv and z": ([10240, 6144], 5120),
    "out": ([5120], 6144),
    "gate and up": ([34816], 5120),
    "down": ([5120], 17408),
    "head": ([248320], 5120),
    "keys": ([1024], 5120),
}


def model_operands(rows, columns, tokens, layers=4):
    matrices = tuple(matrix(n, columns, layers) for n in rows)
    return matrices, S((tokens, columns), jnp.float32), S((1,), jnp.int32)


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_lowers_for_cuda_without_a_gpu(pieces):
    call = jax.jit(functools.partial(inspect.unwrap(mosaic.launch), tile=Tile(128, 64, 2, 2, 2)))
    x = S((pieces, 512, 5120), jnp.bfloat16)
    traced = call.trace(*matrix(10240, 5120), x, S((1,), jnp.int32))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") > 0


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 64, 100, 512, 4096])
@pytest.mark.parametrize("rows", [64, 72, 128, 1024, 5120, 248320])
def test_the_chosen_cut_fits(rows, tokens, pieces):
    for device in (H200, "a card that nobody has measured"):
        tile, source = choose_tile(device, rows, tokens, pieces)
        assert source
        host.check_tile(tile, rows)
        assert tile.stages * (64 * tile.rows + 256 * pieces * tile.tokens) <= 226 * 1024  # and some for barriers


COMPILED = [(name, 512, pieces) for name in MODEL_SHAPES for pieces in (1, 3)]
COMPILED += [("qkv and z", 100, 3), ("out", 16, 1), ("out", 1, 3)]


@pytest.mark.deviceless
@pytest.mark.parametrize(("name", "tokens", "pieces"), COMPILED)
def test_compiled_it_is_one_kernel_per_matrix_beside_the_pieces_of_x(name, tokens, pieces, tmp_path, monkeypatch):
    """No copy of the weights, no spills, and matrix instructions that need not wait for one another."""
    rows, columns = MODEL_SHAPES[name]
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for_h200(
        jax.jit(functools.partial(q4_gemm, pieces=pieces)), *model_operands(rows, columns, tokens)
    )
    text = compiled.as_text()
    assert text.count(" custom-call(") == len(rows)
    assert re.findall(r"= (?:u32|f16)\S* (?:copy|copy-start|fusion|dynamic-slice|transpose)\(", text) == []
    tiles = [choose_tile(H200, n, tokens, pieces).tile for n in rows]
    padded = max(-(-tokens // 8) * 8, *(tile.tokens for tile in tiles))
    cut_off = 0 if padded == tokens else 4 * padded * sum(rows)  # y with the rows that are no row of x
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * pieces * padded * columns + cut_off + 1024
    logs = [log.read_text() for log in tmp_path.glob("*.ptxas")]
    assert len(logs) == len(rows)
    for log in logs:
        # 64 sums of a group beside 64 running ones are five registers too many.
        assert spilled_bytes(log) <= (20 if max(tile.tokens for tile in tiles) == 128 else 0)
        assert "serialized" not in log


def spilled_bytes(log):
    """The most bytes that the assembler says to store for want of registers."""
    return max(int(number) for number in re.findall(r"(\d+) bytes spill stores", log))


@pytest.mark.deviceless
def test_the_assembler_says_when_matrix_instructions_wait_for_one_another(tmp_path, monkeypatch):
    """What the test above relies on: two sums of 64 in flight beside a running one are too many registers."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    call = jax.jit(functools.partial(q4_gemm, pieces=1, tile=Tile(128, 128, 2, 2, 2)))
    compile_for_h200(call, *model_operands([5120], 5120, 512))
    [log] = tmp_path.glob("*.ptxas")
    assert "serialized" in log.read_text()


# ----------------------------------------------------------------------------------------------------------------------
# A card
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(512, 34816, 5120), (40, 5120, 6144), (16, 1024, 5120)])
def test_matrices_of_a_large_model(tokens, rows, columns):
    """Every output, in one piece and in three, the same bits at every call."""
    q, x = stack(rows, columns, layers=2), activations((tokens, columns))
    arguments = [(q.codes, q.scales)], jnp.asarray(x), jnp.array([1], jnp.int32)
    for pieces, of_x in ((1, rounded(x)), (3, x)):
        [y], [again] = (q4_gemm(*arguments, pieces=pieces) for _ in range(2))
        assert_close_where_large(np.asarray(y), oracle(q, of_x))
        np.testing.assert_array_equal(y, again)


def assert_close_where_large(y, want):
    assert_close(y, want, LARGE_MAX_REL)
    assert rms_rel(y, want) <= LARGE_RMS


@pytest.mark.gpu
def test_offsets_beyond_four_gigabytes():
    """The last of 100 layers starts 4.4 GB into the codes; the layers before it are zero."""
    layers, rows, columns = 100, 17408, 5120
    one, x = stack(rows, columns, layers=1, layer=0), activations((64, columns))
    place = jax.jit(lambda part: jnp.zeros((layers, *part.shape[1:]), part.dtype).at[-1].set(part[0]))
    matrices = [(place(one.codes), place(one.scales))]
    call = functools.partial(q4_gemm, matrices, jnp.asarray(x), pieces=3)
    [y], [zeros] = (call(jnp.array([layer], jnp.int32)) for layer in (layers - 1, layers - 2))
    assert_close_where_large(np.asarray(y), oracle(one, x, 0))
    assert not np.asarray(zeros).any()
