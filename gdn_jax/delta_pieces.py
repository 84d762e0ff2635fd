"""One long sequence shared out among processors that its heads leave idle: pieces of it at the same time, exactly.

What a piece of tokens makes of S is affine, S' = M S + N, with M [K, K] and N [K, V] that do not depend on S. Two
passes, in which the pieces are rows of a batch:

    1. M and N of every piece: its tokens from S = [1 | 0], of which the K columns of the first part write nothing
    2. S at the start of every piece, from one piece to the next; then all pieces at once from there

The columns of S never meet, so the first pass is the rule itself with K more columns. All is algebra, nothing is
dropped; sums are rounded in another order than by one pass. A full reset within a piece makes M zero, exactly.

The work is 2 + K / V times that of one pass. It pays where a pass leaves most processors idle. A form that takes so
many columns and no more must take K + V of them; `ops.choose_delta_chunks` sees to that.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from gdn_jax.axes import Array, Float32
from gdn_jax.chunks import CHUNK
from gdn_jax.integers import positive_int
from gdn_jax.products import einsum

__all__ = ["in_pieces", "number_of_pieces", "shapes_of_v"]


def number_of_pieces(tokens: int, pieces: int) -> int:
    """How many pieces T tokens are cut into where `pieces` are asked for: of whole chunks but for the last, and alike.

    Raises:
        TypeError: `pieces` is not an integer. ValueError: it is below 1.
    """
    return max(1, -(-tokens // _length(tokens, pieces)))


def shapes_of_v(shape: tuple[int, ...], key_dim: int, pieces: int) -> tuple[tuple[int, ...], ...]:
    """The shapes [c, P·B, H, columns] of every v that `form` is given for a v of shape [T, B, H, V].

    Raises:
        TypeError, ValueError: as `number_of_pieces`.
    """
    tokens, batch, heads, value_dim = shape
    count = number_of_pieces(tokens, pieces)
    if count == 1:
        return (shape,)
    rows = _length(tokens, pieces), count * batch, heads
    return (*rows, key_dim + value_dim), (*rows, value_dim)


def _length(tokens: int, pieces: int) -> int:
    """Tokens of a piece."""
    return max(1, -(-tokens // (positive_int("pieces", pieces) * CHUNK))) * CHUNK


def in_pieces(form: Any, pieces: int) -> Any:
    """`form(s, q, k, v, beta, g)`, a chunked form of clean operands, over so many pieces of the sequence at a time.

    There are `number_of_pieces`, so never more than chunks; the last may be shorter. `form` must take a v of every one
    of `shapes_of_v`.

    Raises:
        TypeError, ValueError: as `number_of_pieces`.
    """
    pieces = positive_int("pieces", pieces)

    def split(
        s: Float32[Array, "B H K V"], q: Array, k: Array, v: Array, beta: Array, g: Array
    ) -> tuple[Float32[Array, "T B H V"], Float32[Array, "B H K V"]]:
        tokens = v.shape[0]
        length, count = _length(tokens, pieces), number_of_pieces(tokens, pieces)
        if count == 1:
            return form(s, q, k, v, beta, g)
        of_pieces = [_as_rows(x, count, length) for x in (q, k, v, beta, g)]
        starts = _starts(form, s, of_pieces, count)
        o, ends = form(starts.reshape(-1, *s.shape[1:]), *of_pieces)
        o = jnp.swapaxes(o.reshape(length, count, *v.shape[1:]), 0, 1).reshape(-1, *v.shape[1:])
        return o[:tokens], ends.reshape(count, *s.shape)[-1]

    return split


def _as_rows(x: Array, count: int, length: int) -> Array:
    """[T, B, …] -> [c, P·B, …]: row p·B + b is piece p of row b. Tokens behind the end write and decay nothing."""
    padded = jnp.pad(x, [(0, count * length - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return jnp.swapaxes(padded.reshape(count, length, *x.shape[1:]), 0, 1).reshape(length, -1, *x.shape[2:])


def _starts(form: Any, s: Float32[Array, "B H K V"], of_pieces: list[Array], count: int) -> Array:
    """S at the start of every piece, [P, B, H, K, V]."""
    q, k, v, beta, g = of_pieces
    batch, heads, key_dim, value_dim = s.shape
    unit = jnp.broadcast_to(jnp.eye(key_dim, dtype=s.dtype), (count * batch, heads, key_dim, key_dim))
    nothing = jnp.zeros((*v.shape[:-1], key_dim), v.dtype)
    _, ends = form(
        jnp.concatenate([unit, jnp.zeros((*unit.shape[:-1], value_dim), s.dtype)], axis=-1),
        *(q, k, jnp.concatenate([nothing, v], axis=-1), beta, g),
    )
    ends = ends.reshape(count, batch, *ends.shape[1:])

    def onward(s, piece):
        return einsum("bhij,bhjv->bhiv", piece[..., :key_dim], s) + piece[..., key_dim:], s

    return lax.scan(onward, s, ends)[1]
