"""The kernel body: a program owns a row of a gate, or a block of rows of qkv or of z from product to epilogue."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.operands import next_power_of_two
from pallas_kernels.q4_gemv.kernel import row_products
from pallas_kernels.q4_gemv.tuning import Tile

__all__ = ["Gated", "Gates", "InputWeights", "LayerInput", "convolve", "project_gates_body", "project_in_body"]


class Gates(NamedTuple):
    """What the kernel makes of the products with b and a, traced into it; float32 [1] in and out."""

    beta: Callable[[jax.Array], jax.Array]
    """W_b x -> beta."""
    g: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    """W_a x, dt_bias, A_log -> g."""


class InputWeights(NamedTuple):
    """Stacked weights of the input half of a layer; `qkv` and `z` are pairs (codes, scales) as `q4_gemv` takes them."""

    qkv: Any
    """[Lw, C, D] in 4 bits."""
    z: Any
    """[Lw, H·V, D] in 4 bits."""
    b: Any
    """float32 [Lw, H, D]."""
    a: Any
    """float32 [Lw, H, D]."""
    conv: Any
    """float32 [Lw, C, W], oldest tap first."""
    dt_bias: Any
    """float32 [Lw, H]."""
    A_log: Any
    """float32 [Lw, H]."""


class LayerInput(NamedTuple):
    """What the input half of a layer leaves."""

    history: Any
    """float32 [L, B, W-1, C], in place."""
    xcv: Any
    """float32 [B, C], after convolution and SiLU."""
    z: Any
    """float32 [B, H·V]."""
    beta: Any
    """float32 [B, H]."""
    g: Any
    """float32 [B, H], log decay."""
    xc: Any
    """float32 [B, C], the convolution's input; like b and a None unless kept."""
    b: Any
    """float32 [B, H], raw."""
    a: Any
    """float32 [B, H], raw."""


class Gated(NamedTuple):
    """The gates of M tokens, float32 [M, H] all."""

    beta: Any
    g: Any
    b: Any
    """Raw."""
    a: Any
    """Raw."""


_COLUMNS = 512
"""Columns of b or a per step: longer steps would cost the programs of products registers, and so some of their number;
shorter ones, each a wait for memory, would outlast the products."""
_COLUMNS_ALONE = 8192
"""The same where nothing else runs: one wait, as a rule."""


def project_in_body(
    layer_ref,  # int32 [1], of the history
    weight_layer_ref,  # int32 [1], of the weights
    x_ref,  # float32 [B, D]
    digits_ref,  # int32 [limbs, B, D/32, 8], the bytes of a group in order
    x_scales_ref,  # float32 [B, D/32]
    w,  # InputWeights of refs; codes uint32 [Lw, N, D/32, 4]
    history_ref,  # float32 [L, B, W-1, C], or None where W = 1
    active_ref,  # bool or int32 [B], or None
    out,  # LayerInput of refs; history the same memory as history_ref
    *,
    gates: Gates,
    tile: Tile,
    interpret: bool,
):
    """Grid: a program per row of b and of a; blocks of rows of qkv, each row a channel; blocks of rows of z."""
    program = pl.program_id(0)
    weight_layers, channels, width = w.conv.shape
    heads, values, batch = w.b.shape[1], out.z.shape[1], x_ref.shape[0]
    weight_layer = jnp.clip(weight_layer_ref[0], 0, weight_layers - 1)
    conv_first = 2 * heads
    z_first = conv_first + pl.cdiv(channels, tile.rows)

    def products(first_row, matrix):
        operands = (weight_layer_ref, digits_ref, x_scales_ref, *matrix)
        return row_products(first_row, *operands, tile=tile, interpret=interpret)

    # These programs come first, since they take longest.
    @pl.when(program < heads)
    def _beta():
        head = pl.ds(program, 1)
        for row, raw in enumerate(_dense_row(w.b, weight_layer, program, x_ref, range(batch), _COLUMNS)):
            _store_gate(out.b, out.beta, row, head, raw, gates.beta(raw))

    @pl.when((program >= heads) & (program < conv_first))
    def _g():
        head = pl.ds(program - heads, 1)
        dt_bias, a_log = w.dt_bias[weight_layer, head], w.A_log[weight_layer, head]
        for row, raw in enumerate(_dense_row(w.a, weight_layer, program - heads, x_ref, range(batch), _COLUMNS)):
            _store_gate(out.a, out.g, row, head, raw, gates.g(raw, dt_bias, a_log))

    @pl.when((program >= conv_first) & (program < z_first))
    def _conv():
        first_row = (program - conv_first) * tile.rows
        # Asked for before the products, what the convolution needs arrives meanwhile.
        channel = jnp.minimum(first_row + jnp.arange(tile.rows, dtype=jnp.int32), channels - 1)
        kernel = [w.conv[weight_layer, channel, j] for j in range(width)]
        frames = [_frames(history_ref, layer_ref, b, channel) for b in range(batch)]
        row, xcs = products(first_row, w.qkv)
        for b, xc in enumerate(xcs):
            if out.xc is not None:
                plt.store(out.xc.at[b, row], xc, mask=row < channels)
            window = [*frames[b], xc]
            plt.store(out.xcv.at[b, row], convolve(window, kernel), mask=row < channels)
            _store_history(out.history, layer_ref, active_ref, b, row, window[1:])

    @pl.when(program >= z_first)
    def _z():
        row, zs = products((program - z_first) * tile.rows, w.z)
        for b, value in enumerate(zs):
            plt.store(out.z.at[b, row], value, mask=row < values)


