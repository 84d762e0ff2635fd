"""The host functions: what they take, what they refuse, and the calls they build."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.delta_step.kernel import LayerStep, delta_layer_step_kernel, delta_step_kernel
from pallas_kernels.delta_step.tuning import Tiles, choose_tiles
from pallas_kernels.device import device_kind, gpu_objection
from pallas_kernels.limbs.host import GROUP, Split
from pallas_kernels.operands import check_operand, next_power_of_two

__all__ = ["LayerStep", "check_key_heads", "delta_layer_step", "delta_step", "supported", "tile_sizes"]

MAX_HEAD_DIM = 256
"""The largest K and V for which the default tiles are known not to spill registers."""
_MAX_PROGRAMS = 2**31 - 1


def supported(state: Any, *, interpret: bool = False) -> str | None:
    """Why the kernels cannot take this state [L, B, H, K, V] (anything with a shape and a dtype), or None if they can.

    Shapes of the other operands follow from it.
    """
    if len(state.shape) != 5:
        return f"state must have the axes [L, B, H, K, V], got shape {list(state.shape)}"
    if state.dtype != jnp.float32:
        return f"state must be float32, got {state.dtype}"
    if 0 in state.shape:
        return f"every axis of state [L, B, H, K, V] must be at least 1, got shape {list(state.shape)}"
    _, batch, heads, key_dim, value_dim = state.shape
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        return f"K and V must be at most {MAX_HEAD_DIM}, got K = {key_dim}, V = {value_dim}"
    if batch * heads * value_dim > _MAX_PROGRAMS:
        return f"B·H·V must be at most {_MAX_PROGRAMS}, got {batch * heads * value_dim} for shape {list(state.shape)}"
    return None if interpret else gpu_objection()


def delta_step(
    state: jax.Array,
    layer: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    *,
    active: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One token of the gated delta rule on one layer of a stacked state, in place.

    S ← S · exp(g);  u = beta · (v - Sᵀk);  S ← S + k uᵀ;  o = Sᵀq, with the updated S = state[layer, b, h].

    The state that goes in and the one that comes out are the same memory once the caller donates it; other layers are
    never touched. A layer out of range, which a traced index cannot reveal beforehand, gives o = NaN and leaves the
    state as it is. The same program gives the same bits, and a row's do not depend on the other rows. `vmap` adds an
    axis to the grid; there is no derivative.

    Args:
        state: float32 [L, B, H, K, V].
        layer: int32 [1], read by the kernel.
        q: float32 [B, G, K], normalised and scaled; value head h uses key head h // (H / G).
        k: float32 [B, G, K], normalised.
        v: float32 [B, H, V].
        beta: float32 [B, H], write strength.
        g: float32 [B, H], log decay.
        active: bool or int32 [B]; where it is false o is 0 and the state stays untouched, bit for bit. None: all true.
        tiles: what one program takes; None chooses for the default device.
        interpret: run the kernel's body in plain XLA, on any device.

    Returns:
        o [B, H, V] and the next state.

    Raises:
        ValueError: shapes that do not fit together, or tiles that are not powers of two.
        NotImplementedError: sizes or dtypes beyond the kernel, as `supported` words them.
    """
    batch, heads, key_dim, value_dim = _check_state(state, interpret)
    key_heads = q.shape[1] if q.ndim == 3 else 0
    check_operand("layer", layer, (1,), jnp.int32)
    check_operand("k", k, (batch, check_key_heads(heads, key_heads, f"q of shape {list(q.shape)}"), key_dim))
    check_operand("q", q, k.shape)
    check_operand("v", v, (batch, heads, value_dim))
    _check_gates(beta, g, active, batch, heads)
    keys, block_v, warps = _tiles("delta_step", state, tiles)

    ratio = heads // key_heads
    of_key_head = pl.BlockSpec((None, None, keys), lambda i, h, b: (b, h // ratio, 0))
    of_columns = pl.BlockSpec((None, None, block_v), lambda i, h, b: (b, h, i))
    of_head = pl.BlockSpec((None, None), lambda i, h, b: (b, h))
    of_state = pl.BlockSpec((state.shape[0], None, None, keys, block_v), lambda i, h, b: (0, b, h, 0, i))
    o, state = pl.pallas_call(
        functools.partial(delta_step_kernel, key_dim=key_dim, value_dim=value_dim),
        grid=(pl.cdiv(value_dim, block_v), heads, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda i, h, b: (0,)),
            of_state,
            of_key_head,
            of_key_head,
            of_columns,
            of_head,
            of_head,
            None if active is None else pl.BlockSpec((None,), lambda i, h, b: (b,)),
        ],
        out_specs=[of_columns, of_state],
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={1: 1},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="delta_step",
    )(layer, state, q, k, v, beta, g, active)
    return o, state


def delta_layer_step(
    state: jax.Array,
    layer: jax.Array,
    xcv: jax.Array,
    z: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    norm_weight: jax.Array,
    *,
    key_heads: int,
    qk_eps: float,
    eps: float,
    active: jax.Array | None = None,
    weight_layer: jax.Array | None = None,
    split: Split | None = None,
    limbs: int = 0,
    keep: bool = False,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> LayerStep:
    """`delta_step` with the stages on either side: from the convolution's output to the output projection's input.

    q, k, v are the parts of xcv in this order, head-major; q and k become x · rsqrt(sum(x²) + qk_eps), q also · K^-1/2;
    then the delta rule; then o · rsqrt(mean(o²) + eps) · norm_weight · silu(z) over V.

    State, layers out of range, inactive rows and errors are those of `delta_step`.

    Args:
        state: float32 [L, B, H, K, V].
        layer: int32 [1], read by the kernel.
        xcv: float32 [B, C], C = 2GK + HV, after convolution and SiLU.
        z: float32 [B, H, V], raw gate of the output norm.
        beta: float32 [B, H], write strength.
        g: float32 [B, H], log decay.
        norm_weight: float32 [V], or a stack [Lw, V] of which `weight_layer` names one.
        key_heads: G.
        qk_eps: epsilon of the q/k norm, on the sum of squares.
        eps: epsilon of the gated norm, on the mean of squares.
        active: bool or int32 [B]; where it is false the output is 0 and the state untouched. None: all true.
        weight_layer: int32 [1], read by the kernel; one below 0 or beyond Lw - 1 is taken as 0 or Lw - 1.
        split: how to write the output as limbs for a 4-bit product, traced into the kernel; it must map zeros to zeros
            and NaN to NaN scales. Needs V to be a multiple of 32. The output then comes as digits and x_scales.
        limbs: how many `split` gives.
        keep: also keep q, k and the delta rule's output (undefined where a row rests), and onn beside its limbs.
        tiles: what one program takes; it works through a whole head, block_v columns at a time.
        interpret: run the kernel's body in plain XLA, on any device.

    Returns:
        The next state and the output: see `LayerStep`.
    """
    batch, heads, key_dim, value_dim = _check_state(state, interpret)
    check_operand("layer", layer, (1,), jnp.int32)
    check_key_heads(heads, key_heads, f"{key_heads=}")
    channels = 2 * key_heads * key_dim + heads * value_dim
    check_operand("xcv", xcv, (batch, channels))
    check_operand("z", z, (batch, heads, value_dim))
    if weight_layer is None:
        check_operand("norm_weight", norm_weight, (value_dim,))
        norm_weight, weight_layer = norm_weight[None], jnp.zeros((1,), jnp.int32)
    check_operand("norm_weight", norm_weight, (*norm_weight.shape[:1], value_dim))
    check_operand("weight_layer", weight_layer, (1,), jnp.int32)
    _check_gates(beta, g, active, batch, heads)
    keys, block_v, warps = _tiles("delta_layer_step", state, tiles)
    if split is not None:
        if value_dim % GROUP:
            raise NotImplementedError(f"limbs of the output need V to be a multiple of {GROUP}, got V = {value_dim}")
        block_v = max(block_v, GROUP)

    columns = next_power_of_two(value_dim)
    of_values = pl.BlockSpec((None, None, columns), lambda h, b: (b, h, 0))
    of_head = pl.BlockSpec((None, None), lambda h, b: (b, h))
    of_state = pl.BlockSpec((state.shape[0], None, None, keys, columns), lambda h, b: (0, b, h, 0, 0))
    of_key_head = pl.BlockSpec((None, None, keys), lambda h, b: (b, h // (heads // key_heads), 0))

    def output(wanted, shape, dtype, spec):
        return (jax.ShapeDtypeStruct(shape, dtype), spec) if wanted else (None, None)

    groups = -(-columns // GROUP)
    values, key_values = (batch, heads, value_dim), (batch, key_heads, key_dim)
    shapes, specs = zip(
        output(True, state.shape, state.dtype, of_state),
        output(split is None or keep, values, jnp.float32, of_values),
        output(
            split is not None,
            (limbs, batch, heads, value_dim),
            jnp.int8,
            pl.BlockSpec((limbs, None, None, columns), lambda h, b: (0, b, h, 0)),
        ),
        output(
            split is not None,
            (batch, heads, value_dim // GROUP),
            jnp.float32,
            pl.BlockSpec((None, None, groups), lambda h, b: (b, h, 0)),
        ),
        output(keep, values, jnp.float32, of_values),
        output(keep, key_values, jnp.float32, of_key_head),
        output(keep, key_values, jnp.float32, of_key_head),
        strict=True,
    )
    flat, tree = jax.tree.flatten(LayerStep(*shapes))

    def kernel(*refs: Any):
        out = jax.tree.unflatten(tree, refs[-len(flat) :])
        delta_layer_step_kernel(
            *[*refs[: -len(flat)], out],
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            block_v=block_v,
            qk_eps=qk_eps,
            eps=eps,
            split=split,
        )

    results = pl.pallas_call(
        kernel,
        grid=(heads, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda h, b: (0,)),
            of_state,
            pl.BlockSpec((None, channels), lambda h, b: (b, 0)),
            of_values,
            of_head,
            of_head,
            pl.BlockSpec((norm_weight.shape[0], columns), lambda h, b: (0, 0)),
            pl.BlockSpec((1,), lambda h, b: (0,)),
            None if active is None else pl.BlockSpec((None,), lambda h, b: (b,)),
        ],
        out_specs=[spec for spec in specs if spec is not None],
        out_shape=flat,
        input_output_aliases={1: 0},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="delta_layer_step",
    )(layer, state, xcv, z, beta, g, norm_weight, weight_layer, active)
    step = jax.tree.unflatten(tree, results)
    if split is None:
        return step
    return step._replace(
        digits=step.digits.reshape(limbs, batch, heads * value_dim),
        x_scales=step.x_scales.reshape(batch, heads * value_dim // GROUP),
    )


def _check_state(state, interpret):
    """B, H, K and V of a state that the kernels can take."""
    if reason := supported(state, interpret=interpret):
        raise NotImplementedError(f"{reason}; use the XLA implementation")
    return state.shape[1:]


def check_key_heads(heads, key_heads, source):
    """G, of which H must be a multiple; `source` says in an error where G comes from."""
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"value heads must be a multiple of key heads G >= 1, got H = {heads} with {source}")
    return key_heads


def _check_gates(beta, g, active, batch, heads):
    check_operand("beta", beta, (batch, heads))
    check_operand("g", g, (batch, heads))
    if active is not None:
        check_operand("active", active, (batch,), jnp.bool_, jnp.int32)


def _tiles(kernel, state, tiles):
    """`tile_sizes` of the tiles given, or of those chosen."""
    _, batch, heads, key_dim, value_dim = state.shape
    if tiles is None:
        tiles = choose_tiles(kernel, device_kind(), key_dim, value_dim, batch * heads)
    return tile_sizes(tiles, key_dim, value_dim)


def tile_sizes(tiles: Tiles, key_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Rows and columns of S in a program, powers of two both, and its warps.

    Raises:
        ValueError: tiles that are not powers of two, or wider than a head.
    """
    columns = next_power_of_two(value_dim)
    for name, value, most in (("block_v", tiles.block_v, columns), ("warps", tiles.warps, 32)):
        if not 1 <= value <= most or value & (value - 1):
            raise ValueError(f"tiles.{name} must be a power of two of at most {most}, got {value}")
    return next_power_of_two(key_dim), tiles.block_v, tiles.warps
