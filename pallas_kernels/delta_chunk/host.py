"""The host function: what it takes, what it refuses, and which form it launches."""

import jax
import jax.numpy as jnp

from pallas_kernels.delta_chunk.mosaic import MosaicTile, launch_mosaic, mosaic_unsupported
from pallas_kernels.delta_chunk.triton import launch_triton, triton_unsupported
from pallas_kernels.delta_chunk.tuning import TritonTile
from pallas_kernels.device import gpu_objection, tensor_core_objection
from pallas_kernels.operands import check_operand

__all__ = ["PRECISIONS", "choose_backend", "delta_chunk", "supported"]

PRECISIONS = ("exact", "bf16")
_BACKENDS = ("triton", "mosaic")
_TILES = {"triton": TritonTile, "mosaic": MosaicTile}


def delta_chunk(
    s: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    *,
    precision: str,
    backend: str | None = None,
    tile: TritonTile | MosaicTile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """T tokens of the gated delta rule, 64 at a time: o of every token, and S after the last.

    S ← S · exp(g_t);  u = beta_t · (v_t - Sᵀk_t);  S ← S + k_t uᵀ;  o_t = Sᵀq_t, with the updated S, per value head.

    "exact" is float32 in quality throughout. "bf16" rounds the operands of matrix products to bfloat16 and sums in
    float32; decays, the triangular system and S are float32 in both. The same program gives the same bits, and a row's
    do not depend on what other rows hold. Operands must be finite, but that g may be -inf, a full reset; keys have a
    length of at most 1 and beta lies in 0 … 1, or S may overflow. It also does where an entry of S is above 2^108 at
    "exact", 2^124 at "bf16": o and S are then NaN in the whole row, behind a reset too. Errors are relative to the
    largest value of a chunk (README.md). Padding is k = v = beta = g = 0, which neither writes nor decays. There is no
    derivative and no `vmap`.

    Args:
        s: float32 [B, H, K, V].
        q: float32 or bfloat16 [T, B, G, K], T ≥ 1, normalised and scaled; value head h uses key head h // (H / G).
        k: like q, normalised.
        v: of q's dtype [T, B, H, V].
        beta: float32 [T, B, H], write strength.
        g: float32 [T, B, H], log decay, at most 0.
        precision: "exact" or "bf16".
        backend: "triton" or "mosaic" (tensor cores of sm_90); chosen unless given.
        tile: how `scan` cuts the work; chosen unless given.
        interpret: run the Triton form's bodies in plain XLA, on any device.

    Returns:
        o [T, B, H, V], float32 at "exact" and of v's dtype at "bf16", and S float32 [B, H, K, V].

    Raises:
        ValueError: shapes that do not fit together, or a tile that is not one.
        NotImplementedError: sizes, dtypes, precisions or a device that the form does not take; `supported` says so
            beforehand.
    """
    sizes = _check_shapes(s, q, k, v, beta, g)
    _check_dtypes(s, q, k, v, beta, g)
    backend = choose_backend(*sizes, precision, interpret=interpret) if backend is None else backend
    if reason := supported(*sizes, precision, backend=backend, interpret=interpret):
        raise NotImplementedError(f"delta_chunk: {reason}; use the XLA implementation")
    tile = _TILES[backend]() if tile is None else tile
    if not isinstance(tile, _TILES[backend]):
        raise ValueError(f"backend {backend!r} takes a {_TILES[backend].__name__}, got {tile!r}")
    if isinstance(tile, MosaicTile):
        return launch_mosaic(s, q, k, v, beta, g, precision=precision, tile=tile)
    _check_tile(tile)
    return launch_triton(s, q, k, v, beta, g, precision=precision, tile=tile, interpret=interpret)


def choose_backend(
    batch: int,
    tokens: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    precision: str,
    *,
    interpret: bool = False,
) -> str:
    """The form for operands of these sizes: tensor cores programmed directly, where that is possible."""
    sizes = batch, tokens, key_heads, value_heads, key_dim, value_dim
    return "triton" if supported(*sizes, precision, backend="mosaic", interpret=interpret) else "mosaic"


def supported(
    batch: int,
    tokens: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    precision: str,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> str | None:
    """None where `delta_chunk` takes operands of these sizes at this precision, by `backend` or any; else why not."""
    if backend not in (None, *_BACKENDS):
        return f"the backend must be {' or '.join(_BACKENDS)}, got {backend!r}"
    if precision not in PRECISIONS:
        return f"the precision must be {' or '.join(PRECISIONS)}, got {precision!r}"
    sizes = batch, tokens, key_heads, value_heads, key_dim, value_dim
    if min(sizes) < 1:
        return f"B, T, G, H, K and V must be at least 1, got {', '.join(map(str, sizes))}"
    if backend is None:
        backend = choose_backend(*sizes, precision, interpret=interpret)
    if backend == "triton":
        return triton_unsupported(*sizes, precision) or (None if interpret else gpu_objection())
    if interpret:
        return "the tensor core form cannot be interpreted; use backend='triton'"
    return mosaic_unsupported(*sizes, precision) or tensor_core_objection()


def _check_shapes(s, q, k, v, beta, g) -> tuple[int, int, int, int, int, int]:
    """B, T, G, H, K and V, on which all operands agree."""
    if q.ndim != 4:
        raise ValueError(f"q must have the axes [T, B, G, K], got shape {list(q.shape)}")
    if v.ndim != 4:
        raise ValueError(f"v must have the axes [T, B, H, V], got shape {list(v.shape)}")
    tokens, batch, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"value heads must be a multiple of key heads, got H = {heads} and G = {key_heads}")
    check_operand("k", k, q.shape, k.dtype)
    check_operand("v", v, (tokens, batch, heads, value_dim), v.dtype)
    check_operand("s", s, (batch, heads, key_dim, value_dim), s.dtype)
    check_operand("beta", beta, (tokens, batch, heads), beta.dtype)
    check_operand("g", g, (tokens, batch, heads), g.dtype)
    return batch, tokens, key_heads, heads, key_dim, value_dim


def _check_dtypes(s, q, k, v, beta, g):
    check_operand("q", q, q.shape, jnp.float32, jnp.bfloat16)
    for name, array in (("k", k), ("v", v)):
        check_operand(name, array, array.shape, q.dtype)
    for name, array in (("s", s), ("beta", beta), ("g", g)):
        check_operand(name, array, array.shape)


def _check_tile(tile: TritonTile):
    bounds = {"block_v": (16, 128), "warps": (1, 16), "stages": (1, 8)}
    for name, (least, most) in bounds.items():
        value = getattr(tile, name)
        if not least <= value <= most or (name != "stages" and value & (value - 1)):
            power = "" if name == "stages" else "a power of two "
            raise ValueError(f"{name} of a tile must be {power}from {least} to {most}, got {value}")