def project_gates_body(
    weight_layer_ref,  # int32 [1]
    x_ref,  # float32 [M, D]
    b_ref,  # float32 [Lw, H, D]
    a_ref,  # float32 [Lw, H, D]
    dt_bias_ref,  # float32 [Lw, H]
    a_log_ref,  # float32 [Lw, H]
    out,  # Gated of refs
    *,
    gates: Gates,
    rows: int,
):
    """One head of b or of a for some rows of x; grid (2H, blocks of rows)."""
    program, first = pl.program_id(0), pl.program_id(1) * rows
    weight_layers, heads, _ = b_ref.shape
    weight_layer = jnp.clip(weight_layer_ref[0], 0, weight_layers - 1)
    last = x_ref.shape[0] - 1
    # Rows past the end are the last one again, and write what it writes.
    own = [jnp.minimum(first + i, last) for i in range(rows)]

    @pl.when(program < heads)
    def _beta():
        head = pl.ds(program, 1)
        for row, raw in zip(own, _dense_row(b_ref, weight_layer, program, x_ref, own, _COLUMNS_ALONE), strict=True):
            _store_gate(out.b, out.beta, row, head, raw, gates.beta(raw))

    @pl.when(program >= heads)
    def _g():
        head = pl.ds(program - heads, 1)
        dt_bias, a_log = dt_bias_ref[weight_layer, head], a_log_ref[weight_layer, head]
        products = _dense_row(a_ref, weight_layer, program - heads, x_ref, own, _COLUMNS_ALONE)
        for row, raw in zip(own, products, strict=True):
            _store_gate(out.a, out.g, row, head, raw, gates.g(raw, dt_bias, a_log))


def convolve(window, weights):
    """silu(sum_j weights[j] · window[j]) per channel, the oldest frame first, added in this order."""
    taps = [frame * weight for frame, weight in zip(window, weights, strict=True)]
    return jax.nn.silu(functools.reduce(operator.add, taps))


def _dense_row(w_ref, layer, row, x_ref, rows, most):
    """sum_j w[layer, row, j] · x[m, j] for each m of `rows`, [1], in float32.

    Partial sums per column of a step, of at most so many, and then a tree.
    """
    columns = x_ref.shape[1]
    size = min(most, next_power_of_two(columns))

    def step(i, totals):
        column = i * size + jnp.arange(size, dtype=jnp.int32)
        inside = column < columns
        w = plt.load(w_ref.at[layer, row, column], mask=inside, other=0.0)
        xs = [plt.load(x_ref.at[m, column], mask=inside, other=0.0) for m in rows]
        return tuple(total + w * x for total, x in zip(totals, xs, strict=True))

    totals = (jnp.zeros((size,), jnp.float32),) * len(rows)
    totals = lax.fori_loop(0, pl.cdiv(columns, size), step, totals)
    return [jnp.broadcast_to(jnp.sum(total), (1,)) for total in totals]


def _store_gate(raw_ref, gate_ref, row, head, raw, gate):
    gate_ref[row, head] = gate
    if raw_ref is not None:
        raw_ref[row, head] = raw


def _frames(history_ref, layer_ref, b, channel):
    """The past frames of some channels of row b, oldest first."""
    if history_ref is None:
        return []
    layers, _, frames, _ = history_ref.shape
    layer = jnp.clip(layer_ref[0], 0, layers - 1)
    return [history_ref[layer, b, frame, channel] for frame in range(frames)]


def _store_history(history_ref, layer_ref, active_ref, b, row, frames):
    """The next past frames of some channels of row b, which no other program reads or writes."""
    if history_ref is None:
        return
    layers, _, _, channels = history_ref.shape
    layer = layer_ref[0]
    live = (layer >= 0) & (layer < layers)
    if active_ref is not None:
        live &= active_ref[b].astype(jnp.bool_)
    for frame, value in enumerate(frames):
        plt.store(history_ref.at[jnp.clip(layer, 0, layers - 1), b, frame, row], value, mask=(row < channels) & live)
