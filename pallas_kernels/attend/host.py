"""The host functions: what they take, what they refuse, and the calls they build."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attend.kernel import (
    Attended,
    Partial,
    Placed,
    combine_kernel,
    partial_kernel,
    place_kernel,
)
from pallas_kernels.attend.tuning import MOST_SPLITS, Cut, choose_cut
from pallas_kernels.device import device_kind, gpu_objection
from pallas_kernels.limbs.host import GROUP, Split
from pallas_kernels.operands import ANYWHERE, check_operand, next_power_of_two

__all__ = ["Attended", "Placed", "attend", "place", "supported"]

MAX_HEAD_DIM = 256
"""The largest Hd for which the default cut is known not to spill registers."""
_MAX_PROGRAMS = 2**31 - 1
_MOST_TOKENS = 64
"""Rows of a sequence, at most."""
_TOGETHER = 8
"""Query heads that share one reading of keys and values, at most: a program holds the partial results of each."""
_COLUMNS = 64
"""Columns of a head that one program puts together."""


def supported(keys: Any, heads: int, *, limbs: int = 0, interpret: bool = False) -> str | None:
    """Why the kernels cannot take this cache [A, B, S, N, Hd] (anything with a shape and a dtype), or None if they can.

    `heads` is Nq, and `limbs` as for `attend`. Shapes of the other operands follow from these.
    """
    if len(keys.shape) != 5:
        return f"keys must have the axes [A, B, S, N, Hd], got shape {list(keys.shape)}"
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"keys must be float32 or bfloat16, got {keys.dtype}"
    if 0 in keys.shape:
        return f"every axis of keys [A, B, S, N, Hd] must be at least 1, got shape {list(keys.shape)}"
    _, batch, capacity, kv_heads, head_dim = keys.shape
    if head_dim > MAX_HEAD_DIM:
        return f"Hd must be at most {MAX_HEAD_DIM}, got {head_dim}"
    if limbs and head_dim % GROUP:
        return f"limbs of the output need Hd to be a multiple of {GROUP}, got {head_dim}"
    if max(capacity, batch * _MOST_TOKENS * (heads + kv_heads) * max(MOST_SPLITS, head_dim)) > _MAX_PROGRAMS:
        return f"rows, heads or slots must be fewer, got {heads} query heads and keys of shape {list(keys.shape)}"
    return None if interpret else gpu_objection()


def place(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array,
    weight_layer: jax.Array,
    position: jax.Array,
    writes: jax.Array,
    frequencies: jax.Array,
    eps: float,
    interpret: bool = False,
) -> Placed:
    """q and k ready for their scores, k and v put into their slot of the cache: one launch, in place.

    norm(x) = x · rsqrt(mean(x²) + eps) · (1 + w) over Hd;  RoPE turns components i and i + rd/2 of the first rd by
    position · frequencies[i];  q ← RoPE(norm(q)) · Hd^-1/2;  keys[layer, m mod B, position[m]] ← RoPE(norm(k)), and
    values likewise ← v, rounded to the dtype of the cache. There are M rows, a multiple of B, or as many: several
    tokens of a sequence must be at different positions.

    The cache that goes in and the one that comes out are the same memory once the caller donates it. Nothing is written
    for a row where `writes` is false or whose position is not a slot, nor if the layer does not exist. The same program
    gives the same bits, and a row's do not depend on the other rows. There is no derivative and no `vmap`.

    Args:
        q: float32 [M, Nq, 2·Hd], per head the query and then the output gate, which is not looked at.
        k: float32 [M, N, Hd], Nq a multiple of N.
        v: float32 [M, N, Hd].
        q_norm: float32 [Lw, Hd].
        k_norm: float32 [Lw, Hd].
        keys: float32 or bfloat16 [A, B, S, N, Hd].
        values: like keys.
        layer: int32 [1], of the cache.
        weight_layer: int32 [1], of the norms; one below 0 or beyond Lw - 1 is taken as 0 or Lw - 1.
        position: int32 [M].
        writes: bool or int32 [M].
        frequencies: float32 [rd/2], at most Hd/2 of them.
        eps: added to the mean of squares.
        interpret: run the kernel's body in plain XLA, on any device.

    Raises:
        ValueError: shapes that do not fit together.
        NotImplementedError: what `supported` says beforehand, or another dtype.
    """
    rows, heads, kv_heads, head_dim = _check_cache(keys, values, q, 0, interpret)
    check_operand("k", k, (rows, kv_heads, head_dim))
    check_operand("v", v, (rows, kv_heads, head_dim))
    check_operand("q_norm", q_norm, (*q_norm.shape[:1], head_dim))
    check_operand("k_norm", k_norm, q_norm.shape)
    check_operand("weight_layer", weight_layer, (1,), jnp.int32)
    _check_places(layer, position, rows)
    check_operand("writes", writes, (rows,), jnp.bool_, jnp.int32)
    check_operand("frequencies", frequencies, frequencies.shape[:1])
    if not 1 <= frequencies.size <= head_dim // 2:
        raise ValueError(f"there must be 1 to Hd/2 = {head_dim // 2} frequencies, got {frequencies.size}")

    def body(*refs):
        # The cache is referred to as what comes out.
        place_kernel(*[*refs[:10], Placed(*refs[12:])], eps=eps)

    return Placed(
        *_launch(
            "place",
            body,
            (heads + kv_heads, rows),
            (layer, weight_layer, q, k, v, q_norm, k_norm, frequencies, position, writes, keys, values),
            (
                jax.ShapeDtypeStruct((rows, heads, head_dim), jnp.float32),
                jax.ShapeDtypeStruct(keys.shape, keys.dtype),
                jax.ShapeDtypeStruct(values.shape, values.dtype),
            ),
            warps=1,
            interpret=interpret,
            input_output_aliases={10: 1, 11: 2},
        )
    )


def attend(
    q: jax.Array,
    gate_source: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array,
    position: jax.Array,
    split: Split | None = None,
    limbs: int = 0,
    cut: Cut | None = None,
    interpret: bool = False,
) -> Attended:
    """o = sum_s softmax_s(q · k_s) v_s · sigmoid(gate) over the slots s <= position of layer `layer`: two launches.

    Row m of M, a multiple of B or as many, attends to the slots of row m mod B of the cache. Query head h uses
    key-value head h // (Nq / N). The first launch shares the tiles of slots out among programs, each of which keeps a
    running largest score, sum of exponentials and sum of values; the second puts those together. What lies in other
    slots is never read. All arithmetic is multiply-and-add in float32. The order of the sums follows from the capacity
    and the cut alone, so the same program gives the same bits, and a row's do not depend on other rows.

    Without a slot to see (a position below 0), or a layer, o is NaN. There is no derivative and no `vmap`.

    Args:
        q: float32 [M, Nq, Hd], as `place` leaves it.
        gate_source: float32 [M, Nq, 2·Hd], per head the query, which is not looked at, and then the gate.
        keys: float32 or bfloat16 [A, B, S, N, Hd].
        values: like keys.
        layer: int32 [1].
        position: int32 [M]; one beyond the last slot is taken as the last slot.
        split: how to write o as limbs for a 4-bit product, traced into the kernel. Needs Hd to be a multiple of 32. The
            output then comes as digits and x_scales.
        limbs: how many `split` gives.
        cut: how the slots are divided; None chooses.
        interpret: run the kernels' bodies in plain XLA, on any device.

    Raises:
        ValueError: shapes that do not fit together, or a cut that is not one.
        NotImplementedError: what `supported` says beforehand, or another dtype.
    """
    rows, heads, kv_heads, head_dim = _check_cache(keys, values, gate_source, limbs if split else 0, interpret)
    check_operand("q", q, (rows, heads, head_dim))
    _check_places(layer, position, rows)
    layers, _, capacity = keys.shape[:3]
    slots, most, warps = _check_cut(choose_cut(device_kind(), head_dim, capacity) if cut is None else cut)
    splits = min(most, pl.cdiv(capacity, slots))
    ratio = heads // kv_heads
    together = max(n for n in range(1, _TOGETHER + 1) if ratio % n == 0)

    def partial_body(*refs):
        partial_kernel(*[*refs[:5], Partial(*refs[5:])], slots=slots, together=together)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    partial = Partial(
        *_launch(
            "attend_partial",
            partial_body,
            (splits, heads // together, rows),
            (layer, position, q, keys, values),
            Partial(
                largest=shape((rows, heads, splits)),
                total=shape((rows, heads, splits)),
                sums=shape((rows, heads, splits, head_dim)),
            ),
            warps=warps,
            interpret=interpret,
        )
    )

    columns = min(next_power_of_two(head_dim), _COLUMNS)
    if split is None:
        wanted = Attended(o=shape((rows, heads, head_dim)))
    else:
        wanted = Attended(
            digits=jax.ShapeDtypeStruct((limbs, rows, heads, head_dim), jnp.int8),
            x_scales=shape((rows, heads, head_dim // GROUP)),
        )
    flat, tree = jax.tree.flatten(wanted)

    def combine_body(*refs):
        combine_kernel(
            *[*refs[:3], Partial(*refs[3:6]), jax.tree.unflatten(tree, refs[6:])],
            layers=layers,
            capacity=capacity,
            slots=slots,
            columns=columns,
            split=split,
        )

    results = _launch(
        "attend_combine",
        combine_body,
        (pl.cdiv(head_dim, columns), heads, rows),
        (layer, position, gate_source, *partial),
        flat,
        warps=4,
        interpret=interpret,
    )
    # Heads, or groups by head, in one row.
    return jax.tree.unflatten(tree, [array.reshape(*array.shape[:-2], -1) for array in results])


def _launch(name, body, grid, operands, out_shape, *, warps, interpret, **options):
    """One kernel over whole arrays."""
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[ANYWHERE] * len(operands),
        out_specs=(ANYWHERE,) * len(out_shape),
        out_shape=tuple(out_shape),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
        **options,
    )(*operands)


def _check_cache(keys, values, projected, limbs, interpret):
    """M, Nq, N and Hd of a cache and a projection [M, Nq, 2·Hd] that the kernels can take."""
    rows, heads = projected.shape[:2] if projected.ndim == 3 else (keys.shape[1], 0)
    if reason := supported(keys, heads, limbs=limbs, interpret=interpret):
        raise NotImplementedError(f"{reason}; use the XLA implementation")
    _, batch, _, kv_heads, head_dim = keys.shape
    if heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key-value heads N = {kv_heads}, got a projection [M, Nq, 2·Hd] of "
            f"shape {list(projected.shape)}"
        )
    if rows % batch or not batch <= rows <= _MOST_TOKENS * batch:
        raise ValueError(f"rows must be 1 to {_MOST_TOKENS} times the cache's B = {batch}, got {rows}")
    check_operand("the projection of queries and gates", projected, (rows, heads, 2 * head_dim))
    check_operand("values", values, keys.shape, keys.dtype)
    return rows, heads, kv_heads, head_dim


def _check_places(layer, position, rows):
    check_operand("layer", layer, (1,), jnp.int32)
    check_operand("position", position, (rows,), jnp.int32)


def _check_cut(cut):
    for name, value, most in (("slots", cut.slots, 1024), ("splits", cut.splits, 1024), ("warps", cut.warps, 32)):
        if not 1 <= value <= most or value & (value - 1):
            raise ValueError(f"cut.{name} must be a power of two of at most {most}, got {value}")
    return cut
