"""The host function: what the kernel takes, the checks, and the launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import q4_gemv
from pallas_kernels.device import device_kind, gpu_objection
from pallas_kernels.operands import ANYWHERE, check_operand
from pallas_kernels.project_in.kernel import (
    Gated,
    Gates,
    InputWeights,
    LayerInput,
    project_gates_body,
    project_in_body,
)
from pallas_kernels.q4_gemv.host import digit_words, grouped_codes

__all__ = [
    "Gated",
    "Gates",
    "InputWeights",
    "LayerInput",
    "gates_supported",
    "project_gates",
    "project_in",
    "supported",
]

_GATE_ROWS = 8
"""Rows of x that one reading of b or a serves, at most: a program holds a step's columns of each."""
_GATE_WARPS = 16
_MOST_ROWS = 1 << 16


def project_in(
    w: InputWeights,
    history: jax.Array,
    x: jax.Array,
    digits: jax.Array,
    x_scales: jax.Array,
    *,
    layer: jax.Array,
    weight_layer: jax.Array,
    gates: Gates,
    active: jax.Array | None = None,
    keep: bool = False,
    tile: q4_gemv.Tile | None = None,
    interpret: bool = False,
) -> LayerInput:
    """The input half of a GDN layer for one token, in one launch; the history advances in place.

    xc = W_qkv x and z = W_z x from the limbs of x, as `q4_gemv`; beta = gates.beta(W_b x) and
    g = gates.g(W_a x, dt_bias, A_log) from x itself, in float32; xcv = silu(sum_j conv[c, j] · window[j, c]),
    window = [history, xc]; then the window without its oldest frame is the history of that layer and row.

    The history that goes in and the one that comes out are the same memory once the caller donates it. The same
    program gives the same bits, and a row's do not depend on the other rows. There is no derivative and no `vmap`.

    Args:
        w: stacked weights.
        history: float32 [L, B, W-1, C], oldest frame first.
        x: float32 [B, D].
        digits: limbs of x, int8 [limbs, B, D].
        x_scales: their scales, float32 [B, D/32].
        layer: int32 [1], of the history. Where it does not exist no history changes.
        weight_layer: int32 [1]; one below 0 or beyond Lw - 1 is taken as 0 or Lw - 1.
        gates: traced into the kernel.
        active: bool or int32 [B]; where it is false the history stays as it is, bit for bit. None: all true.
        keep: also keep xc, b and a.
        tile: how to cut the products; chosen by device and shape unless given.
        interpret: run the same body as plain XLA on any backend.

    Raises:
        ValueError: shapes that do not fit together.
        NotImplementedError: what `supported` says beforehand, or another dtype.
    """
    limbs, batch, columns = digits.shape
    layers, channels, width = w.conv.shape
    heads, values = w.b.shape[1], w.z[0].shape[1]
    check_operand("conv", w.conv, (layers, channels, width))
    for name, array in (("b", w.b), ("a", w.a)):
        check_operand(name, array, (layers, heads, columns))
    for name, array in (("dt_bias", w.dt_bias), ("A_log", w.A_log)):
        check_operand(name, array, (layers, heads))
    for name, rows, (codes, scales) in (("qkv", channels, w.qkv), ("z", values, w.z)):
        check_operand(f"codes of {name}", codes, (layers, rows, columns // 8), jnp.uint32)
        check_operand(f"scales of {name}", scales, (layers, rows, columns // q4_gemv.GROUP), jnp.float16)
    check_operand("history", history, (history.shape[0], batch, width - 1, channels))
    check_operand("x", x, (batch, columns))
    check_operand("digits", digits, (limbs, batch, columns), jnp.int8)
    check_operand("x_scales", x_scales, (batch, columns // q4_gemv.GROUP))
    check_operand("layer", layer, (1,), jnp.int32)
    check_operand("weight_layer", weight_layer, (1,), jnp.int32)
    if active is not None:
        check_operand("active", active, (batch,), jnp.bool_, jnp.int32)
    if reason := supported(layers, channels, values, columns, batch, limbs, interpret=interpret):
        raise NotImplementedError(f"project_in: {reason}")
    cut = q4_gemv.choose_tile(device_kind(), channels + values, columns, batch, limbs).tile if tile is None else tile

    frames = None if width == 1 else history
    w = w._replace(qkv=grouped_codes(w.qkv), z=grouped_codes(w.z))
    operands = (layer, weight_layer, x, digit_words(digits), x_scales, w, frames, active)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    kept = [shape((batch, n)) if keep else None for n in (channels, heads, heads)]
    out_shape = LayerInput(
        None if frames is None else shape(frames.shape),
        *(shape((batch, n)) for n in (channels, values, heads, heads)),
        *kept,
    )
    flat_operands, in_tree = jax.tree.flatten(operands)
    flat_out, out_tree = jax.tree.flatten(out_shape)

    def body(*refs: Any):
        inputs = jax.tree.unflatten(in_tree, refs[: len(flat_operands)])
        out = jax.tree.unflatten(out_tree, refs[len(flat_operands) :])
        project_in_body(*[*inputs, out], gates=gates, tile=cut, interpret=interpret)

    aliases = {i: 0 for i, operand in enumerate(flat_operands) if operand is frames}
    results = pl.pallas_call(
        body,
        out_shape=tuple(flat_out),
        grid=(2 * heads + pl.cdiv(channels, cut.rows) + pl.cdiv(values, cut.rows),),
        in_specs=[ANYWHERE] * len(flat_operands),
        out_specs=(ANYWHERE,) * len(flat_out),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=1),
        interpret=interpret,
        name="project_in",
    )(*flat_operands)
    made = jax.tree.unflatten(out_tree, results)
    return made._replace(history=history) if made.history is None else made


def project_gates(
    x: jax.Array,
    b: jax.Array,
    a: jax.Array,
    dt_bias: jax.Array,
    A_log: jax.Array,
    *,
    weight_layer: jax.Array,
    gates: Gates,
    interpret: bool = False,
) -> Gated:
    """The gates of a GDN layer alone, for the rows of x, in one launch: what `project_in` makes of b and a.

    What `project_in` does not take has its products elsewhere, and its gates here. The same program gives the same
    bits, and a row's do not depend on the other rows. There is no derivative and no `vmap`.

    Args:
        x: float32 [M, D].
        b: float32 [Lw, H, D].
        a: float32 [Lw, H, D].
        dt_bias: float32 [Lw, H].
        A_log: float32 [Lw, H].
        weight_layer: int32 [1]; one below 0 or beyond Lw - 1 is taken as 0 or Lw - 1.
        gates: traced into the kernel.
        interpret: run the same body as plain XLA on any backend.

    Raises:
        ValueError: shapes that do not fit together.
        NotImplementedError: what `gates_supported` says beforehand, or another dtype.
    """
    layers, heads = A_log.shape
    rows, columns = x.shape
    check_operand("x", x, (rows, columns))
    for name, array in (("b", b), ("a", a)):
        check_operand(name, array, (layers, heads, columns))
    for name, array in (("dt_bias", dt_bias), ("A_log", A_log)):
        check_operand(name, array, (layers, heads))
    check_operand("weight_layer", weight_layer, (1,), jnp.int32)
    if reason := gates_supported(rows, interpret=interpret):
        raise NotImplementedError(f"project_gates: {reason}")
    together = min(rows, _GATE_ROWS)

    def body(*refs: Any):
        project_gates_body(*[*refs[:6], Gated(*refs[6:])], gates=gates, rows=together)

    return Gated(
        *pl.pallas_call(
            body,
            out_shape=(jax.ShapeDtypeStruct((rows, heads), jnp.float32),) * len(Gated._fields),
            grid=(2 * heads, pl.cdiv(rows, together)),
            in_specs=[ANYWHERE] * 6,
            out_specs=(ANYWHERE,) * len(Gated._fields),
            compiler_params=plt.CompilerParams(num_warps=_GATE_WARPS, num_stages=1),
            interpret=interpret,
            name="project_gates",
        )(weight_layer, x, b, a, dt_bias, A_log)
    )


def gates_supported(rows: int, *, interpret: bool = False) -> str | None:
    """None where `project_gates` takes so many rows, else why not."""
    if not 1 <= rows < _MOST_ROWS:
        return f"rows must be from 1 to {_MOST_ROWS - 1}, got {rows}"
    return None if interpret else gpu_objection()


def supported(
    layers: int, channels: int, values: int, columns: int, batch: int, limbs: int, *, interpret: bool = False
) -> str | None:
    """None where `project_in` takes such a layer, else why not."""
    shapes = [(layers, channels, columns), (layers, values, columns)]
    return q4_gemv.supported(shapes, batch, limbs, interpret=interpret)
