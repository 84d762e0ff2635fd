"""The kernels that only read, or read and write: every word once, of the right layer, however the work is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bandwidth import copy, read
from tests.support.deviceless import compile_for_h200

STATIC = ("block", "depth", "warps", "programs", "interpret")
BLOCKS, BLOCK = 13, 128
CUTS = [(depth, programs) for depth in (1, 3) for programs in (None, 1, 4, 100)]


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpret", "card"])
def run(request):
    """A kernel on a stack and layers given as ints, in interpret mode or on the card."""

    def run(kernel, stack, *layers, **cut):
        jitted = jax.jit(kernel, static_argnames=STATIC)
        index = jnp.array(layers, jnp.int32)
        return np.asarray(jitted(jnp.asarray(stack), index, block=BLOCK, warps=1, interpret=request.param, **cut))

    return run


@pytest.fixture
def stack():
    return np.random.default_rng(0).integers(-(2**31), 2**31, (3, BLOCKS * BLOCK)).astype(np.int32)


def wrapped_sum(words):
    return np.sum(words, dtype=np.int32)


@pytest.mark.parametrize(("depth", "programs"), CUTS)
def test_every_program_sums_its_own_blocks(run, stack, depth, programs):
    sums = run(read, stack, 1, depth=depth, programs=programs)
    count = min(programs or BLOCKS, BLOCKS)
    blocks = stack[1].reshape(BLOCKS, BLOCK)
    np.testing.assert_array_equal(sums, [wrapped_sum(blocks[p::count]) for p in range(count)])


@pytest.mark.parametrize(("depth", "programs"), CUTS)
def test_a_copy_changes_its_target_alone(run, stack, depth, programs):
    want = stack.copy()
    want[0] = want[2]
    np.testing.assert_array_equal(run(copy, stack, 2, 0, depth=depth, programs=programs), want)


@pytest.mark.parametrize(("layer", "nearest"), [(-1, 0), (3, 2), (2**31 - 1, 2)])
def test_a_layer_out_of_range_is_the_nearest_one(run, stack, layer, nearest):
    assert wrapped_sum(run(read, stack, layer)) == wrapped_sum(stack[nearest])
    want = stack.copy()
    want[1] = want[nearest]
    np.testing.assert_array_equal(run(copy, stack, layer, 1), want)


@pytest.mark.parametrize(
    ("kernel", "shape", "index", "cut", "message"),
    [
        (read, (256,), 1, {}, r"stack must be \[L, words\]"),
        (read, (0, 256), 1, {}, "at least one of each"),
        (read, (2, 256), 2, {}, r"layer must have shape \(1,\)"),
        (copy, (2, 256), 1, {}, r"route must have shape \(2,\)"),
        (read, (2, 200), 1, {}, "words must be a multiple of block=128 .* got 200"),
        (read, (2, 256), 1, {"block": 96}, "block must be a power of two .* got 96"),
        (read, (2, 256), 1, {"warps": 3}, "warps must be a power of two .* got 3"),
        (copy, (2, 256), 2, {"warps": 64}, "warps must be a power of two of at most 32, got 64"),
        (copy, (2, 256), 2, {"depth": 0}, "depth must be at least 1, got 0"),
        (copy, (2, 256), 2, {"programs": 0}, "programs must be None or 1 to .* got 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(kernel, shape, index, cut, message):
    with pytest.raises(ValueError, match=message):
        kernel(jnp.zeros(shape, jnp.int32), jnp.zeros(index, jnp.int32), **{"block": 128, **cut}, interpret=True)


def test_other_dtypes_are_refused():
    with pytest.raises(NotImplementedError, match="stack must be int32, got float32"):
        read(jnp.zeros((2, 256)), jnp.zeros(1, jnp.int32), interpret=True)
    with pytest.raises(NotImplementedError, match="route must be int32, got uint32"):
        copy(jnp.zeros((2, 256), jnp.int32), jnp.zeros(2, jnp.uint32), interpret=True)


@pytest.mark.deviceless
@pytest.mark.parametrize("cut", [{"block": 4096}, {"block": 1024, "depth": 4}, {"block": 16384, "programs": None}])
@pytest.mark.parametrize("kernel", [read, copy])
def test_compiles_for_the_card_without_spills_or_copies(kernel, cut):
    """Four GiB, so that offsets of words pass 2^31 bytes; a register that does not fit fails the compilation."""
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    call = functools.partial(kernel, **{"programs": 1056, **cut})
    program = jax.jit(call, donate_argnums=() if kernel is read else 0, compiler_options=options)
    stack = jax.ShapeDtypeStruct((2, 2**29), jnp.int32)
    index = jax.ShapeDtypeStruct((1 if kernel is read else 2,), jnp.int32)
    compiled = compile_for_h200(program, stack, index)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == (0 if kernel is read else 2**32)
    assert memory.temp_size_in_bytes == 0
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count(" custom-call(") == 1
    assert not any(f" {op}(" in entry for op in ("copy", "fusion", "dynamic-slice"))
