"""Kernel bodies for the Triton backend: streams that do nothing but load, or load and store.

Programs share the blocks of one layer as dealt cards: program p takes blocks p, p + P, p + 2P, … of P programs. So at
any time the programs together read one window of memory that moves from its start to its end.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

__all__ = ["copy_kernel", "read_kernel"]


def read_kernel(layer_ref, stack_ref, sums_ref, *, block: int, depth: int):
    """sums[p] = the sum of all words of program p's blocks of layer layer[0], in wrapping int32.

    Refs: layer int32 [1]; stack int32 [L, words]; sums int32 [P]. The sum is what keeps the loads alive.
    """
    layer = _layer(layer_ref, 0, stack_ref)

    def add(blocks, total):
        # All loads of a step come before the first use of one: that many are in flight.
        loaded = [_load(stack_ref, layer, first, block) for first in blocks]
        return functools.reduce(jnp.add, loaded, total)

    total = _over_blocks(add, stack_ref.shape[1] // block, block, depth, jnp.zeros((block,), jnp.int32))
    sums_ref[pl.program_id(0)] = jnp.sum(total)


def copy_kernel(route_ref, stack_ref, new_stack_ref, *, block: int, depth: int):
    """Words of layer route[0] into layer route[1], in place.

    Refs: route int32 [2]; stack int32 [L, words]; new_stack, the same memory.
    """
    source, target = (_layer(route_ref, i, stack_ref) for i in (0, 1))

    def move(blocks, carry):
        loaded = [_load(stack_ref, source, first, block) for first in blocks]
        for first, words in zip(blocks, loaded, strict=True):
            plt.store(new_stack_ref.at[target, pl.ds(first, block)], words, eviction_policy="evict_first")
        return carry

    _over_blocks(move, stack_ref.shape[1] // block, block, depth, jnp.int32(0))


def _over_blocks(step, blocks, block, depth, carry):
    """`step(first words of the blocks, carry)` over this program's blocks, `depth` at a time, then those left over."""
    program, programs = pl.program_id(0), pl.num_programs(0)
    mine = (blocks - program + programs - 1) // programs

    def several(count, start, i, carry):
        turns = [start + i * count + d for d in range(count)]
        return step([(program + turn * programs) * block for turn in turns], carry)

    whole = mine // depth
    carry = lax.fori_loop(0, whole, functools.partial(several, depth, 0), carry)
    if depth == 1:
        return carry
    return lax.fori_loop(0, mine - whole * depth, functools.partial(several, 1, whole * depth), carry)


def _layer(ref, i, stack_ref):
    """A layer index that cannot leave the stack, whatever it was given as."""
    return jnp.clip(ref[i], 0, stack_ref.shape[0] - 1)


def _load(stack_ref, layer, first, block):
    # Nothing is read twice, so nothing need stay in cache.
    return plt.load(stack_ref.at[layer, pl.ds(first, block)], eviction_policy="evict_first")
