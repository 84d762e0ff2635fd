"""The host functions: what they take, what they refuse, and the calls they build."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.bandwidth.kernel import copy_kernel, read_kernel
from pallas_kernels.operands import ANYWHERE

__all__ = ["copy", "read"]

_MOST_PROGRAMS = 2**31 - 1
_MOST_WORDS = 2**31 - 1
_MOST_WARPS = 32


def read(
    stack: jax.Array,
    layer: jax.Array,
    *,
    block: int = 4096,
    depth: int = 1,
    warps: int = 8,
    programs: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """sums[p] = the sum of what program p reads of layer `layer[0]`, in wrapping int32: sum(sums) = sum(stack[layer]).

    Every word of the layer is read once and next to nothing is written, so the time is that of reading. How the work
    is cut decides how near that comes to what the memory can do; the best cut is found by trying.

    Args:
        stack: int32 [L, words].
        layer: int32 [1], read by the kernel: the stack is not sliced. One out of range is taken as the nearest.
        block: words that a program loads at a time, a power of two.
        depth: blocks of which a program requests all before it uses the first.
        warps: warps of a program, a power of two. A lane loads block / (32 · warps) words of a block, four at a time.
        programs: programs P, which share the blocks; None, or more than there are blocks: one for each.
        interpret: run the body as plain XLA on any device.

    Returns:
        int32 [P].

    Raises:
        ValueError: words is not a multiple of `block`, or a number is not one of those admitted.
        NotImplementedError: `stack` or `layer` is not int32.
    """
    programs = _check(stack, "layer", layer, (1,), block, depth, warps, programs)
    return pl.pallas_call(
        functools.partial(read_kernel, block=block, depth=depth),
        out_shape=jax.ShapeDtypeStruct((programs,), jnp.int32),
        name="bandwidth_read",
        **_call(2, programs, warps, interpret),
    )(layer, stack)


def copy(
    stack: jax.Array,
    route: jax.Array,
    *,
    block: int = 4096,
    depth: int = 1,
    warps: int = 8,
    programs: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The stack with layer `route[1]` made equal to layer `route[0]`, in place where the stack is donated.

    Moves the layer's bytes twice, once in and once out. The two layers are to differ: copying one to itself is
    harmless and measures nothing.

    Args:
        stack: int32 [L, words].
        route: int32 [2], source and target layer, read by the kernel. One out of range is taken as the nearest.
        block: as for `read`; so are the arguments below and the errors.
        depth: as for `read`.
        warps: as for `read`.
        programs: as for `read`.
        interpret: as for `read`.

    Returns:
        int32 [L, words].
    """
    programs = _check(stack, "route", route, (2,), block, depth, warps, programs)
    return pl.pallas_call(
        functools.partial(copy_kernel, block=block, depth=depth),
        out_shape=jax.ShapeDtypeStruct(stack.shape, jnp.int32),
        input_output_aliases={1: 0},
        name="bandwidth_copy",
        **_call(2, programs, warps, interpret),
    )(route, stack)


def _call(inputs, programs, warps, interpret):
    return {
        "grid": (programs,),
        "in_specs": [ANYWHERE] * inputs,
        "out_specs": ANYWHERE,
        "compiler_params": plt.CompilerParams(num_warps=warps, num_stages=1),
        "interpret": interpret,
    }


def _check(stack, name, index, shape, block, depth, warps, programs) -> int:
    """The number of programs, once everything fits."""
    for array_name, array in (("stack", stack), (name, index)):
        if array.dtype != jnp.int32:
            raise NotImplementedError(f"{array_name} must be int32, got {array.dtype}")
    if stack.ndim != 2 or 0 in stack.shape:
        raise ValueError(f"stack must be [L, words] with at least one of each, got shape {stack.shape}")
    if index.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {index.shape}")
    for number_name, number, most in (("block", block, _MOST_WORDS), ("warps", warps, _MOST_WARPS)):
        if not 1 <= number <= most or number & (number - 1):
            raise ValueError(f"{number_name} must be a power of two of at most {most}, got {number}")
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    words = stack.shape[1]
    if words > _MOST_WORDS or words % block:
        raise ValueError(f"words must be a multiple of {block=} and at most {_MOST_WORDS}, got {words}")
    blocks = words // block
    if programs is None:
        return blocks
    if not 1 <= programs <= _MOST_PROGRAMS:
        raise ValueError(f"programs must be None or 1 to {_MOST_PROGRAMS}, got {programs}")
    return min(programs, blocks)
