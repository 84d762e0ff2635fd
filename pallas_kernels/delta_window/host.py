"""The host functions: what they take, what they refuse, and the calls they build."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import delta_step
from pallas_kernels.delta_step.host import check_key_heads, tile_sizes
from pallas_kernels.delta_step.tuning import Tiles
from pallas_kernels.delta_window.kernel import Kept, WindowOutput, fold_kernel, history_kernel, look_kernel, norm_kernel
from pallas_kernels.delta_window.tuning import choose_tiles
from pallas_kernels.device import device_kind, gpu_objection
from pallas_kernels.limbs.host import GROUP, Split
from pallas_kernels.operands import ANYWHERE, check_operand, next_power_of_two

__all__ = ["MAX_TOKENS", "Kept", "WindowOutput", "delta_window_fold", "delta_window_look", "supported"]

MAX_TOKENS = 16
"""The longest window: of more tokens the chunked form is the better way."""
_MAX_PROGRAMS = 2**31 - 1
_HISTORY_BLOCK = 1024
"""Channels of the history in one program."""
_HISTORY_WARPS = 4
_NORM_WARPS = 1
_ONE = pl.BlockSpec((1,), lambda *_: (0,))


class _Result(NamedTuple):
    """An output of a kernel, and the block of it that a program writes."""

    shape: Any
    spec: Any


def supported(state: Any, tokens: int, *, interpret: bool = False) -> str | None:
    """Why the kernels cannot take a window of T tokens of this state [L, B, H, K, V], or None if they can.

    The state may be anything with a shape and a dtype; shapes of the other operands follow from it.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        return f"a window must have from 1 to {MAX_TOKENS} tokens, got T = {tokens}"
    if reason := delta_step.supported(state, interpret=True):
        return reason
    layers, batch, heads, _, value_dim = state.shape
    if layers * batch * heads * value_dim > _MAX_PROGRAMS:
        return f"L·B·H·V must be at most {_MAX_PROGRAMS}, got {layers * batch * heads * value_dim}"
    return None if interpret else gpu_objection()


