"""What Mosaic kernels do with registers, emulated: arrays dealt to 128 threads as layouts say, and collected again.

Interpret mode has no rule for `inline_mgpu`. `emulated_inline` stands for it: the kernel's own code runs on registers
that hold the values of all threads at once, and what it does with single values is emulated beside the tests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["Memory", "Registers", "deal", "emulated_inline"]

THREADS = 128


def deal(layout, array):
    """[...] -> [128 threads, registers, elements of a register], as a tiled layout says."""
    for tile in layout.tiling.tiles:
        lead = array.ndim - len(tile)
        counts = [n for size, part in zip(array.shape[lead:], tile, strict=True) for n in (size // part, part)]
        array = array.reshape(*array.shape[:lead], *counts)
        array = array.transpose(*range(lead), *range(lead, array.ndim, 2), *range(lead + 1, array.ndim, 2))
    threads = (*layout.warp_dims, *layout.lane_dims)
    axes = [d % array.ndim for d in threads if not isinstance(d, plgpu.Replicated)]
    array = array.transpose(*axes, *(d for d in range(array.ndim) if d not in axes))
    for axis, d in enumerate(threads):
        if isinstance(d, plgpu.Replicated):
            shape = (*array.shape[:axis], d.times, *array.shape[axis:])
            array = jnp.broadcast_to(jnp.expand_dims(array, axis), shape)
    return array.reshape(THREADS, -1, array.shape[-1])


class Registers:
    """Stands for the array of a warpgroup: each register holds [128, elements], the values of all threads."""

    def __init__(self, registers, layout, shape):
        self.registers = np.fromiter(registers, object).reshape(layout.registers_shape(shape))
        self.layout, self.shape = layout, shape

    @classmethod
    def of(cls, layout, array):
        """An array, dealt."""
        dealt = deal(layout, array)
        return cls((dealt[:, i] for i in range(dealt.shape[1])), layout, array.shape)

    def foreach(self, function):
        """`function` of every element that a thread has, and its place in the array."""
        axes = (lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in range(len(self.shape)))
        places = [Registers.of(self.layout, axis) for axis in axes]
        for values, *where in zip(self.registers.flat, *(place.registers.flat for place in places), strict=True):
            for i in range(values.shape[1]):
                function(values[:, i], [axis[:, i] for axis in where])


class Memory:
    """Stands for a reference: read as a whole, or written by all threads at once, element after element."""

    def __init__(self, reference):
        self.reference, self.written = reference, None

    def read(self):
        """The array."""
        return self.reference[...]

    def store(self, values, place):
        """An element of every thread; what no thread writes becomes NaN."""
        if self.written is None:
            self.written = jnp.full(self.reference.shape, jnp.nan, self.reference.dtype)
        self.written = self.written.at[tuple(place)].set(values)

    def settle(self):
        """Write what was stored."""
        if self.written is not None:
            self.reference[...] = self.written


def emulated_inline(*, arg_types, return_type=None):
    """As `plgpu.inline_mgpu`, for references and for arrays in tiled layouts."""

    def handed(kind, argument):
        return Memory(argument) if isinstance(kind, plgpu.RefType) else Registers.of(kind.to_mgpu(), argument)

    def decorate(body):
        def call(*arguments):
            handed_over = jax.tree.map(handed, tuple(arg_types), arguments)
            result = body(None, *handed_over)
            for memory in jax.tree.leaves(handed_over):
                if isinstance(memory, Memory):
                    memory.settle()
            if return_type is None:
                return None
            collect = jax.linear_transpose(
                functools.partial(deal, result.layout), jax.ShapeDtypeStruct(return_type.shape, return_type.dtype)
            )
            return collect(jnp.stack(list(result.registers.flat), axis=1))[0]

        return call

    return decorate
