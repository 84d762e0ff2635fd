"""Qwen3-Next's interleaved input projections, as row ranges of the four canonical ones.

Two tensors hold the four projections, one block of rows per key head g (R = H / G value heads share it):

    in_proj_qkvz  block g = [q: K | k: K | v: R·V | z: R·V]
    in_proj_ba    block g = [b: R | a: R]

Canonical rows are head-major, value head h = g·R + r, so each canonical projection is a concatenation of row ranges.
"""

from checkpoints.hf_config import GdnDims

__all__ = ["deinterleaved_rows", "interleaved_shapes"]


def interleaved_shapes(dims: GdnDims) -> dict[str, tuple[int, ...]]:
    """Shape of the two interleaved tensors: [2·G·K + 2·H·V, D] and [2·H, D]."""
    return {
        "in_proj_qkvz.weight": (dims.key_heads * sum(_qkvz_block(dims)), dims.hidden),
        "in_proj_ba.weight": (dims.key_heads * sum(_ba_block(dims)), dims.hidden),
    }


def deinterleaved_rows(dims: GdnDims) -> dict[str, tuple[str, list[range]]]:
    """For each canonical projection: the interleaved tensor that holds it, and its row ranges there in order."""
    q, k, v, z = (_rows(dims.key_heads, _qkvz_block(dims), field) for field in range(4))
    b, a = (_rows(dims.key_heads, _ba_block(dims), field) for field in range(2))
    return {
        "in_proj_qkv.weight": ("in_proj_qkvz.weight", q + k + v),
        "in_proj_z.weight": ("in_proj_qkvz.weight", z),
        "in_proj_b.weight": ("in_proj_ba.weight", b),
        "in_proj_a.weight": ("in_proj_ba.weight", a),
    }


def _qkvz_block(dims: GdnDims) -> tuple[int, ...]:
    values = dims.value_heads // dims.key_heads * dims.value_dim
    return dims.key_dim, dims.key_dim, values, values


def _ba_block(dims: GdnDims) -> tuple[int, ...]:
    ratio = dims.value_heads // dims.key_heads
    return ratio, ratio


def _rows(key_heads: int, block: tuple[int, ...], field: int) -> list[range]:
    """The rows of one field of the block, for every key head."""
    start = sum(block[:field])
    heads = range(0, key_heads * sum(block), sum(block))
    return [range(first + start, first + start + block[field]) for first in heads]