def delta_window_look(
    state: jax.Array,
    conv_hist: jax.Array,
    layer: jax.Array,
    xc: jax.Array,
    conv_weight: jax.Array,
    z: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    norm_weight: jax.Array,
    *,
    weight_layer: jax.Array,
    key_heads: int,
    qk_eps: float,
    eps: float,
    lengths: jax.Array | None = None,
    kept: Kept | None = None,
    split: Split | None = None,
    limbs: int = 0,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> WindowOutput:
    """What one layer makes of every token of a window, from the convolution's input to the output projection's.

    Token by token, xcv = silu(sum_j conv_weight[c, j] · frame[j, c]) over the last W frames of [history, xc]; then what
    `delta_layer_step` does with xcv, on a copy of S in registers. State and history are read once and not written. A
    layer out of range gives NaN. The same program gives the same bits, and a row's do not depend on the other rows.
    There is no derivative.

    Args:
        state: float32 [L, B, H, K, V].
        conv_hist: float32 [L, B, W-1, C], oldest frame first; C = 2GK + HV.
        layer: int32 [1], of state and history, read by the kernel.
        xc: float32 [T, B, C], the convolution's inputs.
        conv_weight: float32 [Lw, C, W], oldest tap first.
        z: float32 [T, B, H, V], raw gate of the output norm.
        beta: float32 [T, B, H], write strength.
        g: float32 [T, B, H], log decay.
        norm_weight: float32 [Lw, V].
        weight_layer: int32 [1], read by the kernel; one below 0 or beyond Lw - 1 is taken as 0 or Lw - 1.
        key_heads: G.
        qk_eps: epsilon of the q/k norm, on the sum of squares.
        eps: epsilon of the gated norm, on the mean of squares.
        lengths: int32 [B], clipped to 0 … T: the output of tokens from there on is 0, and what they hold leaves no
            trace. None: all T.
        kept: the operands of a fold, of all layers, in which xc, beta and g of this layer's tokens (up to lengths[b],
            and if the layer exists) are put where they belong. What goes in and what comes out are the same memory once
            the caller donates it.
        split: how to write the output as limbs for a 4-bit product, as in `delta_layer_step`.
        limbs: how many `split` gives.
        tiles: what one program takes. Whole heads come in one launch; in blocks of columns, the norm in a second one.
        interpret: run the kernels' bodies in plain XLA, on any device.

    Raises:
        ValueError: shapes that do not fit together, or tiles that are not powers of two.
        NotImplementedError: sizes or dtypes beyond the kernels, as `supported` words them.
    """
    tokens, batch, heads, key_dim, value_dim = _check_window(
        state, conv_hist, xc, conv_weight, beta, g, key_heads=key_heads, interpret=interpret
    )
    check_operand("layer", layer, (1,), jnp.int32)
    check_operand("weight_layer", weight_layer, (1,), jnp.int32)
    check_operand("z", z, (tokens, batch, heads, value_dim))
    check_operand("norm_weight", norm_weight, (conv_weight.shape[0], value_dim))
    if lengths is not None:
        check_operand("lengths", lengths, (batch,), jnp.int32)
    if kept is not None:
        for name, array, one in zip(Kept._fields, kept, (xc, beta, g), strict=True):
            check_operand(f"kept.{name}", array, (state.shape[0], *one.shape))
    if split is not None and value_dim % GROUP:
        raise NotImplementedError(f"limbs of the output need V to be a multiple of {GROUP}, got V = {value_dim}")
    keys, block_v, warps = _tiles("delta_window_look", state, tiles)
    columns = next_power_of_two(value_dim)
    whole = block_v == columns

    of_columns = pl.BlockSpec((tokens, None, None, block_v), lambda i, h, b: (0, b, h, i))
    of_head = pl.BlockSpec((tokens, None, None), lambda i, h, b: (0, b, h))
    all_tokens = (state.shape[0], tokens, None)
    of_kept = Kept(
        xc=pl.BlockSpec((*all_tokens, xc.shape[2]), lambda i, h, b: (0, 0, b, 0)),
        beta=pl.BlockSpec((*all_tokens, None), lambda i, h, b: (0, 0, b, h)),
        g=pl.BlockSpec((*all_tokens, None), lambda i, h, b: (0, 0, b, h)),
    )
    norm = {"value_dim": value_dim, "eps": eps}
    form = {"split": split, "limbs": limbs} if whole else {"split": None, "limbs": 0}
    made = _launch(
        functools.partial(
            look_kernel, key_heads=key_heads, key_dim=key_dim, qk_eps=qk_eps, split=form["split"], **norm
        ),
        (pl.cdiv(value_dim, block_v), heads, batch),
        [
            (kept, of_kept),
            (layer, _ONE),
            (state, pl.BlockSpec((state.shape[0], None, None, keys, block_v), lambda i, h, b: (0, b, h, 0, i))),
            (
                _frames(conv_hist),
                pl.BlockSpec((conv_hist.shape[0], None, *conv_hist.shape[2:]), lambda i, h, b: (0, b, 0, 0)),
            ),
            (xc, pl.BlockSpec((tokens, None, xc.shape[2]), lambda i, h, b: (0, b, 0))),
            (conv_weight, pl.BlockSpec(conv_weight.shape, lambda *_: (0, 0, 0))),
            (weight_layer, _ONE),
            (z if whole else None, of_columns),
            (beta, of_head),
            (g, of_head),
            (norm_weight if whole else None, pl.BlockSpec((norm_weight.shape[0], block_v), lambda *_: (0, 0))),
            (lengths, pl.BlockSpec((None,), lambda i, h, b: (b,))),
        ],
        _output((tokens, None), lambda i, h, b: (0, b, h, i), z.shape, block_v, **form)._replace(
            kept=kept and Kept(*(_Result(*pair) for pair in zip(map(_struct, kept), of_kept, strict=True)))
        ),
        warps,
        "delta_window_look",
        interpret,
        in_place=kept is not None,
    )
    if not whole:
        kept = made.kept
        of_token = pl.BlockSpec((None, None, None, columns), lambda h, b, t: (t, b, h, 0))
        made = _launch(
            functools.partial(norm_kernel, split=split, **norm),
            (heads, batch, tokens),
            [
                (made.onn, of_token),
                (z, of_token),
                (norm_weight, pl.BlockSpec((norm_weight.shape[0], columns), lambda *_: (0, 0))),
                (weight_layer, _ONE),
                (lengths, pl.BlockSpec((None,), lambda h, b, t: (b,))),
            ],
            _output((None, None), lambda h, b, t: (t, b, h, 0), z.shape, columns, split, limbs),
            _NORM_WARPS,
            "delta_window_norm",
            interpret,
        )._replace(kept=kept)
    if split is None:
        return made
    return made._replace(
        digits=made.digits.reshape(limbs, tokens * batch, heads * value_dim),
        x_scales=made.x_scales.reshape(tokens * batch, heads * value_dim // GROUP),
    )


def delta_window_fold(
    state: jax.Array,
    conv_hist: jax.Array,
    xc: jax.Array,
    conv_weight: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    counts: jax.Array,
    *,
    key_heads: int,
    qk_eps: float,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The first counts[b] tokens of row b's window taken into the state, in all layers at once, in place.

    S becomes what `delta_window_look` had in registers after that token, bit for bit where both have the same tiles;
    the history becomes the last W-1 frames of [history, xc[:counts[b]]]. A row that takes none is neither read nor
    written. State and history that go in and come out are the same memory once the caller donates them. The same
    program gives the same bits, and a row's do not depend on the other rows. There is no derivative.

    Args:
        state: float32 [L, B, H, K, V].
        conv_hist: float32 [L, B, W-1, C], oldest frame first; C = 2GK + HV.
        xc: float32 [L, T, B, C], the convolution's inputs.
        conv_weight: float32 [L, C, W], oldest tap first.
        beta: float32 [L, T, B, H], write strength.
        g: float32 [L, T, B, H], log decay.
        counts: int32 [B], clipped to 0 … T; what later tokens hold leaves no trace.
        key_heads: G.
        qk_eps: epsilon of the q/k norm, on the sum of squares.
        tiles: what one program takes.
        interpret: run the kernels' bodies in plain XLA, on any device.

    Returns:
        The next state and history.

    Raises:
        ValueError: shapes that do not fit together, or tiles that are not powers of two.
        NotImplementedError: sizes or dtypes beyond the kernels, as `supported` words them.
    """
    tokens, batch, heads, key_dim, value_dim = _check_window(
        state, conv_hist, xc, conv_weight, beta, g, key_heads=key_heads, interpret=interpret, lead=state.shape[:1]
    )
    layers, channels, width = conv_weight.shape
    check_operand("conv_weight", conv_weight, (state.shape[0], channels, width))
    check_operand("counts", counts, (batch,), jnp.int32)
    keys, block_v, warps = _tiles("delta_window_fold", state, tiles)

    of_state = pl.BlockSpec((None, None, None, keys, block_v), lambda i, h, b, n: (n, b, h, 0, i))
    of_head = pl.BlockSpec((None, tokens, None, None), lambda i, h, b, n: (n, 0, b, h))
    state = _launch(
        functools.partial(fold_kernel, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, qk_eps=qk_eps),
        (pl.cdiv(value_dim, block_v), heads, batch, layers),
        [
            (state, of_state),
            (_frames(conv_hist), pl.BlockSpec((1, None, width - 1, channels), lambda i, h, b, n: (n, b, 0, 0))),
            (xc, pl.BlockSpec((None, tokens, None, channels), lambda i, h, b, n: (n, 0, b, 0))),
            (conv_weight, pl.BlockSpec((1, channels, width), lambda i, h, b, n: (n, 0, 0))),
            (beta, of_head),
            (g, of_head),
            (counts, pl.BlockSpec((None,), lambda i, h, b, n: (b,))),
        ],
        _Result(_struct(state), of_state),
        warps,
        "delta_window_fold",
        interpret,
        in_place=True,
    )
    if width == 1:
        return state, conv_hist
    block = min(_HISTORY_BLOCK, next_power_of_two(channels))
    of_frames = pl.BlockSpec((None, None, width - 1, block), lambda i, b, n: (n, b, 0, i))
    conv_hist = _launch(
        functools.partial(history_kernel, channels=channels),
        (pl.cdiv(channels, block), batch, layers),
        [
            (conv_hist, of_frames),
            (xc, pl.BlockSpec((None, tokens, None, block), lambda i, b, n: (n, 0, b, i))),
            (counts, pl.BlockSpec((None,), lambda i, b, n: (b,))),
            (state, ANYWHERE),
        ],
        _Result(_struct(conv_hist), of_frames),
        _HISTORY_WARPS,
        "delta_window_history",
        interpret,
        in_place=True,
    )
    return state, conv_hist


def _check_window(state, conv_hist, xc, conv_weight, beta, g, *, key_heads, interpret, lead=()):
    """T, B, H, K and V of operands that the kernels can take; xc and the gates have the leading axes `lead`."""
    if xc.ndim != len(lead) + 3:
        axes = "[L, T, B, C]" if lead else "[T, B, C]"
        raise ValueError(f"xc must have the axes {axes}, got shape {list(xc.shape)}")
    if conv_weight.ndim != 3 or 0 in conv_weight.shape:
        raise ValueError(f"conv_weight must have the axes [L, C, W], none empty, got shape {list(conv_weight.shape)}")
    tokens = xc.shape[-3]
    if reason := supported(state, tokens, interpret=interpret):
        raise NotImplementedError(f"{reason}; use the XLA implementation")
    layers, batch, heads, key_dim, value_dim = state.shape
    channels = 2 * check_key_heads(heads, key_heads, f"{key_heads=}") * key_dim + heads * value_dim
    check_operand("xc", xc, (*lead, tokens, batch, channels))
    check_operand("conv_weight", conv_weight, (conv_weight.shape[0], channels, conv_weight.shape[2]))
    check_operand("conv_hist", conv_hist, (layers, batch, conv_weight.shape[2] - 1, channels))
    for name, gate in (("beta", beta), ("g", g)):
        check_operand(name, gate, (*lead, tokens, batch, heads))
    return tokens, batch, heads, key_dim, value_dim


def _tiles(kernel, state, tiles):
    """Rows and columns of S in a program, powers of two both, and its warps."""
    _, batch, heads, key_dim, value_dim = state.shape
    tiles = tiles or choose_tiles(kernel, device_kind(), key_dim, value_dim, batch * heads)
    return tile_sizes(tiles, key_dim, value_dim)


def _frames(conv_hist):
    """The history as kernels take it: None where W = 1 leaves it empty."""
    return conv_hist if conv_hist.size else None


def _struct(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _output(rows, index, shape, block_v, split, limbs):
    """An output [T, B, H, V] in the form asked for, with the blocks that programs write.

    A block has `rows` of T and B, one head and block_v columns; `index` maps a program to its place on all four axes.
    """

    def form(before, columns, block, dtype):
        spec = pl.BlockSpec((*before, *rows, None, block), lambda *at: (*(0,) * len(before), *index(*at)))
        return _Result(jax.ShapeDtypeStruct((*before, *shape[:-1], columns), dtype), spec)

    if split is None:
        return WindowOutput(onn=form((), shape[-1], block_v, jnp.float32))
    return WindowOutput(
        digits=form((limbs,), shape[-1], block_v, jnp.int8),
        x_scales=form((), shape[-1] // GROUP, pl.cdiv(block_v, GROUP), jnp.float32),
    )


def _launch(kernel, grid, operands, out, warps, name, interpret, *, in_place=False):
    """A kernel on operands, each a tree of arrays or None with its blocks; `out` is a tree of results.

    The kernel takes the refs of all operands and the tree of the results'. `in_place`: the last results are the memory
    of the arrays of the first operand.
    """
    first = len(jax.tree.leaves(operands[0][0])) if in_place else 0
    results, tree = jax.tree.flatten(out, is_leaf=lambda node: isinstance(node, _Result))

    def body(*refs: Any):
        kernel(*refs[: -len(results)], jax.tree.unflatten(tree, refs[-len(results) :]))

    made = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[None if array is None else spec for array, spec in operands],
        out_specs=[result.spec for result in results],
        out_shape=[result.shape for result in results],
        input_output_aliases={i: len(results) - first + i for i in range(first)},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*[array for array, _ in operands])
    return jax.tree.unflatten(tree, made)
